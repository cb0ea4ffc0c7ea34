#pragma once

#include <cstdint>
#include <span>

#include "metadata/key_window.hpp"
#include "shared/work_item.h"

namespace clattn::detail {

/// A tree of drafts: nodes follow `begin` keys of the request; the parent of each is an earlier one
/// or -1.
struct DraftTree {
  std::int32_t begin = 0;
  std::span<const std::int32_t> parents = {};
  bool empty() const { return parents.empty(); }
  std::int32_t size() const { return static_cast<std::int32_t>(parents.size()); }
};

/// Whether every node is the child of the one before it: then causality says the same.
bool is_chain(std::span<const std::int32_t> parents);

/// What a node sees, with the window counted along the path to it: its position on that path, and
/// the first key before the tree that it sees (tree.begin: none).
///@{
struct TreeSight {
  std::int32_t position = 0;
  std::int32_t context_begin = 0;
};
TreeSight tree_sight(const KeyWindow& window, const DraftTree& tree, std::int32_t node,
                     std::int32_t first_key);
/// Sets the bits of the nodes that it sees; the others are 0.
void set_tree_bits(const KeyWindow& window, const DraftTree& tree, std::int32_t node,
                   std::span<std::int32_t> bits);
///@}

/// Ints in front of the bits of a ClaGapRow, and of the whole row.
inline constexpr std::int32_t kGapRowInts = sizeof(ClaGapRow) / sizeof(std::int32_t);
inline std::int32_t gap_row_ints(std::int32_t num_nodes) {
  return kGapRowInts + (num_nodes + 31) / 32;
}

}  // namespace clattn::detail
