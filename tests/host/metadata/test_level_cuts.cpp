#include "metadata/level_cuts.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/checked.hpp"
#include "host/metadata/plan_checker.hpp"
#include "metadata/validate.hpp"
#include "support/properties.hpp"

namespace clattn::detail {
namespace {

using test::between;
using test::one_of;

constexpr std::int32_t kPageSize = 16;

/// As decode_ring on an H200: 132 groups, a step of 128 keys, and so many KV heads.
TileClass ring_of(std::int32_t kv_heads) {
  TileClass tile;
  tile.max_query_len = tile.max_item_tokens = 1;
  tile.groups_per_item = kv_heads;
  tile.merges_splits = true;
  tile.step_keys = 128;
  tile.workers = 132;
  tile.dealing = Dealing::kDealt;
  tile.launch_ns = 3400;
  tile.costs = {
      .task_ns = 2900, .split_ns = 2500, .key_ns = 5.4, .token_key_ns = 0, .parallel = 76};
  return tile;
}

/// What the list of some cuts comes to, read as groups read it.
struct Read {
  std::vector<double> loads;
  std::vector<std::int32_t> items;  ///< of each team
  std::int32_t moved = 0, rows = 0;
  bool is_whole = true;  ///< every key once, in ranges of whole steps
};
Read read(const LevelCuts& level, const TileClass& tile, std::int32_t step_pages,
          const std::vector<std::int32_t>& keys) {
  const std::int32_t teams = LevelCuts::teams_of(tile);
  Read result;
  result.loads.resize(static_cast<std::size_t>(teams));
  result.items.resize(static_cast<std::size_t>(teams));
  std::set<std::int32_t> positions;
  const auto take = [&](std::int32_t position, std::int32_t count, bool is_split) {
    const std::int32_t round = position / teams, offset = position % teams;
    const auto team = static_cast<std::size_t>(round % 2 == 0 ? offset : teams - 1 - offset);
    result.loads[team] += task_ns(tile, count, 1, is_split);
    ++result.items[team];
    const bool is_new = positions.insert(position).second;
    result.is_whole = result.is_whole && is_new && position < level.num_items();
  };
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    std::int32_t end = page_count(keys[i], kPageSize);
    for (const MovedRange& range : level.moved(index)) {
      result.is_whole = result.is_whole && range.end_page == end &&
                        range.begin_page % step_pages == 0 && range.begin_page >= step_pages &&
                        end - range.begin_page >= step_pages;
      const std::int32_t last = keys_of_pages(end, kPageSize, keys[i]);
      take(range.position, last - range.begin_page * kPageSize, true);
      end = range.begin_page;
    }
    const auto moved = static_cast<std::int32_t>(level.moved(index).size());
    take(level.position(index), keys_of_pages(end, kPageSize, keys[i]), moved > 0);
    result.moved += moved;
    if (moved > 0) result.rows += moved + 1;
  }
  return result;
}

Read level_of(const TileClass& tile, const std::vector<std::int32_t>& keys) {
  LevelCuts level;
  for (const std::int32_t count : keys) level.add(tile, count, 1);
  const std::int32_t step_pages = page_count(tile.step_keys, kPageSize);
  level.cut(tile, kPageSize, step_pages);
  Read result = read(level, tile, step_pages, keys);
  result.is_whole = result.is_whole && result.rows == level.num_rows();
  return result;
}

double busiest(const Read& read) {
  return *std::ranges::max_element(read.loads);
}

// 48 requests for 33 teams: dealt whole, some have two and others one.
TEST(LevelCuts, TeamsGetTheSame) {
  const TileClass tile = ring_of(4);
  const std::vector<std::int32_t> keys(48, 3000);
  const Read level = level_of(tile, keys);
  EXPECT_TRUE(level.is_whole);
  const double mean = 48 * task_ns(tile, 3000, 1, false) / 33;
  const double of_ranges = tile.costs.task_ns + 2 * tile.costs.split_ns;
  EXPECT_LT(busiest(level), mean + of_ranges);
  EXPECT_LT(level.moved, 33);
}

TEST(LevelCuts, WhatIsEvenStaysWhole) {
  EXPECT_EQ(level_of(ring_of(4), std::vector<std::int32_t>(66, 3000)).moved, 0);
  EXPECT_EQ(level_of(ring_of(8), {}).moved, 0);
  EXPECT_EQ(level_of(ring_of(8), {0, 1, 100}).moved, 0) << "less than two steps";
}

TEST(LevelCuts, OneTileGoesToAll) {
  const Read level = level_of(ring_of(8), {100000});
  EXPECT_TRUE(level.is_whole);
  EXPECT_EQ(level.items, std::vector<std::int32_t>(16, 1));
}

TEST(LevelCuts, AreWholeAndNoTeamGetsMoreThanBefore) {
  test::expect_property([] {
    TileClass tile = ring_of(one_of({1, 2, 4, 8, 33, 66}));
    tile.step_keys = one_of({16, 100, 128, 512});
    tile.workers = std::max(2 * tile.groups_per_item, between(2, 264));
    tile.costs.parallel = 0;
    std::vector<std::int32_t> keys(static_cast<std::size_t>(between(0, one_of({3, 40, 300}))));
    const std::int32_t most = one_of({100, 5000, 200000});
    for (auto& count : keys) count = between(0, most);
    if (*rc::gen::arbitrary<bool>()) std::ranges::fill(keys, most);
    const Read level = level_of(tile, keys);
    RC_ASSERT(level.is_whole);
    const std::int32_t teams = LevelCuts::teams_of(tile);
    RC_ASSERT(level.moved < teams);
    RC_ASSERT(level.rows <= LevelCuts::most_rows(tile));
    const std::int32_t rounds = ceil_div(static_cast<std::int32_t>(keys.size()), teams);
    for (const std::int32_t items : level.items)
      RC_ASSERT(items <= rounds + LevelCuts::kMoreRounds);
    TileClass uncut = tile;
    uncut.workers = teams;
    std::vector<TaskRun> runs(keys.size());
    std::ranges::transform(keys, runs.begin(), [&](std::int32_t count) {
      return TaskRun{task_ns(tile, count, 1, false), 1};
    });
    std::ranges::sort(runs, std::greater{}, &TaskRun::ns);
    const double before = expected_end_ns(uncut, runs, 0);
    const double price = tile.costs.split_ns;
    RC_ASSERT(busiest(level) <= (before + price) * (1 + 1e-9));
  });
}

// As a plan: the groups of whole teams, and an earlier end than by equal splits.
TEST(LevelCuts, ServeWhereTheyEndEarlier) {
  PlannerConfig config;
  config.num_tiles = 1;
  config.tiles[0] = ring_of(8);
  config.max_partial_rows = 1 << 20;
  const auto plan_of = [&](std::size_t requests, std::int32_t keys) {
    test::Plan plan;
    const auto batch = test::make_batch(std::vector<test::Request>(requests, {1, keys}), kPageSize);
    EXPECT_EQ(plan_problem(config, batch, &plan), "");
    return plan;
  };
  const test::Plan level = plan_of(20, 5000);
  EXPECT_TRUE(level.cuts.classes[0].level);
  EXPECT_EQ(level.counts.workers[0], 16 * 8);
  EXPECT_EQ(level.counts.slower[0], 0) << "no launch beside it";
  EXPECT_FALSE(plan_of(16, 5000).cuts.classes[0].level) << "even already";
  EXPECT_FALSE(plan_of(1, 1000).cuts.classes[0].level) << "too short";
  EXPECT_FALSE(plan_of(2000, 5000).cuts.classes[0].level) << "more tiles than are moved";

  config.fixed_groups = true;
  const test::Plan split = plan_of(20, 5000);
  EXPECT_FALSE(split.cuts.classes[0].level);
  EXPECT_EQ(split.counts.workers[0], 0);
  EXPECT_LT(level.cuts.end_ns, 0.95 * split.cuts.end_ns);
  config.fixed_groups = false;
  config.max_partial_rows = 10;
  EXPECT_FALSE(plan_of(20, 5000).cuts.classes[0].level) << "no room for its partial results";
  config.max_partial_rows = 1 << 20;
  config.tiles[0].dealing = Dealing::kTaken;
  EXPECT_FALSE(plan_of(20, 5000).cuts.classes[0].level) << "it would not stop at padding";
}

}  // namespace
}  // namespace clattn::detail
