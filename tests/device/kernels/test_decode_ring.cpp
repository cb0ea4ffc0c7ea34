// Decode whose work-groups stay for many tasks and fetch ahead of them (decode_ring.cl). The cases
// are judged on every device; where that kernel runs, they must have met it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <string_view>
#include <vector>

#include "device/layout_cases.hpp"

namespace test_decode_ring {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Request;
using cache_ops_test::all_contexts;
using clattn::DType;
using clattn::KVCacheLayout;

/// Short queries alone, whose keys end inside tiles, steps of a group and pages.
CaseSpec short_queries(std::int32_t head_size = 128) {
  CaseSpec spec = layout_test::mixed_batch(KVCacheLayout::kNHD, head_size);
  spec.requests = {{1, 0}, {1, 16}, {1, 130}, {1, 271}, {1, 640}, {4, 61}};
  return spec;
}

/// Whether the device has the kernel for sure: compute capability 9.0 has the local memory for it.
bool has_ring(const clattn::Context& context) {
  return context.capabilities().warpgroup_products;
}

void expect_right(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    const CaseResult result = layout_test::expect_right(context, spec);
    if (!has_ring(*context)) continue;
    EXPECT_TRUE(
        std::any_of(result.kernels.begin(), result.kernels.end(),
                    [](std::string_view kernel) { return kernel.starts_with("decode_ring"); }))
        << describe(spec);
  }
}

struct Elements {
  DType dtype, cache_dtype;
  std::int32_t head_size;
  KVCacheLayout layout;
};
void PrintTo(const Elements& elements, std::ostream* out) {
  *out << to_string(elements.dtype) << " over " << to_string(elements.cache_dtype) << ", heads of "
       << elements.head_size;
}

class RingElements : public testing::TestWithParam<Elements> {};
INSTANTIATE_TEST_SUITE_P(
    , RingElements,
    testing::Values(Elements{DType::kF16, DType::kF16, 128, KVCacheLayout::kNHD},
                    Elements{DType::kBF16, DType::kBF16, 256, KVCacheLayout::kHND},
                    Elements{DType::kF16, DType::kFp8E4M3, 128, KVCacheLayout::kHND},
                    Elements{DType::kBF16, DType::kFp8E5M2, 256, KVCacheLayout::kNHD}));

// Pages of 48 tokens, with and without padding that leaves 8-bit rows on boundaries of 8 bytes.
TEST_P(RingElements, AnyPlaceOfKeysAndValues) {
  for (const std::size_t padding : {0U, 8U}) {
    CaseSpec spec = short_queries(GetParam().head_size);
    spec.config.dtype = GetParam().dtype;
    spec.config.kv_cache_dtype = GetParam().cache_dtype;
    spec.config.block_size = 48;
    spec.layout = GetParam().layout;
    spec.page_padding = padding * clattn::element_size_bytes(GetParam().cache_dtype);
    spec.write_cache = true;
    spec.scales_per_head = true;
    expect_right(spec);
  }
}

class RingOptions : public testing::TestWithParam<layout_test::Option> {};
INSTANTIATE_TEST_SUITE_P(, RingOptions, testing::ValuesIn(layout_test::kOptions));

// What no query sees is NaN, and comes along with its tile.
TEST_P(RingOptions, WithAndWithoutSplits) {
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = short_queries();
    layout_test::apply(GetParam(), splits, spec);
    if (spec.last_token_overflows) spec.requests = {{2, 0}, {2, 39}, {3, 130}, {4, 20}};
    expect_right(spec);
  }
}

// More tasks than groups, of very different lengths, some without keys for every warp: the copies
// of one task begin while another one's are read.
TEST(DecodeRing, GroupsGoFromTaskToTask) {
  for (const std::int32_t splits : {0, 2}) {
    CaseSpec spec = short_queries();
    spec.config.num_heads = 16;
    spec.config.num_kv_heads = 8;
    spec.num_splits = splits;
    spec.requests.clear();
    for (std::int32_t i = 0; i < 70; ++i)
      spec.requests.push_back({1, i % 7 == 0 ? 500 + i : 37 * i % 200});
    expect_right(spec);
  }
}

// A query token's rows: 1 to 16 heads of a KV head, and chunks of more.
TEST(DecodeRing, GroupsOfHeads) {
  for (const std::int32_t group : {1, 13, 40}) {
    CaseSpec spec = short_queries();
    spec.config.num_heads = 2 * group;
    spec.requests = {{1, 330}, {1, 7}, {2, 100}};
    if (group == 40) spec.requests = {{1, 330}};
    for (const auto& context : all_contexts()) layout_test::expect_right(context, spec);
  }
}

}  // namespace test_decode_ring
