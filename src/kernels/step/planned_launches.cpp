#include <algorithm>
#include <clattn/attention.hpp>
#include <vector>

#include "kernels/step/paged_step.hpp"

namespace clattn {
namespace {

using detail::BuiltKernel;
using detail::PagedStepView;
using detail::TaskRun;
using detail::TileClass;

constexpr double kUsPerNs = 1e-3;

PlannedLaunch planned_attention(const PagedStepView& step, std::size_t index) {
  const TileClass& tile = step.planner->tiles.at(index);
  const auto items =
      step.plan.items.at(index).first(static_cast<std::size_t>(step.planned.num_items.at(index)));
  PlannedLaunch launch;
  launch.kernel = step.kernels->stages.at(index).variant->name;
  launch.items = static_cast<std::int64_t>(items.size());
  launch.tasks = launch.items * tile.groups_per_item;
  launch.concurrent_groups = tile.workers;
  std::vector<TaskRun> runs;
  runs.reserve(items.size());
  double shared = 0;
  for (const ClaWorkItem& item : items) {
    const bool is_split = item.partial_row >= 0;
    const double keys = item.kv_end - item.kv_begin;
    const double ns = task_ns(tile, keys, item.q_count, is_split);
    runs.push_back({ns, tile.groups_per_item});
    shared += keys_ns(tile, keys, item.q_count) * tile.groups_per_item;
    if (is_split) ++launch.splits;
    if (is_split && item.split == 0) ++launch.split_tiles;
  }
  std::ranges::sort(runs, [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
  launch.predicted_us = (tile.launch_ns + expected_end_ns(tile, runs, shared)) * kUsPerNs;
  return launch;
}

PlannedLaunch planned_merge(const PagedStepView& step) {
  const detail::MergeCosts& costs = step.planner->merge;
  const BuiltKernel& merge = step.kernels->merge;
  PlannedLaunch launch;
  launch.kernel = merge.variant->name;
  launch.items = step.planned.num_merges;
  launch.tasks = launch.items * step.kernels->shape.num_heads;
  for (std::int32_t i = 0; i < step.planned.num_merges; ++i) {
    launch.splits += step.plan.merges[static_cast<std::size_t>(i)].num_splits;
  }
  launch.predicted_us = (costs.launch_ns + merge_ns(costs, static_cast<double>(launch.items),
                                                    static_cast<double>(launch.splits))) *
                        kUsPerNs;
  return launch;
}

}  // namespace

std::vector<PlannedLaunch> planned_launches(const AttentionMetadata& metadata) {
  const PagedStepView* step = metadata.step();
  std::vector<PlannedLaunch> launches;
  if (step == nullptr || step->kernels == nullptr) return launches;
  for (std::size_t i = 0; i < step->kernels->stages.size(); ++i) {
    if (step->planned.num_items.at(i) > 0) launches.push_back(planned_attention(*step, i));
  }
  if (step->planned.num_merges > 0) launches.push_back(planned_merge(*step));
  return launches;
}

}  // namespace clattn
