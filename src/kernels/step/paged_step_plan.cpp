// The plan of a step: its own cuts, what another step of the same lengths has cut, or what the
// device makes of its bounds.
#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>

#include "base/error.hpp"
#include "kernels/launch/update_seq_lens.hpp"
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
  throw_unsupported_if(options_.device_seq_lens,
                       "update_block_table: device_seq_lens is true, legal: false");
  throw_invalid_if(other == &view_, "attn_metadata: this builder's own, legal: another builder's");
  const bool same = other != nullptr && other->kernels == kernels_.get() &&
                    *other->planner == planner_ && other->batch.backend == style_.backend &&
                    other->recordable == (options_.graph_batch_size > 0);
  if (same) return;
  throw_invalid(
      "attn_metadata: of another configuration, legal: metadata of a builder with this one's "
      "backend, context, configuration and options");
}

void PagedStep::take_lengths_from_device() {
  throw_unsupported_if(rules_.attn_type != AttentionType::kDecoder,
                       "device_seq_lens: true, legal with attn_type {}: false",
                       to_string(rules_.attn_type));
  planner_.lengths_are_bounds = true;
  const std::string group =
      fmt::format("-DCLA_WG_SIZE={}", cache_op_work_group_size(context_->capabilities()));
  view_.cut_tiles =
      context_->runtime().kernel({"attention/cut_tiles.cl", "clattn_cut_tiles", group});
}

void PagedStep::warm_up(cl_command_queue queue) const {
  if (view_.cut_tiles != nullptr) warm_up_seq_lens(queue, *kernels_, planner_, view_.cut_tiles);
}

void PagedStep::check_device_lengths(const CommonAttentionMetadata& batch,
                                     const BuildOptions& options) {
  throw_invalid_if(!batch.slot_mapping.empty(),
                   "slot_mapping holds {} elements, legal with device_seq_lens: none (the device "
                   "computes them)",
                   batch.slot_mapping.size());
  throw_invalid_if(options.common_prefix_len != 0,
                   "common_prefix_len is {}, legal with device_seq_lens: 0",
                   options.common_prefix_len);
}

}  // namespace clattn::detail
