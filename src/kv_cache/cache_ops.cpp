#include <clattn/kv_cache.hpp>

#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"

namespace clattn {

namespace {

using detail::BuiltKernel, detail::KernelShape, detail::Role, detail::throw_invalid;
using detail::throw_invalid_if;

bool is_known(DType dtype) {
  return dtype <= DType::kInt8;
}

std::string type_name(DType dtype) {
  return is_known(dtype) ? std::string(to_string(dtype))
                         : fmt::format("{}", static_cast<int>(dtype));
}

KernelShape write_shape(std::int32_t num_kv_heads, std::int32_t head_size, std::int32_t block_size,
                        DType dtype, DType cache_dtype) {
  if (!is_known(cache_dtype)) {
    throw_invalid(
        "Unsupported data type of kv cache: {}; legal: f32, f16, bf16, fp8_e4m3, "
        "fp8_e5m2, int8",
        type_name(cache_dtype));
  }
  if (!is_known(dtype) || is_quantized(dtype)) {
    throw_invalid("Unsupported input type of kv cache: {}; legal: f32, f16, bf16",
                  type_name(dtype));
  }
  if (num_kv_heads < 1) throw_invalid("cache: num_kv_heads is {}, legal: >= 1", num_kv_heads);
  if (block_size < 1) throw_invalid("cache: block_size is {}, legal: >= 1", block_size);
  throw_invalid_if(head_size < 8 || head_size > 256 || head_size % 8 != 0,
                   "cache: head_size is {}, legal: 8 … 256 in steps of 8", head_size);
  return {num_kv_heads, num_kv_heads, head_size, block_size, dtype, cache_dtype, {}};
}

}  // namespace

void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event) {
  const KernelShape shape =
      write_shape(cache.num_kv_heads, cache.head_size, cache.block_size, dtype, cache.dtype);
  detail::check_cache(cache);
  const BuiltKernel kernel =
      detail::build_first_fitting(context.runtime(), shape, KernelFamily::kAuto, Role::kCacheWrite);
  const detail::SlotSource slots{slot_mapping, slot_offset_bytes, num_tokens};
  detail::check_cache_write(kernel, shape, key, value, cache, slots);
  detail::enqueue_cache_write(kernel, shape, queue, key, value, cache, slots, event);
}

void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event) {
  const KernelShape shape =
      write_shape(cache.num_kv_heads, cache.head_size, cache.block_size, dtype, cache.dtype);
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(cache.dtype));
  throw_invalid_if(cache.head_size % x != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   cache.head_size, to_string(cache.dtype), x);
  detail::check_cache(cache);
  const BuiltKernel kernel = detail::build_first_fitting(
      context.runtime(), shape, KernelFamily::kAuto, Role::kCacheWritePacked);
  detail::enqueue_cache_write_packed(kernel, shape, queue, key, value, cache,
                                     {slot_mapping, slot_offset_bytes, num_tokens}, event);
}

}  // namespace clattn
