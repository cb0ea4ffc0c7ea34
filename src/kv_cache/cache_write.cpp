
#include "kernels/launch/cache_write.hpp"
#include <type_traits>

#include "base/checked.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kv_cache/op_kernel.hpp"
#include "kv_cache/planes.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::check_at_least, detail::KernelShape, detail::Role, detail::throw_invalid_if;
using detail::to_size;

bool is_known(DType dtype) {
  return dtype <= DType::kUInt4x2;
}

template <typename Cache>
KernelShape write_shape(const Cache& cache, DType dtype, std::int32_t most_head) {
  constexpr std::string_view kInputType =
      "Unsupported input type of kv cache: {}; legal: f32, f16, bf16";
  throw_invalid_if(!is_known(cache.dtype),
                   "Unsupported data type of kv cache: {}; legal: f32, f16, bf16, fp8_e4m3, "
                   "fp8_e5m2, int8, uint4x2",
                   static_cast<int>(cache.dtype));
  throw_invalid_if(!is_known(dtype), kInputType, static_cast<int>(dtype));
  throw_invalid_if(is_quantized(dtype), kInputType, to_string(dtype));
  const std::int32_t heads = cache.num_kv_heads, head_size = cache.head_size;
  check_at_least("cache: num_kv_heads", heads, 1);
  check_at_least("cache: block_size", cache.block_size, 1);
  throw_invalid_if(!detail::takes_head_size(head_size, most_head),
                   "cache: head_size is {}, legal: 8 … {} in steps of 8", head_size, most_head);
  KernelShape shape{heads, heads, head_size, cache.block_size, dtype, cache.dtype, {}};
  if constexpr (std::is_same_v<Cache, KVCache>) {
    shape.head_size_v = cache.value_size();
    shape.row_scales = cache.row_scales.has_value();
  }
  return shape;
}

/// Which token goes where; what kind of call asks.
struct Append {
  std::string_view call;
  const Buffer& batch_indices;
  const Buffer& positions;
  std::int64_t num_tokens = 0;
  const PagedKVLists& lists;

  void require_ints(const Buffer& buffer, std::int64_t count, std::string_view name) const {
    const std::size_t wanted = to_size(count) * sizeof(std::int32_t);
    throw_invalid_if(!buffer || buffer.size_bytes() < wanted,
                     "{}: {} holds {} bytes, legal: at least {} (i32 [{}])", call, name,
                     buffer.size_bytes(), wanted, count);
  }
};

/// Enqueues the search for the tokens' slots, i64 [num_tokens], and what `store` does with them.
template <typename Cache, typename Store>
void store_at_slots(const Context& context, cl_command_queue queue, const Append& append,
                    const Cache& cache, Event* event, const Store& store) {
  const PagedKVLists& lists = append.lists;
  detail::refuse_recording(queue, append.call);
  detail::check_between("num_tokens", append.num_tokens, 0, INT32_MAX);
  check_at_least("num_reqs", lists.num_reqs, 0);
  check_at_least("cache: block_size", cache.block_size, 1);
  append.require_ints(append.batch_indices, append.num_tokens, "batch_indices");
  append.require_ints(append.positions, append.num_tokens, "positions");
  append.require_ints(lists.indices, 0, "indices");
  append.require_ints(lists.indptr, std::int64_t{lists.num_reqs} + 1, "indptr");
  detail::CallMemory::Lease slots =
      context.runtime().call_memory().reserve(to_size(append.num_tokens) * sizeof(cl_long));
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_page_slots", "cache/advance_step.cl");
  Event found;
  kernel.pool->acquire()
      .args(append.batch_indices, append.positions, lists.indices,
            static_cast<cl_long>(lists.indices.size_bytes() / sizeof(std::int32_t)), lists.indptr,
            cl_int{lists.num_reqs}, cl_int{cache.block_size}, cl_long{cache.num_blocks},
            slots.buffer(), cl_long{append.num_tokens})
      .enqueue(queue, detail::ceil_div(to_size(append.num_tokens), kernel.group_size),
               kernel.group_size, &found);
  slots.used_until(found);
  detail::keep_order(queue, found);
  Event done;
  store(slots.buffer().handle(), &done);
  slots.used_until(done, event);
}

}  // namespace

KernelShape detail::cache_write_shape(const KVCache& cache, DType dtype) {
  return write_shape(cache, dtype, kMaxHeadSize);
}

template <typename Cache>
void detail::write_pages(const Context& context, cl_command_queue queue, const TensorRef& key,
                         const TensorRef& value, DType dtype, const Cache& cache,
                         const SlotSource& slots, Role role, Event* event) {
  const bool packed = role == Role::kCacheWritePacked;
  const KernelShape shape = write_shape(cache, dtype, packed ? kMaxPackedHeadSize : kMaxHeadSize);
  const auto x = static_cast<std::int32_t>(16 / element_size_bytes(cache.dtype));
  throw_invalid_if(packed && cache.head_size % x != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   cache.head_size, to_string(cache.dtype), x);
  check_cache(cache);
  const BuiltKernel kernel =
      build_first_fitting(context.runtime(), shape, KernelFamily::kAuto, role);
  check_cache_write(shape, key, value, slots);
  enqueue_cache_write(kernel, shape, queue, key, value, cache, slots, event);
}
template void detail::write_pages(const Context&, cl_command_queue, const TensorRef&,
                                  const TensorRef&, DType, const PackedPages&, const SlotSource&,
                                  Role, Event*);

void reshape_and_cache_flash(const Context& context, cl_command_queue queue, TensorRef key,
                             TensorRef value, DType dtype, const KVCache& cache,
                             cl_mem slot_mapping, std::size_t slot_offset_bytes,
                             std::int64_t num_tokens, Event* event) {
  detail::write_pages(context, queue, key, value, dtype, cache,
                      {slot_mapping, slot_offset_bytes, num_tokens}, Role::kCacheWrite, event);
}

void append_paged_kv_cache(const Context& context, cl_command_queue queue, TensorRef key,
                           TensorRef value, DType dtype, const KVCache& cache,
                           const Buffer& batch_indices, const Buffer& positions,
                           std::int64_t num_tokens, const PagedKVLists& lists, Event* event) {
  const Append append{"append_paged_kv_cache", batch_indices, positions, num_tokens, lists};
  store_at_slots(context, queue, append, cache, event, [&](cl_mem slots, Event* done) {
    reshape_and_cache_flash(context, queue, key, value, dtype, cache, slots, 0, num_tokens, done);
  });
}

void append_paged_mla_kv_cache(const Context& context, cl_command_queue queue, TensorRef ckv,
                               TensorRef kpe, DType dtype, const MLACache& cache,
                               const Buffer& batch_indices, const Buffer& positions,
                               std::int64_t num_tokens, const PagedKVLists& lists, Event* event) {
  const Append append{"append_paged_mla_kv_cache", batch_indices, positions, num_tokens, lists};
  store_at_slots(context, queue, append, cache, event, [&](cl_mem slots, Event* done) {
    concat_and_cache_mla(context, queue, ckv, kpe, dtype, cache, slots, 0, num_tokens, done);
  });
}

}  // namespace clattn
