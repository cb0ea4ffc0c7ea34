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

void Session::build(std::span<const Scheduled> scheduled) {
  std::size_t columns = 0;
  for (const Scheduled& part : scheduled) columns = std::max(columns, part.blocks.size());
  std::vector<std::int32_t> block_table(scheduled.size() * columns);
  auto row = block_table.begin();
  for (const Scheduled& part : scheduled) {
    std::ranges::copy(part.blocks, row);
    row += static_cast<std::ptrdiff_t>(columns);
  }
  auto batch = CommonAttentionMetadata::of(step_.query_start_loc, step_.seq_lens, block_table);
  std::vector<std::int32_t> starts = {0}, spans;
  for (const Scheduled& part : scheduled) {
    for (const auto& span : part.spans) spans.insert(spans.end(), span.begin(), span.end());
    starts.push_back(static_cast<std::int32_t>(spans.size() / 2));
  }
  if (!spans.empty()) {
    batch.span_start_loc = starts;
    batch.spans = spans;
  }
  metadata_.clear();
  for (const AttentionGroup& group : groups_)
    metadata_.push_back(&group.builder->build(queue_, batch));
  step_.metadata = metadata_[group_of_[0]];
}

}  // namespace clattn
