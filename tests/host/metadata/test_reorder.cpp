#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/reorder.hpp>
#include <numeric>
#include <random>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

struct Progress {
  std::int32_t scheduled, computed, prompt;
};

struct Reordered {
  Ints order;
  std::vector<RowSwap> swaps;
  bool moved = false;
};

Reordered reorder(const std::vector<Progress>& requests, std::int32_t threshold = 1) {
  Ints scheduled, computed, prompt;
  for (const Progress& request : requests) {
    scheduled.push_back(request.scheduled);
    computed.push_back(request.computed);
    prompt.push_back(request.prompt);
  }
  Reordered result{Ints(requests.size(), -77), {{5, 5}}};
  result.moved = reorder_batch_to_split_decodes_and_prefills(
      {scheduled, computed, prompt}, threshold, result.order, &result.swaps);
  return result;
}

/// 0 decode, 1 short extend, 2 long extend, 3 prefill: SPEC A1.8's words.
int region(const Progress& request, std::int32_t threshold) {
  const bool has_context = request.computed > 0;
  const bool below = request.scheduled <= threshold;
  const bool done = request.computed >= request.prompt;
  if (!has_context) return 3;
  if (!below) return 2;
  return done ? 0 : 1;
}

/// Requests as (scheduled, computed, prompt), the order by four regions and the one by the
/// threshold alone.
struct ReorderRow {
  const char* name;
  std::vector<Progress> requests;
  std::int32_t threshold;
  Ints four_regions, two_classes;
};

// vLLM's 16 rows, by its names; its table of 2025 is the first 12 of them without the prompts. It
// pins no order by the threshold alone: that column is SPEC A1.8's rule by hand.
const ReorderRow kVllmRows[] = {
    {"all_decodes", {{1, 10, 10}, {1, 20, 20}, {1, 30, 30}}, 1, {0, 1, 2}, {0, 1, 2}},
    {"all_long_extends",
     {{100, 100, 100}, {200, 200, 200}, {300, 300, 300}},
     1,
     {0, 1, 2},
     {0, 1, 2}},
    {"mixed_decodes_long_extends",
     {{100, 100, 100}, {1, 10, 10}, {200, 200, 200}, {1, 20, 20}},
     1,
     {3, 1, 2, 0},
     {3, 1, 2, 0}},
    {"already_ordered",
     {{1, 10, 10}, {1, 20, 20}, {100, 100, 100}, {200, 0, 200}},
     1,
     {0, 1, 2, 3},
     {0, 1, 2, 3}},
    {"single_request", {{1, 10, 10}}, 1, {0}, {0}},
    {"higher_threshold",
     {{2, 10, 10}, {3, 20, 20}, {5, 30, 30}, {6, 40, 40}},
     4,
     {0, 1, 2, 3},
     {0, 1, 2, 3}},
    {"decodes_at_end",
     {{100, 100, 100}, {200, 200, 200}, {1, 10, 10}, {1, 20, 20}},
     1,
     {2, 3, 0, 1},
     {3, 2, 1, 0}},
    {"decode_long_extend_prefill",
     {{100, 0, 100}, {10, 50, 50}, {1, 10, 10}},
     1,
     {2, 1, 0},
     {2, 1, 0}},
    {"long_extend_prefill_only",
     {{100, 0, 100}, {10, 50, 50}, {200, 0, 200}, {20, 75, 75}},
     1,
     {3, 1, 2, 0},
     {0, 1, 2, 3}},
    {"complicated_mixed",
     {{1, 20, 20},
      {1, 50, 50},
      {374, 0, 374},
      {300, 20, 20},
      {1, 20, 20},
      {256, 0, 256},
      {1, 5, 5},
      {27, 0, 27},
      {1, 4, 4}},
     1,
     {0, 1, 6, 8, 4, 3, 2, 7, 5},
     {0, 1, 8, 6, 4, 5, 3, 7, 2}},
    {"new_request_single_token_prefill",
     {{100, 0, 100}, {1, 0, 1}, {50, 100, 100}, {1, 10, 10}},
     1,
     {3, 2, 0, 1},
     {3, 1, 2, 0}},
    {"multiple_new_requests_single_token_prefill",
     {{1, 0, 1}, {1, 0, 1}, {1, 50, 50}, {200, 0, 200}},
     1,
     {2, 1, 0, 3},
     {0, 1, 2, 3}},
    {"four_way_already_ordered",
     {{1, 100, 100}, {1, 50, 100}, {10, 50, 100}, {100, 0, 100}},
     1,
     {0, 1, 2, 3},
     {0, 1, 2, 3}},
    {"four_way_needs_reorder",
     {{100, 0, 100}, {1, 50, 100}, {1, 100, 100}, {10, 50, 100}},
     1,
     {2, 1, 3, 0},
     {2, 1, 0, 3}},
    {"four_way_multiple_short_extends",
     {{2, 100, 100}, {2, 50, 200}, {2, 75, 150}, {2, 200, 200}},
     2,
     {0, 3, 2, 1},
     {0, 1, 2, 3}},
    {"four_way_spec_decode_threshold",
     {{5, 100, 100}, {5, 50, 100}, {5, 0, 100}, {10, 50, 100}},
     5,
     {0, 1, 3, 2},
     {0, 1, 2, 3}},
};

TEST(ReorderFourRegions, A1_8_RowsOfVLLM) {
  for (const ReorderRow& row : kVllmRows) {
    SCOPED_TRACE(row.name);
    Ints identity(row.requests.size()), scheduled, order(row.requests.size());
    std::iota(identity.begin(), identity.end(), 0);
    const Reordered result = reorder(row.requests, row.threshold);
    EXPECT_EQ(result.order, row.four_regions);
    EXPECT_EQ(result.moved, row.four_regions != identity);
    for (const Progress& request : row.requests) scheduled.push_back(request.scheduled);
    const bool moved = reorder_batch_to_split_decodes_and_prefills(scheduled, row.threshold, order);
    EXPECT_EQ(order, row.two_classes);
    EXPECT_EQ(moved, row.two_classes != identity);
  }
}

TEST(ReorderFourRegions, A1_8_SwapsReachTheOrder) {
  const Reordered result = reorder({{100, 100, 100}, {1, 10, 10}, {200, 200, 200}, {1, 20, 20}});
  EXPECT_EQ(result.swaps, (std::vector<RowSwap>{{0, 3}}));
}

TEST(ReorderFourRegions, A1_8_OneOfEachRegion) {
  const Progress decode{1, 9, 9}, short_extend{1, 4, 9}, long_extend{5, 4, 9}, prefill{1, 0, 9};
  EXPECT_EQ(reorder({prefill, long_extend, short_extend, decode}).order, (Ints{3, 2, 1, 0}));
  EXPECT_EQ(reorder({short_extend, decode, prefill, long_extend}).order, (Ints{1, 0, 3, 2}));
  EXPECT_FALSE(reorder({decode, short_extend, long_extend, prefill}).moved);
  EXPECT_FALSE(reorder({}).moved);
}

TEST(ReorderFourRegions, A1_8_TheThresholdCountsAndAFirstChunkIsAPrefillHoweverShort) {
  EXPECT_EQ(reorder({{1, 0, 1}, {4, 8, 8}, {5, 8, 8}, {4, 8, 20}}, 4).order, (Ints{1, 3, 2, 0}));
}

std::vector<Progress> random_requests(std::mt19937& random) {
  std::vector<Progress> requests(random() % 40);
  for (Progress& request : requests) {
    const auto prompt = static_cast<std::int32_t>(1 + random() % 6);
    request = {static_cast<std::int32_t>(random() % 6), static_cast<std::int32_t>(random() % 8),
               prompt};
  }
  return requests;
}

std::size_t count_cycles(const Ints& order) {
  std::vector<bool> seen(order.size());
  std::size_t cycles = 0;
  for (std::size_t start = 0; start < order.size(); ++start) {
    if (seen[start]) continue;
    ++cycles;
    for (std::size_t at = start; !seen[at]; at = static_cast<std::size_t>(order[at])) {
      seen[at] = true;
    }
  }
  return cycles;
}

// A1.8: regions in order, nobody lost, rows that stand right stay, movers keep their order, the
// swaps are as few as that order can be reached by and reach it.
TEST(ReorderFourRegions, A1_8_Properties) {
  std::mt19937 random(20260817);
  for (int run = 0; run < 4000; ++run) {
    const std::vector<Progress> requests = random_requests(random);
    const auto threshold = static_cast<std::int32_t>(random() % 5);
    const Reordered result = reorder(requests, threshold);
    const auto old_region = [&](std::int32_t old) {
      return region(requests[static_cast<std::size_t>(old)], threshold);
    };
    Ints sorted = result.order;
    std::sort(sorted.begin(), sorted.end());
    Ints identity(requests.size());
    std::iota(identity.begin(), identity.end(), 0);
    ASSERT_EQ(sorted, identity) << "run " << run;
    ASSERT_EQ(result.moved, result.order != identity);

    Ints last_mover(4, -1);
    for (std::size_t place = 0; place < requests.size(); ++place) {
      const std::int32_t old = result.order[place];
      const auto here = static_cast<std::int32_t>(place);
      if (place > 0) {
        ASSERT_LE(old_region(result.order[place - 1]), old_region(old));
      }
      // The region of a place never changes, so its old row stays exactly if it belongs there.
      ASSERT_EQ(old == here, old_region(here) == old_region(old)) << "run " << run;
      if (old == here) continue;
      std::int32_t& last = last_mover[static_cast<std::size_t>(old_region(old))];
      ASSERT_LT(last, old) << "run " << run;
      last = old;
    }

    for (const RowSwap& swap : result.swaps) {
      std::swap(identity[static_cast<std::size_t>(swap[0])],
                identity[static_cast<std::size_t>(swap[1])]);
    }
    ASSERT_EQ(identity, result.order) << "run " << run;
    ASSERT_EQ(result.swaps.size(), requests.size() - count_cycles(result.order));
  }
}

TEST(ReorderFourRegions, RefusesNonsense) {
  Ints order(2);
  const Ints two{1, 2}, three{1, 2, 3}, negative{1, -5};
  const auto call = [&](const RequestProgress& requests, std::int32_t threshold) {
    return error_text(
        [&] { reorder_batch_to_split_decodes_and_prefills(requests, threshold, order); });
  };
  EXPECT_EQ(call({two, three, two}, 1),
            "num_computed_tokens holds 3 elements, legal: 2 (one per request)");
  EXPECT_EQ(call({three, three, three}, 1), "order holds 2 elements, legal: 3 (one per request)");
  EXPECT_EQ(call({two, two, negative}, 1), "request 1: num_prompt_tokens is -5, legal: at least 0");
  EXPECT_EQ(call({two, two, two}, -1), "decode_threshold is -1, legal: at least 0");
}

TEST(ReorderBatchThreshold, A1_10_CountsSpeculativeTokens) {
  EXPECT_EQ(reorder_batch_threshold(0), 1);
  EXPECT_EQ(reorder_batch_threshold(3), 4);
  EXPECT_EQ(reorder_batch_threshold(3, Drafting::kParallel), 7);
  EXPECT_EQ(error_text([] { reorder_batch_threshold(-1); }),
            "num_speculative_tokens is -1, legal: at least 0");
}

}  // namespace
}  // namespace clattn
