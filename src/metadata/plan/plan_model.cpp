// Predicts how long a launch takes. A launch is a list of tasks, heaviest first, served by a number
// of work-groups at once; it ends when the busiest of them does. How tasks are handed out decides
// how busy that one is. Groups also slow each other down, because all read one memory: with `a` of
// them at work, a key takes key_ns * (1 + a / parallel). Integrated over the launch, this gives
//
//   end = busiest group's tasks + all tasks' keys / parallel
//
// and does not depend on the order of tasks. On an H200 a key of a decode group takes 6.0 ns with
// 7 other groups, 9.2 with 55 and 14.3 with 127 (docs/performance.md).
#include "metadata/plan/plan_model.hpp"

#include <algorithm>
#include <bit>

#include "base/checked.hpp"
#include "metadata/plan/rebalanced_cuts.hpp"

namespace clattn::detail {
namespace {

/// The finest candidate has about this many tasks for each worker.
constexpr int kMostWaves = 4;
/// Groups with equal tasks still end at different times, apart by this fraction of a task: cores
/// have other work, and the groups of a compute unit do not get equal shares of it.
constexpr double kUneven = 0.1;
/// Up to this many workers, dealing is simulated; with more, the bound for takers is close enough.
constexpr std::int64_t kMostDealt = 512;
/// A tile gets n splits from n - kNearly shares on, so that nearly equal tiles are cut alike.
constexpr double kNearly = 0.125;
/// Splitting must gain at least this fraction; the costs are not known any better.
constexpr double kLeastGain = 0.02;

/// Sets a bit of a bit set. Returns whether it was set before.
template <std::size_t kWords>
bool set_bit(std::array<std::uint64_t, kWords>& bits, std::size_t index) {
  const std::uint64_t bit = std::uint64_t{1} << (index % 64);
  const bool before = (bits[index / 64] & bit) != 0;
  bits[index / 64] |= bit;
  return before;
}

/// The load of the busiest group when runs of equal tasks are dealt in alternating directions.
double busiest_of_dealt(std::span<const TaskRun> runs, std::int64_t workers) {
  // Of the load from one worker to the next; each is valid only if its bit is set.
  std::array<double, kMostDealt + 1> steps;  // NOLINT(*-member-init)
  std::array<std::uint64_t, kMostDealt / 64 + 1> stepped{};
  const auto add_step = [&](std::int64_t worker, double ns) {
    double& step = steps[to_size(worker)];
    step = set_bit(stepped, to_size(worker)) ? step + ns : ns;
  };
  double all = 0;  // of every worker
  std::int64_t at = 0;
  bool back = false;
  for (TaskRun run : runs) {
    while (run.tasks > 0) {
      if (at == 0 && run.tasks >= workers) {
        const std::int64_t rounds = run.tasks / workers;
        all += static_cast<double>(rounds) * run.ns;
        back ^= rounds % 2 != 0;
        run.tasks -= rounds * workers;
        continue;
      }
      const std::int64_t count = std::min(run.tasks, workers - at);
      const std::int64_t first = back ? workers - at - count : at;
      add_step(first, run.ns);
      add_step(first + count, -run.ns);
      run.tasks -= count;
      at += count;
      if (at < workers) continue;
      at = 0;
      back = !back;
    }
  }
  double load = all, most = all;
  for (std::size_t word = 0; word < stepped.size(); ++word) {
    for (std::uint64_t left = stepped[word]; left != 0; left &= left - 1) {
      load += steps[word * 64 + to_size(std::countr_zero(left))];
      most = std::max(most, load);
    }
  }
  return most;
}

/// The load of the busiest group when each takes its next task as it becomes free. Three lower
/// bounds: the mean; the heaviest task; and, with more than k tasks per worker, the k + 1 smallest
/// of the first k * workers + 1, since one worker must run that many. Heaviest first comes close.
double busiest_of_takers(std::span<const TaskRun> runs, std::int64_t workers) {
  double total = 0;
  double most = 0;
  std::int64_t tasks = 0;
  for (const TaskRun& run : runs) {
    total += run.ns * static_cast<double>(run.tasks);
    tasks += run.tasks;
    const std::int64_t rounds = (tasks - 1) / workers;
    most = std::max(most, static_cast<double>(rounds + 1) * run.ns);
  }
  if (workers == 1) return total;
  most = std::max(most, total / static_cast<double>(workers));
  return tasks < workers ? most : most + kUneven * runs.front().ns;
}

}  // namespace

double expected_end_ns(const TileClass& tile, std::span<const TaskRun> heaviest_first,
                       double shared) {
  if (heaviest_first.empty()) return 0;
  const std::int64_t workers = std::max(tile.workers, 1);
  const double busiest = tile.dealing == Dealing::kDealt && workers <= kMostDealt
                             ? busiest_of_dealt(heaviest_first, workers)
                             : busiest_of_takers(heaviest_first, workers);
  return busiest + shared;
}

std::int32_t splits_of(double shares, std::int32_t most) {
  if (!(shares + kNearly >= 2)) return 1;
  return static_cast<std::int32_t>(
      std::min(std::floor(shares + kNearly), static_cast<double>(std::max(most, 1))));
}

std::int64_t most_target_items(const TileClass& tile) {
  if (tile.workers == 1) return 1;
  return std::max<std::int64_t>(1, std::int64_t{kMostWaves} * tile.workers / tile.groups_per_item);
}

std::size_t TileCounts::bucket_of(double ns) {
  constexpr std::uint32_t kFirst = std::bit_cast<std::uint32_t>(1.0F) >> 20;
  const std::uint32_t place = std::bit_cast<std::uint32_t>(static_cast<float>(ns)) >> 20;
  return std::min<std::size_t>(place > kFirst ? place - kFirst : 0, kBuckets - 1);
}

void TileCounts::add(const TileClass& tile, std::int32_t keys, std::int32_t tokens,
                     std::int32_t most_splits, bool has_gap) {
  const double ns = keys_ns(tile, keys, tokens);
  std::size_t index = bucket_of(ns);
  if (tile.few_tokens > 0) index = index / 2 * 2 + (tokens <= tile.few_tokens ? 1 : 0);
  Bucket& bucket = buckets_[index];
  if (!set_bit(used_, index)) bucket = {};
  bucket.keys_ns += ns;
  bucket.keys += keys;
  bucket.tokens += tokens;
  bucket.most_splits += most_splits;
  if (has_gap) {
    bucket.gap_tokens += tokens;
    ++bucket.gap_tiles;
  }
  ++bucket.tiles;
  total_ns_ += ns;
  tokens_ += tokens;
  ++tiles_;
}

CutChoice TileCounts::judge(const TileClass& tile, const MergeCosts& merge, double share) const {
  std::array<TaskRun, 2 * kBuckets> runs;
  std::size_t num_runs = 0;
  CutChoice cut{.share_ns = share};
  double tokens = 0, shared = 0, total = 0;
  const auto add_run = [&](double ns, std::int64_t tasks) {
    runs[num_runs++] = {ns, tasks};
    total += ns * static_cast<double>(tasks);
  };
  for (std::size_t word = used_.size(); word-- > 0;) {
    for (std::uint64_t left = used_[word]; left != 0;) {
      const int bit = 63 - std::countl_zero(left);
      left &= ~(std::uint64_t{1} << bit);
      const Bucket& bucket = buckets_[word * 64 + to_size(bit)];
      const auto tiles = static_cast<double>(bucket.tiles);
      const auto most = static_cast<std::int32_t>(bucket.most_splits / bucket.tiles);
      const std::int32_t splits = splits_of(bucket.keys_ns / tiles / share, most);
      const double keys = bucket.keys / tiles / splits;
      const double each = bucket.tokens / tiles;
      const std::int64_t tasks = bucket.tiles * splits * tile.groups_per_item;
      const bool at_gaps = splits == 1 && bucket.gap_tiles > 0;
      add_run(task_ns(tile, keys, each, splits > 1 || at_gaps), tasks);
      // Keys that fill up a step are not read.
      shared += shared_ns(tile, keys, each) * static_cast<double>(tasks);
      if (at_gaps)  // most keys lie on one side: the other one has a task of its own, a step long
        add_run(task_ns(tile, 1, each, true), bucket.gap_tiles * tile.groups_per_item);
      const double cut_tokens = splits > 1 ? bucket.tokens : bucket.gap_tokens;
      tokens += cut_tokens;
      cut.rows += cut_tokens * std::max(splits, 2);
    }
  }
  std::sort(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(num_runs),
            [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
  cut.end_ns = tile.launch_ns + expected_end_ns(tile, std::span(runs).first(num_runs), shared);
  cut.merges = tokens > 0 && !tile.merges_splits;
  if (cut.merges) cut.merge_ns = merge_ns(merge, tokens, cut.rows);
  cut.even = {tile.launch_ns, shared, total};
  return cut;
}

double TileCounts::share_ns(const TileClass& tile, int candidate) const {
  const std::int64_t target = most_target_items(tile) * (candidate + 1) / kCandidates;
  return total_ns_ / static_cast<double>(std::max<std::int64_t>(target, 1));
}

CutChoice TileCounts::choose(const TileClass& tile, const MergeCosts& merge,
                             std::int64_t max_rows) const {
  CutChoice best = judge(tile, merge);
  if (empty() || best.end_ns <= (1 + kLeastGain) * best.even.ns(tile.workers)) return best;
  double last = 0;
  for (int candidate = 0; candidate < kCandidates; ++candidate) {
    const double share = share_ns(tile, candidate);
    if (share == last) continue;
    last = share;
    const CutChoice other = judge(tile, merge, share);
    if (other.rows > static_cast<double>(max_rows)) break;  // finer ones have more
    const double wanted = best.cuts() ? 1.0 : 1 - kLeastGain;
    if (other.total_ns() < wanted * best.total_ns()) best = other;
  }
  return best;
}

CutChoice TileCounts::or_rebalanced(const TileClass& tile, const MergeCosts& merge,
                                    std::int64_t max_rows, const CutChoice& best) const {
  if (empty() || !RebalancedCuts::fits(tile) || tiles_ > RebalancedCuts::kMostTiles ||
      RebalancedCuts::most_rows(tile) > max_rows)
    return best;
  // Nearly every set of groups takes a range, for a task and a split, or gives one, for a split.
  const TaskCosts& costs = tile.costs_of(tile.max_item_tokens);
  const double ranges_ns = costs.task_ns + 2 * costs.split_ns;
  const std::int32_t sets = RebalancedCuts::sets_of(tile);
  CutChoice cuts;
  cuts.end_ns = judge(tile, merge).even.ns(sets * tile.groups_per_item) + ranges_ns;
  cuts.rebalanced = true;
  cuts.merges = !tile.merges_splits;
  if (cuts.merges) {  // about half of the sets give, to the other half
    const double cut_tiles = std::min(tiles_, sets / 2 + 1);
    const double tokens = tokens_ / tiles_;
    cuts.merge_ns = merge_ns(merge, cut_tiles * tokens, (cut_tiles + sets) * tokens);
  }
  return cuts.total_ns() < (1 - kLeastGain) * best.total_ns() ? cuts : best;
}

}  // namespace clattn::detail
