// Decode over x-packed caches against the oracle (A6.3 layouts, A6.7 semantics).
#include <clattn/compat/paged_attention.hpp>

#include "device/runtime_fixture.hpp"
#include "device/step_case.hpp"
#include "support/error_text.hpp"

namespace test_packed {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KernelFamily;
using step_test::Elements;
using step_test::FencedOutput;
using step_test::index;
using step_test::Layout;
using test::error_text;

enum class Scales : std::uint8_t { kNone, kPerTensor, kPerHead };

struct Case {
  clattn::AttentionConfig config;
  std::vector<std::int32_t> seq_lens;  ///< one query token each, also where it is 0
  std::int32_t num_splits = 0;
  Scales scales = Scales::kNone;
  bool one_allocation = false;  ///< keys and values split from one buffer
};

using Outcome = step_test::Launches;

std::string describe(const Case& c) {
  return fmt::format("{}/{} heads x {} page {} {}/{} family {} splits {} alibi {}",
                     c.config.num_heads, c.config.num_kv_heads, c.config.head_size,
                     c.config.block_size, to_string(c.config.dtype),
                     to_string(c.config.cache_dtype()), to_string(c.config.kernel_family),
                     c.num_splits, !c.config.alibi_slopes.empty());
}

/// Requests whose one query token is no part of seq_lens.
Layout make_layout(const Case& c) {
  std::vector<attention_test::Request> requests;
  for (const std::int32_t seq_len : c.seq_lens) requests.push_back({0, seq_len});
  Layout layout(requests, c.config.block_size);
  std::iota(layout.query_start_loc.begin(), layout.query_start_loc.end(), 0);
  return layout;
}

/// Powers of two, so that dividing by them is exact.
double scale_of(const Case& c, bool of_values, std::int64_t head) {
  if (c.scales == Scales::kNone) return 1.0;
  const int shift = c.scales == Scales::kPerHead ? static_cast<int>(head % 3) : 0;
  const double tensor = c.config.cache_dtype() == DType::kInt8 ? 0x1p-5 : 0.5;
  return std::ldexp(tensor * (of_values ? 2.0 : 1.0), -shift);
}

oracle::AttentionCase truth_of(const Case& c, const Layout& layout) {
  oracle::AttentionCase truth;
  truth.num_heads = c.config.num_heads;
  truth.num_kv_heads = c.config.num_kv_heads;
  truth.head_size = c.config.head_size;
  truth.block_size = c.config.block_size;
  truth.scale = c.config.scale ? static_cast<double>(*c.config.scale)
                               : 1.0 / std::sqrt(static_cast<double>(c.config.head_size));
  truth.causal = false;
  truth.alibi_slopes.assign(c.config.alibi_slopes.begin(), c.config.alibi_slopes.end());
  truth.query_start_loc = layout.query_start_loc;
  truth.seq_lens = layout.seq_lens;
  truth.block_table = layout.block_table;
  truth.max_blocks = layout.max_blocks;
  return truth;
}

struct PackedPair {
  Elements key, value;
};

/// K as [block, head, d / x, token, x], V as [block, head, d, token]; poison where no request is.
PackedPair make_caches(const Case& c, const Layout& layout, oracle::AttentionCase& truth) {
  const std::int64_t heads = truth.num_kv_heads, dims = truth.head_size, tokens = truth.block_size;
  const std::int64_t count = layout.num_blocks * tokens * heads * dims;
  const DType dtype = c.config.cache_dtype();
  const auto x = static_cast<std::int64_t>(16 / clattn::element_size_bytes(dtype));
  PackedPair pair{Elements(dtype, count), Elements(dtype, count)};
  truth.key_cache.assign(index(count), std::numeric_limits<double>::quiet_NaN());
  truth.value_cache = truth.key_cache;
  std::mt19937 random(21);
  std::normal_distribution<double> normal;
  for (std::size_t r = 0; r < layout.seq_lens.size(); ++r) {
    for (std::int64_t p = 0; p < layout.seq_lens[r]; ++p) {
      const std::int64_t slot = layout.slot(r, p, c.config.block_size);
      const std::int64_t block = slot / tokens, token = slot % tokens;
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dims; ++d) {
          const std::int64_t key_at =
              (((block * heads + h) * (dims / x) + d / x) * tokens + token) * x + d % x;
          const std::int64_t value_at = ((block * heads + h) * dims + d) * tokens + token;
          const std::size_t logical = index((slot * heads + h) * dims + d);
          truth.key_cache[logical] = pair.key.set(key_at, normal(random), scale_of(c, false, h));
          truth.value_cache[logical] =
              pair.value.set(value_at, normal(random), scale_of(c, true, h));
        }
      }
    }
  }
  return pair;
}

clattn::Buffer make_scales(const clattn::Context& context, const clattn::Queue& queue,
                           const Case& c) {
  if (c.scales == Scales::kNone) return {};
  const std::int64_t heads = c.scales == Scales::kPerHead ? c.config.num_kv_heads : 1;
  Elements scales(DType::kF32, 2 * heads);
  for (std::int64_t h = 0; h < heads; ++h) {
    scales.set(h, scale_of(c, false, h));
    scales.set(heads + h, scale_of(c, true, h));
  }
  return scales.upload(context, queue);
}

Outcome run(const std::shared_ptr<clattn::Context>& context, const Case& c) {
  const Layout layout = make_layout(c);
  oracle::AttentionCase truth = truth_of(c, layout);
  const clattn::Queue queue = context->create_queue();
  PackedPair pair = make_caches(c, layout, truth);
  const std::int64_t rows = layout.num_tokens() * c.config.num_heads;
  Elements query(c.config.dtype, rows * c.config.head_size);
  std::mt19937 random(22);
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < rows * c.config.head_size; ++i)
    truth.query.push_back(query.set(i, normal(random)));

  clattn::Buffer key = pair.key.upload(*context, queue);
  const clattn::Buffer value = pair.value.upload(*context, queue);
  clattn::PackedKVCache cache{.key = key.handle(),
                              .value = value.handle(),
                              .dtype = c.config.cache_dtype(),
                              .num_blocks = layout.num_blocks,
                              .block_size = c.config.block_size,
                              .num_kv_heads = c.config.num_kv_heads,
                              .head_size = c.config.head_size,
                              .scales = make_scales(*context, queue, c),
                              .scales_per_head = c.scales == Scales::kPerHead};
  if (c.one_allocation) {
    pair.key.bytes().insert(pair.key.bytes().end(), pair.value.bytes().begin(),
                            pair.value.bytes().end());
    key = pair.key.upload(*context, queue);
    cache = clattn::split_kv_cache(key, {.block_size = c.config.block_size,
                                         .num_kv_heads = c.config.num_kv_heads,
                                         .head_size = c.config.head_size,
                                         .dtype = c.config.cache_dtype()});
    EXPECT_EQ(cache.num_blocks, layout.num_blocks);
  }
  const clattn::Buffer q = query.upload(*context, queue);
  FencedOutput out(*context, queue, c.config.dtype, rows * c.config.head_size,
                   FencedOutput::kGuard);
  FencedOutput lse(*context, queue, DType::kF32, rows, 0);
  const auto attention = clattn::make_paged_attention(*context, c.config);
  const auto builder =
      clattn::make_paged_attention_builder(context, c.config, layout.options(c.num_splits));
  const auto& metadata = builder->build(queue, layout.batch());
  std::vector<clattn::LaunchRecord> launches;
  attention->forward(queue,
                     {.query = {q.handle()},
                      .output = {out.buffer.handle(), FencedOutput::kGuard},
                      .lse = lse.buffer.handle()},
                     cache, metadata, nullptr, &launches);
  const oracle::AttentionResult want = oracle::attention(truth, step_test::element(c.config.dtype));
  step_test::expect_close(out.read(queue), want.out, &want.bound, describe(c) + " out");
  step_test::expect_close(lse.read(queue), want.lse, nullptr, describe(c) + " lse");
  return Outcome(launches);
}

Case small_case(DType dtype = DType::kF16) {
  Case c;
  c.config.num_heads = 8;
  c.config.num_kv_heads = 2;
  c.config.head_size = 64;
  c.config.block_size = 16;
  c.config.dtype = dtype;
  c.seq_lens = {37, 0, 1, 16, 200};
  return c;
}

class Packed : public testing::TestWithParam<KernelFamily> {
 protected:
  std::vector<Outcome> check(Case c) {
    c.config.kernel_family = GetParam();
    return step_test::on_able_devices(
        [&](const auto* device) { return clattn::validate_paged_attention(c.config, device); },
        [&](const auto& context) { return run(context, c); });
  }
};

// A6.3: PagedAttention.split_kv_cache.
TEST_P(Packed, A6_3_KeysAndValuesOfOneAllocation) {
  Case c = small_case();
  c.one_allocation = true;
  check(c);
}

TEST_P(Packed, A6_7_EveryTypeOfQueryAndCache) {
  struct Types {
    DType dtype, cache_dtype;
    Scales scales;
  };
  constexpr std::array kTypes = {Types{DType::kF16, DType::kF16, Scales::kNone},
                                 Types{DType::kF32, DType::kF32, Scales::kNone},
                                 Types{DType::kBF16, DType::kBF16, Scales::kNone},
                                 Types{DType::kF16, DType::kFp8E4M3, Scales::kPerHead},
                                 Types{DType::kF32, DType::kFp8E5M2, Scales::kPerTensor},
                                 Types{DType::kBF16, DType::kInt8, Scales::kPerHead}};
  for (const auto& [dtype, cache_dtype, scales] : kTypes) {
    Case c = small_case(dtype);
    c.config.kv_cache_dtype = cache_dtype;
    c.scales = scales;
    check(c);
    c.num_splits = 3;
    check(c);
  }
}

TEST_P(Packed, HeadSizesAndGroups) {
  for (const std::int32_t head_size : {8, 72, 80, 128, 256}) {
    Case c = small_case();
    c.config.head_size = head_size;
    c.config.num_heads = head_size == 72 ? 2 : 40;  // groups of 1 and of 20
    check(c);
  }
}

TEST_P(Packed, PagesAndForcedSplits) {
  for (const std::int32_t block_size : {1, 5, 8, 32}) {
    Case c = small_case();
    c.config.block_size = block_size;
    for (const std::int32_t splits : {1, 2, 1000}) {
      c.num_splits = splits;
      for (const Outcome& outcome : check(c))
        EXPECT_EQ(outcome.kernels.back().starts_with("merge"), splits > 1);
    }
  }
}

TEST_P(Packed, AlibiAndScale) {
  Case c = small_case();
  for (int h = 0; h < c.config.num_heads; ++h)
    c.config.alibi_slopes.push_back(std::ldexp(1.0F, -1 - h));
  c.config.scale = 0.3F;
  c.config.kv_cache_dtype = DType::kFp8E4M3;
  c.scales = Scales::kPerTensor;
  check(c);
  c.num_splits = 3;
  check(c);
}

TEST_P(Packed, A9_9_WithoutKeysTheOutputIs0AndTheLseMinusInfinity) {
  Case c = small_case();
  c.seq_lens = {0, 0, 0};
  check(c);
  c.seq_lens = {};
  check(c);
}

TEST_P(Packed, A6_7_TheChooserSplitsIntoPartitionsOf512) {
  Case c = small_case();
  c.config.num_heads = c.config.num_kv_heads = 1;
  c.config.head_size = 8;
  c.seq_lens = {512, 3};
  for (const Outcome& outcome : check(c)) {  // one partition: v1
    EXPECT_EQ(outcome.tasks, std::vector<std::int64_t>{2});
  }
  c.seq_lens = {1025, 513, 3, 0};
  for (const Outcome& outcome : check(c)) {  // v2: 3 + 2 + 1 + 1 partitions, 2 rows to merge
    EXPECT_EQ(outcome.tasks, (std::vector<std::int64_t>{7, 2}));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Packed, testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

/// Small enough for an interpreter of kernels that watches every access (test_tiny.cpp).
void expect_tiny(std::int32_t block_size) {
  Case c = small_case();
  c.config.num_heads = 3;
  c.config.num_kv_heads = 1;
  c.config.head_size = 16;
  c.config.kernel_family = KernelFamily::kGpu;
  c.seq_lens = {18, 0, 1};
  c.num_splits = 2;
  c.config.block_size = block_size;
  for (const auto& context : all_contexts()) run(context, c);
}

TEST(Tiny, PackedCache) {
  expect_tiny(8);
}
TEST(Tiny, PackedCacheOfOddPages) {
  expect_tiny(3);
}

TEST(PackedChooser, A6_7) {
  EXPECT_EQ(clattn::kPagedAttentionPartitionSize, 512);
  EXPECT_TRUE(clattn::use_paged_attention_v1(0, 0, 1));
  EXPECT_TRUE(clattn::use_paged_attention_v1(512, 1, 1));
  EXPECT_FALSE(clattn::use_paged_attention_v1(513, 1, 1));
  EXPECT_FALSE(clattn::use_paged_attention_v1(8192, 16, 32));
  EXPECT_TRUE(clattn::use_paged_attention_v1(8192, 17, 32));
  EXPECT_FALSE(clattn::use_paged_attention_v1(8193, 17, 32));
}

TEST(PackedRefusals, NameFieldValueAndRange) {
  const auto& context = all_contexts().front();
  const auto refused = [&](auto change) {
    clattn::AttentionConfig config = small_case().config;
    change(config);
    return error_text([&] { clattn::make_paged_attention(*context, config); },
                      clattn::ErrorCode::kUnsupported);
  };
  using Config = clattn::AttentionConfig;
  EXPECT_EQ(refused([](Config& c) {
              c.head_size = 72;
              c.kv_cache_dtype = DType::kInt8;
            }),
            "backend paged_attention does not support this configuration: head_size 72 not "
            "supported with a packed cache of int8: multiples of 16 are");
  EXPECT_NE(refused([](Config& c) { c.sliding_window = 4; }).find("sliding_window not supported"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.logits_soft_cap = 4; }).find("logits_soft_cap not supported"),
            std::string::npos);
}

TEST(PackedRefusals, QueriesCachesAndMetadataMustFit) {
  const auto& context = all_contexts().front();
  const Case c = small_case();
  const Layout layout = make_layout(c);
  const clattn::Queue queue = context->create_queue();
  const auto attention = clattn::make_paged_attention(*context, c.config);
  const auto builder = clattn::make_paged_attention_builder(context, c.config, layout.options(0));
  const auto invalid = clattn::ErrorCode::kInvalidArgument;
  clattn::BuilderOptions recorded = layout.options(0);
  recorded.graph_batch_size = 4;
  EXPECT_NE(error_text([&] { clattn::make_paged_attention_builder(context, c.config, recorded); },
                       clattn::ErrorCode::kUnsupported)
                .find("graph_batch_size is 4"),
            std::string::npos);
  Layout two = layout;
  for (std::size_t r = 1; r < two.query_start_loc.size(); ++r) two.query_start_loc[r] += 1;
  EXPECT_EQ(error_text([&] { builder->build(queue, two.batch()); }, invalid),
            "query_start_loc: a request has 2 query tokens, legal: 0 or 1");

  const auto& metadata = builder->build(queue, layout.batch());
  const clattn::Buffer any = context->allocate(std::size_t{1} << 20);
  const clattn::PackedKVCache cache{
      any.handle(), any.handle(), DType::kF16, layout.num_blocks, 16, 2, 64, {}, false};
  const auto forward = [&](const clattn::PackedKVCache& given) {
    return error_text(
        [&] {
          attention->forward(queue, {.query = {any.handle()}, .output = {any.handle()}}, given,
                             metadata);
        },
        invalid);
  };
  clattn::PackedKVCache other = cache;
  other.block_size = 8;
  EXPECT_NE(forward(other).find("kv_cache: 8 tokens x 2 heads x 64 of f16, legal: 16"),
            std::string::npos);
  other = cache;
  other.num_blocks = 2;
  EXPECT_NE(forward(other).find("attn_metadata: limits.num_blocks of its builder is"),
            std::string::npos);
  const std::size_t page = std::size_t{16} * 2 * 64 * 2;
  const clattn::Buffer one_short =
      context->allocate(index(layout.num_blocks) * page - sizeof(std::uint16_t));
  const std::string want = fmt::format("holds {} elements, legal: at least {} (num_blocks {})",
                                       index(layout.num_blocks) * page / 2 - 1,
                                       index(layout.num_blocks) * page / 2, layout.num_blocks);
  other = cache;
  other.key = one_short.handle();
  EXPECT_EQ(forward(other), "kv_cache: key " + want);
  other = cache;
  other.value = one_short.handle();
  EXPECT_EQ(forward(other), "kv_cache: value " + want);
  other = cache;
  other.value_offset = 12;
  EXPECT_EQ(forward(other), "kv_cache: an offset is 12, legal: multiples of 8 elements, >= 0");
  other = cache;
  other.scales = any;
  EXPECT_NE(forward(other).find("kv_cache: scales given"), std::string::npos);
}

}  // namespace test_packed
