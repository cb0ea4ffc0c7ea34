// `clattn fuzz` on a device that is the oracle itself, right or with a fault planted in its calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "program/common/elements.hpp"
#include "program/fuzz/recipe.hpp"
#include "program/fuzz/trial.hpp"

namespace {

using namespace clattn;       // NOLINT(google-build-using-namespace): all of it is under test
using namespace clattn::cli;  // NOLINT(google-build-using-namespace)

AttentionOutcome answer(const Recipe&, const AttentionCall& call) {
  const oracle::AttentionResult result = oracle_result(call);
  AttentionOutcome outcome;
  outcome.out = encode_elements(call.config.dtype, result.out);
  outcome.lse.assign(result.lse.begin(), result.lse.end());
  if (call.config.output_fp8) {
    std::vector<double> scaled = result.out;
    for (double& value : scaled) value /= static_cast<double>(call.output_scale);
    outcome.out_fp8 = encode_elements(DType::kFp8E4M3, scaled);
  }
  if (!call.key.empty() && !call.config.contiguous_kv()) outcome.cache = expected_cache(call);
  return outcome;
}

/// Changes a call to one whose result is another; false where there is nothing to change.
using Plant = bool (*)(AttentionCall& call);
struct Fault {
  const char* name;
  Plant plant;
};

template <typename Value>
bool clear(Value& value) {
  const bool had = value != Value();
  value = Value();
  return had;
}

constexpr Fault kFaults[] = {
    {"scale 5 % too large",
     [](AttentionCall& c) {
       const float usual = 1 / std::sqrt(static_cast<float>(c.config.head_size));
       c.config.scale = 1.05F * c.config.scale.value_or(usual);
       return true;
     }},
    {"window one token too wide",
     [](AttentionCall& c) { return c.config.sliding_window > 0 && ++c.config.sliding_window > 0; }},
    {"left side one token too wide",
     [](AttentionCall& c) { return c.config.window_left >= 0 && ++c.config.window_left > 0; }},
    {"chunk one token too long",
     [](AttentionCall& c) {
       return c.config.attention_chunk_size > 0 && ++c.config.attention_chunk_size > 0;
     }},
    {"one chunk of lookback too many",
     [](AttentionCall& c) {
       return c.config.attention_chunk_size > 0 && ++c.config.chunk_lookback > 0;
     }},
    {"last token dropped",
     [](AttentionCall& c) {
       if (c.config.contiguous_kv() || c.seq_lens.empty() || c.seq_lens.back() == 0) return false;
       return --c.seq_lens.back() >= 0;
     }},
    {"soft cap ignored", [](AttentionCall& c) { return clear(c.config.logits_soft_cap); }},
    {"sinks ignored", [](AttentionCall& c) { return clear(c.config.sinks); }},
    {"ALiBi ignored", [](AttentionCall& c) { return clear(c.config.alibi_slopes); }},
    {"causal mask ignored", [](AttentionCall& c) { return clear(c.causal); }},
    {"last request looks in another direction",
     [](AttentionCall& c) {
       if (c.direction.empty()) return false;
       const bool causal = c.direction.back() == Direction::kCausal;
       c.direction.back() = causal ? Direction::kBothWays : Direction::kCausal;
       return true;
     }},
    {"canvas as both ways",
     [](AttentionCall& c) {
       std::ranges::replace(c.direction, Direction::kCanvas, Direction::kBothWays);
       return !c.direction.empty();
     }},
    {"first key one too early",
     [](AttentionCall& c) {
       bool changed = false;
       for (std::int32_t& key : c.first_keys) changed = (key > 0 && key-- > 0) || changed;
       return changed;
     }},
    {"one kept key more",
     [](AttentionCall& c) {
       for (std::int32_t& keys : c.keep_keys) ++keys;
       return !c.keep_keys.empty();
     }},
    {"spans ignored",
     [](AttentionCall& c) { return !c.spans.empty() && clear(c.config.use_spans); }},
    {"ignored spans looked at",
     [](AttentionCall& c) { return !c.spans.empty() && !std::exchange(c.config.use_spans, true); }},
    {"last span one key too long",
     [](AttentionCall& c) {
       return c.config.use_spans && !c.spans.empty() && ++c.spans.back() > 0;
     }},
    {"spans not cut",
     [](AttentionCall& c) { return c.config.use_spans && clear(c.config.span_rule); }},
    {"nodes of trees as roots",
     [](AttentionCall& c) {
       const bool any = std::ranges::any_of(c.tree_parents, [](int parent) { return parent >= 0; });
       std::ranges::fill(c.tree_parents, -1);
       return any;
     }},
    {"mask one key off",
     [](AttentionCall& c) {
       if (c.custom_mask.empty()) return false;
       std::rotate(c.custom_mask.begin(), c.custom_mask.begin() + 1, c.custom_mask.end());
       return true;
     }},
    {"values scaled as keys",
     [](AttentionCall& c) {
       const auto half = static_cast<std::ptrdiff_t>(c.scales.size() / 2);
       std::copy(c.scales.begin(), c.scales.begin() + half, c.scales.begin() + half);
       return half > 0;
     }},
    {"fp8 output scaled twice",
     [](AttentionCall& c) {
       c.output_scale *= c.output_scale;
       return c.config.output_fp8;
     }},
    {"last token stored in the first slot",
     [](AttentionCall& c) {
       if (c.key.empty() || c.slot_mapping.empty()) return false;
       c.slot_mapping.back() = 0;
       return true;
     }},
    {"first pages of two requests exchanged",
     [](AttentionCall& c) {
       if (c.seq_lens.size() < 2 || c.max_blocks == 0) return false;
       if (*std::ranges::min_element(c.seq_lens) == 0) return false;
       std::swap(c.block_table[0], c.block_table[static_cast<std::size_t>(c.max_blocks)]);
       return true;
     }},
};

void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fault.name;
}

constexpr DrawOptions kSmall{.seed = 1, .most_tokens = 24};

TEST(Fuzz, ARightDeviceFailsInNoCase) {
  for (std::uint64_t index = 0; index < 120; ++index) {
    const Recipe recipe = draw(kSmall, index);
    EXPECT_EQ(try_recipe(recipe, answer).state, FuzzState::kPassed)
        << index << ": " << describe_layer(recipe) << "; " << describe_batch(recipe) << ": "
        << try_recipe(recipe, answer).why;
  }
}

TEST(Fuzz, ACaseDependsOnSeedAndNumberAlone) {
  const auto text = [](const Recipe& r) { return describe_layer(r) + describe_batch(r); };
  DrawOptions other = kSmall;
  other.seed = 2;
  int different = 0;
  for (std::uint64_t index = 0; index < 64; ++index) {
    const Recipe recipe = draw(kSmall, index);
    EXPECT_EQ(text(draw(kSmall, index)), text(recipe));
    EXPECT_EQ(make_call(draw(kSmall, index)).query, make_call(recipe).query);
    if (text(draw(other, index)) != text(recipe)) ++different;
    EXPECT_EQ(describe_layer(draw(kSmall, index / kSmall.layer_calls * kSmall.layer_calls)),
              describe_layer(recipe));
  }
  EXPECT_GT(different, 60);
}

class PlantedFault : public testing::TestWithParam<Fault> {};

TEST_P(PlantedFault, IsFoundAndMadeSmall) {
  constexpr std::uint64_t kMostCases = 1500;
  const auto fails = [](const Recipe& recipe) {
    AttentionCall changed = make_call(recipe);
    if (!GetParam().plant(changed)) return false;
    const auto execute = [&](const Recipe& of, const AttentionCall&) {
      return answer(of, changed);
    };
    return try_recipe(recipe, execute).state == FuzzState::kFailed;
  };
  std::uint64_t index = 0;
  while (index < kMostCases && !fails(draw(kSmall, index))) ++index;
  ASSERT_LT(index, kMostCases) << "not found";
  const Recipe small = shrink(draw(kSmall, index), fails, 400);
  SCOPED_TRACE(describe_layer(small) + "; " + describe_batch(small));
  EXPECT_TRUE(fails(small));
  EXPECT_LE(small.batch.requests.size(), 2U);
  for (const RequestShape& request : small.batch.requests) EXPECT_LE(request.seq_len, 12);
  EXPECT_LE(small.config.output_head_size(), 16);
  EXPECT_LE(small.config.num_heads, 4);
}

INSTANTIATE_TEST_SUITE_P(All, PlantedFault, testing::ValuesIn(kFaults));

/// Answers as a device that multiplies in fp8 wherever it is asked to, with the call's query scale
/// times `scale`: at 1 right, else wrong.
AttentionOutcome answer_in_fp8(const AttentionCall& call, double scale) {
  const oracle::Element element = element_of(call.config.dtype);
  AttentionOutcome outcome = answer({}, call);
  oracle::AttentionResult result = oracle_result(call);
  put_fp8_rows(call.config, oracle_case(call), element,
               scale * static_cast<double>(call.query_scale), result);
  outcome.out = encode_elements(call.config.dtype, result.out);
  outcome.lse.assign(result.lse.begin(), result.lse.end());
  outcome.multiplies_fp8 = true;
  return outcome;
}

TEST(Fuzz, ProductsInFp8AreDrawnAndJudged) {
  int drawn = 0, found = 0;
  for (std::uint64_t index = 0; index < 400; ++index) {
    const Recipe recipe = draw(kSmall, index);
    if (!recipe.config.fp8_products) continue;
    EXPECT_EQ(recipe.config.cache_dtype(), DType::kFp8E4M3);
    if (recipe.config.dtype == DType::kF32 || recipe.config.output_fp8) continue;
    const auto state = [&](double scale) {
      const auto execute = [&](const Recipe&, const AttentionCall& call) {
        return answer_in_fp8(call, scale);
      };
      return try_recipe(recipe, execute).state;
    };
    ++drawn;
    EXPECT_EQ(state(1), FuzzState::kPassed) << describe_layer(recipe) << describe_batch(recipe);
    if (state(0.75) == FuzzState::kFailed) ++found;
  }
  EXPECT_GT(drawn, 20);
  EXPECT_GT(found, 5);
}

TEST(Fuzz, ARefusalNamesAFieldOfTheReasons) {
  EXPECT_EQ(
      refused_field("No valid attention backend found for X with AttentionConfig(num_heads=4, "
                    "dtype=f16). Reasons: FLASHINFER: head_size 4 not supported"),
      "head_size");
  EXPECT_EQ(refused_field("kv_cache_dtype f16 not supported; dtype f32"), "kv_cache_dtype");
  EXPECT_EQ(refused_field("not today"), "");
}

TEST(Fuzz, WhatIsThrownIsAFailureUnlessItIsARefusalThatNamesAField) {
  struct Row {
    ErrorCode code;
    const char* message;
    FuzzState state;
  };
  for (const Row& row : {Row{ErrorCode::kUnsupported, "layout HND", FuzzState::kRefused},
                         Row{ErrorCode::kUnsupported, "not today", FuzzState::kFailed},
                         Row{ErrorCode::kInvalidArgument, "layout HND", FuzzState::kFailed},
                         Row{ErrorCode::kOpenCL, "layout HND", FuzzState::kFailed}}) {
    const FuzzResult trial =
        try_recipe(draw(kSmall, 0), [&](const Recipe&, const AttentionCall&) -> AttentionOutcome {
          throw Error(row.code, row.message);
        });
    EXPECT_EQ(trial.state, row.state) << row.message;
  }
}

}  // namespace
