#include <fmt/format.h>
#include <clattn/cache_ops.hpp>

#include <cmath>
#include <limits>

#include "device/cache_ops_support.hpp"
#include "kv_cache/op_kernel.hpp"

namespace test_cache_ops_merge {

using cache_ops_test::all_contexts;
using cache_ops_test::decode;
using cache_ops_test::download;
using cache_ops_test::encode;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::DType;
using clattn::LseBase;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kHeads = 3, kDims = 72;
constexpr std::int64_t kTokens = 8;
constexpr std::size_t kLses = kTokens * kHeads;

struct States {
  std::vector<double> prefix, suffix;         // [tokens, heads, dims], as stored
  std::vector<float> prefix_lse, suffix_lse;  // [tokens, heads]
};

/// Tokens 0 … 4 take each combination of empty sides, with NaN outputs where a side is empty.
States make_states(DType dtype) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0.0, 2.0);
  States s;
  for (std::size_t i = 0; i < kLses * kDims; ++i) {
    s.prefix.push_back(oracle::round_to(cache_ops_test::element(dtype), normal(random)));
    s.suffix.push_back(oracle::round_to(cache_ops_test::element(dtype), normal(random)));
  }
  for (std::size_t i = 0; i < kLses; ++i) {
    s.prefix_lse.push_back(static_cast<float>(4 * normal(random)));
    s.suffix_lse.push_back(static_cast<float>(4 * normal(random)));
  }
  const float inf = std::numeric_limits<float>::infinity();
  const float empty[5][2] = {{-inf, 0}, {0, -inf}, {-inf, -inf}, {inf, 0}, {inf, inf}};
  for (std::size_t t = 0; t < 5; ++t) {
    for (std::size_t h = 0; h < kHeads; ++h) {
      const std::size_t at = t * kHeads + h;
      if (std::isinf(empty[t][0])) s.prefix_lse[at] = empty[t][0];
      if (std::isinf(empty[t][1])) s.suffix_lse[at] = empty[t][1];
      for (std::size_t d = 0; d < kDims; ++d) {
        if (std::isinf(empty[t][0])) s.prefix[at * kDims + d] = kNaN;
        if (std::isinf(empty[t][1])) s.suffix[at * kDims + d] = kNaN;
      }
    }
  }
  s.prefix_lse[kLses - 1] = 80.0F;  // the other side all but vanishes
  s.suffix_lse[kLses - 1] = -80.0F;
  return s;
}

struct Want {
  std::vector<double> out, lse;
};

Want merge(const States& s, double base, std::int64_t with_context) {
  Want want;
  for (std::size_t i = 0; i < kLses; ++i) {
    if (static_cast<std::int64_t>(i) / kHeads >= with_context) {
      want.lse.push_back(static_cast<double>(s.suffix_lse[i]));
      const auto row = s.suffix.begin() + static_cast<std::ptrdiff_t>(i * kDims);
      want.out.insert(want.out.end(), row, row + kDims);
      continue;
    }
    const double p = s.prefix_lse[i] == HUGE_VALF ? -kInfinity : s.prefix_lse[i];
    const double x = s.suffix_lse[i] == HUGE_VALF ? -kInfinity : s.suffix_lse[i];
    const double wp = std::isinf(p) ? 0 : std::pow(base, p - std::max(p, x));
    const double wx = std::isinf(x) ? 0 : std::pow(base, x - std::max(p, x));
    want.lse.push_back(wp + wx == 0 ? -kInfinity
                                    : std::max(p, x) + std::log(wp + wx) / std::log(base));
    for (std::size_t d = 0; d < kDims; ++d) {
      double sum = 0;
      if (wp != 0) sum += wp * s.prefix[i * kDims + d];
      if (wx != 0) sum += wx * s.suffix[i * kDims + d];
      want.out.push_back(wp + wx == 0 ? 0 : sum / (wp + wx));
    }
  }
  return want;
}

void expect_close(DType dtype, const std::vector<double>& got, const Want& want,
                  const std::vector<float>& lse) {
  // One rounding to the type, and a dozen f32 operations on numbers up to ~10; exponents up to 80.
  const double ulp = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::isnan(got[i]), std::isnan(want.out[i])) << i;
    if (std::isnan(got[i])) continue;
    ASSERT_LE(std::abs(got[i] - want.out[i]), std::abs(want.out[i]) * ulp + 2e-5) << i;
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(want.lse[i])) {
      ASSERT_EQ(static_cast<double>(lse[i]), want.lse[i]) << i;
    } else {
      ASSERT_LE(std::abs(static_cast<double>(lse[i]) - want.lse[i]), 2e-5) << i;
    }
  }
}

/// merge_attn_states(), or its form for devices whose groups have so many work-items.
struct Merger {
  const clattn::Context& context;
  std::size_t group_size = 0;  // 0: the device's

  void operator()(const clattn::Queue& queue, const clattn::MergeAttnStates& config,
                  const clattn::OutputWithLse& merged, const clattn::OutputWithLse& prefix,
                  const clattn::OutputWithLse& suffix) const {
    if (group_size == 0) {
      return clattn::merge_attn_states(context, queue, config, merged, prefix, suffix);
    }
    const DType out = config.output_dtype.value_or(config.dtype);
    const std::string options = fmt::format(
        "-DCLA_WG_SIZE={} -DCLA_PTX=0 {} -DCLA_LSE_LOG2={} -cl-opt-disable", group_size,
        clattn::detail::dtype_options(config.dtype, out), config.lse_base == LseBase::k2 ? 1 : 0);
    clattn::detail::enqueue_merge({context.runtime().kernel({"attention/merge_attn_states.cl",
                                                             "clattn_merge_attn_states", options}),
                                   group_size},
                                  queue, config, merged, prefix, suffix, nullptr);
  }
};

struct MergeCase {
  DType dtype;
  LseBase base;
  std::int64_t with_context;
  bool heads_first;  // LSEs [heads, tokens]
  std::size_t group_size = 0;
};

std::vector<float> ordered(const std::vector<float>& lse, bool heads_first) {
  if (!heads_first) return lse;
  std::vector<float> result(lse.size());
  for (std::size_t i = 0; i < lse.size(); ++i) {
    result[i % kHeads * kTokens + i / kHeads] = lse[i];
  }
  return result;
}

void run(const clattn::Context& context, const MergeCase& c) {
  SCOPED_TRACE(fmt::format("{} base {} context {} heads first {} group {}",
                           clattn::to_string(c.dtype), static_cast<int>(c.base), c.with_context,
                           c.heads_first, c.group_size));
  const Merger merge_states{context, c.group_size};
  const clattn::Queue queue = context.create_queue();
  const States states = make_states(c.dtype);
  const clattn::Buffer prefix = upload(context, queue, encode(c.dtype, states.prefix));
  const clattn::Buffer suffix = upload(context, queue, encode(c.dtype, states.suffix));
  const clattn::Buffer prefix_lse =
      upload(context, queue, ordered(states.prefix_lse, c.heads_first));
  const clattn::Buffer suffix_lse =
      upload(context, queue, ordered(states.suffix_lse, c.heads_first));
  const auto lse = [&](const clattn::Buffer& buffer) {
    clattn::LseRef ref{.buffer = buffer.handle()};
    if (c.heads_first) ref.token_stride = 1;
    if (c.heads_first) ref.head_stride = kTokens;
    return ref;
  };
  clattn::MergeAttnStates config;
  config.num_tokens = kTokens;
  config.num_heads = kHeads;
  config.head_size = kDims;
  config.dtype = c.dtype;
  config.lse_base = c.base;
  config.prefill_tokens_with_context = c.with_context;
  const clattn::OutputWithLse p{{.buffer = prefix.handle()}, lse(prefix_lse)};
  const clattn::OutputWithLse s{{.buffer = suffix.handle()}, lse(suffix_lse)};
  const Want want = merge(states, c.base == LseBase::kE ? std::exp(1.0) : 2.0,
                          c.with_context < 0 ? kTokens : c.with_context);

  // Into memory of its own, with rows apart.
  constexpr std::int64_t kStride = kHeads * kDims + 8;
  const std::vector<std::byte> poison(kTokens * kStride * clattn::element_size_bytes(c.dtype),
                                      std::byte{0x5A});
  const clattn::Buffer out = upload(context, queue, poison);
  const clattn::Buffer out_lse = upload(context, queue, std::vector<float>(kLses, 1e9F));
  merge_states(queue, config, {{out.handle(), 0, kStride}, lse(out_lse)}, p, s);
  std::vector<std::byte> bytes = download<std::byte>(queue, out);
  std::vector<std::byte> rows;
  const std::size_t width = clattn::element_size_bytes(c.dtype);
  for (std::size_t t = 0; t < kTokens; ++t) {
    const auto row = bytes.begin() + static_cast<std::ptrdiff_t>(t * kStride * width);
    rows.insert(rows.end(), row, row + static_cast<std::ptrdiff_t>(kHeads * kDims * width));
    for (std::size_t i = 0; i < 8 * width; ++i) {
      ASSERT_EQ(row[static_cast<std::ptrdiff_t>(kHeads * kDims * width + i)], std::byte{0x5A});
    }
  }
  std::vector<float> got_lse(kLses);
  const std::vector<float> stored = download<float>(queue, out_lse);
  for (std::size_t i = 0; i < kLses; ++i) {
    got_lse[i] = c.heads_first ? stored[i % kHeads * kTokens + i / kHeads] : stored[i];
  }
  expect_close(c.dtype, decode(c.dtype, rows), want, got_lse);

  // In place of the prefix, without LSE and with.
  merge_states(queue, config, {{.buffer = prefix.handle()}, p.lse}, p, s);
  EXPECT_TRUE(download<std::byte>(queue, prefix) == rows);
  EXPECT_TRUE(download<float>(queue, prefix_lse) == stored);
}

// A6.8, A9.8: no NaN from empty sides; +inf counts as empty; B3.5: base and order of the LSE.
TEST(MergeAttnStates, MatchesPlainLoops) {
  for (const auto& context : all_contexts()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      run(*context, {dtype, LseBase::kE, -1, false});
      run(*context, {dtype, LseBase::k2, 6, true});
    }
    run(*context, {DType::kF16, LseBase::kE, 0, true});
  }
}

TEST(MergeAttnStates, GroupsOfManyWorkItemsMatchPlainLoops) {
  for (const auto& context : all_contexts()) {
    run(*context, {DType::kF32, LseBase::kE, -1, false, 8});  // several turns
    run(*context, {DType::kF16, LseBase::k2, 6, true, 8});
    run(*context, {DType::kBF16, LseBase::kE, 3, false, 32});
  }
}

struct QuantizedCase {
  DType dtype, output_dtype;
  float scale;  // 1 = none given
  std::int64_t with_context;
  std::size_t group_size = 0;
  std::size_t offset = 3, gap = 5;  // elements before rows and between them
};

void run_quantized(const clattn::Context& context, const QuantizedCase& c) {
  SCOPED_TRACE(fmt::format("{} to {}, scale {}, context {}", clattn::to_string(c.dtype),
                           clattn::to_string(c.output_dtype), c.scale, c.with_context));
  const clattn::Queue queue = context.create_queue();
  const States states = make_states(c.dtype);
  const clattn::Buffer prefix = upload(context, queue, encode(c.dtype, states.prefix));
  const clattn::Buffer suffix = upload(context, queue, encode(c.dtype, states.suffix));
  const clattn::Buffer prefix_lse = upload(context, queue, states.prefix_lse);
  const clattn::Buffer suffix_lse = upload(context, queue, states.suffix_lse);
  constexpr std::size_t kRow = kHeads * kDims;
  const std::size_t stride = kRow + c.gap;
  const clattn::Buffer out =
      upload(context, queue, std::vector<std::byte>(c.offset + kTokens * stride, std::byte{0x5A}));
  const clattn::Buffer out_lse = upload(context, queue, std::vector<float>(kLses, 1e9F));
  clattn::MergeAttnStates config;
  config.num_tokens = kTokens;
  config.num_heads = kHeads;
  config.head_size = kDims;
  config.dtype = c.dtype;
  config.prefill_tokens_with_context = c.with_context;
  config.output_dtype = c.output_dtype;
  if (c.scale != 1) config.output_scale = upload(context, queue, std::vector<float>{c.scale});
  Merger{context, c.group_size}(
      queue, config,
      {{out.handle(), static_cast<std::int64_t>(c.offset), static_cast<std::int64_t>(stride)},
       {.buffer = out_lse.handle()}},
      {{.buffer = prefix.handle()}, {.buffer = prefix_lse.handle()}},
      {{.buffer = suffix.handle()}, {.buffer = suffix_lse.handle()}});
  const Want want = merge(states, std::exp(1.0), c.with_context < 0 ? kTokens : c.with_context);
  std::vector<std::byte> got = download<std::byte>(queue, out);
  const oracle::Element type = cache_ops_test::element(c.output_dtype);
  std::size_t saturated = 0;
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    const std::size_t at = c.offset + i / kRow * stride + i % kRow;
    const double value = oracle::decode(type, std::to_integer<std::uint32_t>(got[at]));
    // What f32 may be off by before it is rounded.
    const double off = (5e-6 * std::abs(want.out[i]) + 5e-6) / static_cast<double>(c.scale);
    const double x = want.out[i] / static_cast<double>(c.scale);
    got[at] = std::byte{0x5A};
    ASSERT_EQ(std::isnan(value), std::isnan(x)) << i;
    if (std::isnan(x)) continue;
    ASSERT_GE(value, oracle::round_to(type, x - off)) << i;
    ASSERT_LE(value, oracle::round_to(type, x + off)) << i;
    if (std::abs(x) > 448) ++saturated;
  }
  EXPECT_EQ(saturated > 0, c.scale < 0.02F);
  EXPECT_TRUE(got == std::vector<std::byte>(got.size(), std::byte{0x5A}));  // the gaps
  const std::vector<float> lse = download<float>(queue, out_lse);
  for (std::size_t i = 0; i < kLses; ++i) {
    if (std::isinf(want.lse[i])) {
      ASSERT_EQ(static_cast<double>(lse[i]), want.lse[i]) << i;
    } else {
      ASSERT_NEAR(static_cast<double>(lse[i]), want.lse[i], 2e-5) << i;
    }
  }
}

// A6.8: 8-bit outputs (vLLM's output_scale), over the same sides.
TEST(MergeAttnStates, A6_8_OutputsOf8BitsAreRoundedOnceAndSaturate) {
  for (const auto& context : all_contexts()) {
    run_quantized(*context, {DType::kF16, DType::kFp8E4M3, 0.004F, -1});
    run_quantized(*context, {DType::kF16, DType::kFp8E4M3, 0.3F, 6});
    run_quantized(*context, {DType::kBF16, DType::kFp8E4M3, 1, 0});
    run_quantized(*context, {DType::kF32, DType::kFp8E5M2, 0.7F, 3});
    run_quantized(*context, {DType::kF16, DType::kInt8, 0.07F, -1});
    run_quantized(*context, {DType::kF16, DType::kFp8E4M3, 0.3F, 6, 8});
    run_quantized(*context, {DType::kBF16, DType::kInt8, 0.07F, -1, 8, 8, 8});
  }
}

// A6.8: as vLLM does, which copies such rows. With -0 and infinities among them.
TEST(MergeAttnStates, A6_8_TokensWithoutAPrefixAreTheSuffixBitByBit) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::size_t group_size : {0U, 8U}) {
      States states = make_states(dtype);  // tokens 1, 2 and 4: NaN, of LSEs -inf, -inf and +inf
      states.suffix[0] = -0.0;
      states.suffix[1] = kInfinity;
      const std::vector<std::byte> bits = encode(dtype, states.suffix);
      const clattn::Buffer suffix = upload(context, queue, bits);
      const clattn::Buffer lse = upload(context, queue, states.suffix_lse);
      const clattn::Buffer out = context.allocate(bits.size());
      const clattn::Buffer out_lse = upload(context, queue, std::vector<float>(kLses, 1e9F));
      clattn::MergeAttnStates config;
      config.num_tokens = kTokens;
      config.num_heads = kHeads;
      config.head_size = kDims;
      config.dtype = dtype;
      config.prefill_tokens_with_context = 0;
      const clattn::OutputWithLse state{{.buffer = suffix.handle()}, {.buffer = lse.handle()}};
      Merger{context, group_size}(
          queue, config, {{.buffer = out.handle()}, {.buffer = out_lse.handle()}}, state, state);
      EXPECT_TRUE(download<std::byte>(queue, out) == bits) << clattn::to_string(dtype);
      EXPECT_EQ(download<float>(queue, out_lse), states.suffix_lse);
    }
  }
}

TEST(MergeAttnStates, NonsenseIsRefused) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const clattn::Buffer memory = context.allocate(4096), lses = context.allocate(4096);
  const clattn::OutputWithLse state{{.buffer = memory.handle()}, {.buffer = lses.handle()}};
  clattn::MergeAttnStates config;
  config.num_tokens = 1;
  const auto refuse = [&](const clattn::OutputWithLse& merged,
                          const clattn::OutputWithLse& prefix) {
    return error_text(
        [&] { clattn::merge_attn_states(context, queue, config, merged, prefix, state); });
  };
  config.head_size = 12;
  EXPECT_EQ(refuse(state, state), "merge_attn_states: head_size is 12, legal: multiples of 8");
  config.head_size = 8;
  EXPECT_EQ(refuse({}, state), "merged.output: no buffer");
  EXPECT_EQ(refuse(state, {state.output, {}}), "prefix.lse: no buffer");
  EXPECT_EQ(refuse(state, {state.output, {lses.handle(), 0, -1, 0}}),
            "prefix.lse: offset 0, token_stride -1, head_stride 0, legal: >= 0");
  config.output_dtype = DType::kBF16;
  EXPECT_EQ(refuse(state, state),
            "merge_attn_states: output_dtype is bf16, legal: f16 (dtype) or an 8-bit type");
  config.output_dtype = DType::kInt8;  // F2
  EXPECT_EQ(refuse(state, state), "merge_attn_states: no output_scale, legal for int8: f32 [1]");
  config.output_dtype.reset();
  config.output_scale = memory;
  EXPECT_EQ(refuse(state, state), "merge_attn_states: output_scale given, legal: none for f16");
  config.output_scale = {};
  config.dtype = DType::kInt8;
  EXPECT_EQ(refuse(state, state), "dtype is int8, legal: f32, f16, bf16");
  config.dtype = DType::kF32;
  config.num_tokens = -1;
  EXPECT_EQ(refuse(state, state), "merge_attn_states: num_tokens is -1, legal: 0 … 2147483647");
  config.num_tokens = 129;  // of 8 f32: 128 of them fill the memory
  EXPECT_EQ(refuse(state, state),
            "merged.output: its 129 rows end at element 1032, legal: the buffer's 1024");
  config.num_tokens = 128;
  EXPECT_EQ(refuse({state.output, {lses.handle(), 8, 8, 1}}, state),
            "merged.lse: its 128 rows end at element 1025, legal: the buffer's 1024");
  const clattn::Buffer half = context.allocate(2048);
  const clattn::OutputWithLse few{{.buffer = half.handle()}, {.buffer = lses.handle()}};
  EXPECT_EQ(refuse(state, few),
            "prefix.output: its 128 rows end at element 1024, legal: the buffer's 512");
  config.prefill_tokens_with_context = 64;  // the others have no prefix
  EXPECT_EQ(refuse(state, few), "no error");
}

// DESIGN 4: NaN stays NaN. An LSE that is NaN is no empty side, whatever the other one is.
TEST(MergeAttnStates, ANaNLseIsNotTakenForAnEmptySide) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> prefix_lse = {nan, nan, -inf, 1.0F};
    const std::vector<float> suffix_lse = {-inf, 1.0F, nan, nan};
    const std::vector<float> ones(4 * 8, 1.0F);
    const clattn::Buffer p = upload(*context, queue, ones), s = upload(*context, queue, ones);
    const clattn::Buffer p_lse = upload(*context, queue, prefix_lse);
    const clattn::Buffer s_lse = upload(*context, queue, suffix_lse);
    const clattn::OutputWithLse prefix{{.buffer = p.handle()}, {.buffer = p_lse.handle()}};
    clattn::merge_attn_states(
        *context, queue, {.num_tokens = 4, .num_heads = 1, .head_size = 8, .dtype = DType::kF32},
        prefix, prefix, {{.buffer = s.handle()}, {.buffer = s_lse.handle()}});
    for (const float x : download<float>(queue, p)) EXPECT_TRUE(std::isnan(x)) << x;
    for (const float x : download<float>(queue, p_lse)) EXPECT_TRUE(std::isnan(x)) << x;
  }
}

}  // namespace test_cache_ops_merge
