// Recurrent layers (recurrent.hpp).

#include <clattn/recurrent.hpp>

#include "tensors.hpp"

namespace clattn::python {

namespace {

void bind_metadata(nb::module_& module) {
  using L = DeviceList;
  Record<L> list(module, "DeviceList", "A list in a Buffer, and the elements in front of it.");
  list.def_rw("buffer", &L::buffer).def_rw("offset", &L::offset);
  using M = RecurrentMetadata;
  Record<M> metadata(module, "RecurrentMetadata",
                     "The requests of a step of recurrent layers, on the device. An engine may\n"
                     "fill it in itself; its lists are not checked then.");
  metadata.def_rw("query_start_loc", &M::query_start_loc, "int32 [num_reqs + 1].")
      .def_rw("state_indices", &M::state_indices, "int32 [num_reqs, state_columns].")
      .def_rw("has_initial_state", &M::has_initial_state, "uint8 [num_reqs], if any.")
      .def_rw("num_accepted_tokens", &M::num_accepted_tokens, "int32 [num_reqs], if any.")
      .def_rw("num_reqs", &M::num_reqs)
      .def_rw("state_columns", &M::state_columns)
      .def_rw("null_block_id", &M::null_block_id, "Negative: none.")
      .def_rw("num_tokens", &M::num_tokens, "Rows of tensors.")
      .def_rw("max_query_len", &M::max_query_len, "Of requests without drafts, or more.")
      .def_rw("max_state_index", &M::max_state_index, "Negative: unknown.");
  using B = RecurrentMetadataBuilder;
  nb::class_<B>(module, "RecurrentMetadataBuilder",
                "Checks the lists of a step and brings them to the device. What build() returned\n"
                "last holds until the next one.")
      .def(nb::init<const Context&>(), "context"_a)
      .def(
          "build",
          [](B& self, const Queue& queue, nb::handle query_start_loc, nb::handle state_indices,
             nb::handle has_initial_state, nb::handle num_accepted_tokens,
             std::int32_t null_block_id) {
            const auto starts = numbers<std::int32_t>(query_start_loc, "query_start_loc");
            const auto pages = numbers<std::int32_t, 2>(state_indices, "state_indices");
            const auto initial =
                optional_numbers<std::uint8_t>(has_initial_state, "has_initial_state");
            const auto accepted =
                optional_numbers<std::int32_t>(num_accepted_tokens, "num_accepted_tokens");
            const RecurrentBatch batch{
                span_of(starts),  span_of(pages),    static_cast<std::int32_t>(pages.shape(1)),
                span_of(initial), span_of(accepted), null_block_id};
            return without_gil([&] { return self.build(queue, batch); });
          },
          "queue"_a, "query_start_loc"_a, "state_indices"_a, nb::kw_only(),
          "has_initial_state"_a = nb::none(), "num_accepted_tokens"_a = nb::none(),
          "null_block_id"_a = -1,
          "state_indices: pages of states [requests, 1 + drafts]; negative, and null_block_id: "
          "none.\nhas_initial_state: bool [requests], None: all continue. num_accepted_tokens: of\n"
          "requests with drafts, negative for others.",
          nb::keep_alive<0, 1>());
}

void bind_shapes(nb::module_& module) {
  module.def(
      "gated_delta_net_state_shape",
      [](std::int32_t num_k_heads, std::int32_t num_v_heads, std::int32_t head_k_dim,
         std::int32_t head_v_dim, std::int32_t conv_width, std::int32_t num_spec,
         nb::handle conv_dtype, nb::handle state_dtype) {
        return gated_delta_net_state_shape(num_k_heads, num_v_heads, head_k_dim, head_v_dim,
                                           conv_width, num_spec, parse_dtype(name_of(conv_dtype)),
                                           parse_dtype(name_of(state_dtype)));
      },
      "num_k_heads"_a, "num_v_heads"_a, "head_k_dim"_a, "head_v_dim"_a, "conv_width"_a,
      "num_spec"_a, "conv_dtype"_a, "state_dtype"_a = "f32",
      "StateTensors of a gated delta net's page: convolution, then state.");
  module.def(
      "mamba2_state_shape",
      [](std::int32_t num_heads, std::int32_t head_dim, std::int32_t n_groups,
         std::int32_t state_size, std::int32_t conv_width, std::int32_t num_spec,
         nb::handle conv_dtype, nb::handle state_dtype) {
        return mamba2_state_shape(num_heads, head_dim, n_groups, state_size, conv_width, num_spec,
                                  parse_dtype(name_of(conv_dtype)),
                                  parse_dtype(name_of(state_dtype)));
      },
      "num_heads"_a, "head_dim"_a, "n_groups"_a, "state_size"_a, "conv_width"_a, "num_spec"_a,
      "conv_dtype"_a, "state_dtype"_a = "f32", "StateTensors of a Mamba 2 layer's page.");
  module.def(
      "short_conv_state_shape",
      [](std::int32_t channels, std::int32_t conv_width, nb::handle conv_dtype) {
        return short_conv_state_shape(channels, conv_width, parse_dtype(name_of(conv_dtype)));
      },
      "channels"_a, "conv_width"_a, "conv_dtype"_a, "StateTensors of a short convolution's page.");
}

/// Size `index` of a page's shape, which has `count`.
std::int32_t size_of_page(const StateView& states, std::size_t index, std::size_t count) {
  if (states.tensor.shape.size() != count)
    throw_invalid("states: " + std::to_string(states.tensor.shape.size()) +
                  " dimensions, legal: " + std::to_string(count));
  return static_cast<std::int32_t>(states.tensor.shape[index]);
}

struct ConvTensors {
  nb::handle x, weight, out, bias, in_gate, out_gate;
};

/// `conv` without tensors; with gates a short convolution.
Event run_conv(const Context& context, const Queue& queue, CausalConv1d conv,
               const ConvTensors& given, const StateView& states,
               const RecurrentMetadata& metadata) {
  CallTensors tensors(context, queue);
  conv.channels = size_of_page(states, 1, 2);
  conv.x = tensors.input(given.x, conv.dtype, conv.channels, "x");
  conv.out = tensors.output(given.out, conv.dtype, conv.channels, "out");
  conv.weight = whole(tensors, given.weight, conv.weight_dtype, conv.width, "weight");
  conv.bias = whole(tensors, given.bias, conv.weight_dtype, 1, "bias");
  if (!given.in_gate.is_valid()) {
    return tensors.run(
        [&](Event* event) { causal_conv1d_fn(context, queue, conv, states, metadata, event); });
  }
  const TensorRef in = tensors.input(given.in_gate, conv.dtype, conv.channels, "in_gate");
  const TensorRef out = tensors.input(given.out_gate, conv.dtype, conv.channels, "out_gate");
  return tensors.run(
      [&](Event* event) { short_conv(context, queue, conv, in, out, states, metadata, event); });
}

CausalConv1d conv_of(nb::handle dtype, nb::handle weight_dtype, std::int32_t width,
                     const std::string& activation) {
  CausalConv1d conv;
  conv.dtype = parse_dtype(name_of(dtype));
  conv.weight_dtype = weight_dtype.is_none() ? conv.dtype : parse_dtype(name_of(weight_dtype));
  conv.width = width;
  conv.activation = parse_recurrent_activation(activation);
  return conv;
}

void bind_convolutions(nb::module_& module) {
  for (const char* const name : {"causal_conv1d_fn", "causal_conv1d_update"}) {
    module.def(
        name,
        [](const Context& context, const Queue& queue, nb::handle x, nb::handle weight,
           nb::handle out, const StateView& states, const RecurrentMetadata& metadata,
           nb::handle dtype, nb::handle bias, nb::handle weight_dtype, std::int32_t width,
           const std::string& activation) {
          return run_conv(context, queue, conv_of(dtype, weight_dtype, width, activation),
                          {x, weight, out, bias, {}, {}}, states, metadata);
        },
        "context"_a, "queue"_a, "x"_a, "weight"_a, "out"_a, "states"_a, "metadata"_a, nb::kw_only(),
        "dtype"_a, "bias"_a = nb::none(), "weight_dtype"_a = nb::none(), "width"_a = 4,
        "activation"_a = "silu",
        "Convolution of each channel of x [tokens, channels] by weight [channels, width] into "
        "out,\n"
        "over pages of [rows, channels]. activation: silu or none. weight_dtype: None is dtype.");
  }
  module.def(
      "short_conv",
      [](const Context& context, const Queue& queue, nb::handle x, nb::handle in_gate,
         nb::handle out_gate, nb::handle weight, nb::handle out, const StateView& states,
         const RecurrentMetadata& metadata, nb::handle dtype, nb::handle bias,
         nb::handle weight_dtype, std::int32_t width) {
        return run_conv(context, queue, conv_of(dtype, weight_dtype, width, "none"),
                        {x, weight, out, bias, in_gate, out_gate}, states, metadata);
      },
      "context"_a, "queue"_a, "x"_a, "in_gate"_a, "out_gate"_a, "weight"_a, "out"_a, "states"_a,
      "metadata"_a, nb::kw_only(), "dtype"_a, "bias"_a = nb::none(), "weight_dtype"_a = nb::none(),
      "width"_a = 3, "out = out_gate * conv(in_gate * x).");
}

using RuleCall = void (*)(const Context&, cl_command_queue, const GatedDeltaRule&, const StateView&,
                          const RecurrentMetadata&, Event*);

void bind_rule(nb::module_& module, const char* name, RuleCall call, const char* doc) {
  module.def(
      name,
      [call](const Context& context, const Queue& queue, nb::handle query, nb::handle key,
             nb::handle value, nb::handle out, const StateView& states,
             const RecurrentMetadata& metadata, nb::handle dtype, std::int32_t num_k_heads,
             nb::handle g, nb::handle beta, nb::handle a, nb::handle b, nb::handle a_log,
             nb::handle dt_bias, std::optional<float> gate_lower_bound, nb::handle gate_dtype,
             bool decay_by_channel, const std::string& rule, bool use_qk_l2norm_in_kernel,
             std::optional<float> scale, nb::handle kernel_family) {
        CallTensors tensors(context, queue);
        GatedDeltaRule taken;
        taken.kernel_family = parse_kernel_family(name_of(kernel_family));
        taken.dtype = parse_dtype(name_of(dtype));
        taken.gate_dtype = parse_dtype(name_of(gate_dtype));
        taken.num_k_heads = num_k_heads;
        taken.num_v_heads = size_of_page(states, 0, 3);
        taken.head_v_dim = size_of_page(states, 1, 3);
        taken.head_k_dim = size_of_page(states, 2, 3);
        taken.decay_by_channel = decay_by_channel;
        taken.rule = parse_recurrent_rule(rule);
        taken.use_qk_l2norm_in_kernel = use_qk_l2norm_in_kernel;
        taken.scale = scale;
        taken.gate_lower_bound = gate_lower_bound;
        const std::int64_t keys = std::int64_t{num_k_heads} * taken.head_k_dim;
        const std::int64_t values = std::int64_t{taken.num_v_heads} * taken.head_v_dim;
        const std::int64_t heads = taken.num_v_heads;
        const std::int64_t decays = decay_by_channel ? heads * taken.head_k_dim : heads;
        taken.query = tensors.input(query, taken.dtype, keys, "query");
        taken.key = tensors.input(key, taken.dtype, keys, "key");
        taken.value = tensors.input(value, taken.dtype, values, "value");
        taken.out = tensors.output(out, taken.dtype, values, "out");
        taken.g = tensors.input(g, taken.gate_dtype, decays, "g");
        taken.beta = tensors.input(beta, taken.gate_dtype, heads, "beta");
        taken.a = tensors.input(a, taken.gate_dtype, decays, "a");
        taken.b = tensors.input(b, taken.gate_dtype, heads, "b");
        taken.A_log = tensors.values<float>(a_log, "A_log");
        taken.dt_bias = tensors.values<float>(dt_bias, "dt_bias");
        return tensors.run(
            [&](Event* event) { call(context, queue, taken, states, metadata, event); });
      },
      "context"_a, "queue"_a, "query"_a, "key"_a, "value"_a, "out"_a, "states"_a, "metadata"_a,
      nb::kw_only(), "dtype"_a, "num_k_heads"_a, "g"_a = nb::none(), "beta"_a = nb::none(),
      "a"_a = nb::none(), "b"_a = nb::none(), "A_log"_a = nb::none(), "dt_bias"_a = nb::none(),
      "gate_lower_bound"_a = nb::none(), "gate_dtype"_a = "f32", "decay_by_channel"_a = false,
      "rule"_a = "delta", "use_qk_l2norm_in_kernel"_a = true, "scale"_a = nb::none(),
      "kernel_family"_a = "auto", doc);
}

using MambaCall = void (*)(const Context&, cl_command_queue, const SelectiveStateUpdate&,
                           const StateView&, const RecurrentMetadata&, Event*);

void bind_mamba(nb::module_& module, const char* name, MambaCall call) {
  module.def(
      name,
      [call](const Context& context, const Queue& queue, nb::handle x, nb::handle dt, nb::handle b,
             nb::handle c, nb::handle out, const StateView& states,
             const RecurrentMetadata& metadata, nb::handle a, nb::handle dtype,
             std::int32_t n_groups, nb::handle z, nb::handle d, nb::handle dt_bias,
             bool dt_softplus, float dt_min, float dt_max) {
        CallTensors tensors(context, queue);
        SelectiveStateUpdate update;
        update.dtype = parse_dtype(name_of(dtype));
        update.n_groups = n_groups;
        update.num_heads = size_of_page(states, 0, 3);
        update.head_dim = size_of_page(states, 1, 3);
        update.state_size = size_of_page(states, 2, 3);
        update.dt_softplus = dt_softplus;
        update.dt_min = dt_min;
        update.dt_max = dt_max;
        const std::int64_t values = std::int64_t{update.num_heads} * update.head_dim;
        const std::int64_t keys = std::int64_t{n_groups} * update.state_size;
        update.x = tensors.input(x, update.dtype, values, "x");
        update.dt = tensors.input(dt, update.dtype, update.num_heads, "dt");
        update.B = tensors.input(b, update.dtype, keys, "B");
        update.C = tensors.input(c, update.dtype, keys, "C");
        update.z = tensors.input(z, update.dtype, values, "z");
        update.out = tensors.output(out, update.dtype, values, "out");
        update.A = tensors.values<float>(a, "A");
        update.D = tensors.values<float>(d, "D");
        update.dt_bias = tensors.values<float>(dt_bias, "dt_bias");
        return tensors.run(
            [&](Event* event) { call(context, queue, update, states, metadata, event); });
      },
      "context"_a, "queue"_a, "x"_a, "dt"_a, "B"_a, "C"_a, "out"_a, "states"_a, "metadata"_a,
      nb::kw_only(), "A"_a, "dtype"_a, "n_groups"_a = 1, "z"_a = nb::none(), "D"_a = nb::none(),
      "dt_bias"_a = nb::none(), "dt_softplus"_a = true, "dt_min"_a = 0.0F,
      "dt_max"_a = std::numeric_limits<float>::infinity(),
      "Mamba 2: x [tokens, heads, head_dim], dt [tokens, heads], B and C [tokens, n_groups,\n"
      "state_size]; pages of [heads, head_dim, state_size]; A and D float32 [heads].");
}

void bind_lightning(nb::module_& module) {
  module.def(
      "lightning_attention",
      [](const Context& context, const Queue& queue, nb::handle query, nb::handle key,
         nb::handle value, nb::handle out, const StateView& states,
         const RecurrentMetadata& metadata, nb::handle log_decay, nb::handle dtype, float scale) {
        CallTensors tensors(context, queue);
        LightningAttention attention;
        attention.dtype = parse_dtype(name_of(dtype));
        attention.num_heads = size_of_page(states, 0, 3);
        attention.head_size = size_of_page(states, 1, 3);
        attention.scale = scale;
        const std::int64_t width = std::int64_t{attention.num_heads} * attention.head_size;
        attention.query = tensors.input(query, attention.dtype, width, "query");
        attention.key = tensors.input(key, attention.dtype, width, "key");
        attention.value = tensors.input(value, attention.dtype, width, "value");
        attention.out = tensors.output(out, attention.dtype, width, "out");
        attention.log_decay = tensors.values<float>(log_decay, "log_decay");
        return tensors.run([&](Event* event) {
          lightning_attention(context, queue, attention, states, metadata, event);
        });
      },
      "context"_a, "queue"_a, "query"_a, "key"_a, "value"_a, "out"_a, "states"_a, "metadata"_a,
      nb::kw_only(), "log_decay"_a, "dtype"_a, "scale"_a = 1.0F,
      "S = S e^log_decay + v k^T; out = scale S q. log_decay: float32 [heads].");
}

void bind_norm_and_copy(nb::module_& module) {
  module.def(
      "rms_norm_gated",
      [](const Context& context, const Queue& queue, nb::handle out, nb::handle x,
         nb::handle weight, nb::handle z, std::int64_t num_tokens, std::int32_t num_heads,
         std::int32_t width, nb::handle dtype, nb::handle weight_dtype, float eps,
         const std::string& activation, bool norm_before_gate) {
        CallTensors tensors(context, queue);
        RmsNormGated norm;
        norm.dtype = parse_dtype(name_of(dtype));
        norm.weight_dtype =
            weight_dtype.is_none() ? norm.dtype : parse_dtype(name_of(weight_dtype));
        norm.num_tokens = num_tokens;
        norm.num_heads = num_heads;
        norm.width = width;
        norm.eps = eps;
        norm.activation = parse_recurrent_activation(activation);
        norm.norm_before_gate = norm_before_gate;
        const std::int64_t row = std::int64_t{num_heads} * width;
        norm.x = tensors.input(x, norm.dtype, row, "x");
        norm.z = tensors.input(z, norm.dtype, row, "z");
        norm.out = tensors.output(out, norm.dtype, row, "out");
        norm.weight = whole(tensors, weight, norm.weight_dtype, 1, "weight");
        return tensors.run([&](Event* event) { rms_norm_gated(context, queue, norm, event); });
      },
      "context"_a, "queue"_a, "out"_a, "x"_a, "weight"_a, "z"_a.none(), nb::kw_only(),
      "num_tokens"_a, "num_heads"_a, "width"_a, "dtype"_a, "weight_dtype"_a = nb::none(),
      "eps"_a = 1e-6F, "activation"_a = "silu", "norm_before_gate"_a = true,
      "norm(x) weight act(z), or norm(x act(z)) weight, of rows [num_tokens, num_heads, width].\n"
      "z: None is no gate. weight_dtype: None is dtype.");
  module.def(
      "mamba_copy_blocks",
      [](const Context& context, const Queue& queue, const StateView* conv_states,
         const StateView* states, const RecurrentMetadata& metadata, nb::handle targets) {
        CallTensors tensors(context, queue);
        const DeviceList to{tensors.values<std::int32_t>(targets, "targets"), 0};
        return tensors.run([&](Event* event) {
          mamba_copy_blocks(context, queue, conv_states != nullptr ? *conv_states : StateView{},
                            states != nullptr ? *states : StateView{}, metadata, to, event);
        });
      },
      "context"_a, "queue"_a, "conv_states"_a.none(), "states"_a.none(), "metadata"_a, "targets"_a,
      "Copies the running states of requests to pages targets[r]; negative: none.");
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  bind_metadata(module);
  bind_shapes(module);
  bind_convolutions(module);
  bind_rule(
      module, "fused_recurrent_gated_delta_rule", &fused_recurrent_gated_delta_rule,
      "The gated delta rule, token by token: query and key [tokens, num_k_heads, k], value\n"
      "and out [tokens, heads, v], pages of [heads, v, k]. Gates are g and beta, or a, b and\n"
      "A_log. rule: delta or additive.");
  bind_rule(module, "chunk_gated_delta_rule", &chunk_gated_delta_rule,
            "fused_recurrent_gated_delta_rule() that takes prompts in chunks of tokens.");
  bind_mamba(module, "selective_state_update", &selective_state_update);
  bind_mamba(module, "mamba_chunk_scan_combined", &mamba_chunk_scan_combined);
  bind_lightning(module);
  bind_norm_and_copy(module);
}

}  // namespace clattn::python
