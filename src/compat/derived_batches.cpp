// Batches that are made of others, and parts of them to look at.
#include <algorithm>
#include <clattn/compat/batch_view.hpp>
#include <clattn/compat/derived_batches.hpp>
#include <clattn/compat/virtual_batches.hpp>
#include <numeric>
#include <string_view>

#include "base/checked.hpp"
#include "kernels/step/paged_step.hpp"
#include "metadata/listed_rows.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

/// The batch with other query tokens; what depends on the old ones is left out, to be derived.
CommonAttentionMetadata with_queries(CommonAttentionMetadata batch,
                                     std::span<const std::int32_t> query_start_loc) {
  batch.query_start_loc = query_start_loc;
  batch.num_actual_tokens = query_start_loc.back();
  batch.max_query_len = 0;
  batch.num_computed_tokens = {};
  batch.slot_mapping = {};
  return batch;
}

/// Counts each request's logits tokens into starts[request + 1].
void count_logits(const CommonAttentionMetadata& batch, std::span<const std::int32_t> indices,
                  std::vector<std::int32_t>& starts) {
  std::size_t request = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::int32_t token = indices[i];
    const std::int32_t low = i == 0 ? 0 : indices[i - 1] + 1;
    throw_invalid_if(token < low || token >= detail::token_count(batch),
                     "logits_indices[{}] is {}, legal: {} … {} (ascending tokens of the batch)", i,
                     token, low, detail::token_count(batch) - 1);
    while (token >= batch.query_start_loc[request + 1]) ++request;
    const bool is_last = token + 1 == batch.query_start_loc[request + 1];
    throw_invalid_if(
        !is_last && (i + 1 == indices.size() || indices[i + 1] != token + 1),
        "request {}: logits_indices name token {} but not token {}, legal: a request's last "
        "tokens, up to {}",
        request, token, token + 1, batch.query_start_loc[request + 1] - 1);
    ++starts[request + 1];
  }
}

void check_range(std::string_view name, std::int32_t begin, std::int32_t end, std::int64_t most) {
  throw_invalid_if(begin < 0 || end < begin || end > most,
                   "{} is [{}, {}), legal: 0 <= begin <= end <= {}", name, begin, end, most);
}

/// Throws unless the first and the last request of the slice own its first and last token.
void check_slice(const UBatchSlice& slice, const CommonAttentionMetadata& batch) {
  const auto& [requests, tokens] = slice;
  check_range("request_slice", requests.begin, requests.end, batch.num_reqs);
  check_range("token_slice", tokens.begin, tokens.end, detail::token_count(batch));
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
  detail::check_size("slot_mapping", batch.slot_mapping.size(), detail::token_count(batch),
                     "the requests' tokens");
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

/// Throws unless a batch can be cut into chunks of whole blocks.
void check_chunks(std::int32_t attn_chunk_size, const CommonAttentionMetadata& batch,
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

FastPrefillBatch make_kv_sharing_fast_prefill_common_attn_metadata(
    const CommonAttentionMetadata& batch, std::span<const std::int32_t> logits_indices) {
  const std::int32_t longest = detail::validate_queries(batch);
  detail::refuse_lists("make_kv_sharing_fast_prefill_common_attn_metadata", batch);
  const std::size_t num_starts = to_size(batch.num_reqs) + 1;
  FastPrefillBatch result{{}, batch};
  if (longest <= 1) {
    const auto starts = batch.query_start_loc.first(num_starts);
    result.query_start_loc.assign(starts.begin(), starts.end());
    return result;
  }
  result.query_start_loc.assign(num_starts, 0);
  count_logits(batch, logits_indices, result.query_start_loc);
  std::partial_sum(result.query_start_loc.begin(), result.query_start_loc.end(),
                   result.query_start_loc.begin());
  return result;
}

CommonAttentionMetadata FastPrefillBatch::metadata() const {
  return with_queries(original, query_start_loc);
}

AdvancedBatch advance_batch(const CommonAttentionMetadata& batch, bool turn_prefills_into_decodes) {
  detail::validate_sequences(batch);
  detail::refuse_lists("advance_batch", batch);
  AdvancedBatch next{{0}, {}, batch};
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t query_len = detail::query_len_of(batch, r);
    throw_invalid_if(query_len > 1 && !turn_prefills_into_decodes,
                     "request {}: its query length is {}, legal: 0 … 1, or any with "
                     "turn_prefills_into_decodes",
                     r, query_len);
    const std::int32_t added = query_len > 0 ? 1 : 0;
    next.query_start_loc.push_back(next.query_start_loc.back() + added);
    next.seq_lens.push_back(
        detail::checked_add(batch.seq_lens[r], added, "advance_batch: seq_lens + 1"));
  }
  return next;
}

CommonAttentionMetadata AdvancedBatch::metadata() const {
  CommonAttentionMetadata batch = with_queries(original, query_start_loc);
  batch.seq_lens = seq_lens;
  batch.max_seq_len = 0;
  return batch;
}

std::vector<UBatchSlice> create_ubatch_slices(const CommonAttentionMetadata& batch,
                                              std::int32_t split_point, std::int32_t num_ubatches) {
  detail::validate_queries(batch);
  detail::check_at_least("num_ubatches", num_ubatches, 1);
  const std::int32_t tokens = detail::token_count(batch);
  const std::int64_t before_last = std::int64_t{num_ubatches - 1} * split_point;
  throw_invalid_if(split_point < 1 || before_last >= tokens,
                   "split_point is {}, legal: at least 1, and {} times it below the requests' {} "
                   "tokens",
                   split_point, num_ubatches - 1, tokens);
  const auto starts = batch.query_start_loc.first(to_size(batch.num_reqs) + 1);
  std::vector<UBatchSlice> slices;
  slices.reserve(to_size(num_ubatches));
  for (std::int32_t begin = 0; begin < tokens;) {
    const bool last = slices.size() + 1 == to_size(num_ubatches);
    const std::int32_t end = last ? tokens : begin + split_point;
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
  detail::refuse_lists("make_metadata_with_slice", batch);
  check_slice(slice, batch);
  const auto& [requests, tokens] = slice;
  check_cut(batch, requests.begin, tokens.begin);
  check_cut(batch, requests.end - 1, tokens.end);

  SlicedBatch result{slice_query_start_locs(batch.query_start_loc, requests), {}, slice, batch};
  const std::int32_t skipped = tokens.begin - batch.query_start_loc[to_size(requests.begin)];
  for (std::int32_t& start : std::span(result.query_start_loc).subspan(1)) start -= skipped;
  const auto lens =
      batch.seq_lens.subspan(to_size(requests.begin), result.query_start_loc.size() - 1);
  result.seq_lens.assign(lens.begin(), lens.end());
  const std::int32_t left_out = batch.query_start_loc[to_size(requests.end)] - tokens.end;
  result.query_start_loc.back() -= left_out;
  result.seq_lens.back() -= left_out;
  return result;
}

CommonAttentionMetadata SlicedBatch::metadata() const {
  CommonAttentionMetadata batch = with_queries(original, query_start_loc);
  const auto& [requests, tokens] = slice;
  batch.seq_lens = seq_lens;
  batch.num_reqs = requests.end - requests.begin;
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

std::vector<std::int32_t> get_dcp_local_seq_lens(std::span<const std::int32_t> seq_lens,
                                                 const DcpOptions& options) {
  const std::int64_t size = options.dcp_size;
  const std::int64_t turn = options.cp_kv_cache_interleave_size;
  detail::check_at_least("dcp_size", size, 1);
  detail::check_at_least("cp_kv_cache_interleave_size", turn, 1);
  if (options.dcp_rank && (*options.dcp_rank < 0 || *options.dcp_rank >= size)) {
    throw_invalid("dcp_rank is {}, legal: 0 … {}", *options.dcp_rank, size - 1);
  }
  const std::int64_t first = options.dcp_rank.value_or(0);
  const std::int64_t last = options.dcp_rank.value_or(options.dcp_size - 1);
  std::vector<std::int32_t> local;
  local.reserve(
      detail::checked_mul(seq_lens.size(), to_size(last - first + 1), "num_reqs x dcp_size"));
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    throw_invalid_if(seq_lens[r] < 0, "request {}: seq_lens is {}, legal: at least 0", r,
                     seq_lens[r]);
    const std::int64_t full = seq_lens[r] / turn / size * turn;  // of every rank
    const std::int64_t rest = seq_lens[r] - full * size;
    for (std::int64_t rank = first; rank <= last; ++rank) {
      const auto own = std::clamp<std::int64_t>(rest - rank * turn, 0, turn);
      local.push_back(static_cast<std::int32_t>(full + own));
    }
  }
  return local;
}

LocalAttentionVirtualBatches make_local_attention_virtual_batches(
    std::int32_t attn_chunk_size, const CommonAttentionMetadata& batch, std::int32_t block_size) {
  check_chunks(attn_chunk_size, batch, block_size);
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
