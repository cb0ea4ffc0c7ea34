#include "kernels/paged_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/cache_write.hpp"
#include "kernels/paged_step.hpp"

namespace clattn::detail {

namespace {

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

/// The arguments of one forward() on their way to the launches.
struct PagedAttentionImpl::Call {
  cl_command_queue queue = nullptr;
  const PagedStepView& step;
  const KVCache& cache;
  TensorRef query;
  TensorRef output;
  cl_mem lse = nullptr;
  cl_long query_stride = 0;
  cl_long output_stride = 0;
};

std::shared_ptr<const AttentionImpl> PagedAttentionImpl::make(Context& context,
                                                              const AttentionConfig& config) {
  Runtime& runtime = context.runtime();
  const std::string key = fmt::format("impl {}/{}x{} page {} {}/{} {} scale {:a}", config.num_heads,
                                      config.num_kv_heads, config.head_size, config.block_size,
                                      to_string(config.dtype), to_string(config.cache_dtype()),
                                      to_string(config.kernel_family), softmax_scale(config));
  return std::static_pointer_cast<PagedAttentionImpl>(runtime.shared_object(key, [&] {
    return std::static_pointer_cast<void>(std::make_shared<PagedAttentionImpl>(
        config, attention_kernels(runtime, kernel_shape(config), config.kernel_family)));
  }));
}

PagedAttentionImpl::PagedAttentionImpl(const AttentionConfig& config,
                                       std::shared_ptr<const AttentionKernels> kernels)
    : config_(config),
      scale_log2e_(softmax_scale(config) * std::numbers::log2e_v<float>),
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
  check_extent(cache);
}

/// Slots mean places only under the block size that they were made for.
void PagedAttentionImpl::check_metadata(const AttentionMetadata& metadata) const {
  const PagedStepView* step = metadata.step();
  if (step != nullptr && step->kernels != nullptr &&
      step->kernels->shape.block_size == kernels_->shape.block_size) {
    return;
  }
  throw_invalid("attn_metadata: its slots were built for another block_size, legal: {}",
                kernels_->shape.block_size);
}

const PagedStepView& PagedAttentionImpl::step_of(const AttentionMetadata& metadata) const {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels != kernels_.get()) {
    throw_invalid(
        "attn_metadata: built for another configuration; legal: metadata of a builder with this "
        "layer's heads, head_size, block_size, dtypes and context");
  }
  return *step;
}

void PagedAttentionImpl::write_kv_cache(cl_command_queue queue, TensorRef key, TensorRef value,
                                        const KVCache& cache, const AttentionMetadata& metadata,
                                        Event* event) const {
  check_cache(cache);
  check_metadata(metadata);
  enqueue_cache_write(kernels_->cache_write, kernels_->shape, queue, key, value, cache,
                      {metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
                       metadata.num_actual_tokens()},
                      event);
}

void PagedAttentionImpl::forward(cl_command_queue queue, TensorRef query, const KVCache& cache,
                                 const AttentionMetadata& metadata, TensorRef output, cl_mem lse,
                                 Event* event, std::vector<LaunchRecord>* launches) const {
  check_cache(cache);
  const PagedStepView& step = step_of(metadata);
  if (step.num_blocks > cache.num_blocks) {
    throw_invalid("attn_metadata: its block ids reach up to {}, legal: below the cache's {} blocks",
                  step.num_blocks - 1, cache.num_blocks);
  }
  const std::int64_t row = std::int64_t{config_.num_heads} * config_.head_size;
  const Call call{queue,
                  step,
                  cache,
                  query,
                  output,
                  lse,
                  checked_token_stride(query, row, "query"),
                  checked_token_stride(output, row, "output")};
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
  for (std::size_t i = 0; i < kernels_->stages.size(); ++i) {
    const BuiltKernel& stage = kernels_->stages[i];
    record(stage,
           std::int64_t{step.num_items.at(i)} * config_.num_kv_heads * stage.tiling.head_chunks,
           [&](Event* done) { launch_stage(call, i, done); });
  }
  record(kernels_->merge, std::int64_t{step.num_merges} * config_.num_heads,
         [&](Event* done) { launch_merge(call, done); });
}

void PagedAttentionImpl::launch_stage(const Call& call, std::size_t stage, Event* event) const {
  const BuiltKernel& kernel = kernels_->stages[stage];
  const PagedStepView& step = call.step;
  const KVCache& cache = call.cache;
  KernelLease lease = kernel.pool->acquire();
  lease.arg(step.meta)
      .arg(step.items_at.at(stage))
      .arg(step.num_items.at(stage))
      .arg(step.pages_at)
      .arg(call.query.buffer)
      .arg<cl_long>(call.query.offset)
      .arg(call.query_stride)
      .arg(cache.buffer.handle())
      .arg<cl_long>(cache.k_offset)
      .arg(cache.buffer.handle())
      .arg<cl_long>(cache.v_offset)
      .arg<cl_long>(cache.block_stride)
      .arg<cl_long>(cache.token_stride)
      .arg<cl_long>(cache.head_stride)
      .arg(call.output.buffer)
      .arg<cl_long>(call.output.offset)
      .arg(call.output_stride)
      .arg(call.lse)
      .arg(step.partial_out)
      .arg(step.partial_lse2)
      .arg<cl_int>(config_.num_kv_heads)
      .arg<cl_float>(scale_log2e_)
      .arg(step.causal)
      .arg<cl_int>(call.lse != nullptr ? 1 : 0);
  const auto groups = static_cast<std::size_t>(step.num_items.at(stage)) *
                      static_cast<std::size_t>(config_.num_kv_heads) *
                      static_cast<std::size_t>(kernel.tiling.head_chunks);
  lease.enqueue(call.queue, groups, static_cast<std::size_t>(kernel.variant->work_group_size),
                event);
}

void PagedAttentionImpl::launch_merge(const Call& call, Event* event) const {
  const PagedStepView& step = call.step;
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
  const auto groups =
      static_cast<std::size_t>(step.num_merges) * static_cast<std::size_t>(config_.num_heads);
  lease.enqueue(call.queue, groups,
                static_cast<std::size_t>(kernels_->merge.variant->work_group_size), event);
}

std::vector<KernelInfo> PagedAttentionImpl::kernels() const {
  std::vector<KernelInfo> infos;
  for (const BuiltKernel& stage : kernels_->stages) infos.push_back(describe(stage));
  infos.push_back(describe(kernels_->merge));
  infos.push_back(describe(kernels_->cache_write));
  return infos;
}

}  // namespace clattn::detail
