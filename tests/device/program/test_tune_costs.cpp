// What `clattn tune` measures of kernels' costs, on the devices of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "program/tune/costs.hpp"

namespace test_tune_costs {

using clattn::AttentionConfig;
using clattn::CostRow;
using clattn::KernelCosts;
using clattn::KernelInfo;
using clattn::cli::CostBatch;
using clattn::cli::CostBench;
using clattn::cli::CostLaunch;
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
    EXPECT_TRUE(measured.left_out.empty()) << testing::PrintToString(measured.left_out);
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

/// Launches the kernels as they are, but reports the times that known costs predict.
class KnownCosts : public CostBench {
 public:
  static constexpr KernelCosts kDecode{
      .launch_us = 20, .task_us = 4, .split_us = 2, .read_gbs = 5, .math_gflops = 40, .groups = 8};
  static constexpr KernelCosts kPrefill{
      .launch_us = 25, .task_us = 9, .split_us = 3, .read_gbs = 90, .math_gflops = 30, .groups = 0};

  using CostBench::CostBench;

  /// Of the merge of so many rows, on all groups together.
  static double merge_us(double rows, int splits) { return 0.02 * rows * (1 + splits); }

  std::vector<CostLaunch> launches(const CostBatch& batch) override {
    std::vector<CostLaunch> launches = CostBench::launches(batch);
    if (counting_tasks_) return launches;
    launches.at(0).event_us = stage_us(launches[0].kernel, batch);
    const double rows = static_cast<double>(batch.requests) * batch.query_len * config().num_heads;
    if (launches.size() > 1) launches[1].event_us = merge_us(rows, batch.splits);
    return launches;
  }
  /// Like a clock with an error of 1 %.
  std::vector<double> time_us(std::span<const CostBatch> batches) override {
    std::vector<double> times;
    for (const CostBatch& batch : batches) {
      double time = 0;
      for (const CostLaunch& launch : launches(batch)) time += launch.event_us;
      times.push_back(time * (times.size() % 2 == 0 ? 1.01 : 0.99));
    }
    return times;
  }

 private:
  double stage_us(std::string_view name, const CostBatch& batch) {
    const auto kernels = this->kernels();
    const auto kernel = std::ranges::find(kernels, name, &KernelInfo::name);
    struct Counting {
      bool& flag;
      ~Counting() { flag = false; }
    };
    const Counting counting{counting_tasks_ = true};
    const CostTasks tasks = tasks_of(*this, *kernel, batch.query_len);
    return predicted_us(kernel->role == "decode" ? kDecode : kPrefill, tasks, batch);
  }

  bool counting_tasks_ = false;
};

/// The merge's measured costs predict the time of so many rows.
void expect_merge(const KernelCosts& costs, const KernelInfo& merge, const AttentionConfig& config,
                  double rows, int splits) {
  const double split_bytes = 4.0 * config.output_head_size() + 4;
  const double groups = std::max(merge.concurrent_groups, 1);
  const double predicted =
      rows / groups * (costs.task_us + splits * split_bytes / costs.read_gbs * 1e-3);
  const double given = KnownCosts::merge_us(rows, splits);
  EXPECT_NEAR(predicted, given, 0.05 * given) << merge.name;
}

// How well costs fit a real clock is what `clattn bench --plan` prints beside each time.
TEST(TuneCosts, PredictAHeldOutBatch) {
  const auto context = clattn::Context::create();
  AttentionConfig lone = layer();  // one tile of it is one task
  lone.num_heads /= std::exchange(lone.num_kv_heads, 1);
  const MeasuredCosts measured =
      measure_costs(context, layer(), any_role,
                    [](std::shared_ptr<clattn::Context> on, const AttentionConfig& config) {
                      return std::make_unique<KnownCosts>(std::move(on), config);
                    });
  for (const auto& [config, batch] :
       std::vector<std::pair<AttentionConfig, CostBatch>>{{layer(), {6, 1, 1200}},
                                                          {lone, {3, 1, 5000}},
                                                          {lone, {2, 1, 4800, 3}},
                                                          {lone, {1, 40, 900}},
                                                          {lone, {1, 40, 4800, 3}}}) {
    KnownCosts held_out(context, config);
    const std::vector<CostLaunch> launches = held_out.launches(batch);
    const auto kernels = held_out.kernels();
    const auto named = [&](const std::string& name) {
      return std::ranges::find(kernels, name, &KernelInfo::name);
    };
    const CostLaunch& launch = launches.at(0);
    const KernelCosts* const costs = costs_of(measured, launch.kernel);
    ASSERT_NE(costs, nullptr) << launch.kernel;
    const CostTasks tasks = tasks_of(held_out, *named(launch.kernel), batch.query_len);
    EXPECT_NEAR(predicted_us(*costs, tasks, batch), launch.event_us, 0.05 * launch.event_us)
        << launch.kernel << ", splits " << batch.splits;
    if (launches.size() < 2) continue;
    const KernelCosts* const merge = costs_of(measured, launches[1].kernel);
    ASSERT_NE(merge, nullptr) << launches[1].kernel;
    expect_merge(*merge, *named(launches[1].kernel), config,
                 static_cast<double>(batch.requests) * batch.query_len * config.num_heads,
                 batch.splits);
  }
}

/// A bench that, like plans with a wide tile, sends prompts to another kernel unless a tuning row
/// names the layer's.
class RowedPrompts : public KnownCosts {
 public:
  RowedPrompts(std::shared_ptr<clattn::Context> on, const AttentionConfig& config)
      : KnownCosts(on, config), has_row_(names_prompts(on, config)) {}
  std::vector<CostLaunch> launches(const CostBatch& batch) override {
    if (has_row_) return KnownCosts::launches(batch);
    std::vector<CostLaunch> launches = CostBench::launches(batch);
    if (launches.at(0).kernel != prompts_kernel()) return KnownCosts::launches(batch);
    launches[0].kernel = "another";
    return launches;
  }
  std::string prompts_kernel() const {
    const auto kernels = this->kernels();
    return std::ranges::find(kernels, "prefill", &KernelInfo::role)->name;
  }

 private:
  static bool names_prompts(const std::shared_ptr<clattn::Context>& on,
                            const AttentionConfig& config) {
    const auto impl = clattn::get_attn_backend(config, &on->capabilities())->make_impl(on, config);
    return std::ranges::any_of(impl->candidates(), [](const clattn::Candidate& candidate) {
      return candidate.role == "prefill" && candidate.reason == "tuned";
    });
  }
  bool has_row_;
};

TEST(TuneCosts, AKernelThatPlansPassOverIsMeasuredUnderATuningRow) {
  const auto context = clattn::Context::create();
  const MeasuredCosts measured =
      measure_costs(context, layer(), any_role,
                    [](std::shared_ptr<clattn::Context> on, const AttentionConfig& config) {
                      return std::make_unique<RowedPrompts>(std::move(on), config);
                    });
  EXPECT_TRUE(measured.left_out.empty()) << testing::PrintToString(measured.left_out);
  const std::string kernel = RowedPrompts(context, layer()).prompts_kernel();
  EXPECT_NE(costs_of(measured, kernel), nullptr) << kernel;
}

}  // namespace test_tune_costs
