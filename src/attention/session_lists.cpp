#include <algorithm>
#include <clattn/attn_utils.hpp>
#include <clattn/session.hpp>

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

void Session::build(std::span<const Scheduled> scheduled) {
  std::size_t columns = 0;
  for (const Scheduled& part : scheduled) columns = std::max(columns, part.blocks.size());
  std::vector<std::int32_t> block_table(scheduled.size() * columns);
  std::vector<std::int32_t> span_starts = {0}, spans, tree_starts = {0}, parents;
  auto row = block_table.begin();
  for (const Scheduled& part : scheduled) {
    std::ranges::copy(part.blocks, row);
    row += static_cast<std::ptrdiff_t>(columns);
    for (const auto& span : part.spans) spans.insert(spans.end(), span.begin(), span.end());
    span_starts.push_back(static_cast<std::int32_t>(spans.size() / 2));
    if (part.has_tree) list_tree(parents, part.end - part.num_computed, part.request->parents);
    tree_starts.push_back(static_cast<std::int32_t>(parents.size()));
  }
  auto batch = CommonAttentionMetadata::of(step_.query_start_loc, step_.seq_lens, block_table);
  if (!spans.empty()) {
    batch.span_start_loc = span_starts;
    batch.spans = spans;
  }
  if (!parents.empty()) {
    batch.tree_start_loc = tree_starts;
    batch.tree_parents = parents;
  }
  metadata_.clear();
  for (const AttentionGroup& group : groups_)
    metadata_.push_back(&group.builder->build(queue_, batch));
  step_.metadata = metadata_[group_of_[0]];
}

}  // namespace clattn
