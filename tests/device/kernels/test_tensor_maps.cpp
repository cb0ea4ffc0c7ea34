// Prefill over pages that hold whole runs of 16 tokens, which come by tensor maps where there are
// warpgroup products (prefill_wgmma.cl). The cases are judged on every device; where that kernel
// runs, they must have met it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <string_view>

#include "device/layout_cases.hpp"

namespace test_tensor_maps {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using cache_ops_test::all_contexts;
using clattn::DType;
using clattn::KVCacheLayout;

CaseSpec mixed_batch(std::int32_t head_size = 128) {
  CaseSpec spec = layout_test::mixed_batch(KVCacheLayout::kHND, head_size);
  spec.requests.push_back({300, 77});
  return spec;
}

void expect_right(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    const CaseResult result = layout_test::expect_right(context, spec);
    if (!context->capabilities().warpgroup_products) continue;
    EXPECT_TRUE(
        std::any_of(result.kernels.begin(), result.kernels.end(),
                    [](std::string_view kernel) { return kernel.starts_with("prefill_wgmma"); }))
        << describe(spec);
  }
}

class MappedHeads : public testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(, MappedHeads, testing::Values(64, 128, 256));
// Rows with zeros behind them, of one to four blocks of 64 dims.
INSTANTIATE_TEST_SUITE_P(Padded, MappedHeads, testing::Values(40, 72, 96, 200));

TEST_P(MappedHeads, BothTypesAreWrittenAndRead) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    CaseSpec spec = mixed_batch(GetParam());
    spec.config.dtype = dtype;
    spec.write_cache = true;
    expect_right(spec);
  }
}

class MappedPages : public testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(, MappedPages, testing::Values(16, 32, 48, 64, 256));

TEST_P(MappedPages, PaddingAndPlaces) {
  CaseSpec spec = mixed_batch(GetParam() == 32 ? 256 : 64);
  spec.layout = GetParam() < 48 ? KVCacheLayout::kHND : KVCacheLayout::kNHD;
  spec.config.block_size = GetParam();
  spec.page_padding = GetParam() == 32 ? 160 : 0;
  spec.page_seed = 5;
  expect_right(spec);
}

TEST(TensorMaps, GroupsAndKVHeads) {
  for (const auto& [num_kv_heads, group] : layout_test::kHeads) {
    CaseSpec spec = mixed_batch(64);
    spec.config.num_kv_heads = num_kv_heads;
    spec.config.num_heads = num_kv_heads * group;
    spec.requests = {{1, 330}, {1, 7}, {3, 100}, {20, 3}, {150, 140}};
    expect_right(spec);
  }
}

const layout_test::Option kMoreOptions[] = {
    {"the first token overflows",
     [](CaseSpec& s) {
       s.first_token_overflows = true;
       s.config.sliding_window = 16;
       s.requests = {{4, 14}, {4, 31}, {70, 3}, {200, 3}};
     }},
    {"fp8 output", [](CaseSpec& s) { s.config.output_fp8 = true; }},
};

class MappedOptions : public testing::TestWithParam<layout_test::Option> {};
INSTANTIATE_TEST_SUITE_P(, MappedOptions, testing::ValuesIn(layout_test::kOptions));
INSTANTIATE_TEST_SUITE_P(More, MappedOptions, testing::ValuesIn(kMoreOptions));

// What no query sees is NaN, and comes along with its run.
TEST_P(MappedOptions, WithAndWithoutSplits) {
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch();
    layout_test::apply(GetParam(), splits, spec);
    expect_right(spec);
  }
}

// The heads of Phi-3; dims behind a head are the next one's, NaN where no query sees the token.
TEST_P(MappedOptions, OfPaddedHeads) {
  CaseSpec spec = mixed_batch(96);
  layout_test::apply(GetParam(), 3, spec);
  expect_right(spec);
}

// Without tensor maps: pages of odd sizes, and keys that are not in pages, as in vision encoders.
TEST(TensorMaps, PaddedHeadsWithoutThem) {
  for (const std::int32_t head_size : {72, 80, 120, 248}) {
    CaseSpec spec = mixed_batch(head_size);
    spec.config.block_size = 5;
    expect_right(spec);
    spec.config.block_size = 0;
    spec.config.attn_type = clattn::AttentionType::kEncoderOnly;
    spec.requests = {{1, 0}, {150, 0}, {70, 0}, {300, 0}};
    expect_right(spec);
  }
}

// Tasks whose rows are those of one warpgroup, between others and after each other.
TEST_P(MappedHeads, ShortQueriesBetweenLongOnes) {
  CaseSpec spec = mixed_batch(GetParam());
  spec.config.num_heads = 8;
  spec.config.num_kv_heads = 2;
  spec.requests = {{5, 300}, {200, 40}, {6, 1}, {17, 500}, {200, 3}, {7, 90}, {5, 0}};
  expect_right(spec);
  spec.causal = false;
  expect_right(spec);
}

// Work-groups go from task to task, whose keys take turns in local memory.
TEST(TensorMaps, ManyTasksOfAGroup) {
  CaseSpec spec = mixed_batch(64);
  spec.config.num_heads = 32;
  spec.config.num_kv_heads = 8;
  spec.requests.assign(24, {70, 9});
  for (std::size_t i = 0; i < spec.requests.size(); ++i)
    spec.requests[i].context_len = static_cast<std::int32_t>(37 * i % 200);
  expect_right(spec);
}

}  // namespace test_tensor_maps
