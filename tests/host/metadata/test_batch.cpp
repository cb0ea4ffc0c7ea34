#include <gtest/gtest.h>
#include <clattn/reorder.hpp>

#include <numeric>
#include <random>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;

CommonAttentionMetadata queries(const std::vector<std::int32_t>& starts,
                                std::int32_t max_query_len = 0) {
  CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.num_reqs = static_cast<std::int32_t>(starts.size()) - 1;
  batch.num_actual_tokens = starts.back();
  batch.max_query_len = max_query_len;
  return batch;
}

BatchSplit split(const std::vector<std::int32_t>& starts, std::int32_t threshold,
                 std::int32_t max_query_len = 0) {
  return split_decodes_and_prefills(queries(starts, max_query_len), threshold);
}

TEST(CommonAttentionMetadata, CountsFollowFromTheSizes) {
  const std::vector<std::int32_t> starts{0, 2, 3}, lens{5, 1}, table{1, 2, 3, 4, 5, 6};
  const auto batch = clattn::CommonAttentionMetadata::of(starts, lens, table);
  EXPECT_EQ(batch.num_reqs, 2);
  EXPECT_EQ(batch.num_actual_tokens, 3);
  EXPECT_EQ(batch.block_table_stride, 3);
  EXPECT_EQ(error_text([&] {
              clattn::CommonAttentionMetadata::of(starts, lens, std::span(table).first(5));
            }),
            "block_table holds 5 elements, legal: a multiple of the 2 requests (rows of equal "
            "length: pad the shorter ones with 0)");
}

TEST(CommonAttentionMetadata, MoreStartsThanRequestsAreRefused) {
  const std::vector<std::int32_t> starts{0, 2, 3, 4}, lens{5, 1};
  EXPECT_EQ(error_text([&] { clattn::CommonAttentionMetadata::of(starts, lens, {}); }),
            "query_start_loc holds 4 elements, legal: 3 (seq_lens and one more)");
}

// A captured batch of two requests, filled up to three rows and 16 tokens.
TEST(CommonAttentionMetadata, UnpaddedAndQueryLens) {
  const std::vector<std::int32_t> starts{0, 2, 5, 5}, lens{7, 3, 0}, table{1, 2, 3, 4, 0, 0},
      computed{5, 0, 0}, first_keys{1, 0, 0}, span_starts{0, 1, 2, 2}, spans{0, 2, 1, 3},
      tree_starts{0, 2, 2, 2}, parents{-1, 0};
  const std::vector<std::int64_t> slots(16, kPadSlotId);
  auto batch = CommonAttentionMetadata::of(starts, lens, table);
  batch.num_actual_tokens = 16;
  batch.num_computed_tokens = computed;
  batch.first_keys = batch.keep_keys = first_keys;
  batch.span_start_loc = span_starts;
  batch.spans = spans;
  batch.tree_start_loc = tree_starts;
  batch.tree_parents = parents;
  batch.slot_mapping = slots;
  EXPECT_EQ(batch.naive_query_lens(), (std::vector<std::int32_t>{2, 3, 0}));
  const CommonAttentionMetadata two = batch.unpadded(5, 2), one = batch.unpadded(3, 1);
  EXPECT_EQ(two.num_reqs, 2);
  EXPECT_EQ(two.num_actual_tokens, 5);
  EXPECT_EQ(two.query_start_loc.size(), 3U);
  EXPECT_EQ(two.seq_lens.data(), lens.data());
  EXPECT_EQ(two.block_table.size(), 4U);
  EXPECT_EQ(two.naive_query_lens(), (std::vector<std::int32_t>{2, 3}));
  validate_batch(two, 4, -1);
  EXPECT_EQ(one.num_actual_tokens, 3);  // one row of padding
  EXPECT_EQ(one.seq_lens.size() + one.num_computed_tokens.size() + one.first_keys.size(), 3U);
  EXPECT_EQ(one.keep_keys.size(), 1U);
  EXPECT_EQ(one.spans.size(), 2U);
  EXPECT_EQ(one.tree_parents.size(), 2U);
  EXPECT_EQ(one.direction.size() + one.key_start_loc.size(), 0U);
  EXPECT_EQ(one.slot_mapping.size(), 16U);  // those behind the tokens are not read
  EXPECT_EQ(batch.unpadded(0, 0).spans.size(), 0U);
  EXPECT_EQ(error_text([&] { (void)batch.unpadded(5, 4); }), "num_requests is 4, legal: 0 … 3");
  EXPECT_EQ(error_text([&] { (void)batch.unpadded(5, -1); }), "num_requests is -1, legal: 0 … 3");
  EXPECT_EQ(error_text([&] { (void)batch.unpadded(4, 2); }), "num_tokens is 4, legal: 5 … 16");
  EXPECT_EQ(error_text([&] { (void)batch.unpadded(17, 2); }), "num_tokens is 17, legal: 5 … 16");
  batch.query_start_loc = {};
  EXPECT_EQ(error_text([&] { (void)batch.unpadded(5, 2); }),
            "query_start_loc holds 0 elements, legal: at least 3 (num_requests + 1)");
  EXPECT_EQ(error_text([&] { (void)batch.naive_query_lens(); }),
            "query_start_loc holds 0 elements, legal: at least 4 (num_reqs + 1)");
}

TEST(SplitDecodesAndPrefills, Mixed) {
  EXPECT_EQ(split({0, 1, 2, 7, 10}, 1), (BatchSplit{2, 2, 2, 8}));
  EXPECT_EQ(split({0, 1, 2, 7, 10}, 1, 5), (BatchSplit{2, 2, 2, 8}));
  EXPECT_EQ(split({0, 4, 5, 12}, 4), (BatchSplit{2, 1, 5, 7}));
}

TEST(SplitDecodesAndPrefills, OnlyDecodes) {
  EXPECT_EQ(split({0, 1, 2, 3}, 1), (BatchSplit{3, 0, 3, 0}));
  EXPECT_EQ(split({0, 1, 2, 3}, 1, 1), (BatchSplit{3, 0, 3, 0}));
  EXPECT_EQ(split({0, 3, 4, 9}, 5), (BatchSplit{3, 0, 9, 0}));
}

TEST(SplitDecodesAndPrefills, OnlyPrefills) {
  EXPECT_EQ(split({0, 5, 9}, 1), (BatchSplit{0, 2, 0, 9}));
  EXPECT_EQ(split({0, 1, 2}, 0), (BatchSplit{0, 2, 0, 2}));
}

TEST(SplitDecodesAndPrefills, EmptyBatchAndEmptyRequests) {
  EXPECT_EQ(split({0}, 1), (BatchSplit{0, 0, 0, 0}));
  EXPECT_EQ(split({0, 0, 0}, 1), (BatchSplit{2, 0, 0, 0}));
  EXPECT_EQ(split({0, 0, 1, 3}, 1), (BatchSplit{2, 1, 1, 2}));
}

TEST(SplitDecodesAndPrefills, RefusesADecodeBehindAPrefill) {
  EXPECT_EQ(error_text([] {
              split({0, 1, 6, 7}, 1);
            }),
            "request 2: query length is 1, legal: at least 2 (decodes stand before prefills; "
            "request 1 is a prefill of 5 tokens)");
}

TEST(SplitDecodesAndPrefills, EmptyRequestsMayStandBehindPrefills) {
  EXPECT_EQ(split({0, 9, 12, 12}, 2), (BatchSplit{0, 3, 0, 12}));
  EXPECT_EQ(split({0, 1, 1, 9, 9}, 1), (BatchSplit{2, 2, 1, 8}));
}

TEST(SplitDecodesAndPrefills, RefusesNonsense) {
  EXPECT_EQ(error_text([] { split({0, 1}, -1); }), "decode_threshold is -1, legal: at least 0");
  EXPECT_EQ(error_text([] {
              split({0, 5, 3, 8}, 1);
            }),
            "request 1: query_start_loc[2] is 3, legal: 5 … 8 (query_start_loc[1] … "
            "num_actual_tokens)");
  EXPECT_EQ(error_text([] {
              split({0, 5}, 8, 4);
            }),
            "request 0: query length is 5, legal: 0 … 4 (max_query_len)");
  EXPECT_EQ(error_text([] { split_decodes_and_prefills(CommonAttentionMetadata{}); }),
            "query_start_loc holds 0 elements, legal: at least 1 (num_reqs + 1)");
}

struct Reordered {
  std::vector<std::int32_t> order;
  bool moved;
};

Reordered reorder(const std::vector<std::int32_t>& scheduled, std::int32_t threshold = 1) {
  Reordered result{std::vector<std::int32_t>(scheduled.size(), -77), false};
  result.moved = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold, result.order);
  return result;
}

TEST(ReorderBatch, SpecExample) {
  const Reordered result = reorder({5, 1, 1, 7, 1});
  EXPECT_EQ(result.order, (std::vector<std::int32_t>{4, 1, 2, 3, 0}));
  EXPECT_TRUE(result.moved);
}

TEST(ReorderBatch, PairsFirstPrefillWithLastDecode) {
  EXPECT_EQ(reorder({9, 8, 7, 1, 1, 1}).order, (std::vector<std::int32_t>{5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(reorder({2, 3, 4, 1}, 2).order, (std::vector<std::int32_t>{0, 3, 2, 1}));
}

TEST(ReorderBatch, LeavesAnOrderedBatchAlone) {
  for (const auto& scheduled :
       std::vector<std::vector<std::int32_t>>{{}, {1}, {4}, {1, 1, 0}, {5, 6}, {0, 1, 9, 2}}) {
    const Reordered result = reorder(scheduled);
    EXPECT_FALSE(result.moved);
    std::vector<std::int32_t> identity(scheduled.size());
    std::iota(identity.begin(), identity.end(), 0);
    EXPECT_EQ(result.order, identity);
  }
}

// The rule as vLLM words it, with lists.
Reordered reorder_by_lists(const std::vector<std::int32_t>& scheduled, std::int32_t threshold) {
  std::vector<std::size_t> decodes;
  std::vector<std::size_t> prefills;
  for (std::size_t i = 0; i < scheduled.size(); ++i) {
    (scheduled[i] <= threshold ? decodes : prefills).push_back(i);
  }
  Reordered result{std::vector<std::int32_t>(scheduled.size()), false};
  std::iota(result.order.begin(), result.order.end(), 0);
  for (std::size_t i = 1; i <= std::min(decodes.size(), prefills.size()); ++i) {
    const std::size_t decode = decodes[decodes.size() - i];
    if (decode < decodes.size()) break;
    std::swap(result.order[prefills[i - 1]], result.order[decode]);
    result.moved = true;
  }
  return result;
}

TEST(ReorderBatch, EqualsTheRuleByLists) {
  std::mt19937 random(20240611);
  for (int run = 0; run < 5000; ++run) {
    std::vector<std::int32_t> scheduled(random() % 30);
    for (auto& tokens : scheduled) tokens = static_cast<std::int32_t>(random() % 6);
    const auto threshold = static_cast<std::int32_t>(random() % 5);
    const Reordered result = reorder(scheduled, threshold);
    const Reordered expected = reorder_by_lists(scheduled, threshold);
    ASSERT_EQ(result.order, expected.order) << "run " << run;
    ASSERT_EQ(result.moved, expected.moved) << "run " << run;
  }
}

TEST(ReorderBatch, RefusesNonsense) {
  std::vector<std::int32_t> order(2);
  EXPECT_EQ(
      error_text([&] {
        reorder_batch_to_split_decodes_and_prefills(std::vector<std::int32_t>{1, 2, 3}, 1, order);
      }),
      "order holds 2 elements, legal: 3 (one per request)");
  EXPECT_EQ(error_text([] {
              reorder({1, -4});
            }),
            "request 1: num_scheduled_tokens is -4, legal: at least 0");
  EXPECT_EQ(error_text([] { reorder({1}, -2); }), "decode_threshold is -2, legal: at least 0");
}

}  // namespace
}  // namespace clattn
