#include "metadata/level_cuts.hpp"

#include <algorithm>
#include <bit>

#include "base/checked.hpp"

namespace clattn::detail {

std::int32_t keys_of_pages(std::int32_t pages, std::int32_t page_size, std::int32_t keys) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{pages} * page_size, keys));
}

// Weights that are positive floats are in the order of their bits; heavier tiles first.
void LevelCuts::add(const TileClass& tile, std::int32_t keys, std::int32_t tokens) {
  const auto index = to_size(num_tiles_++);
  const auto weight = static_cast<float>(keys_ns(tile, keys, tokens));
  tiles_[index] = {keys, tokens, 0, 0, 0};
  order_[index] = std::uint64_t{~std::bit_cast<std::uint32_t>(weight)} << 32 | index;
}

void LevelCuts::deal(const TileClass& tile) {
  std::ranges::fill(teams(), Team{0, 0, -1});
  const auto order = std::span(order_).first(to_size(num_tiles_));
  if (!std::ranges::is_sorted(order)) std::ranges::sort(order);
  for (std::int32_t at = 0; at < num_tiles_; ++at) {
    const auto index = static_cast<std::uint32_t>(order[to_size(at)]);
    Tile& dealt = tiles_[index];
    dealt.position = at;
    const std::int32_t round = at / teams_;
    Team& team = team_[to_size(position_of(at % teams_, round) - round * teams_)];
    team.load += task_ns(tile, dealt.keys, dealt.tokens, false);
    if (team.items++ == 0) team.heaviest = static_cast<std::int32_t>(index);
  }
  num_items_ = num_tiles_;
}

/// The load at which teams above it have as much to give as those below it can take. Every range
/// costs `range_ns` besides its keys, and a team's last one may be shared by two that take it; the
/// tile that it is cut from costs `split_ns`.
double LevelCuts::even_load(double split_ns, double range_ns) {
  double low = 0, high = 0;
  for (const Team& team : teams()) {
    low += team.load / teams_;
    high = std::max(high, team.load);
  }
  constexpr int kSteps = 12;  // to 1/4096 of the difference
  for (int step = 0; step < kSteps; ++step) {
    const double middle = (low + high) / 2;
    double left = 0;
    for (const Team& team : teams()) {
      const double surplus = team.load - middle;
      left += surplus > 0 ? surplus + split_ns + range_ns : -std::max(-surplus - range_ns, 0.0);
    }
    (left > 0 ? low : high) = middle;
  }
  return high;
}

/// Gives the keys of a team's heaviest tile that are too many, from its end on, to the teams from
/// `to` on.
void LevelCuts::give(const TileClass& tile, const Pages& pages, double even, Team& from,
                     std::int32_t& to) {
  Tile& given = tiles_[to_size(from.heaviest)];
  const TaskCosts& costs = tile.costs_of(given.tokens);
  const double step_ns = keys_ns(tile, pages.of_step * pages.size, given.tokens);
  const std::int32_t most_items = ceil_div(num_tiles_, teams_) + kMoreRounds;
  const auto room = [&] { return even - team_[to_size(to)].load - costs.task_ns - costs.split_ns; };
  if (from.load - even < step_ns) return;
  from.load += costs.split_ns;
  given.first_move = num_moves_;
  std::int32_t end = ceil_div(given.keys, pages.size);
  while (from.load - even >= step_ns && end >= 2 * pages.of_step && num_moves_ + 1 < teams_) {
    while (to < teams_ && (room() < step_ns || team_[to_size(to)].items >= most_items)) ++to;
    if (to == teams_) break;
    const auto wanted = static_cast<std::int32_t>(std::min(from.load - even, room()) / step_ns);
    const std::int32_t steps = std::min(wanted, end / pages.of_step - 1);
    const std::int32_t begin = (end - steps * pages.of_step) / pages.of_step * pages.of_step;
    const std::int32_t keys = keys_of_pages(end, pages.size, given.keys) - begin * pages.size;
    Team& taker = team_[to_size(to)];
    const std::int32_t position = position_of(to, taker.items++);
    taker.load += task_ns(tile, keys, given.tokens, true);
    from.load -= keys_ns(tile, keys, given.tokens);
    num_items_ = std::max(num_items_, position + 1);
    moves_[to_size(num_moves_++)] = {begin, end, position};
    end = begin;
  }
  given.num_moves = num_moves_ - given.first_move;
  if (given.num_moves > 0) num_rows_ += std::int64_t{given.num_moves + 1} * given.tokens;
}

void LevelCuts::cut(const TileClass& tile, std::int32_t page_size, std::int32_t step_pages) {
  teams_ = teams_of(tile);
  deal(tile);
  const TaskCosts& costs = tile.costs_of(tile.max_item_tokens);
  const double even = even_load(costs.split_ns, costs.task_ns + costs.split_ns);
  std::int32_t to = 0;
  for (Team& from : teams()) {
    if (from.heaviest >= 0) give(tile, {page_size, step_pages}, even, from, to);
  }
}

}  // namespace clattn::detail
