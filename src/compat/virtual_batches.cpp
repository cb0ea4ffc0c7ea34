#include <algorithm>
#include <clattn/compat/virtual_batches.hpp>

#include "base/checked.hpp"
#include "metadata/listed_rows.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid_if, detail::to_size;

void check(std::int32_t attn_chunk_size, const CommonAttentionMetadata& batch,
           std::int32_t block_size) {
  detail::check_at_least("attn_chunk_size", attn_chunk_size, 1);
  detail::validate_lengths(batch, block_size);
  throw_invalid_if(attn_chunk_size % block_size != 0,
                   "attn_chunk_size {} is not divisible by block_size {}", attn_chunk_size,
                   block_size);
  throw_invalid_if(batch.block_table_stride > INT32_MAX,
                   "block_table_stride is {}, legal: at most {}", batch.block_table_stride,
                   INT32_MAX);
}

}  // namespace

LocalAttentionVirtualBatches make_local_attention_virtual_batches(
    std::int32_t attn_chunk_size, const CommonAttentionMetadata& batch, std::int32_t block_size) {
  check(attn_chunk_size, batch, block_size);
  detail::refuse_lists("make_local_attention_virtual_batches", batch);
  LocalAttentionVirtualBatches result;
  result.blocks_per_chunk = attn_chunk_size / block_size;
  result.block_table_columns = static_cast<std::int32_t>(batch.block_table_stride);
  result.causal = batch.is_causal();
  result.query_start_loc.push_back(0);
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const std::int32_t seq_len = batch.seq_lens[to_size(r)];
    std::int32_t position = seq_len - detail::query_len_of(batch, to_size(r));
    while (position < seq_len) {
      const std::int32_t chunk_begin = position - position % attn_chunk_size;
      // The difference, not the chunk's end: that may lie beyond int32.
      const std::int32_t keys = std::min(attn_chunk_size, seq_len - chunk_begin);
      const std::int32_t queries = chunk_begin + keys - position;
      result.query_start_loc.push_back(result.query_start_loc.back() + queries);
      result.seq_lens.push_back(keys);
      result.virtual_batch_to_request.push_back(r);
      result.first_block.push_back(chunk_begin / block_size);
      position += queries;
    }
  }
  result.block_table = result.gather_block_table(batch.block_table);
  return result;
}

std::vector<std::int32_t> LocalAttentionVirtualBatches::gather_block_table(
    std::span<const std::int32_t> other_block_table) const {
  const auto entries = detail::checked_mul<std::size_t>(seq_lens.size(), to_size(blocks_per_chunk),
                                                        "virtual block table");
  std::vector<std::int32_t> rows;
  rows.reserve(entries);
  for (std::size_t v = 0; v < seq_lens.size(); ++v) {
    const std::size_t row = to_size(virtual_batch_to_request[v]) * to_size(block_table_columns);
    throw_invalid_if(other_block_table.size() < row + to_size(block_table_columns),
                     "block_table holds {} elements, legal: at least {} ({} columns of request {})",
                     other_block_table.size(), row + to_size(block_table_columns),
                     block_table_columns, virtual_batch_to_request[v]);
    for (std::int64_t i = 0; i < blocks_per_chunk; ++i) {
      const std::int64_t column =
          std::min<std::int64_t>(first_block[v] + i, block_table_columns - 1);
      rows.push_back(other_block_table[row + to_size(column)]);
    }
  }
  return rows;
}

CommonAttentionMetadata LocalAttentionVirtualBatches::metadata(
    std::span<const std::int64_t> slot_mapping) const {
  auto batch = CommonAttentionMetadata::of(query_start_loc, seq_lens, block_table);
  batch.slot_mapping = slot_mapping;
  batch.causal = causal;
  return batch;
}

}  // namespace clattn
