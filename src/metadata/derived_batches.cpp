#include <algorithm>
#include <clattn/compat/derived_batches.hpp>
#include <numeric>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

/// Counts each request's logits tokens into starts[request + 1].
void count_logits(const CommonAttentionMetadata& batch, std::span<const std::int32_t> indices,
                  std::vector<std::int32_t>& starts) {
  std::size_t request = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::int32_t token = indices[i];
    const std::int32_t low = i == 0 ? 0 : indices[i - 1] + 1;
    throw_invalid_if(token < low || token >= batch.num_actual_tokens,
                     "logits_indices[{}] is {}, legal: {} … {} (ascending tokens of the batch)", i,
                     token, low, batch.num_actual_tokens - 1);
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

}  // namespace

FastPrefillBatch make_kv_sharing_fast_prefill_common_attn_metadata(
    const CommonAttentionMetadata& batch, std::span<const std::int32_t> logits_indices) {
  const std::int32_t longest = detail::validate_queries(batch);
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
  CommonAttentionMetadata batch = original;
  batch.query_start_loc = query_start_loc;
  batch.num_actual_tokens = query_start_loc.back();
  batch.max_query_len = 0;
  batch.num_computed_tokens = {};
  batch.slot_mapping = {};
  return batch;
}

AdvancedBatch advance_batch(const CommonAttentionMetadata& batch, bool turn_prefills_into_decodes) {
  detail::validate_sequences(batch);
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
  CommonAttentionMetadata batch = original;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_actual_tokens = query_start_loc.back();
  batch.max_query_len = batch.max_seq_len = 0;
  batch.num_computed_tokens = {};
  batch.slot_mapping = {};
  return batch;
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

}  // namespace clattn
