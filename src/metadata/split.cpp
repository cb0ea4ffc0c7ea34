#include <algorithm>
#include <clattn/reorder.hpp>

#include "base/checked.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

std::int32_t query_len(const CommonAttentionMetadata& batch, std::int32_t request) {
  return detail::query_len_of(batch, to_size(request));
}

/// Padding at the batch's end counts with the side that its rows stand on.
BatchSplit split_at(const CommonAttentionMetadata& batch, std::int32_t num_decodes) {
  const std::int32_t tokens = num_decodes == batch.num_reqs
                                  ? batch.num_actual_tokens
                                  : batch.query_start_loc[to_size(num_decodes)];
  return {num_decodes, batch.num_reqs - num_decodes, tokens, batch.num_actual_tokens - tokens};
}

}  // namespace

BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch,
                                      std::int32_t decode_threshold) {
  const BatchSplit split =
      split_decodes_and_prefills(batch, SplitOptions{.decode_threshold = decode_threshold});
  const std::int32_t first = split.num_decodes;
  for (std::int32_t r = first; r < batch.num_reqs; ++r) {
    // A request without query tokens is nobody's work and may be anywhere: padding comes last.
    const std::int32_t length = query_len(batch, r);
    throw_invalid_if(
        length > 0 && length <= decode_threshold,
        "request {}: query length is {}, legal: at least {} (decodes stand before prefills; "
        "request {} is a prefill of {} tokens)",
        r, length, decode_threshold + 1, first, query_len(batch, first));
  }
  return split;
}

BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch,
                                      const SplitOptions& options) {
  const std::int32_t threshold = options.decode_threshold;
  detail::check_at_least("decode_threshold", threshold, 0);
  detail::validate_queries(batch);
  const bool by_length = options.treat_short_extends_as_decodes;
  throw_invalid_if(!by_length && options.is_prefilling.size() < to_size(batch.num_reqs),
                   "is_prefilling holds {} elements, legal: at least {} (num_reqs; needed unless "
                   "treat_short_extends_as_decodes)",
                   options.is_prefilling.size(), batch.num_reqs);
  std::int32_t uniform = 0;  // the query length of the first request that has query tokens
  const auto is_prefill = [&](std::int32_t r) {
    const std::int32_t length = query_len(batch, r);
    if (length == 0) return false;
    if (uniform == 0) uniform = length;
    return length > threshold || (options.require_uniform && length != uniform) ||
           (!by_length && options.is_prefilling[to_size(r)] != 0);
  };
  std::int32_t num_decodes = 0;
  while (num_decodes < batch.num_reqs && !is_prefill(num_decodes)) ++num_decodes;
  return split_at(batch, num_decodes);
}

ExtendSplit split_decodes_prefills_and_extends(const CommonAttentionMetadata& batch,
                                               std::int32_t decode_threshold) {
  detail::check_at_least("decode_threshold", decode_threshold, 0);
  detail::validate_queries(batch);
  detail::check_size("seq_lens", batch.seq_lens.size(), batch.num_reqs, "num_reqs");
  std::int32_t first_extend = batch.num_reqs;
  std::int32_t first_prefill = batch.num_reqs;
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const std::int32_t length = query_len(batch, r);
    const std::int32_t seq_len = batch.seq_lens[to_size(r)];
    throw_invalid_if(seq_len < length,
                     "request {}: seq_lens is {}, legal: at least {} (the query length)", r,
                     seq_len, length);
    const bool has_context = seq_len > length;
    const bool is_long = length > decode_threshold;
    if (is_long) first_extend = std::min(first_extend, r);
    if (is_long && !has_context) first_prefill = std::min(first_prefill, r);
    if (has_context && length > 0 && r > (is_long ? first_prefill : first_extend)) {
      throw_invalid(
          "request {}: {} query tokens of seq_lens {} stand behind request {}; legal: decodes, "
          "then extends, then prefills (decode_threshold {})",
          r, length, seq_len, is_long ? first_prefill : first_extend, decode_threshold);
    }
  }
  // Padding counts with the last requests.
  const auto start = [&](std::int32_t r) {
    return r == batch.num_reqs ? batch.num_actual_tokens : batch.query_start_loc[to_size(r)];
  };
  return {.num_decodes = first_extend,
          .num_extends = first_prefill - first_extend,
          .num_prefills = batch.num_reqs - first_prefill,
          .num_decode_tokens = start(first_extend),
          .num_extend_tokens = start(first_prefill) - start(first_extend),
          .num_prefill_tokens = batch.num_actual_tokens - start(first_prefill)};
}

std::vector<RequestRange> split_prefill_chunks(std::span<const std::int32_t> seq_lens,
                                               std::int64_t workspace_size,
                                               std::int32_t request_offset) {
  std::vector<RequestRange> chunks;
  std::int64_t used = 0;
  const auto num_reqs = static_cast<std::int32_t>(seq_lens.size());
  detail::checked_add(num_reqs, request_offset, "request_offset");
  for (std::int32_t r = 0; r < num_reqs; ++r) {
    const std::int32_t seq_len = seq_lens[to_size(r)];
    throw_invalid_if(seq_len < 0 || seq_len > workspace_size,
                     "request {}: seq_lens is {}, legal: 0 … {} (workspace_size)", r, seq_len,
                     workspace_size);
    if (chunks.empty() || used + seq_len > workspace_size) {
      chunks.push_back({r + request_offset, r + request_offset});
      used = 0;
    }
    used += seq_len;
    ++chunks.back().end;
  }
  return chunks;
}

}  // namespace clattn
