#pragma once

#include <array>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>

#include "base/checked.hpp"
#include "metadata/listed_rows.hpp"
#include "metadata/plan/plan_model.hpp"
#include "metadata/plan/rebalanced_cuts.hpp"
#include "shared/cut.h"

namespace clattn::detail {

inline constexpr std::int32_t kItemInts = 8, kMergeInts = 4;
static_assert(sizeof(ClaWorkItem) == std::size_t{4} * kItemInts &&
              sizeof(ClaMergeItem) == std::size_t{4} * kMergeInts);

inline constexpr int kMaxTileClasses = 4;
inline constexpr std::size_t kRebalancedClass = 0;  ///< may get RebalancedCuts
inline constexpr std::int32_t kMostPieces = 65535;  ///< of a tile: 16 bits of an item count them

/// Which items come first in a list: GPUs, and CPUs that take them from a queue, start the longest
/// first; without a queue PoCL hands the front of the list to one thread. kAsCut leaves the batch's
/// order.
enum class ItemOrder : std::uint8_t { kHeavyFirst, kLightFirst, kAsCut };

struct PlannerConfig {
  std::array<TileClass, kMaxTileClasses> tiles{};
  int num_tiles = 0;             ///< classes in use; longest_class() takes every length
  std::int32_t block_size = 16;  ///< tokens per page: cuts of the key range fall on page boundaries
  MergeCosts merge;
  /// Added to the predicted time of two launches at once; infinity: never at once.
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
  /// The longest queries whose tiles are split where a gap follows their kept keys, so that nothing
  /// in it is read; fit_gap_split_query_len(). Tiles of longer ones read it, and so do all tiles of
  /// plans that split nothing (num_splits 1).
  std::int32_t gap_split_query_len = 0;
  /// The last class takes the requests of the one before it in balanced plans that end earlier so.
  bool last_is_wide = false;
  KeyWindow window;
  ListRules lists;
  bool bidirectional = false;  ///< no query is bound by causality, whatever the batch says
  /// The batch's seq_lens are upper bounds: the plan has room for any lengths up to them, and says
  /// of each item how it is made of the length (PlanOutput::splits). What is predicted and how
  /// balanced cuts are chosen follows from the bounds.
  bool lengths_are_bounds = false;
  /// > 0, with lengths_are_bounds: requests of up to so many query tokens may have any number up to
  /// it (QueryBounds). The plan has room for that many of each, and partial rows for all of them,
  /// since items that turn out to be without tokens go there.
  std::int32_t most_query_len = 0;
  /// The class of the longest requests in plans without wide tiles.
  std::size_t longest_class() const {
    return static_cast<std::size_t>(num_tiles) - (last_is_wide ? 2 : 1);
  }
  bool operator==(const PlannerConfig&) const = default;
  bool may_rebalance() const { return !fixed_groups && !lengths_are_bounds && !lists.keep_keys; }
};

inline bool is_deterministic(const PlannerConfig& config) {
  return config.split_policy == SplitPolicy::kDeterministic;
}

/// How much a plan needs.
struct PlanCounts {
  std::array<std::int32_t, kMaxTileClasses> num_items{};
  /// Work-groups of each launch; 0: as many as the device has room for.
  std::array<std::int32_t, kMaxTileClasses> workers{};
  /// Of two launches that run at the same time, how many times as long as alone on these
  /// work-groups each is expected to take. 0 everywhere: launches run in turn.
  std::array<double, kMaxTileClasses> slower{};
  /// Whether class kRebalancedClass has rebalanced cuts: its items are listed round by round, with
  /// padding.
  bool rebalanced = false;
  std::int32_t num_merges = 0;
  std::int32_t most_splits = 0;  ///< no merge has more; lengths on the device may give fewer
  std::int64_t num_partial_rows = 0;
  std::int32_t num_listed = 0;    ///< ClaListedItem and ClaListedRow, all of one size
  std::int32_t num_gap_ints = 0;  ///< of the rows that see keys with gaps between
  std::int64_t all_items() const {
    return std::accumulate(num_items.begin(), num_items.end(), std::int64_t{0});
  }
  bool operator==(const PlanCounts&) const = default;
};

/// Partial rows in front of all others, for tiles that the device leaves out and that have none of
/// their own: nobody reads them. None unless query lengths come from the device.
std::int64_t spare_partial_rows(const PlannerConfig& config);

/// Where a tile whose rows are listed is written.
struct ListedTile {
  std::span<ClaListedRow> rows;      ///< the first one is the ClaListedItem
  std::span<std::int32_t> gap_rows;  ///< if they see keys with gaps between
  std::int32_t gap_rows_at = 0;      ///< where they will stand in the metadata, in ints
  std::int32_t gap_row_ints = 0;     ///< of each of them
};

/// Where a plan is written: every span at least as long as the counts say, else kInvalidArgument.
struct PlanOutput {
  std::array<std::span<ClaWorkItem>, kMaxTileClasses> items;
  std::span<ClaMergeItem> merges;
  std::span<ClaSplit> splits = {};      ///< one for each item, if PlannerConfig::lengths_are_bounds
  std::span<ClaListedRow> listed = {};  ///< ClaListedItem as well
  std::span<std::int32_t> gap_rows = {};
  /// What the device lists the rows anew from, one for each of `listed`; may be empty.
  std::span<ClaRowSource> sources = {};
  /// Where items and merges will stand in the metadata, in ints; for ClaSplit.
  std::array<std::int32_t, kMaxTileClasses> items_at{};
  std::int32_t merges_at = 0;
  std::int32_t listed_at = 0;    ///< where `listed` will, counted in rows
  std::int32_t gap_rows_at = 0;  ///< in ints

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
/// The balanced cuts that end a plan earliest, with two launches at once where that ends
/// earlier.
PlanCuts choose_plan(const PlannerConfig& config, const PlanTiles& tiles, std::int64_t max_rows);

/// Items whose predicted times differ by less than this count as equally heavy. Nanoseconds; 0 for
/// a list without keys.
double equal_costs_ns(const TileClass& tile, std::span<const ClaWorkItem> items);

/// Orders the items of a class, which come in the batch's order. Equally heavy ones of a request
/// follow each other. Allocates nothing.
void sort_items(ItemOrder order, const TileClass& tile, std::span<ClaWorkItem> items);
/// Notes in every split where its item is, once the lists are in order.
void place_items(const PlanCounts& counts, const PlanOutput& output);

/// Where the query tokens of a batch's requests may stand if only the device knows how many there
/// are, one request after the other. Requests of up to `most` query tokens may have any number up
/// to it, and those that follow each other share their rows out anew; longer ones stay as they are.
class QueryBounds {
 public:
  QueryBounds(const CommonAttentionMetadata& batch, std::int32_t most)
      : batch_(batch), most_(most) {}

  /// Of the next request; pages_at is 0.
  ClaQueryBounds next() {
    const std::int32_t begin = start(request_), end = start(request_ + 1);
    if (end - begin <= most_) return open();
    const std::int32_t seq_len = batch_.seq_lens[to_size(request_++)];
    return {begin, end, end - begin, end - begin, seq_len, 0};
  }

 private:
  ClaQueryBounds open();
  std::int32_t start(std::int32_t request) const {
    return batch_.query_start_loc[to_size(request)];
  }

  const CommonAttentionMetadata& batch_;
  std::int32_t most_;
  std::int32_t request_ = 0;
  std::int32_t run_begin_ = 0, run_end_ = 0;  ///< of the requests that share their rows out
};

/// Changes the items and merges, which stand in their places, to those of the batch's own query
/// tokens, as attention/cut_queries.cl will to those of the device's.
void take_query_lens(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                     const PlanCounts& counts, const PlanOutput& output);

/// Pages of the keys that a tile of `count` query tokens sees, of a request of up to `query_len`
/// of them and `most_keys` keys, if all is as bad as can be.
std::int64_t most_pages(const PlannerConfig& config, std::int64_t most_keys, std::int64_t count,
                        std::int64_t query_len);

/// What a plan's queries see, for the kernel that makes items of its splits.
inline ClaSight sight_of(const PlannerConfig& config, bool causal) {
  return {.page_size = config.block_size,
          .causal = causal && !config.bidirectional ? 1 : 0,
          .window_left = config.window.left,
          .window_right = config.window.right,
          .chunk = config.window.chunk,
          .chunk_lookback = config.window.chunk_lookback,
          .span_rule = static_cast<int>(config.lists.span_rule)};
}

/// Pages of a request that lie left of all keys that its queries see, if they are not listed.
inline std::size_t unseen_pages(const ClaSight& sight, std::int32_t query_len,
                                std::int32_t seq_len) {
  if (sight.window_left < 0 && sight.chunk == 0) return 0;
  const std::int32_t first = cla_tile_keys(&sight, seq_len - query_len, 1, seq_len).first;
  return to_size(first) / to_size(sight.page_size);
}

/// Keys of a tile whose rows are listed, as cla_tile_keys() gives those of other tiles. If the tile
/// may skip a gap of pages behind kept keys, those before the gap stand apart.
struct ListedKeys {
  ClaTileKeys kept;
  ClaTileKeys others;
};
ListedKeys listed_tile_keys(const PlannerConfig& config, const RequestRows& request,
                            std::int32_t position, std::int32_t count, bool skips);
void list_rows(const PlannerConfig& config, const RequestRows& request, std::int32_t position,
               const ListedTile& to);

/// The pages of a request, before that of its first query token, of which no query sees a key:
/// those before `first`, and those of the gap behind kept keys (none if it ends before it begins).
struct UnseenPages {
  std::size_t first = 0;
  std::size_t gap_begin = 0, gap_end = 0;
};
UnseenPages unseen_pages(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                         std::int32_t request);

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

/// PlannerConfig::gap_split_query_len: all queries, or those of up to max_split_query_len tokens,
/// or none, so that two partial rows fit for each query token of a batch within `limits`. Depends
/// on configuration and limits alone.
std::int32_t fit_gap_split_query_len(const PlannerConfig& config, const BatchLimits& limits);

}  // namespace clattn::detail
