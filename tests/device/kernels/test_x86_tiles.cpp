// Prefill and decode by x86's units of bf16: the cases on CPUs that the tests of every variant do
// not cover.
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <functional>
#include <string_view>

#include "device/attention_case.hpp"

namespace {

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
      {"KeysByDim", [](CaseSpec& s) { s.layout = clattn::KVCacheLayout::kHDN; }},
      {"EightBitKeysByDim",
       [](CaseSpec& s) {
         s.layout = clattn::KVCacheLayout::kHDN;
         s.config.kv_cache_dtype = DType::kFp8E5M2;
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

/// Runs on every device with tiles or products of bf16 pairs, where a kernel must have run whose
/// name begins with the one that is given for them; none is given = that unit's devices are left
/// out.
void expect_right(const CaseSpec& spec, std::string_view by_tiles, std::string_view by_pairs) {
  bool ran = false;
  for (const auto& context : attention_test::all_contexts()) {
    const auto& capabilities = context->capabilities();
    const std::string_view kernel = capabilities.x86_tiles       ? by_tiles
                                    : capabilities.bf16_products ? by_pairs
                                                                 : "";
    if (kernel.empty()) continue;
    const CaseResult result = attention_test::run_case(context, spec);
    EXPECT_EQ(result.fault, "") << describe(spec);
    EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
    EXPECT_TRUE(std::ranges::any_of(result.kernels, [&](std::string_view name) {
      return name.starts_with(kernel);
    })) << describe(spec);
    ran = true;
  }
  if (!ran)
    GTEST_SKIP() << "no device's processor has tiles that this process may use, or the "
                    "products of bf16 pairs that this test is for";
}

TEST_P(X86Tiles, ComputeRight) {
  CaseSpec spec = long_queries();
  GetParam().set(spec);
  expect_right(spec, "prefill_amx", "prefill_bf16");
}

TEST_P(X86Tiles, DecodeRight) {
  CaseSpec spec = long_queries();
  spec.requests = {{1, 20, 1}, {1, 130, 2}, {1, 0, 3}, {1, 300, 4}, {2, 77, 5}};
  GetParam().set(spec);
  expect_right(spec, "decode_cpu__r16_amx", "");
}

INSTANTIATE_TEST_SUITE_P(Options, X86Tiles, testing::ValuesIn(options()),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
