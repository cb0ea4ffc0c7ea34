#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/session.hpp>

#include "attention/session_pools.hpp"
#include "attention/session_recurrent.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"

// What a session's layers are told of a step.

namespace clattn {

void Session::check_spans(const StepRequest& wanted) const {
  const bool used =
      std::ranges::any_of(layers_, [](const auto& layer) { return layer->config().use_spans; });
  detail::throw_invalid_if(!wanted.spans.empty() && !used,
                           "step: request {}: spans has {} elements, legal where no layer has "
                           "use_spans: none",
                           wanted.id, wanted.spans.size());
}

namespace {

/// Lists a request's rows as nodes of a tree: a chain of tokens, then its drafts.
void list_tree(std::vector<std::int32_t>& to, std::int32_t num_tokens,
               std::span<const std::int32_t> parents) {
  for (std::int32_t token = 0; token < num_tokens; ++token) to.push_back(token - 1);
  for (const std::int32_t parent : parents) to.push_back(num_tokens + parent);
}

}  // namespace

/// [groups][requests, columns]; 0 stands for blocks that a window has left.
Session::BlockTables Session::block_tables(std::span<const Scheduled> scheduled) const {
  std::size_t columns = 0;
  for (const Scheduled& part : scheduled) columns = std::max(columns, part.blocks[0].size());
  BlockTables tables(pools_->num_groups());
  for (std::size_t group = 0; group < tables.size(); ++group) {
    tables[group].resize(scheduled.size() * columns);
    auto row = tables[group].begin();
    for (const Scheduled& part : scheduled) {
      std::ranges::transform(part.blocks[group], row,
                             [](std::int32_t block) { return std::max(block, 0); });
      row += static_cast<std::ptrdiff_t>(columns);
    }
  }
  return tables;
}

void Session::build(std::span<const Scheduled> scheduled) {
  const BlockTables tables = block_tables(scheduled);
  std::vector<std::int32_t> span_starts = {0}, spans, tree_starts = {0}, parents;
  for (const Scheduled& part : scheduled) {
    for (const auto& span : part.spans) spans.insert(spans.end(), span.begin(), span.end());
    span_starts.push_back(static_cast<std::int32_t>(spans.size() / 2));
    if (part.has_tree) list_tree(parents, part.end - part.num_computed, part.request->parents);
    tree_starts.push_back(static_cast<std::int32_t>(parents.size()));
  }
  auto batch = CommonAttentionMetadata::of(step_.query_start_loc, step_.seq_lens, tables[0]);
  if (!spans.empty()) {
    batch.span_start_loc = span_starts;
    batch.spans = spans;
  }
  if (!parents.empty()) {
    batch.tree_start_loc = tree_starts;
    batch.tree_parents = parents;
  }
  metadata_.clear();
  for (const AttentionGroup& group : groups_) {
    batch.block_table = tables[detail::to_size(group.kv_cache_group_id)];
    metadata_.push_back(&group.builder->build(queue_, batch));
  }
  step_.metadata = metadata_[group_of_[0]];
  if (states_ != nullptr) states_->build(queue_, step_, scheduled);
}

}  // namespace clattn
