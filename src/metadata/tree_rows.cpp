#include "metadata/tree_rows.hpp"

#include <algorithm>

#include "base/checked.hpp"

namespace clattn::detail {
namespace {

std::int32_t depth_of(const DraftTree& tree, std::int32_t node) {
  std::int32_t depth = 0;
  while ((node = tree.parents[to_size(node)]) >= 0) ++depth;
  return depth;
}

/// The first position that a query at this one sees.
std::int64_t window_begin(const KeyWindow& window, std::int64_t position) {
  std::int64_t begin = window.left < 0 ? 0 : position - window.left;
  if (window.chunk > 0) {
    const std::int64_t chunk = position / window.chunk - window.chunk_lookback;
    begin = std::max(begin, chunk * window.chunk);
  }
  return std::max<std::int64_t>(begin, 0);
}

}  // namespace

bool is_chain(std::span<const std::int32_t> parents) {
  for (std::size_t node = 0; node < parents.size(); ++node) {
    if (parents[node] != static_cast<std::int32_t>(node) - 1) return false;
  }
  return true;
}

TreeSight tree_sight(const KeyWindow& window, const DraftTree& tree, std::int32_t node,
                     std::int32_t first_key) {
  const std::int32_t position = tree.begin + depth_of(tree, node);
  const std::int64_t begin = std::max<std::int64_t>(window_begin(window, position), first_key);
  return {position, static_cast<std::int32_t>(std::min<std::int64_t>(begin, tree.begin))};
}

void set_tree_bits(const KeyWindow& window, const DraftTree& tree, std::int32_t node,
                   std::span<std::int32_t> bits) {
  std::int32_t position = tree.begin + depth_of(tree, node);
  const std::int64_t first_seen = window_begin(window, position);
  // A parent's position is one less than its child's.
  for (; node >= 0 && position >= first_seen; node = tree.parents[to_size(node)], --position) {
    std::int32_t& word = bits[to_size(node / 32)];
    word = static_cast<std::int32_t>(static_cast<std::uint32_t>(word) | 1U << (node % 32));
  }
}

}  // namespace clattn::detail
