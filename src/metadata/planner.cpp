// Balanced plans. Each tile class is a launch of its own, so each is balanced by itself: the work
// of all its query tiles, divided by the work-groups that the device wants, is the fair share of a
// work-group. A tile that outweighs the share is cut into as many near-equal ranges of whole pages
// as shares it holds. Hence no item outweighs the share (by more than a page), and handing items to
// m compute units greedily ends within mean + share = mean * (1 + 1 / items_per_compute_unit).
// Nothing is cut once there are enough equal tiles, so a full device pays no merge.
//
// Where it is known how many groups a compute unit runs at once, a launch is a number of waves, and
// filling them is worth more than equal items: the pieces of a tile are rounded down, so that equal
// tiles exceed no wave. Tiles that fit into one wave get one. More than that get four, because
// groups end at different times, and the last wave's wait for each other with little to do; or two,
// where groups stay and go through the tasks.
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
constexpr std::uint64_t kMaxCost = std::uint64_t{1} << 62;  // sums of two costs fit

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
  while (index + 1 < static_cast<std::size_t>(config.num_tiles) &&
         query_len > config.tiles[index].max_query_len) {
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
    const auto request = static_cast<std::size_t>(r);
    const std::int32_t first_row = batch.query_start_loc[request];
    const std::int32_t query_len = batch.query_start_loc[request + 1] - first_row;
    const std::int32_t seq_len = batch.seq_lens[request];
    const std::size_t tile_class = tile_class_of(config, query_len);
    const std::int32_t limit = config.tiles[tile_class].max_item_tokens;
    for (std::int32_t done = 0; done < query_len;) {
      const std::int32_t count = std::min(limit, query_len - done);
      Tile tile{tile_class, r, first_row + done, count, seq_len - query_len + done,
                0,          0, query_len};
      set_key_range(config, batch.causal && !config.bidirectional, seq_len, tile);
      visit(tile);
      done += count;
    }
  }
}

/// Work of an item: its keys, times its tokens once there are enough of them to hide the reading.
std::uint64_t item_cost(const PlannerConfig& config, std::int32_t keys, std::int32_t tokens) {
  return static_cast<std::uint64_t>(keys) *
         static_cast<std::uint64_t>(std::max(tokens, config.max_split_query_len));
}

std::int32_t pages_of(std::int32_t keys, const PlannerConfig& config) {
  return page_count(keys, config.block_size);
}

/// Decides how the key range of each tile of one plan is cut.
class Cutter {
 public:
  Cutter(const PlannerConfig& config, const CommonAttentionMetadata& batch)
      : config_(config),
        num_splits_(config.max_partial_rows < 2 ? 1 : config.num_splits),
        fixed_pages_(pages_of(config.deterministic_split_keys, config)) {
    if (num_splits_ == 0 && !deterministic()) set_fair_shares(batch);
  }

  /// Ranges that the tile's keys are cut into: at least 1, at most its pages.
  std::int32_t pieces(const Tile& tile) const {
    if (num_splits_ == 1) return 1;
    const std::int32_t pages = std::clamp(pages_of(tile.keys, config_), 1, kMostPieces);
    if (num_splits_ > 1) return std::min(pages, num_splits_);
    if (deterministic()) {
      if (tile.query_len > config_.max_split_query_len) return 1;
      return std::max(1, page_count(pages_of(tile.keys, config_), fixed_pages_));
    }
    const std::uint64_t cost = item_cost(config_, tile.keys, tile.q_count);
    const std::uint64_t share = shares_[tile.tile_class];
    if (cost <= share) return 1;
    const TileClass& tiles = config_.tiles[tile.tile_class];
    const std::int32_t most = std::max(1, pages / min_split_pages(config_, tiles));
    // Rounded down, but for what the rounding of the share took.
    const std::uint64_t wanted =
        tiles.resident_groups > 0 ? (cost + share / 64) / share : ceil_div(cost, share);
    return static_cast<std::int32_t>(std::min(wanted, static_cast<std::uint64_t>(most)));
  }

  /// First key of a piece, on a page boundary; for index == pieces the end of the last.
  std::int32_t piece_begin(const Tile& tile, std::int32_t pieces, std::int32_t index) const {
    if (index == pieces) return tile.first_key + tile.keys;
    const std::int64_t page = num_splits_ == 0 && deterministic()
                                  ? std::int64_t{fixed_pages_} * index
                                  : std::int64_t{pages_of(tile.keys, config_)} * index / pieces;
    return static_cast<std::int32_t>(tile.first_key + page * config_.block_size);
  }

  /// Makes cuts coarser; repeated, nothing is cut any more. False when cuts may not change.
  bool coarsen() {
    if (deterministic()) return false;
    if (num_splits_ > 1) {
      num_splits_ /= 2;
    } else {
      for (std::uint64_t& share : shares_) share += share / 2 + 1;
    }
    return true;
  }

 private:
  bool deterministic() const { return config_.split_policy == SplitPolicy::kDeterministic; }

  void set_fair_shares(const CommonAttentionMetadata& batch) {
    std::array<std::int64_t, kMaxTileClasses> num_tiles{};
    for_each_tile(config_, batch, [&](const Tile& tile) {
      std::uint64_t& total = shares_[tile.tile_class];
      total = std::min(total + item_cost(config_, tile.keys, tile.q_count), kMaxCost);
      ++num_tiles[tile.tile_class];
    });
    for (std::size_t c = 0; c < shares_.size(); ++c) {
      const std::int64_t target = target_items(config_, config_.tiles[c], num_tiles[c]);
      shares_[c] = ceil_div(shares_[c], static_cast<std::uint64_t>(target));
    }
  }

  const PlannerConfig& config_;
  std::int32_t num_splits_;  // of every tile; 0 = by policy
  std::int32_t fixed_pages_;
  std::array<std::uint64_t, kMaxTileClasses> shares_{};  // of a work item, per launch
};

void write_tile(const Tile& tile, const Cutter& cutter, std::int32_t pieces, bool joins_splits,
                const Tally& at, std::int32_t pages_at, const PlanOutput& output) {
  const auto first_row = static_cast<std::int32_t>(at.rows);
  ClaWorkItem* item =
      &output.items[tile.tile_class][static_cast<std::size_t>(at.items[tile.tile_class])];
  for (std::int32_t piece = 0; piece < pieces; ++piece) {
    *item++ = {.q_row = tile.q_row,
               .q_count = tile.q_count,
               .q_pos = tile.q_pos,
               .kv_begin = cutter.piece_begin(tile, pieces, piece),
               .kv_end = cutter.piece_begin(tile, pieces, piece + 1),
               .pages_at = pages_at,
               .partial_row = pieces > 1 ? first_row + piece * tile.q_count : -1,
               .split = static_cast<std::uint16_t>(piece),
               .num_splits = static_cast<std::uint16_t>(pieces > 1 && joins_splits ? pieces : 0)};
  }
  if (pieces == 1 || joins_splits) return;
  ClaMergeItem* merge = &output.merges[static_cast<std::size_t>(at.merges)];
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
    const bool joins_splits = config.tiles[tile.tile_class].joins_splits;
    if (output != nullptr) {
      write_tile(tile, cutter, pieces, joins_splits, tally,
                 pages_at[static_cast<std::size_t>(tile.request)], *output);
    }
    tally.items[tile.tile_class] += pieces;
    if (pieces == 1) return;
    if (!joins_splits) tally.merges += tile.q_count;
    tally.rows += std::int64_t{pieces} * tile.q_count;
  });
  return tally;
}

/// Items of equal cost stay in batch order, and a list in order is left alone.
void sort_items(const PlannerConfig& config, std::span<ClaWorkItem> items) {
  if (config.item_order == ItemOrder::kAsCut) return;
  const auto cost = [&](const ClaWorkItem& item) {
    return item_cost(config, item.kv_end - item.kv_begin, item.q_count);
  };
  const bool heavy_first = config.item_order == ItemOrder::kHeavyFirst;
  const auto earlier = [&](const ClaWorkItem& a, const ClaWorkItem& b) {
    return heavy_first ? cost(a) > cost(b) : cost(a) < cost(b);
  };
  if (std::is_sorted(items.begin(), items.end(), earlier)) return;
  std::sort(items.begin(), items.end(), [&](const ClaWorkItem& a, const ClaWorkItem& b) {
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
    if (size < static_cast<std::size_t>(needed)) {
      throw_invalid("{} holds {} elements, legal: at least {}", field, size, needed);
    }
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
      {"compute_units", config.compute_units},
      {"items_per_compute_unit", config.items_per_compute_unit},
      {"min_split_keys", config.min_split_keys},
      {"max_split_query_len", config.max_split_query_len},
      {"deterministic_split_keys", config.deterministic_split_keys},
  };
  for (const Field& field : fields) {
    if (field.value < 1) throw_invalid("{} is {}, legal: at least 1", field.name, field.value);
  }
  if (config.num_tiles > kMaxTileClasses) {
    throw_invalid("num_tiles is {}, legal: 1 … {}", config.num_tiles, kMaxTileClasses);
  }
  for (std::size_t c = 0; c < static_cast<std::size_t>(config.num_tiles); ++c) {
    if (config.tiles[c].max_item_tokens < 1) {
      throw_invalid("tiles[{}].max_item_tokens is {}, legal: at least 1", c,
                    config.tiles[c].max_item_tokens);
    }
    if (config.tiles[c].groups_per_item < 1) {
      throw_invalid("tiles[{}].groups_per_item is {}, legal: at least 1", c,
                    config.tiles[c].groups_per_item);
    }
  }
  if (config.num_splits < 0) {
    throw_invalid("num_splits is {}, legal: at least 0 (0 = planned)", config.num_splits);
  }
}

std::int64_t target_items(const PlannerConfig& config, const TileClass& tile,
                          std::int64_t num_tiles) {
  const std::int64_t units = config.compute_units;
  if (tile.resident_groups == 0)
    return ceil_div(units * config.items_per_compute_unit, std::int64_t{tile.groups_per_item});
  const std::int64_t wave =
      std::max<std::int64_t>(1, units * tile.resident_groups / tile.groups_per_item);
  return num_tiles > wave ? tile.waves * wave : wave;
}

std::int32_t min_split_pages(const PlannerConfig& config, const TileClass& tile) {
  const std::int32_t keys = config.min_split_keys;
  return pages_of(tile.splits_finer ? ceil_div(keys, 2) : keys, config);
}

PlanCounts plan_attention(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                          std::span<const std::int32_t> pages_at, const PlanOutput* output) {
  check_config(config);
  if (pages_at.size() < static_cast<std::size_t>(batch.num_reqs)) {
    throw_invalid("pages_at holds {} elements, legal: at least {} (num_reqs)", pages_at.size(),
                  batch.num_reqs);
  }
  // Items are tokens plus rows at most, so that 32 bits number them all.
  const std::int64_t max_rows =
      std::min(config.max_partial_rows, kMaxInt32 - batch.num_actual_tokens);
  Cutter cutter(config, batch);
  Tally tally = cut_tiles(config, batch, cutter, pages_at, nullptr);
  while (tally.rows > max_rows) {
    if (!cutter.coarsen()) {
      throw_unsupported(
          "deterministic splits of this batch need {} partial rows, legal: at most {} "
          "(max_partial_rows)",
          tally.rows, max_rows);
    }
    tally = cut_tiles(config, batch, cutter, pages_at, nullptr);
  }
  const PlanCounts counts = to_counts(tally);
  if (output == nullptr) return counts;

  check_output(counts, *output);
  cut_tiles(config, batch, cutter, pages_at, output);
  for (std::size_t c = 0; c < counts.num_items.size(); ++c) {
    sort_items(config, output->items[c].first(static_cast<std::size_t>(counts.num_items[c])));
  }
  return counts;
}

}  // namespace clattn::detail
