#include <gtest/gtest.h>

#include <clattn/custom_mask.hpp>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;

test::Batch mixed_batch() {
  test::Batch batch = test::make_batch({{1, 9}, {0, 3}, {6, 12}, {4, 4}}, 16);
  batch.causal = false;
  return batch;
}

// A1.10: causal, or both positions in one range; a window does not cut ranges.
TEST(MMPrefixMask, A1_10_EqualsTheRuleByLoops) {
  const test::Batch batch = mixed_batch();
  const std::vector<MMSpan> spans{{0, 2, 9}, {2, 1, 3}, {2, 5, 9}, {2, 10, 14}, {3, 0, 4}};
  const MMPrefixRanges ranges = compute_mm_prefix_range(spans, 4);
  for (const std::int32_t window : {0, 1, 3, 100}) {
    const CustomMask mask = make_mm_prefix_mask(batch.view(), ranges, window);
    ASSERT_EQ(mask.stride, 12);
    std::vector<std::uint8_t> want(11 * 12, 0);
    for (std::int32_t r = 0; r < 4; ++r) {
      const auto row = static_cast<std::size_t>(r);
      const std::int32_t keys = batch.seq_lens[row];
      for (std::int32_t t = batch.query_start_loc[row]; t < batch.query_start_loc[row + 1]; ++t) {
        const std::int32_t at = keys - batch.query_start_loc[row + 1] + t;
        for (std::int32_t j = 0; j < keys; ++j) {
          bool sees = j <= at && (window == 0 || at - j < window);
          for (const MMSpan& s : spans) {
            sees = sees ||
                   (s.request == r && s.start <= at && at < s.end && s.start <= j && j < s.end);
          }
          want[static_cast<std::size_t>(t * 12 + j)] = sees ? 1 : 0;
        }
      }
    }
    EXPECT_EQ(mask.rows, want) << window;
  }
}

TEST(MMPrefixMask, A1_10_WithoutRangesItIsCausal) {
  const test::Batch batch = test::make_batch({{2, 3}}, 16);
  CommonAttentionMetadata view = batch.view();
  view.causal = false;
  EXPECT_EQ(make_mm_prefix_mask(view, {}).rows, (std::vector<std::uint8_t>{1, 1, 0, 1, 1, 1}));
  const test::Batch empty = test::make_batch({}, 16);
  view = empty.view();
  view.causal = false;
  EXPECT_TRUE(make_mm_prefix_mask(view, {}).rows.empty());
}

TEST(MMPrefixMask, RefusesNonsense) {
  const test::Batch batch = mixed_batch();
  CommonAttentionMetadata causal = batch.view();
  causal.causal = true;
  EXPECT_EQ(error_text([&] { make_mm_prefix_mask(causal, {}); }),
            "causal is true, legal: false: a mask cannot show keys that causality hides");
  EXPECT_EQ(error_text([&] { make_mm_prefix_mask(batch.view(), {}, -1); }),
            "sliding_window is -1, legal: >= 0");
  EXPECT_EQ(error_text([&] {
              make_mm_prefix_mask(batch.view(), {{0, 1}, 1});
            }),
            "ranges holds 2 elements, legal: 8 (num_reqs 4 x max_ranges 1 x 2)");
  EXPECT_EQ(error_text([&] {
              make_mm_prefix_mask(batch.view(), {{0, 1, -3, 5, 0, 0, 0, 0}, 1});
            }),
            "request 1: a range is -3 … 5, legal: 0 <= start <= end");
  test::Batch shorter = batch;
  shorter.seq_lens[2] = 5;
  EXPECT_EQ(error_text([&] { make_mm_prefix_mask(shorter.view(), {}); }),
            "request 2: seq_lens is 5, legal: at least the query length, 6");
}

}  // namespace
}  // namespace clattn
