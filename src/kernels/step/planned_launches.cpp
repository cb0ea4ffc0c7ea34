#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/tuning.hpp>
#include <vector>

#include "base/checked.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/step/paged_step.hpp"
#include "metadata/validate.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn {
namespace {

using detail::PagedStepView, detail::PlannerConfig, detail::TaskRun, detail::TileClass;
using detail::to_size;

constexpr double kUsPerNs = 1e-3;

PlannedLaunch planned_attention(const PagedStepView& step, std::size_t index) {
  TileClass tile = step.planner->tiles.at(index);
  if (step.planned.workers.at(index) > 0) tile.workers = step.planned.workers.at(index);
  const auto items = step.plan.items.at(index).first(to_size(step.planned.num_items.at(index)));
  PlannedLaunch launch;
  launch.kernel = step.kernels->stages.at(index).variant->name;
  launch.items = static_cast<std::int64_t>(items.size());
  launch.tasks = launch.items * tile.groups_per_item;
  launch.concurrent_groups = tile.workers;
  std::vector<TaskRun> runs;
  runs.reserve(items.size());
  double shared = 0;
  for (const ClaWorkItem& item : items) {
    if (item.q_count == 0) {  // padding
      runs.push_back({0, tile.groups_per_item});
      --launch.items;
      continue;
    }
    const double keys = item.kv_end - item.kv_begin;
    const bool is_split = item.partial_row >= 0 && keys > 0;
    const double ns = task_ns(tile, keys, item.q_count, is_split);
    runs.push_back({ns, tile.groups_per_item});
    shared += shared_ns(tile, keys, item.q_count) * tile.groups_per_item;
    if (is_split) ++launch.splits;
    if (is_split && item.split == 0) ++launch.split_tiles;
  }
  const bool rebalanced = step.planned.rebalanced && index == detail::kRebalancedClass;
  if (!rebalanced)  // which are dealt in list order
    std::ranges::sort(runs, [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
  launch.predicted_us = (tile.launch_ns + expected_end_ns(tile, runs, shared)) * kUsPerNs;
  if (step.planned.slower.at(index) > 0) launch.predicted_us *= step.planned.slower.at(index);
  return launch;
}

PlannedLaunch planned_merge(const PagedStepView& step) {
  const detail::MergeCosts& costs = step.planner->merge;
  PlannedLaunch launch;
  launch.kernel = step.kernels->merge.variant->name;
  launch.items = step.planned.num_merges;
  launch.tasks = launch.items * step.kernels->shape.num_heads;
  for (const ClaMergeItem& merge : step.plan.merges.first(to_size(step.planned.num_merges)))
    launch.splits += merge.num_splits;
  launch.predicted_us = (costs.launch_ns + merge_ns(costs, static_cast<double>(launch.items),
                                                    static_cast<double>(launch.splits))) *
                        kUsPerNs;
  return launch;
}

std::vector<PlannedLaunch> launches_of(const PagedStepView& step) {
  std::vector<PlannedLaunch> launches;
  for (std::size_t i = 0; i < step.kernels->stages.size(); ++i) {
    if (step.planned.num_items.at(i) == 0) continue;
    launches.push_back(planned_attention(step, i));
    launches.back().beside_last = launches.size() > 1 && step.planned.slower.at(i) > 0;
  }
  if (step.planned.num_merges > 0) launches.push_back(planned_merge(step));
  return launches;
}

}  // namespace

std::vector<PlannedLaunch> planned_launches(const AttentionMetadata& metadata) {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr) return {};
  return launches_of(*step);
}

std::vector<PlannedLaunch> predicted_launches(const AttentionConfig& config,
                                              const DeviceCapabilities& device,
                                              std::span<const CostRow> costs,
                                              const CommonAttentionMetadata& batch) {
  detail::throw_unsupported_if(config.attn_type != AttentionType::kDecoder,
                               "only a decoder's attention is predicted");
  std::vector<std::string> reasons;
  if (config.use_mla) {
    detail::append_latent_reasons(config, nullptr, reasons);
  } else {
    detail::append_config_reasons(config, reasons);
    detail::append_head_size_reason(config.head_size, reasons);
  }
  detail::throw_unsupported_if(!reasons.empty(), "{}", fmt::join(reasons, "; "));
  for (const CostRow& row : costs) {
    const std::string fault = detail::cost_fault(row.costs);
    detail::throw_invalid_if(!fault.empty(), "{}", fault);
  }
  detail::validate_sequences(batch);
  detail::check_lists(batch, detail::lists_of(config));
  const detail::TuningTable table({.costs = {costs.begin(), costs.end()}});
  const auto kernels =
      detail::imagined_kernels({device, table}, detail::kernel_shape(config), config.kernel_family);
  PlannerConfig planner = kernels->planner;
  planner.window = detail::window_of(config);
  planner.lists = detail::lists_of(config);
  planner.max_partial_rows = detail::most_partial_rows(kernels->shape, device);
  planner.gap_split_query_len = detail::fit_gap_split_query_len(
      planner, {.max_num_reqs = batch.num_reqs, .max_num_batched_tokens = batch.num_actual_tokens});
  const detail::AttentionPlan plan(planner, batch);
  std::array<std::vector<ClaWorkItem>, detail::kMaxTileClasses> items;
  std::vector<ClaMergeItem> merges(to_size(plan.counts().num_merges));
  PagedStepView step;
  step.kernels = kernels.get();
  step.planner = &planner;
  step.planned = plan.counts();
  step.plan.merges = merges;
  for (std::size_t i = 0; i < items.size(); ++i) {
    items.at(i).resize(to_size(plan.counts().num_items.at(i)));
    step.plan.items.at(i) = items.at(i);
  }
  std::vector<ClaListedRow> listed(to_size(plan.counts().num_listed));
  step.plan.listed = listed;
  std::vector<std::int32_t> gap_rows(to_size(plan.counts().num_gap_ints));
  step.plan.gap_rows = gap_rows;
  plan.write(std::vector<std::int32_t>(to_size(batch.num_reqs)), step.plan);
  return launches_of(step);
}

}  // namespace clattn
