#include "metadata/listed_rows.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/planner.hpp"
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
  throw_invalid_if(!batch.first_keys.empty() && batch.first_keys[r] > batch.seq_lens[r] - nodes,
                   "request {}: first_keys is {}, legal with its tree: 0 … {}", r,
                   batch.first_keys[r], batch.seq_lens[r] - nodes);
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

void check_first_keys(const CommonAttentionMetadata& batch) {
  check_count("first_keys", batch.first_keys.size(), batch.num_reqs, "num_reqs");
  for (std::size_t r = 0; r < batch.first_keys.size(); ++r) {
    throw_invalid_if(batch.first_keys[r] < 0 || batch.first_keys[r] > batch.seq_lens[r],
                     "request {}: first_keys is {}, legal: 0 … {} (seq_lens)", r,
                     batch.first_keys[r], batch.seq_lens[r]);
  }
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
  rows.is_listed = looks_elsewhere || rows.first_key > 0 || !rows.tree.empty();
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

ClaListedItem listed_item(const PlannerConfig& config, const RequestRows& request,
                          std::int32_t position, std::int32_t count) {
  const DraftTree& tree = request.tree;
  if (tree.empty()) {
    const auto row = [&](std::int32_t at) {
      return listed_row(config.window, config.lists.span_rule, request, at);
    };
    const ClaListedRow first = row(position), last = row(position + count - 1);
    return {first.begin, last.end, last.begin, first.end};
  }
  ClaListedItem item = {tree.begin, position + count, 0, tree.begin};
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t begin =
        tree_sight(config.window, tree, position + i - tree.begin, request.first_key).context_begin;
    item.begin = std::min(item.begin, begin);
    item.common_begin = std::max(item.common_begin, begin);
  }
  return item;
}

ClaTileKeys listed_tile_keys(const PlannerConfig& config, const RequestRows& request,
                             std::int32_t position, std::int32_t count) {
  ClaListedItem item = listed_item(config, request, position, count);
  if (item.begin >= item.end) return {0, 0};
  item.begin -= item.begin % config.block_size;
  return {item.begin, item.end - item.begin};
}

void list_rows(const PlannerConfig& config, const RequestRows& request, std::int32_t position,
               const ListedTile& to) {
  const auto count = static_cast<std::int32_t>(to.rows.size()) - 1;
  const ClaListedItem item = listed_item(config, request, position, count);
  to.rows[0] = {item.begin, item.end, item.common_begin, item.common_end};
  const DraftTree& tree = request.tree;
  const std::int32_t ints = tree_row_ints(tree.size());
  for (std::int32_t i = 0; i < count; ++i) {
    ClaListedRow& row = to.rows[to_size(i + 1)];
    if (tree.empty()) {
      row = listed_row(config.window, config.lists.span_rule, request, position + i);
      continue;
    }
    const std::int32_t node = position + i - tree.begin;
    const TreeSight sight = tree_sight(config.window, tree, node, request.first_key);
    row = {item.begin, position + i + 1, sight.position, to.tree_rows_at + i * ints};
    write_tree_row(config.window, tree, node, request.first_key,
                   to.tree_rows.subspan(to_size(i * ints), to_size(ints)));
  }
}

std::size_t unseen_pages(const PlannerConfig& config, const CommonAttentionMetadata& batch,
                         std::int32_t request) {
  const std::int32_t query_len = query_len_of(batch, to_size(request));
  const std::int32_t seq_len = batch.seq_lens[to_size(request)];
  if (query_len > 0 && config.lists.any()) {
    const RequestRows rows = rows_of(config.lists, batch, request);
    const std::int32_t count = rows.tree.empty() ? 1 : query_len;
    if (rows.lists(rows.first_new, count)) {
      // Pages of new tokens are written, whatever their first key is.
      const std::int32_t begin = listed_item(config, rows, rows.first_new, count).begin;
      return to_size(std::min(begin, std::max(rows.first_new, 0)) / config.block_size);
    }
  }
  return unseen_pages(sight_of(config, batch.is_causal()), query_len, seq_len);
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
  if (!batch.first_keys.empty()) check_first_keys(batch);
  if (!batch.span_start_loc.empty() || !batch.spans.empty()) check_spans(batch);
  if (!batch.tree_start_loc.empty() || !batch.tree_parents.empty()) check_trees(batch);
}

void refuse_lists(std::string_view call, const CommonAttentionMetadata& batch) {
  const std::pair<std::string_view, std::size_t> fields[] = {
      {"direction", batch.direction.size()},
      {"spans", batch.spans.size()},
      {"first_keys", batch.first_keys.size()},
      {"tree_parents", batch.tree_parents.size()}};
  for (const auto& [field, size] : fields)
    throw_unsupported_if(size > 0, "{}: {} holds {} elements, legal: none", call, field, size);
}

}  // namespace clattn::detail
