#include <clattn/cache_ops.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

/// Which token goes where; what kind of call asks.
struct Append {
  std::string_view call;
  const Buffer& batch_indices;
  const Buffer& positions;
  std::int64_t num_tokens = 0;
  const PagedKVLists& lists;

  void require_ints(const Buffer& buffer, std::int64_t count, std::string_view name) const {
    const auto wanted = static_cast<std::size_t>(count) * sizeof(std::int32_t);
    detail::throw_invalid_if(!buffer || buffer.size_bytes() < wanted,
                             "{}: {} holds {} bytes, legal: at least {} (i32 [{}])", call, name,
                             buffer.size_bytes(), wanted, count);
  }
};

/// Enqueues the search for the tokens' slots, i64 [num_tokens], and what `store` does with them.
template <typename Cache, typename Store>
void store_at_slots(const Context& context, cl_command_queue queue, const Append& append,
                    const Cache& cache, Event* event, const Store& store) {
  detail::refuse_recording(queue, append.call);
  detail::check_count(append.num_tokens, "num_tokens");
  detail::check_count(append.lists.num_reqs, "num_reqs");
  detail::throw_invalid_if(cache.block_size < 1, "cache: block_size is {}, legal: >= 1",
                           cache.block_size);
  append.require_ints(append.batch_indices, append.num_tokens, "batch_indices");
  append.require_ints(append.positions, append.num_tokens, "positions");
  append.require_ints(append.lists.indices, 0, "indices");
  append.require_ints(append.lists.indptr, std::int64_t{append.lists.num_reqs} + 1, "indptr");
  detail::CallMemory::Lease slots = context.runtime().call_memory().reserve(
      static_cast<std::size_t>(append.num_tokens) * sizeof(cl_long));
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_page_slots", "cache/advance_step.cl");
  Event found;
  kernel.pool->acquire()
      .args(append.batch_indices, append.positions, append.lists.indices,
            static_cast<cl_long>(append.lists.indices.size_bytes() / sizeof(std::int32_t)),
            append.lists.indptr, cl_int{append.lists.num_reqs}, cl_int{cache.block_size},
            cl_long{cache.num_blocks}, slots.buffer(), cl_long{append.num_tokens})
      .enqueue(queue,
               detail::ceil_div(static_cast<std::size_t>(append.num_tokens), kernel.group_size),
               kernel.group_size, &found);
  slots.used_until(found);
  detail::keep_order(queue, found);
  Event done;
  store(slots.buffer().handle(), &done);
  slots.used_until(done, event);
}

}  // namespace

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
