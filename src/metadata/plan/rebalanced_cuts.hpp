#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/checked.hpp"
#include "metadata/plan/plan_model.hpp"

namespace clattn::detail {

/// Keys of a tile that another set of groups takes: pages, counted from the tile's first.
struct MovedRange {
  std::int32_t begin_page = 0, end_page = 0;
  std::int32_t position = 0;  ///< of the range's item in the list
};

/// Keys in the first pages of a tile that has `keys`.
std::int32_t keys_of_pages(std::int32_t pages, std::int32_t page_size, std::int32_t keys);

/// Cuts of a launch of persistent work-groups that give all of them nearly the same work. A group
/// set is the `groups_per_item` work-groups that take an item together, one for each group of KV
/// heads. Tiles are dealt to sets whole, heaviest first and back and forth; then sets with more
/// than the target load give keys of their heaviest tile to sets with less. A position of the list
/// that no set needs is padding: the set that meets it has no more work. Allocates nothing.
// NOLINTNEXTLINE(*-member-init): arrays are written before they are read; every plan has them
class RebalancedCuts {
 public:
  static constexpr std::int32_t kMostTiles = 1024;  ///< more are nearly even as they are dealt
  static constexpr std::int32_t kMostGroups = 512;  ///< work-groups of a launch
  /// Rounds of the list beyond those that whole tiles need.
  static constexpr std::int32_t kExtraRounds = 3;
  static std::int32_t sets_of(const TileClass& tile) { return tile.workers / tile.groups_per_item; }
  static bool fits(const TileClass& tile) {
    return tile.ends_at_padding && sets_of(tile) >= 2 && tile.workers <= kMostGroups;
  }
  /// Most items beyond one per tile, padding included: the rest of the last round, and kExtraRounds
  /// more.
  static std::int64_t most_extra_items(const TileClass& tile) {
    return std::int64_t{kExtraRounds + 1} * sets_of(tile);
  }
  /// Partial results of tiles of up to max_item_tokens query tokens, at most.
  static std::int64_t most_rows(const TileClass& tile) {
    return std::int64_t{2} * (sets_of(tile) - 1) * tile.max_item_tokens;
  }

  /// The next tile of the batch, one of up to kMostTiles.
  void add(const TileClass& tile, std::int32_t keys, std::int32_t tokens);
  /// Deals the tiles that were added and moves keys. A range begins at a multiple of `step_pages`,
  /// and neither it nor the rest of its tile is shorter.
  void cut(const TileClass& tile, std::int32_t page_size, std::int32_t step_pages);

  /// When the launch is expected to end, as TileCounts predicts it for other cuts.
  double end_ns(const TileClass& tile) const;
  std::int32_t num_items() const { return num_items_; }            ///< padding included
  std::int64_t num_rows() const { return num_rows_; }              ///< partial results
  std::int64_t num_cut_tokens() const { return num_cut_tokens_; }  ///< that those are of
  /// Of tile `index` in the order of add(): its ranges, the list position of the keys that it
  /// keeps, and the ranges that were moved, last keys first.
  std::int32_t num_pieces(std::int32_t index) const { return tile_at(index).num_moves + 1; }
  std::int32_t position(std::int32_t index) const { return tile_at(index).position; }
  std::span<const MovedRange> moved(std::int32_t index) const {
    const Tile& tile = tile_at(index);
    return std::span(moves_).subspan(to_size(tile.first_move), to_size(tile.num_moves));
  }

 private:
  struct Tile {
    std::int32_t keys, tokens, position, first_move, num_moves;
  };
  struct GroupSet {
    double load;            ///< nanoseconds of each of its groups
    std::int32_t items;     ///< in the list
    std::int32_t heaviest;  ///< of its whole tiles; -1: it has none
  };
  const Tile& tile_at(std::int32_t index) const { return tiles_[to_size(index)]; }
  std::int32_t position_of(std::int32_t set, std::int32_t round) const {
    return round * num_sets_ + (round % 2 == 0 ? set : num_sets_ - 1 - set);
  }
  std::span<GroupSet> sets() { return std::span(sets_).first(to_size(num_sets_)); }
  void deal(const TileClass& tile);
  double target_load(const TaskCosts& costs, double step_ns);
  struct Pages {
    std::int32_t size, of_step;
  };
  void give(const TileClass& tile, const Pages& pages, double target, GroupSet& from,
            std::int32_t& to);

  std::array<Tile, kMostTiles> tiles_;
  std::array<std::uint64_t, kMostTiles> order_;  ///< weight, then index: see add()
  std::array<MovedRange, kMostGroups> moves_;
  std::array<GroupSet, kMostGroups> sets_;
  std::int32_t num_tiles_ = 0, num_sets_ = 0, num_moves_ = 0, num_items_ = 0;
  std::int64_t num_rows_ = 0, num_cut_tokens_ = 0;
  double shared_ns_ = 0;  ///< of all keys, which groups slow each other down by
};

}  // namespace clattn::detail
