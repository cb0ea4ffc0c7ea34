// The plan of a step: its own cuts, or what another step of the same lengths has cut.
#include <algorithm>

#include "base/error.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn::detail {

/// Writes the plan, or copies what another step of the same lengths has cut.
void PagedStep::write_plan(const AttentionPlan* own, const PagedStepView* taken,
                           const PlanOutput& output) const {
  if (own != nullptr) return own->write(pages_at_, output);
  for (std::size_t i = 0; i < output.items.size(); ++i) {
    std::copy_n(taken->plan.items.at(i).begin(), taken->planned.num_items.at(i),
                output.items.at(i).begin());
  }
  std::copy_n(taken->plan.merges.begin(), taken->planned.num_merges, output.merges.begin());
}

/// Equal planners and page lists cut equal lengths alike.
void PagedStep::require_same_planning(const PagedStepView* other) const {
  throw_unsupported_if(key_source() == KeySource::kContiguous,
                       "update_block_table: this configuration has no block table");
  throw_invalid_if(other == &view_, "attn_metadata: this builder's own, legal: another builder's");
  const bool same = other != nullptr && other->kernels == kernels_.get() &&
                    *other->planner == planner_ && other->batch.backend == style_.backend &&
                    other->recordable == (options_.graph_batch_size > 0);
  if (same) return;
  throw_invalid(
      "attn_metadata: of another configuration, legal: metadata of a builder with this one's "
      "backend, context, configuration and options");
}

}  // namespace clattn::detail
