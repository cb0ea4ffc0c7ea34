#include <algorithm>
#include <chrono>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <clattn/compat/paged_attention.hpp>
#include <cstring>
#include <optional>
#include <span>

#include "program/common/attention_call.hpp"
#include "program/common/error.hpp"
#include "program/common/statistics.hpp"

namespace clattn::cli {
namespace {

/// The call's tensors on the device. Contiguous keys and those to be stored are uploaded alike.
struct Inputs {
  Buffer query, key, value, custom_mask, output_scale;
};

/// Fenced outputs. Calls take no offset for the LSE and the fp8 output: only the band after these
/// can be guarded.
struct Outputs {
  GuardedOutput out, lse, fp8;
};

/// The builder's options for one call.
BuilderOptions options_for(const AttentionCall& call) {
  BatchLimits limits = call.plan.limits.value_or(
      BatchLimits{.max_num_reqs = std::max(call.num_reqs(), 1),
                  .max_num_batched_tokens = std::max(call.num_tokens(), 1),
                  .max_model_len = std::max(call.max_seq_len(), 1)});
  limits.num_blocks = call.num_blocks;
  return {.limits = limits,
          .split_policy = call.plan.split_policy,
          .num_splits = call.num_splits,
          .decode_threshold = call.plan.decode_threshold,
          .device_seq_lens = !call.seq_len_bounds.empty(),
          .side_by_side = call.plan.side_by_side};
}

/// Whether the call runs as a cascade: it has a prefix that layer and backend can share.
bool cascades(const AttentionBackend& backend, const AttentionCall& call,
              const DeviceCapabilities& capabilities) {
  if (!call.causal || call.config.contiguous_kv() || call.computed_prefix_len() == 0) return false;
  if (!validate_cascade_configuration(call.config).empty()) return false;
  AttentionConfig level = call.config;
  level.attn_type = AttentionType::kEncoderDecoder;  // a level's queries see all of its keys,
  level.use_spans = level.use_directions = level.use_first_keys = false;  // whatever lists say
  level.use_keep_keys = level.use_trees = false;
  return backend.validate_configuration(level, &capabilities).empty();
}

/// Adds the scale of queries to those of a quantized cache.
void set_query_scale(const Context& context, const Queue& queue, const AttentionCall& call,
                     KVCache& cache) {
  if (call.scales.empty()) return;
  std::vector<float> scales = call.scales;
  scales.push_back(call.query_scale);
  cache.scales = upload(context, queue, scales);
  cache.scales_query = true;
}

/// A call's layer and its cache: its kernels in one pass, those of a cascade, or PagedAttention's
/// over an x-packed cache.
class Layer {
 public:
  /// Says in `outcome` what was chosen.
  Layer(const OnDevice& on, const AttentionCall& call, AttentionOutcome& outcome)
      : on_(on), call_(call) {
    const AttentionConfig& config = call.config;
    const BuilderOptions options = options_for(call);
    if (call.packed) {
      outcome.backend = "paged_attention";
      packed_ = make_paged_attention(*on.context, config);
      builder_ = make_paged_attention_builder(on.context, config, options);
      packed_cache_.emplace(*on.context, on.queue, config, call.num_blocks, call.cache,
                            call.scales);
      return;
    }
    const DeviceCapabilities& device = on.context->capabilities();
    const AttentionBackend& backend = *get_attn_backend(config, &device, call.backend);
    builder_ = backend.make_builder(on.context, config, options);
    outcome.backend = backend.name();
    outcome.layout = choose_layout(backend, call.layout, &device);
    impl_ = backend.make_impl(on.context, config);
    if (cascades(backend, call, device)) {
      cascade_.emplace(on.context, backend, config, options);
      cascade_impl_.emplace(on.context, backend, config);
    }
    if (config.contiguous_kv()) return;
    cache_ = make_cache(*on.context, backend, outcome.layout, spec_of(config), call.num_blocks);
    // Latent rows are stored here, because the call has their two parts in one tensor.
    if (call.num_blocks > 0)
      upload_cache(on.queue, cache_, config.use_mla ? expected_cache(call) : call.cache);
    set_scales(*on.context, on.queue, call.scales, cache_);
    if (config.fp8_products) set_query_scale(*on.context, on.queue, call, cache_);
  }

  std::vector<KernelInfo> kernels() const {
    return packed_ ? packed_->kernels() : impl_->kernels();
  }

  const AttentionMetadata& build(Event* upload) {
    CommonAttentionMetadata batch = call_.batch();
    if (cascade_) {
      metadata_ = &cascade_->build(on_.queue, batch, call_.computed_prefix_len());
    } else {
      if (packed_) batch.causal = std::nullopt;  // a request's one query token sees all keys
      if (!call_.seq_len_bounds.empty()) batch.seq_lens = call_.seq_len_bounds;
      metadata_ = &builder_->build(on_.queue, batch, upload, {.fast_build = call_.plan.fast_build});
    }
    return *metadata_;
  }

  /// Stores the call's keys and values, and waits for it.
  void store(const Inputs& inputs, Event* event) const {
    const TensorRef key{.buffer = inputs.key.handle()}, value{.buffer = inputs.value.handle()};
    if (packed_) {
      const Buffer slots = on_.up(call_.slot_mapping);
      reshape_and_cache(*on_.context, on_.queue, key, value, call_.config.dtype,
                        packed_cache_->cache, slots.handle(), 0, call_.num_tokens(), event);
    } else {
      impl_->write_kv_cache(on_.queue, key, value, cache_, *metadata_, event);
    }
    on_.queue.finish();
  }

  /// Enqueues the forward once, after build().
  void forward(const Inputs& inputs, const Outputs& outputs,
               std::vector<LaunchRecord>& launches) const {
    const std::size_t front = outputs.out.offset_bytes() / element_size_bytes(call_.config.dtype);
    const bool brings_keys = call_.config.contiguous_kv();  // else store() has stored them
    const AttentionTensors tensors{
        .query = {.buffer = inputs.query.handle()},
        .key = {.buffer = brings_keys ? inputs.key.handle() : nullptr},
        .value = {.buffer = brings_keys ? inputs.value.handle() : nullptr},
        .output = {.buffer = outputs.out.handle(), .offset = static_cast<std::int64_t>(front)},
        .lse = outputs.lse.handle()};
    if (packed_) {
      return packed_->forward(on_.queue, tensors, packed_cache_->cache, *metadata_, nullptr,
                              &launches);
    }
    if (cascade_) {
      return cascade_->forward(on_.queue, *cascade_impl_, tensors, cache_, nullptr, &launches);
    }
    const ForwardOptions options = {
        .launches = &launches,
        .custom_mask = inputs.custom_mask.handle(),
        .custom_mask_stride = call_.max_seq_len(),
        .output_fp8 = call_.config.output_fp8 ? outputs.fp8.handle() : nullptr,
        .output_scale = inputs.output_scale.handle()};
    if (call_.config.contiguous_kv()) {
      impl_->forward_encoder(on_.queue, tensors, *metadata_, options);
    } else {
      impl_->forward(on_.queue, tensors, cache_, *metadata_, options);
    }
  }

  LogicalCache download() const {
    if (!packed_) return download_cache(on_.queue, cache_);
    return packed_cache_->download(on_.queue, call_.config, call_.cache.key.size());
  }

 private:
  const OnDevice& on_;
  const AttentionCall& call_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  std::shared_ptr<const AttentionImpl> impl_;
  KVCache cache_;  // none where the keys are contiguous
  std::optional<CascadeAttention> cascade_;
  std::optional<CascadeImpl> cascade_impl_;
  std::shared_ptr<const PagedAttention> packed_;  // instead, with the next
  std::optional<PackedMemory> packed_cache_;
  const AttentionMetadata* metadata_ = nullptr;
};

std::vector<LaunchReport> report(const std::vector<LaunchRecord>& launches,
                                 const std::vector<KernelInfo>& kernels) {
  std::vector<LaunchReport> reports;
  for (const LaunchRecord& launch : launches) {
    const auto info = std::ranges::find(kernels, launch.kernel, &KernelInfo::name);
    const std::string role = info != kernels.end() ? info->role : "";
    reports.push_back({std::string(launch.kernel),
                       launch.kernel == "merge_attn_states" ? std::string(kCascadeRole) : role,
                       launch.tasks, launch.work_groups, launch.work_group_size,
                       microseconds(launch.event)});
  }
  return reports;
}

std::vector<float> floats_of(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Gives the device the batch's lengths for a step that was planned by bounds. Throws if it refuses
/// one, unless it is to refuse a request: one with query tokens and a length of 0.
void give_lengths(const OnDevice& on, const CommonAttentionMetadata& batch,
                  const AttentionMetadata& metadata) {
  DeviceErrors errors(*on.context, on.queue);
  update_seq_lens(on.queue, metadata, {upload(*on.context, on.queue, batch.seq_lens)}, errors);
  bool refuses = false;  // a request, as the call means it to
  for (std::size_t r = 0; r < batch.seq_lens.size(); ++r) {
    const bool has_queries = batch.query_start_loc[r + 1] > batch.query_start_loc[r];
    refuses = refuses || (has_queries && batch.seq_lens[r] == 0);
  }
  if (!refuses) errors.check(on.queue);
}

/// Runs the forward so often over freshly poisoned outputs and fills in what it left: outputs,
/// launches and the last run's times.
void run(const OnDevice& on, const Layer& layer, const Inputs& inputs, const Outputs& outputs,
         int repeat, AttentionOutcome& outcome) {
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < repeat; ++i) {
    for (const GuardedOutput* each : {&outputs.out, &outputs.lse, &outputs.fp8})
      each->refill(on.queue);
    layer.forward(inputs, outputs, launches);
    on.queue.finish();
  }
  outcome.launches = report(launches, layer.kernels());
  outcome.rounds_probabilities = std::ranges::any_of(launches, &LaunchRecord::rounds_probabilities);
  outcome.multiplies_fp8 = std::ranges::any_of(launches, &LaunchRecord::multiplies_fp8);
  for (const LaunchReport& launch : outcome.launches) outcome.attention_us += launch.time_us;
  outcome.out = outputs.out.read(on.queue);
  outcome.lse = floats_of(outputs.lse.read(on.queue));
  outcome.out_fp8 = outputs.fp8.read(on.queue);
}

}  // namespace

std::optional<KernelInfo> kernel_of(const std::vector<KernelInfo>& kernels, std::string_view role) {
  const auto found = std::ranges::find(kernels.rbegin(), kernels.rend(), role, &KernelInfo::role);
  return found == kernels.rend() ? std::nullopt : std::optional(*found);
}

AttentionOutcome execute(const std::shared_ptr<Context>& context, const AttentionCall& call,
                         int repeat) {
  validate_call(call, call.num_blocks);
  const AttentionConfig& config = call.config;
  const OnDevice on{context};
  AttentionOutcome outcome;
  Layer layer(on, call, outcome);
  Inputs inputs{on.up(call.query), on.up(call.key), on.up(call.value), {}, {}};
  if (config.custom_mask) inputs.custom_mask = on.up(call.custom_mask);
  if (config.output_fp8) inputs.output_scale = on.up(std::vector<float>{call.output_scale});
  const std::size_t rows = to_size(call.num_tokens()) * to_size(config.num_heads);
  const std::size_t elements = rows * to_size(config.output_head_size());
  const Outputs outputs{{*context, elements * element_size_bytes(config.dtype)},
                        {*context, rows * sizeof(float), 0},
                        {*context, config.output_fp8 ? elements : 0, 0}};

  Event upload_event, write_event;
  const auto start = std::chrono::steady_clock::now();
  const AttentionMetadata& metadata = layer.build(&upload_event);
  outcome.metadata_us = seconds_since(start) * 1e6;
  if (!call.seq_len_bounds.empty()) give_lengths(on, call.batch(), metadata);
  const bool stores = !call.key.empty() && !config.contiguous_kv() && !config.use_mla;
  if (stores) layer.store(inputs, &write_event);
  run(on, layer, inputs, outputs, repeat, outcome);
  outcome.flushes_f16 = outcome.rounds_probabilities && config.dtype == DType::kF16 &&
                        context->capabilities().flushes_f16;
  outcome.upload_us = microseconds(upload_event);
  outcome.cache_write_us = microseconds(write_event);
  if (stores && call.num_blocks > 0) outcome.cache = layer.download();
  return outcome;
}

}  // namespace clattn::cli
