#pragma once

#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/tune/cost_bench.hpp"

namespace clattn::cli {

/// The tasks of a kernel for one layer shape, as the planner counts them.
struct CostTasks {
  std::int64_t each_tile = 1;   ///< tasks per tile of queries, or per split of one
  double key_bytes = 0;         ///< bytes of one key and its value, for all KV heads of a task
  double rows_each_token = 0;   ///< query rows of a task per query token
  double flops_each = 0;        ///< per key and query row
  std::int32_t concurrent = 1;  ///< KernelInfo::concurrent_groups
};

/// Predicted microseconds of a launch: its tasks in waves of the groups that run at once, plus the
/// slowdown of these groups by each other.
double predicted_us(const KernelCosts& costs, const CostTasks& tasks, const CostBatch& batch);

/// Costs of the kernels of a layer shape, and each kernel that could not be measured, with why.
struct MeasuredCosts {
  std::vector<CostRow> rows;
  std::vector<std::string> left_out;
};

/// Which kernels to measure, by KernelInfo::role.
using WantsRole = std::function<bool(std::string_view role)>;

/// Makes the bench of a layer; if empty, a CostBench is used.
using MakeCostBench = std::function<std::unique_ptr<CostBench>(const AttentionConfig& config)>;

/// Measures the attention kernels of a layer under the context's tuning: each stage of a wanted
/// role, and the merge if such a stage does not merge its own splits. Rows name device, driver and
/// the whole shape; the caller adds version and date.
MeasuredCosts measure_costs(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                            const WantsRole& wants, const MakeCostBench& make_bench = {});

/// The layer with another number of KV heads and as many query heads for each.
AttentionConfig with_kv_heads(AttentionConfig config, std::int32_t num_kv_heads);

/// The tasks of the stage that takes queries of `query_len` tokens.
CostTasks tasks_of(CostBench& bench, const KernelInfo& kernel, std::int32_t query_len);

}  // namespace clattn::cli
