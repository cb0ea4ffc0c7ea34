#include <gtest/gtest.h>

#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <vector>

#include "device/attention_case.hpp"

/// Steps whose lengths only the device knows (BuilderOptions::device_seq_lens).
namespace test_device_lengths {

using attention_test::all_contexts;
using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::describe;
using attention_test::run_case;
using attention_test::small_config;
using clattn::KernelFamily;
using clattn::SplitPolicy;

/// Decodes of every kind: of one token and more, alone with their keys, long, short, without
/// queries; and a prefill.
std::vector<attention_test::Request> mixed_requests() {
  return {{1, 0, 1},  {1, 1299, 2}, {3, 0, 3},  {4, 700, 4}, {1, 511, 5},
          {0, 40, 6}, {1, 512, 7},  {1, 15, 8}, {37, 600, 9}};
}

/// One way to cut that does not follow from the lengths of the batch.
struct Cuts {
  std::int32_t num_splits;
  SplitPolicy policy;
  bool fast;
};
constexpr Cuts kFixedCuts[] = {{0, SplitPolicy::kDeterministic, false},
                               {1, SplitPolicy::kBalanced, false},
                               {5, SplitPolicy::kBalanced, false},
                               {0, SplitPolicy::kBalanced, true}};

CaseSpec case_of(const clattn::AttentionConfig& config, const Cuts& cuts) {
  CaseSpec spec;
  spec.config = config;
  spec.requests = mixed_requests();
  spec.num_splits = cuts.num_splits;
  spec.split_policy = cuts.policy;
  spec.build_options.fast_build = cuts.fast;
  spec.write_cache = true;
  return spec;
}

/// The case by lengths from the device, which must be right and write the slots of the lengths.
CaseResult run_bounded(const std::shared_ptr<clattn::Context>& context, CaseSpec spec,
                       std::int32_t bounds_above) {
  spec.bounds_above = bounds_above;
  CaseResult result = run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0) << describe(spec) << " at " << result.worst_place;
  return result;
}

void expect_same_bits(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec,
                      std::initializer_list<std::int32_t> distances) {
  const CaseResult host = run_case(context, spec);
  for (const std::int32_t above : distances) {
    const CaseResult device = run_bounded(context, spec, above);
    EXPECT_EQ(device.out, host.out) << describe(spec) << " bounds " << above << " above";
    EXPECT_EQ(device.lse, host.lse) << describe(spec) << " bounds " << above << " above";
  }
}

/// Layers whose queries see different parts of the keys.
std::vector<clattn::AttentionConfig> configs_of(KernelFamily family) {
  clattn::AttentionConfig plain = small_config();
  plain.kernel_family = family;
  clattn::AttentionConfig windowed = plain;
  windowed.sliding_window = 530;  // ranges of two pages or three of 512 tokens' splits
  clattn::AttentionConfig one_sided = plain;
  one_sided.window_left = 300;
  clattn::AttentionConfig chunked = plain;
  chunked.attention_chunk_size = 96;
  clattn::AttentionConfig looking_back = chunked;
  looking_back.chunk_lookback = 5;
  clattn::AttentionConfig small_pages = plain;
  small_pages.block_size = 8;
  small_pages.dtype = clattn::DType::kF32;
  return {plain, windowed, one_sided, chunked, looking_back, small_pages};
}

class DeviceLengths : public testing::TestWithParam<KernelFamily> {};

TEST_P(DeviceLengths, HaveTheBitsOfAHostsPlanByAnyBound) {
  for (const auto& context : all_contexts()) {
    for (const auto& config : configs_of(GetParam())) {
      for (const Cuts& cuts : kFixedCuts)
        expect_same_bits(context, case_of(config, cuts), {1, 800});
    }
  }
}

TEST_P(DeviceLengths, HaveTheBitsOfABalancedPlanByBoundsThatAreReached) {
  for (const auto& context : all_contexts()) {
    for (const auto& config : configs_of(GetParam()))
      expect_same_bits(context, case_of(config, {0, SplitPolicy::kBalanced, false}), {0});
  }
}

TEST_P(DeviceLengths, AreRightInABalancedPlanOfHigherBounds) {
  for (const auto& context : all_contexts()) {
    for (const auto& config : configs_of(GetParam())) {
      const CaseSpec spec = case_of(config, {0, SplitPolicy::kBalanced, false});
      run_bounded(context, spec, 3);
      run_bounded(context, spec, 3000);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DeviceLengths,
                         testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

}  // namespace test_device_lengths
