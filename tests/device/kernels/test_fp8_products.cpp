// Prompts multiplied in e4m3 (AttentionConfig::fp8_products): queries rounded by their scale are
// the oracle's too, what else is lost has a bound of its own (oracle::fp8_bound). The cases are
// judged on every device; where there are warpgroup products, they must have met that kernel,
// unless they have ALiBi, a mask or many heads a group, and elsewhere the option must change
// nothing.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <limits>

#include "device/layout_cases.hpp"

namespace test_fp8_products {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using cache_ops_test::all_contexts;
using clattn::DType;
using clattn::KVCacheLayout;

/// Decodes, and prompts that no kernel for few rows takes.
CaseSpec mixed_batch(DType dtype = DType::kBF16) {
  CaseSpec spec = layout_test::mixed_batch(KVCacheLayout::kHND, 128);
  spec.config.dtype = dtype;
  spec.config.kv_cache_dtype = DType::kFp8E4M3;
  spec.config.fp8_products = true;
  spec.query_scale = 0.25;
  spec.requests = {{1, 0}, {1, 130}, {35, 170}, {40, 0}, {150, 77}};
  return spec;
}

void expect_right(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    const CaseResult result = layout_test::expect_right(context, spec);
    const bool served = spec.config.alibi_slopes.empty() && !spec.config.custom_mask &&
                        spec.config.num_queries_per_kv() <= clattn::kMostDecodeRows;
    EXPECT_EQ(result.multiplies_fp8, served && context->capabilities().warpgroup_products)
        << describe(spec);
  }
}

TEST(Fp8Products, BothTypesAreWrittenAndRead) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    CaseSpec spec = mixed_batch(dtype);
    spec.write_cache = true;
    expect_right(spec);
  }
}

// A row's largest probabilities then stand out: a value that met another key's would be seen.
TEST(Fp8Products, SharpAndFlatRows) {
  for (const double sharpness : {0.05, 4.0, 16.0}) {
    CaseSpec spec = mixed_batch();
    spec.sharpness = sharpness;
    expect_right(spec);
  }
}

// Beyond e4m3's largest number queries saturate, below its smallest they are 0.
TEST(Fp8Products, QueriesAreRoundedByTheirScale) {
  for (const double scale : {0.0, 0x1p-9, 64.0, 0.3}) {
    CaseSpec spec = mixed_batch();
    spec.requests = {{1, 40}, {40, 90}};
    spec.query_scale = scale;
    expect_right(spec);
    spec.scales_per_head = true;
    expect_right(spec);
  }
}

TEST(Fp8Products, ScaleBelowZero) {
  CaseSpec spec = mixed_batch();
  spec.config.scale = -0.1F;
  expect_right(spec);
}

class Fp8Pages : public testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(, Fp8Pages, testing::Values(1, 5, 8, 16, 32, 256));

TEST_P(Fp8Pages, LayoutsAndPlaces) {
  for (const KVCacheLayout layout : {KVCacheLayout::kHND, KVCacheLayout::kNHD}) {
    CaseSpec spec = mixed_batch();
    spec.layout = layout;
    spec.config.block_size = GetParam();
    spec.page_padding = GetParam() == 32 ? 168 : 0;  // then pages start on 8 bytes, not on 16
    spec.page_seed = 5;
    spec.query_padding = GetParam() == 8 ? 3 : 0;  // rows of queries on 2 bytes
    expect_right(spec);
  }
}

TEST(Fp8Products, HeadsApart) {
  CaseSpec spec = mixed_batch();
  spec.heads_apart = true;
  expect_right(spec);
}

TEST(Fp8Products, GroupsAndKVHeads) {
  for (const auto& [num_kv_heads, group] : layout_test::kHeads) {
    CaseSpec spec = mixed_batch();
    spec.config.num_kv_heads = num_kv_heads;
    spec.config.num_heads = num_kv_heads * group;
    spec.requests = {{1, 330}, {40, 60}};
    expect_right(spec);
  }
}

const layout_test::Option kMoreOptions[] = {
    {"the first token is NaN",
     [](CaseSpec& s) {
       s.first_token_overflows = true;
       s.overflow_value = std::numeric_limits<double>::quiet_NaN();
       s.config.sliding_window = 16;
       s.requests = {{70, 3}, {200, 3}};
     }},
    {"the last token is NaN",
     [](CaseSpec& s) {
       s.last_token_overflows = true;
       s.overflow_value = std::numeric_limits<double>::quiet_NaN();
       s.requests = {{33, 0}, {70, 3}, {200, 150}};
     }},
    {"soft cap, sinks, window",
     [](CaseSpec& s) {
       s.config.logits_soft_cap = 2.5F;
       s.config.sinks = layout_test::per_head(s, 9.0F);
       s.config.sliding_window = 50;
     }},
    {"fp8 output", [](CaseSpec& s) { s.config.output_fp8 = true; }},
};

class Fp8Options : public testing::TestWithParam<layout_test::Option> {};
INSTANTIATE_TEST_SUITE_P(, Fp8Options, testing::ValuesIn(layout_test::kOptions));
INSTANTIATE_TEST_SUITE_P(More, Fp8Options, testing::ValuesIn(kMoreOptions));

TEST_P(Fp8Options, WithAndWithoutSplits) {
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch();
    layout_test::apply(GetParam(), splits, spec);
    // Those of few tokens would go to other kernels.
    std::erase_if(spec.requests, [](const auto& r) { return r.query_len > 1 && r.query_len < 32; });
    expect_right(spec);
  }
}

// Work-groups go from task to task, whose keys take turns in local memory.
TEST(Fp8Products, ManyTasksOfAGroup) {
  CaseSpec spec = mixed_batch();
  spec.config.num_heads = 48;
  spec.config.num_kv_heads = 16;
  spec.requests.assign(16, {45, 9});
  for (std::size_t i = 0; i < spec.requests.size(); ++i)
    spec.requests[i].context_len = static_cast<std::int32_t>(37 * i % 150);
  expect_right(spec);
}

// The unit drops what is small beside a sum: one over all of these keys, whose values have mostly
// one sign, would be a sixth too small.
TEST(Fp8Products, ManyKeys) {
  CaseSpec spec = mixed_batch();
  spec.value_mean = 1;
  spec.config.num_heads = 2;
  spec.config.num_kv_heads = 1;
  spec.requests = {{40, 12000}};
  spec.num_splits = 1;
  expect_right(spec);
}

// Bases move again and again, while keys of later tiles arrive in the stages of earlier ones: a
// tile that is multiplied once more must still have its keys.
TEST(Fp8Products, LogitsThatRise) {
  CaseSpec spec = mixed_batch();
  spec.config.num_heads = 4;
  spec.config.num_kv_heads = 1;
  spec.value_mean = 1;
  spec.rise = 12;
  spec.requests = {{1, 300}, {40, 4000}, {70, 2500}};
  spec.num_splits = 1;
  expect_right(spec);
}

}  // namespace test_fp8_products
