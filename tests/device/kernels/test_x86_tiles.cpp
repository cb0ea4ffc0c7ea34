// Prefill and decode by x86's units of bf16: the cases on CPUs that the tests of every variant do
// not cover.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <functional>
#include <string_view>

#include "device/attention_case.hpp"
#include "device/forced_variant.hpp"

namespace test_x86_tiles {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using clattn::DType;

/// Rows of two blocks and a bit, over several tiles of keys.
CaseSpec long_queries() {
  CaseSpec spec;
  spec.config.num_heads = 8;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = 64;
  spec.config.block_size = 16;
  spec.config.dtype = DType::kBF16;
  spec.config.kernel_family = clattn::KernelFamily::kCpu;
  spec.requests = {{1, 20, 1}, {37, 130, 2}, {70, 0, 3}};
  return spec;
}

struct Option {
  std::string_view name;
  std::function<void(CaseSpec&)> set;
};

const std::vector<Option>& options() {
  static const std::vector<Option> all = {
      {"Plain", [](CaseSpec&) {}},
      {"LastValueInfinite", [](CaseSpec& s) { s.last_token_overflows = true; }},
      {"FirstValueInfiniteInAWindow",
       [](CaseSpec& s) {
         s.config.sliding_window = 30;
         s.first_token_overflows = true;
       }},
      {"Mask", [](CaseSpec& s) { s.config.custom_mask = true; }},
      {"KeptKeysBeforeAWindowWithSlopes",
       [](CaseSpec& s) {
         s.config.use_keep_keys = true;
         s.config.sliding_window = 20;
         for (int head = 0; head < s.config.num_heads; ++head)
           s.config.alibi_slopes.push_back(0.02F * static_cast<float>(head + 1));
         for (auto& request : s.requests)
           request.keep_keys = std::min(5, request.query_len + request.context_len);
         s.unseen_is_nan = true;
       }},
      {"CapSlopesSinks",
       [](CaseSpec& s) {
         s.config.logits_soft_cap = 20;
         for (int head = 0; head < s.config.num_heads; ++head) {
           s.config.alibi_slopes.push_back(0.01F * static_cast<float>(head + 1));
           s.config.sinks.push_back(0.5F * static_cast<float>(head));
         }
       }},
      {"Int8", [](CaseSpec& s) { s.config.kv_cache_dtype = DType::kInt8; }},
      {"Fp8ToFp8",
       [](CaseSpec& s) {
         s.config.kv_cache_dtype = DType::kFp8E4M3;
         s.config.output_fp8 = true;
       }},
      {"FiveHeadsAGroupOverInt8",
       [](CaseSpec& s) {
         s.config.num_heads = 10;
         s.config.kv_cache_dtype = DType::kInt8;
       }},
      {"NHDInSplits",
       [](CaseSpec& s) {
         s.layout = clattn::KVCacheLayout::kNHD;
         s.num_splits = 3;
       }},
      {"OddPagesNotCausal",
       [](CaseSpec& s) {
         s.config.block_size = 5;
         s.causal = false;
       }},
      {"SixteenHeadsAGroupBeforeInfinity",
       [](CaseSpec& s) {
         s.config.num_heads = 32;
         s.last_token_overflows = true;
       }},
      {"SixteenHeadsOf32",
       [](CaseSpec& s) {
         s.config.num_heads = 32;
         s.config.head_size = 32;
       }},
      {"TenHeadsOf96InOddPages",
       [](CaseSpec& s) {
         s.config.num_heads = 20;
         s.config.head_size = 96;
         s.config.block_size = 24;
       }},
      {"ElevenHeadsOf256",
       [](CaseSpec& s) {
         s.config.num_heads = 22;
         s.config.head_size = 256;
       }},
  };
  return all;
}

class X86Tiles : public testing::TestWithParam<Option> {};

/// Runs the row on every device that has its unit, and must.
void expect_right(const CaseSpec& spec, std::string_view row) {
  using clattn::detail::Variant;
  const Variant& variant = *std::ranges::find(clattn::detail::variants(), row, &Variant::name);
  bool ran = false;
  for (const auto& context : attention_test::all_contexts()) {
    if (!clattn::detail::why_not(variant, context->capabilities()).empty()) continue;
    const attention_test::ForcedVariants forced(context, {&variant});
    const CaseResult result = attention_test::run_case(context, spec);
    EXPECT_EQ(result.fault, "") << describe(spec);
    EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
    EXPECT_TRUE(std::ranges::count(result.kernels, row)) << describe(spec);
    ran = true;
  }
  if (!ran) GTEST_SKIP() << "no device's processor has the unit of " << row;
}

TEST_P(X86Tiles, ComputeRight) {
  CaseSpec spec = long_queries();
  GetParam().set(spec);
  expect_right(spec, "prefill_amx__r256_kv64");
}

TEST_P(X86Tiles, PairsComputeRight) {
  CaseSpec spec = long_queries();
  GetParam().set(spec);
  expect_right(spec, "prefill_bf16__r256_kv64");
}

/// Of four heads a group: one to four chunks of rows, and two bundles of them.
CaseSpec few_queries() {
  CaseSpec spec = long_queries();
  spec.requests = {{1, 20, 1}, {1, 130, 2}, {1, 0, 3},  {1, 300, 4},
                   {2, 77, 5}, {3, 61, 6},  {5, 90, 7}, {4, 77, 8}};
  return spec;
}

TEST_P(X86Tiles, DecodeRight) {
  CaseSpec spec = few_queries();
  GetParam().set(spec);
  expect_right(spec, "decode_cpu__r24_amx");
}

TEST_P(X86Tiles, PairsDecodeRight) {
  CaseSpec spec = few_queries();
  GetParam().set(spec);
  expect_right(spec, "decode_cpu__r24_bf16");
}

INSTANTIATE_TEST_SUITE_P(Options, X86Tiles, testing::ValuesIn(options()),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace test_x86_tiles
