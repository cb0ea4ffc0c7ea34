// What recorded launches ask of the steps that they run: bounds, checks and padding.
#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/step/paged_step.hpp"

namespace clattn::detail {

/// Bounds batches to what recorded launches are made for.
void PagedStep::limit_to_graphs() {
  const std::int32_t query_len = options_.decode_threshold;
  throw_invalid_if(options_.graph_batch_size < 1,
                   "graph_batch_size is {}, legal: >= 0 (0 = steps are not recorded)",
                   options_.graph_batch_size);
  BatchLimits& limits = options_.limits;
  throw_invalid_if(limits.num_blocks < 0,
                   "BuilderOptions::limits.num_blocks is {}, legal: the cache's number of blocks, "
                   "which recorded steps need",
                   limits.num_blocks);
  limits.max_num_reqs = options_.graph_batch_size;
  limits.max_num_batched_tokens =
      checked_mul(options_.graph_batch_size, query_len, "graph_batch_size x decode_threshold");
}

/// What no step of up to `num_reqs` requests exceeds.
PlanCounts PagedStep::largest_plan(std::int32_t num_reqs) const {
  if (options_.graph_batch_size == 0) return plan_upper_bound(planner_, options_.limits);
  BatchLimits limits = options_.limits;
  limits.max_num_reqs = num_reqs;
  limits.max_num_batched_tokens = num_reqs * options_.decode_threshold;
  return plan_upper_bound(planner_, limits, options_.decode_threshold);
}

bool PagedStep::fits_graph(const CommonAttentionMetadata& given) const {
  const CommonAttentionMetadata batch = resolve_causal(given);
  const std::int32_t max_query_len = validate_queries(batch);
  return options_.graph_batch_size > 0 && batch.num_reqs <= options_.graph_batch_size &&
         max_query_len <= options_.decode_threshold && fits_recorded(batch, max_query_len);
}

/// Whether the recorded launches' `causal` suits this batch. Either value does if no request has
/// more than one query token: that one is the last and sees all keys.
bool PagedStep::fits_recorded(const CommonAttentionMetadata& batch,
                              std::int32_t max_query_len) const {
  return *batch.causal == records_causal() || max_query_len <= 1;
}

/// Whether the launches that were recorded for the batch's pad size can run it.
void PagedStep::check_graph(const CommonAttentionMetadata& batch,
                            std::int32_t max_query_len) const {
  const std::int32_t pad_size = batch.graph_pad_size;
  throw_invalid_if(pad_size < 0 || pad_size > options_.graph_batch_size,
                   "graph_pad_size is {}, legal: 0 … {} (graph_batch_size)", pad_size,
                   options_.graph_batch_size);
  if (options_.graph_batch_size == 0) return;
  throw_invalid_if(pad_size > 0 && batch.num_reqs > pad_size,
                   "num_reqs is {}, legal: 0 … {} (graph_pad_size)", batch.num_reqs, pad_size);
  throw_invalid_if(max_query_len > options_.decode_threshold,
                   "max_query_len is {}, legal: 0 … {} (decode_threshold)", max_query_len,
                   options_.decode_threshold);
  throw_invalid_if(!fits_recorded(batch, max_query_len),
                   "causal is {}, legal: {}: recorded steps of several query tokens are {}",
                   *batch.causal, records_causal(), records_causal() ? "causal" : "bidirectional");
}

/// Items that the plan did not need: empty ones, whose work-groups do nothing.
void PagedStep::clear_padding(const PlanCounts& planned, const PlanOutput& output) {
  for (std::size_t i = 0; i < output.items.size(); ++i) {
    const auto used = to_size(planned.num_items.at(i));
    for (ClaWorkItem& item : output.items.at(i).subspan(used)) {
      item = {};
      item.partial_row = -1;
    }
  }
  if (!output.splits.empty()) {
    for (ClaSplit& split : output.splits.subspan(to_size(planned.all_items()))) split = {};
  }
}

/// Tells the graphs of this memory which of them may run, and how much of it.
void PagedStep::publish(std::int32_t pad_size) {
  static_assert(std::tuple_size_v<decltype(PreparedStep::num_used)> == kMaxTileClasses + 1);
  if (view_.prepared == nullptr) view_.prepared = std::make_shared<PreparedStep>();
  view_.prepared->batch_size = pad_size;
  for (std::size_t i = 0; i < view_.planned.num_items.size(); ++i)
    view_.prepared->num_used.at(i) = view_.planned.num_items.at(i);
  view_.prepared->num_used.at(kMaxTileClasses) = view_.planned.num_merges;
}

}  // namespace clattn::detail
