#include "metadata/plan/planner.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "host/metadata/plan_checker.hpp"

namespace clattn::detail {
namespace {

using test::Batch;
using test::error_text;
using test::make_batch;
using test::Plan;
using test::plan_problem;

/// A kernel of 8 work-groups at once, of which a task takes as long as 100 keys.
TileClass tile_of(std::int32_t most_tokens) {
  TileClass tile{.max_query_len = most_tokens, .max_item_tokens = most_tokens};
  tile.step_keys = 64;
  tile.workers = 8;
  tile.costs = {.task_ns = 100, .split_ns = 20, .key_ns = 1};
  return tile;
}

/// Tiles of 1, 16 and 64 tokens.
PlannerConfig small_device() {
  PlannerConfig config;
  config.tiles = {tile_of(1), tile_of(16), tile_of(64)};
  config.num_tiles = 3;
  config.merge = {.launch_ns = 200, .token_ns = 1, .row_ns = 1};
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

/// Requests among every `count` neighbours of a list, at most.
std::size_t most_requests_among(const std::vector<ClaWorkItem>& items, std::size_t count) {
  std::size_t most = 0;
  for (std::size_t first = 0; first + count <= items.size(); ++first) {
    std::set<std::int32_t> requests;
    for (std::size_t i = first; i < first + count; ++i) requests.insert(test::request_of(items[i]));
    most = std::max(most, requests.size());
  }
  return most;
}

// 132 groups work on 16 tiles for 8 KV heads: of two or three requests, so that keys come from the
// cache; in the order of weights alone they would be of 8.
TEST(Planner, TilesOfARequestFollowEachOther) {
  PlannerConfig config = small_device();
  config.tiles = {tile_of(2), tile_of(32)};
  config.num_tiles = 2;
  for (TileClass& tile : config.tiles) {
    tile.workers = 132;
    tile.groups_per_item = 8;
  }
  for (const std::int32_t tokens : {512, 1024}) {
    const Plan plan =
        plan_of(config, make_batch(std::vector<test::Request>(8, {tokens, 8704}), 16));
    EXPECT_EQ(plan.items[1].size(), 8U * static_cast<std::size_t>(tokens) / 32);
    EXPECT_LE(most_requests_among(plan.items[1], 16), 3U) << tokens;
  }
}

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

// Sides of 2^31 - 1 keys hide none and overflow nowhere.
TEST(Planner, W12_EndlessSidesHideNothing) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max(), kKeys = 131072;
  for (const std::int32_t left : {-1, kMost}) {
    for (const std::int32_t right : {-1, kMost}) {
      PlannerConfig config = small_device();
      config.window = {.left = left, .right = right};
      const ClaSight sight = sight_of(config, false);
      const ClaTileKeys keys = cla_tile_keys(&sight, kKeys - 4, 2, kKeys);
      EXPECT_EQ(keys.first, 0);
      EXPECT_EQ(keys.count, kKeys);
      EXPECT_EQ(unseen_pages(sight, 4, kKeys), 0U);
      EXPECT_EQ(most_pages(config, kKeys, 4, 4), kKeys / 16);
    }
  }
}

// Keys outside are in no item, to either side.
TEST(Planner, SidesOfWindowsCutKeysOff) {
  PlannerConfig config = small_device();
  const auto keys_of = [&](std::int32_t left, std::int32_t right) {
    config.window = {.left = left, .right = right};
    const ClaSight sight = sight_of(config, false);
    const ClaTileKeys keys = cla_tile_keys(&sight, 500, 64, 1000);  // tokens 500 … 563
    return std::pair(keys.first, keys.first + keys.count);
  };
  EXPECT_EQ(keys_of(-1, 36), std::pair(0, 600));
  EXPECT_EQ(keys_of(100, -1), std::pair(400, 1000));
  EXPECT_EQ(keys_of(99, 0), std::pair(400, 564));  // key 401 is in the page from 400 on
}

TEST(Planner, LonelyDecodeFillsTheDevice) {
  const Plan plan = plan_of(small_device(), make_batch({{1, 8 * 64 * 6}}, 16));
  EXPECT_EQ(plan.items[0].size(), 8U);
  for (const ClaWorkItem& item : plan.items[0]) EXPECT_EQ(item.kv_end - item.kv_begin, 384);
  ASSERT_EQ(plan.merges.size(), 1U);
  EXPECT_EQ(plan.merges[0].num_splits, 8);
  EXPECT_EQ(plan.merges[0].split_stride, 1);
  EXPECT_EQ(plan.counts.num_partial_rows, 8);
}

TEST(Planner, KvHeadGroupsFillTheDeviceToo) {
  PlannerConfig config = small_device();
  config.tiles[0].groups_per_item = 4;
  EXPECT_EQ(plan_of(config, make_batch({{1, 3072}}, 16)).items[0].size(), 2U);
  config.tiles[0].groups_per_item = 1000;
  EXPECT_EQ(plan_of(config, make_batch({{1, 3072}}, 16)).items[0].size(), 1U);
}

TEST(Planner, EachTileClassFillsTheDeviceByItsOwnGroups) {
  PlannerConfig config = small_device();
  config.tiles[0].groups_per_item = 2;
  config.tiles[1].groups_per_item = 4;
  const Plan plan = plan_of(config, make_batch({{1, 3072}, {2, 3072}}, 16));
  EXPECT_EQ(plan.items[0].size(), 4U);
  EXPECT_EQ(plan.items[1].size(), 2U);
}

TEST(Planner, MergesThatCostMoreThanTheySaveAreNotMade) {
  PlannerConfig config = small_device();
  const Batch batch = make_batch({{1, 1024}}, 16);
  EXPECT_EQ(plan_of(config, batch).counts.num_merges, 1);
  config.merge.launch_ns = 1000;  // eight splits end 876 ns earlier, their own costs counted
  EXPECT_EQ(plan_of(config, batch).counts.num_merges, 0);
  config.tiles[0].merges_splits = true;  // then there is no such launch
  EXPECT_GT(plan_of(config, batch).items[0].size(), 1U);
}

TEST(Planner, ClassesShareTheMergeLaunch) {
  PlannerConfig config = small_device();
  config.merge.launch_ns = 1000;
  const test::Request decode{1, 1024};
  const test::Request spec{4, 1024};
  EXPECT_EQ(plan_of(config, make_batch({decode}, 16)).counts.num_merges, 0);
  EXPECT_EQ(plan_of(config, make_batch({spec}, 16)).counts.num_merges, 0);
  EXPECT_EQ(plan_of(config, make_batch({decode, spec}, 16)).counts.num_merges, 5);
}

// A part of a step costs a whole one.
TEST(Planner, NoSplitIsShorterThanAStepOfItsKernel) {
  PlannerConfig config = small_device();
  config.merge = {};
  config.tiles[0].costs = {.key_ns = 1};
  EXPECT_EQ(plan_of(config, make_batch({{1, 112}}, 16)).counts.num_merges, 0);
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 128}}, 16)).items[0]), (Cuts{64, 128}));
  config.tiles[0].step_keys = 65;  // five pages
  EXPECT_EQ(plan_of(config, make_batch({{1, 144}}, 16)).counts.num_merges, 0);
  EXPECT_EQ(cuts_of(plan_of(config, make_batch({{1, 160}}, 16)).items[0]), (Cuts{80, 160}));
}

TEST(Planner, FullDeviceSplitsNothing) {
  for (const Dealing dealing : {Dealing::kTaken, Dealing::kDealt}) {
    PlannerConfig config = small_device();
    config.tiles[0].dealing = dealing;
    const std::vector<test::Request> requests(24, {1, 5000});
    EXPECT_EQ(plan_of(config, make_batch(requests, 16)).counts.num_merges, 0);
  }
}

TEST(Planner, OneLongRequestAmongShortOnesIsCut) {
  std::vector<test::Request> requests(100, {1, 100});
  requests[50].seq_len = 10000;
  const Plan plan = plan_of(small_device(), make_batch(requests, 16));
  EXPECT_EQ(plan.counts.num_merges, 1);
  // 100 x 228 + 10 000 ns are 4100 for each of 8: no item may be longer.
  EXPECT_GE(cuts_of(plan.items[0], 50).size(), 3U);
}

// Where memory bounds a launch, work-groups that have ended leave theirs to the others: there is
// less to gain from filling the device to the last one.
TEST(Planner, WhatMemoryBoundsIsNotCut) {
  PlannerConfig config = small_device();
  config.tiles[0].merges_splits = config.tiles[0].ends_at_padding = true;
  config.tiles[0].dealing = Dealing::kDealt;
  config.tiles[0].costs.split_ns = 500;
  const std::vector<test::Request> requests(5, {1, 6400});
  const auto items = [&] { return plan_of(config, make_batch(requests, 16)).items[0].size(); };
  EXPECT_GT(items(), 5U);
  config.tiles[0].costs.parallel = 0.5;  // 64 000 ns are memory's, whatever the plan
  EXPECT_EQ(items(), 5U);
}

TEST(Planner, SpeculativeTokensShareTheirSplits) {
  const Plan plan = plan_of(small_device(), make_batch({{4, 2048}}, 16));
  EXPECT_EQ(plan.items[1].size(), 8U);
  EXPECT_EQ(plan.merges.size(), 4U);
  for (const ClaMergeItem& merge : plan.merges) EXPECT_EQ(merge.split_stride, 4);
  EXPECT_EQ(plan.counts.num_partial_rows, 4 * 8);
}

TEST(Planner, SplitsThatTheirKernelJoinsHaveNoMerges) {
  PlannerConfig config = small_device();
  config.tiles[1].merges_splits = true;
  const test::Batch batch = make_batch({{1, 1000}, {4, 1000}}, 16);
  const Plan plan = plan_of(config, batch);
  EXPECT_EQ(plan.counts.num_merges, 1);  // the decode's
  ASSERT_FALSE(plan.items[1].empty());
  for (const ClaWorkItem& item : plan.items[1]) EXPECT_EQ(item.num_splits, plan.items[1].size());
  for (const ClaWorkItem& item : plan.items[0]) EXPECT_EQ(item.num_splits, 0);
  const BatchLimits limits{.max_num_reqs = 8, .max_num_batched_tokens = 32, .max_model_len = 1000};
  config.tiles[0].merges_splits = true;
  EXPECT_EQ(plan_upper_bound(config, limits, 4).num_merges, 0);
}

// 132 groups that stay, as on an H200, and 8 KV heads: 16 equal items are a wave.
TEST(Planner, WavesAreFilledAndNotExceeded) {
  PlannerConfig config = small_device();
  config.fixed_groups = true;
  config.tiles[0].groups_per_item = 8;
  config.tiles[0].merges_splits = config.tiles[0].ends_at_padding = true;
  config.tiles[0].workers = 132;
  config.tiles[0].dealing = Dealing::kDealt;
  const auto items = [&](std::size_t requests, std::int32_t keys) {
    const std::vector<test::Request> batch(requests, {1, keys});
    return plan_of(config, make_batch(batch, 16)).items[0].size();
  };
  EXPECT_EQ(items(1, 32768), 16U);
  EXPECT_EQ(items(4, 8192), 16U);
  EXPECT_EQ(items(16, 8192), 16U);
  EXPECT_EQ(items(33, 8192), 33U);
  EXPECT_EQ(items(1, 512), 8U);  // steps of 64
}

/// 64 persistent groups for each of two launches. Keys of single queries slow each other down, as
/// memory does, so that a few groups do as well as all.
PlannerConfig persistent_device() {
  PlannerConfig config = small_device();
  config.num_tiles = 2;
  config.beside_ns = 100;
  for (TileClass& tile : config.tiles) {
    tile.workers = 64;
    tile.dealing = Dealing::kDealt;
    tile.merges_splits = true;
  }
  config.tiles[0].ends_at_padding = true;
  config.tiles[0].costs.parallel = 4;
  config.tiles[1].costs.token_key_ns = 1;
  return config;
}

// A wide tile has 1.5 times the tokens for 1.4 times the time of a key.
TEST(Planner, WideTilesServeWhereTheyEndEarlier) {
  PlannerConfig config = small_device();
  config.tiles = {tile_of(1), tile_of(16), tile_of(24)};
  config.tiles[2].costs.key_ns = 1.4;
  config.last_is_wide = true;
  const auto long_tiles = [&](std::vector<test::Request> requests) {
    const Plan plan = plan_of(config, make_batch(requests, 16));
    return std::pair(plan.items[1].size(), plan.items[2].size());
  };
  EXPECT_EQ(long_tiles({{4800, 9600}}), std::pair(0UL, 200UL));
  EXPECT_EQ(long_tiles({{128, 9600}}), std::pair(8UL, 0UL)) << "a tile for each group";
  config.num_splits = 1;
  EXPECT_EQ(long_tiles({{4800, 9600}}), std::pair(300UL, 0UL)) << "not by costs";
  config.num_splits = 0;
  config.split_policy = SplitPolicy::kDeterministic;
  EXPECT_EQ(long_tiles({{4800, 9600}}), std::pair(300UL, 0UL)) << "free of the batch";
  config.num_tiles = 1;
  EXPECT_EQ(error_text([&] { plan_of(config, make_batch({}, 16)); }),
            "last_is_wide is true, legal with num_tiles 1: false");
}

TEST(Planner, LaunchesRunBesideEachOtherWhereThatEndsEarlier) {
  const PlannerConfig config = persistent_device();
  std::vector<test::Request> requests(640, {1, 1000});
  requests.insert(requests.end(), 8, {512, 2000});
  const Plan beside = plan_of(config, make_batch(requests, 16));
  const auto [first, second, third, fourth] = beside.counts.workers;
  EXPECT_EQ(first + second, 64);
  EXPECT_EQ(third + fourth, 0);
  EXPECT_GT(first, 8);
  EXPECT_GT(second, 8);
  EXPECT_GT(beside.counts.slower[0], 1) << "both read one memory";
  EXPECT_GT(beside.counts.slower[1], 1 + 0.25 * first / 64) << "the more groups wait for it";

  PlannerConfig both_wait = config;  // for memory, which they would take from each other
  both_wait.tiles[1].costs.parallel = 0.5;
  EXPECT_EQ(plan_of(both_wait, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
  PlannerConfig cannot = config;
  cannot.beside_ns = std::numeric_limits<double>::infinity();
  EXPECT_EQ(plan_of(cannot, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
  PlannerConfig taken = config;
  taken.tiles[1].dealing = Dealing::kTaken;
  EXPECT_EQ(plan_of(taken, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
  PlannerConfig forced = config;
  forced.num_splits = 1;
  EXPECT_EQ(plan_of(forced, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
}

// What waits for memory gets half of the groups at most: with more, both would wait.
TEST(Planner, LaunchesRunInTurnWhereOneNeedsMostOfTheDevice) {
  const PlannerConfig config = persistent_device();
  std::vector<test::Request> requests(640, {1, 1000});
  requests.insert(requests.end(), 8, {512, 2000});
  const auto waiting = [&](std::size_t decodes) {
    requests.insert(requests.end(), decodes, {1, 1000});
    return plan_of(config, make_batch(requests, 16)).counts.workers[0];
  };
  EXPECT_GT(waiting(0), 0);
  int beside = 0;
  std::int32_t last = 1;
  for (; last > 0 && beside < 100; ++beside) {
    last = waiting(640);
    EXPECT_LE(last, 32);
  }
  EXPECT_LT(beside, 100) << "more and more decodes are planned in turn at some point";
}

// Equal tasks that compute: with one group fewer they would take another round.
TEST(Planner, LaunchesBesideEachOtherCountWholeRounds) {
  PlannerConfig config = persistent_device();
  config.merge.launch_ns = 1e9;  // nothing is split
  config.tiles[0].merges_splits = config.tiles[1].merges_splits = false;
  for (const std::size_t prompts : {150U, 250U}) {
    std::vector<test::Request> requests(640, {1, 1000});
    requests.insert(requests.end(), prompts, {16, 2000});
    const Plan plan = plan_of(config, make_batch(requests, 16));
    const std::int32_t groups = plan.counts.workers[1];
    const auto tasks = static_cast<std::int32_t>(plan.items[1].size());
    ASSERT_GT(groups, 1);
    EXPECT_GT((tasks - 1) / (groups - 1), (tasks - 1) / groups) << groups << " for " << tasks;
  }
}

TEST(Planner, LaunchesRunInTurnWhereOneOfThemIsSmall) {
  const PlannerConfig config = persistent_device();
  std::vector<test::Request> requests(640, {1, 1000});
  EXPECT_EQ(plan_of(config, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
  requests.push_back({16, 40});
  EXPECT_EQ(plan_of(config, make_batch(requests, 16)).counts.workers, PlanCounts{}.workers);
}

TEST(Planner, LaunchesAreBalancedApart) {
  // The prefill dwarfs the decode, whose launch has the device to itself all the same.
  const Plan plan = plan_of(small_device(), make_batch({{1, 3072}, {4096, 4096}}, 16));
  EXPECT_EQ(plan.items[0].size(), 8U);
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
  config.merge = {};
  config.tiles[0].costs = {.key_ns = 1};
  config.tiles[0].step_keys = 1;
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
  config.max_partial_rows = 9;
  config.num_splits = 64;  // forced ones may not depend on the batch either
  EXPECT_NE(error(), "no error");
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
  const auto view = batch.view();
  const auto error = [&](auto spoil) {
    PlannerConfig config = small_device();
    spoil(config);
    return error_text([&] { AttentionPlan(config, view); });
  };
  EXPECT_EQ(error([](PlannerConfig&) {}), "no error");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_tiles = 0; }), "num_tiles is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_tiles = 5; }), "num_tiles is 5, legal: 1 … 4");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[2].max_item_tokens = 0; }),
            "tiles[2].max_item_tokens is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[1].groups_per_item = 0; }),
            "tiles[1].groups_per_item is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.block_size = 0; }),
            "block_size is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[0].workers = -1; }),
            "tiles[0].workers is -1, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[2].step_keys = 0; }),
            "tiles[2].step_keys is 0, legal: at least 1");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[1].ends_at_padding = true; }),
            "tiles[1].ends_at_padding is true, legal where tasks are taken: false");
  EXPECT_EQ(error([](PlannerConfig& c) { c.tiles[0].costs.key_ns = 0; }),
            "tiles[0].costs: a key takes 0 ns and 0 ns a token, legal: above 0 … 1e+15");
  EXPECT_EQ(error([](PlannerConfig& c) {
              c.tiles[1].few_tokens = 1;
              c.tiles[1].few.key_ns = 0;
            }),
            "tiles[1].few: a key takes 0 ns and 0 ns a token, legal: above 0 … 1e+15");
  EXPECT_NE(error([](PlannerConfig& c) { c.tiles[1].costs.token_key_ns = 1e300; }), "no error");
  EXPECT_NE(error([](PlannerConfig& c) { c.tiles[1].costs.key_ns = std::nan(""); }), "no error");
  EXPECT_EQ(error([](PlannerConfig& c) { c.num_splits = -1; }),
            "num_splits is -1, legal: at least 0 (0 = planned)");
  const PlannerConfig config = small_device();
  const auto pages_at = test::pages_at_of(1);
  EXPECT_EQ(error_text([&] { AttentionPlan(config, view).write(pages_at, {}); }),
            "pages_at holds 1 elements, legal: at least 2 (num_reqs)");
}

TEST(Planner, RefusesTooSmallOutputsUntouched) {
  const PlannerConfig config = small_device();
  const Batch batch = make_batch({{1, 3072}}, 16);
  const auto view = batch.view();
  const AttentionPlan plan(config, view);
  const auto pages_at = test::pages_at_of(1);
  std::vector<ClaWorkItem> items(7, ClaWorkItem{});
  std::vector<ClaMergeItem> merges(1, ClaMergeItem{});
  PlanOutput output;
  output.items[0] = items;
  output.merges = merges;
  EXPECT_EQ(error_text([&] { plan.write(pages_at, output); }),
            "PlanOutput::items holds 7 elements, legal: at least 8");
  items.resize(8);
  output.items[0] = items;
  output.merges = {};
  EXPECT_EQ(error_text([&] { plan.write(pages_at, output); }),
            "PlanOutput::merges holds 0 elements, legal: at least 1");
  for (const ClaWorkItem& item : items) EXPECT_EQ(item.kv_end, 0);
}

}  // namespace
}  // namespace clattn::detail
