#include <algorithm>
#include <chrono>
#include <clattn/cache_ops.hpp>
#include <clattn/cascade.hpp>
#include <cstring>
#include <optional>
#include <span>

#include "cli/common/attention_call.hpp"
#include "cli/common/error.hpp"

namespace clattn::cli {
namespace {

/// The call's tensors on the device. Contiguous keys and those to be stored are uploaded alike.
struct Inputs {
  Buffer query, key, value, custom_mask, output_scale;

  Inputs(const Context& context, const Queue& queue, const AttentionCall& call) {
    query = upload(context, queue, call.query);
    key = upload(context, queue, call.key);
    value = upload(context, queue, call.value);
    if (call.config.custom_mask) custom_mask = upload(context, queue, call.custom_mask);
    if (call.config.output_fp8) {
      output_scale = upload(context, queue, std::span<const float>(&call.output_scale, 1));
    }
  }
};

/// Whether the call runs as a cascade: it has a prefix that layer and backend can share.
bool cascades(const AttentionBackend& backend, const AttentionCall& call,
              const DeviceCapabilities& capabilities) {
  if (!call.causal || call.config.contiguous_kv() || call.computed_prefix_len() == 0) return false;
  if (!validate_cascade_configuration(call.config).empty()) return false;
  AttentionConfig level = call.config;
  level.attn_type = AttentionType::kEncoderDecoder;  // a level's queries see all of its keys
  return backend.validate_configuration(level, &capabilities).empty();
}

/// A call's layer: its kernels in one pass, or those of a cascade.
class Layer {
 public:
  Layer(const std::shared_ptr<Context>& context, const AttentionBackend& backend,
        const AttentionCall& call)
      : impl(backend.make_impl(context, call.config)) {
    if (!cascades(backend, call, context->capabilities())) return;
    cascade_.emplace(context, backend, call.config, options_for(call));
    cascade_impl_.emplace(context, backend, call.config);
  }

  const AttentionMetadata& build(AttentionMetadataBuilder& builder, const Queue& queue,
                                 const AttentionCall& call, Event* upload) {
    CommonAttentionMetadata batch = call.batch();
    if (cascade_) {
      metadata_ = &cascade_->build(queue, batch, call.computed_prefix_len());
    } else {
      if (!call.seq_len_bounds.empty()) batch.seq_lens = call.seq_len_bounds;
      metadata_ = &builder.build(queue, batch, upload, {.fast_build = call.plan.fast_build});
    }
    return *metadata_;
  }

  /// Enqueues the forward once, behind build().
  void forward(const Queue& queue, const AttentionCall& call, const Inputs& inputs,
               const KVCache& cache, const CallOutputs& outputs,
               std::vector<LaunchRecord>& launches) const {
    const AttentionTensors tensors{.query = {.buffer = inputs.query.handle()},
                                   .key = {.buffer = inputs.key.handle()},
                                   .value = {.buffer = inputs.value.handle()},
                                   .output = outputs.out(),
                                   .lse = outputs.lse()};
    if (cascade_) {
      return cascade_->forward(queue, *cascade_impl_, tensors, cache, nullptr, &launches);
    }
    const ForwardOptions options = {.launches = &launches,
                                    .custom_mask = inputs.custom_mask.handle(),
                                    .custom_mask_stride = call.max_seq_len(),
                                    .output_fp8 = call.config.output_fp8 ? outputs.fp8() : nullptr,
                                    .output_scale = inputs.output_scale.handle()};
    if (call.config.contiguous_kv()) {
      impl->forward_encoder(queue, tensors, *metadata_, options);
    } else {
      impl->forward(queue, tensors, cache, *metadata_, options);
    }
  }

  const std::shared_ptr<const AttentionImpl> impl;

 private:
  std::optional<CascadeAttention> cascade_;
  std::optional<CascadeImpl> cascade_impl_;
  const AttentionMetadata* metadata_ = nullptr;
};

/// The call's cache on the device; none where the keys are contiguous. Latent rows are stored here,
/// because the call has their two parts in one tensor.
KVCache upload_call_cache(const Context& context, const Queue& queue, const AttentionCall& call,
                          const AttentionBackend& backend, KVCacheLayout layout) {
  const AttentionConfig& config = call.config;
  if (config.contiguous_kv()) return {};
  KVCache cache = make_cache(context, backend, layout, spec_of(config), call.num_blocks);
  if (call.num_blocks > 0)
    upload_cache(queue, cache, config.use_mla ? expected_cache(call) : call.cache);
  set_scales(context, queue, call.scales, cache);
  return cache;
}

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

}  // namespace

void give_lengths(const Context& context, const Queue& queue, const CommonAttentionMetadata& batch,
                  const AttentionMetadata& metadata) {
  DeviceErrors errors(context, queue);
  update_seq_lens(queue, metadata, {upload(context, queue, batch.seq_lens)}, errors);
  bool refuses = false;  // a request, as the call means it to
  for (std::size_t r = 0; r < batch.seq_lens.size(); ++r) {
    const bool has_queries = batch.query_start_loc[r + 1] > batch.query_start_loc[r];
    refuses = refuses || (has_queries && batch.seq_lens[r] == 0);
  }
  if (!refuses) errors.check(queue);
}

CallOutputs::CallOutputs(const Context& context, std::size_t num_rows, std::int32_t row_size,
                         DType dtype, bool has_fp8)
    : dtype_(dtype),
      flushes_f16_(dtype == DType::kF16 && context.capabilities().flushes_f16),
      out_(context, num_rows * to_size(row_size) * element_size_bytes(dtype)),
      lse_(context, num_rows * sizeof(float), 0),
      fp8_(context, has_fp8 ? num_rows * to_size(row_size) : 0, 0) {}

TensorRef CallOutputs::out() const {
  const std::size_t offset = out_.offset_bytes() / element_size_bytes(dtype_);
  return {.buffer = out_.handle(), .offset = static_cast<std::int64_t>(offset)};
}

void CallOutputs::run(const Queue& queue, int repeat, const std::vector<KernelInfo>& kernels,
                      const std::function<void(std::vector<LaunchRecord>&)>& forward,
                      AttentionOutcome& outcome) const {
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < repeat; ++i) {
    for (const GuardedOutput* each : {&out_, &lse_, &fp8_}) each->refill(queue);
    forward(launches);
    queue.finish();
  }
  outcome.launches = report(launches, kernels);
  outcome.rounds_weights = std::ranges::any_of(launches, &LaunchRecord::rounds_weights);
  outcome.flushes_f16 = flushes_f16_ && outcome.rounds_weights;
  for (const LaunchReport& launch : outcome.launches) outcome.attention_us += launch.time_us;
  outcome.out = out_.read(queue);
  outcome.lse = floats_of(lse_.read(queue));
  outcome.out_fp8 = fp8_.read(queue);
}

BuilderOptions PlanOptions::builder_options(std::int32_t num_splits,
                                            const BatchLimits& needed) const {
  BuilderOptions options;
  options.num_splits = num_splits;
  options.split_policy = split_policy;
  options.decode_threshold = decode_threshold;
  options.side_by_side = side_by_side;
  options.limits = limits.value_or(needed);
  options.limits.num_blocks = needed.num_blocks;
  return options;
}

BuilderOptions options_for(const AttentionCall& call) {
  BuilderOptions options = call.plan.builder_options(
      call.num_splits, {.max_num_reqs = std::max(call.num_reqs(), 1),
                        .max_num_batched_tokens = std::max(call.num_tokens(), 1),
                        .max_model_len = std::max(call.max_seq_len(), 1),
                        .num_blocks = call.num_blocks});
  options.device_seq_lens = !call.seq_len_bounds.empty();
  return options;
}

AttentionOutcome execute(const std::shared_ptr<Context>& context, const AttentionCall& call,
                         int repeat) {
  validate_call(call, call.num_blocks);
  const DeviceCapabilities& device = context->capabilities();
  const AttentionBackend& backend = get_attn_backend(call.config, &device, call.backend);
  const auto builder = backend.make_builder(context, call.config, options_for(call));
  AttentionOutcome outcome;
  outcome.backend = backend.name();
  outcome.layout = choose_layout(backend, layout_on(device, call.layout, call.config.kernel_family),
                                 call.config, &device);
  Layer layer(context, backend, call);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const KVCache cache = upload_call_cache(*context, queue, call, backend, outcome.layout);
  const Inputs inputs(*context, queue, call);
  const CallOutputs outputs(*context, to_size(call.num_tokens()) * to_size(call.config.num_heads),
                            call.config.output_head_size(), call.config.dtype,
                            call.config.output_fp8);

  Event upload_event, write_event;
  const auto start = std::chrono::steady_clock::now();
  const AttentionMetadata& metadata = layer.build(*builder, queue, call, &upload_event);
  outcome.metadata_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  if (!call.seq_len_bounds.empty()) give_lengths(*context, queue, call.batch(), metadata);
  const bool stores = !call.key.empty() && !call.config.contiguous_kv() && !call.config.use_mla;
  if (stores) {
    layer.impl->write_kv_cache(queue, {.buffer = inputs.key.handle()},
                               {.buffer = inputs.value.handle()}, cache, metadata, &write_event);
    queue.finish();
  }
  outputs.run(
      queue, repeat, layer.impl->kernels(),
      [&](auto& launches) { layer.forward(queue, call, inputs, cache, outputs, launches); },
      outcome);
  outcome.upload_us = microseconds(upload_event);
  outcome.cache_write_us = microseconds(write_event);
  if (stores && call.num_blocks > 0) outcome.cache = download_cache(queue, cache);
  return outcome;
}

}  // namespace clattn::cli
