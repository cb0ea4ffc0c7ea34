// Everything that a layer may add to plain attention (A0), in every kernel family: each option
// alone, pairs of all of them, and what must not change a bit. A mixed batch runs the decode and
// the prefill kernels, a forced split the merge too.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <string_view>

#include "device/attention_case.hpp"

namespace test_options {

using attention_test::all_contexts;
using attention_test::CaseResult;
using attention_test::CaseSpec;
using clattn::AttentionType;
using clattn::DType;
using clattn::KernelFamily;
using clattn::KVCacheLayout;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Queries of 1 and 4 tokens, and long ones whose keys fill several tiles of the prefill kernel.
CaseSpec mixed_batch(std::int32_t group, std::int32_t head_size) {
  CaseSpec spec;
  spec.config.num_kv_heads = 2;
  spec.config.num_heads = 2 * group;
  spec.config.head_size = head_size;
  spec.config.block_size = 16;
  spec.unseen_is_nan = true;
  spec.requests = {{1, 0}, {1, 130}, {4, 61}, {35, 170}, {19, 0}};
  return spec;
}

/// Runs cases with one kernel family, on the devices that have it; the others refuse it.
class Options : public testing::TestWithParam<KernelFamily> {
 protected:
  static std::vector<std::shared_ptr<clattn::Context>> devices() {
    std::vector<std::shared_ptr<clattn::Context>> able;
    for (const auto& context : all_contexts()) {
      CaseSpec spec = mixed_batch(4, 64);
      spec.config.kernel_family = GetParam();
      const auto& backend = *clattn::get_attn_backend(spec.config, nullptr, "FLASHINFER");
      if (backend.validate_configuration(spec.config, &context->capabilities()).empty()) {
        able.push_back(context);
      } else {
        EXPECT_THROW(attention_test::run_case(context, spec), clattn::Error);
      }
    }
    return able;
  }

  static CaseResult expect_right(CaseSpec spec) {
    CaseResult last;
    std::uint32_t next = 1;
    for (attention_test::Request& request : spec.requests) request.identity = next++;
    spec.config.kernel_family = GetParam();
    if (spec.planned_for) spec.planned_for->kernel_family = GetParam();
    for (const auto& context : devices()) {
      last = attention_test::run_case(context, spec);
      EXPECT_EQ(last.fault, "") << describe(spec);
      EXPECT_LE(last.worst_share, 1.0) << describe(spec) << "\n " << last.worst_place;
    }
    return last;
  }

  static std::vector<std::int32_t> keys_seen(CaseSpec spec, attention_test::Request request);
  static void expect_same_bits(CaseSpec spec, const std::function<void(CaseSpec&)>& add);
};

std::vector<float> slopes(std::int32_t num_heads) {
  std::vector<float> values;
  for (std::int32_t h = 0; h < num_heads; ++h) {
    values.push_back(static_cast<float>(std::exp2(-8.0 * (h + 1) / num_heads)));
  }
  return values;
}

/// Logits small and large against those of the keys, and one that means "no sink".
std::vector<float> sinks(std::int32_t num_heads) {
  constexpr std::array kValues = {0.5F, -kInf, 9.0F, -3.0F, 2.0F};
  std::vector<float> values;
  for (std::int32_t h = 0; h < num_heads; ++h) {
    values.push_back(kValues.at(static_cast<std::size_t>(h) % kValues.size()));
  }
  return values;
}

void read_keys_without_pages(CaseSpec& spec) {
  spec.config.attn_type = AttentionType::kEncoderOnly;
  spec.config.block_size = 0;
}

/// The widths of windows and chunks that the tests try; all are arguments of one kernel.
constexpr std::array kWidths = {1, 16, 33, 5000};

struct Option {
  std::string_view name;
  std::function<void(CaseSpec&)> add;
};

TEST_P(Options, EachAlone) {
  const Option options[] = {
      {"soft cap", [](CaseSpec& s) { s.config.logits_soft_cap = 2.5F; }},
      {"ALiBi", [](CaseSpec& s) { s.config.alibi_slopes = slopes(s.config.num_heads); }},
      {"sinks", [](CaseSpec& s) { s.config.sinks = sinks(s.config.num_heads); }},
      {"mask", [](CaseSpec& s) { s.config.custom_mask = true; }},
      {"fp8 output", [](CaseSpec& s) { s.config.output_fp8 = true; }},
      {"e4m3 cache", [](CaseSpec& s) { s.config.kv_cache_dtype = DType::kFp8E4M3; }},
      {"e5m2 cache", [](CaseSpec& s) { s.config.kv_cache_dtype = DType::kFp8E5M2; }},
      {"int8 cache", [](CaseSpec& s) { s.config.kv_cache_dtype = DType::kInt8; }},
      {"no pages", read_keys_without_pages},
  };
  for (const Option& option : options) {
    SCOPED_TRACE(option.name);
    CaseSpec spec = mixed_batch(4, 64);
    option.add(spec);
    for (const std::int32_t splits : {1, 3}) {
      spec.num_splits = splits;
      spec.scales_per_head = splits == 3;
      expect_right(spec);
    }
  }
}

TEST_P(Options, WindowsAndChunksOfEveryWidth) {
  for (const std::int32_t width : kWidths) {
    for (const bool chunked : {false, true}) {
      CaseSpec spec = mixed_batch(4, 64);
      (chunked ? spec.config.attention_chunk_size : spec.config.sliding_window) = width;
      for (const std::int32_t splits : {1, 3}) {
        spec.num_splits = splits;
        spec.causal = splits == 1;
        expect_right(spec);
      }
    }
  }
}

/// How many keys each row of one request sees: queries of zeros weigh them all alike, so that the
/// LSE counts them. Empty where no device has the family.
std::vector<std::int32_t> Options::keys_seen(CaseSpec spec, attention_test::Request request) {
  spec.sharpness = 1e-30;
  spec.requests = {request};
  std::vector<std::int32_t> counts;
  const CaseResult result = expect_right(spec);
  const auto heads = static_cast<std::size_t>(spec.config.num_heads);
  for (std::size_t i = 0; i < result.lse.size(); i += heads) {
    counts.push_back(static_cast<std::int32_t>(std::lround(std::exp(result.lse[i]))));
  }
  return counts;
}

using Counts = std::vector<std::int32_t>;

TEST_P(Options, AWindowReachesAsFarAheadAsBackUnlessTheBatchIsCausal) {
  if (devices().empty()) return;
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch(1, 64);
    spec.num_splits = splits;
    spec.config.sliding_window = 2;
    EXPECT_EQ(keys_seen(spec, {4, 0}), (Counts{1, 2, 2, 2}));
    spec.causal = false;
    EXPECT_EQ(keys_seen(spec, {4, 0}), (Counts{2, 3, 3, 2}));  // keys 0 1, 0 … 2, 1 … 3, 2 3
    spec.config.sliding_window = 6;
    EXPECT_EQ(keys_seen(spec, {4, 16}), (Counts{9, 8, 7, 6}));  // 11, 12, 13, 14 … 19
    spec.config.sliding_window = 1;
    EXPECT_EQ(keys_seen(spec, {3, 3}), (Counts{1, 1, 1}));
    spec.config.sliding_window = 3;
    EXPECT_EQ(keys_seen(spec, {1, 7}), (Counts{3}));  // nothing lies ahead of the newest token
  }
}

TEST_P(Options, LookbackShowsTheChunksBeforeTheOwnOne) {
  if (devices().empty()) return;
  for (const std::int32_t splits : {1, 3}) {
    CaseSpec spec = mixed_batch(1, 64);
    spec.num_splits = splits;
    spec.config.attention_chunk_size = 4;
    EXPECT_EQ(keys_seen(spec, {3, 6}), (Counts{3, 4, 1}));
    spec.config.chunk_lookback = 1;
    EXPECT_EQ(keys_seen(spec, {3, 6}), (Counts{7, 8, 5}));  // keys 0 … 6, 0 … 7, 4 … 8
    spec.causal = false;
    EXPECT_EQ(keys_seen(spec, {3, 6}), (Counts{8, 8, 5}));
  }
}

TEST_P(Options, LookbackOverChunksOfEveryWidth) {
  for (const std::int32_t width : kWidths) {
    for (const std::int32_t lookback : {1, 3}) {
      CaseSpec spec = mixed_batch(4, 64);
      spec.config.attention_chunk_size = width;
      spec.config.chunk_lookback = lookback;
      spec.num_splits = lookback;
      spec.causal = lookback == 1;
      expect_right(spec);
    }
  }
}

TEST_P(Options, AnOverflowedTokenHarmsNoRowThatDoesNotSeeIt) {
  for (const std::int32_t width : {16, 33}) {
    for (const bool chunked : {false, true}) {
      CaseSpec spec = mixed_batch(4, 64);
      (chunked ? spec.config.attention_chunk_size : spec.config.sliding_window) = width;
      spec.requests = {{2, 130}, {7, 20}, {35, 0}, {70, 3}};
      spec.last_token_overflows = true;
      expect_right(spec);
      spec.requests = {{4, 14}, {4, 31}, {70, 3}};
      spec.last_token_overflows = false;
      spec.first_token_overflows = true;
      expect_right(spec);
    }
  }
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.custom_mask = true;
  spec.requests = {{4, 130}, {70, 3}};
  spec.first_token_overflows = spec.last_token_overflows = true;
  expect_right(spec);
}

TEST_P(Options, WindowAndChunkTogether) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.sliding_window = 20;
  spec.config.attention_chunk_size = 48;
  expect_right(spec);
}

// A9.4: decode rows over the XFORMERS cache keep their window, their cap and the cache's scales.
TEST_P(Options, A9_4_XFormersDecodesKeepWindowCapAndScales) {
  const Option options[] = {
      {"window", [](CaseSpec& s) { s.config.sliding_window = 33; }},
      {"cap", [](CaseSpec& s) { s.config.logits_soft_cap = 2.5F; }},
      {"scales", [](CaseSpec& s) { s.config.kv_cache_dtype = DType::kFp8E4M3; }},
  };
  CaseSpec spec = mixed_batch(4, 64);
  spec.backend = "XFORMERS";
  spec.layout = KVCacheLayout::kNHD;
  spec.write_cache = true;
  spec.unseen_is_nan = false;
  spec.scales_per_head = true;
  spec.requests = {{1, 0}, {1, 130}, {1, 61}, {1, 700}};
  CaseSpec all = spec;
  for (const Option& option : options) {
    SCOPED_TRACE(option.name);
    CaseSpec one = spec;
    option.add(one);
    option.add(all);
    expect_right(one);
  }
  expect_right(all);
}

enum : unsigned { kCap = 1, kAlibi = 2, kSink = 4, kMask = 8, kFp8Out = 16 };
enum class Reach { kAll, kWindow, kChunk };

/// Rows such that any two values of any two columns meet in one. Page 0: no pages.
struct Combination {
  std::int32_t head_size, group;
  DType dtype, cache_dtype;
  std::int32_t page;
  Reach reach;
  unsigned extras;
};
constexpr std::array kCombinations = std::to_array<Combination>({
    {256, 8, DType::kF32, DType::kFp8E5M2, 5, Reach::kChunk, kSink | kMask},
    {128, 1, DType::kF16, DType::kF16, 16, Reach::kWindow, kCap | kAlibi | kMask | kFp8Out},
    {80, 4, DType::kBF16, DType::kInt8, 1, Reach::kAll, kFp8Out},
    {64, 8, DType::kBF16, DType::kBF16, 0, Reach::kAll, kCap | kAlibi | kSink},
    {128, 1, DType::kF16, DType::kFp8E4M3, 1, Reach::kWindow, kSink},
    {256, 1, DType::kF32, DType::kFp8E4M3, 5, Reach::kChunk, kCap | kAlibi | kFp8Out},
    {80, 4, DType::kBF16, DType::kFp8E5M2, 16, Reach::kWindow, kCap | kAlibi | kSink | kMask},
    {64, 8, DType::kF32, DType::kInt8, 16, Reach::kWindow, kCap | kSink | kMask | kFp8Out},
    {64, 1, DType::kF16, DType::kFp8E5M2, 1, Reach::kAll, kAlibi | kMask | kFp8Out},
    {256, 4, DType::kF16, DType::kF16, 0, Reach::kWindow, kMask | kFp8Out},
    {128, 8, DType::kF16, DType::kInt8, 5, Reach::kChunk, kCap | kAlibi},
    {64, 4, DType::kBF16, DType::kFp8E4M3, 5, Reach::kChunk, kCap | kAlibi | kMask | kFp8Out},
    {128, 4, DType::kF32, DType::kFp8E5M2, 16, Reach::kAll, kAlibi},
    {80, 8, DType::kF32, DType::kF32, 1, Reach::kChunk, kCap | kMask},
    {80, 8, DType::kF16, DType::kFp8E4M3, 5, Reach::kAll, kMask | kFp8Out},
    {256, 1, DType::kBF16, DType::kInt8, 1, Reach::kAll, kCap | kAlibi | kMask | kFp8Out},
    {80, 1, DType::kF32, DType::kF32, 0, Reach::kWindow, kSink | kMask | kFp8Out},
    {256, 4, DType::kF16, DType::kFp8E4M3, 16, Reach::kChunk, kCap | kMask},
    {128, 4, DType::kBF16, DType::kBF16, 5, Reach::kWindow, kAlibi | kSink | kFp8Out},
    {128, 1, DType::kF32, DType::kF32, 0, Reach::kWindow, kFp8Out},
    {72, 3, DType::kF16, DType::kFp8E4M3, 16, Reach::kWindow,
     kCap | kAlibi | kSink | kMask | kFp8Out},                           // CPUs: vectors of 8 lanes
    {128, 4, DType::kBF16, DType::kFp8E5M2, 16, Reach::kWindow, kMask},  // CPUs: bf16 pairs
});

CaseSpec case_of(const Combination& row) {
  CaseSpec spec = mixed_batch(row.group, row.head_size);
  spec.config.dtype = row.dtype;
  spec.config.kv_cache_dtype = row.cache_dtype;
  spec.config.block_size = row.page;
  if (row.page == 0) read_keys_without_pages(spec);
  const std::int32_t heads = spec.config.num_heads;
  if ((row.extras & kCap) != 0) spec.config.logits_soft_cap = 3.0F;
  if ((row.extras & kAlibi) != 0) spec.config.alibi_slopes = slopes(heads);
  if ((row.extras & kSink) != 0) spec.config.sinks = sinks(heads);
  spec.config.custom_mask = (row.extras & kMask) != 0;
  spec.config.output_fp8 = (row.extras & kFp8Out) != 0;
  return spec;
}

TEST_P(Options, EveryPair) {
  for (const Combination& row : kCombinations) {
    CaseSpec spec = case_of(row);
    for (std::size_t i = 0; i < kWidths.size(); ++i) {
      if (row.reach == Reach::kWindow) spec.config.sliding_window = kWidths.at(i);
      if (row.reach == Reach::kChunk) spec.config.attention_chunk_size = kWidths.at(i);
      spec.num_splits = i % 2 == 0 ? 3 : 1;
      spec.layout = i % 2 == 0 ? KVCacheLayout::kNHD : KVCacheLayout::kHND;
      spec.scales_per_head = i % 2 == 0;
      spec.sharpness = i == 1 ? 4.0 : 1.0;
      if (row.reach == Reach::kAll && i == 2) break;  // nothing new from here on
      expect_right(spec);
    }
  }
}

/// Both kernels' results of a case and of the same case with something added.
void Options::expect_same_bits(CaseSpec spec, const std::function<void(CaseSpec&)>& add) {
  for (const std::int32_t splits : {1, 3}) {
    spec.num_splits = splits;
    CaseSpec other = spec;
    add(other);
    const CaseResult without = expect_right(spec), with = expect_right(other);
    EXPECT_EQ(with.out, without.out) << describe(other);
    EXPECT_EQ(with.lse, without.lse) << describe(other);
  }
}

TEST_P(Options, WhatHidesNothingChangesNoBit) {
  const Option options[] = {
      {"wide window", [](CaseSpec& s) { s.config.sliding_window = 5000; }},
      {"wide chunk", [](CaseSpec& s) { s.config.attention_chunk_size = 5000; }},
      {"chunks that all look back to the first",
       [](CaseSpec& s) {
         s.config.attention_chunk_size = 16;
         s.config.chunk_lookback = 12;
       }},
      {"endless lookback",
       [](CaseSpec& s) {
         s.config.attention_chunk_size = 33;
         s.config.chunk_lookback = std::numeric_limits<std::int32_t>::max();
       }},
      {"mask of ones",
       [](CaseSpec& s) {
         s.config.custom_mask = true;
         s.mask_density = 1.0;
       }},
      {"sinks of -inf",
       [](CaseSpec& s) {
         s.config.sinks.assign(static_cast<std::size_t>(s.config.num_heads), -kInf);
       }},
  };
  for (const Option& option : options) {
    SCOPED_TRACE(option.name);
    expect_same_bits(mixed_batch(4, 64), option.add);
  }
}

TEST_P(Options, AHugeCapChangesAlmostNothing) {
  CaseSpec spec = mixed_batch(4, 64);
  const CaseResult without = expect_right(spec);
  spec.config.logits_soft_cap = 1e6F;
  const CaseResult with = expect_right(spec);
  for (std::size_t i = 0; i < with.lse.size(); ++i) {
    EXPECT_NEAR(with.lse[i], without.lse[i], 1e-5);
  }
}

TEST_P(Options, LogitsFarBeyondTheCap) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.dtype = DType::kF32;
  spec.config.logits_soft_cap = 2.5F;
  for (const double sharpness : {1e-4, 0.05, 40.0, 1e30}) {
    spec.sharpness = sharpness;
    expect_right(spec);
  }
}

TEST_P(Options, RowsWithoutAKey) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.custom_mask = true;
  spec.mask_density = 0.0;
  const CaseResult none = expect_right(spec);
  for (const double lse : none.lse) ASSERT_EQ(lse, -kInf);
  for (const double out : none.out) ASSERT_EQ(out, 0.0);
  spec.config.sinks = sinks(spec.config.num_heads);
  for (const std::int32_t splits : {1, 3}) {
    spec.num_splits = splits;
    const CaseResult result = expect_right(spec);
    for (const double out : result.out) ASSERT_EQ(out, 0.0);
  }
  spec.mask_density = 0.02;  // some rows have a key, hardly any a first one
  expect_right(spec);
}

TEST_P(Options, SinksFarAboveAllLogits) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.sinks.assign(static_cast<std::size_t>(spec.config.num_heads), 3e4F);
  for (const std::int32_t splits : {1, 3}) {
    spec.num_splits = splits;
    expect_right(spec);
  }
}

TEST_P(Options, ItemsOfAWiderPlanMayHoldNoKey) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.planned_for = spec.config;
  for (const std::int32_t width : kWidths) {
    spec.config.sliding_window = width;
    spec.num_splits = 7;
    expect_right(spec);
  }
}

TEST_P(Options, AChunksPlanSuitsLayersThatLookBackLess) {
  CaseSpec spec = mixed_batch(4, 64);
  spec.config.attention_chunk_size = 24;
  spec.config.chunk_lookback = 3;
  spec.planned_for = spec.config;
  spec.num_splits = 7;
  for (const std::int32_t lookback : {0, 1, 3}) {
    spec.config.chunk_lookback = lookback;
    expect_right(spec);
  }
  spec.config.kernel_family = spec.planned_for->kernel_family = GetParam();
  spec.config.chunk_lookback = 4;
  for (const auto& context : devices()) {
    EXPECT_THROW(attention_test::run_case(context, spec), clattn::Error);
  }
}

TEST_P(Options, SlopesAndSinksOfManyHeads) {
  CaseSpec spec = mixed_batch(300, 32);
  spec.config.num_kv_heads = 1;
  spec.config.num_heads = 300;
  spec.config.alibi_slopes = slopes(300);
  spec.config.sinks = sinks(300);
  spec.requests = {{1, 50}, {3, 17}};
  spec.num_splits = 1;
  const CaseResult result = expect_right(spec);
  const auto& contexts = attention_test::all_contexts();
  const bool has_cpu = std::any_of(contexts.begin(), contexts.end(), [](const auto& context) {
    return context->capabilities().kind == clattn::DeviceKind::kCpu;
  });
  if (GetParam() != KernelFamily::kCpu || !has_cpu) return;
  ASSERT_EQ(result.tasks.size(), 1U);
  EXPECT_EQ(result.tasks[0], 4) << "CPUs read keys once: a task a token";
}

// Clang 19 for gfx90a gave the place of keys that no row sees another value, in branches of a
// kernel that spills scalars (found by clattn fuzz).
TEST_P(Options, ChunksUnderAMask) {
  CaseSpec spec = mixed_batch(1, 120);
  spec.config.num_heads = spec.config.num_kv_heads = 1;
  spec.config.dtype = DType::kF32;
  spec.config.kv_cache_dtype = DType::kInt8;
  spec.config.attention_chunk_size = 37;
  spec.config.custom_mask = true;
  spec.requests = {{17, 0}, {40, 0}};
  expect_right(spec);
}

INSTANTIATE_TEST_SUITE_P(Families, Options,
                         testing::Values(KernelFamily::kCpu, KernelFamily::kGpu,
                                         KernelFamily::kGpuPtx, KernelFamily::kGpuMatrix),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

}  // namespace test_options
