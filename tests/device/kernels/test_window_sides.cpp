// Which keys each row sees, by the two sides of its window, in every kernel family. What no row of
// a request sees is NaN.
#include <limits>

#include "device/masks.hpp"

namespace test_window_sides {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Masks;
using attention_test::Rows;

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

using Sides = std::pair<std::int32_t, std::int32_t>;

CaseSpec case_of(Sides sides, bool causal) {
  CaseSpec spec;
  spec.config = attention_test::small_config();
  spec.config.window_left = sides.first;
  spec.config.window_right = sides.second;
  spec.causal = spec.causal_encoder = causal;
  spec.unseen_is_nan = true;
  return spec;
}

/// Short and long queries, whose keys fill several tiles of the prefill kernels.
CaseSpec mixed_batch(Sides sides, bool causal) {
  CaseSpec spec = case_of(sides, causal);
  spec.requests = {{1, 0}, {1, 130}, {4, 61}, {35, 170}, {19, 0}, {150, 20}};
  return spec;
}

TEST_P(Masks, W1_BothSidesAreTheShorthand) {
  const Rows both_ways = {{0, 1}, {0, 2}, {1, 3}, {2, 3}};
  const Rows causal = {{0, 0}, {0, 1}, {1, 2}, {2, 3}};
  expect_rows(case_of({1, 1}, false), {4, 0}, both_ways);
  expect_rows(case_of({1, 1}, true), {4, 0}, causal);
  for (const bool is_causal : {false, true}) {
    CaseSpec shorthand = case_of({-1, -1}, is_causal);
    shorthand.config.sliding_window = 2;
    expect_rows(shorthand, {4, 0}, is_causal ? causal : both_ways);
  }
}

TEST_P(Masks, W2_ChunksOfPromptsSeeWhatLiesAheadOfThem) {
  expect_rows(case_of({5, 5}, false), {4, 16}, {{11, 19}, {12, 19}, {13, 19}, {14, 19}});
}

TEST_P(Masks, W3_NoKeyToEitherSide) {
  expect_rows(case_of({0, 0}, false), {3, 3}, {{3, 3}, {4, 4}, {5, 5}});
}

TEST_P(Masks, W4_TheRightSideAlone) {
  expect_rows(case_of({0, 2}, false), {4, 4}, {{4, 6}, {5, 7}, {6, 7}, {7, 7}});
}

TEST_P(Masks, W5_AllAhead) {
  expect_rows(case_of({2, -1}, false), {4, 4}, {{2, 7}, {3, 7}, {4, 7}, {5, 7}});
}

TEST_P(Masks, W6_AllBefore) {
  expect_rows(case_of({-1, 1}, false), {4, 4}, {{0, 5}, {0, 6}, {0, 7}, {0, 7}});
}

TEST_P(Masks, W7_NothingLiesAheadOfTheNewestToken) {
  expect_rows(case_of({2, 2}, false), {1, 7}, {{5, 7}});
  CaseSpec spec = case_of({2, 2}, false);
  spec.requests = {{1, 7}, {1, 130}};
  for (const auto& context : devices()) {
    const CaseResult both_ways = run(context, spec);
    spec.causal = true;
    const CaseResult causal = run(context, spec);
    spec.causal = false;
    EXPECT_EQ(both_ways.out, causal.out);
    EXPECT_EQ(both_ways.lse, causal.lse);
  }
}

TEST_P(Masks, W12_EndlessSidesHideNothing) {
  expect_rows(case_of({kMost, kMost}, false), {4, 4}, {{0, 7}, {0, 7}, {0, 7}, {0, 7}});
  expect_rows(case_of({kMost, kMost}, true), {4, 4}, {{0, 4}, {0, 5}, {0, 6}, {0, 7}});
  for (const Sides& sides : {Sides{kMost, kMost}, {kMost, -1}, {-1, kMost}, {kMost, 0}, {0, kMost}})
    expect_right(mixed_batch(sides, false));
}

TEST_P(Masks, C35_C36_ChunksWithLookbackAndBothWays) {
  CaseSpec spec = case_of({-1, -1}, true);
  spec.config.attention_chunk_size = 4;
  spec.config.chunk_lookback = 1;
  expect_rows(spec, {3, 6}, {{0, 6}, {0, 7}, {4, 8}});
  spec.causal = spec.causal_encoder = false;
  spec.config.chunk_lookback = 0;
  expect_rows(spec, {3, 6}, {{4, 7}, {4, 7}, {8, 8}});
}

// What the mask shows, causality hides: no key is left, and no NaN appears.
TEST_P(Masks, M38_MasksThatShowOnlyWhatIsHidden) {
  CaseSpec spec = mixed_batch({1, 0}, true);
  spec.config.custom_mask = spec.mask_shows_ahead = true;
  expect_right(spec);
  spec.config.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
  expect_right(spec);
  expect_rows(spec, {3, 2}, {{-1, -1}, {-1, -1}, {-1, -1}});
}

TEST_P(Masks, ACausalRowSeesNothingAheadWhateverTheRightSide) {
  for (const std::int32_t right : {-1, 0, 1, kMost})
    expect_rows(case_of({2, right}, true), {4, 4}, {{2, 4}, {3, 5}, {4, 6}, {5, 7}});
  for (const std::int32_t right : {0, 5})
    expect_rows(case_of({-1, right}, true), {4, 4}, {{0, 4}, {0, 5}, {0, 6}, {0, 7}});
}

TEST_P(Masks, SidesInsideChunks) {
  CaseSpec spec = case_of({2, 1}, false);
  spec.config.attention_chunk_size = 4;
  expect_rows(spec, {4, 5}, {{4, 6}, {4, 7}, {5, 7}, {8, 8}});
  spec.config.chunk_lookback = 1;
  expect_rows(spec, {4, 5}, {{3, 6}, {4, 7}, {5, 7}, {6, 8}});
  spec.config.window_left = -1;
  expect_rows(spec, {4, 5}, {{0, 6}, {0, 7}, {0, 7}, {4, 8}});
}

TEST_P(Masks, SidesWithALiBi) {
  for (const bool left : {false, true}) {
    CaseSpec spec = case_of(left ? Sides{2, -1} : Sides{-1, 1}, false);
    spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
    expect_rows(spec, {4, 4},
                left ? Rows{{2, 7}, {3, 7}, {4, 7}, {5, 7}} : Rows{{0, 5}, {0, 6}, {0, 7}, {0, 7}});
  }
}

TEST_P(Masks, UnequalSidesOfEveryWidth) {
  for (const Sides& sides :
       {Sides{0, 33}, {33, 0}, {16, -1}, {-1, 16}, {-1, 0}, {1, 5000}, {5000, 1}, {40, 3}}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = mixed_batch(sides, causal);
      for (const std::int32_t splits : {0, 3}) {
        spec.num_splits = splits;
        expect_right(spec);
      }
    }
  }
}

TEST_P(Masks, APlanSuitsLayersOfNarrowerSides) {
  CaseSpec spec = mixed_batch({20, -1}, false);
  spec.planned_for = spec.config;
  spec.num_splits = 7;
  for (const Sides& sides : {Sides{20, 3}, {0, -1}, {5, 5}}) {
    spec.config.window_left = sides.first;
    spec.config.window_right = sides.second;
    expect_right(spec);
  }
  spec.config.kernel_family = spec.planned_for->kernel_family = GetParam();
  for (const Sides& sides : {Sides{21, 3}, {-1, 3}}) {
    spec.config.window_left = sides.first;
    spec.config.window_right = sides.second;
    for (const auto& context : devices())
      EXPECT_THROW(attention_test::run_case(context, spec), clattn::Error);
  }
}

FOR_ALL_FAMILIES(Masks);

}  // namespace test_window_sides
