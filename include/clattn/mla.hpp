#pragma once

#include <clattn/opencl.hpp>

#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace clattn {

/// The cache of one multi-head latent attention layer: [num_blocks, block_size, kv_lora_rank +
/// rope_dim], contiguous; an entry is a token's latent vector followed by its rotary key part.
struct MLACache {
  Buffer buffer;
  DType dtype = DType::kF16;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 0;    ///< tokens per block, >= 1
  std::int32_t kv_lora_rank = 0;  ///< elements of the latent part
  std::int32_t rope_dim = 0;      ///< elements of the rotary part
  /// Quantized types only: f32 [1] on the device, real = stored * scale. Empty = 1.
  Buffer scale;
};

/// Stores kv_c[i] [kv_lora_rank] followed by k_pe[i] [rope_dim] at slot_mapping[i] (block *
/// block_size + offset; negative or past the cache = do not store) for i < num_tokens, divided by
/// the cache's scale where it is quantized, converting `dtype` to the cache's type.
/// `slot_mapping` holds int64 at byte offset `slot_offset_bytes`. Both widths are multiples of 8.
/// Asynchronous; duplicate slots: last writer undefined. vLLM: concat_and_cache_mla.
void concat_and_cache_mla(const Context& context, cl_command_queue queue, TensorRef kv_c,
                          TensorRef k_pe, DType dtype, const MLACache& cache, cl_mem slot_mapping,
                          std::size_t slot_offset_bytes, std::int64_t num_tokens,
                          Event* event = nullptr);

/// Which tokens of a latent cache to gather; host memory, read before the call returns.
struct MLAGather {
  std::span<const std::int32_t> cu_seq_lens;  ///< [num_reqs + 1], prefix sums of the tokens
  std::span<const std::int32_t> block_table;  ///< [num_reqs, block_table_stride]
  std::int64_t block_table_stride = 0;
  /// [num_reqs] or empty: tokens of each request to pass over, multiples of block_size.
  std::span<const std::int32_t> seq_starts;
};

/// Copies the requests' tokens, one request behind the other, to destination [cu_seq_lens.back(),
/// kv_lora_rank + rope_dim] of `dtype`, times the cache's scale where it is quantized.
/// Asynchronous. Throws kInvalidArgument for prefix sums that fall, a start inside a page, and
/// pages that the table or the cache does not have. vLLM: gather_and_maybe_dequant_cache.
void gather_and_maybe_dequant_cache(const Context& context, cl_command_queue queue,
                                    const MLACache& cache, TensorRef destination, DType dtype,
                                    const MLAGather& gather, Event* event = nullptr);

}  // namespace clattn
