// Caches in tiles (layout tiles): what kernels with warpgroup products write and read there, judged
// like the other layouts, and who refuses them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <functional>
#include <string>
#include <vector>

#include "device/cache_blocks.hpp"

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
    "layout tiles needs kernels with warpgroup products (compute capability 9.0, kernel family "
    "auto or gpu_ptx)";

bool reads_tiles(const clattn::Context& context) {
  return context.capabilities().warpgroup_products;
}

/// Decodes and prefills whose lengths end inside runs of 16 keys, pages and tiles of 128.
CaseSpec mixed_batch(std::int32_t head_size = 128) {
  CaseSpec spec;
  spec.layout = KVCacheLayout::kTiles;
  spec.config.num_kv_heads = 2;
  spec.config.num_heads = 8;
  spec.config.head_size = head_size;
  spec.config.block_size = 16;
  spec.requests = {{1, 0}, {1, 130}, {4, 61}, {35, 170}, {19, 0}, {300, 77}};
  return spec;
}

/// On devices without warpgroup products: that they say so.
void expect_refusal(const clattn::Context& context, const CaseSpec& spec) {
  EXPECT_EQ(backend_named("FLASHINFER")
                .validate_layout(spec.layout, spec.config, &context.capabilities()),
            std::vector<std::string>{kNeedsProducts});
}

/// Judges the case where warpgroup products are; every other device says that it cannot run it.
void expect_right(CaseSpec spec) {
  std::uint32_t next = 1;
  for (attention_test::Request& request : spec.requests) request.identity = next++;
  for (const auto& context : all_contexts()) {
    if (!reads_tiles(*context)) {
      expect_refusal(*context, spec);
      continue;
    }
    const CaseResult result = attention_test::run_case(context, spec);
    EXPECT_EQ(result.fault, "") << describe(spec);
    EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place;
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
  for (const auto& [num_kv_heads, group] : {std::pair(1, 5), std::pair(9, 2), std::pair(2, 71)}) {
    CaseSpec spec = mixed_batch(64);
    spec.config.num_kv_heads = num_kv_heads;
    spec.config.num_heads = num_kv_heads * group;
    spec.requests = {{1, 330}, {1, 7}, {3, 100}, {20, 3}, {150, 140}};
    expect_right(spec);
  }
}

std::vector<float> per_head(const CaseSpec& spec, float first) {
  std::vector<float> values;
  for (std::int32_t h = 0; h < spec.config.num_heads; ++h)
    values.push_back(first / static_cast<float>(1 << h));
  return values;
}

const std::function<void(CaseSpec&)> kOptions[] = {
    [](CaseSpec& s) { s.config.sliding_window = 37; },
    [](CaseSpec& s) { s.config.attention_chunk_size = 21; },
    [](CaseSpec& s) {
      s.config.alibi_slopes = per_head(s, 0.5F);
      s.config.logits_soft_cap = 2.5F;
      s.config.sinks = per_head(s, 9.0F);
    },
    [](CaseSpec& s) {
      s.config.custom_mask = true;
      s.config.sliding_window = 50;
    },
    [](CaseSpec& s) {
      s.last_token_overflows = true;
      s.requests = {{2, 40}, {7, 20}, {33, 0}, {70, 3}, {200, 150}};
    },
    [](CaseSpec& s) {
      s.first_token_overflows = true;
      s.config.sliding_window = 16;
      s.requests = {{4, 14}, {4, 31}, {70, 3}, {200, 3}};
    },
    [](CaseSpec& s) { s.config.output_fp8 = true; },
    [](CaseSpec& s) { s.causal = false; },
};

class TileOptions : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(, TileOptions, testing::Range(std::size_t{0}, std::size(kOptions)));

// Windows and chunks begin inside a run; what no query sees is NaN, and comes along with its run.
TEST_P(TileOptions, WithAndWithoutSplits) {
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch();
    spec.num_splits = splits;
    kOptions[GetParam()](spec);
    spec.unseen_is_nan = !spec.last_token_overflows && !spec.first_token_overflows;
    expect_right(spec);
  }
}

// Work-groups go from task to task: what the last one left in local memory meets weights of 0.
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

/// A layer refuses such a cache when it is bound, not at its first forward().
TEST(Tiles, LayersThatCannotReadThemDoNotBindThem) {
  for (const auto& context : all_contexts()) {
    clattn::LayerRegistry layers;
    clattn::AttentionOptions options;
    options.prefix = "layers.0";
    options.num_heads = 2;
    options.head_size = 64;
    options.cache_config = clattn::CacheConfig{.block_size = 16};
    options.kernel_family = KernelFamily::kGpu;
    clattn::Attention layer(context, layers, options);
    const KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
    const clattn::Buffer memory = context->allocate(spec.page_size_bytes());
    const auto& flashinfer = backend_named("FLASHINFER");
    EXPECT_EQ(error_text(
                  [&] {
                    layer.bind_kv_cache(
                        reshape_kv_cache(memory, spec, flashinfer, KVCacheLayout::kTiles));
                  },
                  ErrorCode::kUnsupported),
              "layer layers.0: kv_cache: " + kNeedsProducts);
    EXPECT_EQ(layer.kv_cache(), nullptr);
  }
}

}  // namespace
