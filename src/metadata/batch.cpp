#include <algorithm>
#include <clattn/compat/spec_decode.hpp>
#include <clattn/metadata.hpp>
#include <numeric>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

CommonAttentionMetadata CommonAttentionMetadata::of(std::span<const std::int32_t> query_start_loc,
                                                    std::span<const std::int32_t> seq_lens,
                                                    std::span<const std::int32_t> block_table) {
  CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.block_table = block_table;
  batch.num_reqs = static_cast<std::int32_t>(seq_lens.size());
  batch.num_actual_tokens = query_start_loc.empty() ? 0 : query_start_loc.back();
  const std::size_t rows = std::max<std::size_t>(seq_lens.size(), 1);
  detail::throw_invalid_if(block_table.size() % rows != 0,
                           "block_table holds {} elements, legal: a multiple of the {} requests "
                           "(rows of equal length: pad the shorter ones with 0)",
                           block_table.size(), rows);
  batch.block_table_stride = static_cast<std::int64_t>(block_table.size() / rows);
  return batch;
}

bool reorder_batch_to_split_decodes_and_prefills(std::span<const std::int32_t> num_scheduled_tokens,
                                                 std::int32_t decode_threshold,
                                                 std::span<std::int32_t> order) {
  detail::check_at_least("decode_threshold", decode_threshold, 0);
  const std::size_t num_reqs = num_scheduled_tokens.size();
  detail::throw_invalid_if(order.size() != num_reqs,
                           "order holds {} elements, legal: {} (one per request)", order.size(),
                           num_reqs);
  const auto is_decode = [&](std::size_t request) {
    return num_scheduled_tokens[request] <= decode_threshold;
  };
  std::size_t num_decodes = 0;
  for (std::size_t r = 0; r < num_reqs; ++r) {
    detail::throw_invalid_if(num_scheduled_tokens[r] < 0,
                             "request {}: num_scheduled_tokens is {}, legal: at least 0", r,
                             num_scheduled_tokens[r]);
    if (is_decode(r)) ++num_decodes;
  }

  // As many prefills stand in the first num_decodes places as decodes behind them: pair the first
  // of the former with the last of the latter.
  std::iota(order.begin(), order.end(), 0);
  std::size_t decode = num_reqs;
  bool moved = false;
  for (std::size_t prefill = 0; prefill < num_decodes; ++prefill) {
    if (is_decode(prefill)) continue;
    do --decode;
    while (!is_decode(decode));
    std::swap(order[prefill], order[decode]);
    moved = true;
  }
  return moved;
}

SpecDecodeTensor reshape_query_for_spec_decode(const TensorRef& query, std::int64_t num_tokens,
                                               std::int64_t batch_size) {
  detail::check_at_least("batch_size", batch_size, 1);
  detail::throw_invalid_if(num_tokens < 0 || num_tokens % batch_size != 0,
                           "num_tokens is {}, legal: a multiple of batch_size {}", num_tokens,
                           batch_size);
  return {query, batch_size, num_tokens / batch_size};
}

}  // namespace clattn
