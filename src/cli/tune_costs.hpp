#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/cost_bench.hpp"

namespace clattn::cli {

/// What the tasks of a kernel have to do under a layer, as plans count it.
struct CostTasks {
  std::int64_t each_tile = 1;   ///< tasks that one tile of queries, or piece of one, becomes
  double key_bytes = 0;         ///< keys and values of one key, of the KV heads of a task
  double rows_each_token = 0;   ///< query rows of a task, for each of its tokens
  double flops_each = 0;        ///< of one key and row
  std::int32_t concurrent = 1;  ///< KernelInfo::concurrent_groups
};

/// Microseconds that a launch of a kernel is counted for: its tasks one after another in as many
/// groups as run at once, and what these slow each other down by.
double predicted_us(const KernelCosts& costs, const CostTasks& tasks, const CostBatch& batch);

/// What kernels cost under a layer shape, and those that could not be measured, each with why.
struct MeasuredCosts {
  std::vector<CostRow> rows;
  std::vector<std::string> left_out;
};

/// Which kernels to measure, by KernelInfo::role.
using WantsRole = std::function<bool(std::string_view role)>;

/// Measures the costs of a layer's attention kernels, as they are under the context's tuning: of
/// each stage of a wanted role, and of the merge where such a stage does not join its own splits.
/// Rows name device, driver and the whole shape; who writes them down adds version and date.
MeasuredCosts measure_costs(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                            const WantsRole& wants);

/// The tasks of the stage that takes queries of `query_len` tokens.
CostTasks tasks_of(CostBench& bench, const KernelInfo& kernel, std::int32_t query_len);

}  // namespace clattn::cli
