// Caches in tiles (layout tiles): what kernels with warpgroup products write and read there, judged
// like the other layouts, and who refuses them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <string>
#include <vector>

#include "device/layout_cases.hpp"
#include "kernels/variants.hpp"

namespace {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using block_test::backend_named;
using cache_ops_test::all_contexts;
using clattn::DType;
using clattn::ErrorCode;
using clattn::KernelFamily;
using clattn::KVCache;
using clattn::KVCacheLayout;
using clattn::KVCacheSpec;
using test::error_text;

const std::string kNeedsProducts =
    "layout tiles needs kernels with warpgroup products (compute capability 9.0, driver 555 or "
    "later, kernel family auto or gpu_ptx)";

bool reads_tiles(const clattn::Context& context) {
  return context.capabilities().warpgroup_products &&
         clattn::detail::assembles_tensor_maps(context.capabilities());
}

CaseSpec mixed_batch(std::int32_t head_size = 128) {
  CaseSpec spec = layout_test::mixed_batch(KVCacheLayout::kTiles, head_size);
  spec.requests.push_back({300, 77});
  return spec;
}

/// On devices without warpgroup products: that they say so.
void expect_refusal(const clattn::Context& context, const CaseSpec& spec) {
  EXPECT_EQ(backend_named("FLASHINFER")
                .validate_layout(spec.layout, spec.config, &context.capabilities()),
            std::vector<std::string>{kNeedsProducts});
}

/// Judges the case where warpgroup products are; every other device says that it cannot run it.
void expect_right(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    if (reads_tiles(*context)) {
      layout_test::expect_right(context, spec);
    } else {
      expect_refusal(*context, spec);
    }
  }
}

class TileHeads : public testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(, TileHeads, testing::Values(64, 128, 256));

TEST_P(TileHeads, BothTypesAreWrittenAndRead) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    CaseSpec spec = mixed_batch(GetParam());
    spec.config.dtype = dtype;
    spec.write_cache = true;
    expect_right(spec);
  }
}

class TilePages : public testing::TestWithParam<std::int32_t> {};
INSTANTIATE_TEST_SUITE_P(, TilePages, testing::Values(16, 32, 48, 64, 128, 256));

TEST_P(TilePages, PaddingAndPlaces) {
  CaseSpec spec = mixed_batch(GetParam() == 32 || GetParam() == 128 ? 256 : 64);
  spec.config.block_size = GetParam();
  spec.page_padding = GetParam() == 32 ? 160 : 0;
  spec.page_seed = 5;
  expect_right(spec);
}

TEST(Tiles, GroupsAndKVHeads) {
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

class TileOptions : public testing::TestWithParam<layout_test::Option> {};
INSTANTIATE_TEST_SUITE_P(, TileOptions, testing::ValuesIn(layout_test::kOptions));
INSTANTIATE_TEST_SUITE_P(More, TileOptions, testing::ValuesIn(kMoreOptions));

// What no query sees is NaN, and comes along with its run.
TEST_P(TileOptions, WithAndWithoutSplits) {
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch();
    layout_test::apply(GetParam(), splits, spec);
    expect_right(spec);
  }
}

// Work-groups go from task to task, whose keys take turns in local memory.
TEST(Tiles, ManyTasksOfAGroup) {
  CaseSpec spec = mixed_batch(64);
  spec.config.num_heads = 32;
  spec.config.num_kv_heads = 8;
  spec.requests.assign(24, {70, 9});
  for (std::size_t i = 0; i < spec.requests.size(); ++i)
    spec.requests[i].context_len = static_cast<std::int32_t>(37 * i % 200);
  expect_right(spec);
}

/// The same plan runs over tiles and over HND, and one layer may be given either cache.
TEST(Tiles, ResultsDoNotDependOnTheOrder) {
  for (const auto& context : all_contexts()) {
    CaseSpec spec = mixed_batch();
    if (!reads_tiles(*context)) {
      expect_refusal(*context, spec);
      continue;
    }
    std::uint32_t next = 1;
    for (attention_test::Request& request : spec.requests) request.identity = next++;
    spec.requests.resize(2);  // decodes: the same sums in the same order
    const auto layer =
        backend_named(spec.backend).make_impl(context, spec.config);  // both share it
    const CaseResult tiles = attention_test::run_case(context, spec);
    spec.layout = KVCacheLayout::kHND;
    const CaseResult hnd = attention_test::run_case(context, spec);
    EXPECT_EQ(tiles.out, hnd.out);
    EXPECT_EQ(tiles.kernels, hnd.kernels);
  }
}

TEST(Tiles, WhoDoesNotReadThemSaysSo) {
  const auto& flashinfer = backend_named("FLASHINFER");
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    clattn::AttentionConfig config = mixed_batch().config;
    const auto make = [&] {
      (void)clattn::make_kv_cache(*context, queue, flashinfer, config, 2, KVCacheLayout::kTiles);
    };
    config.kernel_family = KernelFamily::kGpu;
    EXPECT_EQ(error_text(make, ErrorCode::kUnsupported), "KV cache: " + kNeedsProducts);
    CaseSpec spec = mixed_batch();
    spec.config.kernel_family = KernelFamily::kGpu;
    EXPECT_EQ(error_text([&] { attention_test::run_case(context, spec); }, ErrorCode::kUnsupported),
              "kv_cache: " + kNeedsProducts);
    if (context->capabilities().kind != clattn::DeviceKind::kCpu) continue;
    spec.config.kernel_family = KernelFamily::kAuto;
    for (const bool writes : {false, true}) {
      spec.write_cache = writes;
      EXPECT_EQ(
          error_text([&] { attention_test::run_case(context, spec); }, ErrorCode::kUnsupported),
          "kv_cache: tiles, supported by kernels of family cpu: none (layout tiles is for GPUs)");
    }
    const KVCacheSpec pages{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
    const KVCache cache = reshape_kv_cache(context->allocate(pages.page_size_bytes()), pages,
                                           flashinfer, KVCacheLayout::kTiles);
    EXPECT_EQ(error_text(
                  [&] {
                    clattn::reshape_and_cache_flash(*context, queue, {}, {}, DType::kF16, cache,
                                                    nullptr, 0, 1);
                  },
                  ErrorCode::kUnsupported),
              "kv_cache: tiles, supported by kernels of family cpu: none (layout tiles is for "
              "GPUs)");
  }
}

TEST(Tiles, LayersThatCannotReadThemDoNotBindThem) {
  for (const auto& context : all_contexts()) {
    EXPECT_EQ(layout_test::bind_refusal(context, KVCacheLayout::kTiles),
              "layer layers.0: kv_cache: " + kNeedsProducts);
  }
}

}  // namespace
