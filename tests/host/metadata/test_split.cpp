#include <gtest/gtest.h>

#include <clattn/reorder.hpp>
#include <numeric>
#include <random>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;
using Ints = std::vector<std::int32_t>;

/// A batch of these query lengths, each request with `context` tokens before.
test::Batch batch_of(const Ints& query_lens, const Ints& context = {}) {
  std::vector<test::Request> requests;
  for (std::size_t r = 0; r < query_lens.size(); ++r) {
    requests.push_back({query_lens[r], query_lens[r] + (context.empty() ? 100 : context[r])});
  }
  return test::make_batch(requests, 16);
}

BatchSplit split(const Ints& query_lens, const SplitOptions& options) {
  return split_decodes_and_prefills(batch_of(query_lens).view(), options);
}

TEST(SplitWithOptions, A1_9_ByLength) {
  EXPECT_EQ(split({1, 1, 5, 3}, {.decode_threshold = 1}), (BatchSplit{2, 2, 2, 8}));
  EXPECT_EQ(split({1, 1}, {.decode_threshold = 1}), (BatchSplit{2, 0, 2, 0}));
  EXPECT_EQ(split({}, {.decode_threshold = 1}), (BatchSplit{0, 0, 0, 0}));
  // The first request is no decode: none is.
  EXPECT_EQ(split({5, 1}, {.decode_threshold = 1}), (BatchSplit{0, 2, 0, 6}));
  // A first chunk of one token stands last: what M's order makes and M's split accepts.
  EXPECT_EQ(split({1, 5, 1}, {.decode_threshold = 1}), (BatchSplit{1, 2, 1, 6}));
}

/// Query lengths, the batch's tokens where padding follows theirs, and the split.
struct SplitRow {
  const char* name;
  Ints query_lens;
  std::int32_t threshold;
  bool uniform;
  BatchSplit expected;
  std::int32_t padded_tokens = 0;
};

// The ten rows that vLLM pins, by its names.
const SplitRow kVllmSplits[] = {
    {"nonuniform_all_ones", {1, 1, 1}, 1, false, {3, 0, 3, 0}},
    {"nonuniform_all_short_decodes", {1, 2, 1, 3, 2, 1, 2}, 3, false, {7, 0, 12, 0}},
    {"nonuniform_all_prefills", {4, 5, 6, 7}, 3, false, {0, 4, 0, 22}},
    {"nonuniform_mixed_batch", {2, 1, 3, 4, 5, 6, 7, 8}, 4, false, {4, 4, 10, 26}},
    {"uniform_all_ones", {1, 1, 1}, 1, true, {3, 0, 3, 0}},
    {"uniform_all_short_decodes", {2, 2, 1, 3, 2, 1, 2}, 3, true, {2, 5, 4, 9}},
    {"uniform_all_prefills", {4, 5, 6, 7}, 3, true, {0, 4, 0, 22}},
    {"uniform_mixed_all_uniform_decodes", {2, 2, 2, 4, 5, 6, 7, 8}, 4, true, {3, 5, 6, 30}},
    {"uniform_mixed_non_uniform_decodes", {2, 1, 2, 4, 5, 6, 7, 8}, 4, true, {1, 7, 2, 33}},
    {"uniform_padded_batch_all_same", {2, 2, 2, 0}, 3, true, {4, 0, 8, 0}, 8},
};

BatchSplit split(const SplitRow& row) {
  const test::Batch batch = batch_of(row.query_lens);
  CommonAttentionMetadata view = batch.view();
  if (row.padded_tokens > 0) view.num_actual_tokens = row.padded_tokens;
  return split_decodes_and_prefills(
      view, {.decode_threshold = row.threshold, .require_uniform = row.uniform});
}

TEST(SplitWithOptions, A1_9_RowsOfVLLM) {
  for (const SplitRow& row : kVllmSplits) EXPECT_EQ(split(row), row.expected) << row.name;
}

TEST(SplitWithOptions, A1_9_TokensOfPaddingCountWithTheLastRequests) {
  const SplitRow taken[] = {
      {"two rows", {2, 2, 0, 0}, 2, true, {4, 0, 8, 0}, 8},
      {"less than the rows could own", {2, 2, 0, 0}, 2, true, {4, 0, 5, 0}, 5},
      {"one token each", {1, 1, 0}, 1, true, {3, 0, 3, 0}, 3},
      {"nothing but padding", {0, 0}, 2, true, {2, 0, 4, 0}, 4},
      {"behind prefills", {2, 2, 9, 0}, 2, true, {2, 2, 4, 11}, 15},
      {"no empty row", {2, 2}, 2, false, {2, 0, 9, 0}, 9},
      {"behind a prefill that is the last", {2, 5}, 2, false, {1, 1, 2, 7}, 9},
  };
  for (const SplitRow& row : taken) EXPECT_EQ(split(row), row.expected) << row.name;
  const SplitRow too_few{"too few", {2, 2, 0}, 2, true, {}, 3};
  EXPECT_EQ(error_text([&] { split(too_few); }),
            "request 1: query_start_loc[2] is 4, legal: 2 … 3 (query_start_loc[1] … "
            "num_actual_tokens)");
}

TEST(SplitWithOptions, A1_9_UniformDecodesEndWhereALengthDiffers) {
  const SplitOptions uniform{.decode_threshold = 3, .require_uniform = true};
  EXPECT_EQ(split({2, 2, 1, 3}, uniform), (BatchSplit{2, 2, 4, 4}));
  EXPECT_EQ(split({3, 3, 3}, uniform), (BatchSplit{3, 0, 9, 0}));
  EXPECT_EQ(split({2, 2, 9}, uniform), (BatchSplit{2, 1, 4, 9}));
  EXPECT_EQ(split({9, 2, 2}, uniform), (BatchSplit{0, 3, 0, 13}));
  // Padding rows without tokens belong to the captured batch.
  EXPECT_EQ(split({2, 2, 0, 0}, uniform), (BatchSplit{4, 0, 4, 0}));
  EXPECT_EQ(split({2, 2, 0, 5}, uniform), (BatchSplit{3, 1, 4, 5}));
  EXPECT_EQ(split({0, 2, 2}, uniform), (BatchSplit{3, 0, 4, 0}));
  EXPECT_EQ(split({1, 0, 1}, {.decode_threshold = 1, .require_uniform = true}),
            (BatchSplit{3, 0, 2, 0}));
}

TEST(SplitWithOptions, A1_9_PrefillingRequestsAreNoDecodes) {
  const std::vector<std::uint8_t> flags{0, 1, 1};
  const SplitOptions options{.treat_short_extends_as_decodes = false, .is_prefilling = flags};
  EXPECT_EQ(split({1, 1, 5}, options), (BatchSplit{1, 2, 1, 6}));
  EXPECT_EQ(split({1, 1, 1}, options), (BatchSplit{1, 2, 1, 2}));
  const std::vector<std::uint8_t> none{0, 0, 0};
  EXPECT_EQ(split({1, 1, 1}, {.treat_short_extends_as_decodes = false, .is_prefilling = none}),
            (BatchSplit{3, 0, 3, 0}));
  // Uniform as well: padding no longer passes for decodes by itself.
  EXPECT_EQ(split({2, 2, 2}, {.decode_threshold = 2,
                              .require_uniform = true,
                              .treat_short_extends_as_decodes = false,
                              .is_prefilling = flags}),
            (BatchSplit{1, 2, 2, 4}));
  EXPECT_EQ(error_text([] {
              split({1, 1}, {.treat_short_extends_as_decodes = false});
            }),
            "is_prefilling holds 0 elements, legal: at least 2 (num_reqs; needed unless "
            "treat_short_extends_as_decodes)");
}

TEST(SplitWithOptions, A1_9_RowsWithoutTokensNeverBeginThePrefills) {
  const std::vector<std::uint8_t> none(5, 0), empty_ones{0, 0, 1, 1, 0};
  for (const bool uniform : {false, true}) {
    for (const auto& flags : {none, empty_ones}) {
      const SplitOptions options{.decode_threshold = 2,
                                 .require_uniform = uniform,
                                 .treat_short_extends_as_decodes = false,
                                 .is_prefilling = flags};
      EXPECT_EQ(split({2, 2, 0, 0}, options), (BatchSplit{4, 0, 4, 0}));
      EXPECT_EQ(split({2, 2, 0, 0, 7}, options), (BatchSplit{4, 1, 4, 7}));
      EXPECT_EQ(split({0, 2, 0, 0, 2}, options), (BatchSplit{5, 0, 4, 0}));
      EXPECT_EQ(split({0, 0, 0}, options), (BatchSplit{3, 0, 0, 0}));
    }
  }
  // Tokens of padding count with the decodes, too.
  test::Batch batch = batch_of({2, 2, 0, 0});
  CommonAttentionMetadata view = batch.view();
  view.num_actual_tokens = 8;
  EXPECT_EQ(split_decodes_and_prefills(view, {.decode_threshold = 2,
                                              .require_uniform = true,
                                              .treat_short_extends_as_decodes = false,
                                              .is_prefilling = empty_ones}),
            (BatchSplit{4, 0, 8, 0}));
}

TEST(SplitWithOptions, A1_9_AgreesWithTheSplitByThresholdOnOrderedBatches) {
  std::mt19937 random(77);
  for (int run = 0; run < 500; ++run) {
    const auto threshold = static_cast<std::int32_t>(random() % 4);
    Ints lens;
    for (auto i = random() % 5; i > 0; --i) {
      lens.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(threshold + 1)));
    }
    for (auto i = random() % 5; i > 0; --i) {
      lens.push_back(
          static_cast<std::int32_t>(1 + static_cast<unsigned>(threshold) + random() % 9));
    }
    EXPECT_EQ(split(lens, {.decode_threshold = threshold}),
              split_decodes_and_prefills(batch_of(lens).view(), threshold));
  }
}

ExtendSplit split3(const Ints& query_lens, const Ints& context, std::int32_t threshold = 1) {
  return split_decodes_prefills_and_extends(batch_of(query_lens, context).view(), threshold);
}

TEST(SplitExtends, A1_9_DecodesExtendsPrefills) {
  // vLLM's row: seq_lens 10, 11, 20, 5, 6.
  EXPECT_EQ(split3({1, 2, 4, 5, 6}, {9, 9, 16, 0, 0}, 3), (ExtendSplit{2, 1, 2, 3, 4, 11}));
  EXPECT_EQ(split3({1, 1, 5, 7, 9}, {4, 3, 2, 1, 0}), (ExtendSplit{2, 2, 1, 2, 12, 9}));
  EXPECT_EQ(split3({1, 1}, {4, 0}), (ExtendSplit{2, 0, 0, 2, 0, 0}));
  EXPECT_EQ(split3({5, 6}, {4, 3}), (ExtendSplit{0, 2, 0, 0, 11, 0}));
  EXPECT_EQ(split3({5, 6}, {0, 0}), (ExtendSplit{0, 0, 2, 0, 0, 11}));
  EXPECT_EQ(split3({1, 6}, {3, 0}), (ExtendSplit{1, 0, 1, 1, 0, 6}));
  EXPECT_EQ(split3({}, {}), (ExtendSplit{}));
  // A one-token first chunk stands last, padding behind it.
  EXPECT_EQ(split3({1, 6, 1, 0}, {3, 0, 0, 0}), (ExtendSplit{1, 0, 3, 1, 0, 7}));
}

TEST(SplitExtends, PaddingCountsWithTheLastRequests) {
  const auto padded = [](std::vector<std::int32_t> query_lens, std::vector<std::int32_t> context) {
    const test::Batch batch = batch_of(std::move(query_lens), std::move(context));
    CommonAttentionMetadata view = batch.view();
    view.num_actual_tokens = 20;
    return split_decodes_prefills_and_extends(view);
  };
  EXPECT_EQ(padded({1, 1}, {4, 3}), (ExtendSplit{2, 0, 0, 20, 0, 0}));
  EXPECT_EQ(padded({1, 6}, {4, 3}), (ExtendSplit{1, 1, 0, 1, 19, 0}));
  EXPECT_EQ(padded({1, 6, 7}, {4, 3, 0}), (ExtendSplit{1, 1, 1, 1, 6, 13}));
}

TEST(SplitExtends, A1_9_RefusesAnotherOrder) {
  EXPECT_EQ(error_text([] {
              split3({5, 1}, {0, 8});
            }),
            "request 1: 1 query tokens of seq_lens 9 stand behind request 0; legal: decodes, then "
            "extends, then prefills (decode_threshold 1)");
  EXPECT_EQ(error_text([] {
              split3({5, 4}, {0, 8});
            }),
            "request 1: 4 query tokens of seq_lens 12 stand behind request 0; legal: decodes, then "
            "extends, then prefills (decode_threshold 1)");
  test::Batch batch = batch_of({4});
  batch.seq_lens[0] = 3;
  EXPECT_EQ(error_text([&] { split_decodes_prefills_and_extends(batch.view()); }),
            "request 0: seq_lens is 3, legal: at least 4 (the query length)");
}

using Ranges = std::vector<RequestRange>;

TEST(SplitPrefillChunks, A1_9_FillsTheWorkspaceGreedily) {
  EXPECT_EQ(split_prefill_chunks(Ints{4, 6, 3, 8}, 10), (Ranges{{0, 2}, {2, 3}, {3, 4}}));
  EXPECT_EQ(split_prefill_chunks(Ints{10, 10}, 10), (Ranges{{0, 1}, {1, 2}}));
  EXPECT_EQ(split_prefill_chunks(Ints{1, 2, 3}, 100, 7), (Ranges{{7, 10}}));
  EXPECT_EQ(split_prefill_chunks(Ints{5, 0, 0, 5, 0}, 5), (Ranges{{0, 3}, {3, 5}}));
  EXPECT_EQ(split_prefill_chunks(Ints{}, 10), Ranges{});
}

TEST(SplitPrefillChunks, RefusesARequestLargerThanTheWorkspace) {
  EXPECT_EQ(error_text([] {
              split_prefill_chunks(Ints{4, 11}, 10);
            }),
            "request 1: seq_lens is 11, legal: 0 … 10 (workspace_size)");
  EXPECT_EQ(error_text([] { split_prefill_chunks(Ints{-1}, 10); }),
            "request 0: seq_lens is -1, legal: 0 … 10 (workspace_size)");
}

}  // namespace
}  // namespace clattn
