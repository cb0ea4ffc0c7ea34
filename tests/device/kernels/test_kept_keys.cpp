// First keys of a request that its window and chunks do not hide, in every kernel family. What no
// row of a request sees, the gap behind them included, is NaN.
#include <algorithm>
#include <numeric>

#include "device/masks.hpp"

namespace test_kept_keys {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Keys;
using attention_test::Request;
using clattn::Direction;

/// The keys first … end - 1 of each pair.
Keys keys_in(const std::vector<std::pair<std::int32_t, std::int32_t>>& ranges) {
  Keys keys;
  for (const auto& [first, end] : ranges)
    for (std::int32_t key = first; key < end; ++key) keys.push_back(key);
  return keys;
}

Request keeping(std::int32_t keys, Request request) {
  request.keep_keys = keys;
  return request;
}

class KeptKeys : public attention_test::Masks {
 protected:
  static CaseSpec plain(std::int32_t window) {
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.config.use_keep_keys = true;
    spec.config.sliding_window = window;
    spec.causal_encoder = true;
    spec.unseen_is_nan = true;
    return spec;
  }
  /// Gaps of none and of many pages, wholly before the queries or between their windows, beside
  /// requests without.
  static std::vector<Request> mixed() {
    return {keeping(1, {1, 0}),
            keeping(4, {1, 300}),
            {1, 40},
            keeping(33, {1, 170}),
            keeping(200, {1, 199}),
            keeping(5, {4, 61}),
            keeping(40, {35, 170}),
            {9, 80},
            keeping(3, {150, 20}),
            keeping(16, {90, 0}),
            keeping(48, {2, 400})};
  }
};

TEST_P(KeptKeys, K34_KeysThatEscapeTheWindow) {
  expect_keys(plain(3), keeping(3, {3, 7}),
              {keys_in({{0, 3}, {5, 8}}), keys_in({{0, 3}, {6, 9}}), keys_in({{0, 3}, {7, 10}})});
  // Where the window reaches them there is no gap, and causality hides them as others.
  expect_keys(plain(3), keeping(5, {6, 0}),
              {{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}});
  expect_keys(plain(1), keeping(1, {4, 0}), {{0}, {0, 1}, {0, 2}, {0, 3}});
}

TEST_P(KeptKeys, EscapeChunks) {
  CaseSpec spec = plain(0);
  spec.config.attention_chunk_size = 4;
  expect_keys(spec, keeping(2, {4, 10}),
              {keys_in({{0, 2}, {8, 11}}), keys_in({{0, 2}, {8, 12}}), keys_in({{0, 2}, {12, 13}}),
               keys_in({{0, 2}, {12, 14}})});
  spec.config.chunk_lookback = 1;
  expect_keys(spec, keeping(2, {2, 10}), {keys_in({{0, 2}, {4, 11}}), keys_in({{0, 2}, {4, 12}})});
}

TEST_P(KeptKeys, BehindAFirstKeyAndUnderADirection) {
  CaseSpec spec = plain(3);
  spec.config.use_first_keys = true;
  Request request = keeping(4, {2, 10});
  request.first_key = 2;
  expect_keys(spec, request, {keys_in({{2, 4}, {8, 11}}), keys_in({{2, 4}, {9, 12}})});
  request.first_key = 6;
  expect_keys(spec, request, {keys_in({{8, 11}}), keys_in({{9, 12}})});
  spec.config.use_directions = true;
  request = keeping(2, {3, 8});
  request.direction = Direction::kCanvas;
  expect_keys(spec, request, std::vector<Keys>(3, keys_in({{0, 2}, {6, 11}})));
  request.direction = Direction::kBothWays;
  expect_keys(spec, request,
              {keys_in({{0, 2}, {6, 11}}), keys_in({{0, 2}, {7, 11}}), keys_in({{0, 2}, {8, 11}})});
}

TEST_P(KeptKeys, WithASpanAndBeforeATree) {
  CaseSpec spec = plain(2);
  spec.config.use_spans = spec.config.use_trees = true;
  Request request = keeping(2, {4, 6});
  request.spans = {{5, 9}};
  const Keys span = keys_in({{0, 2}, {5, 9}});
  expect_keys(spec, request, {span, span, span, {0, 1, 8, 9}});
  request = keeping(2, {4, 6});
  request.parents = {-1, 0, 0, 1};
  expect_keys(spec, request, {{0, 1, 5, 6}, {0, 1, 6, 7}, {0, 1, 6, 8}, {0, 1, 7, 9}});
}

TEST_P(KeptKeys, GapsOfAllSizesOverPagesOfAllSizes) {
  for (const std::int32_t page : {1, 5, 16, 544}) {
    CaseSpec spec = plain(page == 5 ? 1 : 20);
    spec.config.block_size = page;
    spec.requests = mixed();
    spec.num_splits = page == 1 ? 1 : page == 5 ? 3 : 0;
    expect_right(spec);
    spec.num_splits = 0;
    spec.split_policy = clattn::SplitPolicy::kDeterministic;
    if (page == 16) expect_right(spec);
  }
}

TEST_P(KeptKeys, WithEveryOtherOption) {
  CaseSpec spec = plain(30);
  spec.config.use_spans = spec.config.use_directions = spec.config.use_first_keys = true;
  spec.config.attention_chunk_size = 64;
  spec.config.logits_soft_cap = 20;
  spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
  spec.config.sinks = {0.5F, -1, 2, 0};
  spec.config.custom_mask = true;
  spec.requests = mixed();
  for (Request& request : spec.requests) request.direction = Direction::kCausal;
  spec.requests[5].direction = Direction::kCanvas;
  spec.requests[6].direction = Direction::kBothWays;
  spec.requests[3].first_key = 12;
  spec.requests[8].spans = {{30, 70}, {90, 91}};
  expect_right(spec);
  spec.config.kv_cache_dtype = clattn::DType::kFp8E4M3;
  spec.config.dtype = clattn::DType::kF16;
  expect_right(spec);
}

TEST_P(KeptKeys, AllKeysAreAsWithoutAWindow) {
  for (const auto& context : devices()) {
    CaseSpec spec = plain(7);
    spec.unseen_is_nan = false;
    spec.num_splits = 1;
    spec.requests = mixed();
    for (Request& request : spec.requests)
      request.keep_keys = request.query_len + request.context_len;
    const CaseResult kept = run(context, spec);
    spec.config.sliding_window = 100000;
    for (Request& request : spec.requests) request.keep_keys = 0;
    const CaseResult all = run(context, spec);
    EXPECT_EQ(kept.out, all.out);
    EXPECT_EQ(kept.lse, all.lse);
  }
}

TEST_P(KeptKeys, NoneAreAsTheWindowAlone) {
  for (const auto& context : devices()) {
    CaseSpec spec = plain(7);
    spec.requests = mixed();
    for (Request& request : spec.requests) request.keep_keys = 0;
    const CaseResult none = run(context, spec);
    spec.config.use_keep_keys = false;
    EXPECT_EQ(none.out, run(context, spec).out);
  }
}

FOR_ALL_FAMILIES(KeptKeys);

}  // namespace test_kept_keys
