#include "kernels/cache_write.hpp"

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"

namespace clattn::detail {

namespace {

/// One work-group a token on CPUs; a work-item for every 8 elements elsewhere.
std::size_t num_groups(const Variant& variant, const KernelShape& shape, std::int64_t num_tokens) {
  if (variant.work_group_size == 1) return static_cast<std::size_t>(num_tokens);
  const std::int64_t chunks = checked_mul(
      num_tokens, std::int64_t{shape.num_kv_heads} * (shape.head_size / 8), "num_tokens");
  return static_cast<std::size_t>(ceil_div(chunks, std::int64_t{variant.work_group_size}));
}

std::int64_t num_slots(std::int64_t num_blocks, std::int32_t block_size) {
  if (num_blocks < 0) throw_invalid("cache: num_blocks is {}, legal: >= 0", num_blocks);
  return checked_mul(num_blocks, std::int64_t{block_size}, "cache: slots");
}

KernelLease& bind_inputs(KernelLease& kernel, const KernelShape& shape, const TensorRef& key,
                         const TensorRef& value) {
  const std::int64_t row = std::int64_t{shape.num_kv_heads} * shape.head_size;
  const cl_long key_stride = checked_token_stride(key, row, "key");
  const cl_long value_stride = checked_token_stride(value, row, "value");
  return kernel.arg(key.buffer)
      .arg<cl_long>(key.offset)
      .arg(key_stride)
      .arg(value.buffer)
      .arg<cl_long>(value.offset)
      .arg(value_stride);
}

/// A cache's slots and factors, checked.
struct SlotsAndScales {
  std::int64_t num_slots;
  cl_mem scales;
  cl_int stride;
};

template <typename Cache>
cl_int stride_of(const Cache& cache) {
  if (!cache.scales) return -1;
  return cache.scales_per_head ? 1 : 0;
}

template <typename Cache>
void require_scales(const Cache& cache) {
  if (!cache.scales) return;
  if (!is_quantized(cache.dtype)) {
    throw_invalid("kv_cache: scales given, legal: none for {}", to_string(cache.dtype));
  }
  const auto heads = static_cast<std::size_t>(cache.scales_per_head ? cache.num_kv_heads : 1);
  if (cache.scales.size_bytes() < 2 * heads * sizeof(float)) {
    throw_invalid("kv_cache: scales hold {} bytes, legal: at least {} (f32 [2][{}])",
                  cache.scales.size_bytes(), 2 * heads * sizeof(float), heads);
  }
}

template <typename Cache>
SlotsAndScales scales_of(const Cache& cache) {
  require_scales(cache);
  return {num_slots(cache.num_blocks, cache.block_size), cache.scales.handle(), stride_of(cache)};
}

void finish(KernelLease& lease, const BuiltKernel& kernel, const KernelShape& shape,
            cl_command_queue queue, const SlotSource& slots, const SlotsAndScales& scales,
            Event* event) {
  lease.arg(slots.buffer)
      .arg<cl_long>(static_cast<cl_long>(slots.offset_bytes / sizeof(std::int64_t)))
      .arg<cl_int>(static_cast<cl_int>(slots.num_tokens))
      .arg<cl_long>(scales.num_slots)
      .arg<cl_int>(shape.num_kv_heads);
  if (is_quantized(shape.cache_dtype)) lease.arg(scales.scales).arg(scales.stride);
  lease.enqueue(queue, num_groups(*kernel.variant, shape, slots.num_tokens),
                static_cast<std::size_t>(kernel.variant->work_group_size), event);
}

}  // namespace

void check_slots(const SlotSource& slots) {
  if (slots.buffer == nullptr) throw_invalid("slot_mapping: no buffer");
  if (slots.offset_bytes % sizeof(std::int64_t) != 0) {
    throw_invalid("slot_mapping: offset of {} bytes, legal: multiples of 8", slots.offset_bytes);
  }
  if (slots.num_tokens < 0 || slots.num_tokens > INT32_MAX) {
    throw_invalid("num_tokens is {}, legal: 0 … {}", slots.num_tokens, INT32_MAX);
  }
}

std::int64_t checked_token_stride(const TensorRef& tensor, std::int64_t contiguous,
                                  std::string_view name) {
  if (tensor.buffer == nullptr) throw_invalid("{}: no buffer", name);
  if (tensor.offset < 0) throw_invalid("{}: offset is {}, legal: >= 0", name, tensor.offset);
  if (tensor.token_stride == 0) return contiguous;
  if (tensor.token_stride < contiguous) {
    throw_invalid("{}: token_stride is {}, legal: 0 or >= {} (heads x head_size)", name,
                  tensor.token_stride, contiguous);
  }
  return tensor.token_stride;
}

void check_scales(const KVCache& cache) {
  require_scales(cache);
}

void check_scales(const PackedKVCache& cache) {
  require_scales(cache);
}

cl_int scale_stride_of(const KVCache& cache) {
  return stride_of(cache);
}

cl_int scale_stride_of(const PackedKVCache& cache) {
  return stride_of(cache);
}

void enqueue_cache_write(const BuiltKernel& kernel, const KernelShape& shape,
                         cl_command_queue queue, TensorRef key, TensorRef value,
                         const KVCache& cache, SlotSource slots, Event* event) {
  check_slots(slots);
  const SlotsAndScales scales = scales_of(cache);
  if (capturing()) {
    capture_cache_write({.queue = queue,
                         .key = key,
                         .value = value,
                         .dtype = shape.dtype,
                         .cache = cache,
                         .slot_mapping = slots.buffer,
                         .slot_offset_bytes = slots.offset_bytes,
                         .num_tokens = slots.num_tokens});
  }
  KernelLease lease = kernel.pool->acquire();
  bind_inputs(lease, shape, key, value)
      .arg(cache.buffer.handle())
      .arg<cl_long>(cache.k_offset)
      .arg(cache.buffer.handle())
      .arg<cl_long>(cache.v_offset)
      .arg<cl_long>(cache.block_stride)
      .arg<cl_long>(cache.token_stride)
      .arg<cl_long>(cache.head_stride);
  finish(lease, kernel, shape, queue, slots, scales, event);
}

void enqueue_cache_write_packed(const BuiltKernel& kernel, const KernelShape& shape,
                                cl_command_queue queue, TensorRef key, TensorRef value,
                                const PackedKVCache& cache, SlotSource slots, Event* event) {
  check_slots(slots);
  const SlotsAndScales scales = scales_of(cache);
  KernelLease lease = kernel.pool->acquire();
  bind_inputs(lease, shape, key, value)
      .arg(cache.key)
      .arg<cl_long>(cache.key_offset)
      .arg(cache.value)
      .arg<cl_long>(cache.value_offset);
  finish(lease, kernel, shape, queue, slots, scales, event);
}

}  // namespace clattn::detail
