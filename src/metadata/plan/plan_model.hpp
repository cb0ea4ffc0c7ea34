#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace clattn::detail {

/// What one work-group needs for a task while it has the device to itself, in nanoseconds. A task
/// is a work item for one of its groups of KV heads.
struct TaskCosts {
  double task_ns = 0;       ///< fixed part of every task
  double split_ns = 0;      ///< extra for a split, which stores partial results
  double key_ns = 1;        ///< per key
  double token_key_ns = 0;  ///< per key and query token
  double parallel = 0;      ///< groups at which keys take twice as long; 0: no slowdown
  bool operator==(const TaskCosts&) const = default;
};

/// How the tasks of a launch, listed heaviest first unless cuts are rebalanced, are given to
/// work-groups.
enum class Dealing : std::uint8_t {
  kTaken,  ///< a work-group that becomes free takes the next one
  kDealt,  ///< persistent groups: dealt in advance, back and forth, as by cla_next_task()
};

/// One kernel shape that items can be cut for. A request belongs to the first class whose
/// max_query_len is not exceeded by its query length, the longest ones to the last or to a wide one
/// in its place; an item of the class holds at most max_item_tokens query tokens and becomes a
/// work-group for each of its groups of KV heads.
struct TileClass {
  std::int32_t max_query_len = 0;
  std::int32_t max_item_tokens = 0;
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes
  bool merges_splits = false;        ///< the kernel merges its own splits; the plan need not
  bool ends_at_padding = false;      ///< persistent groups stop there, so it may be anywhere
  std::int32_t step_keys = 1;        ///< keys processed at once: a partial step costs a whole one
  std::int32_t workers = 1;          ///< work-groups that run at once
  Dealing dealing = Dealing::kTaken;
  double launch_ns = 0;
  TaskCosts costs{};
  std::int32_t few_tokens = 0;  ///< tasks of up to this many query tokens cost `few` instead
  TaskCosts few{};
  const TaskCosts& costs_of(double tokens) const {
    return few_tokens > 0 && tokens <= few_tokens ? few : costs;
  }
  bool operator==(const TileClass&) const = default;
};

/// What the launch that merges splits takes, in nanoseconds.
struct MergeCosts {
  double launch_ns = 0;
  double token_ns = 0;  ///< of a query token with all its heads
  double row_ns = 0;    ///< of each of its partial results
  bool operator==(const MergeCosts&) const = default;
};

/// Of the merge without its launch: this many query tokens, and their partial results.
inline double merge_ns(const MergeCosts& costs, double tokens, double rows) {
  return tokens * costs.token_ns + rows * costs.row_ns;
}

/// A number of tasks that take equally long.
struct TaskRun {
  double ns = 0;
  std::int64_t tasks = 0;
};

/// Nanoseconds of a tile's keys for one work-group, whole steps or not.
inline double keys_ns(const TileClass& tile, double keys, double tokens) {
  const TaskCosts& costs = tile.costs_of(tokens);
  return keys * (costs.key_ns + tokens * costs.token_key_ns);
}
/// Nanoseconds of a task: whole steps of keys, and what is around them.
inline double task_ns(const TileClass& tile, double keys, double tokens, bool is_split) {
  const double steps = std::ceil(keys / tile.step_keys);
  const TaskCosts& costs = tile.costs_of(tokens);
  return costs.task_ns + (is_split ? costs.split_ns : 0.0) +
         keys_ns(tile, steps * tile.step_keys, tokens);
}

/// What a task's keys add to the whole launch, because groups slow each other down.
inline double shared_ns(const TileClass& tile, double keys, double tokens) {
  const double parallel = tile.costs_of(tokens).parallel;
  return parallel > 0 ? keys_ns(tile, keys, tokens) / parallel : 0;
}

/// When the last group of a launch ends, counted from the start of the first. `shared`: the sum of
/// shared_ns() of all tasks.
double expected_end_ns(const TileClass& tile, std::span<const TaskRun> heaviest_first,
                       double shared);

/// What a launch takes on this many work-groups if its tasks could be shared out evenly.
struct EvenTime {
  double launch_ns = 0;
  double shared_ns = 0;  ///< in which groups slow each other down, whatever their number
  double work_ns = 0;    ///< of one group
  double ns(double workers) const { return launch_ns + shared_ns + work_ns / workers; }
  /// Whether it waits for memory rather than for its groups.
  bool waits_for_memory(double workers) const { return 2 * shared_ns > work_ns / workers; }
};

/// One way to cut the tiles of a class, and what it is predicted to take. A tile worth n shares is
/// cut into n splits.
struct CutChoice {
  double share_ns = std::numeric_limits<double>::infinity();  ///< key time; infinite: no splits
  double end_ns = 0;                                          ///< of the class's own launch
  double merge_ns = 0;      ///< of merging its splits, without the merge launch itself
  bool merges = false;      ///< whether its splits need a merge launch
  bool rebalanced = false;  ///< by RebalancedCuts; neither share_ns nor what follows is used
  double rows = 0;          ///< partial results
  EvenTime even = {};
  double total_ns() const { return end_ns + merge_ns; }
  bool cuts() const { return rebalanced || share_ns < std::numeric_limits<double>::infinity(); }
};

/// Splits of a tile that holds `shares` shares, if this many are allowed. A tile that is nearly two
/// shares is cut in two, so that tiles of about the same length are cut alike.
std::int32_t splits_of(double shares, std::int32_t most);

/// Histogram of a class's tiles by predicted time: the cost of judging a cut does not depend on the
/// number of tiles.
// NOLINTNEXTLINE(*-member-init): see buckets_
class TileCounts {
 public:
  /// A tile whose keys may be cut into up to `most_splits` ranges. A gap between them cuts them in
  /// two whatever the plan chooses.
  void add(const TileClass& tile, std::int32_t keys, std::int32_t tokens, std::int32_t most_splits,
           bool has_gap = false);

  /// The best way to cut them: the least sum of the launch and its merges. `max_rows`: partial
  /// results that there is room for.
  CutChoice choose(const TileClass& tile, const MergeCosts& merge, std::int64_t max_rows) const;
  /// Rebalanced cuts if they are better than `best`, which is returned otherwise.
  CutChoice or_rebalanced(const TileClass& tile, const MergeCosts& merge, std::int64_t max_rows,
                          const CutChoice& best) const;
  /// The prediction for one share size. That of uncut tiles has in `even` a lower bound of the
  /// launch's time for any cuts.
  CutChoice judge(const TileClass& tile, const MergeCosts& merge,
                  double share_ns = CutChoice().share_ns) const;
  /// Share sizes that choose() tries after no splits at all, from coarse to fine.
  static constexpr int kCandidates = 16;
  double share_ns(const TileClass& tile, int candidate) const;
  bool empty() const { return total_ns_ == 0; }
  std::int32_t tiles() const { return tiles_; }

 private:
  /// Eight to a factor of two, or four for each kind of costs where there are two: tiles that
  /// differ by less are counted as equal.
  static constexpr std::size_t kBuckets = 256;
  struct Bucket {
    double keys_ns, keys, tokens, gap_tokens;
    std::int64_t tiles, gap_tiles, most_splits;
  };
  static std::size_t bucket_of(double ns);

  std::array<Bucket, kBuckets> buckets_;             ///< each valid only if its bit in used_ is set
  std::array<std::uint64_t, kBuckets / 64> used_{};  ///< a bit a bucket
  double total_ns_ = 0;                              ///< of keys
  double tokens_ = 0;                                ///< query tokens
  std::int32_t tiles_ = 0;
};

/// The most items that the finest candidate aims at.
std::int64_t most_target_items(const TileClass& tile);

}  // namespace clattn::detail
