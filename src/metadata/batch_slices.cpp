// Parts of a batch as batches, requests cut where a part ends.
#include <algorithm>
#include <clattn/compat/derived_batches.hpp>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid_if, detail::to_size;

void check_range(std::string_view name, std::int32_t begin, std::int32_t end, std::int64_t most) {
  throw_invalid_if(begin < 0 || end < begin || end > most,
                   "{} is [{}, {}), legal: 0 <= begin <= end <= {}", name, begin, end, most);
}

/// Throws unless the first and the last request of the slice own its first and last token.
void check_slice(const UBatchSlice& slice, const CommonAttentionMetadata& batch) {
  const auto& [requests, tokens] = slice;
  check_range("request_slice", requests.begin, requests.end, batch.num_reqs);
  check_range("token_slice", tokens.begin, tokens.end, batch.num_actual_tokens);
  throw_invalid_if(requests.begin == requests.end || tokens.begin == tokens.end,
                   "slice of requests [{}, {}) and tokens [{}, {}): it is empty", requests.begin,
                   requests.end, tokens.begin, tokens.end);
  const auto& starts = batch.query_start_loc;
  const auto first = to_size(requests.begin);
  const auto last = to_size(requests.end) - 1;
  throw_invalid_if(tokens.begin < starts[first] || tokens.begin >= starts[first + 1],
                   "token_slice begins at {}, legal: {} <= begin < {} (tokens of request {})",
                   tokens.begin, starts[first], starts[first + 1], first);
  const std::int32_t low = std::min(starts[last] + 1, starts[last + 1]);
  throw_invalid_if(tokens.end < low || tokens.end > starts[last + 1],
                   "token_slice ends at {}, legal: {} … {} (tokens of request {})", tokens.end, low,
                   starts[last + 1], last);
}

/// The arrays that a slice takes its part of.
void check_arrays(const CommonAttentionMetadata& batch) {
  detail::validate_queries(batch);
  throw_invalid_if(!batch.key_start_loc.empty(),
                   "key_start_loc holds {} elements, legal: 0 (a slice's keys are in the cache)",
                   batch.key_start_loc.size());
  detail::check_size("seq_lens", batch.seq_lens.size(), batch.num_reqs, "num_reqs");
  detail::check_at_least("block_table_stride", batch.block_table_stride, 0);
  detail::check_size("block_table", batch.block_table.size(),
                     detail::checked_mul<std::int64_t>(batch.num_reqs, batch.block_table_stride,
                                                       "num_reqs x block_table_stride"),
                     "num_reqs x block_table_stride");
  if (batch.slot_mapping.empty()) return;
  detail::check_size("slot_mapping", batch.slot_mapping.size(), batch.num_actual_tokens,
                     "num_actual_tokens");
}

/// Throws for a batch whose requests do not attend the same way when they are cut.
void check_cut(const CommonAttentionMetadata& batch, std::int32_t request, std::int32_t token) {
  const auto row = to_size(request);
  const std::int32_t begin = batch.query_start_loc[row];
  const std::int32_t end = batch.query_start_loc[row + 1];
  if (token <= begin || token >= end) return;
  throw_invalid_if(!batch.is_causal(),
                   "request {}: cut at token {} with causal false, legal: causal true", request,
                   token);
  throw_invalid_if(batch.seq_lens[row] < end - begin,
                   "request {}: seq_lens is {}, legal: at least the query length, {}", request,
                   batch.seq_lens[row], end - begin);
}

}  // namespace

std::vector<UBatchSlice> create_ubatch_slices(const CommonAttentionMetadata& batch,
                                              std::int32_t split_point, std::int32_t num_ubatches) {
  detail::validate_queries(batch);
  detail::check_at_least("num_ubatches", num_ubatches, 1);
  const std::int64_t before_last = std::int64_t{num_ubatches - 1} * split_point;
  throw_invalid_if(
      split_point < 1 || before_last >= batch.num_actual_tokens,
      "split_point is {}, legal: at least 1, and {} times it below num_actual_tokens {}",
      split_point, num_ubatches - 1, batch.num_actual_tokens);
  const auto starts = batch.query_start_loc.first(to_size(batch.num_reqs) + 1);
  std::vector<UBatchSlice> slices;
  slices.reserve(to_size(num_ubatches));
  for (std::int32_t begin = 0; begin < batch.num_actual_tokens;) {
    const bool last = slices.size() + 1 == to_size(num_ubatches);
    const std::int32_t end = last ? batch.num_actual_tokens : begin + split_point;
    const auto owner = std::ranges::upper_bound(starts, begin) - starts.begin() - 1;
    const auto behind = last ? std::ptrdiff_t{batch.num_reqs}
                             : std::ranges::lower_bound(starts, end) - starts.begin();
    slices.push_back(
        {{static_cast<std::int32_t>(owner), static_cast<std::int32_t>(behind)}, {begin, end}});
    begin = end;
  }
  return slices;
}

std::vector<std::int32_t> slice_query_start_locs(std::span<const std::int32_t> query_start_loc,
                                                 RequestRange request_slice) {
  const auto num_reqs = static_cast<std::int64_t>(query_start_loc.size()) - 1;
  check_range("request_slice", request_slice.begin, request_slice.end, num_reqs);
  const auto first = to_size(request_slice.begin);
  const std::int64_t origin = query_start_loc[first];
  std::vector<std::int32_t> starts(to_size(request_slice.end) - first + 1, 0);
  for (std::size_t r = 1; r < starts.size(); ++r) {
    const std::int64_t start = query_start_loc[first + r];
    throw_invalid_if(origin < 0 || start < query_start_loc[first + r - 1],
                     "query_start_loc[{}] is {} behind {}, legal: ascending from 0", first + r,
                     start, query_start_loc[first + r - 1]);
    starts[r] = static_cast<std::int32_t>(start - origin);
  }
  return starts;
}

SlicedBatch make_metadata_with_slice(const UBatchSlice& slice,
                                     const CommonAttentionMetadata& batch) {
  check_arrays(batch);
  check_slice(slice, batch);
  const auto& [requests, tokens] = slice;
  check_cut(batch, requests.begin, tokens.begin);
  check_cut(batch, requests.end - 1, tokens.end);

  SlicedBatch result{slice_query_start_locs(batch.query_start_loc, requests), {}, slice, batch};
  const std::int32_t skipped = tokens.begin - batch.query_start_loc[to_size(requests.begin)];
  std::for_each(result.query_start_loc.begin() + 1, result.query_start_loc.end(),
                [&](std::int32_t& start) { start -= skipped; });
  const auto lens =
      batch.seq_lens.subspan(to_size(requests.begin), result.query_start_loc.size() - 1);
  result.seq_lens.assign(lens.begin(), lens.end());
  const std::int32_t left_out = batch.query_start_loc[to_size(requests.end)] - tokens.end;
  result.query_start_loc.back() -= left_out;
  result.seq_lens.back() -= left_out;
  return result;
}

CommonAttentionMetadata SlicedBatch::metadata() const {
  CommonAttentionMetadata batch = original;
  const auto& [requests, tokens] = slice;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_computed_tokens = {};
  batch.num_reqs = requests.end - requests.begin;
  batch.num_actual_tokens = tokens.end - tokens.begin;
  batch.max_query_len = 0;
  batch.graph_pad_size = 0;
  const auto rows = [&](std::int64_t count) { return to_size(count * batch.block_table_stride); };
  batch.block_table = original.block_table.subspan(rows(requests.begin), rows(batch.num_reqs));
  if (!original.slot_mapping.empty()) {
    batch.slot_mapping =
        original.slot_mapping.subspan(to_size(tokens.begin), to_size(batch.num_actual_tokens));
  }
  return batch;
}

std::vector<SlicedBatch> split_attn_metadata(std::span<const UBatchSlice> slices,
                                             const CommonAttentionMetadata& batch) {
  std::vector<SlicedBatch> batches;
  batches.reserve(slices.size());
  for (const UBatchSlice& slice : slices) {
    batches.push_back(make_metadata_with_slice(slice, batch));
  }
  return batches;
}

}  // namespace clattn
