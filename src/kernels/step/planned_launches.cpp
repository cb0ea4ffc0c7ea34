#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/tuning.hpp>
#include <vector>

#include "base/error.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/choose/latent_config.hpp"
#include "kernels/step/paged_step.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn {
namespace {

using detail::AttentionKernels, detail::PagedStepView, detail::PlanCounts, detail::PlannerConfig;
using detail::PlanOutput, detail::TaskRun, detail::TileClass;

constexpr double kUsPerNs = 1e-3;

/// A plan, the kernels that it is for, and the configuration that it was made with.
struct MadePlan {
  const AttentionKernels& kernels;
  const PlannerConfig& planner;
  const PlanCounts& counts;
  const PlanOutput& output;
};

PlannedLaunch planned_attention(const MadePlan& plan, std::size_t index) {
  TileClass tile = plan.planner.tiles.at(index);
  if (plan.counts.workers.at(index) > 0) tile.workers = plan.counts.workers.at(index);
  const auto items =
      plan.output.items.at(index).first(static_cast<std::size_t>(plan.counts.num_items.at(index)));
  PlannedLaunch launch;
  launch.kernel = plan.kernels.stages.at(index).variant->name;
  launch.items = static_cast<std::int64_t>(items.size());
  launch.tasks = launch.items * tile.groups_per_item;
  launch.concurrent_groups = tile.workers;
  std::vector<TaskRun> runs;
  runs.reserve(items.size());
  double shared = 0;
  for (const ClaWorkItem& item : items) {
    const double keys = item.kv_end - item.kv_begin;
    const bool is_split = item.partial_row >= 0 && keys > 0;
    const double ns = task_ns(tile, keys, item.q_count, is_split);
    runs.push_back({ns, tile.groups_per_item});
    shared += keys_ns(tile, keys, item.q_count) * tile.groups_per_item;
    if (is_split) ++launch.splits;
    if (is_split && item.split == 0) ++launch.split_tiles;
  }
  std::ranges::sort(runs, [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
  launch.predicted_us = (tile.launch_ns + expected_end_ns(tile, runs, shared)) * kUsPerNs;
  if (plan.counts.workers.at(index) > 0) launch.predicted_us *= detail::kBesideSlower;
  return launch;
}

PlannedLaunch planned_merge(const MadePlan& plan) {
  const detail::MergeCosts& costs = plan.planner.merge;
  PlannedLaunch launch;
  launch.kernel = plan.kernels.merge.variant->name;
  launch.items = plan.counts.num_merges;
  launch.tasks = launch.items * plan.kernels.shape.num_heads;
  for (std::int32_t i = 0; i < plan.counts.num_merges; ++i) {
    launch.splits += plan.output.merges[static_cast<std::size_t>(i)].num_splits;
  }
  launch.predicted_us = (costs.launch_ns + merge_ns(costs, static_cast<double>(launch.items),
                                                    static_cast<double>(launch.splits))) *
                        kUsPerNs;
  return launch;
}

std::vector<PlannedLaunch> launches_of(const MadePlan& plan) {
  std::vector<PlannedLaunch> launches;
  for (std::size_t i = 0; i < plan.kernels.stages.size(); ++i) {
    if (plan.counts.num_items.at(i) == 0) continue;
    launches.push_back(planned_attention(plan, i));
    launches.back().beside_last = launches.size() > 1 && plan.counts.workers.at(i) > 0;
  }
  if (plan.counts.num_merges > 0) launches.push_back(planned_merge(plan));
  return launches;
}

}  // namespace

std::vector<PlannedLaunch> planned_launches(const AttentionMetadata& metadata) {
  const PagedStepView* step = metadata.step();
  if (step == nullptr || step->kernels == nullptr) return {};
  return launches_of({*step->kernels, *step->planner, step->planned, step->plan});
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
  const detail::TuningTable table({.costs = {costs.begin(), costs.end()}});
  const auto kernels =
      detail::imagined_kernels({device, table}, detail::kernel_shape(config), config.kernel_family);
  PlannerConfig planner = kernels->planner;
  planner.window = detail::window_of(config);
  planner.max_partial_rows = detail::most_partial_rows(kernels->shape, device);
  const detail::AttentionPlan plan(planner, batch);
  std::array<std::vector<ClaWorkItem>, detail::kMaxTileClasses> items;
  std::vector<ClaMergeItem> merges(static_cast<std::size_t>(plan.counts().num_merges));
  PlanOutput output;
  output.merges = merges;
  for (std::size_t i = 0; i < items.size(); ++i) {
    items.at(i).resize(static_cast<std::size_t>(plan.counts().num_items.at(i)));
    output.items.at(i) = items.at(i);
  }
  plan.write(std::vector<std::int32_t>(static_cast<std::size_t>(batch.num_reqs)), output);
  return launches_of({*kernels, planner, plan.counts(), output});
}

}  // namespace clattn
