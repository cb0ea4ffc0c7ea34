// What a step computes does not depend on how its plan cuts it, and a plan follows what kernels
// cost.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <optional>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/costs_of_all.hpp"
#include "device/forced_variant.hpp"
#include "device/mla_case.hpp"
#include "kernels/choose/variants.hpp"

namespace test_plans {

using attention_test::all_contexts;
using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::describe;
using attention_test::run_case;
using clattn::KernelFamily;
using test::CostsOfAll;
using test::kCutsCostAll;
using test::kCutsCostNothing;

std::vector<CaseSpec> specs(KernelFamily family) {
  CaseSpec decodes;
  decodes.config = attention_test::small_config();
  decodes.config.kernel_family = family;
  decodes.requests = {{1, 700, 1}, {1, 5, 2}, {1, 90, 3}};
  CaseSpec mixed = decodes;
  mixed.requests.insert(mixed.requests.end(), {{3, 200, 4}, {70, 300, 5}, {33, 0, 6}});
  CaseSpec windowed = mixed;
  windowed.config.sliding_window = 150;
  return {decodes, mixed, windowed};
}

std::int64_t all_tasks(const CaseResult& result) {
  std::int64_t tasks = 0;
  for (const std::int64_t each : result.tasks) tasks += each;
  return tasks;
}

class Plans : public testing::TestWithParam<KernelFamily> {};

// Each is also judged by the oracle, by run_case().
TEST_P(Plans, AnyCutsComputeTheSame) {
  for (const auto& context : all_contexts()) {
    std::int64_t more_tasks = 0;
    for (const CaseSpec& spec : specs(GetParam())) {
      SCOPED_TRACE(describe(spec));
      CaseResult whole, cut;
      {
        const CostsOfAll costs(*context, kCutsCostAll);
        whole = run_case(context, spec);
      }
      {
        const CostsOfAll costs(*context, kCutsCostNothing);
        cut = run_case(context, spec);
      }
      for (const CaseResult* result : {&whole, &cut}) {
        EXPECT_LE(result->worst_share, 1) << result->worst_place;
        EXPECT_EQ(result->fault, "");
      }
      more_tasks += all_tasks(cut) - all_tasks(whole);
      ASSERT_EQ(whole.out.size(), cut.out.size());
      for (std::size_t i = 0; i < cut.out.size(); ++i) {
        EXPECT_NEAR(whole.out[i], cut.out[i], 4e-3) << i;
      }
      for (std::size_t i = 0; i < cut.lse.size(); ++i) {
        if (whole.lse[i] != cut.lse[i]) {  // infinities among them
          EXPECT_NEAR(whole.lse[i], cut.lse[i], 1e-4) << i;
        }
      }
    }
    if (context->capabilities().compute_units > 1) {
      EXPECT_GT(more_tasks, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Plans, testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

/// Kernels whose work-groups stay for many tasks, also where a CPU's runtime has sub-groups for
/// them; none where the device has no such kernels.
std::optional<KernelFamily> persistent_family(const clattn::Context& context) {
  const clattn::DeviceCapabilities& device = context.capabilities();
  if (device.kind != clattn::DeviceKind::kCpu) return KernelFamily::kAuto;
  if (clattn::detail::unmet_need(KernelFamily::kGpuPtx, device)) return {};
  return KernelFamily::kGpuPtx;
}

/// Costs under which decode waits for memory, and other launches beside it always seem to pay.
CostsOfAll costs_of_pairs(clattn::Context& context) {
  constexpr clattn::KernelCosts kAny{
      .launch_us = 1e4, .task_us = 1e-3, .split_us = 1, .read_gbs = 1e3};
  clattn::CostRow decode;
  decode.device = "gpu";
  decode.kernel = "decode_ring__r8";
  decode.costs = kAny;
  decode.costs.groups = 1;
  return {context, kAny, {decode}};
}

TEST(Plans, LaunchesBesideEachOtherComputeTheSame) {
  bool any = false;
  for (const auto& context : all_contexts()) {
    const auto family = persistent_family(*context);
    if (!family || context->capabilities().compute_units < 2) continue;
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.config.kernel_family = *family;
    spec.config.head_size = 128;
    spec.requests = {{1, 700}, {1, 5}, {1, 90}, {1, 333}, {3, 200}, {4, 61}, {5, 0}};
    const CostsOfAll costs = costs_of_pairs(*context);
    const CaseResult beside = run_case(context, spec);
    spec.side_by_side = false;
    const CaseResult in_turn = run_case(context, spec);
    EXPECT_FALSE(in_turn.beside);
    for (const CaseResult* result : {&beside, &in_turn}) {
      EXPECT_LE(result->worst_share, 1) << result->worst_place;
      EXPECT_EQ(result->fault, "");
    }
    if (!beside.beside) continue;  // a device without decode_ring.cl
    any = true;
    EXPECT_LE(beside.work_groups.at(0) + beside.work_groups.at(1),
              context->capabilities().compute_units);
    ASSERT_EQ(beside.out.size(), in_turn.out.size());
    for (std::size_t i = 0; i < beside.out.size(); ++i)
      EXPECT_NEAR(beside.out[i], in_turn.out[i], 4e-3) << i;
  }
  if (!any) GTEST_SKIP() << "no device here has kernels whose work-groups stay";
}

/// Costs under which a task, or a split, takes as long as about 40 keys of 512 bytes, so that the
/// keys of long requests take most of the time.
constexpr clattn::KernelCosts kKeysCostMost{.task_us = 2e4, .split_us = 2e4, .read_gbs = 1e-3};

/// Whether a device has a kernel of the role whose cuts may be rebalanced, and enough groups.
bool may_be_rebalanced(const clattn::Context& context, clattn::detail::Role role) {
  const clattn::DeviceCapabilities& device = context.capabilities();
  return device.compute_units >= 32 &&
         std::ranges::any_of(clattn::detail::variants(), [&](const auto& variant) {
           return variant.role == role && variant.kernel().ends_at_padding &&
                  clattn::detail::why_not(variant, device).empty();
         });
}

/// Whether cuts of requests that do not divide evenly among persistent groups are rebalanced. On
/// 132 compute units they must be: the requests were chosen for that.
bool is_rebalanced(const clattn::Context& context, bool rebalanced) {
  EXPECT_TRUE(rebalanced || context.capabilities().compute_units != 132);
  return rebalanced;
}

// With 8 KV heads ranges of keys move from groups with more requests to those with fewer, on 132
// compute units with padding in the list. run_case() judges the outputs by the oracle.
TEST(Plans, RebalancedCutsComputeTheSame) {
  bool any = false;
  for (const auto& context : all_contexts()) {
    if (!may_be_rebalanced(*context, clattn::detail::Role::kDecode)) continue;
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.config.kernel_family = KernelFamily::kGpuPtx;
    spec.config.head_size = 128;
    spec.config.num_heads = 16;
    spec.config.num_kv_heads = 8;
    for (std::int32_t i = 0; i < 19; ++i) spec.requests.push_back({1, 2000 + 100 * i});
    const CostsOfAll costs(*context, kKeysCostMost);
    const CaseResult rebalanced = run_case(context, spec);
    spec.num_splits = 1;
    const CaseResult whole = run_case(context, spec);
    for (const CaseResult* result : {&rebalanced, &whole}) {
      EXPECT_LE(result->worst_share, 1) << result->worst_place;
      EXPECT_EQ(result->fault, "");
    }
    if (!is_rebalanced(*context, rebalanced.rebalanced)) continue;
    any = true;
    ASSERT_EQ(rebalanced.out.size(), whole.out.size());
    for (std::size_t i = 0; i < rebalanced.out.size(); ++i)
      EXPECT_NEAR(rebalanced.out[i], whole.out[i], 4e-3) << i;
  }
  if (!any) GTEST_SKIP() << "no device here has kernels that rebalanced cuts are for";
}

// The same where a launch of its own merges what was cut; mla_test::run() judges by the oracle.
TEST(Plans, RebalancedLatentCutsComputeTheSame) {
  bool any = false;
  for (const auto& context : all_contexts()) {
    if (!may_be_rebalanced(*context, clattn::detail::Role::kMLADecode)) continue;
    mla_test::Case c = mla_test::small_case(clattn::DType::kBF16);
    c.config.num_heads = 64;
    c.config.kv_lora_rank = mla_test::kTiledRow.rank;
    c.config.rope_dim = mla_test::kTiledRow.rope;
    c.requests.clear();
    for (std::int32_t i = 0; i < 40; ++i) c.requests.push_back({1, 1000 + 50 * i});
    const CostsOfAll costs(*context, kKeysCostMost);
    const mla_test::Outcome rebalanced = mla_test::run(context, c);
    c.num_splits = 1;
    const mla_test::Outcome whole = mla_test::run(context, c);
    if (!is_rebalanced(*context, rebalanced.rebalanced)) continue;
    any = true;
    EXPECT_EQ(rebalanced.kernels.size(), 2U) << "the second merges";
    EXPECT_EQ(whole.kernels.size(), 1U);
  }
  if (!any) GTEST_SKIP() << "no device here has kernels that rebalanced cuts are for";
}

/// Requests of nine tokens, cut into as many splits as they have pages of a token, up to 40: fewer
/// than a work-item of merge.cl reads alone, as many, and more, by parts that differ in length.
CaseSpec many_and_few_splits() {
  CaseSpec spec;
  spec.config = attention_test::small_config();
  spec.config.block_size = 1;
  spec.config.num_heads = 30;
  spec.config.head_size = 40;
  spec.num_splits = 40;
  for (const std::int32_t context_len : {91, 0, 1, 3, 4, 7, 14, 33}) {
    const auto identity = static_cast<std::uint32_t>(spec.requests.size() + 1);
    spec.requests.push_back({9, context_len, identity});
  }
  return spec;
}

// Also where a row sees an infinite key and value, and with groups of 32 work-items.
TEST(Plans, ManyAndFewSplitsAreMergedTogether) {
  using clattn::detail::Variant;
  for (const auto& context : all_contexts()) {
    for (const Variant& variant : clattn::detail::variants()) {
      if (variant.role != clattn::detail::Role::kMerge ||
          !clattn::detail::why_not(variant, context->capabilities()).empty())
        continue;
      const attention_test::ForcedVariants forced(context, {&variant});
      for (const bool overflows : {false, true}) {
        CaseSpec spec = many_and_few_splits();
        spec.config.kernel_family = variant.family();
        spec.last_token_overflows = overflows;
        const CaseResult result = run_case(context, spec);
        EXPECT_EQ(result.fault, "");
        EXPECT_LE(result.worst_share, 1) << variant.name << ' ' << result.worst_place;
        EXPECT_EQ(result.kernels.back(), variant.name);
      }
    }
  }
}

// Every tile in two splits; run_case() holds plans against launches.
TEST(Plans, TellTheLaunchesOfAStep) {
  for (const auto& context : all_contexts()) {
    const clattn::AttentionConfig config = attention_test::small_config();
    const clattn::AttentionBackend& backend = *clattn::get_attn_backend(config, nullptr);
    const clattn::Queue queue = context->create_queue();
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 2, .max_num_batched_tokens = 64, .max_model_len = 64};
    options.num_splits = 2;
    const auto builder = backend.make_builder(context, config, options);
    const std::vector<std::int32_t> starts = {0, 1, 41};
    const std::vector<std::int32_t> lengths = {64, 60};
    const std::vector<std::int32_t> pages = {0, 1, 2, 3, 4, 5, 6, 7};
    const auto& metadata =
        builder->build(queue, clattn::CommonAttentionMetadata::of(starts, lengths, pages));
    const std::vector<clattn::PlannedLaunch> launches = planned_launches(metadata);
    ASSERT_GE(launches.size(), 2U);
    const std::vector<clattn::KernelInfo> kernels = backend.make_impl(context, config)->kernels();
    for (const clattn::PlannedLaunch& launch : launches) {
      const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const auto& known) {
        return known.name == launch.kernel;
      });
      ASSERT_NE(kernel, kernels.end()) << launch.kernel;
      EXPECT_GT(launch.predicted_us, 0);
      EXPECT_GE(launch.tasks, launch.items);
      if (kernel->role == "merge") {
        EXPECT_EQ(launch.concurrent_groups, 0);
        EXPECT_EQ(launch.splits, 2 * launch.items);
      } else {
        EXPECT_EQ(launch.concurrent_groups, kernel->concurrent_groups);
        EXPECT_EQ(launch.splits, 2 * launch.split_tiles);
        EXPECT_EQ(launch.items, launch.splits);  // every tile here has two pages or more
      }
    }
  }
}

// What is planned for a device's capabilities alone is what the device is given, where it builds
// the kernels that they ask for.
TEST(Plans, ArePredictedFromCapabilitiesAlone) {
  for (const auto& context : all_contexts()) {
    set_tuning(*context, {});
    const clattn::AttentionConfig config = attention_test::small_config();
    const clattn::Queue queue = context->create_queue();
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 2, .max_num_batched_tokens = 64, .max_model_len = 4096};
    const auto builder =
        clattn::get_attn_backend(config, nullptr)->make_builder(context, config, options);
    const std::vector<std::int32_t> starts = {0, 1, 41};
    const std::vector<std::int32_t> lengths = {4096, 60};
    const std::vector<std::int32_t> pages(2 * std::size_t{4096} /
                                          static_cast<std::size_t>(config.block_size));
    const auto batch = clattn::CommonAttentionMetadata::of(starts, lengths, pages);
    const auto planned = planned_launches(builder->build(queue, batch));
    const auto predicted = predicted_launches(config, context->capabilities(), {}, batch);
    ASSERT_EQ(planned.size(), predicted.size());
    for (std::size_t i = 0; i < planned.size(); ++i) {
      EXPECT_EQ(planned[i].kernel, predicted[i].kernel);
      EXPECT_EQ(planned[i].tasks, predicted[i].tasks);
      EXPECT_EQ(planned[i].splits, predicted[i].splits);
      EXPECT_DOUBLE_EQ(planned[i].predicted_us, predicted[i].predicted_us);
    }
    // Costs that are given count.
    clattn::CostRow row;
    row.device = context->capabilities().kind == clattn::DeviceKind::kCpu ? "cpu" : "gpu";
    row.costs = {.launch_us = 1000, .task_us = 1, .read_gbs = 1};
    const auto slow = predicted_launches(config, context->capabilities(), {&row, 1}, batch);
    EXPECT_GT(slow.front().predicted_us, 1000);
    // What nothing can be planned by is refused.
    row.costs.read_gbs = -1;
    EXPECT_THROW(predicted_launches(config, context->capabilities(), {&row, 1}, batch),
                 clattn::Error);
    EXPECT_THROW(predicted_launches({}, context->capabilities(), {}, batch), clattn::Error);
  }
}

}  // namespace test_plans
