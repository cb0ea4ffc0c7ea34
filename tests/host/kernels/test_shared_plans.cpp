// Whose plan the kernels of another layer run.
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {
namespace {

/// Kernels of these variants, short queries first, as if they had been built.
AttentionKernels kernels_of(std::initializer_list<std::string_view> names) {
  AttentionKernels kernels;
  AttentionConfig config;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_size = 128;
  kernels.shape = kernel_shape(config);
  for (const std::string_view name : names) {
    const auto row = std::find_if(variants().begin(), variants().end(),
                                  [&](const Variant& variant) { return variant.name == name; });
    kernels.stages.push_back({*row, nullptr, head_tiling(*row, kernels.shape, {})});
  }
  return kernels;
}

// Layers of one group differ in options, and so in which kernels their driver spills: where one of
// them lacks the kernel that joins its splits, its plan serves both and the other's does not.
TEST(SharedPlans, APlanWithoutJoinsSuitsKernelsThatJoin) {
  const AttentionKernels joins =
      kernels_of({"decode_mma__r8", "decode_mma__r16_tokens", "prefill_mma__r128_wg128"});
  const AttentionKernels spilled =
      kernels_of({"decode_mma__r8", "prefill_mma__r16_wg32", "prefill_mma__r128_wg128"});
  const AttentionKernels portable =
      kernels_of({"decode_gpu__r4_local", "prefill_gpu__r16_kv32", "prefill_gpu__r64_kv32"});
  EXPECT_TRUE(joins.runs_plan_of(spilled));
  EXPECT_FALSE(spilled.runs_plan_of(joins));
  for (const AttentionKernels* kernels : {&joins, &spilled}) {
    EXPECT_TRUE(kernels->runs_plan_of(*kernels));
    EXPECT_TRUE(kernels->runs_plan_of(portable));
    EXPECT_FALSE(portable.runs_plan_of(*kernels));
  }
}

TEST(SharedPlans, LargerTilesRunTheItemsOfSmallerOnes) {
  const AttentionKernels small = kernels_of({"decode_gpu__r4_local", "prefill_gpu__r16_kv32"});
  const AttentionKernels large =
      kernels_of({"decode_gpu__r4_local", "prefill_gpu__r16_kv32", "prefill_gpu__r64_kv32"});
  EXPECT_TRUE(large.runs_plan_of(small));
  EXPECT_FALSE(small.runs_plan_of(large));
  EXPECT_EQ(large.stage_for(small, 1), 1U);
}

// Who sees all keys anyway needs no list of those that escape a window.
TEST(SharedPlans, KeptKeysCostNothingWithoutAWindow) {
  AttentionConfig config;
  config.num_heads = config.num_kv_heads = 2;
  config.head_size = 64;
  const KernelOptions plain = kernel_shape(config).options;
  config.use_keep_keys = true;
  EXPECT_EQ(kernel_shape(config).options, plain);
  EXPECT_FALSE(lists_of(config).any());
  config.attention_chunk_size = 64;
  EXPECT_TRUE(kernel_shape(config).options.gaps);
  EXPECT_TRUE(lists_of(config).keep_keys);
}

}  // namespace
}  // namespace clattn::detail
