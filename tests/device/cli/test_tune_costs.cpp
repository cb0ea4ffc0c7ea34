// What `clattn tune` measures of kernels' costs, on the devices of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cli/tune/costs.hpp"

namespace {

using clattn::AttentionConfig;
using clattn::CostRow;
using clattn::KernelCosts;
using clattn::KernelInfo;
using clattn::cli::CostBatch;
using clattn::cli::CostBench;
using clattn::cli::CostTasks;
using clattn::cli::measure_costs;
using clattn::cli::MeasuredCosts;
using clattn::cli::predicted_us;
using clattn::cli::tasks_of;

AttentionConfig layer() {
  AttentionConfig config;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.block_size = 16;
  return config;
}

bool any_role(std::string_view) {
  return true;
}

const KernelCosts* costs_of(const MeasuredCosts& measured, std::string_view kernel) {
  const auto row = std::find_if(measured.rows.begin(), measured.rows.end(),
                                [&](const CostRow& other) { return other.kernel == kernel; });
  return row == measured.rows.end() ? nullptr : &row->costs;
}

// Predictions are arithmetic: tasks in turns, and what those at work slow each other down by.
TEST(TuneCosts, PredictionsCountTurnsAndWhatGroupsShare) {
  const CostTasks tasks{
      .each_tile = 2, .key_bytes = 1000, .rows_each_token = 4, .flops_each = 500, .concurrent = 8};
  const KernelCosts costs{
      .launch_us = 5, .task_us = 2, .split_us = 1, .read_gbs = 10, .math_gflops = 100, .groups = 4};
  // A key: 0.1 us to read, 0.02 us for each of the tokens to multiply.
  EXPECT_DOUBLE_EQ(predicted_us(costs, tasks, {1, 1, 100}), 5 + 2 + 12 + 2 * 3);
  EXPECT_DOUBLE_EQ(predicted_us(costs, tasks, {1, 5, 100}), 5 + 2 + 20 + 2 * 5);
  // 8 tasks run at once; 4 take twice as long each as one alone, so 8 three times.
  EXPECT_DOUBLE_EQ(predicted_us(costs, tasks, {4, 1, 100}), 5 + 2 + 3 * 12);
  EXPECT_DOUBLE_EQ(predicted_us(costs, tasks, {5, 1, 100}), 5 + 2 * 2 + 2 * 12 + 10 * 3);
  EXPECT_DOUBLE_EQ(predicted_us(costs, tasks, {1, 1, 100, 2}), 5 + 2 + 1 + 6 + 4 * 1.5);
  EXPECT_DOUBLE_EQ(predicted_us({.launch_us = 1, .math_gflops = 100}, tasks, {1, 2, 100}), 1 + 4);
}

TEST(TuneCosts, AreOfEveryKernelThatPlansCutFor) {
  for (const clattn::Device& device : clattn::list_devices()) {
    const auto context = clattn::Context::create(device);
    const MeasuredCosts measured = measure_costs(context, layer(), any_role);
    EXPECT_EQ(measured.left_out, std::vector<std::string>{});
    for (const KernelInfo& kernel : CostBench(context, layer()).kernels()) {
      if (kernel.role == "cache" || kernel.role == "merge") continue;
      const KernelCosts* const costs = costs_of(measured, kernel.name);
      ASSERT_NE(costs, nullptr) << kernel.name;
      EXPECT_GT(costs->launch_us, 0) << kernel.name;
      EXPECT_GT(costs->task_us, 0) << kernel.name;
      EXPECT_GT(costs->split_us, 0) << kernel.name;
      EXPECT_GT(costs->read_gbs + costs->math_gflops, 0) << kernel.name;
      EXPECT_GE(costs->groups, 0) << kernel.name;
    }
    clattn::set_tuning(*context, {}, measured.rows);  // each can be followed
    for (const CostRow& row : measured.rows) {
      EXPECT_EQ(row.device, context->capabilities().name);
      EXPECT_EQ(row.driver, context->capabilities().driver_version);
      EXPECT_EQ(row.head_size, 64);
      EXPECT_EQ(row.group, 4);
      EXPECT_EQ(row.cache_dtype, layer().dtype);
    }
  }
}

TEST(TuneCosts, AreOfTheWantedRolesAlone) {
  const auto context = clattn::Context::create();
  const MeasuredCosts measured =
      measure_costs(context, layer(), [](std::string_view role) { return role == "mla_decode"; });
  EXPECT_TRUE(measured.rows.empty() && measured.left_out.empty());
}

/// A batch that nothing is fitted to, and what it takes.
class HeldOut {
 public:
  HeldOut(const std::shared_ptr<clattn::Context>& context, const AttentionConfig& config,
          const CostBatch& batch)
      : bench_(context, config), batch_(batch), kernel_(bench_.launches(batch).at(0).kernel) {}

  double time_us() { return bench_.time_us(std::array{batch_}).front(); }
  double predict_us(const MeasuredCosts& measured) {
    for (const KernelInfo& kernel : bench_.kernels()) {
      if (kernel.name != kernel_) continue;
      const KernelCosts* const costs = costs_of(measured, kernel_);
      if (costs == nullptr) break;
      return predicted_us(*costs, tasks_of(bench_, kernel, batch_.query_len), batch_);
    }
    return INFINITY;
  }

 private:
  CostBench bench_;
  CostBatch batch_;
  std::string kernel_;
};

// An attempt counts while the machine's other jobs leave it as fast at its end as at its start.
TEST(TuneCosts, PredictAHeldOutBatch) {
  constexpr int kAttempts = 6;
  constexpr double kMostOff = 0.3, kSteady = 0.1;
  const auto context = clattn::Context::create();
  std::string disturbed;
  AttentionConfig lone = layer();  // one tile of it is one task
  lone.num_heads /= std::exchange(lone.num_kv_heads, 1);
  for (auto& [name, config, batch] :
       std::vector<std::tuple<std::string, AttentionConfig, CostBatch>>{
           {"decode", layer(), {6, 1, 1200}}, {"prefill", lone, {1, 40, 900}}}) {
    HeldOut held_out(context, config, batch);
    int steady = 0;
    double off = INFINITY;
    for (int attempt = 0; attempt < kAttempts && off > kMostOff; ++attempt) {
      const double before = held_out.time_us();
      const MeasuredCosts measured =
          measure_costs(context, layer(), [&](std::string_view role) { return role == name; });
      const double after = held_out.time_us();
      if (std::abs(after / before - 1) > kSteady) continue;
      ++steady;
      off = std::min(off, std::abs(held_out.predict_us(measured) / ((before + after) / 2) - 1));
    }
    if (steady < 2 && off > kMostOff) {
      disturbed += " " + name;
      continue;
    }
    EXPECT_LE(off, kMostOff) << name;
  }
  if (!disturbed.empty()) GTEST_SKIP() << "other jobs disturb this machine too much:" << disturbed;
}

}  // namespace
