#pragma once

#include <array>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <limits>
#include <span>

#include "shared/work_item.h"

namespace clattn::detail {

static_assert(sizeof(ClaWorkItem) == 32 && sizeof(ClaMergeItem) == 16);

/// One kernel shape that items can be cut for. A request belongs to the first class whose
/// max_query_len is not exceeded by its query length; an item of the class holds at most
/// max_item_tokens query tokens and becomes a work-group for each of its groups of KV heads.
struct TileClass {
  std::int32_t max_query_len = 0;
  std::int32_t max_item_tokens = 0;
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes
  bool joins_splits = false;         ///< the kernel does: the plan has no merges for its tiles
  bool splits_finer = false;         ///< half of min_split_keys is worth a split
  std::int32_t resident_groups = 0;  ///< work-groups a compute unit runs at once, 0 = not known
  std::int32_t waves = 4;            ///< of those, for tiles that exceed one
  bool operator==(const TileClass&) const = default;
};

inline constexpr int kMaxTileClasses = 3;
inline constexpr std::int32_t kMostPieces = 65535;  ///< of a tile: 16 bits of an item count them

/// Which items come first in a list: GPUs, and CPUs that take them from a queue, start the longest
/// first; without a queue PoCL hands the front of the list to one thread. kAsCut leaves the batch's
/// order.
enum class ItemOrder : std::uint8_t { kHeavyFirst, kLightFirst, kAsCut };

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
  int num_tiles = 0;             ///< classes in use; the last takes every length
  std::int32_t block_size = 16;  ///< tokens per page: cuts of the key range fall on page boundaries
  std::int32_t compute_units = 1;
  std::int32_t items_per_compute_unit =
      3;  ///< work-groups wanted per compute unit when work allows
  /// Shortest key range worth a split and its merge, rounded up to pages.
  std::int32_t min_split_keys = 256;
  /// Queries up to this length are bound by reading keys, so an item of one token costs as much as
  /// one of this many; kDeterministic splits no longer ones. Balanced plans split a tile of any
  /// length when it outweighs its launch's fair share, which long queries do only while they
  /// underfill the device.
  std::int32_t max_split_query_len = 16;
  std::int32_t deterministic_split_keys =
      512;  ///< key range of a split under SplitPolicy::kDeterministic, rounded up to pages
  /// Bound of partial rows, 0 = never split. Balanced and forced cuts become coarser to stay below
  /// it; deterministic cuts may not depend on the batch, so a batch that needs more is refused:
  /// fit_deterministic_split_keys() gives cuts with which no batch does.
  std::int64_t max_partial_rows = 0;
  SplitPolicy split_policy = SplitPolicy::kBalanced;
  std::int32_t num_splits =
      0;  ///< forced number of splits per query tile (fewer when there are fewer pages), 0 = plan
  ItemOrder item_order = ItemOrder::kHeavyFirst;
  KeyWindow window;
  bool bidirectional = false;  ///< no query is bound by causality, whatever the batch says
  bool operator==(const PlannerConfig&) const = default;
};

/// How much a plan needs: the answer of a run without an output, and of every run.
struct PlanCounts {
  std::array<std::int32_t, kMaxTileClasses> num_items{};
  std::int32_t num_merges = 0;
  std::int64_t num_partial_rows = 0;
  bool operator==(const PlanCounts&) const = default;
};

/// Where a plan is written: every span at least as long as the counts say, else kInvalidArgument.
struct PlanOutput {
  std::array<std::span<ClaWorkItem>, kMaxTileClasses> items;
  std::span<ClaMergeItem> merges;
};

/// Cuts a validated batch into work items. `pages_at[r]` is where request r's pages start in the
/// page list. Every (query token, visible key) is covered exactly once; a token that sees no key
/// gets one item with kv_begin == kv_end, which writes output 0 and lse -inf. Requests without
/// query tokens produce nothing. Partial rows are handed out without gaps, so that no two items
/// share one. Pure and allocation-free; the same code counts and writes.
PlanCounts plan_attention(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                          std::span<const std::int32_t> pages_at, const PlanOutput* output);

/// Items that a class of `num_tiles` tiles is cut into, as near as tiles of different lengths
/// allow: what fills the device, or what fills it whole times where it is known how much it runs at
/// once.
std::int64_t target_items(const PlannerConfig& config, const TileClass& tile,
                          std::int64_t num_tiles);
/// Pages of the shortest range that a tile of the class is cut into.
std::int32_t min_split_pages(const PlannerConfig& config, const TileClass& tile);

/// Throws kInvalidArgument for numbers that nothing can be planned with.
void check_config(const PlannerConfig& config);

/// What no plan of a batch within `limits`, whose requests have up to `max_query_len` query tokens,
/// exceeds: memory sized by it never grows, and recorded launches of that size hold every step. For
/// decodes of one token at most twice what the worst step needs.
PlanCounts plan_upper_bound(const PlannerConfig& config, const BatchLimits& limits,
                            std::int32_t max_query_len = std::numeric_limits<std::int32_t>::max());

/// The smallest key range >= config.deterministic_split_keys for which no batch within `limits`
/// needs more than max_partial_rows. A function of configuration and limits alone, so that it is
/// the same in every step.
std::int32_t fit_deterministic_split_keys(const PlannerConfig& config, const BatchLimits& limits);

}  // namespace clattn::detail
