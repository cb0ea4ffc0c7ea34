#include <gtest/gtest.h>

#include <clattn/compat/paged_bias.hpp>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

// A5: the padded keys of xFormers are a batch as it is.
TEST(PagedBias, A5_PaddedKeysAreTheFirstOfTheirPages) {
  const Ints table = {7, 8, 99, 3, 99, 99};
  const auto bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask::from_seqlens(
      Ints{1, 3}, Ints{5, 4}, table, 4);
  EXPECT_FALSE(bias.needs_first_keys());
  const CommonAttentionMetadata batch = bias.metadata();
  EXPECT_EQ(batch.causal, true);
  EXPECT_EQ(batch.num_reqs, 2);
  EXPECT_EQ(batch.num_actual_tokens, 4);
  EXPECT_EQ(bias.query_start_loc, (Ints{0, 1, 4}));
  EXPECT_EQ(bias.seq_lens, (Ints{5, 4}));
  EXPECT_EQ(bias.block_table, (Ints{7, 8, 3, 0}));
  validate_batch(batch, 4, 9);
  EXPECT_EQ(PagedBlockDiagonalPaddedKeysMask::from_seqlens(Ints{1}, Ints{1}, Ints{0}, 1)
                .metadata()
                .causal,
            false);
}

// A5: pages before the gap's end are left out, the rest of it is no keys.
TEST(PagedBias, A5_GapsDropPagesAndHideTheRest) {
  const Ints table = {7, 8, 9, 3, 4, 5};
  const auto bias = PagedBlockDiagonalCausalWithOffsetGappyKeysMask::from_seqlens(
      Ints{2, 1}, Ints{6, 4}, Ints{5, 3}, table, 4);
  EXPECT_EQ(bias.first_keys, (Ints{2, 0}));
  EXPECT_EQ(bias.seq_lens, (Ints{7, 3}));
  EXPECT_EQ(bias.block_table, (Ints{8, 9, 4, 0}));
  EXPECT_TRUE(bias.needs_first_keys());
  EXPECT_EQ(bias.metadata().first_keys.data(), bias.first_keys.data());
  // The new tokens are the last keys: slots 9, 10 and 6 of the tables.
  std::vector<std::int64_t> slots(3);
  compute_slot_mapping(bias.metadata(), 4, slots);
  EXPECT_EQ(slots, (std::vector<std::int64_t>{9 * 4 + 1, 9 * 4 + 2, 4 * 4 + 2}));
}

// A5: make_paged() counts starts from each request's own padding.
TEST(PagedBias, A5_MakePagedRebasesTheStarts) {
  const BlockDiagonalCausalWithOffsetGappyKeysMask tensor{{2, 1}, {6, 16, 24}, {5, 3}};
  const Ints table = {7, 8, 9, 3, 4, 5};
  const auto bias = tensor.make_paged(table, 4, 12);
  const auto same = PagedBlockDiagonalCausalWithOffsetGappyKeysMask::from_seqlens(
      Ints{2, 1}, Ints{6, 4}, Ints{5, 3}, table, 4);
  EXPECT_EQ(bias.first_keys, same.first_keys);
  EXPECT_EQ(bias.seq_lens, same.seq_lens);
  EXPECT_EQ(bias.block_table, same.block_table);
  EXPECT_TRUE(bias.causal);
}

TEST(PagedBias, A5_EmptyBatchesAndRequests) {
  const auto none = PagedBlockDiagonalPaddedKeysMask::from_seqlens({}, {}, {}, 16);
  EXPECT_EQ(none.metadata().num_reqs, 0);
  EXPECT_FALSE(none.needs_first_keys());
  const auto bias = PagedBlockDiagonalGappyKeysMask::from_seqlens(Ints{0, 1}, Ints{3, 1},
                                                                  Ints{0, 1}, Ints{5, 6}, 4);
  EXPECT_EQ(bias.seq_lens, (Ints{0, 2}));
  EXPECT_EQ(bias.block_table, (Ints{0, 6}));
}

TEST(PagedBias, A5_RefusesNonsense) {
  const Ints table = {1, 2};
  EXPECT_EQ(error_text([&] {
              BlockDiagonalGappyKeysMask{{1}, {0, 8}, {1}}.make_paged(table, 3, 8);
            }),
            "Notional padding should be divisible by the page size, but got notional_padding=8, "
            "page_size=3.");
  EXPECT_EQ(error_text([&] {
              BlockDiagonalGappyKeysMask{{1, 1}, {0, 9, 16}, {1, 8}}.make_paged(table, 4, 8);
            }),
            "request 1: its keys are [9, 17), legal: within [8, 16), its padding");
  const auto gappy = [&](const Ints& q, const Ints& starts, const Ints& lens, std::int32_t page) {
    return error_text([&] {
      PagedBlockDiagonalCausalWithOffsetGappyKeysMask::from_seqlens(q, starts, lens, table, page);
    });
  };
  EXPECT_EQ(gappy({1}, {1}, {8}, 4),
            "request 0: its keys are [1, 9), legal: within [0, 8) (pages x page_size)");
  EXPECT_EQ(gappy({1}, {-1}, {8}, 4),
            "request 0: its keys are [-1, 7), legal: within [0, 8) (pages x page_size)");
  EXPECT_EQ(gappy({3}, {0}, {2}, 4), "request 0: q_seqlen is 3, legal: 0 … 2 (kv_seqlen)");
  EXPECT_EQ(gappy({1}, {0}, {2}, 0), "page_size is 0, legal: at least 1");
  EXPECT_EQ(gappy({1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 4),
            "block_tables holds 2 elements, legal: a multiple of the 3 requests");
  EXPECT_EQ(gappy({1}, {0, 0}, {1}, 4),
            "kv_seqstarts and kv_seqlen hold 2 and 1 values, legal: 1 each (q_seqlen's)");
}

}  // namespace
}  // namespace clattn
