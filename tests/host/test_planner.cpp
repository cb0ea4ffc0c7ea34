#include "metadata/planner.hpp"

#include <gtest/gtest.h>

#include "plan_checker.hpp"

namespace clattn::detail {
namespace {

using test::Batch;
using test::error_text;
using test::make_batch;
using test::Plan;
using test::plan_problem;

/// 8 compute units that want 3 items each; tiles of 1, 16 and 64 tokens.
PlannerConfig small_device() {
  PlannerConfig config;
  config.tiles = {TileClass{1, 1}, TileClass{16, 16}, TileClass{0, 64}};
  config.num_tiles = 3;
  config.compute_units = 8;
  config.min_split_keys = 64;
  config.max_partial_rows = 1 << 20;
  return config;
}

Plan plan_of(const PlannerConfig& config, const Batch& batch) {
  Plan plan;
  EXPECT_EQ(plan_problem(config, batch, &plan), "");
  return plan;
}

std::vector<std::int32_t> cuts_of(const std::vector<ClaWorkItem>& items, std::int32_t request = 0) {
  std::vector<std::int32_t> cuts;
  for (const ClaWorkItem& item : items) {
    if (test::request_of(item) == request) cuts.push_back(item.kv_end);
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

using Cuts = std::vector<std::int32_t>;

TEST(Planner, EmptyBatchesNeedNothing) {
  EXPECT_EQ(plan_of(small_device(), make_batch({}, 16)).counts, PlanCounts{});
  EXPECT_EQ(plan_of(small_device(), make_batch({{0, 0}, {0, 900}}, 16)).counts, PlanCounts{});
}

TEST(Planner, OneTokenOneKey) {
  const Plan plan = plan_of(small_device(), make_batch({{0, 0}, {1, 1}}, 16));
  ASSERT_EQ(plan.items[0].size(), 1U);
  const ClaWorkItem& item = plan.items[0][0];
  EXPECT_EQ(item.q_row, 0);
  EXPECT_EQ(item.q_count, 1);
  EXPECT_EQ(item.q_pos, 0);
  EXPECT_EQ(item.kv_begin, 0);
  EXPECT_EQ(item.kv_end, 1);
  EXPECT_EQ(item.partial_row, -1);
  EXPECT_EQ(test::request_of(item), 1);
  EXPECT_EQ(item.pages_at, test::kFirstPage + 1);
}

TEST(Planner, LengthChoosesTheTileClass) {
  const Plan plan = plan_of(small_device(), make_batch({{1, 9}, {2, 9}, {16, 20}, {17, 20}}, 16));
  EXPECT_EQ(plan.items[0].size(), 1U);
  EXPECT_EQ(plan.items[1].size(), 2U);
  EXPECT_EQ(plan.items[2].size(), 1U);
}

TEST(Planner, LongQueriesAreTiledAndSeeTheirCausalRange) {
  PlannerConfig config = small_device();
  config.item_order = ItemOrder::kLightFirst;
  config.max_partial_rows = 0;
  const Plan causal = plan_of(config, make_batch({{130, 150}}, 16));
  EXPECT_EQ(cuts_of(causal.items[2]), (Cuts{84, 148, 150}));
  Batch batch = make_batch({{130, 150}}, 16);
  batch.causal = false;
  EXPECT_EQ(cuts_of(plan_of(config, batch).items[2]), (Cuts{150, 150, 150}));
}

TEST(Planner, LonelyDecodeFillsTheDevice) {
  const Plan plan = plan_of(small_device(), make_batch({{1, 24 * 64 * 2}}, 16));
  EXPECT_EQ(plan.items[0].size(), 24U);
  for (const ClaWorkItem& item : plan.items[0]) EXPECT_EQ(item.kv_end - item.kv_begin, 128);
  ASSERT_EQ(plan.merges.size(), 1U);
  EXPECT_EQ(plan.merges[0].num_splits, 24);
  EXPECT_EQ(plan.merges[0].split_stride, 1);
  EXPECT_EQ(plan.counts.num_partial_rows, 24);
}

TEST(Planner, KvHeadGroupsFillTheDeviceToo) {
  PlannerConfig config = small_device();
  config.tiles[0].groups_per_item = 8;
  EXPECT_EQ(plan_of(config, make_batch({{1, 3072}}, 16)).items[0].size(), 3U);
  config.tiles[0].groups_per_item = 1000;
  EXPECT_EQ(plan_of(config, make_batch({{1, 3072}}, 16)).items[0].size(), 1U);
}

TEST(Planner, EachTileClassFillsTheDeviceByItsOwnGroups) {
  PlannerConfig config = small_device();
  config.tiles[0].groups_per_item = 2;
  config.tiles[1].groups_per_item = 8;
  const Plan plan = plan_of(config, make_batch({{1, 3072}, {2, 3072}}, 16));
  EXPECT_EQ(plan.items[0].size(), 12U);
  EXPECT_EQ(plan.items[1].size(), 3U);
}

TEST(Planner, ShortRangesAreNotWorthASplit) {
  EXPECT_EQ(plan_of(small_device(), make_batch({{1, 112}}, 16)).counts.num_merges, 0);
  EXPECT_EQ(cuts_of(plan_of(small_device(), make_batch({{1, 113}}, 16)).items[0]), (Cuts{64, 113}));
  PlannerConfig config = small_device();
  config.min_split_keys = 65;  // five pages
  EXPECT_EQ(plan_of(config, make_batch({{1, 144}}, 16)).counts.num_merges, 0);
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 145}}, 16)).items[0]), (Cuts{80, 145}));
}

TEST(Planner, FullDeviceSplitsNothing) {
  const std::vector<test::Request> requests(24, {1, 5000});
  EXPECT_EQ(plan_of(small_device(), make_batch(requests, 16)).counts.num_merges, 0);
}

TEST(Planner, OneLongRequestAmongShortOnesIsCut) {
  std::vector<test::Request> requests(100, {1, 100});
  requests[50].seq_len = 10000;
  const Plan plan = plan_of(small_device(), make_batch(requests, 16));
  EXPECT_EQ(plan.counts.num_merges, 1);
  // 19 900 keys over 24 items: at most 830 each, so 13 pieces of the long one.
  EXPECT_EQ(cuts_of(plan.items[0], 50).size(), 13U);
}

TEST(Planner, SpeculativeTokensShareTheirSplits) {
  const Plan plan = plan_of(small_device(), make_batch({{4, 1000}}, 16));
  EXPECT_EQ(plan.items[1].size(), 15U);  // 63 pages, at least 4 each
  EXPECT_EQ(plan.merges.size(), 4U);
  for (const ClaMergeItem& merge : plan.merges) EXPECT_EQ(merge.split_stride, 4);
  EXPECT_EQ(plan.counts.num_partial_rows, 4 * 15);
}

TEST(Planner, SplitsThatTheirKernelJoinsHaveNoMerges) {
  PlannerConfig config = small_device();
  config.tiles[1].joins_splits = true;
  const test::Batch batch = make_batch({{1, 1000}, {4, 1000}}, 16);
  const Plan plan = plan_of(config, batch);
  EXPECT_EQ(plan.counts.num_merges, 1);  // the decode's
  ASSERT_FALSE(plan.items[1].empty());
  for (const ClaWorkItem& item : plan.items[1]) EXPECT_EQ(item.num_splits, plan.items[1].size());
  for (const ClaWorkItem& item : plan.items[0]) EXPECT_EQ(item.num_splits, 0);
  const BatchLimits limits{.max_num_reqs = 8, .max_num_batched_tokens = 32, .max_model_len = 1000};
  config.tiles[0].joins_splits = true;
  EXPECT_EQ(plan_upper_bound(config, limits, 4).num_merges, 0);
}

// Where it is known how many groups run at once: equal tiles in whole waves, one if they fit.
TEST(Planner, KnownWavesAreFilledAndNotExceeded) {
  PlannerConfig config = small_device();
  config.compute_units = 132;
  config.tiles[0] = {.max_query_len = 1,
                     .max_item_tokens = 1,
                     .groups_per_item = 8,
                     .joins_splits = true,
                     .splits_finer = true,
                     .resident_groups = 2};  // 33 items a wave
  const auto items = [&](std::size_t requests, std::int32_t keys) {
    const std::vector<test::Request> batch(requests, {1, keys});
    return plan_of(config, make_batch(batch, 16)).items[0].size();
  };
  EXPECT_EQ(items(1, 32768), 33U);
  EXPECT_EQ(items(16, 8192), 32U);
  EXPECT_EQ(items(24, 8192), 24U);
  EXPECT_EQ(items(33, 8192), 33U);
  EXPECT_EQ(items(64, 8192), 128U);  // of four waves
  EXPECT_EQ(items(256, 8192), 256U);
  config.min_split_keys = 256;  // half of it, as no launch merges
  EXPECT_EQ(items(1, 1024), 8U);
  config.tiles[0].splits_finer = false;
  EXPECT_EQ(items(1, 1024), 4U);
}

TEST(Planner, LaunchesAreBalancedApart) {
  // The prefill dwarfs the decode, whose launch has the device to itself all the same.
  const Plan plan = plan_of(small_device(), make_batch({{1, 3072}, {4096, 4096}}, 16));
  EXPECT_EQ(plan.items[0].size(), 24U);
  EXPECT_EQ(plan.items[2].size(), 64U);
}

TEST(Planner, ForcedSplits) {
  PlannerConfig config = small_device();
  config.num_splits = 3;
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 70}}, 16)).items[0]), (Cuts{16, 48, 70}));
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 20}}, 16)).items[0]), (Cuts{16, 20}));
  EXPECT_EQ(plan_of(config, make_batch({{1, 16}}, 16)).counts.num_merges, 0);
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{64, 96}}, 16)).items[2]), (Cuts{32, 64, 96}));
  config.num_splits = 1;
  EXPECT_EQ(plan_of(config, make_batch({{1, 5000}}, 16)).counts.num_merges, 0);
  config.num_splits = 0x7fffffff;
  EXPECT_EQ(plan_of(config, make_batch({{1, 99}}, 1)).items[0].size(), 7U);
}

TEST(Planner, PagesOfOneTokenAndOfPrimes) {
  PlannerConfig config = small_device();
  config.min_split_keys = 1;
  config.block_size = 1;
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 5}}, 1)).items[0]), (Cuts{1, 2, 3, 4, 5}));
  config.block_size = 7;
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 20}}, 7)).items[0]), (Cuts{7, 14, 20}));
}

TEST(Planner, PartialRowsAreBounded) {
  PlannerConfig config = small_device();
  for (const std::int64_t limit : {0, 1, 2, 5, 23, 24}) {
    config.max_partial_rows = limit;
    const Plan plan = plan_of(config, make_batch({{1, 3072}}, 16));
    EXPECT_LE(plan.counts.num_partial_rows, limit);
    EXPECT_EQ(plan.counts.num_merges, limit < 2 ? 0 : 1) << limit;
  }
  config.num_splits = 10;
  config.max_partial_rows = 9;
  EXPECT_EQ(plan_of(config, make_batch({{1, 3072}}, 16)).counts.num_partial_rows, 5);
}

TEST(Planner, TokensWithoutKeysGetAnItem) {
  Batch batch = make_batch({{3, 3}}, 16);
  batch.seq_lens = {1};  // queries at -2, -1 and 0: the causal rule leaves the first two nothing
  PlannerConfig config = small_device();
  config.tiles[1].max_item_tokens = 1;
  EXPECT_EQ(cuts_of(plan_of(config, batch).items[1]), (Cuts{0, 0, 1}));
  batch.seq_lens = {0};
  batch.causal = false;
  EXPECT_EQ(cuts_of(plan_of(config, batch).items[1]), (Cuts{0, 0, 0}));
}

TEST(Planner, DeterministicCutsStandAtFixedPositions) {
  PlannerConfig config = small_device();
  config.split_policy = SplitPolicy::kDeterministic;
  config.deterministic_split_keys = 100;  // seven pages
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 300}}, 16)).items[0]), (Cuts{112, 224, 300}));
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 112}}, 16)).items[0]), (Cuts{112}));
  EXPECT_EQ(plan_of(config, make_batch({{17, 5000}}, 16)).counts.num_merges, 0);
}

TEST(Planner, DeterministicPlansAreRefusedRatherThanChanged) {
  PlannerConfig config = small_device();
  config.split_policy = SplitPolicy::kDeterministic;
  config.max_partial_rows = 9;
  const auto error = [&] {
    return error_text(
        [&] {
          plan_of(config, make_batch({{2, 2560}}, 16));
        },
        ErrorCode::kUnsupported);
  };
  EXPECT_EQ(error(),
            "deterministic splits of this batch need 10 partial rows, legal: at most 9 "
            "(max_partial_rows)");
  config.max_partial_rows = 10;
  EXPECT_EQ(error(), "no error");
  config.max_partial_rows = 0;  // never split: no less deterministic
  EXPECT_EQ(error(), "no error");
}

TEST(Planner, FittedDeterministicCutsHoldForTheWorstBatch) {
  PlannerConfig config = small_device();
  config.split_policy = SplitPolicy::kDeterministic;
  config.deterministic_split_keys = 16;
  config.max_partial_rows = 100;
  const BatchLimits limits{.max_num_reqs = 12, .max_num_batched_tokens = 24, .max_model_len = 1000};
  config.deterministic_split_keys = fit_deterministic_split_keys(config, limits);
  EXPECT_EQ(config.deterministic_split_keys, 250);
  const std::vector<test::Request> worst(12, {2, 1000});
  EXPECT_EQ(plan_of(config, make_batch(worst, 16)).counts.num_partial_rows, 24 * 4);

  config.deterministic_split_keys = 512;
  EXPECT_EQ(fit_deterministic_split_keys(config, limits), 512);
  config.max_partial_rows = 47;  // less than two per token
  EXPECT_EQ(fit_deterministic_split_keys(config, limits), 1000);
}

TEST(Planner, RefusesNonsense) {
  const Batch batch = make_batch({{1, 100}, {1, 100}}, 16);
  const auto pages_at = test::pages_at_of(2);
  const auto error = [&](auto spoil) {
    PlannerConfig config = small_device();
    spoil(config);
    return error_text([&] { plan_attention(config, batch.view(), pages_at, nullptr); });
  };
  EXPECT_EQ(error([](PlannerConfig&) {}), "no error");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_tiles = 0; }), "num_tiles is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_tiles = 4; }), "num_tiles is 4, legal: 1 … 3");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[2].max_item_tokens = 0; }),
            "tiles[2].max_item_tokens is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[1].groups_per_item = 0; }),
            "tiles[1].groups_per_item is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.block_size = 0; }),
            "block_size is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.compute_units = -1; }),
            "compute_units is -1, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_splits = -1; }),
            "num_splits is -1, legal: at least 0 (0 = planned)");
  EXPECT_EQ(error_text([&] {
              plan_attention(small_device(), batch.view(), std::span(pages_at).first(1), nullptr);
            }),
            "pages_at holds 1 elements, legal: at least 2 (num_reqs)");
}

TEST(Planner, RefusesTooSmallOutputsUntouched) {
  const Batch batch = make_batch({{1, 3072}}, 16);
  const auto pages_at = test::pages_at_of(1);
  std::vector<ClaWorkItem> items(23, ClaWorkItem{});
  std::vector<ClaMergeItem> merges(1, ClaMergeItem{});
  PlanOutput output;
  output.items[0] = items;
  output.merges = merges;
  EXPECT_EQ(error_text([&] { plan_attention(small_device(), batch.view(), pages_at, &output); }),
            "PlanOutput::items holds 23 elements, legal: at least 24");
  items.resize(24);
  output.items[0] = items;
  output.merges = {};
  EXPECT_EQ(error_text([&] { plan_attention(small_device(), batch.view(), pages_at, &output); }),
            "PlanOutput::merges holds 0 elements, legal: at least 1");
  for (const ClaWorkItem& item : items) EXPECT_EQ(item.kv_end, 0);
}

}  // namespace
}  // namespace clattn::detail
