#include "kernels/launch/cache_write.hpp"

#include <type_traits>
#include <utility>

#include "base/checked.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/recorder.hpp"
#include "shared/write_call.h"

namespace clattn::detail {

namespace {

/// One work-group a token on CPUs; a work-item for every 8 elements elsewhere. Into x-packed
/// caches, work-items side by side take tokens side by side: CLA_SIDE_TOKENS of
/// reshape_and_cache.cl.
std::size_t num_groups(const Variant& variant, const KernelShape& shape, std::int64_t num_tokens) {
  if (variant.work_group_size == 1) return to_size(num_tokens);
  constexpr std::int64_t kSideTokens = 16;
  const std::int64_t tokens = variant.role == Role::kCacheWritePacked
                                  ? ceil_div(num_tokens, kSideTokens) * kSideTokens
                                  : num_tokens;
  const std::int64_t chunks = checked_mul(tokens, shape.kv_row() / 8, "num_tokens");
  return to_size(ceil_div(chunks, std::int64_t{variant.work_group_size}));
}

/// Where a cache's keys and values lie in the memory that is returned.
std::pair<cl_mem, cl_mem> place(const KVCache& cache, ClaWriteCall& call) {
  call.k_offset = cache.k_offset;
  call.v_offset = cache.v_offset;
  call.block_stride = cache.block_stride;
  call.token_stride = cache.token_stride;
  call.head_stride = cache.head_stride;
  return {cache.buffer.handle(), cache.buffer.handle()};
}
std::pair<cl_mem, cl_mem> place(const PackedPages& cache, ClaWriteCall& call) {
  call.k_offset = cache.key_offset;
  call.v_offset = cache.value_offset;
  return {cache.key, cache.value};
}

}  // namespace

void check_slots(const SlotSource& slots) {
  throw_invalid_if(slots.offset_bytes % sizeof(std::int64_t) != 0,
                   "slot_mapping: offset of {} bytes, legal: multiples of 8", slots.offset_bytes);
  throw_invalid_if(slots.num_tokens < 0 || slots.num_tokens > INT32_MAX,
                   "num_tokens is {}, legal: 0 … {}", slots.num_tokens, INT32_MAX);
  if (slots.num_tokens == 0) return;
  if (slots.buffer == nullptr) throw_invalid("slot_mapping: no buffer");
  const std::size_t end = slots.offset_bytes / sizeof(std::int64_t) + to_size(slots.num_tokens);
  const std::size_t room = size_bytes_of(slots.buffer) / sizeof(std::int64_t);
  throw_invalid_if(end > room,
                   "slot_mapping: its {} slots end at element {}, legal: the buffer's {}",
                   slots.num_tokens, end, room);
}

SlotSource written_slots(const AttentionMetadata& metadata, cl_command_queue queue) {
  const std::span<const std::int64_t> slots = metadata.slot_mapping();
  std::size_t count = slots.size();
  if (Recorder::of(queue) == nullptr) {  // a replay may have other slots
    while (count > 0 && slots[count - 1] < 0) --count;
  }
  return {metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
          static_cast<std::int64_t>(count)};
}

std::int64_t bounded_token_stride(const TensorRef& tensor, const TokenRows& rows,
                                  std::string_view name) {
  if (rows.count == 0) return rows.width;
  const std::int64_t stride = token_stride(tensor, rows.width);
  if (tensor.buffer == nullptr) throw_invalid("{}: no buffer", name);
  if (tensor.offset < 0) throw_invalid("{}: offset is {}, legal: >= 0", name, tensor.offset);
  throw_invalid_if(stride < rows.width, "{}: token_stride is {}, legal: 0 or >= {} (a row)", name,
                   stride, rows.width);
  check_rows({tensor.buffer, rows.dtype}, {tensor.offset, rows.count, stride, rows.width}, name);
  return stride;
}

void check_keys(const TensorRef& key, const TensorRef& value, const TokenRows& keys,
                std::int64_t value_width) {
  const std::int64_t stride = bounded_token_stride(key, keys, "key");
  const std::int64_t of_values =
      bounded_token_stride(value, {keys.count, value_width, keys.dtype}, "value");
  throw_invalid_if(value_width == keys.width && of_values != stride,
                   "value: token_stride is {}, legal: the key's, {}", value.token_stride, stride);
  throw_invalid_if(of_values % 8 != 0, "value: token_stride is {}, legal: multiples of 8 elements",
                   of_values);
  throw_invalid_if((key.offset | value.offset | stride) % 8 != 0,
                   "key, value: offsets {}, {} and token_stride {}, legal: multiples of 8 elements",
                   key.offset, value.offset, stride);
}

bool brings_keys(const AttentionTensors& tensors) {
  const bool key = tensors.key.buffer != nullptr, value = tensors.value.buffer != nullptr;
  throw_invalid_if(key != value, "key, value: only {} is given, legal: both or none",
                   key ? "key" : "value");
  return key;
}

void refuse_keys(const AttentionTensors& tensors, std::string_view instead) {
  throw_invalid_if(brings_keys(tensors), "key, value: given, legal: none, as {} stores them",
                   instead);
}

void check_cache_write(const KernelShape& shape, const TensorRef& key, const TensorRef& value,
                       const SlotSource& slots) {
  check_slots(slots);
  bounded_token_stride(key, {slots.num_tokens, shape.kv_row(), shape.dtype}, "key");
  bounded_token_stride(value, {slots.num_tokens, shape.value_row(), shape.dtype}, "value");
}

template <typename Cache>
void enqueue_cache_write(const BuiltKernel& kernel, const KernelShape& shape,
                         cl_command_queue queue, const TensorRef& key, const TensorRef& value,
                         const Cache& cache, const SlotSource& slots, Event* event) {
  ClaWriteCall call{};
  call.key_offset = key.offset;
  call.key_token_stride = token_stride(key, shape.kv_row());
  call.value_offset = value.offset;
  call.value_token_stride = token_stride(value, shape.value_row());
  call.slots_at = static_cast<cl_long>(slots.offset_bytes / sizeof(std::int64_t));
  call.num_slots = checked_mul(cache.num_blocks, std::int64_t{cache.block_size}, "kv_cache: slots");
  call.num_tokens = static_cast<cl_int>(slots.num_tokens);
  call.num_kv_heads = shape.num_kv_heads;
  call.scale_stride = scale_stride_of(cache);
  const auto [k_cache, v_cache] = place(cache, call);
  AddResults add;
  if (capturing()) add = capture_cache_write({queue, key, value, shape.dtype, &cache, slots});
  KernelLease lease = kernel.pool->acquire();
  lease.args(call, key.buffer, value.buffer, k_cache, v_cache == k_cache ? nullptr : v_cache,
             slots.buffer);  // values may lie in the keys' buffer
  if (is_quantized(shape.cache_dtype)) lease.arg(cache.scales);
  if constexpr (std::is_same_v<Cache, KVCache>)
    if (shape.row_scales) lease.arg(row_scales_of(cache));
  lease.enqueue(queue, num_groups(*kernel.variant, shape, slots.num_tokens),
                to_size(kernel.variant->work_group_size), event);
  add_results(add, queue);
}

template void enqueue_cache_write(const BuiltKernel&, const KernelShape&, cl_command_queue,
                                  const TensorRef&, const TensorRef&, const KVCache&,
                                  const SlotSource&, Event*);
template void enqueue_cache_write(const BuiltKernel&, const KernelShape&, cl_command_queue,
                                  const TensorRef&, const TensorRef&, const PackedPages&,
                                  const SlotSource&, Event*);

}  // namespace clattn::detail
