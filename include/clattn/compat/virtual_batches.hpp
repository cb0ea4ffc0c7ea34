#pragma once

// For engines that cut chunked-local attention into virtual requests, as vLLM V1 does; layers
// with attention_chunk_size need no such batch.

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// Chunked-local attention as plain causal attention over more requests: each chunk of a request
/// that new tokens touch is a virtual request of its own, with that chunk's keys.
struct LocalAttentionVirtualBatches {
  std::vector<std::int32_t> query_start_loc = {};  ///< [num_virtual + 1]
  std::vector<std::int32_t> seq_lens = {};         ///< [num_virtual], keys within the chunk
  std::vector<std::int32_t> virtual_batch_to_request = {};  ///< [num_virtual]
  std::vector<std::int32_t> first_block = {};  ///< [num_virtual], the request's column of the chunk
  std::vector<std::int32_t> block_table = {};  ///< [num_virtual, blocks_per_chunk]
  std::int32_t blocks_per_chunk = 0;           ///< columns of block_table
  std::int32_t block_table_columns = 0;        ///< of the table that was given
  bool causal = true;                          ///< of the real batch

  /// Virtual requests.
  std::int32_t num_virtual() const { return static_cast<std::int32_t>(seq_lens.size()); }
  /// The virtual requests as a batch over these arrays, valid while they live unchanged. Tokens
  /// keep their order, so the real batch's slots are valid for them too (empty = computed anew).
  /// The builder's limits must allow num_virtual() requests.
  CommonAttentionMetadata metadata(std::span<const std::int64_t> slot_mapping = {}) const;
  /// The rows [num_virtual, blocks_per_chunk] of another KV cache group's table of the same shape,
  /// [num_reqs, block_table_columns].
  std::vector<std::int32_t> gather_block_table(
      std::span<const std::int32_t> other_block_table) const;
};

/// Cuts keys into aligned chunks of `attn_chunk_size` tokens, a multiple of block_size. Requests
/// without new tokens make no virtual request. Entries of a row past the chunk's keys repeat the
/// table's last column at most and are never used. Validates lengths like validate_batch. vLLM:
/// make_local_attention_virtual_batches.
LocalAttentionVirtualBatches make_local_attention_virtual_batches(
    std::int32_t attn_chunk_size, const CommonAttentionMetadata& batch, std::int32_t block_size);

}  // namespace clattn
