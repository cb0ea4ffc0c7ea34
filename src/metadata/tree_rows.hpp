#pragma once

#include <cstdint>
#include <span>

#include "shared/work_item.h"

namespace clattn::detail {

/// A tree of drafts: nodes follow `begin` keys of the request; the parent of each is an earlier one
/// or -1.
struct DraftTree {
  std::int32_t begin = 0;
  std::span<const std::int32_t> parents = {};
  bool is_bound = false;  ///< of a tree that only the device knows
  bool empty() const { return parents.empty(); }
  std::int32_t size() const { return static_cast<std::int32_t>(parents.size()); }
};

/// Whether every node is the child of the one before it: then causality says the same.
bool is_chain(std::span<const std::int32_t> parents);

/// How many ancestors a node has.
std::int32_t depth_of(const DraftTree& tree, std::int32_t node);
/// Sets the bits of a node and of those of its ancestors whose positions, along the path to it, are
/// `first_seen` or more. The others are 0.
void set_tree_bits(const DraftTree& tree, std::int32_t node, std::int64_t first_seen,
                   std::span<std::int32_t> bits);

/// Ints in front of the bits of a ClaGapRow, and of the whole row.
inline constexpr std::int32_t kGapRowInts = sizeof(ClaGapRow) / sizeof(std::int32_t);
inline std::int32_t gap_row_ints(std::int32_t num_nodes) {
  return kGapRowInts + (num_nodes + 31) / 32;
}

}  // namespace clattn::detail
