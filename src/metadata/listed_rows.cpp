#include "metadata/listed_rows.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {
namespace {

static_assert(CLA_BOTH_WAYS == static_cast<int>(Direction::kBothWays) &&
              CLA_CAUSAL == static_cast<int>(Direction::kCausal) &&
              CLA_CANVAS == static_cast<int>(Direction::kCanvas));
static_assert(CLA_SPAN_WHOLE == static_cast<int>(SpanRule::kWhole) &&
              CLA_SPAN_CLIP_LEFT == static_cast<int>(SpanRule::kClipLeft) &&
              CLA_SPAN_CLIP_BOTH == static_cast<int>(SpanRule::kClipBoth));

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

void check_parents(std::size_t r, std::span<const std::int32_t> parents) {
  const auto nodes = static_cast<std::int32_t>(parents.size());
  for (std::int32_t node = 0; node < nodes; ++node) {
    throw_invalid_if(parents[to_size(node)] < -1 || parents[to_size(node)] >= node,
                     "request {}: the parent of node {} is {}, legal: -1 … {}", r, node,
                     parents[to_size(node)], node - 1);
  }
}

/// The tree of one request: its number of nodes, which is not 0.
void check_tree(const CommonAttentionMetadata& batch, const ListRules& rules, std::size_t r,
                std::int32_t nodes) {
  const std::int32_t query_len = query_len_of(batch, r);
  const std::int32_t most = std::min(batch.seq_lens[r], kMaxTreeNodes);
  throw_invalid_if(nodes < query_len || nodes > most,
                   "request {}: its tree has {} nodes, legal: {} … {} (its query tokens … at most "
                   "{} and seq_lens), or none",
                   r, nodes, query_len, most, kMaxTreeNodes);
  throw_invalid_if(rules.device_directions,
                   "request {}: it has a tree, legal with device_directions: none", r);
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

void check_trees(const CommonAttentionMetadata& batch, const ListRules& rules) {
  const auto& starts = batch.tree_start_loc;
  check_count("tree_start_loc", starts.size(), std::int64_t{batch.num_reqs} + 1, "num_reqs + 1");
  throw_invalid_if(starts[0] != 0, "tree_start_loc[0] is {}, legal: 0", starts[0]);
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int64_t number = rules.device_trees ? std::numeric_limits<std::int32_t>::max()
                                                   : std::ssize(batch.tree_parents);
    throw_invalid_if(starts[r + 1] < starts[r] || starts[r + 1] > number,
                     "tree_start_loc[{}] is {}, legal: {} … {} (tree_parents)", r + 1,
                     starts[r + 1], starts[r], number);
    const std::int32_t nodes = starts[r + 1] - starts[r];
    if (nodes == 0) continue;
    check_tree(batch, rules, r, nodes);
    if (!rules.device_trees)
      check_parents(r, batch.tree_parents.subspan(to_size(starts[r]), to_size(nodes)));
  }
  if (rules.device_trees) return;
  check_count("tree_parents", batch.tree_parents.size(), starts.back(),
              "the last of tree_start_loc");
}

Direction usual_direction(const CommonAttentionMetadata& batch) {
  return batch.is_causal() ? Direction::kCausal : Direction::kBothWays;
}

std::int32_t tree_size_of(const CommonAttentionMetadata& batch, std::size_t request) {
  return batch.tree_start_loc[request + 1] - batch.tree_start_loc[request];
}

void mark_listed(RequestRows& rows, Direction usual) {
  // Nothing lies ahead of a request's only query.
  const bool looks_elsewhere = rows.direction != static_cast<int>(usual) && rows.query_len > 1;
  rows.is_listed = looks_elsewhere || rows.first_key > 0 || rows.has_gaps();
}

void set_tree(RequestRows& rows, std::span<const std::int32_t> parents) {
  if (is_chain(parents)) return;
  rows.tree_nodes = static_cast<int>(parents.size());
  rows.tree.begin = rows.seq_len - rows.tree_nodes;
  rows.tree.parents = parents;
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

ClaSight sight_of(const PlannerConfig& config) {
  return detail::sight_of(config, true);  // directions say whether rows are causal
}

ClaListedRow row_behind_gap(const PlannerConfig& config, const RequestRows& request,
                            std::int32_t position) {
  const ClaSight sight = sight_of(config);
  const std::int32_t depth =
      request.tree.empty() ? 0 : depth_of(request.tree, position - request.tree.begin);
  return cla_seen_by_row(&sight, &request, span_at(request, position), depth, position);
}

/// The ends of a tile's rows behind the kept keys.
ClaListedItem item_behind_gap(const PlannerConfig& config, const RequestRows& request,
                              std::int32_t position, std::int32_t count) {
  const ClaSight sight = sight_of(config);
  ClaListedItem item = cla_item_behind_gap(&sight, &request, span_at(request, position),
                                           span_at(request, position + count - 1), position, count);
  if (request.tree.empty() || request.tree.is_bound) return item;
  item.begin = item.common_begin = row_behind_gap(config, request, position).begin;
  for (std::int32_t i = 1; i < count; ++i) {  // depths may fall
    const std::int32_t begin = row_behind_gap(config, request, position + i).begin;
    item.begin = std::min(item.begin, begin);
    item.common_begin = std::max(item.common_begin, begin);
  }
  return item;
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

ClaSpan span_at(const RequestRows& request, std::int64_t position) {
  std::size_t begin = 0, end = request.spans.size() / 2;
  while (begin < end) {  // spans in front of `begin` start at the position or before it
    const std::size_t middle = begin + (end - begin) / 2;
    if (request.spans[2 * middle] <= position) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == 0 || request.spans[2 * begin - 1] <= position) return {};
  return {request.spans[2 * begin - 2], request.spans[2 * begin - 1]};
}

RequestRows rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                    std::int32_t request) {
  const auto r = to_size(request);
  RequestRows rows{};
  rows.query_len = query_len_of(batch, r);
  rows.seq_len = batch.seq_lens[r];
  // What most rows are, and what is not listed.
  const Direction usual = usual_direction(batch);
  rows.direction =
      static_cast<int>(rules.directions && !batch.direction.empty() ? batch.direction[r] : usual);
  if (rules.first_keys && !batch.first_keys.empty()) rows.first_key = batch.first_keys[r];
  if (rules.keep_keys && !batch.keep_keys.empty() && batch.keep_keys[r] > rows.first_key)
    rows.kept_end = batch.keep_keys[r];
  if (rules.spans && !batch.spans.empty()) {
    const auto first = to_size(batch.span_start_loc[r]), end = to_size(batch.span_start_loc[r + 1]);
    rows.spans = batch.spans.subspan(2 * first, 2 * (end - first));
  }
  if (rules.trees && !batch.tree_parents.empty()) {
    const auto first = to_size(batch.tree_start_loc[r]);
    set_tree(rows, batch.tree_parents.subspan(first, to_size(tree_size_of(batch, r))));
  }
  mark_listed(rows, usual);
  return rows;
}

RequestRows widest_rows_of(const ListRules& rules, const CommonAttentionMetadata& batch,
                           std::int32_t request, std::int32_t query_len) {
  static constexpr auto kRoots = [] {
    std::array<std::int32_t, kMaxTreeNodes> parents{};
    parents.fill(-1);
    return parents;
  }();
  RequestRows rows = rows_of(rules, batch, request);
  rows.query_len = query_len;
  if (rules.device_directions) rows.direction = CLA_CANVAS;
  if (rules.device_trees && !batch.tree_start_loc.empty()) {
    const std::int32_t nodes = tree_size_of(batch, to_size(request));
    rows.tree.is_bound = true;
    set_tree(rows, std::span(kRoots).first(to_size(nodes)));
    rows.tree_nodes = nodes;  // of a single one, too, which is no tree to list
  }
  mark_listed(rows, usual_direction(batch));
  return rows;
}

ListedKeys listed_tile_keys(const PlannerConfig& config, const RequestRows& request,
                            std::int32_t position, std::int32_t count, bool skips) {
  ClaListedItem item = item_behind_gap(config, request, position, count);
  const std::int32_t page = config.block_size;
  const std::int32_t kept_end = round_up(request.kept_end, page);
  if (skips && request.kept_end > 0 && item.begin - item.begin % page > kept_end)
    return {cla_keys_between(request.first_key, kept_end, page),
            cla_keys_between(item.begin, item.end, page)};
  if (request.kept_end > 0) item.begin = request.first_key;
  return {{}, cla_keys_between(item.begin, item.end, page)};
}

void list_rows(const PlannerConfig& config, const RequestRows& request, std::int32_t position,
               const ListedTile& to) {
  const auto count = static_cast<std::int32_t>(to.rows.size()) - 1;
  const ClaSight sight = sight_of(config);
  ClaListedItem item = item_behind_gap(config, request, position, count);
  if (request.kept_end > 0) item.begin = request.first_key;
  to.rows[0] = {item.begin, item.end, item.common_begin, item.common_end};
  const DraftTree& tree = request.tree;
  for (std::int32_t i = 0; i < count; ++i) {
    ClaListedRow& row = to.rows[to_size(i + 1)];
    row = row_behind_gap(config, request, position + i);
    if (!request.has_gaps()) continue;
    const auto gap_row =
        to.gap_rows.subspan(to_size(i * to.gap_row_ints), to_size(to.gap_row_ints));
    std::ranges::fill(gap_row, 0);
    const ClaGapRow gaps = {row.begin, request.kept_end,
                            tree.empty() ? request.seq_len : tree.begin,
                            to.gap_row_ints - kGapRowInts};
    std::memcpy(gap_row.data(), &gaps, sizeof(gaps));
    if (!tree.empty())
      set_tree_bits(tree, position + i - tree.begin,
                    cla_window_begin(&sight, row.position, row.position),
                    gap_row.subspan(kGapRowInts));
    row.begin = item.begin;
    row.gaps_at = to.gap_rows_at + i * to.gap_row_ints;
  }
}

UnseenPages unseen_pages(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                         std::int32_t request) {
  const std::int32_t query_len = query_len_of(batch, to_size(request));
  const std::int32_t seq_len = batch.seq_lens[to_size(request)];
  if (query_len > 0 && config.lists.any()) {
    const RequestRows rows = widest_rows_of(config.lists, batch, request, query_len);
    const std::int32_t count = rows.tree.empty() ? 1 : query_len;
    if (rows.lists(rows.first_new(), count)) {
      // Pages of new tokens are written, whatever their first key is.
      const auto page_before = [&](std::int32_t key) {
        return to_size(std::min(key, std::max(rows.first_new(), 0)) / config.block_size);
      };
      const std::int32_t begin = item_behind_gap(config, rows, rows.first_new(), count).begin;
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
  throw_invalid_if(rules.device_directions && !batch.direction.empty(),
                   "direction holds {} elements, legal with device_directions: none (the device "
                   "says them)",
                   batch.direction.size());
  throw_invalid_if(rules.device_trees && !batch.tree_parents.empty(),
                   "tree_parents holds {} elements, legal with device_trees: none (the device says "
                   "them)",
                   batch.tree_parents.size());
  if (!batch.direction.empty()) check_direction(batch);
  if (!batch.first_keys.empty()) check_keys(batch, "first_keys", batch.first_keys);
  if (!batch.keep_keys.empty()) check_keys(batch, "keep_keys", batch.keep_keys);
  if (!batch.span_start_loc.empty() || !batch.spans.empty()) check_spans(batch);
  if (!batch.tree_start_loc.empty() || !batch.tree_parents.empty()) check_trees(batch, rules);
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
