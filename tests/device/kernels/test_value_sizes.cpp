// Values of fewer elements than keys, without pages (AttentionConfig::head_size_v): the prefill of
// multi-head latent attention in projected form, keys of 192 elements with values of 128.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "device/value_cases.hpp"
#include "support/error_text.hpp"

namespace test_value_sizes {

using attention_test::all_contexts;
using attention_test::CaseSpec;
using clattn::AttentionType;
using clattn::DType;
using clattn::KernelFamily;
using clattn::detail::Variant;
using value_test::expect_right;
using value_test::Sizes;

/// The model's; multiples of what matrix units take; rests behind their tiles; the smallest.
constexpr std::array kSizes = {Sizes{192, 128}, Sizes{96, 64}, Sizes{128, 64}, Sizes{256, 192},
                               Sizes{72, 40},   Sizes{40, 24}, Sizes{16, 8}};
constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16};

/// Prompts long enough for several tiles of keys, short ones, and queries behind earlier keys.
CaseSpec case_of(Sizes sizes, DType dtype, KernelFamily family = KernelFamily::kAuto) {
  CaseSpec spec;
  spec.config.num_heads = 4;
  spec.config.num_kv_heads = 4;
  spec.config.head_size = sizes.key;
  spec.config.head_size_v = sizes.value;
  spec.config.block_size = 0;
  spec.config.dtype = dtype;
  spec.config.attn_type = AttentionType::kEncoderOnly;
  spec.config.kernel_family = family;
  spec.causal_encoder = true;
  spec.requests = {{1, 0, 1}, {150, 0, 2}, {3, 70, 3}, {70, 140, 4}};
  return spec;
}

/// Runs cases with one kernel family, on the devices that have it.
class ValueSizes : public testing::TestWithParam<KernelFamily> {
 protected:
  static void check(CaseSpec spec) {
    spec.config.kernel_family = GetParam();
    for (const auto& context : all_contexts()) {
      const auto& backend = *clattn::get_attn_backend(spec.config, nullptr, "FLASHINFER");
      if (backend.validate_configuration(spec.config, &context->capabilities()).empty()) {
        expect_right(context, spec);
      } else {
        EXPECT_THROW(attention_test::run_case(context, spec), clattn::Error);
      }
    }
  }
};

// The test of variants below has each pair in each type.
TEST_P(ValueSizes, PairsInTypesByTurns) {
  for (std::size_t i = 0; i < kSizes.size(); ++i)
    check(case_of(kSizes.at(i), kDTypes.at(i % kDTypes.size())));
}

TEST_P(ValueSizes, SplitAndMerged) {
  CaseSpec spec = case_of({192, 128}, DType::kBF16);
  spec.num_splits = 3;
  check(spec);
  spec.config.sinks = {0.5F, 9.0F, -3.0F, 2.0F};
  spec.config.output_fp8 = true;
  check(spec);
}

TEST_P(ValueSizes, WithoutCausality) {
  CaseSpec spec = case_of({192, 128}, DType::kBF16);
  spec.causal_encoder = false;
  check(spec);
  spec.config.attn_type = AttentionType::kEncoderDecoder;  // what a context chunk is attended by
  check(spec);
}

TEST_P(ValueSizes, GroupsOfHeads) {
  CaseSpec spec = case_of({192, 128}, DType::kF16);
  spec.config.num_kv_heads = 1;
  check(spec);
  spec.config.num_heads = 6;
  spec.config.num_kv_heads = 2;
  check(spec);
}

TEST_P(ValueSizes, EachOption) {
  using Add = std::function<void(CaseSpec&)>;
  const std::pair<std::string_view, Add> options[] = {
      {"sinks",
       [](CaseSpec& s) {
         s.config.sinks = {0.5F, 9.0F, -3.0F, 2.0F};
       }},
      {"window", [](CaseSpec& s) { s.config.sliding_window = 40; }},
      {"chunk", [](CaseSpec& s) { s.config.attention_chunk_size = 48; }},
      {"soft cap", [](CaseSpec& s) { s.config.logits_soft_cap = 2.5F; }},
      {"ALiBi",
       [](CaseSpec& s) {
         s.config.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
       }},
      {"mask", [](CaseSpec& s) { s.config.custom_mask = true; }},
      {"fp8 output", [](CaseSpec& s) { s.config.output_fp8 = true; }},
      {"padded queries", [](CaseSpec& s) { s.query_padding = 24; }},
      {"negative scale", [](CaseSpec& s) { s.config.scale = -0.1F; }},
      {"infinite last token", [](CaseSpec& s) { s.last_token_overflows = true; }},
      {"infinite first token", [](CaseSpec& s) { s.first_token_overflows = true; }},
  };
  for (const auto& [name, add] : options) {
    SCOPED_TRACE(name);
    CaseSpec spec = case_of({192, 128}, DType::kBF16);
    add(spec);
    check(spec);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ValueSizes, testing::ValuesIn(clattn::kKernelFamilies),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

class ValueSizesOfVariant : public testing::TestWithParam<const Variant*> {};

/// Every row for prompts, where a device runs it: a pair of each kind that it takes.
TEST_P(ValueSizesOfVariant, IsRight) {
  const Variant& variant = *GetParam();
  const auto row = static_cast<std::size_t>(&variant - clattn::detail::variants().data());
  std::vector<CaseSpec> cases;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    for (const DType dtype : kDTypes) {
      // Scalar rows of GPUs share the pairs in each type: kernels take long to compile.
      const bool scalar = variant.family() == KernelFamily::kGpu;
      if (scalar && kDTypes.at((i + row) % kDTypes.size()) != dtype) continue;
      CaseSpec& spec = cases.emplace_back(case_of(kSizes.at(i), dtype, variant.family()));
      spec.first_token_overflows = dtype == DType::kF16;
    }
  }
  if (!value_test::expect_row_right(variant, {&variant}, cases))
    GTEST_SKIP() << "no device runs it, or it takes values as large as keys only";
}

INSTANTIATE_TEST_SUITE_P(
    Rows, ValueSizesOfVariant,
    testing::ValuesIn(attention_test::variants_of({clattn::detail::Role::kPrefill})),
    [](const auto& tested) { return std::string(tested.param->name); });

// ---- vLLM's forward_mha(): new tokens, chunks of their context, and what joins the results ----

constexpr std::int32_t kHeads = 4, kKey = 192, kValue = 128;
/// Tokens of two requests: earlier ones, of which a chunk holds up to 48, and new ones.
constexpr std::array kContext = {75, 0}, kNew = {40, 55};

/// [request][token][element], f32.
using Rows = std::array<std::vector<std::vector<float>>, 2>;
Rows random_rows(std::int32_t width, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Rows rows;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    rows.at(r).resize(static_cast<std::size_t>(kContext.at(r) + kNew.at(r)));
    for (auto& row : rows.at(r)) {
      row.resize(static_cast<std::size_t>(kHeads) * static_cast<std::size_t>(width));
      for (float& x : row) x = normal(random);
    }
  }
  return rows;
}

/// Tokens [begin, end) of each request, those that there are.
struct Part {
  std::array<std::int32_t, 2> begin, end;
};

class Projected {
 public:
  explicit Projected(std::shared_ptr<clattn::Context> context)
      : context_(std::move(context)), queue_(context_->create_queue()) {}

  struct State {
    clattn::Buffer out, lse;
  };
  /// The new tokens' attention over a part of the tokens.
  State attend(const Part& keys, AttentionType type) {
    clattn::AttentionConfig config{.num_heads = kHeads, .num_kv_heads = kHeads, .head_size = kKey};
    config.head_size_v = kValue;
    config.block_size = 0;
    config.dtype = DType::kF32;
    config.attn_type = type;
    const auto& backend = *clattn::get_attn_backend(config, &context_->capabilities());
    const auto builder = backend.make_builder(context_, config, {});
    const auto impl = backend.make_impl(context_, config);
    std::vector<std::int32_t> starts = {0}, lens;
    for (std::size_t r = 0; r < 2; ++r) {
      lens.push_back(keys.end.at(r) - keys.begin.at(r));
      starts.push_back(starts.back() + lens.back());
    }
    constexpr std::array kStarts = {0, kNew[0], kNew[0] + kNew[1]};
    clattn::CommonAttentionMetadata batch = clattn::CommonAttentionMetadata::of(kStarts, lens, {});
    batch.key_start_loc = starts;
    if (type == AttentionType::kEncoderOnly) batch.causal = true;
    const Part queries{kContext, {kContext[0] + kNew[0], kContext[1] + kNew[1]}};
    const clattn::Buffer q = upload(queries_, queries);
    const clattn::Buffer k = upload(keys_, keys), v = upload(values_, keys);
    State state = poisoned_state();
    impl->forward_encoder(queue_,
                          {.query = {q.handle()},
                           .key = {k.handle()},
                           .value = {v.handle()},
                           .output = {state.out.handle()},
                           .lse = state.lse.handle()},
                          builder->build(queue_, batch));
    queue_.finish();
    return state;
  }

  State merge(const State& prefix, const State& suffix) {
    State merged = poisoned_state();
    const auto of = [](const State& state) {
      return clattn::OutputWithLse{{state.out.handle()}, {state.lse.handle(), 0, kHeads, 1}};
    };
    clattn::merge_attn_states(*context_, queue_,
                              {.num_tokens = kNew[0] + kNew[1],
                               .num_heads = kHeads,
                               .head_size = kValue,
                               .dtype = DType::kF32},
                              of(merged), of(prefix), of(suffix));
    queue_.finish();
    return merged;
  }

  std::vector<float> read(const clattn::Buffer& buffer) const {
    std::vector<float> values(buffer.size_bytes() / sizeof(float));
    queue_.read(buffer, std::as_writable_bytes(std::span(values)));
    return values;
  }

 private:
  static std::size_t num_rows() { return static_cast<std::size_t>(kNew[0] + kNew[1]) * kHeads; }

  State poisoned_state() const {
    constexpr std::uint32_t kPoison = 0x7fc00000;  // NaN
    State state{context_->allocate(num_rows() * kValue * sizeof(float)),
                context_->allocate(num_rows() * sizeof(float))};
    for (const clattn::Buffer* buffer : {&state.out, &state.lse})
      queue_.fill(*buffer, kPoison, 0, buffer->size_bytes());
    return state;
  }

  clattn::Buffer upload(const Rows& rows, const Part& part) const {
    std::vector<float> values;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::int32_t t = part.begin.at(r); t < part.end.at(r); ++t) {
        const auto& row = rows.at(r).at(static_cast<std::size_t>(t));
        values.insert(values.end(), row.begin(), row.end());
      }
    }
    const clattn::Buffer buffer = context_->allocate(values.size() * sizeof(float));
    queue_.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  }

  std::shared_ptr<clattn::Context> context_;
  clattn::Queue queue_;
  Rows queries_ = random_rows(kKey, 1), keys_ = random_rows(kKey, 2),
       values_ = random_rows(kValue, 3);
};

TEST(ValueSizesInParts, ContextChunksAndNewTokensMakeTheWhole) {
  for (const auto& context : all_contexts()) {
    Projected layer(context);
    const Part all{{0, 0}, {kContext[0] + kNew[0], kNew[1]}};
    const Projected::State whole = layer.attend(all, AttentionType::kEncoderOnly);
    const auto chunk = [&](std::int32_t begin, std::int32_t end) {
      return layer.attend({{begin, 0}, {end, 0}}, AttentionType::kEncoderDecoder);
    };
    const Projected::State earlier = layer.merge(chunk(0, 48), chunk(48, kContext[0]));
    const Projected::State own = layer.attend({kContext, all.end}, AttentionType::kEncoderOnly);
    const Projected::State joined = layer.merge(earlier, own);
    const auto expect_same = [&](const clattn::Buffer& given, const clattn::Buffer& wanted) {
      const std::vector<float> got = layer.read(given), want = layer.read(wanted);
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_TRUE(std::isfinite(want[i])) << i;
        ASSERT_NEAR(got[i], want[i], 2e-5) << i;
      }
    };
    expect_same(joined.out, whole.out);
    expect_same(joined.lse, whole.lse);
  }
}

TEST(ValueSizesInTensors, RowsOfValuesAreCheckedByTheirOwnSize) {
  constexpr std::size_t kTokens = 3, kBytes = kTokens * kHeads * kKey * sizeof(float);
  const clattn::AttentionConfig config = case_of({kKey, kValue}, DType::kF32).config;
  const auto& context = all_contexts().at(0);
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(config, nullptr);
  const auto builder = backend.make_builder(context, config);
  const auto impl = backend.make_impl(context, config);
  constexpr std::array<std::int32_t, 2> kStarts = {0, kTokens};
  constexpr std::array<std::int32_t, 1> kLens = {kTokens};
  clattn::CommonAttentionMetadata batch = clattn::CommonAttentionMetadata::of(kStarts, kLens, {});
  batch.key_start_loc = kStarts;
  const auto& metadata = builder->build(queue, batch);
  const clattn::Buffer rows = context->allocate(kBytes), out = context->allocate(kBytes);
  const auto forward = [&](std::size_t bytes, std::int64_t stride) {
    const clattn::Buffer value = context->allocate(bytes);
    return test::error_text([&] {
      impl->forward_encoder(queue,
                            {.query = {rows.handle()},
                             .key = {rows.handle()},
                             .value = {value.handle(), 0, stride},
                             .output = {out.handle()}},
                            metadata);
      queue.finish();
    });
  };
  constexpr std::size_t kEnough = kTokens * kHeads * kValue * sizeof(float);
  EXPECT_EQ(forward(kEnough, 0), "no error");
  EXPECT_EQ(forward(kEnough - 4, 0),
            "value: its 3 rows end at element 1536, legal: the buffer's 1535");
  EXPECT_EQ(forward(kBytes, 520), "no error");
  EXPECT_EQ(forward(kBytes, 516), "value: token_stride is 516, legal: multiples of 8 elements");
  EXPECT_EQ(forward(kBytes, 504), "value: token_stride is 504, legal: 0 or >= 512 (a row)");
}

}  // namespace test_value_sizes
