// The cuts of a plan: of each launch those that end it earliest, and whether two launches run
// beside each other.
#include <algorithm>
#include <optional>

#include "base/checked.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/plan/rebalanced_cuts.hpp"

namespace clattn::detail {
namespace {

/// The two classes whose launches may run at the same time: the only ones with tiles, both with
/// persistent work-groups, one of each for a place on the device.
std::optional<std::array<std::size_t, 2>> pair_of(const PlannerConfig& config,
                                                  const PlanTiles& tiles) {
  if (config.beside_ns == std::numeric_limits<double>::infinity()) return std::nullopt;
  std::array<std::size_t, 2> pair{};
  std::size_t used = 0;
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    if (tiles[c].empty()) continue;
    if (used == 2 || config.tiles[c].dealing != Dealing::kDealt) return std::nullopt;
    pair[used++] = c;
  }
  const std::int32_t workers = config.tiles[pair[0]].workers;
  if (used < 2 || workers != config.tiles[pair[1]].workers || workers < 2) return std::nullopt;
  return pair;
}

/// The end of launches in turn, or beside each other if they have a share of the work-groups each;
/// merges included.
double plan_ns(const PlannerConfig& config, const PlanTiles& tiles, const PlanCuts& cuts) {
  double sum = 0, longest = 0, merges = 0, merge_launch = 0;
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    if (tiles[c].empty()) continue;
    const CutChoice& choice = cuts.classes[c];
    sum += choice.end_ns;
    longest = std::max(longest, cuts.slower[c] * choice.end_ns);
    merges += choice.merge_ns;
    if (choice.merges) merge_launch = config.merge.launch_ns;
  }
  const bool beside = longest > 0;
  return (beside ? longest + config.beside_ns : sum) + merges + merge_launch;
}

// Two launches at once: one that waits for memory, on a share of the work-groups, and one
// that computes, on the rest. The more groups wait for memory, the longer the computing launch's
// reads take. On an H100, whose memory is slower than the costs assume, the waiting launch took
// 1.06 to 1.16 times its time alone with less than half of the groups; the computing one took 1.0
// to 1.1 times beside 1/7 of them and 1.24 to 1.29 times beside 2/5. Beside 3/5 and more, both took
// 1.3 to 1.8 times, and most batches got slower than in turn (docs/journal.md).
constexpr double kWaitingSlower = 1.05;
constexpr double kMostWaiting = 0.5;
double computing_slower(std::int32_t waiting, std::int32_t all) {
  return 1 + 0.5 * waiting / all;
}

/// Two launches at once, were their tasks small: work-groups for the one that waits, so
/// that both end at about the same time, and that time.
struct EvenShare {
  std::int32_t waiting = 1;
  double end_ns = std::numeric_limits<double>::infinity();
};
EvenShare even_share(const EvenTime& waits, const EvenTime& computes, std::int32_t all) {
  EvenShare best;
  for (std::int32_t waiting = 1; waiting <= kMostWaiting * all; ++waiting) {
    const double end = std::max(kWaitingSlower * waits.ns(waiting),
                                computing_slower(waiting, all) * computes.ns(all - waiting));
    if (end < best.end_ns) best = {waiting, end};
  }
  return best;
}

/// The share that leaves the computing launch just enough groups to take one round of tasks less
/// than with `waiting` groups for the other launch, if its last round would not be full.
std::int32_t share_of_fewer_rounds(std::int64_t tasks, std::int32_t waiting, std::int32_t all) {
  const std::int64_t rounds = std::max<std::int64_t>(tasks / (all - waiting), 1);
  return static_cast<std::int32_t>(all - ceil_div(tasks, rounds));
}

/// The best cuts of balanced plans: each class's own, or none where their gain is less than the
/// merge launch that they share, unless gaps in keys want that launch anyway.
std::array<CutChoice, kMaxTileClasses> choose_cuts(const PlannerConfig& config,
                                                   const PlanTiles& tiles, std::int64_t max_rows) {
  std::array<CutChoice, kMaxTileClasses> best, uncut;
  double gain = 0;
  bool merges_anyway = false;
  const std::size_t num_tiles = to_size(config.num_tiles);
  for (std::size_t c = 0; c < num_tiles; ++c) {
    const TileClass& tile = config.tiles[c];
    best[c] = tiles[c].choose(tile, config.merge, max_rows);
    if (c == kRebalancedClass && config.may_rebalance())
      best[c] = tiles[c].or_rebalanced(tile, config.merge, max_rows, best[c]);
    if (!best[c].merges) continue;
    uncut[c] = tiles[c].judge(tile, config.merge);
    gain += uncut[c].total_ns() - best[c].total_ns();
    merges_anyway = merges_anyway || uncut[c].merges;
  }
  if (merges_anyway) return best;
  for (std::size_t c = 0; c < num_tiles && gain < config.merge.launch_ns; ++c) {
    if (best[c].merges) best[c] = uncut[c];
  }
  return best;
}

/// Fills in those cuts, and when the plan then ends.
void cut_classes(const PlannerConfig& config, const PlanTiles& tiles, std::int64_t max_rows,
                 PlanCuts& cuts) {
  cuts.classes = choose_cuts(config, tiles, max_rows);
  const TileClass& tile = config.tiles[kRebalancedClass];
  // Rebalanced cuts use whole sets of groups; groups left over are not launched.
  if (cuts.classes[kRebalancedClass].rebalanced)
    cuts.workers[kRebalancedClass] = RebalancedCuts::sets_of(tile) * tile.groups_per_item;
  cuts.end_ns = plan_ns(config, tiles, cuts);
}

}  // namespace

PlanCuts choose_plan(const PlannerConfig& config, const PlanTiles& tiles, std::int64_t max_rows) {
  PlanCuts best;
  cut_classes(config, tiles, max_rows, best);
  const auto pair = pair_of(config, tiles);
  if (!pair) return best;
  auto [waits, computes] = *pair;
  const std::int32_t all = config.tiles[waits].workers;
  EvenTime waiting_time = tiles[waits].judge(config.tiles[waits], config.merge).even;
  EvenTime computing_time = tiles[computes].judge(config.tiles[computes], config.merge).even;
  // Two that wait for memory only take it from each other.
  if (waiting_time.waits_for_memory(all) == computing_time.waits_for_memory(all)) return best;
  if (computing_time.waits_for_memory(all)) {
    std::swap(waits, computes);
    std::swap(waiting_time, computing_time);
  }
  const EvenShare even = even_share(waiting_time, computing_time, all);
  if (even.end_ns + config.beside_ns >= best.end_ns) return best;
  const std::int64_t tasks =
      std::int64_t{tiles[computes].tiles()} * config.tiles[computes].groups_per_item;
  const std::int32_t fewer_rounds = share_of_fewer_rounds(tasks, even.waiting, all);
  PlannerConfig shared = config;
  for (const std::int32_t waiting : {even.waiting, fewer_rounds}) {
    if (waiting < 1 || waiting > kMostWaiting * all) continue;
    PlanCuts beside;
    beside.workers[waits] = shared.tiles[waits].workers = waiting;
    beside.workers[computes] = shared.tiles[computes].workers = all - waiting;
    beside.slower[waits] = kWaitingSlower;
    beside.slower[computes] = computing_slower(waiting, all);
    cut_classes(shared, tiles, max_rows, beside);
    if (beside.end_ns < best.end_ns) best = beside;
    if (fewer_rounds == even.waiting) break;
  }
  return best;
}

}  // namespace clattn::detail
