// Latent decode against the oracle: MLA is attention whose keys and values are the same rows, of
// which the output keeps the latent part.
#include <clattn/mla.hpp>
#include <utility>

#include "device/forced_variant.hpp"
#include "device/runtime_fixture.hpp"
#include "device/step_case.hpp"
#include "kernels/choose/variants.hpp"
#include "support/error_text.hpp"

namespace {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KernelFamily;
using clattn::detail::Variant;
using step_test::Elements;
using step_test::FencedOutput;
using step_test::index;
using step_test::Layout;
using step_test::Request;
using test::error_text;

struct Case {
  clattn::MLAConfig config;
  std::vector<Request> requests;
  std::int32_t num_splits = 0;
  std::int64_t query_padding = 0;
  std::int32_t graph_batch_size = 0;  ///< of recorded steps, whose plans are padded
  double cache_scale = 1.0;           ///< quantized caches: real = stored * cache_scale
  bool last_token_overflows = false;  ///< each request's newest row is inf, seen by its last query
  /// An element of each request's last row but one is inf, and every query's there is below 0: the
  /// logit is -inf, the weight 0, and 0 times inf is NaN.
  bool infinity_has_no_weight = false;
};
constexpr std::int64_t kInfiniteElement = 3;  ///< a latent one

struct Outcome : step_test::Launches {
  std::vector<double> out, lse;
  bool rounds_weights = false;
};

std::string describe(const Case& c) {
  return fmt::format("{} heads x ({} + {}) page {} {}/{} family {} splits {}", c.config.num_heads,
                     c.config.kv_lora_rank, c.config.rope_dim, c.config.block_size,
                     to_string(c.config.dtype), to_string(c.config.cache_dtype()),
                     to_string(c.config.kernel_family), c.num_splits);
}

oracle::AttentionCase truth_of(const Case& c, const Layout& layout) {
  oracle::AttentionCase truth;
  truth.num_heads = c.config.num_heads;
  truth.num_kv_heads = 1;
  truth.head_size = c.config.kv_lora_rank + c.config.rope_dim;
  truth.block_size = c.config.block_size;
  truth.scale = c.config.scale ? static_cast<double>(*c.config.scale)
                               : 1.0 / std::sqrt(static_cast<double>(truth.head_size));
  truth.query_start_loc = layout.query_start_loc;
  truth.seq_lens = layout.seq_lens;
  truth.block_table = layout.block_table;
  truth.max_blocks = layout.max_blocks;
  return truth;
}

/// Rows of all requests; what no request owns stays poison on the device and NaN for the oracle.
Elements make_cache(const Case& c, const Layout& layout, oracle::AttentionCase& truth) {
  const std::int64_t width = truth.head_size;
  const std::int64_t count = layout.num_blocks * c.config.block_size * width;
  Elements cache(c.config.cache_dtype(), count);
  truth.key_cache.assign(index(count), std::numeric_limits<double>::quiet_NaN());
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  for (std::size_t r = 0; r < layout.seq_lens.size(); ++r) {
    for (std::int64_t p = 0; p < layout.seq_lens[r]; ++p) {
      const std::int64_t at = layout.slot(r, p, c.config.block_size) * width;
      for (std::int64_t d = 0; d < width; ++d) {
        const bool inf =
            (c.last_token_overflows && p + 1 == layout.seq_lens[r]) ||
            (c.infinity_has_no_weight && p + 2 == layout.seq_lens[r] && d == kInfiniteElement);
        truth.key_cache[index(at + d)] = cache.set(
            at + d, inf ? std::numeric_limits<double>::infinity() : normal(random), c.cache_scale);
      }
    }
  }
  truth.value_cache = truth.key_cache;
  return cache;
}

Elements make_query(const Case& c, const Layout& layout, oracle::AttentionCase& truth) {
  const std::int64_t row = std::int64_t{c.config.num_heads} * truth.head_size;
  const std::int64_t stride = row + c.query_padding;
  Elements query(c.config.dtype, layout.num_tokens() * stride);
  std::mt19937 random(12);
  std::normal_distribution<double> normal;
  for (std::int64_t t = 0; t < layout.num_tokens(); ++t) {
    for (std::int64_t i = 0; i < row; ++i) {
      const bool below_0 = c.infinity_has_no_weight && i % truth.head_size == kInfiniteElement;
      const double value = normal(random);
      truth.query.push_back(query.set(t * stride + i, below_0 ? -0.5 - std::abs(value) : value));
    }
  }
  return query;
}

/// Compares with the oracle, whose rows are cut to their latent part. Rows with a logit of +inf or
/// NaN have no right answer; in the others a NaN of the oracle must be one.
void expect_truth(const Case& c, const oracle::AttentionCase& truth, const Outcome& outcome) {
  oracle::AttentionResult want = oracle::attention(truth, step_test::element(c.config.dtype));
  if (outcome.rounds_weights) want.add_weight_rounding();
  const std::size_t width = index(truth.head_size), rank = index(c.config.kv_lora_rank);
  std::vector<double> got = outcome.out, got_lse = outcome.lse, want_lse = want.lse;
  std::vector<double> want_out(got.size(), 0.0), bound(got.size(), 0.0);
  ASSERT_EQ(want_lse.size() * rank, got.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t row = i / rank, from = row * width + i % rank;
    const bool answered = want.lse[row] < std::numeric_limits<double>::infinity();
    if (answered && std::isfinite(want.out[from])) {
      want_out[i] = want.out[from];
      bound[i] = want.bound[from];
      continue;
    }
    ASSERT_TRUE(!answered || std::isnan(got[i])) << describe(c) << " out " << i << " is " << got[i];
    got[i] = 0.0;
    if (!answered) got_lse[row] = want_lse[row] = 0.0;
  }
  // An infinite key has no error bound.
  const auto* bounds = c.infinity_has_no_weight ? nullptr : &bound;
  step_test::expect_close(got, want_out, bounds, describe(c) + " out");
  step_test::expect_close(got_lse, want_lse, nullptr, describe(c) + " lse");
}

Outcome run(const std::shared_ptr<clattn::Context>& context, const Case& c) {
  const Layout layout(c.requests, c.config.block_size);
  oracle::AttentionCase truth = truth_of(c, layout);
  const clattn::Queue queue = context->create_queue();
  const Elements rows = make_cache(c, layout, truth);
  const Elements query = make_query(c, layout, truth);
  clattn::MLACache cache{.buffer = rows.upload(*context, queue),
                         .dtype = c.config.cache_dtype(),
                         .num_blocks = layout.num_blocks,
                         .block_size = c.config.block_size,
                         .kv_lora_rank = c.config.kv_lora_rank,
                         .rope_dim = c.config.rope_dim,
                         .scale = {}};
  if (c.cache_scale != 1.0) {
    Elements scale(DType::kF32, 1);
    scale.set(0, c.cache_scale);
    cache.scale = scale.upload(*context, queue);
  }
  const clattn::Buffer q = query.upload(*context, queue);
  const std::int64_t num_rows = layout.num_tokens() * c.config.num_heads;
  FencedOutput out(*context, queue, c.config.dtype, num_rows * c.config.kv_lora_rank,
                   FencedOutput::kGuard);
  FencedOutput lse(*context, queue, DType::kF32, num_rows, 0);

  const auto impl = clattn::make_mla_impl(*context, c.config);
  clattn::BuilderOptions options = layout.options(c.num_splits);
  options.graph_batch_size = c.graph_batch_size;
  options.decode_threshold = 4;
  const auto builder = clattn::make_mla_builder(context, c.config, options);
  const auto& metadata = builder->build(queue, layout.batch());
  const std::int64_t stride = std::int64_t{c.config.num_heads} * truth.head_size + c.query_padding;
  std::vector<clattn::LaunchRecord> launches;
  impl->forward(queue,
                {.query = {q.handle(), 0, stride},
                 .output = {out.buffer.handle(), FencedOutput::kGuard},
                 .lse = lse.buffer.handle()},
                cache, metadata, nullptr, &launches);
  const Outcome outcome{step_test::Launches(launches), out.read(queue), lse.read(queue),
                        step_test::rounds_weights(impl->kernels())};

  expect_truth(c, truth, outcome);
  return outcome;
}

/// The latent row of cases that say nothing of it.
struct LatentRow {
  std::int32_t rank, rope;
};
constexpr LatentRow kSmallRow{64, 16};
constexpr LatentRow kTiledRow{256, 64};  ///< one that matrix units take, where there are any

Case small_case(DType dtype = DType::kF16) {
  Case c;
  c.config.num_heads = 16;
  c.config.kv_lora_rank = kSmallRow.rank;
  c.config.rope_dim = kSmallRow.rope;
  c.config.block_size = 16;
  c.config.dtype = dtype;
  c.requests = {{1, 40}, {0, 0}, {1, 0}, {4, 30}, {16, 9}, {0, 20}, {1, 200}};
  return c;
}

struct Kernels {
  KernelFamily family;
  LatentRow row;
};

class MLA : public testing::TestWithParam<Kernels> {
 protected:
  std::vector<Outcome> check(Case c) {
    c.config.kernel_family = GetParam().family;
    if (c.config.kv_lora_rank == kSmallRow.rank) {
      c.config.kv_lora_rank = GetParam().row.rank;
      c.config.rope_dim = GetParam().row.rope;
    }
    return step_test::on_able_devices(
        [&](const auto* device) { return clattn::validate_mla_configuration(c.config, device); },
        [&](const auto& context) { return run(context, c); });
  }
};

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

std::string kernels_name(const testing::TestParamInfo<Kernels>& tested) {
  return fmt::format("{}_{}", to_string(tested.param.family), tested.param.row.rank);
}
INSTANTIATE_TEST_SUITE_P(Families, MLA,
                         testing::Values(Kernels{KernelFamily::kAuto, kSmallRow},
                                         Kernels{KernelFamily::kAuto, kTiledRow},
                                         Kernels{KernelFamily::kGpu, kSmallRow}),
                         kernels_name);

std::vector<const Variant*> latent_variants() {
  std::vector<const Variant*> chosen;
  for (const Variant& variant : clattn::detail::variants()) {
    if (variant.role == clattn::detail::Role::kMLADecode) chosen.push_back(&variant);
  }
  return chosen;
}

class EveryLatentVariant : public testing::TestWithParam<const Variant*> {};

/// On every device that runs it: heads that fill a part of its tile, all of it and more, queries of
/// several tokens, splits, pages, infinite values and 8-bit caches.
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
  bool ran = false;
  std::string why_not = "no device";
  for (const auto& context : all_contexts()) {
    const auto reasons = clattn::detail::why_not(variant, context->capabilities());
    if (!reasons.empty()) why_not = reasons.front();
    if (!reasons.empty()) continue;
    const attention_test::ForcedVariant choice(context, variant);
    for (Case c : {filled, more, part, infinite}) {
      if (variant.kernel().rope_dim != 0) {
        c.config.rope_dim = variant.kernel().rope_dim;
        c.config.kv_lora_rank = variant.kernel().heads.front();
      }
      c.config.kernel_family = variant.family();
      clattn::detail::KernelShape shape;
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

INSTANTIATE_TEST_SUITE_P(Rows, EveryLatentVariant, testing::ValuesIn(latent_variants()),
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

}  // namespace
