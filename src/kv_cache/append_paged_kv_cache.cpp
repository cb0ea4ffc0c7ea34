#include <clattn/cache_ops.hpp>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

void require_ints(const Buffer& buffer, std::int64_t count, std::string_view name) {
  const auto wanted = static_cast<std::size_t>(count) * sizeof(std::int32_t);
  if (!buffer || buffer.size_bytes() < wanted) {
    detail::throw_invalid("append_paged_kv_cache: {} holds {} bytes, legal: at least {} (i32 [{}])",
                          name, buffer.size_bytes(), wanted, count);
  }
}

}  // namespace

void append_paged_kv_cache(const Context& context, cl_command_queue queue, TensorRef key,
                           TensorRef value, DType dtype, const KVCache& cache,
                           const Buffer& batch_indices, const Buffer& positions,
                           std::int64_t num_tokens, const PagedKVLists& lists, Event* event) {
  detail::refuse_recording(queue, "append_paged_kv_cache");
  detail::check_count(num_tokens, "num_tokens");
  detail::check_count(lists.num_reqs, "num_reqs");
  if (cache.block_size < 1) {
    detail::throw_invalid("cache: block_size is {}, legal: >= 1", cache.block_size);
  }
  require_ints(batch_indices, num_tokens, "batch_indices");
  require_ints(positions, num_tokens, "positions");
  require_ints(lists.indices, 0, "indices");
  require_ints(lists.indptr, std::int64_t{lists.num_reqs} + 1, "indptr");
  const Buffer slots = context.allocate(static_cast<std::size_t>(num_tokens) * sizeof(cl_long));
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_page_slots", "advance_step.cl");
  kernel.pool->acquire()
      .arg(batch_indices.handle())
      .arg(positions.handle())
      .arg(lists.indices.handle())
      .arg<cl_long>(static_cast<cl_long>(lists.indices.size_bytes() / sizeof(std::int32_t)))
      .arg(lists.indptr.handle())
      .arg<cl_int>(lists.num_reqs)
      .arg<cl_int>(cache.block_size)
      .arg<cl_long>(cache.num_blocks)
      .arg(slots.handle())
      .arg<cl_long>(num_tokens)
      .enqueue(queue, detail::ceil_div(static_cast<std::size_t>(num_tokens), kernel.group_size),
               kernel.group_size);
  reshape_and_cache_flash(context, queue, key, value, dtype, cache, slots.handle(), 0, num_tokens,
                          event);
}

}  // namespace clattn
