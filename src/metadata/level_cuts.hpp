#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "metadata/plan_model.hpp"

namespace clattn::detail {

/// A tile's keys that another team takes: pages, counted from the tile's first.
struct MovedRange {
  std::int32_t begin_page = 0, end_page = 0;
  std::int32_t position = 0;  ///< of the range's item in the list
};

/// Keys in the first pages of a tile that has `keys`.
std::int32_t keys_of_pages(std::int32_t pages, std::int32_t page_size, std::int32_t keys);

/// Cuts of a launch of persistent work-groups that give all of them nearly the same work. A team is
/// the work-groups that take an item together, one for each of its groups of KV heads. Tiles are
/// dealt to teams whole, heaviest first and back and forth; then teams with more than an even share
/// give keys of their heaviest tile to those with less. A position of the list that no team needs
/// is padding: the team that meets it has no more work. Allocates nothing.
// NOLINTNEXTLINE(*-member-init): arrays are written before they are read; every plan has them
class LevelCuts {
 public:
  static constexpr std::int32_t kMostTiles = 1024;  ///< more are nearly even as they are dealt
  static constexpr std::int32_t kMostTeams = 512;
  /// Rounds of the list beyond those that whole tiles need.
  static constexpr std::int32_t kMoreRounds = 3;
  static std::int32_t teams_of(const TileClass& tile) {
    return tile.workers / tile.groups_per_item;
  }
  /// Whether the kernel takes such a list: it stops at padding and joins its splits itself.
  static bool fits(const TileClass& tile) {
    const std::int32_t teams = teams_of(tile);
    return tile.dealing == Dealing::kDealt && tile.merges_splits && teams >= 2 &&
           teams <= kMostTeams;
  }
  /// Items of the list beyond those of whole tiles, padding included, at most: what the last of
  /// their rounds lacks, and kMoreRounds.
  static std::int64_t most_more_items(const TileClass& tile) {
    return std::int64_t{kMoreRounds + 1} * teams_of(tile);
  }
  /// Partial results of tiles of up to max_item_tokens query tokens, at most.
  static std::int64_t most_rows(const TileClass& tile) {
    return std::int64_t{2} * (teams_of(tile) - 1) * tile.max_item_tokens;
  }

  /// The next tile of the batch, one of up to kMostTiles.
  void add(const TileClass& tile, std::int32_t keys, std::int32_t tokens);
  /// Deals the tiles that were added and moves keys. `step_pages`: ranges are multiples of so many
  /// pages, and so is what is left of a tile.
  void cut(const TileClass& tile, std::int32_t page_size, std::int32_t step_pages);

  std::int32_t num_items() const { return num_items_; }  ///< padding included
  std::int64_t num_rows() const { return num_rows_; }    ///< partial results
  /// Of tile `index`, as they were added: where its first range stands in the list, and the ranges
  /// behind that one, last one first.
  std::int32_t position(std::int32_t index) const { return tile_at(index).position; }
  std::span<const MovedRange> moved(std::int32_t index) const {
    const Tile& tile = tile_at(index);
    return std::span(moves_).subspan(static_cast<std::size_t>(tile.first_move),
                                     static_cast<std::size_t>(tile.num_moves));
  }

 private:
  struct Tile {
    std::int32_t keys, tokens, position, first_move, num_moves;
  };
  struct Team {
    double load;            ///< nanoseconds of each of its groups
    std::int32_t items;     ///< in the list
    std::int32_t heaviest;  ///< of its whole tiles; -1: it has none
  };
  const Tile& tile_at(std::int32_t index) const { return tiles_[static_cast<std::size_t>(index)]; }
  std::int32_t position_of(std::int32_t team, std::int32_t round) const {
    return round * teams_ + (round % 2 == 0 ? team : teams_ - 1 - team);
  }
  std::span<Team> teams() { return std::span(team_).first(static_cast<std::size_t>(teams_)); }
  void deal(const TileClass& tile);
  double even_load(double split_ns, double range_ns);
  struct Pages {
    std::int32_t size, of_step;
  };
  void give(const TileClass& tile, const Pages& pages, double even, Team& from, std::int32_t& to);

  std::array<Tile, kMostTiles> tiles_;
  std::array<std::uint64_t, kMostTiles> order_;  ///< weight, then number: see add()
  std::array<MovedRange, kMostTeams> moves_;
  std::array<Team, kMostTeams> team_;
  std::int32_t num_tiles_ = 0, teams_ = 0, num_moves_ = 0, num_items_ = 0;
  std::int64_t num_rows_ = 0;
};

}  // namespace clattn::detail
