#include <clattn/clattn_recurrent.h>

#include "c_api/recurrent_metadata.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

/// 0 leaves a number to the default.
std::optional<float> number_or_none(double value) {
  return value == 0 ? std::nullopt : std::optional(static_cast<float>(value));
}

/// Pages of the application, which keeps them.
StateView states_of(const ClattnStateView* view, const char* name, std::vector<std::int64_t> shape,
                    const char* dtype, DType otherwise = DType::kF32) {
  const ClattnStateView& given = read(view, name);
  detail::throw_invalid_if(given.buffer == nullptr, "{}: buffer is null, legal: a cl_mem", name);
  return {Buffer::adopt(given.buffer),
          {std::move(shape), dtype_of(dtype, otherwise)},
          given.num_blocks,
          given.offset,
          given.block_stride};
}

}  // namespace

CLATTN_DESTROYS(clattn_recurrent_metadata_destroy, ClattnRecurrentMetadata)

namespace {

const RecurrentMetadata& batch_of(const ClattnRecurrentMetadata* metadata) {
  const std::optional<RecurrentMetadata>& built = held(metadata).built;
  detail::throw_invalid_if(!built,
                           "metadata: it has no batch, legal: one that was built or adopted");
  return *built;
}

template <typename Given, typename Taken>
void take_columns(const Given& given, Taken& taken) {
  take(given.state_columns, taken.state_columns);
  if (given.has_null_block != 0) taken.null_block_id = given.null_block_id;
}

}  // namespace

ClattnResult clattn_recurrent_metadata_create(const ClattnContext* context,
                                              ClattnRecurrentMetadata** metadata) {
  return make_handle(metadata, [&] {
    return HeldMetadata{RecurrentMetadataBuilder(*held(context)), std::nullopt};
  });
}

ClattnResult clattn_recurrent_metadata_build(ClattnRecurrentMetadata* metadata,
                                             const ClattnQueue* queue,
                                             const ClattnRecurrentBatch* batch) {
  return guarded([&] {
    HeldMetadata& to = held(metadata);
    const ClattnRecurrentBatch& given = read(batch, "batch");
    detail::throw_invalid_if(given.num_reqs < 0, "batch: num_reqs is {}, legal: >= 0",
                             given.num_reqs);
    const auto requests = static_cast<std::size_t>(given.num_reqs);
    RecurrentBatch taken;
    take_columns(given, taken);
    detail::throw_invalid_if(taken.state_columns < 1, "batch: state_columns is {}, legal: >= 0",
                             given.state_columns);
    taken.query_start_loc = elements(given.query_start_loc, requests + 1, "batch: query_start_loc");
    taken.state_indices =
        elements(given.state_indices, requests * static_cast<std::size_t>(taken.state_columns),
                 "batch: state_indices");
    if (given.has_initial_state != nullptr)
      taken.has_initial_state = {given.has_initial_state, requests};
    if (given.num_accepted_tokens != nullptr)
      taken.num_accepted_tokens = {given.num_accepted_tokens, requests};
    to.built.reset();
    to.built = to.builder.build(held(queue), taken);
  });
}

ClattnResult clattn_recurrent_metadata_adopt(ClattnRecurrentMetadata* metadata,
                                             const ClattnRecurrentLists* lists) {
  return guarded([&] {
    HeldMetadata& to = held(metadata);
    const ClattnRecurrentLists& given = read(lists, "lists");
    RecurrentMetadata taken;
    take_columns(given, taken);
    taken.num_reqs = given.num_reqs;
    taken.num_tokens = given.num_tokens;
    taken.query_start_loc.buffer = buffer_of(given.query_start_loc);
    taken.state_indices.buffer = buffer_of(given.state_indices);
    taken.has_initial_state.buffer = buffer_of(given.has_initial_state);
    taken.num_accepted_tokens.buffer = buffer_of(given.num_accepted_tokens);
    to.built = taken;
  });
}

ClattnResult clattn_causal_conv1d(const ClattnContext* context, const ClattnQueue* queue,
                                  const ClattnCausalConv1d* conv, const ClattnStateView* states,
                                  const ClattnRecurrentMetadata* metadata) {
  return guarded([&] {
    const ClattnCausalConv1d& given = read(conv, "conv");
    CausalConv1d taken;
    taken.x = tensor_of(given.x);
    taken.out = tensor_of(given.out);
    taken.weight = buffer_of(given.weight);
    taken.bias = buffer_of(given.bias);
    taken.channels = given.channels;
    take(given.width, taken.width);
    taken.dtype = dtype_of(given.dtype, taken.dtype);
    taken.weight_dtype = dtype_of(given.weight_dtype, taken.dtype);
    taken.activation = parse_recurrent_activation(text_or(given.activation, "silu"));
    const std::int64_t rows = given.state_rows != 0 ? given.state_rows : taken.width - 1;
    const StateView pages =
        states_of(states, "states", {rows, given.channels}, nullptr, taken.dtype);
    const bool gates = given.in_gate.buffer != nullptr;
    detail::throw_invalid_if(gates != (given.out_gate.buffer != nullptr),
                             "conv: only {} is given, legal: both gates or none",
                             gates ? "in_gate" : "out_gate");
    if (gates) {
      return short_conv(*held(context), held(queue), taken, tensor_of(given.in_gate),
                        tensor_of(given.out_gate), pages, batch_of(metadata),
                        event_of(given.event));
    }
    causal_conv1d_fn(*held(context), held(queue), taken, pages, batch_of(metadata),
                     event_of(given.event));
  });
}

ClattnResult clattn_gated_delta_rule(const ClattnContext* context, const ClattnQueue* queue,
                                     const ClattnGatedDeltaRule* rule,
                                     const ClattnStateView* states,
                                     const ClattnRecurrentMetadata* metadata) {
  return guarded([&] {
    const ClattnGatedDeltaRule& given = read(rule, "rule");
    GatedDeltaRule taken;
    taken.query = tensor_of(given.query);
    taken.key = tensor_of(given.key);
    taken.value = tensor_of(given.value);
    taken.out = tensor_of(given.out);
    taken.g = tensor_of(given.g);
    taken.beta = tensor_of(given.beta);
    taken.a = tensor_of(given.a);
    taken.b = tensor_of(given.b);
    taken.A_log = buffer_of(given.A_log);
    taken.dt_bias = buffer_of(given.dt_bias);
    taken.gate_lower_bound = number_or_none(given.gate_lower_bound);
    take(given.num_k_heads, taken.num_k_heads);
    take(given.num_v_heads, taken.num_v_heads);
    take(given.head_k_dim, taken.head_k_dim);
    take(given.head_v_dim, taken.head_v_dim);
    taken.dtype = dtype_of(given.dtype, taken.dtype);
    taken.gate_dtype = dtype_of(given.gate_dtype, taken.gate_dtype);
    if (given.kernel_family != nullptr)
      taken.kernel_family = parse_kernel_family(given.kernel_family);
    taken.decay_by_channel = given.decay_by_channel != 0;
    taken.rule = given.additive != 0 ? RecurrentRule::kAdditive : RecurrentRule::kDelta;
    taken.use_qk_l2norm_in_kernel = given.no_qk_l2norm == 0;
    taken.scale = number_or_none(given.scale);
    const StateView pages =
        states_of(states, "states", {taken.num_v_heads, taken.head_v_dim, taken.head_k_dim},
                  given.state_dtype);
    const auto call =
        given.in_chunks != 0 ? chunk_gated_delta_rule : fused_recurrent_gated_delta_rule;
    call(*held(context), held(queue), taken, pages, batch_of(metadata), event_of(given.event));
  });
}

ClattnResult clattn_selective_state_update(const ClattnContext* context, const ClattnQueue* queue,
                                           const ClattnSelectiveStateUpdate* update,
                                           const ClattnStateView* states,
                                           const ClattnRecurrentMetadata* metadata) {
  return guarded([&] {
    const ClattnSelectiveStateUpdate& given = read(update, "update");
    SelectiveStateUpdate taken;
    taken.x = tensor_of(given.x);
    taken.dt = tensor_of(given.dt);
    taken.B = tensor_of(given.B);
    taken.C = tensor_of(given.C);
    taken.z = tensor_of(given.z);
    taken.out = tensor_of(given.out);
    taken.A = buffer_of(given.A);
    taken.D = buffer_of(given.D);
    taken.dt_bias = buffer_of(given.dt_bias);
    take(given.num_heads, taken.num_heads);
    take(given.n_groups, taken.n_groups);
    take(given.head_dim, taken.head_dim);
    take(given.state_size, taken.state_size);
    taken.dtype = dtype_of(given.dtype, taken.dtype);
    taken.dt_softplus = given.no_softplus == 0;
    taken.dt_min = static_cast<float>(given.dt_min);
    taken.dt_max = number_or_none(given.dt_max).value_or(taken.dt_max);
    const StateView pages = states_of(
        states, "states", {taken.num_heads, taken.head_dim, taken.state_size}, given.state_dtype);
    const auto call = given.in_chunks != 0 ? mamba_chunk_scan_combined : selective_state_update;
    call(*held(context), held(queue), taken, pages, batch_of(metadata), event_of(given.event));
  });
}

ClattnResult clattn_lightning_attention(const ClattnContext* context, const ClattnQueue* queue,
                                        const ClattnLightningAttention* attention,
                                        const ClattnStateView* states,
                                        const ClattnRecurrentMetadata* metadata) {
  return guarded([&] {
    const ClattnLightningAttention& given = read(attention, "attention");
    LightningAttention taken;
    taken.query = tensor_of(given.query);
    taken.key = tensor_of(given.key);
    taken.value = tensor_of(given.value);
    taken.out = tensor_of(given.out);
    taken.log_decay = buffer_of(given.log_decay);
    take(given.num_heads, taken.num_heads);
    take(given.head_size, taken.head_size);
    taken.dtype = dtype_of(given.dtype, taken.dtype);
    taken.scale = number_or_none(given.scale).value_or(taken.scale);
    const StateView pages = states_of(
        states, "states", {taken.num_heads, taken.head_size, taken.head_size}, given.state_dtype);
    lightning_attention(*held(context), held(queue), taken, pages, batch_of(metadata),
                        event_of(given.event));
  });
}

ClattnResult clattn_rms_norm_gated(const ClattnContext* context, const ClattnQueue* queue,
                                   const ClattnRmsNormGated* norm) {
  return guarded([&] {
    const ClattnRmsNormGated& given = read(norm, "norm");
    RmsNormGated taken;
    taken.x = tensor_of(given.x);
    taken.z = tensor_of(given.z);
    taken.out = tensor_of(given.out);
    taken.weight = buffer_of(given.weight);
    taken.num_tokens = given.num_tokens;
    take(given.num_heads, taken.num_heads);
    take(given.width, taken.width);
    taken.eps = static_cast<float>(given.eps);
    taken.dtype = dtype_of(given.dtype, taken.dtype);
    taken.weight_dtype = dtype_of(given.weight_dtype, taken.dtype);
    taken.activation = parse_recurrent_activation(text_or(given.activation, "silu"));
    taken.norm_before_gate = given.gate_before_norm == 0;
    rms_norm_gated(*held(context), held(queue), taken, event_of(given.event));
  });
}

ClattnResult clattn_mamba_copy_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                      const ClattnMambaCopy* copy,
                                      const ClattnRecurrentMetadata* metadata) {
  return guarded([&] {
    const ClattnMambaCopy& given = read(copy, "copy");
    StateView conv, states;
    if (given.conv_states != nullptr)
      conv = states_of(given.conv_states, "copy: conv_states",
                       {given.conv_rows, given.conv_channels}, given.conv_dtype, DType::kBF16);
    if (given.states != nullptr)
      states = states_of(given.states, "copy: states", {given.state_elements}, given.state_dtype);
    mamba_copy_blocks(*held(context), held(queue), conv, states, batch_of(metadata),
                      {buffer_of(given.targets), given.targets_offset}, event_of(given.event));
  });
}
