#include <gtest/gtest.h>
#include <clattn/reorder.hpp>

#include <algorithm>
#include <clattn/compat/derived_batches.hpp>
#include <random>
#include <utility>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

test::Batch batch_of(const Ints& query_lens, const Ints& seq_lens) {
  std::vector<test::Request> requests;
  for (std::size_t r = 0; r < query_lens.size(); ++r) {
    requests.push_back({query_lens[r], seq_lens[r]});
  }
  return test::make_batch(requests, 16);
}

// vLLM's table: starts 0, 5, 12, 20, 35, 50.
TEST(BatchSlices, A1_10_StartsOfSomeRequests) {
  struct Row {
    RequestRange requests;
    Ints starts;
  };
  const Row table[] = {{{1, 3}, {0, 7, 15}}, {{0, 2}, {0, 5, 12}}, {{3, 5}, {0, 15, 30}},
                       {{2, 3}, {0, 8}},     {{4, 5}, {0, 15}},    {{0, 5}, {0, 5, 12, 20, 35, 50}},
                       {{2, 2}, {0}}};
  const Ints starts{0, 5, 12, 20, 35, 50};
  for (const Row& row : table) {
    EXPECT_EQ(slice_query_start_locs(starts, row.requests), row.starts)
        << row.requests.begin << " … " << row.requests.end;
  }
}

/// A slice of a batch and what its metadata says; max_query_len is the batch's longest query.
struct SliceRow {
  const char* name;
  Ints query_lens, seq_lens;
  UBatchSlice slice;
  Ints starts, lens;
  std::int32_t max_query_len;
};

// vLLM's rows of _make_metadata_with_slice and, from "a prefill's head" on, of a prefill that is
// split across two slices at token 12 and at token 4.
const SliceRow kSlices[] = {
    {"small decode", {1, 1}, {32, 40}, {{0, 1}, {0, 1}}, {0, 1}, {32}, 1},
    {"mixed", {1, 1, 5, 5}, {32, 40, 48, 56}, {{1, 3}, {1, 7}}, {0, 1, 6}, {40, 48}, 5},
    {"a prefill's head", {8, 8}, {32, 40}, {{0, 2}, {0, 12}}, {0, 8, 12}, {32, 36}, 8},
    {"its tail", {8, 8}, {32, 40}, {{1, 2}, {12, 16}}, {0, 4}, {40}, 4},
    {"the first's head", {8, 8}, {32, 40}, {{0, 1}, {0, 4}}, {0, 4}, {28}, 4},
    {"the first's tail", {8, 8}, {32, 40}, {{0, 2}, {4, 16}}, {0, 4, 12}, {32, 40}, 8},
    // Ours: a piece of one request, and padding behind.
    {"middle", {20}, {50}, {{0, 1}, {5, 9}}, {0, 4}, {39}, 4},
    {"padded", {2, 2, 0}, {9, 8, 0}, {{1, 3}, {3, 4}}, {0, 1, 1}, {8, 0}, 1},
};

TEST(BatchSlices, A1_10_MetadataOfSlices) {
  for (const SliceRow& row : kSlices) {
    SCOPED_TRACE(row.name);
    test::Batch batch = batch_of(row.query_lens, row.seq_lens);
    batch.slot_mapping.resize(static_cast<std::size_t>(batch.num_actual_tokens));
    const SlicedBatch sliced = make_metadata_with_slice(row.slice, batch.view());
    const CommonAttentionMetadata metadata = sliced.metadata();
    EXPECT_EQ(sliced.query_start_loc, row.starts);
    EXPECT_EQ(sliced.seq_lens, row.lens);
    EXPECT_EQ(metadata.num_reqs, static_cast<std::int32_t>(row.lens.size()));
    EXPECT_EQ(metadata.num_actual_tokens, row.starts.back());
    EXPECT_EQ(metadata.slot_mapping.size(), static_cast<std::size_t>(row.starts.back()));
    EXPECT_EQ(metadata.slot_mapping.data(),
              batch.slot_mapping.data() + row.slice.token_slice.begin);
    EXPECT_EQ(metadata.block_table.data(),
              batch.block_table.data() + row.slice.request_slice.begin * batch.block_table_stride);
    std::int32_t longest = 0;
    for (std::size_t r = 1; r < row.starts.size(); ++r) {
      longest = std::max(longest, row.starts[r] - row.starts[r - 1]);
    }
    EXPECT_EQ(longest, row.max_query_len);
    batch.slot_mapping.clear();
    validate_batch(make_metadata_with_slice(row.slice, batch.view()).metadata(), 16, -1);
  }
}

// vLLM's: 32 decodes of 2048 tokens in two halves.
TEST(BatchSlices, A1_10_HalvesOfADecodeBatch) {
  const test::Batch batch = batch_of(Ints(32, 1), Ints(32, 2048));
  const UBatchSlice halves[] = {{{0, 16}, {0, 16}}, {{16, 32}, {16, 32}}};
  EXPECT_EQ(create_ubatch_slices(batch.view(), 16),
            std::vector<UBatchSlice>(std::begin(halves), std::end(halves)));
  const std::vector<SlicedBatch> parts = split_attn_metadata(halves, batch.view());
  ASSERT_EQ(parts.size(), 2U);
  for (const SlicedBatch& part : parts) {
    EXPECT_EQ(part.metadata().num_reqs, 16);
    EXPECT_EQ(part.metadata().num_actual_tokens, 16);
    EXPECT_EQ(part.seq_lens, Ints(16, 2048));
  }
  EXPECT_EQ(parts[1].metadata().block_table[0],
            batch.block_table[static_cast<std::size_t>(16 * batch.block_table_stride)]);
}

TEST(BatchSlices, A1_10_SlicesHaveTheRequestsOfTheirTokens) {
  struct Row {
    Ints query_lens;
    std::int32_t split_point, num_ubatches;
    std::vector<UBatchSlice> slices;
  };
  const Row table[] = {{{8, 8}, 12, 2, {{{0, 2}, {0, 12}}, {{1, 2}, {12, 16}}}},  // vLLM's two
                       {{8, 8}, 4, 2, {{{0, 1}, {0, 4}}, {{0, 2}, {4, 16}}}},
                       {{8, 8}, 8, 2, {{{0, 1}, {0, 8}}, {{1, 2}, {8, 16}}}},
                       {{20}, 6, 3, {{{0, 1}, {0, 6}}, {{0, 1}, {6, 12}}, {{0, 1}, {12, 20}}}},
                       {{3, 3}, 1, 1, {{{0, 2}, {0, 6}}}},
                       {{2, 2, 2, 0, 0}, 4, 2, {{{0, 2}, {0, 4}}, {{2, 5}, {4, 6}}}}};
  for (const Row& row : table) {
    const test::Batch batch = batch_of(row.query_lens, row.query_lens);
    EXPECT_EQ(create_ubatch_slices(batch.view(), row.split_point, row.num_ubatches), row.slices)
        << row.split_point << " x " << row.num_ubatches;
  }
}

/// Token and slot of each key that a token sees, tokens counted from `first_token`.
using Sights = std::vector<std::pair<std::int32_t, std::int64_t>>;

void add_sights(const CommonAttentionMetadata& batch, std::int32_t first_token, Sights& sights) {
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const std::int32_t end = batch.query_start_loc[row + 1];
    for (std::int32_t token = batch.query_start_loc[row]; token < end; ++token) {
      for (std::int32_t key = 0; key <= batch.seq_lens[row] - (end - token); ++key) {
        const std::int64_t page =
            batch.block_table[static_cast<std::size_t>(r * batch.block_table_stride + key / 16)];
        sights.emplace_back(first_token + token, page * 16 + key % 16);
      }
    }
  }
}

// Whatever the cuts, the slices together see what the whole batch sees, and builders take them.
TEST(BatchSlices, A1_10_TogetherTheySeeWhatTheBatchSees) {
  std::mt19937 random(20251103);
  for (int run = 0; run < 300; ++run) {
    std::vector<test::Request> requests(1 + random() % 6);
    for (auto& request : requests) {
      request.query_len = static_cast<std::int32_t>(random() % 20);
      request.seq_len = request.query_len + static_cast<std::int32_t>(random() % 40);
    }
    requests.back().query_len = requests.back().seq_len = 5;
    std::sort(requests.begin(), requests.end(),
              [](const auto& a, const auto& b) { return a.query_len < b.query_len; });
    const test::Batch batch = test::make_batch(requests, 16);
    const auto num_ubatches = static_cast<std::int32_t>(1 + random() % 4);
    const auto split_point = (batch.num_actual_tokens + num_ubatches - 1) / num_ubatches;
    if (split_point * (num_ubatches - 1) >= batch.num_actual_tokens) continue;
    Sights whole, parts;
    add_sights(batch.view(), 0, whole);
    const auto slices = create_ubatch_slices(batch.view(), split_point, num_ubatches);
    for (const SlicedBatch& part : split_attn_metadata(slices, batch.view())) {
      validate_batch(part.metadata(), 16, -1);
      add_sights(part.metadata(), part.slice.token_slice.begin, parts);
    }
    std::sort(whole.begin(), whole.end());
    std::sort(parts.begin(), parts.end());
    ASSERT_EQ(parts, whole) << "run " << run;
  }
}

TEST(BatchSlices, RefusesSlicesThatDoNotFit) {
  const test::Batch batch = batch_of({1, 5, 0, 4}, {9, 9, 0, 9});
  const auto refuse = [&](const UBatchSlice& slice) {
    return error_text([&] { make_metadata_with_slice(slice, batch.view()); });
  };
  EXPECT_EQ(refuse({{0, 5}, {0, 4}}), "request_slice is [0, 5), legal: 0 <= begin <= end <= 4");
  EXPECT_EQ(refuse({{2, 1}, {0, 4}}), "request_slice is [2, 1), legal: 0 <= begin <= end <= 4");
  EXPECT_EQ(refuse({{0, 1}, {-1, 4}}), "token_slice is [-1, 4), legal: 0 <= begin <= end <= 10");
  EXPECT_EQ(refuse({{1, 1}, {1, 2}}), "slice of requests [1, 1) and tokens [1, 2): it is empty");
  EXPECT_EQ(refuse({{1, 2}, {3, 3}}), "slice of requests [1, 2) and tokens [3, 3): it is empty");
  EXPECT_EQ(refuse({{1, 2}, {0, 4}}),
            "token_slice begins at 0, legal: 1 <= begin < 6 (tokens of request 1)");
  EXPECT_EQ(refuse({{2, 4}, {6, 8}}),
            "token_slice begins at 6, legal: 6 <= begin < 6 (tokens of request 2)");
  EXPECT_EQ(refuse({{0, 2}, {0, 1}}), "token_slice ends at 1, legal: 2 … 6 (tokens of request 1)");
  EXPECT_EQ(refuse({{0, 2}, {0, 7}}), "token_slice ends at 7, legal: 2 … 6 (tokens of request 1)");
  EXPECT_EQ(refuse({{0, 3}, {0, 6}}), "no error");
}

TEST(BatchSlices, RefusesBatchesThatCannotBeCut) {
  test::Batch batch = batch_of({1, 5}, {9, 9});
  const auto refuse = [&](const CommonAttentionMetadata& view, const UBatchSlice& slice) {
    return error_text([&] { make_metadata_with_slice(slice, view); });
  };
  const UBatchSlice cut{{0, 2}, {0, 3}}, between{{1, 2}, {1, 6}};
  CommonAttentionMetadata view = batch.view();
  view.causal = false;
  EXPECT_EQ(refuse(view, cut), "request 1: cut at token 3 with causal false, legal: causal true");
  EXPECT_EQ(refuse(view, between), "no error");
  view = batch.view();
  view.key_start_loc = batch.query_start_loc;
  EXPECT_EQ(refuse(view, between),
            "key_start_loc holds 3 elements, legal: 0 (a slice's keys are in the cache)");
  view = batch.view();
  view.block_table = view.block_table.first(1);
  EXPECT_EQ(refuse(view, between),
            "block_table holds 1 elements, legal: at least 4 (num_reqs x block_table_stride)");
  const std::vector<std::int64_t> slots(5);
  view = batch.view();
  view.slot_mapping = slots;
  EXPECT_EQ(refuse(view, between),
            "slot_mapping holds 5 elements, legal: at least 6 (the requests' tokens)");
  batch.seq_lens[1] = 4;
  EXPECT_EQ(refuse(batch.view(), cut),
            "request 1: seq_lens is 4, legal: at least the query length, 5");
  EXPECT_EQ(error_text([&] { create_ubatch_slices(batch.view(), 3, 3); }),
            "split_point is 3, legal: at least 1, and 2 times it below the requests' 6 tokens");
  EXPECT_EQ(error_text([&] { create_ubatch_slices(batch.view(), 3, 0); }),
            "num_ubatches is 0, legal: at least 1");
  EXPECT_EQ(error_text([] {
              slice_query_start_locs(Ints{0, 4, 3}, {0, 2});
            }),
            "query_start_loc[2] is 3 behind 4, legal: ascending from 0");
  EXPECT_EQ(error_text([] {
              slice_query_start_locs(Ints{}, {0, 0});
            }),
            "request_slice is [0, 0), legal: 0 <= begin <= end <= -1");
}

}  // namespace
}  // namespace clattn
