#include "metadata/tree_rows.hpp"

#include "base/checked.hpp"

namespace clattn::detail {
bool is_chain(std::span<const std::int32_t> parents) {
  for (std::size_t node = 0; node < parents.size(); ++node) {
    if (parents[node] != static_cast<std::int32_t>(node) - 1) return false;
  }
  return true;
}

std::int32_t depth_of(const DraftTree& tree, std::int32_t node) {
  std::int32_t depth = 0;
  while ((node = tree.parents[to_size(node)]) >= 0) ++depth;
  return depth;
}

void set_tree_bits(const DraftTree& tree, std::int32_t node, std::int64_t first_seen,
                   std::span<std::int32_t> bits) {
  std::int32_t position = tree.begin + depth_of(tree, node);
  // A parent's position is one less than its child's.
  for (; node >= 0 && position >= first_seen; node = tree.parents[to_size(node)], --position) {
    std::int32_t& word = bits[to_size(node / 32)];
    word = static_cast<std::int32_t>(static_cast<std::uint32_t>(word) | 1U << (node % 32));
  }
}

}  // namespace clattn::detail
