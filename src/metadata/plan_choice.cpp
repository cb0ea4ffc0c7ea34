// The cuts of a plan: of each launch those that end it earliest, and whether two launches run
// beside each other.
#include <algorithm>

#include "base/checked.hpp"
#include "metadata/planner.hpp"

namespace clattn::detail {
namespace {

using Cuts = std::array<CutChoice, kMaxTileClasses>;

/// The classes that have tiles.
struct UsedClasses {
  std::array<std::size_t, kMaxTileClasses> numbers{};
  std::size_t count = 0;
  std::span<const std::size_t> all() const { return std::span(numbers).first(count); }
};
UsedClasses used_classes(const PlannerConfig& config, const PlanTiles& tiles) {
  UsedClasses used;
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    if (!tiles[c].empty()) used.numbers[used.count++] = c;
  }
  return used;
}

/// Whether there are two launches with persistent work-groups, one of each for a place on the
/// device.
bool may_pair(const PlannerConfig& config, const UsedClasses& used) {
  if (used.count != 2 || config.beside_ns == std::numeric_limits<double>::infinity()) return false;
  const TileClass& first = config.tiles[used.numbers[0]];
  const TileClass& second = config.tiles[used.numbers[1]];
  return first.dealing == Dealing::kDealt && second.dealing == Dealing::kDealt &&
         first.workers == second.workers && first.workers >= 2;
}

/// Of the launches in turn, or of two beside each other; merges included.
double plan_ns(const PlannerConfig& config, const UsedClasses& used, const Cuts& cuts,
               bool beside) {
  double sum = 0, longest = 0, merges = 0, merge_launch = 0;
  for (const std::size_t c : used.all()) {
    sum += cuts[c].end_ns;
    longest = std::max(longest, cuts[c].end_ns);
    merges += cuts[c].merge_ns;
    if (cuts[c].merges) merge_launch = config.merge.launch_ns;
  }
  return (beside ? kBesideSlower * longest + config.beside_ns : sum) + merges + merge_launch;
}

/// Work-groups for the first of two launches, so that both end at about the same time.
std::int32_t workers_of_first(const EvenTime& first, const EvenTime& second, std::int32_t all) {
  std::int32_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (std::int32_t workers = 1; workers < all; ++workers) {
    const double ns = std::max(first.ns(workers), second.ns(all - workers));
    if (ns >= least) continue;
    least = ns;
    best = workers;
  }
  return best;
}

}  // namespace

std::array<CutChoice, kMaxTileClasses> choose_cuts(const PlannerConfig& config,
                                                   const PlanTiles& tiles, std::int64_t max_rows) {
  std::array<CutChoice, kMaxTileClasses> best, uncut;
  double gain = 0;
  const std::size_t num_tiles = to_size(config.num_tiles);
  for (std::size_t c = 0; c < num_tiles; ++c) {
    const TileClass& tile = config.tiles[c];
    best[c] = tiles[c].choose(tile, config.merge, max_rows);
    if (!best[c].merges) continue;
    uncut[c] = tiles[c].judge(tile, config.merge, CutChoice{}.share_ns);
    gain += uncut[c].total_ns() - best[c].total_ns();
  }
  for (std::size_t c = 0; c < num_tiles && gain < config.merge.launch_ns; ++c) {
    if (best[c].merges) best[c] = uncut[c];
  }
  return best;
}

PlanCuts choose_plan(const PlannerConfig& config, const PlanTiles& tiles, std::int64_t max_rows) {
  const UsedClasses used = used_classes(config, tiles);
  PlanCuts in_turn{.classes = choose_cuts(config, tiles, max_rows)};
  in_turn.end_ns = plan_ns(config, used, in_turn.classes, false);
  if (!may_pair(config, used)) return in_turn;
  const auto [first, second] = std::pair(used.numbers[0], used.numbers[1]);
  const std::int32_t all = config.tiles[first].workers;
  const EvenTime first_time = tiles[first].even_time(config.tiles[first], config.merge);
  const EvenTime second_time = tiles[second].even_time(config.tiles[second], config.merge);
  // Two that wait for memory only take it from each other.
  if (first_time.waits_for_memory(all) == second_time.waits_for_memory(all)) return in_turn;
  const std::int32_t workers = workers_of_first(first_time, second_time, all);
  const double least = std::max(first_time.ns(workers), second_time.ns(all - workers));
  if (kBesideSlower * least + config.beside_ns >= in_turn.end_ns) return in_turn;
  PlannerConfig shared = config;
  shared.tiles[first].workers = workers;
  shared.tiles[second].workers = all - workers;
  PlanCuts beside{.classes = choose_cuts(shared, tiles, max_rows)};
  beside.workers[first] = workers;
  beside.workers[second] = all - workers;
  beside.end_ns = plan_ns(config, used, beside.classes, true);
  return beside.end_ns < in_turn.end_ns ? beside : in_turn;
}

}  // namespace clattn::detail
