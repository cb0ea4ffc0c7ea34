#pragma once

// Which kernels a layer runs on, and why: for reports.

#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace CLATTN_API clattn {

/// A kernel that an impl launches, for reports.
struct KernelInfo {
  std::string name = {};             ///< variant, XNNPACK-style: what__how
  std::string role = {};             ///< "decode", "prefill", "merge" or "cache"
  std::int32_t work_group_size = 0;  ///< work-items
  std::int32_t block_rows = 0;       ///< query rows (tokens x heads of a KV head) per work item
  std::int32_t block_kv = 0;         ///< keys per tile
  /// Whether probabilities are rounded to the queries' type before they meet V, as matrix units and
  /// products of bf16 pairs require; the other kernels keep them in f32.
  bool rounds_probabilities = false;
  std::int32_t concurrent_groups = 0;  ///< work-groups that the planner assumes to run at once
  /// Work items of up to this many query rows have their own costs (`few:` rows of a tuning file);
  /// 0 = none have.
  std::int32_t few_rows = 0;
};

/// One launch of a forward(), for reports: which kernel ran over how many work-groups.
struct LaunchRecord {
  std::string_view kernel = {};  ///< KernelInfo::name; valid while the impl lives
  /// Tasks that the groups share: as many as groups, or more if groups are persistent.
  std::int64_t tasks = 0;
  std::int64_t work_groups = 0;       ///< groups that were launched
  std::int32_t work_group_size = 0;   ///< work-items
  bool rounds_probabilities = false;  ///< see KernelInfo
  bool multiplies_fp8 = false;        ///< as AttentionConfig::fp8_products says
  Event event = {};                   ///< completes with the launch
  bool beside_last = false;           ///< it runs with the launch before it, not after it
};

/// A backend or a kernel that was considered for a layer, and what became of it.
struct Candidate {
  std::string role = {};    ///< "backend", or a kernel's, as KernelInfo::role
  std::string name = {};    ///< of the backend or the kernel
  bool chosen = false;      ///< whether the layer runs on it
  std::string reason = {};  ///< why it was not chosen; otherwise empty, or "tuned"
};
/// A line for each, in columns.
std::string to_string(std::span<const Candidate> candidates);

/// One launch of a forward() as the step's plan has it, in the order of the launches.
struct PlannedLaunch {
  std::string kernel = {};       ///< KernelInfo::name
  std::int64_t items = 0;        ///< work items (a tile or split each); for a merge, query tokens
  std::int64_t tasks = 0;        ///< as LaunchRecord::tasks; for a merge, heads times query tokens
  std::int64_t split_tiles = 0;  ///< tiles whose keys are split
  std::int64_t splits = 0;       ///< their splits; for a merge, partial rows to merge
  std::int32_t concurrent_groups = 0;  ///< work-groups assumed to run at once; 0 for a merge
  double predicted_us = 0;             ///< when it runs in a queue of launches
  bool beside_last = false;            ///< it runs with the launch before it, not after it
};
/// The launches of a step's plan, each with the time predicted from the costs of the tuning
/// database (docs/performance.md). Empty if the metadata has no plan of this library. The metadata
/// must be the last that its builder made.
std::vector<PlannedLaunch> planned_launches(const AttentionMetadata& metadata);

}  // namespace clattn
