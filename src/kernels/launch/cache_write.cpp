#include "kernels/launch/cache_write.hpp"

#include "base/checked.hpp"
#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/step/cache_checks.hpp"

namespace clattn::detail {

namespace {

/// One work-group a token on CPUs; a work-item for every 8 elements elsewhere. Into x-packed
/// caches, work-items side by side take tokens side by side: CLA_SIDE_TOKENS of
/// reshape_and_cache.cl.
std::size_t num_groups(const Variant& variant, const KernelShape& shape, std::int64_t num_tokens) {
  if (variant.work_group_size == 1) return static_cast<std::size_t>(num_tokens);
  constexpr std::int64_t kSideTokens = 16;
  const std::int64_t tokens = variant.role == Role::kCacheWritePacked
                                  ? ceil_div(num_tokens, kSideTokens) * kSideTokens
                                  : num_tokens;
  const std::int64_t chunks =
      checked_mul(tokens, std::int64_t{shape.num_kv_heads} * (shape.head_size / 8), "num_tokens");
  return static_cast<std::size_t>(ceil_div(chunks, std::int64_t{variant.work_group_size}));
}

/// Checks the tensors, too.
void bind_inputs(KernelLease& kernel, const KernelShape& shape, const TensorRef& key,
                 const TensorRef& value) {
  const std::int64_t row = std::int64_t{shape.num_kv_heads} * shape.head_size;
  const cl_long key_stride = checked_token_stride(key, row, "key");
  const cl_long value_stride = checked_token_stride(value, row, "value");
  kernel.arg(key.buffer)
      .arg<cl_long>(key.offset)
      .arg(key_stride)
      .arg(value.buffer)
      .arg<cl_long>(value.offset)
      .arg(value_stride);
}

/// What follows inputs and cache in the argument lists.
struct WriteEnd {
  SlotSource slots;
  std::int64_t num_slots = 0;
  cl_mem scales = nullptr;
  cl_int scale_stride = -1;
};

template <typename Cache>
WriteEnd write_end(const Cache& cache, const SlotSource& slots) {
  return {slots, checked_mul(cache.num_blocks, std::int64_t{cache.block_size}, "kv_cache: slots"),
          cache.scales.handle(), scale_stride_of(cache)};
}

void finish(KernelLease& lease, const BuiltKernel& kernel, const KernelShape& shape,
            cl_command_queue queue, const WriteEnd& end, Event* event) {
  lease.arg(end.slots.buffer)
      .arg<cl_long>(static_cast<cl_long>(end.slots.offset_bytes / sizeof(std::int64_t)))
      .arg<cl_int>(static_cast<cl_int>(end.slots.num_tokens))
      .arg<cl_long>(end.num_slots)
      .arg<cl_int>(shape.num_kv_heads);
  if (is_quantized(shape.cache_dtype)) lease.arg(end.scales).arg(end.scale_stride);
  lease.enqueue(queue, num_groups(*kernel.variant, shape, end.slots.num_tokens),
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
  if (slots.num_tokens == 0) return;
  const std::size_t end =
      slots.offset_bytes / sizeof(std::int64_t) + static_cast<std::size_t>(slots.num_tokens);
  const std::size_t room = size_bytes_of(slots.buffer) / sizeof(std::int64_t);
  if (end > room) {
    throw_invalid("slot_mapping: its {} slots end at element {}, legal: the buffer's {}",
                  slots.num_tokens, end, room);
  }
}

void capture_write(const KernelShape& shape, cl_command_queue queue, TensorRef key, TensorRef value,
                   CapturedCache cache, const SlotSource& slots) {
  capture_cache_write({.queue = queue,
                       .key = key,
                       .value = value,
                       .dtype = shape.dtype,
                       .cache = cache,
                       .slot_mapping = slots.buffer,
                       .slot_offset_bytes = slots.offset_bytes,
                       .num_tokens = slots.num_tokens});
}

std::int64_t checked_token_stride(const TensorRef& tensor, std::int64_t contiguous,
                                  std::string_view name) {
  if (tensor.buffer == nullptr) throw_invalid("{}: no buffer", name);
  if (tensor.offset < 0) throw_invalid("{}: offset is {}, legal: >= 0", name, tensor.offset);
  if (tensor.token_stride == 0) return contiguous;
  if (tensor.token_stride < contiguous) {
    throw_invalid("{}: token_stride is {}, legal: 0 or >= {} (a row)", name, tensor.token_stride,
                  contiguous);
  }
  return tensor.token_stride;
}

std::int64_t checked_key_stride(const TensorRef& key, const TensorRef& value,
                                std::int64_t contiguous) {
  const std::int64_t stride = checked_token_stride(key, contiguous, "key");
  if (checked_token_stride(value, contiguous, "value") != stride) {
    throw_invalid("value: token_stride is {}, legal: the key's, {}", value.token_stride, stride);
  }
  if ((key.offset | value.offset | stride) % 8 != 0) {
    throw_invalid("key, value: offsets {}, {} and token_stride {}, legal: multiples of 8 elements",
                  key.offset, value.offset, stride);
  }
  return stride;
}

void enqueue_cache_write(const BuiltKernel& kernel, const KernelShape& shape,
                         cl_command_queue queue, TensorRef key, TensorRef value,
                         const KVCache& cache, SlotSource slots, Event* event) {
  check_slots(slots);
  check_key_order(cache, kernel.variant->family());
  const WriteEnd end = write_end(cache, slots);
  KernelLease lease = kernel.pool->acquire();
  bind_inputs(lease, shape, key, value);
  if (capturing()) capture_write(shape, queue, key, value, &cache, slots);
  lease.arg(cache.buffer.handle())
      .arg<cl_long>(cache.k_offset)
      .arg(cache.buffer.handle())
      .arg<cl_long>(cache.v_offset)
      .arg<cl_long>(cache.block_stride)
      .arg<cl_long>(cache.token_stride)
      .arg<cl_long>(cache.head_stride);
  if (kernel.variant->family() == KernelFamily::kCpu) lease.arg<cl_long>(cache.key_dim_stride);
  finish(lease, kernel, shape, queue, end, event);
}

void enqueue_cache_write_packed(const BuiltKernel& kernel, const KernelShape& shape,
                                cl_command_queue queue, TensorRef key, TensorRef value,
                                const PackedKVCache& cache, SlotSource slots, Event* event) {
  check_slots(slots);
  const WriteEnd end = write_end(cache, slots);
  KernelLease lease = kernel.pool->acquire();
  bind_inputs(lease, shape, key, value);
  if (capturing()) capture_write(shape, queue, key, value, &cache, slots);
  lease.arg(cache.key)
      .arg<cl_long>(cache.key_offset)
      .arg(cache.value)
      .arg<cl_long>(cache.value_offset);
  finish(lease, kernel, shape, queue, end, event);
}

}  // namespace clattn::detail
