#include <clattn/mla.hpp>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/cache_checks.hpp"
#include "kernels/cache_write.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

namespace {

using detail::throw_invalid;

detail::OpKernel mla_kernel(const Context& context, std::string_view entry, const MLACache& cache,
                            DType dtype) {
  return detail::op_kernel(context, entry, "mla_cache.cl",
                           detail::dtype_options(dtype, cache.dtype));
}

void check_starts(const MLACache& cache, const MLAGather& gather, std::size_t num_reqs) {
  if (gather.seq_starts.empty()) return;
  if (gather.seq_starts.size() != num_reqs) {
    throw_invalid("seq_starts: {} entries, legal: 0 or {}", gather.seq_starts.size(), num_reqs);
  }
  for (std::size_t r = 0; r < num_reqs; ++r) {
    const std::int32_t start = gather.seq_starts[r];
    if (start < 0 || start % cache.block_size != 0) {
      throw_invalid("seq_starts: request {} starts at {}, legal: multiples of the block size {}", r,
                    start, cache.block_size);
    }
  }
}

std::int32_t first_page(const MLACache& cache, const MLAGather& gather, std::size_t request) {
  return gather.seq_starts.empty() ? 0 : gather.seq_starts[request] / cache.block_size;
}

void check_pages(const MLACache& cache, const MLAGather& gather, std::size_t request) {
  const std::int32_t length = gather.cu_seq_lens[request + 1] - gather.cu_seq_lens[request];
  const std::int64_t begin = first_page(cache, gather, request);
  const std::int64_t end = begin + detail::ceil_div(length, cache.block_size);
  if (length > 0 && end > gather.block_table_stride) {
    throw_invalid("block_table: request {} needs {} pages, legal: up to {}", request, end,
                  gather.block_table_stride);
  }
  for (std::int64_t c = begin; c < end; ++c) {
    const std::int32_t block =
        gather.block_table[request * static_cast<std::size_t>(gather.block_table_stride) +
                           static_cast<std::size_t>(c)];
    if (block < 0 || block >= cache.num_blocks) {
      throw_invalid("block_table: request {}, page {}: block {}, legal: 0 … {}", request, c, block,
                    cache.num_blocks - 1);
    }
  }
}

/// Throws for what the kernel would stumble over; returns the number of requests.
std::size_t check_gather(const MLACache& cache, const MLAGather& gather) {
  if (gather.cu_seq_lens.empty() || gather.cu_seq_lens[0] != 0) {
    throw_invalid("cu_seq_lens: {}, legal: prefix sums that begin with 0",
                  gather.cu_seq_lens.empty() ? "empty" : "begins elsewhere");
  }
  const std::size_t num_reqs = gather.cu_seq_lens.size() - 1;
  if (gather.block_table_stride < 0 ||
      gather.block_table.size() !=
          detail::checked_mul(num_reqs, static_cast<std::size_t>(gather.block_table_stride),
                              "block_table")) {
    throw_invalid("block_table: {} entries, legal: {} requests x {} pages",
                  gather.block_table.size(), num_reqs, gather.block_table_stride);
  }
  check_starts(cache, gather, num_reqs);
  for (std::size_t r = 0; r < num_reqs; ++r) {
    if (gather.cu_seq_lens[r + 1] < gather.cu_seq_lens[r]) {
      throw_invalid("cu_seq_lens: entry {} is {}, legal: at least entry {}'s {}", r + 1,
                    gather.cu_seq_lens[r + 1], r, gather.cu_seq_lens[r]);
    }
    check_pages(cache, gather, r);
  }
  return num_reqs;
}

/// Prefix sums, first pages and table, as the kernel reads them.
std::vector<std::int32_t> gather_meta(const MLACache& cache, const MLAGather& gather) {
  std::vector<std::int32_t> meta(gather.cu_seq_lens.begin(), gather.cu_seq_lens.end());
  for (std::size_t r = 0; r + 1 < gather.cu_seq_lens.size(); ++r) {
    meta.push_back(first_page(cache, gather, r));
  }
  meta.insert(meta.end(), gather.block_table.begin(), gather.block_table.end());
  return meta;
}

}  // namespace

void concat_and_cache_mla(const Context& context, cl_command_queue queue, TensorRef kv_c,
                          TensorRef k_pe, DType dtype, const MLACache& cache, cl_mem slot_mapping,
                          std::size_t slot_offset_bytes, std::int64_t num_tokens, Event* event) {
  detail::check_cache(cache);
  detail::check_slots({slot_mapping, slot_offset_bytes, num_tokens});
  const std::int64_t kv_c_stride = detail::checked_token_stride(kv_c, cache.kv_lora_rank, "kv_c");
  const std::int64_t k_pe_stride = detail::checked_token_stride(k_pe, cache.rope_dim, "k_pe");
  const detail::OpKernel kernel = mla_kernel(context, "clattn_concat_and_cache_mla", cache, dtype);
  detail::KernelLease lease = kernel.pool->acquire();
  lease.arg(kv_c.buffer)
      .arg<cl_long>(kv_c.offset)
      .arg<cl_long>(kv_c_stride)
      .arg(k_pe.buffer)
      .arg<cl_long>(k_pe.offset)
      .arg<cl_long>(k_pe_stride)
      .arg(cache.buffer.handle())
      .arg(cache.scale.handle())
      .arg<cl_int>(cache.scale ? 1 : 0)
      .arg<cl_int>(cache.kv_lora_rank)
      .arg<cl_int>(cache.rope_dim)
      .arg(slot_mapping)
      .arg<cl_long>(static_cast<cl_long>(slot_offset_bytes / sizeof(std::int64_t)))
      .arg<cl_long>(cache.num_blocks * cache.block_size)
      .enqueue(queue, static_cast<std::size_t>(num_tokens), kernel.group_size, event);
}

void gather_and_maybe_dequant_cache(const Context& context, cl_command_queue queue,
                                    const MLACache& cache, TensorRef destination, DType dtype,
                                    const MLAGather& gather, Event* event) {
  detail::clear(event);
  detail::refuse_recording(queue, "gather_and_maybe_dequant_cache");
  detail::check_cache(cache);
  const std::size_t num_reqs = check_gather(cache, gather);
  const std::int32_t width = cache.kv_lora_rank + cache.rope_dim;
  const std::int64_t stride = detail::checked_token_stride(destination, width, "destination");
  const detail::OpKernel kernel = mla_kernel(context, "clattn_gather_mla", cache, dtype);
  if (gather.cu_seq_lens.back() == 0) return;
  const std::vector<std::int32_t> meta = gather_meta(cache, gather);
  const Buffer device_meta = context.runtime().allocate_copy(std::as_bytes(std::span(meta)));
  detail::KernelLease lease = kernel.pool->acquire();
  lease.arg(cache.buffer.handle())
      .arg(cache.scale.handle())
      .arg<cl_int>(cache.scale ? 1 : 0)
      .arg<cl_int>(width)
      .arg<cl_int>(cache.block_size)
      .arg(destination.buffer)
      .arg<cl_long>(destination.offset)
      .arg<cl_long>(stride)
      .arg(device_meta.handle())
      .arg<cl_int>(static_cast<cl_int>(num_reqs))
      .arg<cl_long>(gather.block_table_stride)
      .enqueue(queue, static_cast<std::size_t>(gather.cu_seq_lens.back()), kernel.group_size,
               event);
}

}  // namespace clattn
