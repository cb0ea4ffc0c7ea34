#include <algorithm>
#include <clattn/reorder.hpp>
#include <concepts>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/checked.hpp"

namespace clattn {
namespace {

using detail::throw_invalid_if, detail::to_size;

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

}  // namespace clattn
