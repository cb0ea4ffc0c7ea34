// All tiles of a request read the same keys. Groups that work on them at the same time find these
// keys in the last-level cache, so that a request's tiles should follow each other; but groups that
// take the heaviest tiles first end together. Both hold if tiles of nearly equal weight are taken
// request by request.
#include <algorithm>
#include <limits>
#include <tuple>

#include "metadata/plan/planner.hpp"

namespace clattn::detail {
namespace {

double cost_ns(const TileClass& tile, const ClaWorkItem& item) {
  return keys_ns(tile, item.kv_end - item.kv_begin, item.q_count);
}

}  // namespace

double equal_costs_ns(const TileClass& tile, std::span<const ClaWorkItem> items) {
  // A causal tile sees as many keys more than the one before it as it has tokens. With half of the
  // groups on a request, keys are read from memory rarely enough; with all of them prompts of 8192
  // tokens were slower (docs/journal.md).
  const std::int32_t tiles_at_once = std::max(1, tile.workers / (2 * tile.groups_per_item));
  const double of_tiles = keys_ns(tile, static_cast<double>(tiles_at_once) * tile.max_item_tokens,
                                  tile.max_item_tokens);
  double all = 0;
  for (const ClaWorkItem& item : items) all += cost_ns(tile, item);
  const double of_worker = all * tile.groups_per_item / tile.workers;
  constexpr double kMostUneven = 1.0 / 64;  // else groups end too far apart
  return std::min(of_tiles, kMostUneven * of_worker);
}

void sort_items(ItemOrder order, const TileClass& tile, std::span<ClaWorkItem> items) {
  if (order == ItemOrder::kAsCut || items.empty()) return;
  const double equal_ns = equal_costs_ns(tile, items);
  const double ranks_per_ns = equal_ns > 0 ? 1 / equal_ns : 0;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const ClaWorkItem& item : items) {
    const double ns = cost_ns(tile, item);
    least = std::min(least, ns);
    most = std::max(most, ns);
  }
  // Ranks count from the heaviest item on, so that requests of one length share all of theirs.
  const auto rank = [&](double ns) {
    constexpr double kRounding = 1e-6;
    return static_cast<std::int64_t>((most - ns) * ranks_per_ns + kRounding);
  };
  const auto place = [&](const ClaWorkItem& item) {
    return std::tuple(-rank(cost_ns(tile, item)), item.q_row, item.kv_begin);
  };
  // Items of one rank are cut in this order, but for those without keys, whose order does not
  // matter.
  if (rank(least) > 0 && !std::ranges::is_sorted(items, {}, place))
    std::ranges::sort(items, {}, place);
  if (order == ItemOrder::kHeavyFirst) std::ranges::reverse(items);
}

void place_items(const PlanCounts& counts, const PlanOutput& output) {
  for (std::size_t c = 0; c < counts.num_items.size(); ++c) {
    for (std::int32_t i = 0; i < counts.num_items[c]; ++i) {
      ClaWorkItem& item = output.items[c][to_size(i)];
      ClaSplit& split = output.splits[to_size(item.pages_at)];
      split.item_at = output.item_at(c, i);
      item.pages_at = split.pages_at;
    }
  }
}

}  // namespace clattn::detail
