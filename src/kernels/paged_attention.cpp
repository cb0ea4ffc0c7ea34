#include "kernels/paged_attention.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/cache_write.hpp"
#include "kernels/paged_step.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

constexpr float kLog2E = std::numbers::log2e_v<float>;

/// f32 [2][num_heads]: slopes, then sinks, in base 2; empty where the layer has neither.
Buffer make_head_params(const Runtime& runtime, const AttentionConfig& config) {
  if (config.alibi_slopes.empty() && config.sinks.empty()) return {};
  const auto heads = static_cast<std::size_t>(config.num_heads);
  std::vector<float> params(2 * heads, 0.0F);
  std::copy(config.alibi_slopes.begin(), config.alibi_slopes.end(), params.begin());
  std::copy(config.sinks.begin(), config.sinks.end(),
            params.begin() + static_cast<std::ptrdiff_t>(heads));
  for (float& param : params) param *= kLog2E;
  return runtime.allocate_copy(std::as_bytes(std::span(params)));
}

float softmax_scale(const AttentionConfig& config) {
  return config.scale.value_or(1.0F / std::sqrt(static_cast<float>(config.head_size)));
}

KernelInfo describe(const BuiltKernel& kernel) {
  const Variant& v = *kernel.variant;
  return {std::string(v.name), std::string(to_string(v.role)), v.work_group_size, v.block_rows,
          v.block_kv};
}

/// Kernels load eight elements at a time from places that these numbers give.
void check_extent(const KVCache& cache) {
  const std::int64_t places[] = {cache.k_offset, cache.v_offset, cache.block_stride,
                                 cache.token_stride, cache.head_stride};
  for (const std::int64_t place : places) {
    if (place < 0 || place % 8 != 0) {
      throw_invalid("kv_cache: an offset or stride is {}, legal: multiples of 8 elements, >= 0",
                    place);
    }
  }
  if (cache.num_blocks < 1)
    throw_invalid("kv_cache: num_blocks is {}, legal: >= 1", cache.num_blocks);
  std::int64_t end = std::max(cache.k_offset, cache.v_offset) + cache.head_size;
  const std::pair<std::int64_t, std::int64_t> steps[] = {
      {cache.num_blocks - 1, cache.block_stride},
      {cache.block_size - 1, cache.token_stride},
      {cache.num_kv_heads - 1, cache.head_stride}};
  for (const auto& [count, stride] : steps) {
    end = checked_add(end, checked_mul(count, stride, "kv_cache: elements"), "kv_cache: elements");
  }
  const std::size_t elems = cache.buffer.size_bytes() / element_size_bytes(cache.dtype);
  if (static_cast<std::size_t>(end) > elems) {
    throw_invalid("kv_cache: its last element is number {}, legal: below the buffer's {} elements",
                  end - 1, elems);
  }
}

}  // namespace

/// Where the kernels find keys and values, in elements: pages of a cache, or a pair of tensors.
struct PagedAttentionImpl::KVView {
  cl_mem k = nullptr;
  cl_long k_offset = 0;
  cl_mem v = nullptr;
  cl_long v_offset = 0;
  cl_long block_stride = 0;
  cl_long token_stride = 0;
  cl_long head_stride = 0;
  cl_mem scales = nullptr;
  cl_int scale_stride = -1;
};

/// The arguments of one forward() on their way to the launches.
struct PagedAttentionImpl::Call {
  cl_command_queue queue = nullptr;
  const PagedStepView& step;
  const KVView& kv;
  const ForwardOptions& extra;
  TensorRef query;
  TensorRef output;
  cl_mem lse = nullptr;
  cl_long query_stride = 0;
  cl_long output_stride = 0;
};

std::shared_ptr<const AttentionImpl> PagedAttentionImpl::make(Context& context,
                                                              const AttentionConfig& config) {
  Runtime& runtime = context.runtime();
  const KernelShape shape = kernel_shape(config);
  const std::string key = fmt::format(
      "impl {}/{}x{} page {} {}/{} {} scale {:a} cap {:a} window {} chunk {} type {} alibi {:a} "
      "sinks {:a}{}",
      config.num_heads, config.num_kv_heads, config.head_size, shape.block_size,
      to_string(config.dtype), to_string(config.cache_dtype()), to_string(config.kernel_family),
      softmax_scale(config), config.logits_soft_cap, config.sliding_window,
      config.attention_chunk_size, to_string(config.attn_type), fmt::join(config.alibi_slopes, ","),
      fmt::join(config.sinks, ","), option_macros(shape.options, Role::kPrefill));
  return std::static_pointer_cast<PagedAttentionImpl>(runtime.shared_object(key, [&] {
    return std::static_pointer_cast<void>(std::make_shared<PagedAttentionImpl>(
        runtime, config, attention_kernels(runtime, shape, config.kernel_family)));
  }));
}

PagedAttentionImpl::PagedAttentionImpl(const Runtime& runtime, const AttentionConfig& config,
                                       std::shared_ptr<const AttentionKernels> kernels)
    : config_(config),
      scale_log2e_(softmax_scale(config) * kLog2E),
      causal_(config.attn_type == AttentionType::kDecoder),
      window_(window_of(config)),
      head_params_(make_head_params(runtime, config)),
      kernels_(std::move(kernels)) {}

void PagedAttentionImpl::check_cache(const KVCache& cache) const {
  const KernelShape& want = kernels_->shape;
  if (cache.block_size != want.block_size || cache.num_kv_heads != want.num_kv_heads ||
      cache.head_size != want.head_size || cache.dtype != want.cache_dtype) {
    throw_invalid(
        "kv_cache: {} tokens x {} heads x {} of {}, legal: {} x {} x {} of {} as this layer was "
        "configured",
        cache.block_size, cache.num_kv_heads, cache.head_size, to_string(cache.dtype),
        want.block_size, want.num_kv_heads, want.head_size, to_string(want.cache_dtype));
  }
  if (!cache.buffer) throw_invalid("kv_cache: no buffer");
  check_scales(cache);
  check_extent(cache);
}

/// Slots mean places only under the block size that they were made for.
void PagedAttentionImpl::check_metadata(const AttentionMetadata& metadata) const {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr ||
      step->kernels->shape.form != kernels_->shape.form ||
      step->kernels->shape.block_size != kernels_->shape.block_size) {
    throw_invalid(
        "attn_metadata: its slots were built for another block_size or form of cache, legal: pages "
        "of {} tokens",
        kernels_->shape.block_size);
  }
  if (!step->has_slots) {
    throw_invalid(
        "attn_metadata: without slots, since its queries are not in the cache; legal: a batch with "
        "a slot_mapping, or reshape_and_cache_flash()");
  }
}

/// A plan fits any layer whose tiles hold its items and who sees no key outside its ranges: layers
/// with other windows, caps, scales or sinks share the metadata of their KV cache group.
const PagedStepView& PagedAttentionImpl::step_of(const AttentionMetadata& metadata) const {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr || !kernels_->runs_plan_of(*step->kernels)) {
    throw_invalid(
        "attn_metadata: built for another configuration; legal: metadata of a builder with this "
        "layer's heads, head_size, block_size, dtypes and context");
  }
  if (!step->window.covers(window_)) {
    throw_invalid(
        "attn_metadata: planned for sliding_window or attention_chunk_size narrower than this "
        "layer's; legal: a builder configured with the widest of its layers");
  }
  if (!causal_ && step->causal != 0 && !step->bidirectional) {
    throw_invalid("attn_metadata: planned for causal attention; legal: a builder with attn_type {}",
                  to_string(config_.attn_type));
  }
  return *step;
}

void PagedAttentionImpl::write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value,
                                        const KVCache& cache, const AttentionMetadata& metadata,
                                        Event* event) const {
  if (config_.contiguous_kv()) {
    throw_unsupported("attn_type {}: this layer has no cache to write",
                      to_string(config_.attn_type));
  }
  check_cache(cache);
  check_metadata(metadata);
  if (!metadata.step()->recordable) refuse_recording(queue, kFixedMetadata);
  enqueue_cache_write(kernels_->cache_write, kernels_->shape, queue, key, value, cache,
                      {metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
                       static_cast<std::int64_t>(metadata.slot_mapping().size())},
                      event);
}

void PagedAttentionImpl::forward(cl_command_queue queue, TensorRef query, const KVCache& cache,
                                 const AttentionMetadata& metadata, TensorRef output, cl_mem lse,
                                 Event* event, std::vector<LaunchRecord>* launches,
                                 const ForwardOptions& options) const {
  check_cache(cache);
  const PagedStepView& step = step_of(metadata);
  if (step.num_blocks > cache.num_blocks) {
    throw_invalid("attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
                  step.num_blocks - 1, cache.num_blocks);
  }
  const KVView kv{cache.buffer.handle(), cache.k_offset,        cache.buffer.handle(),
                  cache.v_offset,        cache.block_stride,    cache.token_stride,
                  cache.head_stride,     cache.scales.handle(), scale_stride_of(cache)};
  check_options(options, step_of(metadata));
  if (capturing()) {
    capture_attention({.queue = queue,
                       .config = config_,
                       .batch = step.batch,
                       .causal = step.causal != 0,
                       .query = query,
                       .cache = &cache,
                       .options = options,
                       .return_lse = lse != nullptr});
  }
  run({queue, step, kv, options, query, output, lse}, event, launches);
}

void PagedAttentionImpl::forward_encoder(cl_command_queue queue, TensorRef query, TensorRef key,
                                         TensorRef value, const AttentionMetadata& metadata,
                                         TensorRef output, cl_mem lse, Event* event,
                                         std::vector<LaunchRecord>* launches,
                                         const ForwardOptions& options) const {
  if (!config_.contiguous_kv()) {
    throw_unsupported("attn_type {}: keys and values come from the cache, use forward()",
                      to_string(config_.attn_type));
  }
  const std::int64_t row = std::int64_t{config_.num_kv_heads} * config_.head_size;
  const cl_long stride = checked_token_stride(key, row, "key");
  if (checked_token_stride(value, row, "value") != stride) {
    throw_invalid("value: token_stride is {}, legal: the key's, {}", value.token_stride, stride);
  }
  if ((key.offset | value.offset | stride) % 8 != 0) {
    throw_invalid("key, value: offsets {}, {} and token_stride {}, legal: multiples of 8 elements",
                  key.offset, value.offset, stride);
  }
  const KVView kv{key.buffer, key.offset, value.buffer, value.offset, 0, stride, config_.head_size};
  const PagedStepView& step = step_of(metadata);
  check_options(options, step_of(metadata));
  if (capturing()) {
    capture_attention({.queue = queue,
                       .config = config_,
                       .batch = step.batch,
                       .query = query,
                       .key = key,
                       .value = value,
                       .options = options,
                       .return_lse = lse != nullptr});
  }
  run({queue, step, kv, options, query, output, lse}, event, launches);
}

/// Each extra tensor is there if and only if the configuration was made for it.
void PagedAttentionImpl::check_options(const ForwardOptions& options,
                                       const PagedStepView& step) const {
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
  if (config_.custom_mask && options.custom_mask_stride < step.most_keys) {
    throw_invalid("custom_mask_stride is {}, legal: >= {} (the longest seq_len)",
                  options.custom_mask_stride, step.most_keys);
  }
}

void PagedAttentionImpl::run(Call call, Event* event, std::vector<LaunchRecord>* launches) const {
  if (!call.step.recordable) refuse_recording(call.queue, kFixedMetadata);
  const std::int64_t row = std::int64_t{config_.num_heads} * config_.head_size;
  call.query_stride = checked_token_stride(call.query, row, "query");
  call.output_stride = checked_token_stride(call.output, row, "output");
  if (launches != nullptr) launches->clear();
  if (event != nullptr) event->reset();  // stays empty when there is nothing to do
  const auto record = [&](const BuiltKernel& kernel, std::int64_t groups, auto&& launch) {
    if (groups == 0) return;
    if (launches == nullptr) return launch(event);
    LaunchRecord& entry = launches->emplace_back();
    entry.kernel = kernel.variant->name;
    entry.work_groups = groups;
    entry.work_group_size = kernel.variant->work_group_size;
    launch(&entry.event);
    if (event != nullptr) *event = entry.event;
  };
  for (std::size_t i = 0; i < call.step.kernels->stages.size(); ++i) {
    const BuiltKernel& stage = kernels_->stages[kernels_->stage_for(*call.step.kernels, i)];
    record(
        stage,
        std::int64_t{call.step.num_items.at(i)} * config_.num_kv_heads * stage.tiling.head_chunks,
        [&](Event* done) { launch_stage(call, i, done); });
  }
  record(kernels_->merge, std::int64_t{call.step.num_merges} * config_.num_heads,
         [&](Event* done) { launch_merge(call, done); });
}

void PagedAttentionImpl::launch_stage(const Call& call, std::size_t tile_class,
                                      Event* event) const {
  const PagedStepView& step = call.step;
  const BuiltKernel& kernel = kernels_->stages[kernels_->stage_for(*step.kernels, tile_class)];
  const KVView& kv = call.kv;
  KernelLease lease = kernel.pool->acquire();
  lease.arg(step.meta)
      .arg(step.items_at.at(tile_class))
      .arg(step.num_items.at(tile_class))
      .arg(step.pages_at)
      .arg(call.query.buffer)
      .arg<cl_long>(call.query.offset)
      .arg(call.query_stride)
      .arg(kv.k)
      .arg(kv.k_offset)
      .arg(kv.v)
      .arg(kv.v_offset)
      .arg(kv.block_stride)
      .arg(kv.token_stride)
      .arg(kv.head_stride)
      .arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg(call.output_stride)
      .arg(call.lse)
      .arg(step.partial_out)
      .arg(step.partial_lse2)
      .arg<cl_int>(config_.num_kv_heads)
      .arg<cl_float>(scale_log2e_)
      .arg<cl_int>(causal_ ? step.causal : 0)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  bind_options(lease, call);
  const auto groups = static_cast<std::size_t>(step.num_items.at(tile_class)) *
                      static_cast<std::size_t>(config_.num_kv_heads) *
                      static_cast<std::size_t>(kernel.tiling.head_chunks);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(kernel.variant->work_group_size),
                event);
}

/// The arguments that kernels_cl/lib/options.clh adds, in its order.
void PagedAttentionImpl::bind_options(KernelLease& lease, const Call& call) const {
  const KernelOptions& options = kernels_->shape.options;
  if (options.window) lease.arg(window_.left).arg(window_.right).arg(window_.chunk);
  if (options.soft_cap) lease.arg<cl_float>(config_.logits_soft_cap * kLog2E);
  if (options.alibi || options.sink) lease.arg(head_params_.handle());
  if (is_quantized(kernels_->shape.cache_dtype))
    lease.arg(call.kv.scales).arg(call.kv.scale_stride);
  if (options.mask) {
    lease.arg(call.extra.custom_mask).arg<cl_long>(call.extra.custom_mask_stride);
  }
  if (options.out_fp8) lease.arg(call.extra.output_fp8).arg(call.extra.output_scale);
}

void PagedAttentionImpl::launch_merge(const Call& call, Event* event) const {
  const PagedStepView& step = call.step;
  const KernelOptions& options = kernels_->shape.options;
  KernelLease lease = kernels_->merge.pool->acquire();
  lease.arg(step.meta)
      .arg(step.merges_at)
      .arg(step.num_merges)
      .arg(step.partial_out)
      .arg(step.partial_lse2)
      .arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg(call.output_stride)
      .arg(call.lse)
      .arg<cl_int>(config_.num_heads)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  if (options.sink) lease.arg(head_params_.handle());
  if (options.out_fp8) lease.arg(call.extra.output_fp8).arg(call.extra.output_scale);
  const auto groups =
      static_cast<std::size_t>(step.num_merges) * static_cast<std::size_t>(config_.num_heads);
  lease.enqueue(call.queue, groups,
                static_cast<std::size_t>(kernels_->merge.variant->work_group_size), event);
}

std::vector<KernelInfo> PagedAttentionImpl::kernels() const {
  std::vector<KernelInfo> infos;
  for (const BuiltKernel& stage : kernels_->stages) infos.push_back(describe(stage));
  infos.push_back(describe(kernels_->merge));
  if (kernels_->cache_write.variant != nullptr) infos.push_back(describe(kernels_->cache_write));
  return infos;
}

}  // namespace clattn::detail
