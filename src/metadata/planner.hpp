#pragma once

#include <array>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "metadata/item_order.hpp"
#include "metadata/plan_model.hpp"
#include "metadata/rebalanced_cuts.hpp"
#include "shared/cut.h"

namespace clattn::detail {

inline constexpr std::int32_t kItemInts = 8, kMergeInts = 4;
static_assert(sizeof(ClaWorkItem) == std::size_t{4} * kItemInts &&
              sizeof(ClaMergeItem) == std::size_t{4} * kMergeInts);

inline constexpr int kMaxTileClasses = 4;
inline constexpr std::size_t kRebalancedClass = 0;  ///< may get RebalancedCuts
inline constexpr std::int32_t kMostPieces = 65535;  ///< of a tile: 16 bits of an item count them

/// Which keys around its own position a query may see: reach in tokens to either side, -1 =
/// unbounded, and the aligned chunk that it must stay in, 0 = none.
struct KeyWindow {
  std::int32_t left = -1;
  std::int32_t right = -1;
  std::int32_t chunk = 0;
  bool operator==(const KeyWindow&) const = default;
  /// Whether every key that `other` lets a query see is one that this lets it see.
  bool covers(const KeyWindow& other) const {
    const auto reaches = [](std::int32_t a, std::int32_t b) { return a < 0 || (b >= 0 && b <= a); };
    return reaches(left, other.left) && reaches(right, other.right) &&
           (chunk == 0 || chunk == other.chunk);
  }
};

struct PlannerConfig {
  std::array<TileClass, kMaxTileClasses> tiles{};
  int num_tiles = 0;             ///< classes in use; longest_class() takes every length
  std::int32_t block_size = 16;  ///< tokens per page: cuts of the key range fall on page boundaries
  MergeCosts merge;
  /// Added to the predicted time of two launches beside each other; infinity: they never are.
  double beside_ns = std::numeric_limits<double>::infinity();
  /// The longest queries that kDeterministic splits: longer ones would need too much memory.
  std::int32_t max_split_query_len = 16;
  std::int32_t deterministic_split_keys =
      512;  ///< key range of a split under SplitPolicy::kDeterministic, rounded up to pages
  /// Most partial rows that a plan may use, 0 = never split. Balanced and forced cuts become
  /// coarser to fit. Deterministic cuts must not depend on the batch, so a batch that needs more is
  /// refused; fit_deterministic_split_keys() finds a range with which every batch fits.
  std::int64_t max_partial_rows = 0;
  SplitPolicy split_policy = SplitPolicy::kBalanced;
  std::int32_t num_splits =
      0;  ///< forced number of splits per query tile (fewer when there are fewer pages), 0 = plan
  ItemOrder item_order = ItemOrder::kHeavyFirst;
  /// Recorded steps and lengths on the device: launches may not depend on the batch, so that no
  /// cuts are rebalanced.
  bool fixed_groups = false;
  /// The last class takes the requests of the one before it in balanced plans that end earlier so.
  bool last_is_wide = false;
  KeyWindow window;
  bool bidirectional = false;  ///< no query is bound by causality, whatever the batch says
  /// The batch's seq_lens are upper bounds: the plan has room for any lengths up to them, and says
  /// of each item how it is made of the length (PlanOutput::splits). What is predicted and how
  /// balanced cuts are chosen follows from the bounds.
  bool lengths_are_bounds = false;
  /// The class of the longest requests in plans without wide tiles.
  std::size_t longest_class() const {
    return static_cast<std::size_t>(num_tiles) - (last_is_wide ? 2 : 1);
  }
  bool operator==(const PlannerConfig&) const = default;
};

/// How much a plan needs: the answer of a run without an output, and of every run.
struct PlanCounts {
  std::array<std::int32_t, kMaxTileClasses> num_items{};
  /// Work-groups of each launch; 0: as many as the device has room for.
  std::array<std::int32_t, kMaxTileClasses> workers{};
  /// Of two launches that run beside each other, how many times as long as alone on these
  /// work-groups each is expected to take. 0 everywhere: launches run in turn.
  std::array<double, kMaxTileClasses> slower{};
  /// Whether class kRebalancedClass has rebalanced cuts: its items are listed round by round, with
  /// padding.
  bool rebalanced = false;
  std::int32_t num_merges = 0;
  std::int32_t most_splits = 0;  ///< no merge has more; lengths on the device may give fewer
  std::int64_t num_partial_rows = 0;
  std::int64_t all_items() const {
    return std::accumulate(num_items.begin(), num_items.end(), std::int64_t{0});
  }
  bool operator==(const PlanCounts&) const = default;
};

/// Where a plan is written: every span at least as long as the counts say, else kInvalidArgument.
struct PlanOutput {
  std::array<std::span<ClaWorkItem>, kMaxTileClasses> items;
  std::span<ClaMergeItem> merges;
  std::span<ClaSplit> splits = {};  ///< one for each item, if PlannerConfig::lengths_are_bounds
  /// Where items and merges will stand in the metadata, in ints; for ClaSplit.
  std::array<std::int32_t, kMaxTileClasses> items_at{};
  std::int32_t merges_at = 0;

  std::int32_t item_at(std::size_t tile_class, std::int32_t index) const {
    return items_at.at(tile_class) + index * kItemInts;
  }
  std::int32_t merge_at(std::int64_t index) const {
    return merges_at + static_cast<std::int32_t>(index) * kMergeInts;
  }
};

/// How a plan cuts the tiles of a batch.
struct PlanCuts {
  std::array<CutChoice, kMaxTileClasses> classes;
  std::array<std::int32_t, kMaxTileClasses> workers{};  ///< PlanCounts::workers
  std::array<double, kMaxTileClasses> slower{};         ///< PlanCounts::slower
  std::int32_t num_splits = 0;  ///< of every tile; 0 = by the classes' shares, or by position
  bool wide = false;            ///< the last class in place of the one before it
  double end_ns = 0;            ///< predicted, merges included
};

/// A validated batch, cut into work items. Every (query token, visible key) is covered exactly
/// once; a token that sees no key gets one item with kv_begin == kv_end, which writes output 0 and
/// lse -inf. Requests without query tokens produce nothing. Partial rows are handed out without
/// gaps, so that no two items share one. Allocates nothing; reads configuration and batch while it
/// lives.
class AttentionPlan {
 public:
  /// Decides the cuts and counts what they come to. Throws kUnsupported for deterministic cuts that
  /// need more than max_partial_rows.
  AttentionPlan(const PlannerConfig& config, const CommonAttentionMetadata& batch);
  AttentionPlan(const PlannerConfig& config, CommonAttentionMetadata&& batch) = delete;
  AttentionPlan(PlannerConfig&& config, const CommonAttentionMetadata& batch) = delete;

  const PlanCounts& counts() const noexcept { return counts_; }
  const PlanCuts& cuts() const noexcept { return cuts_; }
  /// `pages_at[r]` is where request r's pages start in the page list.
  void write(std::span<const std::int32_t> pages_at, const PlanOutput& output) const;

 private:
  const PlannerConfig& config_;
  const CommonAttentionMetadata& batch_;
  PlanCuts cuts_;
  PlanCounts counts_;
  RebalancedCuts rebalanced_;  ///< if cuts_ choose them
};

/// Tiles of each class, and the splits that each may have, as choices of cuts count them.
using PlanTiles = std::array<TileCounts, kMaxTileClasses>;
PlanTiles count_tiles(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                      bool wide = false);
/// The best cuts of balanced plans: each class's own, or none where their gain is less than the
/// merge launch that they share.
std::array<CutChoice, kMaxTileClasses> choose_cuts(const PlannerConfig& config,
                                                   const PlanTiles& tiles, std::int64_t max_rows);
/// The same for a whole plan: with two launches beside each other where that ends earlier.
PlanCuts choose_plan(const PlannerConfig& config, const PlanTiles& tiles, std::int64_t max_rows);

/// Pages of the keys that a tile of `count` query tokens of a request of up to `most_keys` keys
/// sees, if all is as bad as can be.
std::int64_t most_pages(const PlannerConfig& config, std::int64_t most_keys, std::int64_t count);

/// What a plan's queries see, for the kernel that makes items of its splits.
ClaSight sight_of(const PlannerConfig& config, bool causal);

/// Throws kInvalidArgument for numbers that nothing can be planned with.
void check_config(const PlannerConfig& config);

/// An upper bound on every plan of a batch within `limits` whose requests have up to
/// `max_query_len` query tokens. Memory of this size never grows, and recorded launches of it fit
/// every step. For decode of one token it is at most twice what the worst step needs.
PlanCounts plan_upper_bound(const PlannerConfig& config, const BatchLimits& limits,
                            std::int32_t max_query_len = std::numeric_limits<std::int32_t>::max());

/// The smallest key range >= config.deterministic_split_keys for which no batch within `limits`
/// needs more than max_partial_rows. A function of configuration and limits alone, so that it is
/// the same in every step.
std::int32_t fit_deterministic_split_keys(const PlannerConfig& config, const BatchLimits& limits);

}  // namespace clattn::detail
