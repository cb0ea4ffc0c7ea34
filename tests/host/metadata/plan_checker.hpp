#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "host/metadata/seen_keys.hpp"
#include "host/metadata/written_plan.hpp"

namespace test {

/// What the order of a list goes by, but for items that count as equally heavy.
inline auto place_of(const PlannerConfig& config, std::size_t tile_class, const ClaWorkItem& item) {
  using clattn::detail::ItemOrder;
  const double cost = keys_ns(config.tiles[tile_class], item.kv_end - item.kv_begin, item.q_count);
  const double first = config.item_order == ItemOrder::kAsCut        ? 0
                       : config.item_order == ItemOrder::kHeavyFirst ? -cost
                                                                     : cost;
  const std::int32_t sign = config.item_order == ItemOrder::kHeavyFirst ? -1 : 1;
  return std::tuple(first, sign * item.q_row, sign * item.kv_begin);
}

/// Why a plan is not a correct plan of the batch; empty = it is. Plain loops over tokens.
class PlanChecker {
 public:
  PlanChecker(const PlannerConfig& config, const Batch& batch, const Plan& plan)
      : config_(config), batch_(batch), plan_(plan) {}

  std::string problem() {
    pieces_.resize(static_cast<std::size_t>(batch_.num_actual_tokens));
    is_listed_.resize(plan_.listed.size());
    seen_ = seen_keys(config_, batch_, problem_);
    for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
      for (const ClaWorkItem& item : plan_.items[c]) {
        if (item.q_count > 0 || !is_rebalanced(c)) check_item(c, item);
      }
      if (is_rebalanced(c)) check_padding(c);
    }
    for (std::int32_t r = 0; r < batch_.num_reqs; ++r) check_request(r);
    check_merges();
    check_order();
    expect(std::ranges::all_of(is_listed_, [](bool listed) { return listed; }),
           "a listed row belongs to no item");
    return problem_;
  }

 private:
  void expect(bool holds, const char* problem) {
    if (!holds && problem_.empty()) problem_ = problem;
  }

  // Put into words only where it fails: most of a checker's time would go into names.
  template <typename Subject>
  void expect(bool holds, const Subject& subject, const char* problem) {
    if (!holds && problem_.empty()) problem_ = text(subject) + problem;
  }

  struct Token {
    std::size_t row;
  };
  static std::string text(Token token) { return "token " + std::to_string(token.row); }
  static std::string text(const ClaWorkItem& item) {
    return "item {q_row " + std::to_string(item.q_row) + ", q_count " +
           std::to_string(item.q_count) + ", keys " + std::to_string(item.kv_begin) + ".." +
           std::to_string(item.kv_end) + ", partial_row " + std::to_string(item.partial_row) + "}";
  }

  std::int32_t start(std::int32_t request) const {
    return batch_.query_start_loc[static_cast<std::size_t>(request)];
  }

  std::size_t expected_class(std::int32_t query_len) const {
    const int longest = config_.num_tiles - (config_.last_is_wide ? 2 : 1);
    for (int c = 0; c < longest; ++c) {
      const auto tile_class = static_cast<std::size_t>(c);
      if (query_len <= config_.tiles[tile_class].max_query_len) return tile_class;
    }
    return static_cast<std::size_t>(plan_.cuts.wide ? longest + 1 : longest);
  }

  void check_item(std::size_t tile_class, const ClaWorkItem& item) {
    const std::int32_t request = request_of(item);
    if (request < 0 || request >= batch_.num_reqs) {
      return expect(false, item, " has no request");
    }
    const std::int32_t begin = start(request);
    const std::int32_t end = start(request + 1);
    const std::int32_t seq_len = batch_.seq_lens[static_cast<std::size_t>(request)];
    expect(expected_class(end - begin) == tile_class, item, " is in another tile class");
    expect(item.q_count >= 1 && item.q_count <= config_.tiles[tile_class].max_item_tokens, item,
           " exceeds its tile");
    if (item.q_row < begin || item.q_row + item.q_count > end) {
      return expect(false, item, " leaves its request");
    }
    check_place(item, seq_len - (end - item.q_row), seq_len);
    expect(item.kv_begin >= 0 && item.kv_begin % config_.block_size == 0, item,
           " begins inside a page");
    const Keys seen = seen_by_item(item);
    const bool nothing = seen.none();
    expect(nothing || item.kv_end <= seen.end, item, " reads keys that nobody sees");
    expect(nothing || item.kv_begin > seen.begin - config_.block_size, item,
           " reads a page that nobody sees");
    expect((item.kv_end > item.kv_begin) != nothing, item,
           " has no keys, or keys that nobody sees");
    expect(nothing || item.kv_end == seen.end || item.kv_end % config_.block_size == 0, item,
           " ends inside a page");
    const bool skips = end - begin <= config_.gap_split_query_len && plan_.cuts.num_splits != 1;
    const std::int64_t gap_begin = whole_page(seen.gap_begin);
    const std::int64_t gap_end = seen.gap_end - seen.gap_end % config_.block_size;
    expect(!skips || gap_begin >= gap_end || item.kv_end <= gap_begin || item.kv_begin >= gap_end,
           item, " reads a page in a gap");
    for (std::int32_t i = 0; i < item.q_count; ++i) {
      pieces_[static_cast<std::size_t>(item.q_row + i)].push_back(
          {item.kv_begin, item.kv_end, item.partial_row < 0 ? -1 : item.partial_row + i, tile_class,
           item});
      if (item.partial_row >= 0) partial_rows_.push_back(std::int64_t{item.partial_row} + i);
    }
  }

  // The first page border from a position on.
  std::int64_t whole_page(std::int64_t position) const {
    return (position + config_.block_size - 1) / config_.block_size * config_.block_size;
  }

  // The keys that the rows of an item see together.
  Keys seen_by_item(const ClaWorkItem& item) const {
    Keys all;
    for (std::int32_t i = 0; i < item.q_count; ++i) {
      const Keys& seen = seen_[static_cast<std::size_t>(item.q_row + i)];
      if (seen.none()) continue;
      if (all.none()) all = seen;
      all.end = seen.end;  // gaps begin alike and only grow
    }
    return all;
  }

  // Where the keys of a listed row behind its gap begin; its gap must be the one that it has.
  std::int32_t check_gap(const ClaWorkItem& item, const ClaListedRow& row, const Keys& seen) {
    expect(seen.gap_end == 0 || row.gaps_at != 0, item, " lists no gap for a row that has one");
    if (row.gaps_at == 0) return row.begin;
    ClaGapRow gaps;
    std::memcpy(&gaps, &plan_.gap_rows[static_cast<std::size_t>(row.gaps_at - kGapRowsAt)],
                sizeof(gaps));
    const bool right = seen.gap_end > 0
                           ? gaps.context_begin == seen.gap_end && gaps.kept_end == seen.gap_begin
                           : seen.none() || gaps.context_begin == seen.begin;
    expect(right, item, " lists another gap than a row has");
    expect(gaps.tree_begin >= row.end, item, " lists a tree");
    return gaps.context_begin;
  }

  // Where the rows of an item stand, which is what their keys follow from, unless they are listed.
  void check_place(const ClaWorkItem& item, std::int32_t position, std::int64_t seq_len) {
    if (!CLA_IS_LISTED(item.q_pos)) {
      expect(item.q_pos == position, item, " has another q_pos");
      for (std::int32_t i = 0; config_.lists.any() && i < item.q_count; ++i) {
        const Keys& seen = seen_[static_cast<std::size_t>(item.q_row + i)];
        Keys plain = plain_keys(config_, batch_.causal, position + i, seq_len);
        if (plain.none() && seen.none()) continue;
        plain.begin = std::max<std::int64_t>(plain.begin, 0);
        plain.end = std::min(plain.end, seq_len);
        expect(plain == seen, item, " has rows that should be listed");
      }
      return;
    }
    const std::int32_t number = item.q_pos - CLA_LISTED - kListedAt;
    if (number < 1 || number + item.q_count > static_cast<std::int32_t>(plan_.listed.size()))
      return expect(false, item, " has rows that are in no list");
    std::int32_t last_begin = 0;  // behind gaps
    for (std::int32_t i = 0; i < item.q_count; ++i) {
      const auto at = static_cast<std::size_t>(number + i);
      const ClaListedRow& row = plan_.listed[at];
      const Keys& seen = seen_[static_cast<std::size_t>(item.q_row + i)];
      is_listed_[at] = true;
      expect(row.position == position + i, item, " lists another position");
      expect(seen.none() ? row.begin >= row.end : row.begin == seen.begin && row.end == seen.end,
             item, " lists other keys than a row sees");
      last_begin = std::max(last_begin, check_gap(item, row, seen));
      expect(i == 0 ||
                 (row.begin >= plan_.listed[at - 1].begin && row.end >= plan_.listed[at - 1].end),
             item, " lists ends that fall");
    }
    check_listed_item(item, static_cast<std::size_t>(number), last_begin);
  }

  // In front of an item's rows: what some of them see, and what all of them see.
  void check_listed_item(const ClaWorkItem& item, std::size_t first, std::int32_t last_begin) {
    const ClaListedRow& all = plan_.listed[first - 1];
    is_listed_[first - 1] = true;
    const auto rows =
        std::span(plan_.listed).subspan(first, static_cast<std::size_t>(item.q_count));
    expect(all.begin == std::ranges::min(rows, {}, &ClaListedRow::begin).begin &&
               all.end == std::ranges::max(rows, {}, &ClaListedRow::end).end &&
               all.position == last_begin &&
               all.gaps_at == std::ranges::min(rows, {}, &ClaListedRow::end).end,
           item, " lists other ends than its rows have");
  }

  // The pieces of each token follow each other from before the first key that it sees past the
  // last.
  void check_request(std::int32_t request) {
    for (std::int32_t row = start(request); row < start(request + 1); ++row) {
      auto& pieces = pieces_[static_cast<std::size_t>(row)];
      std::sort(pieces.begin(), pieces.end());
      const Token token{static_cast<std::size_t>(row)};
      if (pieces.empty()) return expect(false, token, " is in no item");
      const Keys seen = seen_[static_cast<std::size_t>(row)];
      std::int32_t covered = pieces.front().begin;
      expect(seen.none() || covered <= seen.begin, token, " misses its first keys");
      for (const Piece& piece : pieces) {
        const bool in_gap = seen.gap_begin <= covered && piece.begin <= seen.gap_end;
        expect(piece.begin == covered || (piece.begin > covered && in_gap), token,
               " has a gap or an overlap in its keys");
        covered = piece.end;
        expect((piece.partial_row < 0) == (pieces.size() == 1), token,
               " has partial rows without a split, or a split without them");
      }
      expect(seen.none() || covered >= seen.end, token, " misses visible keys");
    }
  }

  // What the kernel that joins a tile's splits itself goes by: how many, which one this is, and
  // rows that follow each other; 0 where a launch of its own does.
  void check_splits(std::size_t row, bool joined) {
    const auto& pieces = pieces_[row];
    const Token token{row};
    for (std::size_t s = 0; s < pieces.size(); ++s) {
      const ClaWorkItem& item = pieces[s].item;
      const std::int32_t first_row = pieces.front().item.partial_row;
      expect(item.num_splits == (joined ? pieces.size() : 0), token, " has another num_splits");
      expect(item.split == s, token, " has its splits in another order");
      expect(!joined || item.partial_row == first_row + static_cast<std::int32_t>(s) * item.q_count,
             token, " has splits whose rows do not follow each other");
    }
  }

  void check_merges() {
    std::map<std::int32_t, const ClaMergeItem*> by_row;
    std::int32_t most_splits = 0;
    for (const ClaMergeItem& merge : plan_.merges) {
      most_splits = std::max(most_splits, merge.num_splits);
      expect(by_row.emplace(merge.out_row, &merge).second, "a token has two merges");
    }
    expect(most_splits == plan_.counts.most_splits || config_.lengths_are_bounds,
           "no merge has as many splits as the counts say");
    expect(most_splits <= plan_.counts.most_splits, "a merge has more splits than the counts say");
    std::size_t num_split = 0;
    for (std::size_t row = 0; row < pieces_.size(); ++row) {
      const auto& pieces = pieces_[row];
      const bool joined =
          pieces.size() > 1 && config_.tiles[pieces.front().tile_class].merges_splits;
      check_splits(row, joined);
      if (pieces.size() < 2 || joined) continue;
      ++num_split;
      const auto found = by_row.find(static_cast<std::int32_t>(row));
      const Token token{row};
      if (found == by_row.end()) return expect(false, token, " is split but not merged");
      const ClaMergeItem& merge = *found->second;
      expect(merge.num_splits == static_cast<std::int32_t>(pieces.size()), token,
             " merges another number of pieces");
      for (std::size_t s = 0; s < pieces.size(); ++s) {
        expect(merge.partial_row + static_cast<std::int32_t>(s) * merge.split_stride ==
                   pieces[s].partial_row,
               token, " merges rows that are not its own");
      }
    }
    expect(num_split == plan_.merges.size(), "a merge belongs to no split token");
    std::sort(partial_rows_.begin(), partial_rows_.end());
    for (std::size_t i = 0; i < partial_rows_.size(); ++i) {
      expect(partial_rows_[i] == static_cast<std::int64_t>(i), "partial rows overlap or have gaps");
    }
    const auto num_rows = static_cast<std::int64_t>(partial_rows_.size());
    expect(num_rows == plan_.counts.num_partial_rows, "num_partial_rows is another");
    expect(num_rows <= std::max<std::int64_t>(0, config_.max_partial_rows),
           "max_partial_rows is exceeded");
  }

  bool is_rebalanced(std::size_t tile_class) const {
    return plan_.cuts.classes[tile_class].rebalanced;
  }

  // Groups that take an item together stop at the first padding that they are dealt, so that none
  // of their items may come behind it.
  void check_padding(std::size_t tile_class) {
    const std::vector<ClaWorkItem>& items = plan_.items[tile_class];
    const auto sets = static_cast<std::size_t>(plan_.counts.workers[tile_class] /
                                               config_.tiles[tile_class].groups_per_item);
    for (std::size_t at = 0; at < items.size(); ++at) {
      const std::size_t next = at / sets * sets + 2 * sets - 1 - at % sets;  // back and forth
      if (items[at].q_count > 0) continue;
      expect(next >= items.size() || items[next].q_count == 0, items[next % items.size()],
             " follows padding");
    }
    expect(items.empty() || items.back().q_count > 0, "a list ends with padding");
  }

  double costs_ns(std::size_t tile_class, const ClaWorkItem& item) const {
    return keys_ns(config_.tiles[tile_class], item.kv_end - item.kv_begin, item.q_count);
  }

  void check_order() {
    using clattn::detail::ItemOrder;
    for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
      if (is_rebalanced(c)) continue;
      std::vector<ClaWorkItem> items = plan_.items[c];
      if (config_.item_order == ItemOrder::kHeavyFirst) std::ranges::reverse(items);
      const double equal = clattn::detail::equal_costs_ns(config_.tiles[c], items) * (1 + 1e-5);
      double heaviest = 0;
      for (std::size_t i = 0; i < items.size(); ++i) {
        const ClaWorkItem& item = items[i];
        if (config_.item_order == ItemOrder::kAsCut) {
          expect(i == 0 || place_of(config_, c, items[i - 1]) < place_of(config_, c, item), item,
                 " is not as cut");
          continue;
        }
        const double cost = costs_ns(c, item);
        const bool follows = i > 0 && cost == costs_ns(c, items[i - 1]);
        expect(!follows || std::tie(items[i - 1].q_row, items[i - 1].kv_begin) <
                               std::tie(item.q_row, item.kv_begin),
               item, " is not in batch order beside one as heavy");
        heaviest = std::max(heaviest, cost);
        expect(heaviest - cost <= equal, item, " comes behind one that is clearly heavier");
      }
    }
  }

  struct Piece {
    std::int32_t begin, end, partial_row;
    std::size_t tile_class;
    ClaWorkItem item;
    bool operator<(const Piece& other) const {
      return std::tie(begin, end) < std::tie(other.begin, other.end);
    }
  };

  const PlannerConfig& config_;
  const Batch& batch_;
  const Plan& plan_;
  std::vector<Keys> seen_;                  // by each token
  std::vector<bool> is_listed_;             // of each listed row, whether an item has it
  std::vector<std::vector<Piece>> pieces_;  // of each token
  std::vector<std::int64_t> partial_rows_;
  std::string problem_;
};

/// Plans and checks; empty = correct.
inline std::string plan_problem(const PlannerConfig& config, const Batch& batch,
                                Plan* result = nullptr) {
  std::string problem;
  const Plan plan = make_plan(config, batch, &problem);
  if (result != nullptr) *result = plan;
  return problem.empty() ? PlanChecker(config, batch, plan).problem() : problem;
}

}  // namespace test
