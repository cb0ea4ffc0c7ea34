// Directions and trees that only the device knows (BuilderOptions::device_directions,
// device_trees), and lists of the host with lengths that only the device knows, in every kernel
// family. What no row of a request sees is NaN.
#include "device/masks.hpp"
#include "device/tree_cases.hpp"

namespace test_device_lists {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::Request;
using attention_test::requests_with_trees;
using attention_test::with_tree;
using clattn::Direction;

class DeviceLists : public attention_test::Masks {
 protected:
  static CaseSpec plain() {
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.unseen_is_nan = true;
    return spec;
  }
  static Request with(Direction direction, Request request, std::int32_t first_key = 0,
                      std::int32_t keep_keys = 0) {
    request.direction = direction;
    request.first_key = first_key;
    request.keep_keys = keep_keys;
    return request;
  }
  /// Requests of every direction: prompts, chunks, decodes, idle ones.
  static std::vector<Request> directed() {
    return {with(Direction::kCausal, {1, 0}),
            with(Direction::kBothWays, {1, 130}),
            with(Direction::kCanvas, {1, 40}, 17),
            with(Direction::kBothWays, {4, 61}),
            with(Direction::kCanvas, {35, 170}, 180, 190),
            with(Direction::kCausal, {0, 30}),
            with(Direction::kCausal, {150, 20}, 30),
            with(Direction::kBothWays, {90, 0}),
            with(Direction::kCanvas, {40, 3}),
            with(Direction::kCausal, {5, 333}, 3, 40)};
  }
  static CaseSpec with_directions(std::int32_t left, std::int32_t right) {
    CaseSpec spec = plain();
    spec.config.use_directions = true;
    spec.config.window_left = left;
    spec.config.window_right = right;
    spec.lists_on_device = true;
    spec.requests = directed();
    return spec;
  }
  static CaseSpec with_trees(std::int32_t window) {
    CaseSpec spec = plain();
    spec.config.use_trees = true;
    spec.config.sliding_window = window;
    spec.lists_on_device = true;
    spec.requests = requests_with_trees();
    return spec;
  }
};

TEST_P(DeviceLists, D11_EachDirectionInOneLaunch) {
  for (const std::int32_t left : {-1, 0, 40}) {
    for (const std::int32_t right : {-1, 3}) {
      CaseSpec spec = with_directions(left, right);
      for (const std::int32_t splits : {0, 7}) {
        spec.num_splits = splits;
        expect_right(spec);
      }
    }
  }
}

TEST_P(DeviceLists, DirectionsAmongOtherLists) {
  CaseSpec spec = with_directions(30, 30);
  spec.config.use_first_keys = spec.config.use_keep_keys = spec.config.use_spans = true;
  spec.requests[3].spans = {{0, 7}, {60, 63}};
  spec.requests[6].spans = {{31, 60}, {61, 62}, {100, 164}};
  spec.requests[7].spans = {{0, 33}, {80, 90}};
  for (const auto rule :
       {clattn::SpanRule::kWhole, clattn::SpanRule::kClipLeft, clattn::SpanRule::kClipBoth}) {
    spec.config.span_rule = rule;
    spec.num_splits = rule == clattn::SpanRule::kWhole ? 0 : 5;
    expect_right(spec);
  }
  spec.config.attention_chunk_size = 48;
  spec.split_policy = clattn::SplitPolicy::kDeterministic;
  spec.num_splits = 0;
  expect_right(spec);
}

TEST_P(DeviceLists, DirectionsHaveTheBitsOfTheHosts) {
  for (const auto& context : devices()) {
    CaseSpec spec = with_directions(-1, -1);
    spec.num_splits = 1;
    const CaseResult device = run(context, spec);
    spec.lists_on_device = false;
    const CaseResult host = run(context, spec);
    EXPECT_EQ(device.out, host.out);
    EXPECT_EQ(device.lse, host.lse);
  }
}

TEST_P(DeviceLists, T32_TreesOfAllSizesOverPagesOfAllSizes) {
  for (const std::int32_t window : {0, 5, 100}) {
    CaseSpec spec = with_trees(window);
    spec.num_splits = window == 5 ? 0 : 3;
    for (const std::int32_t page : {1, 16, 544}) {
      spec.config.block_size = page;
      expect_right(spec);
    }
  }
}

TEST_P(DeviceLists, TreesAmongOtherOptions) {
  CaseSpec spec = with_trees(40);
  spec.config.use_first_keys = true;
  spec.requests[7].first_key = 17;
  spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, -0.0625F};
  spec.config.sinks = {0.5F, -1, 2, 0};
  expect_right(spec);
  spec.config.attention_chunk_size = 64;
  spec.config.chunk_lookback = 1;
  expect_right(spec);
}

TEST_P(DeviceLists, TreesHaveTheBitsOfTheHosts) {
  for (const auto& context : devices()) {
    for (const std::int32_t splits : {1, 5}) {
      CaseSpec spec = with_trees(0);
      spec.num_splits = splits;
      const CaseResult device = run(context, spec);
      spec.lists_on_device = false;
      const CaseResult host = run(context, spec);
      EXPECT_EQ(device.out, host.out);
      EXPECT_EQ(device.lse, host.lse);
    }
  }
}

// Lengths come before the lists or after them.
TEST_P(DeviceLists, WithLengthsOfTheDevice) {
  for (const std::int32_t above : {0, 3, 800}) {
    CaseSpec spec = with_directions(30, 30);
    spec.config.use_first_keys = spec.config.use_keep_keys = true;
    spec.bounds_above = above;
    spec.num_splits = above == 3 ? 5 : 0;
    expect_right(spec);
    spec = with_trees(20);
    spec.config.attention_chunk_size = above == 3 ? 64 : 0;
    spec.bounds_above = above;
    spec.num_splits = above == 3 ? 5 : 0;
    expect_right(spec);
  }
}

TEST_P(DeviceLists, OfTheHostWithLengthsOfTheDevice) {
  for (const std::int32_t above : {0, 3, 800}) {
    for (const std::int32_t splits : {0, 5}) {
      CaseSpec spec = with_directions(30, 3);
      spec.lists_on_device = false;
      spec.config.use_first_keys = spec.config.use_keep_keys = true;
      spec.bounds_above = above;
      spec.num_splits = splits;
      expect_right(spec);
      spec = with_trees(20);
      spec.lists_on_device = false;
      spec.config.attention_chunk_size = splits == 0 ? 64 : 0;
      spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, -0.0625F};
      spec.bounds_above = above;
      spec.num_splits = splits;
      expect_right(spec);
    }
  }
}

TEST_P(DeviceLists, BitsOfAHostsPlanByAnyBound) {
  for (const auto& context : devices()) {
    CaseSpec spec = plain();
    spec.config.use_directions = spec.config.use_first_keys = spec.config.use_trees = true;
    spec.config.sliding_window = 50;
    spec.split_policy = clattn::SplitPolicy::kDeterministic;
    spec.requests = directed();
    spec.requests.push_back(with_tree({-1, 0, 0, 1}, with(Direction::kCausal, {4, 600})));
    for (Request& request : spec.requests) request.keep_keys = 0;
    const CaseResult host = run(context, spec);
    for (const std::int32_t above : {0, 700}) {
      spec.bounds_above = above;
      const CaseResult device = run(context, spec);
      EXPECT_EQ(device.out, host.out);
      EXPECT_EQ(device.lse, host.lse);
    }
  }
}

FOR_ALL_FAMILIES(DeviceLists);

}  // namespace test_device_lists
