#include <algorithm>
#include <clattn/reorder.hpp>
#include <concepts>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/checked.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::throw_invalid, detail::throw_invalid_if, detail::to_size;

/// In batch order.
enum class Region : std::uint8_t { kDecode, kShortExtend, kLongExtend, kPrefill };
constexpr std::size_t kNumRegions = 4;

Region region_of(const RequestProgress& requests, std::size_t request,
                 std::int32_t decode_threshold) {
  const std::int32_t computed = requests.num_computed_tokens[request];
  if (computed == 0) return Region::kPrefill;
  if (requests.num_scheduled_tokens[request] > decode_threshold) return Region::kLongExtend;
  return computed >= requests.num_prompt_tokens[request] ? Region::kDecode : Region::kShortExtend;
}

void check_size(std::string_view name, std::size_t size, std::size_t num_reqs) {
  throw_invalid_if(size != num_reqs, "{} holds {} elements, legal: {} (one per request)", name,
                   size, num_reqs);
}

void check_counts(std::string_view name, std::span<const std::int32_t> counts,
                  std::size_t num_reqs) {
  check_size(name, counts.size(), num_reqs);
  for (std::size_t r = 0; r < num_reqs; ++r)
    throw_invalid_if(counts[r] < 0, "request {}: {} is {}, legal: at least 0", r, name, counts[r]);
}

/// Walks each cycle of `order` from its lowest place; every swap puts the row of one place right,
/// the last one of a cycle that of two.
std::vector<RowSwap> swaps_of(std::span<const std::int32_t> order) {
  std::vector<RowSwap> swaps;
  std::vector<std::int32_t> from(order.begin(), order.end());
  for (std::int32_t start = 0; std::cmp_less(start, from.size()); ++start) {
    std::int32_t place = start;
    while (from[to_size(place)] != start) {
      const std::int32_t next = std::exchange(from[to_size(place)], place);
      swaps.push_back({place, next});
      place = next;
    }
    from[to_size(place)] = place;
  }
  return swaps;
}

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

bool reorder_batch_to_split_decodes_and_prefills(std::span<const std::int32_t> num_scheduled_tokens,
                                                 std::int32_t decode_threshold,
                                                 std::span<std::int32_t> order) {
  detail::check_at_least("decode_threshold", decode_threshold, 0);
  const std::size_t num_reqs = num_scheduled_tokens.size();
  check_size("order", order.size(), num_reqs);
  check_counts("num_scheduled_tokens", num_scheduled_tokens, num_reqs);
  const auto is_decode = [&](std::integral auto request) {
    return num_scheduled_tokens[to_size(request)] <= decode_threshold;
  };
  std::iota(order.begin(), order.end(), 0);
  const auto num_decodes = to_size(std::ranges::count_if(order, is_decode));
  // As many prefills stand in the first num_decodes places as decodes after them: pair the first
  // of the former with the last of the latter.
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

bool reorder_batch_to_split_decodes_and_prefills(const RequestProgress& requests,
                                                 std::int32_t decode_threshold,
                                                 std::span<std::int32_t> order,
                                                 std::vector<RowSwap>* swaps) {
  detail::check_at_least("decode_threshold", decode_threshold, 0);
  const std::size_t num_reqs = requests.num_scheduled_tokens.size();
  check_counts("num_scheduled_tokens", requests.num_scheduled_tokens, num_reqs);
  check_counts("num_computed_tokens", requests.num_computed_tokens, num_reqs);
  check_counts("num_prompt_tokens", requests.num_prompt_tokens, num_reqs);
  check_size("order", order.size(), num_reqs);
  const auto region = [&](std::size_t r) {
    return static_cast<std::size_t>(region_of(requests, r, decode_threshold));
  };
  std::array<std::size_t, kNumRegions + 1> starts{};
  for (std::size_t r = 0; r < num_reqs; ++r) ++starts.at(region(r) + 1);
  std::partial_sum(starts.begin(), starts.end(), starts.begin());

  std::iota(order.begin(), order.end(), 0);
  bool moved = false;
  for (std::size_t wanted = 0; wanted < kNumRegions; ++wanted) {
    // As many rows of this region stand outside it as strangers stand inside: pair them in order.
    const auto outside = [&](std::size_t r) {
      return r < starts.at(wanted) || r >= starts.at(wanted + 1);
    };
    std::size_t source = 0;
    for (std::size_t place = starts.at(wanted); place < starts.at(wanted + 1); ++place) {
      if (region(place) == wanted) continue;
      while (!outside(source) || region(source) != wanted) ++source;
      order[place] = static_cast<std::int32_t>(source++);
      moved = true;
    }
  }
  if (swaps != nullptr) *swaps = swaps_of(order);
  return moved;
}

std::int32_t reorder_batch_threshold(std::int32_t num_speculative_tokens, Drafting drafting) {
  detail::check_at_least("num_speculative_tokens", num_speculative_tokens, 0);
  const auto drafts = detail::checked_mul<std::int32_t>(
      num_speculative_tokens, drafting == Drafting::kParallel ? 2 : 1, "num_speculative_tokens");
  return detail::checked_add<std::int32_t>(drafts, 1, "num_speculative_tokens");
}

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
