#pragma once

#include <array>
#include <clattn/metadata.hpp>
#include <cstdint>
#include <span>

#include "shared/work_item.h"

namespace clattn::detail {

static_assert(sizeof(ClaWorkItem) == 32 && sizeof(ClaMergeItem) == 16);

/// One kernel shape that items can be cut for. A request belongs to the first class whose
/// max_query_len is not exceeded by its query length; an item of the class holds at most
/// max_item_tokens query tokens.
struct TileClass {
  std::int32_t max_query_len = 0;
  std::int32_t max_item_tokens = 0;
};

inline constexpr int kMaxTileClasses = 3;

/// Which items come first in a list: GPUs start the longest first, PoCL hands the front of the list
/// to one thread.
enum class ItemOrder : std::uint8_t { kHeavyFirst, kLightFirst };

struct PlannerConfig {
  std::array<TileClass, kMaxTileClasses> tiles{};
  int num_tiles = 0;             ///< classes in use; the last takes every length
  std::int32_t block_size = 16;  ///< tokens per page: cuts of the key range fall on page boundaries
  std::int32_t groups_per_item = 1;  ///< work-groups that one item becomes (KV heads x head chunks)
  std::int32_t compute_units = 1;
  std::int32_t items_per_compute_unit =
      3;                              ///< work-groups wanted per compute unit when work allows
  std::int32_t min_split_keys = 256;  ///< shortest key range worth a split
  std::int32_t max_split_query_len =
      16;  ///< longer queries are split only while the device is underfilled
  std::int32_t deterministic_split_keys =
      512;  ///< key range of a split under SplitPolicy::kDeterministic
  std::int64_t max_partial_rows =
      0;  ///< bound of partial rows; cuts become coarser to stay below it
  SplitPolicy split_policy = SplitPolicy::kBalanced;
  std::int32_t num_splits =
      0;  ///< forced number of splits per query tile (fewer when there are fewer pages), 0 = plan
  ItemOrder item_order = ItemOrder::kHeavyFirst;
};

/// How much a plan needs: the answer of a run without an output, and of every run.
struct PlanCounts {
  std::array<std::int32_t, kMaxTileClasses> num_items{};
  std::int32_t num_merges = 0;
  std::int64_t num_partial_rows = 0;
  bool operator==(const PlanCounts&) const = default;
};

/// Where a plan is written: every span at least as long as the counts say. Empty spans: only count.
struct PlanOutput {
  std::array<std::span<ClaWorkItem>, kMaxTileClasses> items;
  std::span<ClaMergeItem> merges;
};

/// Cuts a validated batch into work items. `pages_at[r]` is where request r's pages start in the
/// page list. Every (query token, visible key) is covered exactly once; a token that sees no key
/// gets one item with kv_begin == kv_end, which writes output 0 and lse -inf. Requests without
/// query tokens produce nothing. Partial rows are handed out so that no two items share one. Pure
/// and allocation-free; the same code counts and writes.
PlanCounts plan_attention(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                          std::span<const std::int32_t> pages_at, const PlanOutput* output);

}  // namespace clattn::detail
