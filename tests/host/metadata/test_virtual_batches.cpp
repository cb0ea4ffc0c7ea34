#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/compat/virtual_batches.hpp>
#include <random>

#include "host/metadata_batch.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

/// Requests of these lengths whose table row r holds columns * r, columns * r + 1, …
test::Batch numbered_batch(const Ints& query_lens, const Ints& seq_lens, std::int32_t columns) {
  test::Batch batch;
  batch.num_reqs = static_cast<std::int32_t>(query_lens.size());
  batch.query_start_loc = {0};
  batch.seq_lens = seq_lens;
  for (const std::int32_t length : query_lens) {
    batch.query_start_loc.push_back(batch.num_actual_tokens += length);
  }
  batch.block_table_stride = columns;
  for (std::int32_t entry = 0; entry < batch.num_reqs * columns; ++entry) {
    batch.block_table.push_back(entry);
  }
  return batch;
}

struct Row {
  Ints query_lens, seq_lens;
  std::int32_t chunk, block_size, columns;
  Ints q_local, k_local, block_rows;
};

LocalAttentionVirtualBatches make(const Row& row) {
  const test::Batch batch = numbered_batch(row.query_lens, row.seq_lens, row.columns);
  return make_local_attention_virtual_batches(row.chunk, batch.view(), row.block_size);
}

void expect_row(const Row& row) {
  const LocalAttentionVirtualBatches local = make(row);
  Ints starts{0};
  for (const std::int32_t length : row.q_local) starts.push_back(starts.back() + length);
  EXPECT_EQ(local.query_start_loc, starts);
  EXPECT_EQ(local.seq_lens, row.k_local);
  EXPECT_EQ(local.block_table, row.block_rows);
  EXPECT_EQ(local.blocks_per_chunk, row.chunk / row.block_size);
}

// A9.1: the prefix sums printed in vLLM's source are not what its code returns.
TEST(VirtualBatches, A1_7_WorkedExample) {
  const Row row{{4, 10, 5},
                {6, 17, 9},
                4,
                2,
                10,
                {2, 2, 1, 4, 4, 1, 4, 1},
                {4, 2, 4, 4, 4, 1, 4, 1},
                {0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 22, 23, 24, 25}};
  expect_row(row);
  const LocalAttentionVirtualBatches local = make(row);
  EXPECT_EQ(local.query_start_loc, (Ints{0, 2, 4, 5, 9, 13, 14, 18, 19}));
  EXPECT_EQ(local.virtual_batch_to_request, (Ints{0, 0, 1, 1, 1, 1, 2, 2}));
  Ints starts;
  for (const std::int32_t block : local.first_block) starts.push_back(block * 2);
  EXPECT_EQ(starts, (Ints{0, 4, 4, 8, 12, 16, 4, 8}));
}

// The six rows that vLLM pins; the table of the first has nine columns, not the example's ten.
TEST(VirtualBatches, A1_7_RowsOfVLLM) {
  const Row table[] = {{{4, 10, 5},
                        {6, 17, 9},
                        4,
                        2,
                        9,
                        {2, 2, 1, 4, 4, 1, 4, 1},
                        {4, 2, 4, 4, 4, 1, 4, 1},
                        {0, 1, 2, 3, 11, 12, 13, 14, 15, 16, 17, 17, 20, 21, 22, 23}},
                       {{8}, {12}, 4, 2, 6, {4, 4}, {4, 4}, {2, 3, 4, 5}},
                       {{7}, {10}, 4, 2, 5, {1, 4, 2}, {4, 4, 2}, {0, 1, 2, 3, 4, 4}},
                       {{4}, {6}, 10, 2, 3, {4}, {6}, {0, 1, 2, 2, 2}},
                       {{6, 6}, {8, 8}, 4, 4, 2, {2, 4, 2, 4}, {4, 4, 4, 4}, {0, 1, 2, 3}},
                       {{1}, {5}, 4, 2, 3, {1}, {1}, {2, 2}}};
  for (const Row& row : table) expect_row(row);
}

// How many virtual requests vLLM counts, with pages of 16 tokens.
TEST(VirtualBatches, A1_7_CountsOfVLLM) {
  struct Count {
    Ints query_lens, seq_lens;
    std::int32_t chunk, expected;
  };
  const Count table[] = {{{1000}, {1000}, 256, 4},
                         {{1000}, {1255}, 256, 5},
                         {{300, 700, 90}, {300, 1400, 90}, 128, 10},
                         {{64, 64}, {64, 64}, 256, 2},
                         {{1, 1, 1, 1}, {16, 32, 48, 64}, 16, 4}};
  for (const Count& row : table) {
    EXPECT_EQ(make({row.query_lens, row.seq_lens, row.chunk, 16, 88, {}, {}, {}}).num_virtual(),
              row.expected)
        << row.chunk;
  }
}

TEST(VirtualBatches, A1_7_EdgeRows) {
  expect_row({{1}, {4}, 4, 2, 2, {1}, {4}, {0, 1}});
  expect_row({{1}, {8}, 4, 2, 4, {1}, {4}, {2, 3}});
}

// Undefined in vLLM, where it gives a virtual request without queries and, for padding, a negative
// block (A9.1).
TEST(VirtualBatches, A1_7_RequestsWithoutNewTokensMakeNone) {
  expect_row({{0}, {6}, 4, 2, 3, {}, {}, {}});
  expect_row({{0}, {0}, 4, 2, 3, {}, {}, {}});
  expect_row({{}, {}, 4, 2, 3, {}, {}, {}});
  const LocalAttentionVirtualBatches local =
      make({{0, 3, 0, 0}, {5, 3, 0, 9}, 4, 2, 5, {}, {}, {}});
  EXPECT_EQ(local.virtual_batch_to_request, Ints{1});
  EXPECT_EQ(local.block_table, (Ints{5, 6}));
}

TEST(VirtualBatches, A1_7_Errors) {
  EXPECT_EQ(error_text([] {
              make({{1}, {5}, 5, 2, 3, {}, {}, {}});
            }),
            "attn_chunk_size 5 is not divisible by block_size 2");
  EXPECT_EQ(error_text([] {
              make({{1}, {5}, 0, 2, 3, {}, {}, {}});
            }),
            "attn_chunk_size is 0, legal: at least 1");
  EXPECT_EQ(error_text([] {
              const test::Batch batch = numbered_batch({1}, {5}, 3);
              make_local_attention_virtual_batches(4, batch.view(), 0);
            }),
            "block_size is 0, legal: at least 1");
  EXPECT_EQ(error_text([] {
              make({{3}, {2}, 4, 2, 3, {}, {}, {}});
            }),
            "request 0: seq_lens is 2, legal: 3 … 6 (at least the query length)");
}

TEST(VirtualBatches, LargeLengthsDoNotOverflow) {
  test::Batch batch = numbered_batch({1}, {INT32_MAX}, 2);
  const LocalAttentionVirtualBatches local =
      make_local_attention_virtual_batches(1 << 30, batch.view(), 1 << 30);
  EXPECT_EQ(local.seq_lens, Ints{(1 << 30) - 1});
  EXPECT_EQ(local.block_table, Ints{1});
}

TEST(VirtualBatches, AnotherTableIsGatheredAlike) {
  const LocalAttentionVirtualBatches local = make({{1, 3}, {5, 7}, 4, 2, 4, {}, {}, {}});
  const Ints other{100, 101, 102, 103, 200, 201, 202, 203};
  EXPECT_EQ(local.gather_block_table(other), (Ints{102, 103, 202, 203}));
  EXPECT_EQ(error_text([&] { local.gather_block_table(Ints(7)); }),
            "block_table holds 7 elements, legal: at least 8 (4 columns of request 1)");
}

// A1.7: a chunk's short tail may stand behind a longer request; the batch says so, and a builder
// takes it as it is.
TEST(VirtualBatches, A1_7_ShortTailsStandWhereTheyAre) {
  const test::Batch batch = test::make_batch({{5, 5}, {2, 7}}, 2);
  const LocalAttentionVirtualBatches local =
      make_local_attention_virtual_batches(4, batch.view(), 2);
  EXPECT_EQ(local.query_start_loc, (Ints{0, 4, 5, 7}));
  // As builders count them.
  const auto split = [&](std::int32_t threshold) {
    return detail::split_step(local.metadata(), threshold, detail::KeySource::kOwnPages).counts;
  };
  EXPECT_EQ(split(1), (BatchSplit{1, 2, 1, 6}));
  EXPECT_EQ(split(4), (BatchSplit{3, 0, 7, 0}));
}

TEST(VirtualBatches, CausalityIsTheBatchs) {
  test::Batch batch = test::make_batch({{5, 5}}, 2);
  EXPECT_EQ(make_local_attention_virtual_batches(4, batch.view(), 2).metadata().causal, true);
  batch.causal = false;
  EXPECT_EQ(make_local_attention_virtual_batches(4, batch.view(), 2).metadata().causal, false);
}

/// A pair of token and physical slot for each key that a token of the batch sees.
using Sights = std::vector<std::pair<std::int32_t, std::int64_t>>;

Sights causal_sights(const CommonAttentionMetadata& batch, std::int32_t block_size,
                     std::int32_t chunk) {
  Sights sights;
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const std::int32_t begin = batch.query_start_loc[row], end = batch.query_start_loc[row + 1];
    for (std::int32_t token = begin; token < end; ++token) {
      const std::int32_t position = batch.seq_lens[row] - (end - token);
      for (std::int32_t key = 0; key <= position; ++key) {
        if (chunk > 0 && key / chunk != position / chunk) continue;
        const std::int64_t page = batch.block_table[static_cast<std::size_t>(
            r * batch.block_table_stride + key / block_size)];
        sights.emplace_back(token, page * block_size + key % block_size);
      }
    }
  }
  std::sort(sights.begin(), sights.end());
  return sights;
}

// The meaning of A1.7: plain causal attention over the virtual requests sees what chunked-local
// attention over the real ones sees.
TEST(VirtualBatches, A1_7_SeeWhatChunkedLocalAttentionSees) {
  std::mt19937 random(1234);
  for (int run = 0; run < 300; ++run) {
    const auto block_size = static_cast<std::int32_t>(1 + random() % 4);
    const auto chunk = block_size * static_cast<std::int32_t>(1 + random() % 4);
    std::vector<test::Request> requests(random() % 5);
    for (auto& request : requests) {
      request.query_len = static_cast<std::int32_t>(random() % 20);
      request.seq_len = request.query_len + static_cast<std::int32_t>(random() % 20);
    }
    const test::Batch batch = test::make_batch(requests, block_size);
    const LocalAttentionVirtualBatches local =
        make_local_attention_virtual_batches(chunk, batch.view(), block_size);
    validate_batch(local.metadata(), block_size, -1);
    ASSERT_EQ(causal_sights(local.metadata(), block_size, 0),
              causal_sights(batch.view(), block_size, chunk))
        << "run " << run;
  }
}

}  // namespace
}  // namespace clattn
