// Latent decode (device/mla_case.hpp) by every family and variant of kernels.
#include "device/forced_variant.hpp"
#include "device/mla_case.hpp"
#include "device/runtime_fixture.hpp"
#include "kernels/choose/variants.hpp"
#include "support/error_text.hpp"

namespace test_mla {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KernelFamily;
using clattn::detail::Variant;
using mla_test::Case;
using mla_test::Outcome;
using mla_test::run;
using mla_test::small_case;
using step_test::Layout;
using test::error_text;

using MLA = mla_test::MLATest;
INSTANTIATE_TEST_SUITE_P(Families, MLA, mla_test::kAllKernels, mla_test::kernels_name);

TEST_P(MLA, A6_6_DeepSeekShape) {
  Case c = small_case();
  c.config.kv_lora_rank = 512;
  c.config.rope_dim = 64;
  c.config.num_heads = 128;
  c.config.scale = 0.0721687836F;  // 1 / sqrt(128 + 64)
  c.config.block_size = 64;
  c.requests = {{1, 70}, {0, 0}, {2, 5}};
  check(c);
  c.num_splits = 3;
  check(c);
}

TEST_P(MLA, EveryTypeOfQueryAndCache) {
  constexpr std::array kPairs = {
      std::pair{DType::kF32, DType::kF32}, std::pair{DType::kBF16, DType::kBF16},
      std::pair{DType::kF16, DType::kFp8E4M3}, std::pair{DType::kF32, DType::kFp8E5M2},
      std::pair{DType::kBF16, DType::kInt8}};
  for (const auto& [dtype, cache_dtype] : kPairs) {
    Case c = small_case(dtype);
    c.config.kv_cache_dtype = cache_dtype;
    c.cache_scale = cache_dtype == DType::kInt8         ? 0x1p-5
                    : clattn::is_quantized(cache_dtype) ? 0.5
                                                        : 1.0;
    check(c);
  }
}

TEST_P(MLA, OneHeadAndManyAndNoScaleBuffer) {
  for (const std::int32_t heads : {1, 5, 40}) {
    Case c = small_case();
    c.config.num_heads = heads;
    c.config.kv_lora_rank = 32;
    c.config.rope_dim = 8;
    c.config.kv_cache_dtype = DType::kFp8E4M3;
    check(c);
  }
}

TEST_P(MLA, PagesAndForcedSplits) {
  for (const std::int32_t block_size : {1, 5, 16, 64}) {
    Case c = small_case();
    c.config.block_size = block_size;
    for (const std::int32_t splits : {1, 3, 1000}) {
      c.num_splits = splits;
      for (const Outcome& outcome : check(c)) {
        EXPECT_EQ(outcome.kernels.back().starts_with("merge"), splits > 1);
      }
    }
  }
}

TEST_P(MLA, LatentPartOfOneVector) {
  Case c = small_case();
  c.config.kv_lora_rank = 16;
  c.config.rope_dim = 8;
  check(c);
  c.config.rope_dim = 64;
  check(c);
}

TEST_P(MLA, StridedQueriesAndAnEmptyBatch) {
  Case c = small_case();
  for (const std::int64_t padding : {24, 3}) {  // 3: rows that start anywhere
    c.query_padding = padding;
    check(c);
  }
  c.config.scale = -0.1F;  // the smallest product has the largest logit
  check(c);
  c.requests = {{0, 0}, {0, 7}};
  check(c);
  c.requests = {};
  check(c);
}

TEST_P(MLA, PaddingOfRecordedStepsWritesNothing) {
  Case c = small_case();
  c.graph_batch_size = 8;
  c.requests = {{1, 40}, {0, 0}, {4, 30}, {1, 200}};
  check(c);
}

TEST_P(MLA, AnOverflowedTokenHarmsNoEarlierRow) {
  Case c = small_case();
  c.requests = {{2, 40}, {7, 20}, {16, 0}, {4, 62}};
  c.last_token_overflows = true;
  for (const std::int32_t heads : {5, 16}) {  // 5: rows that are computed together end apart
    c.config.num_heads = heads;
    check(c);
  }
}

// A0, A6.6: what a row must not see adds nothing, and what it sees adds 0 times inf.
TEST_P(MLA, AnInfinityWithoutWeightIsSeenOnlyByItsRows) {
  Case c = small_case(DType::kF32);
  c.num_splits = 1;
  c.requests = {{4, 30}, {7, 20}, {3, 95}, {16, 0}};
  c.infinity_has_no_weight = true;
  for (const std::int32_t heads : {5, 16}) {  // 5: rows that are computed together end apart
    c.config.num_heads = heads;
    check(c);
  }
}

TEST_P(MLA, TheCacheIsReadOnceForAllHeadsOfATile) {
  Case c = small_case();
  c.num_splits = 1;
  c.requests = {{1, 99}};
  for (const Outcome& outcome : check(c)) {
    EXPECT_EQ(outcome.tasks, std::vector<std::int64_t>{1}) << "16 heads";
  }
}

// A work-group that stays goes from one request to the next, and from tile to tile.
TEST_P(MLA, MoreRequestsThanADeviceServesAtOnce) {
  Case c = small_case();
  c.num_splits = 1;
  c.requests.clear();
  for (std::int32_t i = 0; i < 250; ++i) c.requests.push_back({i % 7 == 0 ? 0 : 1, i * 37 % 211});
  check(c);
}

TEST_P(MLA, BitsDoNotDependOnTheRestOfTheBatch) {
  Case c = small_case();
  c.num_splits = 1;
  c.requests = {{1, 40}};
  const std::vector<Outcome> alone = check(c);
  c.requests = {{1, 40}, {3, 9}};
  const std::vector<Outcome> crowd = check(c);
  ASSERT_EQ(alone.size(), crowd.size());
  for (std::size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(std::equal(alone[i].out.begin(), alone[i].out.end(), crowd[i].out.begin()));
    EXPECT_TRUE(std::equal(alone[i].lse.begin(), alone[i].lse.end(), crowd[i].lse.begin()));
  }
}

std::int32_t round_up(std::int32_t size, std::int32_t step) {
  return (size + step - 1) / step * step;
}

class EveryLatentVariant : public testing::TestWithParam<const Variant*> {};

/// On every device that runs it: heads that fill a part of its tile, all of it and more, queries of
/// several tokens, splits, pages, infinite values, 8-bit caches and what batches say of requests.
TEST_P(EveryLatentVariant, IsRight) {
  const Variant& variant = *GetParam();
  const std::int32_t rows = std::min(variant.block_rows, 64);
  Case filled = small_case();
  filled.config.num_heads = rows;
  filled.requests = {{1, 70}, {0, 0}, {2, 5}, {1, 0}, {1, 47}};
  filled.num_splits = 2;
  Case more = small_case(DType::kBF16);
  more.config.num_heads = rows + 8;
  more.config.block_size = 5;
  more.config.kv_cache_dtype = DType::kFp8E4M3;
  more.config.scale = -0.05F;
  more.cache_scale = 0.5;
  more.num_splits = 3;
  Case part = small_case();
  part.config.num_heads = 5;
  part.config.kv_cache_dtype = DType::kInt8;
  part.cache_scale = 0x1p-5;
  Case infinite = small_case(DType::kBF16);
  infinite.config.num_heads = rows / 2;
  infinite.config.block_size = 1;
  infinite.requests = {{2, 40}, {7, 20}, {4, 62}};
  infinite.last_token_overflows = true;
  Case listed = small_case(DType::kBF16);
  listed.config.num_heads = rows;
  listed.config.use_spans = listed.config.use_directions = true;
  listed.config.use_first_keys = listed.config.use_trees = true;
  listed.requests = {{1, 70}, {9, 40}, {6, 61}, {3, 30}};
  listed.requests[0].first_key = 33;
  listed.requests[1].spans = {{42, 46}};
  listed.requests[2].parents = {-1, 0, 0, 1, 1, -1};
  listed.requests[3].direction = clattn::Direction::kBothWays;
  listed.num_splits = 2;
  bool ran = false;
  std::string why_not = "no device";
  for (const auto& context : all_contexts()) {
    const auto reasons = clattn::detail::why_not(variant, context->capabilities());
    if (!reasons.empty()) why_not = reasons.front();
    if (!reasons.empty()) continue;
    const attention_test::ForcedVariants choice(context, {&variant});
    for (Case c : {filled, more, part, infinite, listed}) {
      if (variant.kernel().rope_dim != 0) {
        c.config.rope_dim = variant.kernel().rope_dim;
        c.config.kv_lora_rank = variant.kernel().heads.front();
      }
      c.config.kv_lora_rank = round_up(c.config.kv_lora_rank, variant.unit().head_step);
      c.config.rope_dim = round_up(c.config.rope_dim, variant.unit().head_step);
      const clattn::detail::TypeSet queries = clattn::detail::unit_of(variant.unit_id).queries;
      if ((queries & clattn::detail::type_set(c.config.dtype)) == 0) c.config.dtype = DType::kBF16;
      c.config.kernel_family = variant.family();
      clattn::detail::KernelShape shape;
      shape.form = clattn::detail::CacheForm::kLatent;
      shape.head_size = c.config.kv_lora_rank;
      shape.rope_dim = c.config.rope_dim;
      shape.dtype = c.config.dtype;
      shape.cache_dtype = c.config.cache_dtype();
      if (!clattn::detail::takes_types(variant, shape)) continue;
      ran = true;
      const Outcome outcome = run(context, c);
      EXPECT_NE(std::find(outcome.kernels.begin(), outcome.kernels.end(), variant.name),
                outcome.kernels.end())
          << variant.name << " did not run: " << describe(c);
    }
  }
  if (!ran) GTEST_SKIP() << why_not;
}

INSTANTIATE_TEST_SUITE_P(
    Rows, EveryLatentVariant,
    testing::ValuesIn(attention_test::variants_of({clattn::detail::Role::kMLADecode})),
    [](const auto& tested) { return std::string(tested.param->name); });

/// Small enough for an interpreter of kernels that watches every access (test_tiny.cpp).
TEST(Tiny, LatentRows) {
  Case c = small_case();
  c.config.num_heads = 5;
  c.config.kv_lora_rank = 16;
  c.config.rope_dim = 8;
  c.config.block_size = 3;
  c.config.kernel_family = KernelFamily::kGpu;
  c.requests = {{1, 12}, {0, 0}, {2, 3}};
  c.num_splits = 2;
  for (const auto& context : all_contexts()) run(context, c);
}

/// The error of making or running something illegal names the field, its value and what is legal.
TEST(MLARefusals, NameFieldValueAndRange) {
  const auto& context = all_contexts().front();
  const auto refused = [&](auto change, clattn::ErrorCode code) {
    clattn::MLAConfig config = small_case().config;
    change(config);
    return error_text([&] { clattn::make_mla_impl(*context, config); }, code);
  };
  const auto unsupported = clattn::ErrorCode::kUnsupported;
  using Config = clattn::MLAConfig;
  EXPECT_EQ(refused([](Config& c) { c.kv_lora_rank = 520; }, unsupported),
            "backend CLATTN_MLA does not support this configuration: kv_lora_rank is 520, "
            "supported: 16 … 512 in steps of 16");
  EXPECT_NE(refused([](Config& c) { c.rope_dim = 12; }, unsupported).find("rope_dim is 12"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.num_heads = 0; }, unsupported).find("num_heads is 0"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.dtype = DType::kInt8; }, unsupported).find("dtype int8"),
            std::string::npos);
}

TEST(MLARefusals, CacheAndMetadataMustFitTheLayer) {
  const auto& context = all_contexts().front();
  const Case c = small_case();
  const Layout layout(c.requests, c.config.block_size);
  const clattn::Queue queue = context->create_queue();
  const auto impl = clattn::make_mla_impl(*context, c.config);
  const auto builder = clattn::make_mla_builder(context, c.config, layout.options(0));
  const auto& metadata = builder->build(queue, layout.batch());
  const clattn::Buffer any = context->allocate(std::size_t{1} << 20);
  clattn::MLACache cache{any, DType::kF16, layout.num_blocks, 16, 64, 16, {}};
  const auto forward = [&](const clattn::MLACache& given) {
    return error_text([&] {
      impl->forward(queue, {.query = {any.handle()}, .output = {any.handle()}}, given, metadata);
    });
  };
  clattn::MLACache other = cache;
  other.rope_dim = 24;
  EXPECT_EQ(forward(other),
            "kv_cache: 16 tokens x (64 + 24) of f16, legal: 16 x (64 + 16) of f16 as this layer "
            "was configured");
  other = cache;
  other.num_blocks = layout.num_blocks - 1;
  EXPECT_NE(forward(other).find("attn_metadata: limits.num_blocks of its builder is"),
            std::string::npos);
  other = cache;
  other.num_blocks = 1000;
  EXPECT_NE(forward(other).find("kv_cache: its buffer holds"), std::string::npos);
  other = cache;
  other.scale = any;
  EXPECT_NE(forward(other).find("kv_cache: scale given"), std::string::npos);
}

}  // namespace test_mla
