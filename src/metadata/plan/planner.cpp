// Each tile class is one launch, which starts its heaviest tiles first. A tile's keys are split at
// page boundaries, but only where this makes the launch end earlier, merge included: plan_model.cpp
// predicts the time without splits and with ever finer ones, and the lowest wins. A candidate is a
// share of the launch's work: a tile worth n shares is cut into n nearly equal ranges.
#include "metadata/plan/planner.hpp"

#include <algorithm>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/plan/tile_cuts.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

struct Tally {
  std::array<std::int64_t, kMaxTileClasses> items{};
  std::int64_t merges = 0;
  std::int32_t most_splits = 0;
  std::int64_t rows = 0;
  std::int64_t listed = 0;
  std::int64_t gap_ints = 0;
};

std::size_t tile_class_of(const PlannerConfig& config, bool wide, std::int32_t query_len) {
  const std::size_t longest = config.longest_class();
  std::size_t index = 0;
  while (index < longest && query_len > config.tiles[index].max_query_len) ++index;
  return wide && index == longest ? longest + 1 : index;
}

template <typename Visit>
void for_each_tile(const PlannerConfig& config, bool wide, bool skips_gaps,
                   const CommonAttentionMetadata& batch, const Visit& visit) {
  const ClaSight sight = sight_of(config, batch.is_causal());
  QueryBounds bounds(batch, config.most_query_len);
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const ClaQueryBounds given = bounds.next();
    const std::int32_t query_len = given.most;
    const std::int32_t seq_len = given.bound;
    const RequestRows rows =
        config.lists.any() ? widest_rows_of(config.lists, batch, r, query_len) : RequestRows{};
    const std::size_t tile_class = tile_class_of(config, wide, query_len);
    const std::int32_t limit = config.tiles[tile_class].max_item_tokens;
    const bool skips = skips_gaps && query_len <= config.gap_split_query_len;
    for (std::int32_t done = 0; done < query_len;) {
      const std::int32_t count = std::min(limit, query_len - done);
      Tile tile{};
      tile.tile_class = tile_class;
      tile.q_pos = seq_len - query_len + done;
      if (rows.lists(tile.q_pos, count)) {
        const ListedKeys keys = listed_tile_keys(config, rows, tile.q_pos, count, skips);
        tile.kept = keys.kept;
        tile.keys = keys.others;
        tile.listed = count + 1;
        if (rows.has_gaps()) tile.gap_ints = count * gap_row_ints(rows.tree.size());
      } else {
        tile.keys = cla_tile_keys(&sight, tile.q_pos, count, seq_len);
      }
      tile.pages = page_count(tile.keys.count, config.block_size) +
                   page_count(tile.kept.count, config.block_size);
      tile.is_open = given.fewest < query_len;
      tile.split.request = r;
      tile.split.query_len = query_len;
      tile.split.bound = seq_len;
      tile.split.behind = query_len - done;
      tile.split.q_row = given.begin + done;
      tile.split.q_count = count;
      visit(tile);
      done += count;
    }
  }
}

/// The same for each class.
std::array<std::int32_t, kMaxTileClasses> min_split_pages(const PlannerConfig& config) {
  std::array<std::int32_t, kMaxTileClasses> pages{};
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c)
    pages[c] = min_split_pages(config, config.tiles[c]);
  return pages;
}

/// Makes the cuts coarser; enough calls leave nothing split but rebalanced tiles, whose partial
/// rows always fit (TileCounts::or_rebalanced). False if the cuts must not change.
bool coarsen(const PlannerConfig& config, PlanCuts& cuts) {
  if (is_deterministic(config)) return false;
  if (cuts.num_splits > 1) {
    cuts.num_splits /= 2;
    return true;
  }
  for (CutChoice& choice : cuts.classes) choice.share_ns *= 1.5;
  return true;
}

void write_merges(const ClaSplit& split, std::int32_t pieces, std::int64_t at,
                  const PlanOutput& output) {
  for (std::int32_t token = 0; token < split.q_count; ++token)
    output.merges[to_size(at + token)] = cla_merge_of(&split, token, pieces);
}

/// Writes a tile's items; changes tile.split. Where lengths are bounds, pages_at is an item's
/// number in `splits` until place_items().
void write_tile(const PlannerConfig& config, Tile& tile, std::int32_t pieces, std::int32_t room,
                const Tally& at, const PlanOutput& output) {
  ClaSplit& split = tile.split;
  ClaWorkItem* item = &output.items[tile.tile_class][to_size(at.items[tile.tile_class])];
  if (room == 1 && !config.lengths_are_bounds) {  // most tiles of most steps; no merge
    *item = cla_item_of(&split, tile.q_pos, tile.keys, config.block_size, 1);
    return;
  }
  for (; split.split < room; ++split.split) {
    *item = cla_item_of(&split, tile.q_pos, tile.keys, config.block_size, pieces);
    if (config.lengths_are_bounds) {
      const std::int64_t number =
          std::accumulate(at.items.begin(), at.items.end(), std::int64_t{split.split});
      output.splits[to_size(number)] = split;
      item->pages_at = static_cast<std::int32_t>(number);
    }
    ++item;
  }
}

/// Lists the rows of a tile, as far as the host knows them, and what the device lists them from.
void write_listed(const PlannerConfig& config, const CommonAttentionMetadata& batch, Tile& tile,
                  const Tally& at, const PlanOutput& output) {
  const ClaSplit& planned = tile.split;
  const auto r = to_size(planned.request);
  const RequestRows rows = rows_of(config.lists, batch, planned.request);
  const std::int32_t gap_row_ints = tile.gap_ints / planned.q_count;
  const std::int32_t gap_rows_at = output.gap_rows_at + static_cast<std::int32_t>(at.gap_ints);
  const ClaSplit own = cla_narrow_tile(&planned, batch.query_start_loc[r], rows.query_len);
  const std::int32_t position = rows.seq_len - own.behind;
  if (own.behind > 0) {
    list_rows(config, rows, position,
              {output.listed.subspan(to_size(at.listed), to_size(own.q_count + 1)),
               output.gap_rows.subspan(to_size(at.gap_ints), to_size(tile.gap_ints)), gap_rows_at,
               gap_row_ints});
  }
  tile.split.listed = output.listed_at + static_cast<std::int32_t>(at.listed) + 1;
  tile.q_pos = CLA_LISTED + tile.split.listed;
  if (output.sources.empty()) return;
  ClaRowSource* source = &output.sources[to_size(at.listed)];
  const std::int32_t token = planned.query_len - planned.behind;
  *source++ = {planned.request, token, planned.q_count, 0, {}};
  for (std::int32_t i = 0; i < planned.q_count; ++i)
    *source++ = {planned.request, token + i, 0,
                 gap_row_ints > 0 ? gap_rows_at + i * gap_row_ints : 0,
                 span_at(rows, position + i)};
}

/// Writes the items of a tile on both sides of a gap, as splits of one tile.
void write_around_gap(const PlannerConfig& config, const Tile& tile, const Pieces& pieces,
                      ClaWorkItem* item) {
  const std::pair<ClaTileKeys, std::int32_t> sides[] = {{tile.kept, pieces.kept},
                                                        {tile.keys, pieces.others}};
  std::int32_t number = 0;
  for (const auto& [keys, count] : sides) {
    ClaSplit split = tile.split;
    for (split.split = 0; split.split < count; ++split.split, ++number, ++item) {
      *item = cla_item_of(&split, tile.q_pos, keys, config.block_size, count);
      item->partial_row = split.first_row + number * split.q_count;
      item->split = static_cast<std::uint16_t>(number);
      item->num_splits = static_cast<std::uint16_t>(split.merge_at < 0 ? pieces.all() : 0);
    }
  }
}

/// Writes the items of a tile with rebalanced cuts, the moved ranges where sets look for them.
void write_rebalanced_tile(const PlannerConfig& config, const Tile& tile,
                           const RebalancedCuts& rebalanced, std::int32_t index,
                           std::span<ClaWorkItem> items) {
  const std::span<const MovedRange> moved = rebalanced.moved(index);
  const std::int32_t pieces = rebalanced.num_pieces(index);
  ClaSplit split = tile.split;
  const auto write = [&](std::int32_t position, std::int32_t begin_page, std::int32_t end_page) {
    ClaWorkItem item = cla_item_of(&split, tile.q_pos, tile.keys, config.block_size, pieces);
    item.kv_begin = tile.keys.first + begin_page * config.block_size;
    item.kv_end = tile.keys.first + keys_of_pages(end_page, config.block_size, tile.keys.count);
    items[to_size(position)] = item;
    ++split.split;
  };
  write(rebalanced.position(index), 0, moved.empty() ? tile.pages : moved.back().begin_page);
  for (std::size_t i = moved.size(); i-- > 0;)
    write(moved[i].position, moved[i].begin_page, moved[i].end_page);
}

/// Walks the plan, writing it if there is an output.
Tally cut_tiles(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                const Cutter& cutter, const RebalancedCuts& rebalanced,
                std::span<const std::int32_t> pages_at, const PlanOutput* output) {
  Tally tally;
  const std::int64_t spare_rows = spare_partial_rows(config);
  tally.rows = spare_rows;
  if (cutter.is_rebalanced(kRebalancedClass)) {
    tally.items[kRebalancedClass] = rebalanced.num_items();
    ClaWorkItem padding{};
    padding.partial_row = -1;
    if (output != nullptr)
      std::ranges::fill(output->items[kRebalancedClass].first(to_size(rebalanced.num_items())),
                        padding);
  }
  std::int32_t num_rebalanced = 0;  // tiles
  for_each_tile(config, cutter.wide(), cutter.skips_gaps(), batch, [&](Tile& tile) {
    const bool is_rebalanced = cutter.is_rebalanced(tile.tile_class);
    const std::int32_t index = num_rebalanced;
    if (is_rebalanced) {
      ++num_rebalanced;
    } else {
      cutter.set_rule(tile);
    }
    const Pieces ranges =
        is_rebalanced ? Pieces{0, rebalanced.num_pieces(index)} : cutter.pieces(tile);
    const std::int32_t pieces = ranges.all();
    const std::int32_t room = is_rebalanced ? pieces : cutter.room(tile, pieces);
    const bool merges = room > 1 && !config.tiles[tile.tile_class].merges_splits;
    if (output != nullptr) {
      tile.split.pages_at = pages_at[to_size(tile.split.request)];
      const bool is_spare = room == 1 && !tile.is_open && spare_rows > 0;
      tile.split.first_row = is_spare ? 0 : static_cast<std::int32_t>(tally.rows);
      tile.split.merge_at = merges ? output->merge_at(tally.merges) : -1;
      if (tile.listed > 0) write_listed(config, batch, tile, tally, *output);
      if (is_rebalanced) {
        write_rebalanced_tile(config, tile, rebalanced, index, output->items[kRebalancedClass]);
      } else if (ranges.kept > 0) {
        write_around_gap(config, tile, ranges,
                         &output->items[tile.tile_class][to_size(tally.items[tile.tile_class])]);
      } else {
        write_tile(config, tile, pieces, room, tally, *output);
      }
      if (merges) write_merges(tile.split, pieces, tally.merges, *output);
    }
    if (!is_rebalanced) tally.items[tile.tile_class] += room;
    tally.listed += tile.listed;
    tally.gap_ints += tile.gap_ints;
    if (room == 1 && !tile.is_open) return;
    tally.rows += std::int64_t{room} * tile.split.q_count;
    if (!merges) return;
    tally.merges += tile.split.q_count;
    tally.most_splits = std::max(tally.most_splits, room);
  });
  return tally;
}

/// Rebalances the tiles of kRebalancedClass; what the plan is then expected to take is what its
/// list comes to.
void rebalance(const PlannerConfig& config, const CommonAttentionMetadata& batch, PlanCuts& cuts,
               RebalancedCuts& rebalanced) {
  TileClass tiles = config.tiles[kRebalancedClass];
  tiles.workers = cuts.workers[kRebalancedClass];
  for_each_tile(config, cuts.wide, true, batch, [&](const Tile& tile) {
    if (tile.tile_class == kRebalancedClass)
      rebalanced.add(tiles, tile.keys.count, tile.split.q_count);
  });
  rebalanced.cut(tiles, config.block_size, min_split_pages(config, tiles));
  CutChoice& choice = cuts.classes[kRebalancedClass];
  cuts.end_ns -= choice.total_ns();
  choice.end_ns = rebalanced.end_ns(tiles);
  if (choice.merges)
    choice.merge_ns = merge_ns(config.merge, static_cast<double>(rebalanced.num_cut_tokens()),
                               static_cast<double>(rebalanced.num_rows()));
  cuts.end_ns += choice.total_ns();
}

PlanCounts to_counts(const Tally& tally, const PlanCuts& cuts) {
  const auto to_count = [](std::int64_t number) {
    return static_cast<std::int32_t>(std::min(number, kMaxInt32));
  };
  PlanCounts counts{.workers = cuts.workers,
                    .slower = cuts.slower,
                    .rebalanced = cuts.classes[kRebalancedClass].rebalanced,
                    .num_merges = to_count(tally.merges),
                    .most_splits = tally.most_splits,
                    .num_partial_rows = tally.rows,
                    .num_listed = to_count(tally.listed),
                    .num_gap_ints = to_count(tally.gap_ints)};
  std::ranges::transform(tally.items, counts.num_items.begin(), to_count);
  return counts;
}

void check_output(const PlannerConfig& config, const PlanCounts& counts, const PlanOutput& output) {
  const auto check = [](std::string_view field, std::size_t size, std::int64_t needed) {
    throw_invalid_if(size < to_size(needed), "{} holds {} elements, legal: at least {}", field,
                     size, needed);
  };
  for (std::size_t c = 0; c < output.items.size(); ++c) {
    check("PlanOutput::items", output.items[c].size(), counts.num_items[c]);
  }
  check("PlanOutput::merges", output.merges.size(), counts.num_merges);
  check("PlanOutput::listed", output.listed.size(), counts.num_listed);
  check("PlanOutput::gap_rows", output.gap_rows.size(), counts.num_gap_ints);
  if (!output.sources.empty())
    check("PlanOutput::sources", output.sources.size(), counts.num_listed);
  if (config.lengths_are_bounds)
    check("PlanOutput::splits", output.splits.size(), counts.all_items());
}

/// The balanced cuts that end earliest, with wide tiles or without. `tiles`: without.
PlanCuts best_cuts(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                   const PlanTiles& tiles, std::int64_t max_rows) {
  PlanCuts best = choose_plan(config, tiles, max_rows);
  if (!config.last_is_wide || tiles[config.longest_class()].empty()) return best;
  PlanCuts wide = choose_plan(config, count_tiles(config, batch, true), max_rows);
  wide.wide = true;
  return wide.end_ns < best.end_ns ? wide : best;
}

}  // namespace

std::int64_t spare_partial_rows(const PlannerConfig& config) {
  std::int64_t most = 0;
  for (std::size_t c = 0; config.most_query_len > 0 && c < to_size(config.num_tiles); ++c)
    most = std::max<std::int64_t>(most, config.tiles[c].max_item_tokens);
  return most;
}

PlanTiles count_tiles(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                      bool wide) {
  PlanTiles tiles;
  const auto min_pages = min_split_pages(config);
  for_each_tile(config, wide, true, batch, [&](const Tile& tile) {
    tiles[tile.tile_class].add(config.tiles[tile.tile_class], tile.num_keys(), tile.split.q_count,
                               most_ranges(tile.pages, min_pages[tile.tile_class]),
                               tile.kept.count > 0);
  });
  return tiles;
}

AttentionPlan::AttentionPlan(const PlannerConfig& config, const CommonAttentionMetadata& batch)
    : config_(config), batch_(batch) {
  check_config(config);
  // Items are tokens plus rows at most, so that 32 bits number them all.
  const std::int64_t max_rows =
      std::min(config.max_partial_rows, kMaxInt32 - batch.num_actual_tokens);
  cuts_.num_splits = max_rows < 2 ? 1 : config.num_splits;
  if (cuts_.num_splits == 0 && !is_deterministic(config)) {
    const PlanTiles tiles = count_tiles(config, batch);
    cuts_ = best_cuts(config, batch, tiles, max_rows);
    if (cuts_.classes[kRebalancedClass].rebalanced) {
      rebalance(config, batch, cuts_, rebalanced_);
      PlannerConfig without = config;  // ranges may not have found room
      without.fixed_groups = true;
      const PlanCuts others = best_cuts(without, batch, tiles, max_rows);
      if (others.end_ns <= cuts_.end_ns) cuts_ = others;
    }
    const bool cuts = cuts_.wide || std::ranges::any_of(cuts_.classes, &CutChoice::cuts);
    if (!cuts && !config.lists.any() && config.most_query_len == 0) {
      Tally tally;  // known without a walk: an item a tile
      std::ranges::transform(tiles, tally.items.begin(), &TileCounts::tiles);
      counts_ = to_counts(tally, cuts_);
      return;
    }
  }
  Tally tally = cut_tiles(config, batch, Cutter(config, cuts_), rebalanced_, {}, nullptr);
  while (tally.rows > max_rows && cuts_.num_splits != 1) {
    throw_unsupported_if(
        !coarsen(config, cuts_),
        "deterministic splits of this batch need {} partial rows, legal: at most {} "
        "(max_partial_rows)",
        tally.rows, max_rows);
    tally = cut_tiles(config, batch, Cutter(config, cuts_), rebalanced_, {}, nullptr);
  }
  counts_ = to_counts(tally, cuts_);
}

void AttentionPlan::write(std::span<const std::int32_t> pages_at, const PlanOutput& output) const {
  check_size("pages_at", pages_at.size(), batch_.num_reqs, "num_reqs");
  check_output(config_, counts_, output);
  const Cutter cutter(config_, cuts_);
  cut_tiles(config_, batch_, cutter, rebalanced_, pages_at, &output);
  for (std::size_t c = 0; c < counts_.num_items.size(); ++c) {
    if (cutter.is_rebalanced(c)) continue;  // their order is that in which they are dealt
    sort_items(config_.item_order, config_.tiles[c],
               output.items[c].first(to_size(counts_.num_items[c])));
  }
  if (config_.lengths_are_bounds) place_items(counts_, output);
  if (config_.most_query_len > 0) take_query_lens(config_, batch_, counts_, output);
}

}  // namespace clattn::detail
