#include "kv_cache/op_kernel.hpp"

#include <vector>

#include "base/checked.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "opencl/call_memory.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if, detail::to_size;

/// The used entries of a request's row of the block table, from number `first` on.
void check_pages(const MLACache& cache, const MLAGather& gather, std::size_t request,
                 std::int64_t first) {
  const std::int32_t length = gather.cu_seq_lens[request + 1] - gather.cu_seq_lens[request];
  const std::int64_t end = first + detail::ceil_div(length, cache.block_size);
  throw_invalid_if(length > 0 && end > gather.block_table_stride,
                   "block_table: request {} needs {} pages, legal: up to {}", request, end,
                   gather.block_table_stride);
  for (std::int64_t c = first; c < end; ++c) {
    const std::int32_t block =
        gather.block_table[request * to_size(gather.block_table_stride) + to_size(c)];
    throw_invalid_if(block < 0 || block >= cache.num_blocks,
                     "block_table: request {}, page {}: block {}, legal: 0 … {}", request, c, block,
                     cache.num_blocks - 1);
  }
}

/// Prefix sums, first pages and table, as the kernel reads them. Throws for what it would stumble
/// over.
std::vector<std::int32_t> checked_meta(const MLACache& cache, const MLAGather& gather) {
  const auto &sums = gather.cu_seq_lens, &starts = gather.seq_starts;
  throw_invalid_if(sums.empty() || sums[0] != 0,
                   "cu_seq_lens: {}, legal: prefix sums that begin with 0",
                   sums.empty() ? "empty" : "begins elsewhere");
  const std::size_t num_reqs = sums.size() - 1;
  throw_invalid_if(
      gather.block_table_stride < 0 ||
          gather.block_table.size() !=
              detail::checked_mul(num_reqs, to_size(gather.block_table_stride), "block_table"),
      "block_table: {} entries, legal: {} requests x {} pages", gather.block_table.size(), num_reqs,
      gather.block_table_stride);
  throw_invalid_if(!starts.empty() && starts.size() != num_reqs,
                   "seq_starts: {} entries, legal: 0 or {}", starts.size(), num_reqs);
  std::vector<std::int32_t> meta(sums.begin(), sums.end());
  for (std::size_t r = 0; r < num_reqs; ++r) {
    throw_invalid_if(sums[r + 1] < sums[r],
                     "cu_seq_lens: entry {} is {}, legal: at least entry {}'s {}", r + 1,
                     sums[r + 1], r, sums[r]);
    const std::int32_t start = starts.empty() ? 0 : starts[r];
    throw_invalid_if(start < 0 || start % cache.block_size != 0,
                     "seq_starts: request {} starts at {}, legal: multiples of the block size {}",
                     r, start, cache.block_size);
    meta.push_back(start / cache.block_size);
    check_pages(cache, gather, r, meta.back());
  }
  meta.insert(meta.end(), gather.block_table.begin(), gather.block_table.end());
  return meta;
}

}  // namespace

namespace detail {

OpKernel concat_mla_kernel(const Context& context, DType dtype, DType cache_dtype) {
  return op_kernel(context, "clattn_concat_and_cache_mla", "cache/mla_cache.cl",
                   dtype_options(dtype, cache_dtype));
}

void check_concat_mla(const LatentWrite& write) {
  const MLACache& cache = write.cache;
  const std::int64_t tokens = write.slots.num_tokens;
  check_cache(cache);
  check_slots(write.slots);
  bounded_token_stride(write.kv_c, {tokens, cache.kv_lora_rank, write.dtype}, "kv_c");
  bounded_token_stride(write.k_pe, {tokens, cache.rope_dim, write.dtype}, "k_pe");
}

void enqueue_concat_mla(const OpKernel& kernel, cl_command_queue queue, const LatentWrite& write,
                        Event* event) {
  check_concat_mla(write);
  const MLACache& cache = write.cache;
  AddResults add;
  if (capturing()) add = capture_concat_and_cache_mla(queue, write);
  kernel.pool->acquire()
      .args(write.kv_c.buffer, cl_long{write.kv_c.offset},
            cl_long{token_stride(write.kv_c, cache.kv_lora_rank)}, write.k_pe.buffer,
            cl_long{write.k_pe.offset}, cl_long{token_stride(write.k_pe, cache.rope_dim)},
            cache.buffer, cache.scale, cl_int{cache.scale ? 1 : 0}, cl_int{cache.kv_lora_rank},
            cl_int{cache.rope_dim}, write.slots.buffer,
            static_cast<cl_long>(write.slots.offset_bytes / sizeof(std::int64_t)),
            cl_long{cache.num_blocks * cache.block_size})
      .enqueue(queue, to_size(write.slots.num_tokens), kernel.group_size, event);
  add_results(add, queue);
}

}  // namespace detail

MLACache make_mla_cache(const KVCache& cache, std::int32_t rope_dim) {
  detail::refuse_row_scales(cache, "make_mla_cache");
  throw_invalid_if(cache.num_kv_heads != 1, "kv_cache: {} KV heads, legal: 1 (MLA)",
                   cache.num_kv_heads);
  throw_invalid_if(rope_dim < 8 || rope_dim % 8 != 0 || rope_dim >= cache.head_size,
                   "rope_dim is {}, legal: multiples of 8 below the cache's head_size {}", rope_dim,
                   cache.head_size);
  const std::int64_t page = std::int64_t{cache.block_size} * cache.head_size;
  throw_invalid_if(
      cache.k_offset != 0 || cache.v_offset != 0 || cache.token_stride != cache.head_size ||
          cache.block_stride != page,
      "kv_cache: K at {}, V at {}, tokens {} and blocks {} elements apart; legal for latent "
      "rows: 0, 0, {} and {}",
      cache.k_offset, cache.v_offset, cache.token_stride, cache.block_stride, cache.head_size,
      page);
  return {cache.buffer, cache.dtype, cache.num_blocks, cache.block_size, cache.head_size - rope_dim,
          rope_dim,     cache.scales};
}

void concat_and_cache_mla(const Context& context, cl_command_queue queue, TensorRef kv_c,
                          TensorRef k_pe, DType dtype, const MLACache& cache, cl_mem slot_mapping,
                          std::size_t slot_offset_bytes, std::int64_t num_tokens, Event* event) {
  detail::enqueue_concat_mla(
      detail::concat_mla_kernel(context, dtype, cache.dtype), queue,
      {kv_c, k_pe, dtype, cache, {slot_mapping, slot_offset_bytes, num_tokens}}, event);
}

void gather_and_maybe_dequant_cache(const Context& context, cl_command_queue queue,
                                    const MLACache& cache, TensorRef destination, DType dtype,
                                    const MLAGather& gather, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "gather_and_maybe_dequant_cache");
  detail::check_cache(cache);
  const std::vector<std::int32_t> meta = checked_meta(cache, gather);
  const std::int32_t width = cache.kv_lora_rank + cache.rope_dim;
  const std::int64_t stride = detail::bounded_token_stride(
      destination, {gather.cu_seq_lens.back(), width, dtype}, "destination");
  const detail::OpKernel kernel =
      detail::op_kernel(context, "clattn_gather_mla", "cache/mla_cache.cl",
                        detail::dtype_options(dtype, cache.dtype));
  if (gather.cu_seq_lens.back() == 0) return;
  detail::AddResults add;
  if (detail::capturing()) add = detail::capture_gather(queue, cache, destination, dtype, gather);
  detail::CallMemory::Lease device_meta =
      context.runtime().call_memory().upload(queue, std::as_bytes(std::span(meta)));
  Event done;
  kernel.pool->acquire()
      .args(cache.buffer, cache.scale, cl_int{cache.scale ? 1 : 0}, cl_int{width},
            cl_int{cache.block_size}, destination.buffer, cl_long{destination.offset},
            cl_long{stride}, device_meta.buffer(),
            static_cast<cl_int>(gather.cu_seq_lens.size() - 1), cl_long{gather.block_table_stride})
      .enqueue(queue, to_size(gather.cu_seq_lens.back()), kernel.group_size, &done);
  device_meta.used_until(done, event);
  detail::add_results(add, queue);
}

}  // namespace clattn
