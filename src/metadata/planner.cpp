// Each tile class is one launch, which starts its heaviest tiles first. A tile's keys are split at
// page boundaries, but only where this makes the launch end earlier, merge included: plan_model.cpp
// predicts the time without splits and with ever finer ones, and the lowest wins. A candidate is a
// share of the launch's work: a tile worth n shares is cut into n nearly equal ranges.
#include "metadata/planner.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

/// Query tokens that one work-group handles, and the keys that any of them sees, from `first_key`
/// (on a page boundary) on.
struct Tile {
  std::size_t tile_class;
  std::int32_t request;
  std::int32_t q_row;
  std::int32_t q_count;
  std::int32_t q_pos;
  std::int32_t first_key;
  std::int32_t keys;
  std::int32_t query_len;  // of the whole request
};

struct Tally {
  std::array<std::int64_t, kMaxTileClasses> items{};
  std::int64_t merges = 0;
  std::int64_t rows = 0;
};

std::size_t tile_class_of(const PlannerConfig& config, std::int32_t query_len) {
  std::size_t index = 0;
  while (index + 1 < to_size(config.num_tiles) && query_len > config.tiles[index].max_query_len) {
    ++index;
  }
  return index;
}

/// The tile's first_key and keys. Both ends of what a query sees rise with its position, so the
/// first query has the first key and the last query the last. 64 bits: windows may be of any width.
void set_key_range(const PlannerConfig& config, bool causal, std::int64_t seq_len, Tile& tile) {
  const KeyWindow& window = config.window;
  const std::int64_t first = tile.q_pos;
  const std::int64_t last = first + tile.q_count - 1;
  std::int64_t begin = 0;
  std::int64_t end = causal ? std::min(seq_len, last + 1) : seq_len;
  if (window.left >= 0) begin = std::max(begin, first - window.left);
  if (window.right >= 0) end = std::min(end, last + window.right + 1);
  if (window.chunk > 0) {
    begin = std::max(begin, first - first % window.chunk);
    end = std::min(end, last - last % window.chunk + window.chunk);
  }
  if (begin >= end) return;  // no query of the tile sees a key
  begin -= begin % config.block_size;
  tile.first_key = static_cast<std::int32_t>(begin);
  tile.keys = static_cast<std::int32_t>(end - begin);
}

template <typename Visit>
void for_each_tile(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                   const Visit& visit) {
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto request = to_size(r);
    const std::int32_t first_row = batch.query_start_loc[request];
    const std::int32_t query_len = batch.query_start_loc[request + 1] - first_row;
    const std::int32_t seq_len = batch.seq_lens[request];
    const std::size_t tile_class = tile_class_of(config, query_len);
    const std::int32_t limit = config.tiles[tile_class].max_item_tokens;
    for (std::int32_t done = 0; done < query_len;) {
      const std::int32_t count = std::min(limit, query_len - done);
      Tile tile{tile_class, r, first_row + done, count, seq_len - query_len + done,
                0,          0, query_len};
      set_key_range(config, batch.is_causal() && !config.bidirectional, seq_len, tile);
      visit(tile);
      done += count;
    }
  }
}

std::int32_t pages_of(std::int32_t keys, const PlannerConfig& config) {
  return page_count(keys, config.block_size);
}

bool is_deterministic(const PlannerConfig& config) {
  return config.split_policy == SplitPolicy::kDeterministic;
}

/// Pages of the shortest range that a tile of the class is cut into: a step of its kernel.
std::int32_t min_split_pages(const PlannerConfig& config, const TileClass& tile) {
  return pages_of(tile.step_keys, config);
}

/// Says how the key range of each tile of a plan is cut.
class Cutter {
 public:
  Cutter(const PlannerConfig& config, const PlanCuts& cuts)
      : config_(config),
        cuts_(cuts),
        fixed_pages_(pages_of(config.deterministic_split_keys, config)) {}

  /// Ranges that the tile's keys are cut into: at least 1, at most its pages.
  std::int32_t pieces(const Tile& tile) const {
    if (cuts_.num_splits == 1) return 1;
    const std::int32_t pages = std::clamp(pages_of(tile.keys, config_), 1, kMostPieces);
    if (cuts_.num_splits > 1) return std::min(pages, cuts_.num_splits);
    if (is_deterministic(config_)) {
      if (tile.query_len > config_.max_split_query_len) return 1;
      return std::max(1, page_count(pages_of(tile.keys, config_), fixed_pages_));
    }
    const TileClass& tiles = config_.tiles[tile.tile_class];
    const double ns = keys_ns(tiles, tile.keys, tile.q_count);
    return splits_of(ns / cuts_.classes[tile.tile_class].share_ns,
                     std::max(1, pages / min_split_pages(config_, tiles)));
  }

  /// First key of a piece, on a page boundary; for index == pieces the end of the last.
  std::int32_t piece_begin(const Tile& tile, std::int32_t pieces, std::int32_t index) const {
    if (index == pieces) return tile.first_key + tile.keys;
    const std::int64_t page = cuts_.num_splits == 0 && is_deterministic(config_)
                                  ? std::int64_t{fixed_pages_} * index
                                  : std::int64_t{pages_of(tile.keys, config_)} * index / pieces;
    return static_cast<std::int32_t>(tile.first_key + page * config_.block_size);
  }

 private:
  const PlannerConfig& config_;
  const PlanCuts& cuts_;
  std::int32_t fixed_pages_;
};

/// Makes the cuts coarser; enough calls leave nothing split. False if the cuts must not change.
bool coarsen(const PlannerConfig& config, PlanCuts& cuts) {
  if (is_deterministic(config)) return false;
  if (cuts.num_splits > 1) {
    cuts.num_splits /= 2;
    return true;
  }
  for (CutChoice& choice : cuts.classes) choice.share_ns *= 1.5;
  return true;
}

void write_tile(const Tile& tile, const Cutter& cutter, std::int32_t pieces, bool merges_splits,
                const Tally& at, std::int32_t pages_at, const PlanOutput& output) {
  const auto first_row = static_cast<std::int32_t>(at.rows);
  ClaWorkItem* item = &output.items[tile.tile_class][to_size(at.items[tile.tile_class])];
  for (std::int32_t piece = 0; piece < pieces; ++piece) {
    *item++ = {.q_row = tile.q_row,
               .q_count = tile.q_count,
               .q_pos = tile.q_pos,
               .kv_begin = cutter.piece_begin(tile, pieces, piece),
               .kv_end = cutter.piece_begin(tile, pieces, piece + 1),
               .pages_at = pages_at,
               .partial_row = pieces > 1 ? first_row + piece * tile.q_count : -1,
               .split = static_cast<std::uint16_t>(piece),
               .num_splits = static_cast<std::uint16_t>(pieces > 1 && merges_splits ? pieces : 0)};
  }
  if (pieces == 1 || merges_splits) return;
  ClaMergeItem* merge = &output.merges[to_size(at.merges)];
  for (std::int32_t token = 0; token < tile.q_count; ++token) {
    *merge++ = {.out_row = tile.q_row + token,
                .partial_row = first_row + token,
                .num_splits = pieces,
                .split_stride = tile.q_count};
  }
}

/// Walks the plan, writing it if there is an output.
Tally cut_tiles(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                const Cutter& cutter, std::span<const std::int32_t> pages_at,
                const PlanOutput* output) {
  Tally tally;
  for_each_tile(config, batch, [&](const Tile& tile) {
    const std::int32_t pieces = cutter.pieces(tile);
    const bool merges_splits = config.tiles[tile.tile_class].merges_splits;
    if (output != nullptr) {
      write_tile(tile, cutter, pieces, merges_splits, tally, pages_at[to_size(tile.request)],
                 *output);
    }
    tally.items[tile.tile_class] += pieces;
    if (pieces == 1) return;
    if (!merges_splits) tally.merges += tile.q_count;
    tally.rows += std::int64_t{pieces} * tile.q_count;
  });
  return tally;
}

/// Items of equal cost stay in batch order; a list that is already sorted is left alone.
void sort_items(const PlannerConfig& config, const TileClass& tile, std::span<ClaWorkItem> items) {
  if (config.item_order == ItemOrder::kAsCut) return;
  const auto cost = [&](const ClaWorkItem& item) {
    return keys_ns(tile, item.kv_end - item.kv_begin, item.q_count);
  };
  const bool heavy_first = config.item_order == ItemOrder::kHeavyFirst;
  const auto earlier = [&](const ClaWorkItem& a, const ClaWorkItem& b) {
    return heavy_first ? cost(a) > cost(b) : cost(a) < cost(b);
  };
  if (std::ranges::is_sorted(items, earlier)) return;
  std::ranges::sort(items, [&](const ClaWorkItem& a, const ClaWorkItem& b) {
    if (cost(a) != cost(b)) return earlier(a, b);
    return a.q_row != b.q_row ? a.q_row < b.q_row : a.kv_begin < b.kv_begin;
  });
}

PlanCounts to_counts(const Tally& tally) {
  PlanCounts counts;
  for (std::size_t c = 0; c < counts.num_items.size(); ++c) {
    counts.num_items[c] = static_cast<std::int32_t>(std::min(tally.items[c], kMaxInt32));
  }
  counts.num_merges = static_cast<std::int32_t>(std::min(tally.merges, kMaxInt32));
  counts.num_partial_rows = tally.rows;
  return counts;
}

void check_output(const PlanCounts& counts, const PlanOutput& output) {
  const auto check = [](std::string_view field, std::size_t size, std::int32_t needed) {
    throw_invalid_if(size < to_size(needed), "{} holds {} elements, legal: at least {}", field,
                     size, needed);
  };
  for (std::size_t c = 0; c < output.items.size(); ++c) {
    check("PlanOutput::items", output.items[c].size(), counts.num_items[c]);
  }
  check("PlanOutput::merges", output.merges.size(), counts.num_merges);
}

}  // namespace

void check_config(const PlannerConfig& config) {
  struct Field {
    std::string_view name;
    std::int32_t value;
  };
  const Field fields[] = {
      {"num_tiles", config.num_tiles},
      {"block_size", config.block_size},
      {"max_split_query_len", config.max_split_query_len},
      {"deterministic_split_keys", config.deterministic_split_keys},
  };
  for (const Field& field : fields) {
    check_at_least(field.name, field.value, 1);
  }
  throw_invalid_if(config.num_tiles > kMaxTileClasses, "num_tiles is {}, legal: 1 … {}",
                   config.num_tiles, kMaxTileClasses);
  for (std::size_t c = 0; c < to_size(config.num_tiles); ++c) {
    const TileClass& tile = config.tiles[c];
    const Field of_tile[] = {{"max_item_tokens", tile.max_item_tokens},
                             {"groups_per_item", tile.groups_per_item},
                             {"step_keys", tile.step_keys},
                             {"workers", tile.workers}};
    for (const Field& field : of_tile) {
      throw_invalid_if(field.value < 1, "tiles[{}].{} is {}, legal: at least 1", c, field.name,
                       field.value);
    }
    // So that a tile's whole time is a number, too.
    constexpr double kMostKeyNs = 1e15;
    throw_invalid_if(!(tile.costs.key_ns > 0 && tile.costs.key_ns <= kMostKeyNs &&
                       tile.costs.token_key_ns >= 0 && tile.costs.token_key_ns <= kMostKeyNs),
                     "tiles[{}].costs: a key takes {} ns and {} ns a token, legal: above 0 … {:g}",
                     c, tile.costs.key_ns, tile.costs.token_key_ns, kMostKeyNs);
  }
  throw_invalid_if(config.num_splits < 0, "num_splits is {}, legal: at least 0 (0 = planned)",
                   config.num_splits);
}

PlanTiles count_tiles(const PlannerConfig& config, const CommonAttentionMetadata& batch) {
  PlanTiles tiles;
  for_each_tile(config, batch, [&](const Tile& tile) {
    const TileClass& of = config.tiles[tile.tile_class];
    const std::int32_t pages = std::min(pages_of(tile.keys, config), kMostPieces);
    tiles[tile.tile_class].add(of, tile.keys, tile.q_count,
                               std::max(1, pages / min_split_pages(config, of)));
  });
  return tiles;
}

std::array<CutChoice, kMaxTileClasses> choose_cuts(const PlannerConfig& config,
                                                   const PlanTiles& tiles, std::int64_t max_rows) {
  std::array<CutChoice, kMaxTileClasses> best, uncut;
  double gain = 0;
  for (std::size_t c = 0; c < best.size(); ++c) {
    const TileClass& tile = config.tiles[c];
    best[c] = tiles[c].choose(tile, config.merge, max_rows);
    if (!best[c].merges) continue;
    uncut[c] = tiles[c].judge(tile, config.merge, CutChoice{}.share_ns);
    gain += uncut[c].total_ns() - best[c].total_ns();
  }
  for (std::size_t c = 0; c < best.size() && gain < config.merge.launch_ns; ++c) {
    if (best[c].merges) best[c] = uncut[c];
  }
  return best;
}

AttentionPlan::AttentionPlan(const PlannerConfig& config, const CommonAttentionMetadata& batch)
    : config_(config), batch_(batch) {
  check_config(config);
  // Items are tokens plus rows at most, so that 32 bits number them all.
  const std::int64_t max_rows =
      std::min(config.max_partial_rows, kMaxInt32 - batch.num_actual_tokens);
  cuts_.num_splits = max_rows < 2 ? 1 : config.num_splits;
  if (cuts_.num_splits == 0 && !is_deterministic(config)) {
    cuts_.classes = choose_cuts(config, count_tiles(config, batch), max_rows);
  }
  Tally tally = cut_tiles(config, batch, Cutter(config, cuts_), {}, nullptr);
  while (tally.rows > max_rows && cuts_.num_splits != 1) {
    throw_unsupported_if(
        !coarsen(config, cuts_),
        "deterministic splits of this batch need {} partial rows, legal: at most {} "
        "(max_partial_rows)",
        tally.rows, max_rows);
    tally = cut_tiles(config, batch, Cutter(config, cuts_), {}, nullptr);
  }
  counts_ = to_counts(tally);
}

void AttentionPlan::write(std::span<const std::int32_t> pages_at, const PlanOutput& output) const {
  check_size("pages_at", pages_at.size(), batch_.num_reqs, "num_reqs");
  check_output(counts_, output);
  cut_tiles(config_, batch_, Cutter(config_, cuts_), pages_at, &output);
  for (std::size_t c = 0; c < counts_.num_items.size(); ++c) {
    sort_items(config_, config_.tiles[c], output.items[c].first(to_size(counts_.num_items[c])));
  }
}

}  // namespace clattn::detail
