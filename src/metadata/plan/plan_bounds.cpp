// Upper bounds on the size of plans, whatever the batch. A tile cut into p pieces adds p - 1 items
// to its class and takes at least p partial rows. The shares of a balanced plan are no smaller than
// the launch's work divided by the finest target, so tiles have at most `target` shares in total. A
// tile of x shares is cut into at most x + 1/8 pieces, so it adds fewer than x items, and every cut
// tile has at least two: cut tiles have at most target * 2 / (2 - 1/8) = target * 16 / 15 pieces.
// Rebalanced cuts move fewer ranges than there are sets of groups, so that the same bound holds for
// their rows; padding lengthens their lists (RebalancedCuts::most_extra_items).
#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/checked.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

/// The requests of one tile class: this many query tokens each, `limit` to a tile.
struct Lengths {
  std::int64_t shortest;
  std::int64_t longest;
  std::int64_t limit;
};

std::int64_t most_tiles(const BatchLimits& limits, const Lengths& lengths) {
  if (lengths.longest < lengths.shortest) return 0;
  const std::int64_t tokens = limits.max_num_batched_tokens;
  const std::int64_t requests =
      std::min<std::int64_t>(limits.max_num_reqs, tokens / lengths.shortest);
  return std::min(requests * ceil_div(lengths.longest, lengths.limit),
                  (tokens + requests * (lengths.limit - 1)) / lengths.limit);
}

bool deterministic(const PlannerConfig& config) {
  return config.num_splits == 0 && config.split_policy == SplitPolicy::kDeterministic;
}

std::int64_t most_pieces(const PlannerConfig& config, const TileClass& tile, std::int64_t pages) {
  if (config.max_partial_rows < 2) return 1;
  if (config.num_splits > 0) return std::clamp<std::int64_t>(pages, 1, config.num_splits);
  const bool fixed = deterministic(config);
  const std::int64_t each =
      page_count(fixed ? config.deterministic_split_keys : tile.step_keys, config.block_size);
  return std::max<std::int64_t>(1, fixed ? ceil_div(pages, each) : pages / each);
}

/// What the class's launch and its cuts need.
struct ClassBound {
  std::int64_t items = 0;
  std::int64_t merges = 0;
  std::int64_t splits = 0;  ///< no merge has more
  std::int64_t rows = 0;
};

/// What splits at gaps behind kept keys add.
void add_gaps(const PlannerConfig& config, const BatchLimits& limits, Lengths lengths,
              ClassBound& bound) {
  if (config.num_splits == 1 || config.max_partial_rows < 2) return;
  lengths.longest = std::min<std::int64_t>(lengths.longest, config.gap_split_query_len);
  const std::int64_t tiles = most_tiles(limits, lengths);
  if (tiles == 0) return;
  const std::int64_t tokens = std::min<std::int64_t>(
      limits.max_num_batched_tokens, tiles * std::min(lengths.limit, lengths.longest));
  bound.items += tiles;
  bound.merges += tokens;
  bound.rows += 2 * tokens;
  bound.splits = std::max<std::int64_t>(bound.splits + 1, 2);
}

ClassBound bound_of(const PlannerConfig& config, const TileClass& tile, const BatchLimits& limits,
                    Lengths lengths, std::int64_t max_rows, bool may_be_rebalanced) {
  ClassBound bound;
  bound.items = most_tiles(limits, lengths);
  if (deterministic(config)) {
    lengths.longest = std::min<std::int64_t>(lengths.longest, config.max_split_query_len);
  }
  const std::int64_t cuttable = most_tiles(limits, lengths);
  if (cuttable == 0) return bound;
  const std::int64_t count = std::min(lengths.limit, lengths.longest);
  const std::int64_t pieces =
      most_pieces(config, tile, most_pages(config, limits.max_model_len, count, lengths.longest));
  const bool balanced = config.num_splits == 0 && !deterministic(config);
  const std::int64_t target = most_target_items(tile);
  std::int64_t most = max_rows;  // pieces of all tiles that are cut
  if (balanced) most = std::min(most, target + target / 15);
  std::int64_t added = std::min(cuttable * (pieces - 1), most - ceil_div(most, pieces));
  if (balanced) added = std::min(added, target - 1);
  const std::int64_t cut = std::min({cuttable, added, most / 2});
  const bool rebalanced = may_be_rebalanced && balanced && pieces > 1 && tile.ends_at_padding;
  bound.items += std::max(added, rebalanced ? RebalancedCuts::most_extra_items(tile) : 0);
  bound.merges = cut * count;
  bound.splits = cut > 0 ? std::min(pieces, added + 1) : 0;
  const std::int64_t tokens =
      std::min<std::int64_t>(limits.max_num_batched_tokens, limits.max_num_reqs * lengths.longest);
  bound.rows = std::min(std::min(added + cut, most) * count, pieces > 1 ? tokens * pieces : 0);
  return bound;
}

std::int32_t to_count(std::int64_t value) {
  return static_cast<std::int32_t>(std::min(value, kMaxInt32));
}

}  // namespace

void check_config(const PlannerConfig& config) {
  check_at_least("num_tiles", config.num_tiles, 1);
  check_at_least("block_size", config.block_size, 1);
  check_at_least("max_split_query_len", config.max_split_query_len, 1);
  check_at_least("deterministic_split_keys", config.deterministic_split_keys, 1);
  throw_invalid_if(config.num_tiles > kMaxTileClasses, "num_tiles is {}, legal: 1 … {}",
                   config.num_tiles, kMaxTileClasses);
  throw_invalid_if(config.last_is_wide && config.num_tiles < 2,
                   "last_is_wide is true, legal with num_tiles {}: false", config.num_tiles);
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    const TileClass& tile = config.tiles[c];
    const std::pair<std::string_view, std::int32_t> fields[] = {
        {"max_item_tokens", tile.max_item_tokens},
        {"groups_per_item", tile.groups_per_item},
        {"step_keys", tile.step_keys},
        {"workers", tile.workers}};
    throw_invalid_if(tile.ends_at_padding && tile.dealing != Dealing::kDealt,
                     "tiles[{}].ends_at_padding is true, legal where tasks are taken: false", c);
    for (const auto& [name, value] : fields)
      throw_invalid_if(value < 1, "tiles[{}].{} is {}, legal: at least 1", c, name, value);
    // So that a tile's whole time is a number, too.
    constexpr double kMostKeyNs = 1e15;
    const auto check_costs = [&](std::string_view name, const TaskCosts& costs) {
      throw_invalid_if(!(costs.key_ns > 0 && costs.key_ns <= kMostKeyNs &&
                         costs.token_key_ns >= 0 && costs.token_key_ns <= kMostKeyNs),
                       "tiles[{}].{}: a key takes {} ns and {} ns a token, legal: above 0 … {:g}",
                       c, name, costs.key_ns, costs.token_key_ns, kMostKeyNs);
    };
    check_costs("costs", tile.costs);
    if (tile.few_tokens > 0) check_costs("few", tile.few);
  }
  throw_invalid_if(config.num_splits < 0, "num_splits is {}, legal: at least 0 (0 = planned)",
                   config.num_splits);
}

std::int64_t most_pages(const PlannerConfig& config, std::int64_t most_keys, std::int64_t count,
                        std::int64_t query_len) {
  const KeyWindow& window = config.window;
  const std::int64_t page = config.block_size;
  // A draft's window begins as if it stood near the tree's first node, and its keys end with it.
  const std::int64_t nodes = config.lists.trees ? kMaxTreeNodes : 1;
  std::int64_t pages = ceil_div(most_keys, page);
  if (config.lists.keep_keys) return pages;  // all may be kept
  // A span may hold all keys; by the other rules it may make a query see all keys behind it.
  if (config.lists.spans && config.lists.span_rule == SpanRule::kWhole) return pages;
  if (window.left >= 0) {  // begins anywhere in a page, ends with the request
    const bool any_ahead = window.right < 0 || config.lists.any();
    const std::int64_t ahead = any_ahead ? query_len : count + window.right;
    const std::int64_t keys = window.left + std::max(std::min(ahead, query_len), nodes);
    pages = std::min(pages, ceil_div(keys + page - 1, page));
  }
  if (window.chunk > 0) {  // begins where a chunk does
    const std::int64_t chunk = window.chunk;
    const std::int64_t chunks = ceil_div(std::max(count, nodes) - 1, chunk) + 1;
    const std::int64_t keys = (chunks + window.chunk_lookback) * chunk;
    pages = std::min(pages, ceil_div(keys + page - std::gcd(chunk, page), page));
  }
  return pages;
}

PlanCounts plan_upper_bound(const PlannerConfig& config, const BatchLimits& limits,
                            std::int32_t max_query_len) {
  check_config(config);
  const std::int64_t max_rows = std::clamp<std::int64_t>(config.max_partial_rows, 0, kMaxInt32);
  PlanCounts counts;
  ClassBound all, longest;
  std::int64_t shortest = 1;
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    const TileClass& tile = config.tiles.at(c);
    const bool ends = c >= config.longest_class();
    const std::int32_t most = ends ? max_query_len : std::min(max_query_len, tile.max_query_len);
    ClassBound bound = bound_of(config, tile, limits, {shortest, most, tile.max_item_tokens},
                                max_rows, c == kRebalancedClass && config.may_rebalance());
    if (config.lists.keep_keys)
      add_gaps(config, limits, {shortest, most, tile.max_item_tokens}, bound);
    counts.num_items.at(c) = to_count(bound.items);
    if (tile.merges_splits) bound.merges = bound.splits = 0;
    counts.most_splits = std::max(counts.most_splits, to_count(bound.splits));
    if (ends) {  // a plan has tiles of one of these classes
      longest.merges = std::max(longest.merges, bound.merges);
      longest.rows = std::max(longest.rows, bound.rows);
      continue;
    }
    all.merges += bound.merges;
    all.rows += bound.rows;
    shortest = std::max<std::int64_t>(shortest, std::int64_t{tile.max_query_len} + 1);
  }
  if (config.lists.any()) {
    const std::int64_t tokens = limits.max_num_batched_tokens;
    counts.num_listed = to_count(2 * tokens);  // tiles of one row are the worst
    const std::int32_t nodes = config.lists.trees ? kMaxTreeNodes : 0;
    if (config.lists.gaps()) counts.num_gap_ints = to_count(tokens * gap_row_ints(nodes));
  }
  all.merges += longest.merges;
  all.rows += longest.rows + std::int64_t{limits.max_num_reqs} * config.most_query_len +
              spare_partial_rows(config);
  counts.num_partial_rows = std::min(all.rows, max_rows);
  counts.num_merges = to_count(std::min(
      {all.merges, std::int64_t{limits.max_num_batched_tokens}, counts.num_partial_rows / 2}));
  return counts;
}

std::int32_t fit_deterministic_split_keys(const PlannerConfig& config, const BatchLimits& limits) {
  check_config(config);
  const std::int64_t tokens =
      std::min<std::int64_t>(limits.max_num_batched_tokens,
                             std::int64_t{limits.max_num_reqs} * config.max_split_query_len);
  const std::int64_t gaps = config.lists.keep_keys ? 1 : 0;  // where a range may end early
  const std::int64_t pieces = std::min<std::int64_t>(
      config.max_partial_rows / std::max<std::int64_t>(tokens, 1) - gaps, kMostPieces - gaps);
  if (pieces < 2) return std::max(config.deterministic_split_keys, limits.max_model_len);
  const std::int64_t keys = ceil_div(std::int64_t{limits.max_model_len}, pieces);
  return std::max(config.deterministic_split_keys, static_cast<std::int32_t>(keys));
}

std::int32_t fit_gap_split_query_len(const PlannerConfig& config, const BatchLimits& limits) {
  const auto fits = [&](std::int32_t query_len) {
    const std::int64_t tokens = std::min<std::int64_t>(
        limits.max_num_batched_tokens, std::int64_t{limits.max_num_reqs} * query_len);
    return 2 * tokens <= config.max_partial_rows;
  };
  // A gap whose place follows from a length that only the device knows is read.
  if (!config.lists.keep_keys || config.lengths_are_bounds) return 0;
  if (!is_deterministic(config) && fits(INT32_MAX)) return INT32_MAX;
  return fits(config.max_split_query_len) ? config.max_split_query_len : 0;
}

}  // namespace clattn::detail
