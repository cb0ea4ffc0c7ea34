#include <clattn/kv_cache.hpp>

#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"

namespace clattn {

namespace {

using detail::KernelShape, detail::Role, detail::SlotSource, detail::throw_invalid;
using detail::throw_invalid_if;

bool is_known(DType dtype) {
  return dtype <= DType::kInt8;
}

std::string type_name(DType dtype) {
  return is_known(dtype) ? std::string(to_string(dtype))
                         : fmt::format("{}", static_cast<int>(dtype));
}

template <typename Cache>
KernelShape write_shape(const Cache& cache, DType dtype) {
  if (!is_known(cache.dtype)) {
    throw_invalid(
        "Unsupported data type of kv cache: {}; legal: f32, f16, bf16, fp8_e4m3, "
        "fp8_e5m2, int8",
        type_name(cache.dtype));
  }
  if (!is_known(dtype) || is_quantized(dtype)) {
    throw_invalid("Unsupported input type of kv cache: {}; legal: f32, f16, bf16",
                  type_name(dtype));
  }
  const std::int32_t heads = cache.num_kv_heads, head_size = cache.head_size;
  if (heads < 1) throw_invalid("cache: num_kv_heads is {}, legal: >= 1", heads);
  throw_invalid_if(cache.block_size < 1, "cache: block_size is {}, legal: >= 1", cache.block_size);
  throw_invalid_if(head_size < 8 || head_size > 256 || head_size % 8 != 0,
                   "cache: head_size is {}, legal: 8 … 256 in steps of 8", head_size);
  return {heads, heads, head_size, cache.block_size, dtype, cache.dtype, {}};
}

/// What both calls do, by the kernel of `role`.
template <typename Cache>
void write_cache(const Context& context, cl_command_queue queue, const TensorRef& key,
                 const TensorRef& value, DType dtype, const Cache& cache, const SlotSource& slots,
                 Role role, Event* event) {
  const KernelShape shape = write_shape(cache, dtype);
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(cache.dtype));
  throw_invalid_if(role == Role::kCacheWritePacked && cache.head_size % x != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   cache.head_size, to_string(cache.dtype), x);
  detail::check_cache(cache);
  const detail::BuiltKernel kernel =
      detail::build_first_fitting(context.runtime(), shape, KernelFamily::kAuto, role);
  detail::check_cache_write(kernel, shape, key, value, &cache, slots);
  detail::enqueue_cache_write(kernel, shape, queue, key, value, &cache, slots, event);
}

}  // namespace

void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event) {
  write_cache(context, queue, key, value, dtype, cache,
              {slot_mapping, slot_offset_bytes, num_tokens}, Role::kCacheWrite, event);
}

void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event) {
  write_cache(context, queue, key, value, dtype, cache,
              {slot_mapping, slot_offset_bytes, num_tokens}, Role::kCacheWritePacked, event);
}

}  // namespace clattn
