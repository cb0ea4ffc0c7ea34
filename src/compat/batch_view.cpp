#include <algorithm>
#include <clattn/compat/batch_view.hpp>

#include "base/error.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn {

BatchView BatchMetadata::view(std::int32_t first, std::int32_t tokens, std::int32_t count) const {
  BatchView side;
  if (tokens == 0) return side;
  detail::throw_unsupported_if(
      first < 0,
      "attn_metadata: its decodes and prefills are interleaved, so neither is a range of rows of "
      "the batch's arrays; legal: a batch in the order of reorder_batch()");
  side.num_reqs = count;
  side.query_start_loc = rows(query_start_loc, first, count + 1);
  side.seq_lens = rows(seq_lens, first, count);
  const std::int32_t token = side.query_start_loc.front();
  side.num_tokens = tokens;
  if (step() != nullptr && step()->slots_of_queries)
    side.slot_mapping = rows(slot_mapping(), token, side.num_tokens);
  for (std::size_t r = 0; r < side.seq_lens.size(); ++r) {
    const std::int32_t query_len = side.query_start_loc[r + 1] - side.query_start_loc[r];
    side.max_query_len = std::max(side.max_query_len, query_len);
    side.max_seq_len = std::max(side.max_seq_len, side.seq_lens[r]);
  }
  return side;
}

}  // namespace clattn
