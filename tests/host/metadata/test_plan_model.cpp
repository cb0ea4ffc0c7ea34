
#include "metadata/plan/plan_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

// When launches are expected to end, against schedules that are played through task by task.

namespace clattn::detail {
namespace {

TileClass tile_of(std::int32_t workers, Dealing dealing) {
  TileClass tile{.max_item_tokens = 1};
  tile.workers = workers;
  tile.dealing = dealing;
  return tile;
}

/// What keeps each work-group busy, if nobody slows another down.
std::vector<double> played(const std::vector<TaskRun>& runs, std::size_t workers, Dealing dealing) {
  std::vector<double> busy(workers, 0.0);
  std::size_t at = 0;
  for (const TaskRun& run : runs) {
    for (std::int64_t i = 0; i < run.tasks; ++i, ++at) {
      const std::size_t place = at % workers;
      const std::size_t next =
          dealing == Dealing::kDealt
              ? (at / workers % 2 == 0 ? place : workers - 1 - place)
              : static_cast<std::size_t>(std::min_element(busy.begin(), busy.end()) - busy.begin());
      busy[next] += run.ns;
    }
  }
  return busy;
}

std::vector<TaskRun> any_runs(std::mt19937& random) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  std::vector<TaskRun> runs(static_cast<std::size_t>(between(1, 12)));
  for (TaskRun& run : runs) {
    run = {std::exp2(between(0, 80) * 0.1), between(0, 3) == 0 ? between(1, 600) : between(1, 30)};
  }
  std::sort(runs.begin(), runs.end(),
            [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
  return runs;
}

TEST(PlanModel, DealtTasksEndWhenTheBusiestGroupDoes) {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const std::vector<TaskRun> runs = any_runs(random);
    for (const std::int32_t workers : {1, 2, 7, 64, 132, 512}) {
      const auto busy = played(runs, static_cast<std::size_t>(workers), Dealing::kDealt);
      const double latest = *std::max_element(busy.begin(), busy.end());
      EXPECT_NEAR(expected_end_ns(tile_of(workers, Dealing::kDealt), runs, 0), latest,
                  1e-9 * latest);
    }
  }
}

// Heaviest first, who is free takes the next one: the bounds are no schedule, but close to one. The
// model adds a tenth of the longest task.
TEST(PlanModel, TakenTasksEndAboutWhenAScheduleDoes) {
  std::mt19937 random(6);
  for (int round = 0; round < 2000; ++round) {
    const std::vector<TaskRun> runs = any_runs(random);
    for (const std::int32_t workers : {1, 2, 7, 132}) {
      const auto busy = played(runs, static_cast<std::size_t>(workers), Dealing::kTaken);
      const double latest = *std::max_element(busy.begin(), busy.end());
      const double expected = expected_end_ns(tile_of(workers, Dealing::kTaken), runs, 0);
      EXPECT_LE(expected, latest + 0.1 * runs.front().ns + 1e-9 * latest);
      EXPECT_GE(expected, 0.75 * latest);  // a bound that no list schedule exceeds by a third
    }
  }
}

// Groups that run at once slow each other down: played through from one end to the next.
TEST(PlanModel, WhatGroupsShareSlowsThemWhileTheyAreMany) {
  std::mt19937 random(8);
  for (int round = 0; round < 500; ++round) {
    const std::vector<TaskRun> runs = any_runs(random);
    for (const Dealing dealing : {Dealing::kDealt, Dealing::kTaken}) {
      TileClass tile = tile_of(132, dealing);
      tile.costs.parallel = 80;
      std::vector<double> left = played(runs, 132, dealing);
      double keys = std::accumulate(left.begin(), left.end(), 0.0);
      std::sort(left.begin(), left.end());
      double now = 0;
      double done = 0;
      for (std::size_t i = 0; i < left.size(); ++i) {
        const auto at_work = static_cast<double>(left.size() - i);
        now += (left[i] - done) * (1 + at_work / tile.costs.parallel);
        done = left[i];
      }
      const double expected = expected_end_ns(tile, runs, shared_ns(tile, keys, 1));
      EXPECT_NEAR(expected, now, dealing == Dealing::kDealt ? 1e-9 * now : 0.25 * now);
    }
  }
}

TEST(PlanModel, StepsAreCountedWhole) {
  TileClass tile = tile_of(8, Dealing::kDealt);
  tile.step_keys = 128;
  tile.costs = {.task_ns = 1000, .split_ns = 500, .key_ns = 2, .token_key_ns = 0.5};
  EXPECT_DOUBLE_EQ(task_ns(tile, 129, 4, false), 1000 + 256 * 4);
  EXPECT_DOUBLE_EQ(task_ns(tile, 128, 4, true), 1500 + 128 * 4);
  EXPECT_DOUBLE_EQ(task_ns(tile, 0, 1, false), 1000);
}

TEST(PlanModel, FewTokensHaveCostsOfTheirOwn) {
  TileClass tile = tile_of(8, Dealing::kDealt);
  tile.costs = {.task_ns = 1000, .split_ns = 500, .key_ns = 8, .parallel = 400};
  tile.few_tokens = 16;
  tile.few = {.task_ns = 700, .split_ns = 200, .key_ns = 4, .parallel = 20};
  EXPECT_DOUBLE_EQ(task_ns(tile, 100, 16, true), 900 + 100 * 4);
  EXPECT_DOUBLE_EQ(task_ns(tile, 100, 17, true), 1500 + 100 * 8);
  EXPECT_DOUBLE_EQ(shared_ns(tile, 100, 16), 20);
  EXPECT_DOUBLE_EQ(shared_ns(tile, 100, 17), 2);
  TileCounts tiles;  // alike in time, not in kind
  tiles.add(tile, 1000, 32, 1);
  tiles.add(tile, 2000, 1, 1);
  tile.workers = 1;
  const double both = task_ns(tile, 1000, 32, false) + task_ns(tile, 2000, 1, false) +
                      shared_ns(tile, 1000, 32) + shared_ns(tile, 2000, 1);
  EXPECT_DOUBLE_EQ(tiles.judge(tile, {}, CutChoice{}.share_ns).end_ns, both);
}

TEST(PlanModel, TilesAreCutIntoAsManySplitsAsTheyHoldShares) {
  EXPECT_EQ(splits_of(0.3, 100), 1);
  EXPECT_EQ(splits_of(1.8, 100), 1);
  EXPECT_EQ(splits_of(1.9, 100), 2);  // nearly two
  EXPECT_EQ(splits_of(7.99, 100), 8);
  EXPECT_EQ(splits_of(7.5, 100), 7);
  EXPECT_EQ(splits_of(7.5, 3), 3);
  EXPECT_EQ(splits_of(std::numeric_limits<double>::infinity(), 5), 5);
}

// What is counted by classes of length is close to what each tile would say.
TEST(PlanModel, CountedTilesAreJudgedAsTheTilesThemselves) {
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    TileClass tile = tile_of(132, Dealing::kDealt);
    tile.groups_per_item = 8;
    tile.merges_splits = true;
    tile.costs = {.task_ns = 2000, .split_ns = 1500, .key_ns = 6, .parallel = 60};
    TileCounts tiles;
    std::vector<std::int32_t> lengths(std::uniform_int_distribution<std::size_t>(1, 300)(random));
    for (std::int32_t& keys : lengths) {
      keys = std::uniform_int_distribution<std::int32_t>(1, 9000)(random);
      tiles.add(tile, keys, 1, std::max(keys / 128, 1));
    }
    for (const int candidate : {3, 7, 15}) {
      const double share = tiles.share_ns(tile, candidate);
      std::vector<TaskRun> runs;
      double shared = 0;
      for (const std::int32_t keys : lengths) {
        const int splits = splits_of(keys_ns(tile, keys, 1) / share, std::max(keys / 128, 1));
        runs.push_back({task_ns(tile, static_cast<double>(keys) / splits, 1, splits > 1),
                        std::int64_t{8} * splits});
        shared += 8 * shared_ns(tile, keys, 1);
      }
      std::sort(runs.begin(), runs.end(),
                [](const TaskRun& a, const TaskRun& b) { return a.ns > b.ns; });
      const double exact = expected_end_ns(tile, runs, shared);
      EXPECT_NEAR(tiles.judge(tile, {}, share).end_ns, exact, 0.1 * exact) << lengths.size();
    }
  }
}

// A gap cuts a tile in two and wants a merge, even where nothing else is cut.
TEST(PlanModel, GapsArePartialResultsThatAreMerged) {
  TileClass tile = tile_of(8, Dealing::kDealt);
  tile.step_keys = 64;
  tile.costs = {.task_ns = 1000, .split_ns = 500, .key_ns = 2};
  const MergeCosts merge{.launch_ns = 5000, .token_ns = 30, .row_ns = 7};
  TileCounts tiles;
  tiles.add(tile, 6400, 4, 10);
  const CutChoice plain = tiles.judge(tile, merge);
  EXPECT_FALSE(plain.merges);
  tiles.add(tile, 6400, 4, 10, true);
  const CutChoice gap = tiles.judge(tile, merge);
  EXPECT_TRUE(gap.merges);
  EXPECT_DOUBLE_EQ(gap.rows, 8);
  EXPECT_DOUBLE_EQ(gap.merge_ns, 4 * 30 + 8 * 7);
  EXPECT_DOUBLE_EQ(gap.even.work_ns, 2 * task_ns(tile, 6400, 4, true) + task_ns(tile, 1, 4, true));
  // Finer cuts cover both sides.
  const double half = keys_ns(tile, 3200, 4);
  EXPECT_DOUBLE_EQ(tiles.judge(tile, merge, half).rows, 2 * 8);
  tile.merges_splits = true;
  EXPECT_FALSE(tiles.judge(tile, merge).merges);
}

}  // namespace
}  // namespace clattn::detail
