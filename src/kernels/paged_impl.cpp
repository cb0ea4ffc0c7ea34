#include "kernels/paged_impl.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

/// A layer's call over pages of a cache. Its options are still to come.
LayerCall call_over(const KVCache& cache) {
  LayerCall layer{.k = cache.buffer.handle(), .v = cache.buffer.handle()};
  layer.args.k_offset = cache.k_offset;
  layer.args.v_offset = cache.v_offset;
  layer.args.block_stride = std::max<std::int64_t>(cache.block_stride, 8);  // one block may say 0
  layer.args.token_stride = cache.token_stride;
  layer.args.head_stride = cache.head_stride;
  layer.args.key_dim_stride = cache.key_dim_stride;
  layer.args.scale_stride = scale_stride_of(cache) + (cache.scales && cache.scales_query ? 2 : 0);
  return layer;
}

/// The same over `key` and `value` tensors, [rows, num_kv_heads, head_size] and value_size(),
/// instead of a cache.
LayerCall call_over(const TensorRef& key, const TensorRef& value, const KernelShape& shape) {
  LayerCall layer{.k = key.buffer, .v = value.buffer};
  layer.args.k_offset = key.offset;
  layer.args.v_offset = value.offset;
  layer.args.token_stride = token_stride(key, shape.kv_row());
  layer.args.block_stride = token_stride(value, shape.value_row());
  layer.args.head_stride = shape.head_size;
  layer.args.key_dim_stride = 1;
  layer.args.scale_stride = -1;
  return layer;
}

/// Rows of the key and value tensors of a step without pages: at least one where it is recorded, as
/// replays have keys that the step does not know yet.
std::int64_t num_keys(const PagedStepView& step, cl_command_queue queue) {
  const std::int64_t known = step.batch.pages_at.empty() ? 0 : step.batch.pages_at.back();
  return std::max<std::int64_t>(known, Recorder::of(queue) == nullptr ? 0 : 1);
}

}  // namespace

std::shared_ptr<const AttentionImpl> PagedAttentionImpl::make(Context& context,
                                                              const AttentionConfig& config) {
  Runtime& runtime = context.runtime();
  const KernelShape shape = kernel_shape(config);
  const std::string key = fmt::format(
      "impl {}/{}x{}/{} page {} {}/{}{} {} scale {:a} cap {:a} window {} chunk {} type {} alibi "
      "{:a} sinks {:a}{} tuning {}",
      config.num_heads, config.num_kv_heads, config.head_size, shape.value_size(), shape.block_size,
      to_string(config.dtype), to_string(config.cache_dtype()),
      shape.fp8_products ? " products" : "", to_string(config.kernel_family),
      softmax_scale(config.scale, config.head_size), config.logits_soft_cap, config.sliding_window,
      config.attention_chunk_size, to_string(config.attn_type), fmt::join(config.alibi_slopes, ","),
      fmt::join(config.sinks, ","), option_macros(shape.options, Role::kPrefill),
      runtime.tuning().revision);
  return runtime.shared_object<PagedAttentionImpl>(key, [&] {
    return std::make_shared<PagedAttentionImpl>(
        runtime, config, attention_kernels(runtime, shape, config.kernel_family));
  });
}

PagedAttentionImpl::PagedAttentionImpl(const Runtime& runtime, const AttentionConfig& config,
                                       std::shared_ptr<const AttentionKernels> kernels)
    : config_(config),
      scale_log2e_(softmax_scale(config.scale, config.head_size) * kLog2E),
      causal_(may_be_causal(config.attn_type)),
      window_(window_of(config)),
      head_params_(make_head_params(runtime, config)),
      kernels_(std::move(kernels)) {}

void PagedAttentionImpl::check(const KVCache& cache) const {
  check_layer_cache(cache, kernels_->shape);
  check_key_order(cache, kernels_->merge.variant->family());
}

/// Slots mean places only under the block size that they were made for.
void PagedAttentionImpl::check_metadata(const AttentionMetadata& metadata) const {
  const PagedStepView* step = metadata.step();
  throw_invalid_if(
      step == nullptr || step->kernels == nullptr ||
          step->kernels->shape.form != kernels_->shape.form ||
          step->kernels->shape.block_size != kernels_->shape.block_size,
      "attn_metadata: its slots were built for another block_size or form of cache, legal: pages "
      "of {} tokens",
      kernels_->shape.block_size);
  throw_invalid_if(
      !step->has_slots,
      "attn_metadata: without slots, since its queries are not in the cache; legal: a batch with "
      "a slot_mapping, or reshape_and_cache_flash()");
}

/// A plan fits any layer whose tiles hold its items and who sees no key outside its ranges: layers
/// with other windows, caps, scales or sinks share the metadata of their KV cache group.
const PagedStepView& PagedAttentionImpl::step_of(const AttentionMetadata& metadata) const {
  const PagedStepView& step = checked_step(metadata, *kernels_);
  throw_invalid_if(
      !step.window.covers(window_),
      "attn_metadata: planned for sliding_window or attention_chunk_size narrower than this "
      "layer's; legal: a builder configured with the widest of its layers");
  throw_invalid_if(
      !causal_ && step.causal != 0,
      "attn_metadata: planned for causal attention; legal: a builder with attn_type {}",
      to_string(config_.attn_type));
  return step;
}

void PagedAttentionImpl::check_write(const Write& write) const {
  check_metadata(write.metadata);
  check_recordable(write.queue, *write.metadata.step());
  check_cache_write(kernels_->cache_write, kernels_->shape, write.key, write.value, &write.cache,
                    written_slots(write.metadata, write.queue));
}

void PagedAttentionImpl::store(const Write& write, Event* event) const {
  recorder_for(write.queue, *write.metadata.step());
  enqueue_cache_write(kernels_->cache_write, kernels_->shape, write.queue, write.key, write.value,
                      &write.cache, written_slots(write.metadata, write.queue), event);
}

void PagedAttentionImpl::write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value,
                                        const KVCache& cache, const AttentionMetadata& metadata,
                                        Event* event) const {
  throw_unsupported_if(config_.contiguous_kv(), "attn_type {}: this layer has no cache to write",
                       to_string(config_.attn_type));
  check(cache);
  const Write write{queue, key, value, cache, metadata};
  check_write(write);
  store(write, event);
}

void PagedAttentionImpl::check_attention(const Call& call) const {
  if (call.cache != nullptr) check(*call.cache);
  const PagedStepView& step = step_of(call.metadata);
  if (call.cache != nullptr) {
    check_block_ids(step.block_ids, call.cache->num_blocks);
  } else {
    const KernelShape& shape = kernels_->shape;
    check_keys(call.tensors.key, call.tensors.value,
               {num_keys(step, call.queue), shape.kv_row(), shape.dtype}, shape.value_row());
  }
  check_options(call.options, step, num_rows(step, call.queue));
  check_step_call({call.queue, *kernels_, step, call.tensors});
}

void PagedAttentionImpl::attend(const Call& call) const {
  const auto& [queue, tensors, cache, metadata, options] = call;
  const PagedStepView& step = *metadata.step();
  const bool paged = cache != nullptr;
  AddResults add;
  if (capturing())
    add =
        capture_attention({queue, config_, step.batch, step.causal != 0, tensors, cache, options});
  // Some kernels load the first key row before they find that no row is seen. A call without keys
  // may bring null buffers, so the queries are bound in their place: their rows are at least as
  // long.
  const TensorRef row{tensors.query.buffer};
  const bool none = !paged && num_keys(step, queue) == 0;
  LayerCall layer =
      paged ? call_over(*cache)
            : call_over(none ? row : tensors.key, none ? row : tensors.value, kernels_->shape);
  add_options(layer, paged ? cache->scales.handle() : nullptr, options);
  launch_step({queue, *kernels_, step, tensors}, layer, options.event, options.launches);
  add_results(add, queue);
}

void PagedAttentionImpl::forward(cl_command_queue queue, const AttentionTensors& tensors,
                                 const KVCache& cache, const AttentionMetadata& metadata,
                                 const ForwardOptions& options) const {
  const Call call{queue, tensors, &cache, metadata, options};
  check_attention(call);
  attend(call);
}

void PagedAttentionImpl::forward_encoder(cl_command_queue queue, const AttentionTensors& tensors,
                                         const AttentionMetadata& metadata,
                                         const ForwardOptions& options) const {
  throw_unsupported_if(!config_.contiguous_kv(),
                       "attn_type {}: keys and values come from the cache, use forward()",
                       to_string(config_.attn_type));
  const Call call{queue, tensors, nullptr, metadata, options};
  check_attention(call);
  attend(call);
}

void PagedAttentionImpl::check_forward(cl_command_queue queue, const AttentionTensors& tensors,
                                       const KVCache& cache, const AttentionMetadata& metadata,
                                       const ForwardOptions& options) const {
  const KVCache* const pages = config_.contiguous_kv() ? nullptr : &cache;
  check_attention({queue, tensors, pages, metadata, options});
  if (pages == nullptr || tensors.key.buffer == nullptr) return;
  check_write({queue, tensors.key, tensors.value, cache, metadata});
}

void PagedAttentionImpl::forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                                         const KVCache& cache, const AttentionMetadata& metadata,
                                         const ForwardOptions& options) const {
  const KVCache* const pages = config_.contiguous_kv() ? nullptr : &cache;
  if (pages != nullptr && tensors.key.buffer != nullptr) {
    store({queue, tensors.key, tensors.value, cache, metadata}, nullptr);
  }
  attend({queue, tensors, pages, metadata, options});
}

/// Each extra tensor is there if and only if the configuration was made for it.
void PagedAttentionImpl::check_options(const ForwardOptions& options, const PagedStepView& step,
                                       std::int64_t tokens) const {
  struct Extra {
    std::string_view name;
    bool given;
    bool wanted;
  };
  const Extra extras[] = {
      {"custom_mask", options.custom_mask != nullptr, config_.custom_mask},
      {"output_fp8", options.output_fp8 != nullptr, config_.output_fp8},
      {"output_scale", options.output_scale != nullptr, config_.output_fp8},
  };
  for (const Extra& extra : extras) {
    if (extra.given == extra.wanted) continue;
    throw_invalid("{}: {}, legal: {} this layer's configuration", extra.name,
                  extra.given ? "given" : "missing", extra.wanted ? "required by" : "none under");
  }
  throw_invalid_if(config_.custom_mask && options.custom_mask_stride < step.most_keys,
                   "custom_mask_stride is {}, legal: >= {} (the longest seq_len)",
                   options.custom_mask_stride, step.most_keys);
  if (config_.custom_mask) {
    check_rows({options.custom_mask, DType::kInt8},
               {0, tokens, options.custom_mask_stride, step.most_keys}, "custom_mask");
  }
  if (config_.output_fp8) {
    const std::int64_t row = std::int64_t{config_.num_heads} * config_.output_head_size();
    check_rows({options.output_fp8, DType::kFp8E4M3}, {0, tokens, row, row}, "output_fp8");
    check_rows({options.output_scale, DType::kF32}, {0, 1, 1, 1}, "output_scale");
  }
}

void PagedAttentionImpl::add_options(LayerCall& layer, cl_mem scales,
                                     const ForwardOptions& extra) const {
  const KernelOptions& options = kernels_->shape.options;
  layer.args.scale_log2e = scale_log2e_;
  layer.args.window_left = window_.left;
  layer.args.window_right = window_.right;
  layer.args.chunk = window_.chunk;
  layer.args.soft_cap_log2e = config_.logits_soft_cap * kLog2E;
  layer.args.mask_stride = extra.custom_mask_stride;
  if (options.alibi || options.sink) layer.add(head_params_.handle());
  if (is_quantized(kernels_->shape.cache_dtype)) layer.add(scales);
  if (options.mask) layer.add(extra.custom_mask);
  if (options.out_fp8) {
    layer.add(extra.output_fp8);
    layer.add(extra.output_scale);
  }
}

void PagedAttentionImpl::warm_up(cl_command_queue queue) const {
  const KernelShape& shape = kernels_->shape;
  const IdleMemory memory(queue, *kernels_);
  const TensorRef rows{memory.zeros.handle()};
  KVCache cache;
  cache.buffer = memory.zeros;
  cache.dtype = shape.cache_dtype;
  cache.num_blocks = 1;
  cache.block_size = shape.block_size;
  cache.num_kv_heads = shape.num_kv_heads;
  cache.head_size = shape.head_size;
  cache.head_stride = shape.head_size;
  cache.token_stride = shape.kv_row();
  cache.block_stride = shape.block_size * cache.token_stride;
  if (is_quantized(shape.cache_dtype)) cache.scales = memory.zeros;
  LayerCall layer = config_.contiguous_kv() ? call_over(rows, rows, shape) : call_over(cache);
  const ForwardOptions extra{.custom_mask = memory.zeros.handle(),
                             .output_fp8 = memory.zeros.handle(),
                             .output_scale = memory.zeros.handle()};
  add_options(layer, cache.scales.handle(), extra);
  launch_idle_step(queue, *kernels_, layer, memory);
  if (kernels_->cache_write.variant) {
    enqueue_cache_write(kernels_->cache_write, shape, queue, rows, rows, &cache,
                        {memory.slots.handle(), 0, 1}, nullptr);
  }
  Queue::adopt(queue).finish();
}

bool PagedAttentionImpl::runs_plan_of(Context& context, const AttentionConfig& planned) const {
  return kernels_->runs_plan_of(
      *attention_kernels(context.runtime(), kernel_shape(planned), planned.kernel_family));
}

}  // namespace clattn::detail
