#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/reorder.hpp>
#include <numeric>
#include <random>

#include "metadata_batch.hpp"

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

TEST(ReorderFourRegions, A1_8_PinnedExample) {
  const Reordered result = reorder({{100, 100, 100}, {1, 10, 10}, {200, 200, 200}, {1, 20, 20}});
  EXPECT_EQ(result.order, (Ints{3, 1, 2, 0}));
  EXPECT_EQ(result.swaps, (std::vector<RowSwap>{{0, 3}}));
  EXPECT_TRUE(result.moved);
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
