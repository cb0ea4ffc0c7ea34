// What a batch says of the keys that the rows of a request see: directions, spans and first keys,
// in every kernel family. What no row of a request sees is NaN.
#include <algorithm>
#include <limits>

#include "device/masks.hpp"

namespace test_listed_rows {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Request;
using attention_test::Rows;
using clattn::Direction;
using clattn::SpanRule;

constexpr SpanRule kRules[] = {SpanRule::kWhole, SpanRule::kClipLeft, SpanRule::kClipBoth};

class ListedRows : public attention_test::Masks {
 protected:
  static CaseSpec plain() {
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.causal_encoder = true;
    spec.unseen_is_nan = true;
    return spec;
  }
  static CaseSpec directed(std::int32_t left, std::int32_t right) {
    CaseSpec spec = plain();
    spec.config.use_directions = true;
    spec.config.window_left = left;
    spec.config.window_right = right;
    return spec;
  }
  static CaseSpec spanned(SpanRule rule = SpanRule::kWhole, std::int32_t window = 0) {
    CaseSpec spec = plain();
    spec.config.use_spans = true;
    spec.config.span_rule = rule;
    spec.config.sliding_window = window;
    return spec;
  }
  static Request with(Direction direction, Request request) {
    request.direction = direction;
    return request;
  }
  static Request with_spans(std::vector<std::pair<std::int32_t, std::int32_t>> spans,
                            Request request) {
    request.spans = std::move(spans);
    return request;
  }
  /// Every kind of row in one launch: prompts, chunks, decodes, idle requests.
  static CaseSpec mixed(CaseSpec spec) {
    spec.requests = {with(Direction::kCausal, {1, 0}),    with(Direction::kBothWays, {1, 130}),
                     with(Direction::kCanvas, {1, 40}),   with(Direction::kBothWays, {4, 61}),
                     with(Direction::kCanvas, {35, 170}), with(Direction::kCausal, {0, 30}),
                     with(Direction::kCausal, {150, 20}), with(Direction::kBothWays, {90, 0}),
                     with(Direction::kCanvas, {40, 3})};
    if (!spec.config.use_directions)
      for (Request& request : spec.requests) request.direction.reset();
    spec.requests[1].spans = {{120, 131}};
    spec.requests[3].spans = {{0, 7}, {60, 63}};
    spec.requests[4].spans = {{100, 180}, {180, 181}, {190, 900}};
    spec.requests[6].spans = {{5, 24}, {24, 60}, {61, 62}, {100, 164}};
    spec.requests[7].spans = {{0, 33}, {80, 90}};
    spec.requests[0].first_key = 1;
    spec.requests[2].first_key = 17;
    spec.requests[4].first_key = 180;
    spec.requests[6].first_key = 30;
    spec.requests[8].first_key = 43;
    return spec;
  }
};

TEST_P(ListedRows, D8_ACanvasLooksBackFromItsFirstQuery) {
  expect_rows(directed(3, -1), with(Direction::kCanvas, {4, 8}),
              {{5, 11}, {5, 11}, {5, 11}, {5, 11}});
}

TEST_P(ListedRows, D9_BothWays) {
  expect_rows(directed(3, 3), with(Direction::kBothWays, {4, 8}),
              {{5, 11}, {6, 11}, {7, 11}, {8, 11}});
}

TEST_P(ListedRows, D10_TheRightSideIsForRowsThatLookAhead) {
  expect_rows(directed(3, 3), with(Direction::kCausal, {4, 8}), {{5, 8}, {6, 9}, {7, 10}, {8, 11}});
  expect_rows(directed(3, 3), with(Direction::kCanvas, {4, 8}),
              {{5, 11}, {5, 11}, {5, 11}, {5, 11}});
}

TEST_P(ListedRows, D11_EachDirectionInOneLaunch) {
  for (const std::int32_t left : {-1, 0, 3, 40}) {
    for (const std::int32_t right : {-1, 3}) {
      CaseSpec spec = mixed(directed(left, right));
      for (const std::int32_t splits : {0, 7}) {
        spec.num_splits = splits;
        expect_right(spec);
      }
    }
  }
}

TEST_P(ListedRows, D7_OneQueryHasTheBitsOfACausalOne) {
  for (const auto& context : devices()) {
    CaseSpec spec = directed(20, 20);
    const auto all = [&](Direction direction) {
      spec.requests = {with(direction, {1, 0}), with(direction, {1, 130})};
      return run(context, spec);
    };
    const CaseResult causal = all(Direction::kCausal);
    for (const Direction direction : {Direction::kBothWays, Direction::kCanvas}) {
      const CaseResult other = all(direction);
      EXPECT_EQ(other.out, causal.out);
      EXPECT_EQ(other.lse, causal.lse);
    }
  }
}

TEST_P(ListedRows, S13_ASpanSeesAllOfItself) {
  expect_rows(spanned(), with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {0, 5}, {0, 5}, {0, 5}, {0, 5}, {0, 6}, {0, 7}});
}

TEST_P(ListedRows, S14_TheWholeSpanUnderAWindow) {
  expect_rows(spanned(SpanRule::kWhole, 2), with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {1, 5}, {2, 5}, {2, 5}, {2, 5}, {5, 6}, {6, 7}});
}

TEST_P(ListedRows, S15_CutOnTheLeft) {
  expect_rows(spanned(SpanRule::kClipLeft, 2), with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {1, 5}, {2, 5}, {3, 5}, {4, 5}, {5, 6}, {6, 7}});
}

TEST_P(ListedRows, S16_CutOnBothSides) {
  expect_rows(spanned(SpanRule::kClipBoth, 2), with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {1, 3}, {2, 4}, {3, 5}, {4, 5}, {5, 6}, {6, 7}});
}

TEST_P(ListedRows, S17_TheSpanEndsWhereTheKeysDo) {
  expect_rows(spanned(), with_spans({{2, 9}}, {5, 0}), {{0, 0}, {0, 1}, {0, 4}, {0, 4}, {0, 4}});
}

TEST_P(ListedRows, S18_AChunkOfAPromptStartsInASpan) {
  expect_rows(spanned(), with_spans({{2, 7}}, {4, 5}), {{0, 6}, {0, 6}, {0, 7}, {0, 8}});
}

TEST_P(ListedRows, S19_SpansOfThePastAreNotRead) {
  expect_rows(spanned(SpanRule::kWhole, 3), with_spans({{2, 5}}, {2, 7}), {{5, 7}, {6, 8}});
}

TEST_P(ListedRows, S20_NeighboursStayApart) {
  expect_rows(spanned(), with_spans({{1, 3}, {3, 6}}, {7, 0}),
              {{0, 0}, {0, 2}, {0, 2}, {0, 5}, {0, 5}, {0, 5}, {0, 6}});
}

TEST_P(ListedRows, S21_APrefixLanguageModel) {
  expect_rows(spanned(), with_spans({{0, 4}}, {6, 0}),
              {{0, 3}, {0, 3}, {0, 3}, {0, 3}, {0, 4}, {0, 5}});
}

TEST_P(ListedRows, S22_S23_SpansOverChunks) {
  CaseSpec spec = spanned();
  spec.config.attention_chunk_size = 4;
  expect_rows(spec, with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {0, 5}, {0, 5}, {2, 5}, {2, 5}, {4, 6}, {4, 7}});
  spec.config.span_rule = SpanRule::kClipLeft;
  expect_rows(spec, with_spans({{2, 6}}, {8, 0}),
              {{0, 0}, {0, 1}, {0, 3}, {0, 3}, {4, 5}, {4, 5}, {4, 6}, {4, 7}});
}

TEST_P(ListedRows, S24_ASpanWhereAllLookBothWays) {
  CaseSpec spec = spanned(SpanRule::kWhole, 2);
  spec.causal = false;
  expect_rows(spec, with_spans({{4, 8}}, {4, 4}), {{3, 7}, {4, 7}, {4, 7}, {4, 7}});
  spec.causal = true;
  spec.config.use_directions = true;
  expect_rows(spec, with(Direction::kBothWays, with_spans({{4, 8}}, {4, 4})),
              {{3, 7}, {4, 7}, {4, 7}, {4, 7}});
}

TEST_P(ListedRows, S25_SpansThatChangeNothing) {
  for (const auto& context : devices()) {
    CaseSpec spec = spanned(SpanRule::kWhole, 20);
    spec.requests = {{1, 50}, {70, 0}, {33, 40}};
    const CaseResult without = run(context, spec);
    spec.requests[0].spans = {{10, 30}};
    spec.requests[1].spans = {{5, 6}, {9, 9}, {70, 90}};
    spec.requests[2].spans = {{0, 40}, {500, 600}};
    const CaseResult with_spans = run(context, spec);
    EXPECT_EQ(with_spans.out, without.out);
    EXPECT_EQ(with_spans.lse, without.lse);
    spec.config.use_spans = false;  // the layer does not look at them
    spec.requests[1].spans = {{5, 60}};
    const CaseResult ignored = run(context, spec);
    spec.requests[1].spans.clear();
    EXPECT_EQ(ignored.out, run(context, spec).out);
  }
}

TEST_P(ListedRows, F37_FirstKeys) {
  CaseSpec spec = plain();
  spec.config.use_first_keys = true;
  Request request{2, 8};
  request.first_key = 3;
  expect_rows(spec, request, {{3, 8}, {3, 9}});
  request.first_key = 9;
  expect_rows(spec, request, {{-1, -1}, {9, 9}});
  request.first_key = 10;
  expect_rows(spec, request, {{-1, -1}, {-1, -1}});
  spec.config.sinks = {0.5F, -1, 2, 0};
  expect_rows(spec, request, {{-1, -1}, {-1, -1}});
}

TEST_P(ListedRows, SpansOfEveryRuleInMixedBatches) {
  for (const SpanRule rule : kRules) {
    for (const std::int32_t window : {0, 1, 30}) {
      for (const std::int32_t splits : {0, 5}) {
        CaseSpec spec = mixed(spanned(rule, window));
        spec.num_splits = splits;
        expect_right(spec);
        spec.config.attention_chunk_size = 48;
        expect_right(spec);
      }
    }
  }
}

TEST_P(ListedRows, EveryOptionAtOnce) {
  for (const bool chunks : {false, true}) {
    CaseSpec spec = spanned(SpanRule::kClipBoth, 30);
    spec.config.use_directions = spec.config.use_first_keys = true;
    if (chunks) spec.config.attention_chunk_size = 64;
    spec.config.logits_soft_cap = 20;
    spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
    spec.config.sinks = {0.5F, -1, 2, 0};
    spec.config.custom_mask = true;
    for (const std::int32_t page : {1, 48}) {
      spec.config.block_size = page;
      expect_right(mixed(spec));
    }
    spec.config.num_heads = 10;  // rows of a tile are heads of several tokens
    spec.config.alibi_slopes.assign(10, 0.25F);
    spec.config.sinks.assign(10, 0.5F);
    spec.split_policy = clattn::SplitPolicy::kDeterministic;
    expect_right(mixed(spec));
  }
}

FOR_ALL_FAMILIES(ListedRows);

}  // namespace test_listed_rows
