#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace clattn::detail {

/// What one work-group takes for a task, a work item for one of its groups of KV heads, while it
/// has the device to itself, in nanoseconds.
struct TaskCosts {
  double task_ns = 0;       ///< around the keys
  double split_ns = 0;      ///< more where the item is a split: its partial results
  double key_ns = 1;        ///< of a key
  double token_key_ns = 0;  ///< of a key and a query token
  bool operator==(const TaskCosts&) const = default;
};

/// Who serves the tasks of a launch, which are listed heaviest first.
enum class Dealing : std::uint8_t {
  kTaken,  ///< a work-group that has ended takes the next one
  kDealt,  ///< the groups stay: the list is dealt to them there and back, as cla_next_task() does
};

/// One kernel shape that items can be cut for. A request belongs to the first class whose
/// max_query_len is not exceeded by its query length; an item of the class holds at most
/// max_item_tokens query tokens and becomes a work-group for each of its groups of KV heads.
struct TileClass {
  std::int32_t max_query_len = 0;
  std::int32_t max_item_tokens = 0;
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes
  bool joins_splits = false;         ///< the kernel does: the plan has no merges for its tiles
  std::int32_t step_keys = 1;        ///< keys that a group takes in at once: part of them cost all
  std::int32_t workers = 1;          ///< work-groups that run at once
  Dealing dealing = Dealing::kTaken;
  double parallel = 0;  ///< work-groups that take twice as long each as one alone; 0: none do
  double launch_ns = 0;
  TaskCosts costs{};
  bool operator==(const TileClass&) const = default;
};

/// What the launch that merges splits takes, in nanoseconds.
struct MergeCosts {
  double launch_ns = 0;
  double token_ns = 0;  ///< of a query token with all its heads
  double row_ns = 0;    ///< of each of its partial results
  bool operator==(const MergeCosts&) const = default;
};

/// A number of tasks that take equally long.
struct TaskRun {
  double ns = 0;
  std::int64_t tasks = 0;
};

/// Nanoseconds of a tile's keys for one work-group, whole steps or not.
double keys_ns(const TileClass& tile, double keys, double tokens);
/// Nanoseconds of a task: whole steps of keys, and what is around them.
double task_ns(const TileClass& tile, double keys, double tokens, bool is_split);

/// When the last group of a launch ends, counted from its first one's start. `shared_ns`: the part
/// of all runs' nanoseconds that groups slow each other down in, their keys.
double expected_end_ns(const TileClass& tile, std::span<const TaskRun> heaviest_first,
                       double shared_ns);

/// A way to cut the tiles of a class: what outweighs `share_ns` is cut into as many parts as it
/// holds shares. And what it is expected to take.
struct CutChoice {
  double share_ns = std::numeric_limits<double>::infinity();  ///< of keys; infinite: nothing is cut
  double end_ns = 0;                                          ///< of the class's own launch
  double merge_ns = 0;  ///< of the merge of its splits, without the launch that does it
  bool merges = false;  ///< whether there are splits that a launch must merge
  double total_ns() const { return end_ns + merge_ns; }
};

/// Splits of a tile that holds `shares` shares, if so many are allowed. A tile that is nearly two
/// shares is cut in two, so that tiles of about the same length are cut alike.
std::int32_t splits_of(double shares, std::int32_t most);

/// The tiles of a class, counted by the time that they take: cutting them one way or another can
/// then be judged in a time that does not depend on their number.
class TileCounts {
 public:
  /// A tile whose keys may be cut into up to `most_splits` ranges.
  void add(const TileClass& tile, std::int32_t keys, std::int32_t tokens, std::int32_t most_splits);

  /// The best way to cut them: the least sum of the launch and its merges. `max_rows`: partial
  /// results that there is room for.
  CutChoice choose(const TileClass& tile, const MergeCosts& merge, std::int64_t max_rows) const;
  /// What a share would lead to.
  CutChoice judge(const TileClass& tile, const MergeCosts& merge, double share_ns) const;
  /// The shares among which choose() chooses, from coarse to fine, behind not cutting at all.
  static constexpr int kCandidates = 16;
  double share_ns(const TileClass& tile, int candidate) const;
  bool empty() const { return total_ns_ == 0; }

 private:
  /// Eight to a factor of two: tiles that differ by less are counted as equal.
  static constexpr std::size_t kBuckets = 256;
  struct Bucket {
    double keys_ns = 0, keys = 0, tokens = 0;
    std::int64_t tiles = 0, most_splits = 0;
  };
  struct Cut;
  Cut cut(const TileClass& tile, const MergeCosts& merge, double share_ns) const;
  static std::size_t bucket_of(double ns);

  std::array<Bucket, kBuckets> buckets_{};
  std::array<std::uint64_t, kBuckets / 64> used_{};  ///< a bit a bucket
  double total_ns_ = 0;                              ///< of keys
};

/// Items that the finest candidate cuts a class into beyond its tiles, at most.
std::int64_t most_target_items(const TileClass& tile);

}  // namespace clattn::detail
