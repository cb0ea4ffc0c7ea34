// What a builder fixes when it is made, and what it checks of every batch.
#include "kernels/step/paged_builder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <tuple>

#include "base/checked.hpp"
#include "kernels/launch/update_lists.hpp"
#include "kernels/launch/update_seq_lens.hpp"

namespace clattn::detail {

namespace {

std::size_t bytes_per_partial_row(const KernelShape& shape) {
  return to_size(shape.num_heads) * to_size(shape.value_size() + 1) * sizeof(float);
}

}  // namespace

std::int64_t most_partial_rows(const KernelShape& shape, const DeviceCapabilities& capabilities) {
  const std::size_t row = bytes_per_partial_row(shape);
  const std::size_t counters = row / to_size(shape.value_size() + 1);
  const std::size_t device = capabilities.max_alloc_bytes;
  const std::size_t room = device - std::min(device, most_workspace_overhead());
  return static_cast<std::int64_t>(std::min(kMaxWorkspaceBytes / row, room / (row + counters)));
}

PagedBuilder::PagedBuilder(std::shared_ptr<Context> context,
                           std::shared_ptr<const AttentionKernels> kernels, const StepRules& rules,
                           BuilderOptions options)
    : context_(std::move(context)),
      kernels_(std::move(kernels)),
      options_(std::move(options)),
      rules_(rules),
      planner_(kernels_->planner),
      staging_(context_->runtime()) {
  if (options_.workspace == nullptr) options_.workspace = std::make_shared<AttentionWorkspace>();
  const BatchLimits& limits = options_.limits;
  validate_limits(limits);
  throw_invalid_if(options_.num_splits < 0, "num_splits is {}, legal: >= 0 (0 = planned)",
                   options_.num_splits);
  throw_invalid_if(options_.decode_threshold < 1, "decode_threshold is {}, legal: >= 1",
                   options_.decode_threshold);
  planner_.split_policy = options_.split_policy;
  planner_.num_splits = options_.num_splits;
  planner_.window = rules_.window;
  planner_.lists = rules_.lists;
  planner_.bidirectional = !may_be_causal(rules_.attn_type);
  throw_invalid_if(options_.device_query_lens && !options_.device_seq_lens,
                   "device_query_lens: true, legal without device_seq_lens: false");
  throw_invalid_if(options_.graph_mixed && options_.graph_batch_size == 0,
                   "graph_mixed: true, legal without a graph_batch_size: false");
  if (options_.device_seq_lens) take_lengths_from_device();
  take_lists_from_device();
  const bool fixed_launches = options_.device_seq_lens || options_.graph_batch_size > 0;
  planner_.fixed_groups = fixed_launches;
  if (!options_.side_by_side || fixed_launches)
    planner_.beside_ns = std::numeric_limits<double>::infinity();
  if (planner_.last_is_wide && fixed_launches) {
    planner_.last_is_wide = false;
    --planner_.num_tiles;
  }
  planner_.max_partial_rows = most_partial_rows(kernels_->shape, context_->capabilities());
  const std::int64_t open_rows = std::int64_t{limits.max_num_reqs} * planner_.most_query_len;
  throw_unsupported_if(open_rows > planner_.max_partial_rows,
                       "device_query_lens: true, legal with max_num_reqs {} and decode_threshold "
                       "{}: false (they need {} partial rows, the device has room for {})",
                       limits.max_num_reqs, options_.decode_threshold, open_rows,
                       planner_.max_partial_rows);
  planner_.max_partial_rows += spare_partial_rows(planner_);
  if (options_.split_policy == SplitPolicy::kDeterministic) {
    // Cuts may not depend on the batch, so the workspace must hold every request's splits at once:
    // only single queries are split, else the bound would make their cuts too long to help.
    planner_.max_split_query_len = 1;
  }
  planner_.deterministic_split_keys = fit_deterministic_split_keys(planner_, limits);
  planner_.gap_split_query_len = fit_gap_split_query_len(planner_, limits);
  record_.num_splits = options_.num_splits;
  record_.split_policy = options_.split_policy;
  record_.decode_threshold = options_.decode_threshold;
  record_.side_by_side = options_.side_by_side;
  if (options_.split_policy == SplitPolicy::kDeterministic || rules_.split != nullptr) {
    record_.limits = limits;  // before recorded steps narrow them
  }
  // After deterministic cuts are fixed: a recorded step has the bits of an eager one.
  if (options_.graph_batch_size != 0) limit_to_graphs();
  const auto reqs = to_size(limits.max_num_reqs);
  // What no step within the limits exceeds is allocated once, so that serving never stops to grow.
  static_cast<void>(largest_step_bytes());  // refuses limits that no step could fill
  reserve_workspace(largest_plan(options_.graph_batch_size).num_partial_rows);
  query_start_loc_.reserve(reqs + 1);
  seq_lens_.reserve(reqs);
  last_page_len_.reserve(reqs);
  pages_at_.reserve(reqs + 1);
}

PagedBuilder::GraphSize PagedBuilder::graph_size(std::int32_t size) const {
  if (options_.graph_mixed) return {std::min(size, options_.limits.max_num_reqs), size, size};
  return {size, checked_mul(size, options_.decode_threshold, "graph_batch_size x decode_threshold"),
          options_.decode_threshold};
}

/// Bounds batches to what recorded launches are made for.
void PagedBuilder::limit_to_graphs() {
  throw_invalid_if(options_.graph_batch_size < 1,
                   "graph_batch_size is {}, legal: >= 0 (0 = steps are not recorded)",
                   options_.graph_batch_size);
  BatchLimits& limits = options_.limits;
  throw_invalid_if(limits.num_blocks < 0,
                   "BuilderOptions::limits.num_blocks is {}, legal: the cache's number of blocks, "
                   "which recorded steps need",
                   limits.num_blocks);
  throw_unsupported_if(options_.graph_mixed && rules_.attn_type != AttentionType::kDecoder,
                       "graph_mixed: true, legal with attn_type {}: false",
                       to_string(rules_.attn_type));
  const GraphSize largest = graph_size(options_.graph_batch_size);
  limits.max_num_reqs = largest.num_reqs;
  limits.max_num_batched_tokens = largest.num_tokens;
}

void PagedBuilder::take_lengths_from_device() {
  throw_unsupported_if(rules_.attn_type != AttentionType::kDecoder,
                       "device_seq_lens: true, legal with attn_type {}: false",
                       to_string(rules_.attn_type));
  throw_unsupported_if(options_.device_query_lens && rules_.lists.trees,
                       "device_query_lens: true, legal with use_trees: false");
  planner_.lengths_are_bounds = true;
  const std::string group =
      fmt::format("-DCLA_WG_SIZE={}", cache_op_work_group_size(context_->capabilities()));
  if (options_.device_query_lens) planner_.most_query_len = options_.decode_threshold;
  view_.cut_tiles = context_->runtime().kernel(
      options_.device_query_lens
          ? KernelSource{"attention/cut_queries.cl", "clattn_cut_queries", group}
          : KernelSource{"attention/cut_tiles.cl", "clattn_cut_tiles", group});
}

/// Steps whose listed rows follow from lists or lengths that only the device knows.
void PagedBuilder::take_lists_from_device() {
  ListRules& lists = planner_.lists;
  lists.device_directions = options_.device_directions;
  lists.device_trees = options_.device_trees;
  const std::tuple<std::string_view, bool, std::string_view, bool> fields[] = {
      {"device_directions", lists.device_directions, "use_directions", lists.directions},
      {"device_trees", lists.device_trees, "use_trees", lists.trees}};
  for (const auto& [option, is_set, use, is_used] : fields) {
    throw_unsupported_if(is_set && !is_used, "{}: true, legal without {}: false", option, use);
    throw_unsupported_if(is_set && rules_.attn_type != AttentionType::kDecoder,
                         "{}: true, legal with attn_type {}: false", option,
                         to_string(rules_.attn_type));
  }
  throw_unsupported_if(lists.device_directions && lists.device_trees,
                       "device_trees: true, legal with device_directions: false");
  const bool on_device = lists.device_directions || lists.device_trees || options_.device_seq_lens;
  if (!on_device || !lists.any()) return;
  view_.list_rows = context_->runtime().kernel(
      {"attention/list_rows.cl", "clattn_list_rows",
       fmt::format("-DCLA_WG_SIZE={}", cache_op_work_group_size(context_->capabilities()))});
}

/// What no step exceeds, or, with a graph_batch_size, no recorded step of that size.
PlanCounts PagedBuilder::largest_plan(std::int32_t graph_batch_size) const {
  BatchLimits limits = options_.limits;
  std::int32_t max_query_len = std::numeric_limits<std::int32_t>::max();
  if (graph_batch_size > 0) {
    const GraphSize size = graph_size(graph_batch_size);
    limits.max_num_reqs = size.num_reqs;
    limits.max_num_batched_tokens = size.num_tokens;
    max_query_len = size.max_query_len;
  }
  // Requests whose query tokens the device knows are planned for as many as they may have.
  max_query_len = std::max(max_query_len, planner_.most_query_len);
  limits.max_num_batched_tokens = static_cast<std::int32_t>(
      std::min(kMaxInt32, std::int64_t{limits.max_num_batched_tokens} +
                              std::int64_t{limits.max_num_reqs} * planner_.most_query_len));
  return plan_upper_bound(planner_, limits, max_query_len);
}

/// Takes the workspace's buffer, grown to `rows` partial ones where it is smaller. Another builder
/// may have replaced it since; what this one's last step was bound to lives until here.
void PagedBuilder::reserve_workspace(std::int64_t rows) {
  // Recorded launches are bound to the buffer of the first step.
  if (options_.graph_batch_size > 0 && workspace_.buffer) return;
  AttentionWorkspace& shared = *options_.workspace;
  const std::size_t lse_row = to_size(kernels_->shape.num_heads) * sizeof(float);
  const std::size_t out_row = lse_row * to_size(kernels_->shape.value_size());
  const bool counts = std::ranges::any_of(planner_.tiles, &TileClass::merges_splits);
  const std::size_t counter_row = counts ? lse_row : 0;
  const WorkspaceBytes room = room_of(shared);
  std::size_t held = std::min(room.partial_out / out_row, room.partial_lse2 / lse_row);
  if (counter_row > 0) held = std::min(held, room.counters / counter_row);
  auto wanted = to_size(rows);
  if (wanted > held) {
    wanted = std::min(std::max(wanted, held * 3 / 2), to_size(planner_.max_partial_rows));
  }
  grow_workspace(shared, context_->runtime(),
                 {.counters = wanted * counter_row,
                  .partial_lse2 = wanted * lse_row,
                  .partial_out = wanted * out_row});
  if (workspace_.buffer.handle() != shared.buffer.handle()) workspace_ = shared;
}

void PagedBuilder::set_workspace_buffer(std::shared_ptr<AttentionWorkspace> workspace) {
  throw_invalid_if(workspace == nullptr, "set_workspace_buffer: null, legal: a workspace");
  throw_unsupported_if(options_.graph_batch_size > 0,
                       "set_workspace_buffer: recorded launches are bound to the builder's own; "
                       "legal: BuilderOptions::workspace");
  options_.workspace = std::move(workspace);
}

void PagedBuilder::warm_up(cl_command_queue queue) {
  if (view_.cut_tiles != nullptr) warm_up_seq_lens(queue, *kernels_, planner_, view_.cut_tiles);
  if (view_.list_rows != nullptr) warm_up_lists(queue, *kernels_, planner_, view_.list_rows);
}

std::size_t PagedBuilder::workspace_bytes(const CommonAttentionMetadata& given) const {
  const CommonAttentionMetadata batch = resolve_causal(given);
  const PlannerConfig planner = planner_for(batch, check_lengths(batch), false);
  const std::int64_t rows = AttentionPlan(planner, batch).counts().num_partial_rows;
  return to_size(rows) * bytes_per_partial_row(kernels_->shape);
}

PlannerConfig PagedBuilder::planner_for(const CommonAttentionMetadata& batch,
                                        const BatchSummary& summary, bool fast) const {
  PlannerConfig planner = planner_;
  if (fast && planner.num_splits == 0 && planner.split_policy == SplitPolicy::kBalanced) {
    planner.num_splits = 1;
    planner.item_order = ItemOrder::kAsCut;
  }
  if (rules_.split != nullptr) rules_.split(kernels_->shape, batch, summary, planner);
  return planner;
}

CommonAttentionMetadata recorded_batch(const PagedStepView& step) {
  const BatchRecord& record = step.batch;
  CommonAttentionMetadata batch =
      CommonAttentionMetadata::of(record.query_start_loc, record.seq_lens, {});
  for_each_list([](auto& list, const auto& recorded) { list = recorded; }, batch, record);
  if (batch.direction.empty()) batch.causal = step.causal != 0;
  return batch;
}

/// The batch with `causal` set: to the layer's default, if the batch leaves it open.
CommonAttentionMetadata PagedBuilder::resolve_causal(CommonAttentionMetadata batch) const {
  throw_invalid_if(planner_.bidirectional && batch.causal == true,
                   "causal is true, legal with attn_type {}: false, or not given",
                   to_string(rules_.attn_type));
  throw_invalid_if(batch.causal.has_value() && !batch.direction.empty(),
                   "causal is {}, legal with a direction for each request: none",
                   batch.causal.value_or(true));
  const bool listed = rules_.lists.directions && !batch.direction.empty();
  batch.causal = listed || batch.is_causal(rules_.attn_type);  // other directions are listed
  return batch;
}

BatchSummary PagedBuilder::check_batch(const CommonAttentionMetadata& batch,
                                       const BuildOptions& options) const {
  const BatchSummary summary = check_lengths(batch);
  throw_invalid_if(options_.device_seq_lens && !batch.slot_mapping.empty(),
                   "slot_mapping holds {} elements, legal with device_seq_lens: none (the device "
                   "computes them)",
                   batch.slot_mapping.size());
  throw_invalid_if(options_.device_seq_lens && options.common_prefix_len != 0,
                   "common_prefix_len is {}, legal with device_seq_lens: 0",
                   options.common_prefix_len);
  validate_common_prefix(batch, kernels_->shape.block_size, options.common_prefix_len,
                         key_source());
  return summary;
}

BatchSummary PagedBuilder::check_lengths(const CommonAttentionMetadata& batch) const {
  const BatchSummary summary = validate_lengths(batch, kernels_->shape.block_size, key_source());
  validate_limits(batch, summary, options_.limits);
  check_lists(batch, planner_.lists);
  throw_unsupported_if(options_.device_seq_lens && rules_.lists.spans && !batch.spans.empty(),
                       "spans holds {} elements, legal with device_seq_lens and use_spans: none "
                       "(only the device knows where the rows stand)",
                       batch.spans.size());
  check_graph(batch, summary.max_query_len);
  return summary;
}

/// Whether the launches that were recorded for the batch's pad size can run it.
void PagedBuilder::check_graph(const CommonAttentionMetadata& batch,
                               std::int32_t max_query_len) const {
  const std::int32_t pad_size = batch.graph_pad_size;
  throw_invalid_if(pad_size < 0 || pad_size > options_.graph_batch_size,
                   "graph_pad_size is {}, legal: 0 … {} (graph_batch_size)", pad_size,
                   options_.graph_batch_size);
  if (options_.graph_batch_size == 0) return;
  const GraphSize size = graph_size(pad_size_of(batch));
  throw_invalid_if(pad_size > 0 && batch.num_reqs > size.num_reqs,
                   "num_reqs is {}, legal: 0 … {} (graph_pad_size)", batch.num_reqs, size.num_reqs);
  throw_invalid_if(options_.graph_mixed && batch.num_actual_tokens > size.num_tokens,
                   "num_actual_tokens is {}, legal: 0 … {} (graph_pad_size)",
                   batch.num_actual_tokens, size.num_tokens);
  throw_invalid_if(max_query_len > size.max_query_len,
                   "max_query_len is {}, legal: 0 … {} (decode_threshold)", max_query_len,
                   options_.decode_threshold);
  throw_invalid_if(!fits_recorded(batch, max_query_len),
                   "causal is {}, legal: {}: recorded steps of several query tokens are {}",
                   *batch.causal, records_causal(), records_causal() ? "causal" : "bidirectional");
}

bool PagedBuilder::can_run_in_graph(const CommonAttentionMetadata& given) const {
  const CommonAttentionMetadata batch = resolve_causal(given);
  const std::int32_t max_query_len = validate_queries(batch);
  if (options_.graph_batch_size == 0) return false;
  const GraphSize size = graph_size(options_.graph_batch_size);
  return batch.num_reqs <= size.num_reqs && token_count(batch) <= size.num_tokens &&
         max_query_len <= size.max_query_len && fits_recorded(batch, max_query_len);
}

/// Whether the recorded launches' `causal` suits this batch. Either value does if no request has
/// more than one query token: that one is the last and sees all keys.
bool PagedBuilder::fits_recorded(const CommonAttentionMetadata& batch,
                                 std::int32_t max_query_len) const {
  return *batch.causal == records_causal() || max_query_len <= 1;
}

const AttentionMetadata& PagedBuilder::update_block_table(cl_command_queue queue,
                                                          const AttentionMetadata& metadata,
                                                          const GroupPages& pages, Event* upload) {
  const PagedStepView* step = metadata.step();
  throw_unsupported_if(key_source() == KeySource::kContiguous,
                       "update_block_table: this configuration has no block table");
  throw_unsupported_if(options_.device_seq_lens,
                       "update_block_table: device_seq_lens is true, legal: false");
  throw_invalid_if(step == &view_, "attn_metadata: this builder's own, legal: another builder's");
  // Equal planners and page lists cut equal lengths alike.
  const bool same = step != nullptr && step->kernels == kernels_.get() &&
                    *step->planner == planner_ && step->batch.backend == rules_.backend &&
                    step->recordable == (options_.graph_batch_size > 0);
  throw_invalid_if(
      !same,
      "attn_metadata: of another configuration, legal: metadata of a builder with this one's "
      "backend, context, configuration and options");
  CommonAttentionMetadata batch = recorded_batch(*step);
  batch.block_table = pages.block_table;
  batch.block_table_stride = pages.block_table_stride;
  batch.slot_mapping = pages.slot_mapping;
  batch.graph_pad_size = step->graph_pad_size;
  return build_metadata(queue, batch, upload, {.common_prefix_len = metadata.common_prefix_len()},
                        step);
}

}  // namespace clattn::detail
