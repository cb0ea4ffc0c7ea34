#include "metadata/plan/rebalanced_cuts.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace clattn::detail {

std::int32_t keys_of_pages(std::int32_t pages, std::int32_t page_size, std::int32_t keys) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{pages} * page_size, keys));
}

// Floats above 0 sort as their bits do; the complement puts heavier tiles first.
void RebalancedCuts::add(const TileClass& tile, std::int32_t keys, std::int32_t tokens) {
  const auto index = to_size(num_tiles_++);
  const auto weight = static_cast<float>(keys_ns(tile, keys, tokens));
  tiles_[index] = {keys, tokens, 0, 0, 0};
  shared_ns_ += shared_ns(tile, keys, tokens) * tile.groups_per_item;
  order_[index] = std::uint64_t{~std::bit_cast<std::uint32_t>(weight)} << 32 | index;
}

void RebalancedCuts::deal(const TileClass& tile) {
  std::ranges::fill(sets(), GroupSet{0, 0, -1});
  const auto order = std::span(order_).first(to_size(num_tiles_));
  if (!std::ranges::is_sorted(order)) std::ranges::sort(order);
  for (std::int32_t at = 0; at < num_tiles_; ++at) {
    const auto index = static_cast<std::uint32_t>(order[to_size(at)]);
    Tile& dealt = tiles_[index];
    dealt.position = at;
    const std::int32_t round = at / num_sets_;
    GroupSet& set = sets_[to_size(position_of(at % num_sets_, round) - round * num_sets_)];
    set.load += task_ns(tile, dealt.keys, dealt.tokens, false);
    if (set.items++ == 0) set.heaviest = static_cast<std::int32_t>(index);
  }
  num_items_ = num_tiles_;
}

/// The load at which what sets above it must give equals what sets below it can take, in whole
/// steps. A range costs a task and a split besides its keys. A giver pays a split, and the price of
/// one more range and step, because its surplus may end inside a taker's room.
double RebalancedCuts::target_load(const TaskCosts& costs, double step_ns) {
  const double range_ns = costs.task_ns + costs.split_ns;
  const double giver_ns = costs.split_ns + range_ns + step_ns;
  double low = 0, high = 0;
  for (const GroupSet& set : sets()) {
    low += set.load / num_sets_;
    high = std::max(high, set.load);
  }
  constexpr int kSteps = 12;  // to 1/4096 of the difference
  for (int step = 0; step < kSteps; ++step) {
    const double middle = (low + high) / 2;
    double left = 0;
    for (const GroupSet& set : sets()) {
      const double room = middle - set.load - range_ns;
      if (set.load > middle) left += set.load - middle + giver_ns;
      if (room > 0) left -= std::floor(room / step_ns) * step_ns;
    }
    (left > 0 ? low : high) = middle;
  }
  return high;
}

/// Moves the surplus keys of a set's heaviest tile, last keys first, to sets below the target load,
/// beginning with `to`.
void RebalancedCuts::give(const TileClass& tile, const Pages& pages, double target, GroupSet& from,
                          std::int32_t& to) {
  Tile& given = tiles_[to_size(from.heaviest)];
  const TaskCosts& costs = tile.costs_of(given.tokens);
  const double step_ns = keys_ns(tile, pages.of_step * pages.size, given.tokens);
  const std::int32_t most_items = ceil_div(num_tiles_, num_sets_) + kExtraRounds;
  const auto room = [&] {
    return target - sets_[to_size(to)].load - costs.task_ns - costs.split_ns;
  };
  if (from.load - target < step_ns) return;
  from.load += costs.split_ns;
  given.first_move = num_moves_;
  std::int32_t end = ceil_div(given.keys, pages.size);
  while (from.load - target >= step_ns && end >= 2 * pages.of_step && num_moves_ + 1 < num_sets_) {
    while (to < num_sets_ && (room() < step_ns || sets_[to_size(to)].items >= most_items)) ++to;
    if (to == num_sets_) break;
    const double wanted = std::min(from.load - target, room()) / step_ns;
    const std::int32_t most = end / pages.of_step - 1;
    const auto steps = static_cast<std::int32_t>(std::min<double>(wanted, most));
    const std::int32_t begin = (end - steps * pages.of_step) / pages.of_step * pages.of_step;
    const std::int32_t keys = keys_of_pages(end, pages.size, given.keys) - begin * pages.size;
    GroupSet& taker = sets_[to_size(to)];
    const std::int32_t position = position_of(to, taker.items++);
    taker.load += task_ns(tile, keys, given.tokens, true);
    from.load -= keys_ns(tile, keys, given.tokens);
    num_items_ = std::max(num_items_, position + 1);
    moves_[to_size(num_moves_++)] = {begin, end, position};
    end = begin;
  }
  given.num_moves = num_moves_ - given.first_move;
  if (given.num_moves == 0) return;
  num_rows_ += std::int64_t{given.num_moves + 1} * given.tokens;
  num_cut_tokens_ += given.tokens;
}

void RebalancedCuts::cut(const TileClass& tile, std::int32_t page_size, std::int32_t step_pages) {
  num_sets_ = sets_of(tile);
  deal(tile);
  const TaskCosts& costs = tile.costs_of(tile.max_item_tokens);
  const double step_ns = keys_ns(tile, step_pages * page_size, tile.max_item_tokens);
  const double target = target_load(costs, step_ns);
  std::int32_t to = 0;
  for (GroupSet& from : sets()) {
    if (from.heaviest >= 0) give(tile, {page_size, step_pages}, target, from, to);
  }
}

double RebalancedCuts::end_ns(const TileClass& tile) const {
  double busiest = 0;
  for (std::int32_t set = 0; set < num_sets_; ++set)
    busiest = std::max(busiest, sets_[to_size(set)].load);
  return tile.launch_ns + shared_ns_ + busiest;
}

}  // namespace clattn::detail
