#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/checked.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {

/// Query tokens that one work-group handles, as a split of them is described, and their keys.
struct Tile {
  std::size_t tile_class = 0;
  std::int32_t q_pos = 0;
  ClaTileKeys kept = {};  ///< in front of a gap that is not read
  ClaTileKeys keys = {};
  std::int32_t listed = 0;    ///< ClaListedItem and ClaListedRow
  std::int32_t gap_ints = 0;  ///< of its rows' ClaGapRow
  std::int32_t pages = 0;     ///< that the keys lie in, kept ones included
  bool is_open = false;       ///< the device decides how many query tokens the request has
  ClaSplit split = {};
  std::int32_t num_keys() const { return kept.count + keys.count; }
};

/// Ranges that a tile's keys are cut into.
struct Pieces {
  std::int32_t kept = 0;  ///< before a gap
  std::int32_t others = 1;
  std::int32_t all() const { return kept + others; }
};

/// Pages of the shortest range that a tile of the class is cut into: a step of its kernel.
inline std::int32_t min_split_pages(const PlannerConfig& config, const TileClass& tile) {
  return page_count(tile.step_keys, config.block_size);
}

/// The most ranges of at least `min_pages` pages that a tile of `pages` pages may be cut into.
inline std::int32_t most_ranges(std::int32_t pages, std::int32_t min_pages) {
  return std::max(1, quotient(std::min(pages, kMostPieces), min_pages));
}

/// Says how the key range of each tile of a plan is cut.
class Cutter {
 public:
  Cutter(const PlannerConfig& config, const PlanCuts& cuts)
      : config_(config),
        cuts_(cuts),
        fixed_pages_(page_count(config.deterministic_split_keys, config.block_size)) {}

  bool wide() const { return cuts_.wide; }
  bool skips_gaps() const { return cuts_.num_splits != 1; }
  bool is_rebalanced(std::size_t tile_class) const {
    return tile_class == kRebalancedClass && cuts_.classes[tile_class].rebalanced;
  }
  /// The rule by which the tile's keys are cut, whatever their number.
  void set_rule(Tile& tile) const {
    tile.split.min_pages = 1;
    if (cuts_.num_splits > 0) {
      tile.split.most_splits = std::min(cuts_.num_splits, kMostPieces);
    } else if (is_deterministic(config_)) {
      tile.split.most_splits = 1;
      if (tile.split.query_len <= config_.max_split_query_len)
        tile.split.fixed_pages = fixed_pages_;
    } else {
      const TileClass& tiles = config_.tiles[tile.tile_class];
      const CutChoice& choice = cuts_.classes[tile.tile_class];
      tile.split.min_pages = min_split_pages(config_, tiles);
      tile.split.most_splits = 1;
      if (!choice.cuts()) return;
      const double ns = keys_ns(tiles, tile.num_keys(), tile.split.q_count);
      tile.split.most_splits =
          splits_of(ns / choice.share_ns, most_ranges(tile.pages, tile.split.min_pages));
    }
  }
  Pieces pieces(const Tile& tile) const {
    if (tile.kept.count > 0) return pieces_around_gap(tile);
    if (tile.split.most_splits == 1 && tile.split.fixed_pages == 0) return {};
    return {0, cla_num_splits(&tile.split, tile.pages)};
  }
  /// Items that the tile gets: those, or what any length up to its own may want.
  std::int32_t room(const Tile& tile, std::int32_t pieces) const {
    if (!config_.lengths_are_bounds) return pieces;
    const std::int64_t pages =
        most_pages(config_, tile.split.bound, tile.split.q_count, tile.split.query_len);
    return cla_num_splits(&tile.split, static_cast<int>(pages));
  }

 private:
  /// As many as without the gap, but at least one on each side.
  Pieces pieces_around_gap(const Tile& tile) const {
    const std::int32_t kept_pages = page_count(tile.kept.count, config_.block_size);
    const std::int32_t others = tile.pages - kept_pages;
    if (tile.split.fixed_pages > 0)
      return {cla_num_splits(&tile.split, kept_pages), cla_num_splits(&tile.split, others)};
    const std::int32_t all = std::max(2, cla_num_splits(&tile.split, tile.pages));
    const auto share = static_cast<std::int32_t>(std::int64_t{all} * kept_pages / tile.pages);
    const std::int32_t kept = std::clamp(share, 1, all - 1);
    return {std::min(kept, kept_pages), std::min(all - kept, others)};
  }

  const PlannerConfig& config_;
  const PlanCuts& cuts_;
  std::int32_t fixed_pages_;
};

}  // namespace clattn::detail
