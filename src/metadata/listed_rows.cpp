#include "metadata/listed_rows.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

/// One past the last position that the query sees by its direction and window, spans apart.
std::int64_t end_of(const KeyWindow& window, const RequestRows& request, std::int64_t position) {
  if (request.direction == Direction::kCausal) return position + 1;
  const bool bounded = window.right >= 0 && request.direction == Direction::kBothWays;
  return bounded ? position + window.right + 1 : request.seq_len;
}

/// The span that holds the position, or one without keys.
std::pair<std::int64_t, std::int64_t> span_at(const RequestRows& request, std::int64_t position) {
  std::size_t begin = 0, end = request.spans.size() / 2;
  while (begin < end) {  // spans in front of `begin` start at the position or before it
    const std::size_t middle = begin + (end - begin) / 2;
    if (request.spans[2 * middle] <= position) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == 0 || request.spans[2 * begin - 1] <= position) return {position, position};
  return {request.spans[2 * begin - 2], request.spans[2 * begin - 1]};
}

void check_count(std::string_view field, std::size_t size, std::int64_t legal,
                 std::string_view why) {
  throw_invalid_if(size != to_size(legal), "{} holds {} elements, legal: {} ({}), or none", field,
                   size, legal, why);
}

void check_direction(const CommonAttentionMetadata& batch) {
  check_count("direction", batch.direction.size(), batch.num_reqs, "num_reqs");
  for (std::size_t r = 0; r < batch.direction.size(); ++r) {
    const auto value = static_cast<int>(batch.direction[r]);
    throw_invalid_if(value > static_cast<int>(Direction::kCanvas),
                     "request {}: direction is {}, legal: 0 (both ways), 1 (causal), 2 (canvas)", r,
                     value);
  }
}

void check_spans(const CommonAttentionMetadata& batch) {
  const auto& starts = batch.span_start_loc;
  check_count("span_start_loc", starts.size(), std::int64_t{batch.num_reqs} + 1, "num_reqs + 1");
  throw_invalid_if(starts[0] != 0, "span_start_loc[0] is {}, legal: 0", starts[0]);
  const auto number = static_cast<std::int64_t>(batch.spans.size() / 2);
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    throw_invalid_if(starts[r + 1] < starts[r] || starts[r + 1] > number,
                     "span_start_loc[{}] is {}, legal: {} … {} (the rows of spans)", r + 1,
                     starts[r + 1], starts[r], number);
    std::int32_t behind = 0;
    for (auto i = to_size(starts[r]); i < to_size(starts[r + 1]); ++i) {
      const std::int32_t first = batch.spans[2 * i], end = batch.spans[2 * i + 1];
      throw_invalid_if(first < behind || end < first,
                       "request {}: spans[{}] is {} … {}, legal: from {} on, ascending, disjoint",
                       r, i, first, end, behind);
      behind = end;
    }
  }
  check_count("spans", batch.spans.size(), 2 * std::int64_t{starts.back()},
              "2 * the last of span_start_loc");
}

/// The tree of one request, whose number of nodes is not 0.
void check_tree(const CommonAttentionMetadata& batch, std::size_t r,
                std::span<const std::int32_t> parents) {
  const auto nodes = static_cast<std::int32_t>(parents.size());
  const std::int32_t query_len = query_len_of(batch, r);
  const std::int32_t most = std::min(batch.seq_lens[r], kMaxTreeNodes);
  throw_invalid_if(nodes < query_len || nodes > most,
                   "request {}: its tree has {} nodes, legal: {} … {} (its query tokens … at most "
                   "{} and seq_lens), or none",
                   r, nodes, query_len, most, kMaxTreeNodes);
  for (std::int32_t node = 0; node < nodes; ++node) {
    throw_invalid_if(parents[to_size(node)] < -1 || parents[to_size(node)] >= node,
                     "request {}: the parent of node {} is {}, legal: -1 … {}", r, node,
                     parents[to_size(node)], node - 1);
  }
  const bool causal =
      batch.direction.empty() ? batch.is_causal() : batch.direction[r] == Direction::kCausal;
  throw_invalid_if(!causal, "request {}: it has a tree and is not causal, legal: one of both", r);
  throw_invalid_if(
      !batch.span_start_loc.empty() && batch.span_start_loc[r] != batch.span_start_loc[r + 1],
      "request {}: it has a tree and spans, legal: one of both", r);
  const std::pair<std::string_view, std::span<const std::int32_t>> keys[] = {
      {"first_keys", batch.first_keys}, {"keep_keys", batch.keep_keys}};
  for (const auto& [field, list] : keys) {
    if (list.empty()) continue;
    throw_invalid_if(list[r] > batch.seq_lens[r] - nodes,
                     "request {}: {} is {}, legal with its tree: 0 … {}", r, field, list[r],
                     batch.seq_lens[r] - nodes);
  }
}

void check_trees(const CommonAttentionMetadata& batch) {
  const auto& starts = batch.tree_start_loc;
  check_count("tree_start_loc", starts.size(), std::int64_t{batch.num_reqs} + 1, "num_reqs + 1");
  throw_invalid_if(starts[0] != 0, "tree_start_loc[0] is {}, legal: 0", starts[0]);
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int64_t number = std::ssize(batch.tree_parents);
    throw_invalid_if(starts[r + 1] < starts[r] || starts[r + 1] > number,
                     "tree_start_loc[{}] is {}, legal: {} … {} (tree_parents)", r + 1,
                     starts[r + 1], starts[r], number);
    const auto nodes = to_size(starts[r + 1] - starts[r]);
    if (nodes > 0) check_tree(batch, r, batch.tree_parents.subspan(to_size(starts[r]), nodes));
  }
  check_count("tree_parents", batch.tree_parents.size(), starts.back(),
              "the last of tree_start_loc");
}

/// A number of keys or the position of one for each request.
void check_keys(const CommonAttentionMetadata& batch, std::string_view field,
                std::span<const std::int32_t> list) {
  check_count(field, list.size(), batch.num_reqs, "num_reqs");
  for (std::size_t r = 0; r < list.size(); ++r) {
    throw_invalid_if(list[r] < 0 || list[r] > batch.seq_lens[r],
                     "request {}: {} is {}, legal: 0 … {} (seq_lens)", r, field, list[r],
                     batch.seq_lens[r]);
  }
}

/// What the query at a position sees behind the kept keys. Where no gap lies between, it begins
/// with the request's first key.
ClaListedRow row_behind_gap(const PlannerConfig& config, const RequestRows& request,
                            std::int32_t position) {
  const DraftTree& tree = request.tree;
  ClaListedRow row;
  if (tree.empty()) {
    row = listed_row(config.window, config.lists.span_rule, request, position);
  } else {
    const TreeSight sight =
        tree_sight(config.window, tree, position - tree.begin, request.first_key);
    row = {sight.context_begin, position + 1, sight.position, 0};
  }
  if (row.begin <= request.kept_end) row.begin = request.first_key;
  return row;
}

/// The ends of a tile's rows behind the kept keys.
ClaListedItem item_behind_gap(const PlannerConfig& config, const RequestRows& request,
                              std::int32_t position, std::int32_t count) {
  const ClaListedRow first = row_behind_gap(config, request, position);
  const ClaListedRow last = row_behind_gap(config, request, position + count - 1);
  ClaListedItem item = {first.begin, last.end, last.begin, first.end};
  if (request.tree.empty()) return item;
  for (std::int32_t i = 0; i < count; ++i) {  // depths may fall
    const std::int32_t begin = row_behind_gap(config, request, position + i).begin;
    item.begin = std::min(item.begin, begin);
    item.common_begin = std::max(item.common_begin, begin);
  }
  item.common_end = request.tree.begin;
  return item;
}

/// All keys between the ends of a tile, from a page boundary on.
ClaTileKeys keys_of(const ClaListedItem& item, std::int32_t block_size) {
  if (item.begin >= item.end) return {0, 0};
  const std::int32_t first = item.begin - item.begin % block_size;
  return {first, item.end - first};
}

}  // namespace

bool RequestRows::lists(std::int32_t position, std::int32_t count) const {
  if (is_listed) return true;
  for (std::size_t i = 0; i < spans.size(); i += 2) {
    if (spans[i] >= position + count) return false;
    if (spans[i + 1] > position && spans[i + 1] - spans[i] > 1) return true;
  }
  return false;
}

RequestRows rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                    std::int32_t request) {
  const auto r = to_size(request);
  RequestRows rows;
  rows.query_len = query_len_of(batch, r);
  rows.seq_len = batch.seq_lens[r];
  rows.first_new = rows.seq_len - rows.query_len;
  // What most rows are, and what is not listed.
  const Direction usual = batch.is_causal() ? Direction::kCausal : Direction::kBothWays;
  rows.direction = rules.directions && !batch.direction.empty() ? batch.direction[r] : usual;
  if (rules.first_keys && !batch.first_keys.empty()) rows.first_key = batch.first_keys[r];
  if (rules.keep_keys && !batch.keep_keys.empty() && batch.keep_keys[r] > rows.first_key)
    rows.kept_end = batch.keep_keys[r];
  if (rules.spans && !batch.spans.empty()) {
    const auto first = to_size(batch.span_start_loc[r]), end = to_size(batch.span_start_loc[r + 1]);
    rows.spans = batch.spans.subspan(2 * first, 2 * (end - first));
  }
  if (rules.trees && !batch.tree_parents.empty()) {
    const auto first = to_size(batch.tree_start_loc[r]), end = to_size(batch.tree_start_loc[r + 1]);
    const auto parents = batch.tree_parents.subspan(first, end - first);
    if (!is_chain(parents))
      rows.tree = {rows.seq_len - static_cast<std::int32_t>(parents.size()), parents};
  }
  // Nothing lies ahead of a request's only query.
  const bool looks_elsewhere = rows.direction != usual && rows.query_len > 1;
  rows.is_listed = looks_elsewhere || rows.first_key > 0 || rows.has_gaps();
  return rows;
}

ClaListedRow listed_row(const KeyWindow& window, SpanRule rule, const RequestRows& request,
                        std::int32_t position) {
  const std::int64_t p = position;
  const bool causal = request.direction == Direction::kCausal;
  const std::int64_t from = request.direction == Direction::kCanvas ? request.first_new : p;
  std::int64_t begin = window.left < 0 ? 0 : from - window.left;
  std::int64_t end = end_of(window, request, p);
  const auto [first, last] = span_at(request, p);
  if (causal && rule != SpanRule::kWhole) {
    const bool clipped = rule == SpanRule::kClipBoth && window.right >= 0;
    end = std::max(end, clipped ? std::min(last, p + window.right + 1) : last);
  }
  if (window.chunk > 0) {
    const std::int64_t chunk = window.chunk;
    // Queries that outnumber their keys stand before position 0, in chunks of their own.
    const std::int64_t start = p - (p % chunk + chunk) % chunk;
    begin = std::max(begin, start - window.chunk_lookback * chunk);
    end = std::min(end, start + chunk);
  }
  if (rule == SpanRule::kWhole) {
    begin = std::min(begin, first);
    end = std::max(end, last);
  }
  begin = std::max<std::int64_t>({begin, request.first_key, 0});
  end = std::max(std::min<std::int64_t>(end, request.seq_len), begin);
  return {static_cast<int>(begin), static_cast<int>(end), position, 0};
}

ListedKeys listed_tile_keys(const PlannerConfig& config, const RequestRows& request,
                            std::int32_t position, std::int32_t count, bool skips) {
  ClaListedItem item = item_behind_gap(config, request, position, count);
  const ClaListedItem kept = {request.first_key, round_up(request.kept_end, config.block_size), 0,
                              0};
  if (skips && request.kept_end > 0 && item.begin - item.begin % config.block_size > kept.end)
    return {keys_of(kept, config.block_size), keys_of(item, config.block_size)};
  if (request.kept_end > 0) item.begin = request.first_key;
  return {{}, keys_of(item, config.block_size)};
}

void list_rows(const PlannerConfig& config, const RequestRows& request, std::int32_t position,
               const ListedTile& to) {
  const auto count = static_cast<std::int32_t>(to.rows.size()) - 1;
  ClaListedItem item = item_behind_gap(config, request, position, count);
  if (request.kept_end > 0) item.begin = request.first_key;
  to.rows[0] = {item.begin, item.end, item.common_begin, item.common_end};
  const DraftTree& tree = request.tree;
  const std::int32_t ints = gap_row_ints(tree.size());
  for (std::int32_t i = 0; i < count; ++i) {
    ClaListedRow& row = to.rows[to_size(i + 1)];
    row = row_behind_gap(config, request, position + i);
    if (!request.has_gaps()) continue;
    const auto gap_row = to.gap_rows.subspan(to_size(i * ints), to_size(ints));
    std::ranges::fill(gap_row, 0);
    const ClaGapRow gaps = {row.begin, request.kept_end,
                            tree.empty() ? request.seq_len : tree.begin, ints - kGapRowInts};
    std::memcpy(gap_row.data(), &gaps, sizeof(gaps));
    if (!tree.empty())
      set_tree_bits(config.window, tree, position + i - tree.begin, gap_row.subspan(kGapRowInts));
    row.begin = item.begin;
    row.gaps_at = to.gap_rows_at + i * ints;
  }
}

UnseenPages unseen_pages(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                         std::int32_t request) {
  const std::int32_t query_len = query_len_of(batch, to_size(request));
  const std::int32_t seq_len = batch.seq_lens[to_size(request)];
  if (query_len > 0 && config.lists.any()) {
    const RequestRows rows = rows_of(config.lists, batch, request);
    const std::int32_t count = rows.tree.empty() ? 1 : query_len;
    if (rows.lists(rows.first_new, count)) {
      // Pages of new tokens are written, whatever their first key is.
      const auto page_before = [&](std::int32_t key) {
        return to_size(std::min(key, std::max(rows.first_new, 0)) / config.block_size);
      };
      const std::int32_t begin = item_behind_gap(config, rows, rows.first_new, count).begin;
      if (rows.kept_end == 0) return {page_before(begin)};
      return {page_before(rows.first_key), to_size(page_count(rows.kept_end, config.block_size)),
              page_before(begin)};
    }
  }
  return {unseen_pages(sight_of(config, batch.is_causal()), query_len, seq_len)};
}

void check_lists(const CommonAttentionMetadata& batch, const ListRules& rules) {
  throw_invalid_if(!rules.directions && !batch.direction.empty(),
                   "direction holds {} elements, legal without use_directions: none",
                   batch.direction.size());
  throw_invalid_if(!rules.first_keys && !batch.first_keys.empty(),
                   "first_keys holds {} elements, legal without use_first_keys: none",
                   batch.first_keys.size());
  throw_invalid_if(!rules.trees && !batch.tree_parents.empty(),
                   "tree_parents holds {} elements, legal without use_trees: none",
                   batch.tree_parents.size());
  if (!batch.direction.empty()) check_direction(batch);
  if (!batch.first_keys.empty()) check_keys(batch, "first_keys", batch.first_keys);
  if (!batch.keep_keys.empty()) check_keys(batch, "keep_keys", batch.keep_keys);
  if (!batch.span_start_loc.empty() || !batch.spans.empty()) check_spans(batch);
  if (!batch.tree_start_loc.empty() || !batch.tree_parents.empty()) check_trees(batch);
}

void refuse_lists(std::string_view call, const CommonAttentionMetadata& batch) {
  const std::pair<std::string_view, std::size_t> fields[] = {
      {"direction", batch.direction.size()},
      {"spans", batch.spans.size()},
      {"first_keys", batch.first_keys.size()},
      {"keep_keys", batch.keep_keys.size()},
      {"tree_parents", batch.tree_parents.size()}};
  for (const auto& [field, size] : fields)
    throw_unsupported_if(size > 0, "{}: {} holds {} elements, legal: none", call, field, size);
}

}  // namespace clattn::detail
