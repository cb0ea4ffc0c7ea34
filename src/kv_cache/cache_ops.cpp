#include <clattn/kv_cache.hpp>
#include <map>
#include <mutex>
#include <tuple>

#include "base/error.hpp"
#include "kernels/cache_write.hpp"

namespace clattn {

namespace {

using detail::BuiltKernel;
using detail::KernelShape;
using detail::Role;
using detail::throw_invalid;

/// The cache-write kernels of a context, built once per shape.
class CacheWriteKernels {
 public:
  const BuiltKernel& get(detail::Runtime& runtime, const KernelShape& shape, Role role) {
    const Key key{shape.num_kv_heads, shape.head_size,   shape.block_size,
                  shape.dtype,        shape.cache_dtype, role};
    const std::scoped_lock lock(mutex_);
    auto found = built_.find(key);
    if (found == built_.end()) {
      auto kernel = detail::build_first_fitting(runtime, shape, KernelFamily::kAuto, role);
      found = built_.emplace(key, std::move(kernel)).first;
    }
    return found->second;
  }

 private:
  using Key = std::tuple<std::int32_t, std::int32_t, std::int32_t, DType, DType, Role>;
  std::mutex mutex_;
  std::map<Key, BuiltKernel> built_;
};

const BuiltKernel& cache_write_kernel(const Context& context, const KernelShape& shape, Role role) {
  detail::Runtime& runtime = context.runtime();
  const auto kernels = std::static_pointer_cast<CacheWriteKernels>(
      runtime.shared_object("cache_write", [] { return std::make_shared<CacheWriteKernels>(); }));
  return kernels->get(runtime, shape, role);  // the runtime keeps the object as long as it lives
}

KernelShape write_shape(std::int32_t num_kv_heads, std::int32_t head_size, std::int32_t block_size,
                        DType dtype, DType cache_dtype) {
  if (num_kv_heads < 1) throw_invalid("cache: num_kv_heads is {}, legal: >= 1", num_kv_heads);
  if (block_size < 1) throw_invalid("cache: block_size is {}, legal: >= 1", block_size);
  if (head_size < 8 || head_size > 256 || head_size % 8 != 0) {
    throw_invalid("cache: head_size is {}, legal: 8 … 256 in steps of 8", head_size);
  }
  return {num_kv_heads, num_kv_heads, head_size, block_size, dtype, cache_dtype};
}

}  // namespace

void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event) {
  const KernelShape shape =
      write_shape(cache.num_kv_heads, cache.head_size, cache.block_size, dtype, cache.dtype);
  if (!cache.buffer) throw_invalid("cache: no buffer");
  detail::enqueue_cache_write(cache_write_kernel(context, shape, Role::kCacheWrite), shape, queue,
                              key, value, cache, {slot_mapping, slot_offset_bytes, num_tokens},
                              event);
}

void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event) {
  const KernelShape shape =
      write_shape(cache.num_kv_heads, cache.head_size, cache.block_size, dtype, cache.dtype);
  if (cache.key == nullptr || cache.value == nullptr) throw_invalid("cache: no buffer");
  detail::enqueue_cache_write_packed(cache_write_kernel(context, shape, Role::kCacheWritePacked),
                                     shape, queue, key, value, cache,
                                     {slot_mapping, slot_offset_bytes, num_tokens}, event);
}

}  // namespace clattn
