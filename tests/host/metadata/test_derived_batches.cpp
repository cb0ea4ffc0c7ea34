#include <gtest/gtest.h>
#include <clattn/reorder.hpp>

#include <clattn/compat/derived_batches.hpp>

#include "host/metadata_batch.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

TEST(FastPrefill, A1_10_KeepsTheTokensOfLogits) {
  // vLLM's own example: 3 requests of 15, 5 and 8 tokens.
  const test::Batch batch = test::make_batch({{15, 41}, {5, 31}, {8, 40}}, 16);
  const FastPrefillBatch fast =
      make_kv_sharing_fast_prefill_common_attn_metadata(batch.view(), Ints{14, 18, 19, 27});
  EXPECT_EQ(fast.query_start_loc, (Ints{0, 1, 3, 4}));
  const CommonAttentionMetadata metadata = fast.metadata();
  EXPECT_EQ(metadata.num_actual_tokens, 4);
  EXPECT_EQ(metadata.seq_lens.data(), batch.seq_lens.data());
  EXPECT_EQ(metadata.block_table.data(), batch.block_table.data());
  validate_batch(metadata, 16, -1);
  // Its second prefill is longer than its third: a builder takes it nevertheless.
  EXPECT_EQ(detail::split_step(metadata, 1, detail::KeySource::kOwnPages).counts,
            (BatchSplit{2, 1, 2, 2}));
}

TEST(FastPrefill, A1_10_DecodesStayAndRequestsMayHaveNoLogits) {
  const test::Batch decodes = test::make_batch({{1, 9}, {0, 4}, {1, 3}}, 16);
  EXPECT_EQ(
      make_kv_sharing_fast_prefill_common_attn_metadata(decodes.view(), Ints{0}).query_start_loc,
      (Ints{0, 1, 1, 2}));
  const test::Batch mixed = test::make_batch({{3, 9}, {0, 4}, {2, 3}}, 16);
  EXPECT_EQ(
      make_kv_sharing_fast_prefill_common_attn_metadata(mixed.view(), Ints{4}).query_start_loc,
      (Ints{0, 0, 0, 1}));
  EXPECT_EQ(make_kv_sharing_fast_prefill_common_attn_metadata(mixed.view(), Ints{}).query_start_loc,
            (Ints{0, 0, 0, 0}));
}

// Rows behind the requests' tokens belong to none.
TEST(FastPrefill, S5_PaddingYieldsNoLogits) {
  test::Batch batch = test::make_batch({{3, 9}, {2, 3}}, 16);
  batch.num_actual_tokens = 9;
  EXPECT_EQ(error_text([&] {
              make_kv_sharing_fast_prefill_common_attn_metadata(batch.view(), Ints{4, 5});
            }),
            "logits_indices[1] is 5, legal: 5 … 4 (ascending tokens of the batch)");
  const auto slices = create_ubatch_slices(batch.view(), 3);
  ASSERT_EQ(slices.size(), 2U);
  EXPECT_EQ(slices[1], (UBatchSlice{{1, 2}, {3, 5}}));
  EXPECT_EQ(advance_batch(batch.view(), true).metadata().num_actual_tokens, 2);
}

TEST(FastPrefill, A1_10_RefusesTokensThatAreNotTheLast) {
  const test::Batch batch = test::make_batch({{3, 9}, {2, 3}}, 16);
  const auto call = [&](const Ints& indices) {
    return error_text(
        [&] { make_kv_sharing_fast_prefill_common_attn_metadata(batch.view(), indices); });
  };
  EXPECT_EQ(call({0, 2}),
            "request 0: logits_indices name token 0 but not token 1, legal: a request's last "
            "tokens, up to 2");
  EXPECT_EQ(call({2, 3}),
            "request 1: logits_indices name token 3 but not token 4, legal: a request's last "
            "tokens, up to 4");
  EXPECT_EQ(call({2, 2}), "logits_indices[1] is 2, legal: 3 … 4 (ascending tokens of the batch)");
  EXPECT_EQ(call({5}), "logits_indices[0] is 5, legal: 0 … 4 (ascending tokens of the batch)");
}

// A4.3, advance_step: prefills become decodes when asked to.
TEST(AdvanceBatch, A4_3_EveryRequestGetsOneToken) {
  const test::Batch batch = test::make_batch({{1, 32}, {0, 0}, {1, 7}, {5, 16}}, 16);
  const AdvancedBatch next = advance_batch(batch.view(), true);
  EXPECT_EQ(next.query_start_loc, (Ints{0, 1, 1, 2, 3}));
  EXPECT_EQ(next.seq_lens, (Ints{33, 0, 8, 17}));
  const CommonAttentionMetadata metadata = next.metadata();
  EXPECT_EQ(split_decodes_and_prefills(metadata), (BatchSplit{4, 0, 3, 0}));
  std::vector<std::int64_t> slots(3);
  CommonAttentionMetadata small = metadata;  // the table holds a spare column of poison
  std::vector<std::int32_t> table = batch.block_table;
  const auto stride = static_cast<std::size_t>(batch.block_table_stride);
  table[0 * stride + 2] = 40;
  table[3 * stride + 1] = 50;
  small.block_table = table;
  compute_slot_mapping(small, 16, slots);
  EXPECT_EQ(slots, (std::vector<std::int64_t>{40 * 16, table[2 * stride] * 16 + 7, 50 * 16}));
}

TEST(AdvanceBatch, A4_3_RefusesPrefillsAndFullSequences) {
  const test::Batch batch = test::make_batch({{1, 32}, {5, 16}}, 16);
  EXPECT_EQ(error_text([&] { advance_batch(batch.view()); }),
            "request 1: its query length is 5, legal: 0 … 1, or any with "
            "turn_prefills_into_decodes");
  test::Batch longest = test::make_batch({{1, 32}}, 16);
  longest.seq_lens[0] = INT32_MAX;
  EXPECT_EQ(error_text([&] { advance_batch(longest.view()); }),
            "advance_batch: seq_lens + 1: 2147483647 + 1 overflows");
  longest.seq_lens[0] = 0;
  EXPECT_EQ(error_text([&] { advance_batch(longest.view()); }),
            "request 0: seq_lens is 0, legal: at least the query length, 1");
}

TEST(DcpLocalSeqLens, A1_10_EqualsDealingTokensInTurns) {
  for (const std::int32_t size : {1, 2, 3, 8}) {
    for (const std::int32_t turn : {1, 2, 5}) {
      Ints seq_lens(40), dealt(40 * static_cast<std::size_t>(size));
      for (std::int32_t seq_len = 0; seq_len < 40; ++seq_len) {
        seq_lens[static_cast<std::size_t>(seq_len)] = seq_len;
        for (std::int32_t token = 0; token < seq_len; ++token) {
          ++dealt[static_cast<std::size_t>(seq_len * size + token / turn % size)];
        }
      }
      EXPECT_EQ(
          get_dcp_local_seq_lens(seq_lens, {.dcp_size = size, .cp_kv_cache_interleave_size = turn}),
          dealt);
      for (std::int32_t rank = 0; rank < size; ++rank) {
        Ints own;
        for (std::size_t at = static_cast<std::size_t>(rank); at < dealt.size();
             at += static_cast<std::size_t>(size)) {
          own.push_back(dealt[at]);
        }
        EXPECT_EQ(get_dcp_local_seq_lens(
                      seq_lens,
                      {.dcp_size = size, .dcp_rank = rank, .cp_kv_cache_interleave_size = turn}),
                  own);
      }
    }
  }
}

TEST(DcpLocalSeqLens, RefusesNonsenseAndDoesNotOverflow) {
  EXPECT_EQ(get_dcp_local_seq_lens(Ints{INT32_MAX},
                                   {.dcp_size = 2, .cp_kv_cache_interleave_size = INT32_MAX}),
            (Ints{INT32_MAX, 0}));
  EXPECT_EQ(error_text([] { get_dcp_local_seq_lens(Ints{1}, {.dcp_size = 0}); }),
            "dcp_size is 0, legal: at least 1");
  EXPECT_EQ(error_text([] { get_dcp_local_seq_lens(Ints{1}, {.dcp_size = 2, .dcp_rank = 2}); }),
            "dcp_rank is 2, legal: 0 … 1");
  EXPECT_EQ(error_text([] { get_dcp_local_seq_lens(Ints{1}, {.cp_kv_cache_interleave_size = 0}); }),
            "cp_kv_cache_interleave_size is 0, legal: at least 1");
  EXPECT_EQ(error_text([] {
              get_dcp_local_seq_lens(Ints{3, -1}, {});
            }),
            "request 1: seq_lens is -1, legal: at least 0");
}

}  // namespace
}  // namespace clattn
