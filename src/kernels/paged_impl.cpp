#include "kernels/paged_impl.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <clattn/config_fields.hpp>
#include <utility>

#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/copy.hpp"
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
  layer.args.scale_stride = scale_stride_of(cache) + (cache.scales && cache.scales_query ? 2 : 0);
  if (cache.row_scales) layer.row_scales = row_scales_of(cache);
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
  layer.args.scale_stride = -1;
  return layer;
}

/// The fields that make one impl another, in words that differ exactly where their values do.
std::string impl_key(AttentionConfig config, const KernelShape& shape) {
  config.scale = softmax_scale(config.scale, config.head_size);
  config.kv_cache_dtype = config.cache_format();
  config.head_size_v = shape.value_size();
  config.block_size = shape.block_size;
  config.fp8_products = shape.fp8_products;
  std::string key;
  for_each_field([&](const auto& row) {
    if (row.uses != field::kSelection && row.is_set(config))
      key += fmt::format("{}={} ", row.name, to_text(config.*row.member));
  });
  return key;
}

/// Rows of the key and value tensors of a step without pages: at least one where it is recorded, as
/// replays have keys that the step does not know yet.
std::int64_t num_keys(const PagedStepView& step, cl_command_queue queue) {
  const std::int64_t known = step.batch.pages_at.empty() ? 0 : step.batch.pages_at.back();
  return std::max<std::int64_t>(known, Recorder::of(queue) == nullptr ? 0 : 1);
}

class PagedAttentionImpl final : public AttentionImpl {
 public:
  PagedAttentionImpl(const Runtime& runtime, const AttentionConfig& config,
                     std::shared_ptr<const AttentionKernels> kernels)
      : config_(config),
        scale_log2e_(softmax_scale(config.scale, config.head_size) * kLog2E),
        causal_(may_be_causal(config.attn_type)),
        window_(window_of(config)),
        lists_(lists_of(config)),
        head_params_(make_head_params(runtime, config)),
        kernels_(std::move(kernels)) {}

  const AttentionConfig& config() const noexcept override { return config_; }

  void write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value, const KVCache& cache,
                      const AttentionMetadata& metadata, Event* event) const override {
    throw_unsupported_if(config_.contiguous_kv(), "attn_type {}: this layer has no cache to write",
                         to_string(config_.attn_type));
    check_layer_cache(cache, kernels_->shape);
    check_write(queue, key, value, metadata);
    check_memory({.key = key, .value = value}, cache, {});
    recorder_for(queue, *metadata.step());
    enqueue_cache_write(kernels_->cache_write, kernels_->shape, queue, key, value, cache,
                        written_slots(metadata, queue), event);
  }

  void forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
               const AttentionMetadata& metadata, const ForwardOptions& options) const override {
    throw_unsupported_if(config_.contiguous_kv(),
                         "attn_type {}: keys and values are the call's own, use forward_encoder()",
                         to_string(config_.attn_type));
    check_forward(queue, tensors, cache, metadata, options);
    forward_checked(queue, tensors, cache, metadata, options);
  }

  void forward_encoder(cl_command_queue queue, const AttentionTensors& tensors,
                       const AttentionMetadata& metadata,
                       const ForwardOptions& options) const override {
    throw_unsupported_if(!config_.contiguous_kv(),
                         "attn_type {}: keys and values come from the cache, use forward()",
                         to_string(config_.attn_type));
    const KVCache none;
    check_forward(queue, tensors, none, metadata, options);
    forward_checked(queue, tensors, none, metadata, options);
  }

  void check_forward(cl_command_queue queue, const AttentionTensors& tensors, const KVCache& cache,
                     const AttentionMetadata& metadata,
                     const ForwardOptions& options) const override {
    const bool paged = !config_.contiguous_kv();
    const KernelShape& shape = kernels_->shape;
    if (paged) check_layer_cache(cache, shape);
    const PagedStepView& step = step_of(metadata, queue);
    const std::int64_t tokens = num_rows(step, queue);
    KeyRows keys{0, shape.kv_row(), shape.value_row()};
    if (paged) {
      check_block_ids(step.block_ids, cache.num_blocks);
    } else {
      keys.count = num_keys(step, queue);
      check_keys(tensors.key, tensors.value, {keys.count, keys.key_width, shape.dtype},
                 keys.value_width);
    }
    check_options(options, step, tokens);
    check_step_call(queue, *kernels_, step, tensors);
    if (paged && brings_keys(tensors)) {
      check_write(queue, tensors.key, tensors.value, metadata);
      keys.count = written_slots(metadata, queue).num_tokens;
    }
    check_apart(tensors, options.output_fp8, shape, tokens, keys);
    check_memory(tensors, cache, options);
  }

  void forward_checked(cl_command_queue queue, const AttentionTensors& tensors,
                       const KVCache& cache, const AttentionMetadata& metadata,
                       const ForwardOptions& options) const override {
    const PagedStepView& step = *metadata.step();
    const bool paged = !config_.contiguous_kv();
    if (paged && tensors.key.buffer != nullptr) {
      recorder_for(queue, step);
      enqueue_cache_write(kernels_->cache_write, kernels_->shape, queue, tensors.key, tensors.value,
                          cache, written_slots(metadata, queue), nullptr);
    }
    AddResults add;
    if (capturing()) {
      const RunBatch batch(queue, step.batch);
      add = capture_attention({queue, config_, batch.record(), step.causal != 0, tensors,
                               paged ? &cache : nullptr, options});
    }
    // Some kernels load the first key row before they find that no row is seen. A call without keys
    // may bring null buffers, so the queries are bound in their place: their rows are at least as
    // long.
    const TensorRef row{tensors.query.buffer};
    const bool none = !paged && num_keys(step, queue) == 0;
    LayerCall layer =
        paged ? call_over(cache)
              : call_over(none ? row : tensors.key, none ? row : tensors.value, kernels_->shape);
    add_options(layer, paged ? cache.scales.handle() : nullptr, options);
    launch_step(queue, *kernels_, step, tensors, layer, options.event, options.launches);
    add_results(add, queue);
  }

  void warm_up(cl_command_queue queue) const override {
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
    cache.head_size_v = shape.value_size();
    cache.head_stride = shape.head_size;
    cache.token_stride = shape.kv_row();
    cache.block_stride = shape.block_size * cache.token_stride;
    if (is_quantized(shape.cache_dtype)) cache.scales = memory.zeros;
    if (shape.row_scales) cache.row_scales = KVCache::RowScales{};
    LayerCall layer = config_.contiguous_kv() ? call_over(rows, rows, shape) : call_over(cache);
    const ForwardOptions extra{.custom_mask = memory.zeros.handle(),
                               .output_fp8 = memory.zeros.handle(),
                               .output_scale = memory.zeros.handle()};
    add_options(layer, cache.scales.handle(), extra);
    launch_idle_step(queue, *kernels_, layer, memory);
    if (kernels_->cache_write.variant) {
      enqueue_cache_write(kernels_->cache_write, shape, queue, rows, rows, cache,
                          {memory.slots.handle(), 0, 1}, nullptr);
    }
    Queue::adopt(queue).finish();
  }

  std::vector<KernelInfo> kernels() const override { return describe_kernels(*kernels_); }
  std::vector<Candidate> candidates() const override { return kernels_->candidates; }
  bool runs_plan_of(const AttentionKernels& planned) const {
    return kernels_->runs_plan_of(planned);
  }

 private:
  /// A plan fits any layer whose tiles hold its items and who sees no key outside its ranges:
  /// layers with other windows, caps, scales or sinks share the metadata of their KV cache group.
  const PagedStepView& step_of(const AttentionMetadata& metadata, cl_command_queue queue) const {
    const PagedStepView& step = checked_step(metadata, queue, *kernels_);
    throw_invalid_if(!step.window.covers(window_),
                     "attn_metadata: planned for a narrower window or smaller chunks than this "
                     "layer's; legal: a builder configured with the widest of its layers");
    const bool lists = lists_.any() || step.lists.any();
    throw_invalid_if(lists && !(lists_ == step.lists && window_ == step.window),
                     "attn_metadata: planned for another window, span_rule, use_spans, "
                     "use_directions, use_first_keys, use_keep_keys or use_trees than this "
                     "layer's; legal: a builder with the layer's own");
    throw_invalid_if(
        !causal_ && step.causal != 0,
        "attn_metadata: planned for causal attention; legal: a builder with attn_type {}",
        to_string(config_.attn_type));
    return step;
  }

  /// The cache must have been checked. Slots are valid only with the block size that they were made
  /// for.
  void check_write(cl_command_queue queue, const TensorRef& key, const TensorRef& value,
                   const AttentionMetadata& metadata) const {
    check_current(metadata, queue);
    const KernelShape& shape = kernels_->shape;
    const PagedStepView* step = metadata.step();
    throw_invalid_if(
        step == nullptr || step->kernels == nullptr || step->kernels->shape.form != shape.form ||
            step->kernels->shape.block_size != shape.block_size,
        "attn_metadata: its slots were built for another block_size or form of cache, legal: pages "
        "of {} tokens",
        shape.block_size);
    throw_invalid_if(
        !step->has_slots,
        "attn_metadata: without slots, since its queries are not in the cache; legal: a batch with "
        "a slot_mapping, or reshape_and_cache_flash()");
    check_recordable(queue, *step);
    check_cache_write(shape, key, value, written_slots(metadata, queue));
  }

  /// Checks that the memory that check_step_call() does not see is of this layer's context, too.
  void check_memory(const AttentionTensors& tensors, const KVCache& cache,
                    const ForwardOptions& options) const {
    require_context({{"key", tensors.key.buffer},
                     {"value", tensors.value.buffer},
                     {"kv_cache", cache.buffer.handle()},
                     {"kv_cache: scales", cache.scales.handle()},
                     {"custom_mask", options.custom_mask},
                     {"output_fp8", options.output_fp8},
                     {"output_scale", options.output_scale}},
                    kernels_->runtime->context());
  }

  /// Each extra tensor is there if and only if the configuration was made for it.
  void check_options(const ForwardOptions& options, const PagedStepView& step,
                     std::int64_t tokens) const {
    const auto check_given = [](std::string_view name, cl_mem extra, bool wanted) {
      const bool given = extra != nullptr;
      throw_invalid_if(given != wanted, "{}: {}, legal: {} this layer's configuration", name,
                       given ? "given" : "missing", wanted ? "required by" : "none under");
    };
    check_given("custom_mask", options.custom_mask, config_.custom_mask);
    check_given("output_fp8", options.output_fp8, config_.output_fp8);
    check_given("output_scale", options.output_scale, config_.output_fp8);
    throw_invalid_if(config_.custom_mask && options.custom_mask_stride < step.most_keys,
                     "custom_mask_stride is {}, legal: >= {} (the longest seq_len)",
                     options.custom_mask_stride, step.most_keys);
    if (config_.custom_mask) {
      check_rows({options.custom_mask, DType::kInt8},
                 {0, tokens, options.custom_mask_stride, step.most_keys}, "custom_mask");
    }
    if (config_.output_fp8) {
      const std::int64_t row = kernels_->shape.output_row();
      check_rows({options.output_fp8, DType::kFp8E4M3}, {0, tokens, row, row}, "output_fp8");
      check_rows({options.output_scale, DType::kF32}, {0, 1, 1, 1}, "output_scale");
    }
  }

  /// `scales`: of a quantized cache.
  void add_options(LayerCall& layer, cl_mem scales, const ForwardOptions& extra) const {
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

  AttentionConfig config_;
  float scale_log2e_;
  bool causal_;  ///< false: bidirectional whatever the batch says
  KeyWindow window_;
  ListRules lists_;
  Buffer head_params_;
  std::shared_ptr<const AttentionKernels> kernels_;
};

}  // namespace

std::shared_ptr<const AttentionImpl> make_paged_impl(Context& context,
                                                     const AttentionConfig& config) {
  Runtime& runtime = context.runtime();
  const KernelShape shape = kernel_shape(config);
  const std::string key =
      fmt::format("impl {} tuning {}", impl_key(config, shape), runtime.tuning().revision);
  return runtime.shared_object<PagedAttentionImpl>(key, [&] {
    return std::make_shared<PagedAttentionImpl>(
        runtime, config, attention_kernels(runtime, shape, config.kernel_family));
  });
}

bool runs_plan_of(Context& context, const AttentionImpl& impl, const AttentionConfig& planned) {
  const auto* paged = dynamic_cast<const PagedAttentionImpl*>(&impl);
  return paged == nullptr || paged->runs_plan_of(*attention_kernels(
                                 context.runtime(), kernel_shape(planned), planned.kernel_family));
}

}  // namespace clattn::detail
