#include "metadata/plan/rebalanced_cuts.hpp"

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
  tile.merges_splits = tile.ends_at_padding = true;
  tile.step_keys = 128;
  tile.workers = 132;
  tile.dealing = Dealing::kDealt;
  tile.launch_ns = 3400;
  tile.costs = {
      .task_ns = 2900, .split_ns = 2500, .key_ns = 5.4, .token_key_ns = 0, .parallel = 76};
  return tile;
}

/// What groups get that work through a list.
struct Outcome {
  std::vector<double> loads;
  std::vector<std::int32_t> items;  ///< of each set
  std::int32_t moved = 0, rows = 0;
  bool is_whole = true;  ///< every key once, in ranges of whole steps
};
Outcome outcome_of(const RebalancedCuts& cuts, const TileClass& tile, std::int32_t step_pages,
                   const std::vector<std::int32_t>& keys) {
  const std::int32_t sets = RebalancedCuts::sets_of(tile);
  Outcome result;
  result.loads.resize(static_cast<std::size_t>(sets));
  result.items.resize(static_cast<std::size_t>(sets));
  std::set<std::int32_t> positions;
  const auto take = [&](std::int32_t position, std::int32_t count, bool is_split) {
    const std::int32_t round = position / sets, offset = position % sets;
    const auto set = static_cast<std::size_t>(round % 2 == 0 ? offset : sets - 1 - offset);
    result.loads[set] += task_ns(tile, count, 1, is_split);
    ++result.items[set];
    const bool is_new = positions.insert(position).second;
    result.is_whole = result.is_whole && is_new && position < cuts.num_items();
  };
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    std::int32_t end = page_count(keys[i], kPageSize);
    for (const MovedRange& range : cuts.moved(index)) {
      result.is_whole = result.is_whole && range.end_page == end &&
                        range.begin_page % step_pages == 0 && range.begin_page >= step_pages &&
                        end - range.begin_page >= step_pages;
      const std::int32_t last = keys_of_pages(end, kPageSize, keys[i]);
      take(range.position, last - range.begin_page * kPageSize, true);
      end = range.begin_page;
    }
    const auto moved = static_cast<std::int32_t>(cuts.moved(index).size());
    take(cuts.position(index), keys_of_pages(end, kPageSize, keys[i]), moved > 0);
    result.moved += moved;
    if (moved > 0) result.rows += moved + 1;
  }
  return result;
}

Outcome rebalanced(const TileClass& tile, const std::vector<std::int32_t>& keys) {
  RebalancedCuts cuts;
  for (const std::int32_t count : keys) cuts.add(tile, count, 1);
  const std::int32_t step_pages = page_count(tile.step_keys, kPageSize);
  cuts.cut(tile, kPageSize, step_pages);
  Outcome result = outcome_of(cuts, tile, step_pages, keys);
  result.is_whole = result.is_whole && result.rows == cuts.num_rows();
  return result;
}

double busiest(const Outcome& outcome) {
  return *std::ranges::max_element(outcome.loads);
}

// 48 requests for 33 sets of groups: dealt whole, some sets have two and others one.
TEST(RebalancedCuts, SetsGetTheSame) {
  const TileClass tile = ring_of(4);
  const std::vector<std::int32_t> keys(48, 3000);
  const Outcome outcome = rebalanced(tile, keys);
  EXPECT_TRUE(outcome.is_whole);
  const double mean = 48 * task_ns(tile, 3000, 1, false) / 33;
  const double of_ranges = tile.costs.task_ns + 2 * tile.costs.split_ns;
  EXPECT_LT(busiest(outcome), mean + of_ranges);
  EXPECT_LT(outcome.moved, 33);
}

TEST(RebalancedCuts, EvenOrShortTilesStayWhole) {
  EXPECT_EQ(rebalanced(ring_of(4), std::vector<std::int32_t>(66, 3000)).moved, 0);
  EXPECT_EQ(rebalanced(ring_of(8), {}).moved, 0);
  EXPECT_EQ(rebalanced(ring_of(8), {0, 1, 100}).moved, 0) << "less than two steps";
}

TEST(RebalancedCuts, OneLongTileGoesToAll) {
  const Outcome outcome = rebalanced(ring_of(8), {100000});
  EXPECT_TRUE(outcome.is_whole);
  EXPECT_EQ(outcome.items, std::vector<std::int32_t>(16, 1));
}

TEST(RebalancedCuts, CoverEveryKeyAndAddASplitAtMost) {
  test::expect_property([] {
    TileClass tile = ring_of(one_of({1, 2, 4, 8, 33, 66}));
    tile.step_keys = one_of({16, 100, 128, 512});
    tile.workers = std::max(2 * tile.groups_per_item, between(2, 264));
    tile.costs.parallel = 0;
    std::vector<std::int32_t> keys(static_cast<std::size_t>(between(0, one_of({3, 40, 300}))));
    const std::int32_t most = one_of({100, 5000, 200000});
    for (auto& count : keys) count = between(0, most);
    if (*rc::gen::arbitrary<bool>()) std::ranges::fill(keys, most);
    const Outcome outcome = rebalanced(tile, keys);
    RC_ASSERT(outcome.is_whole);
    const std::int32_t sets = RebalancedCuts::sets_of(tile);
    RC_ASSERT(outcome.moved < sets);
    RC_ASSERT(outcome.rows <= RebalancedCuts::most_rows(tile));
    const std::int32_t rounds = ceil_div(static_cast<std::int32_t>(keys.size()), sets);
    for (const std::int32_t items : outcome.items)
      RC_ASSERT(items <= rounds + RebalancedCuts::kExtraRounds);
    TileClass uncut = tile;
    uncut.workers = sets;
    std::vector<TaskRun> runs(keys.size());
    std::ranges::transform(keys, runs.begin(), [&](std::int32_t count) {
      return TaskRun{task_ns(tile, count, 1, false), 1};
    });
    std::ranges::sort(runs, std::greater{}, &TaskRun::ns);
    const double before = expected_end_ns(uncut, runs, 0);
    RC_ASSERT(busiest(outcome) <= (before + tile.costs.split_ns) * (1 + 1e-9));
  });
}

PlannerConfig planner_of(const TileClass& tile) {
  PlannerConfig config;
  config.num_tiles = 1;
  config.tiles[0] = tile;
  config.max_partial_rows = 1 << 20;
  return config;
}

test::Plan plan_of(const PlannerConfig& config, const std::vector<test::Request>& requests) {
  test::Plan plan;
  EXPECT_EQ(plan_problem(config, test::make_batch(requests, kPageSize), &plan), "");
  return plan;
}

/// When a plan's launches end, by its lists.
double end_of(const test::Plan& plan, const PlannerConfig& config) {
  TileClass tile = config.tiles[0];
  if (plan.counts.rebalanced) tile.workers = plan.counts.workers[0];
  std::vector<TaskRun> runs;
  runs.reserve(plan.items[0].size());
  double shared = 0;
  for (const ClaWorkItem& item : plan.items[0]) {
    const double keys = item.kv_end - item.kv_begin;
    const double ns = item.q_count > 0 ? task_ns(tile, keys, 1, item.partial_row >= 0) : 0;
    runs.push_back({ns, tile.groups_per_item});
    if (item.q_count > 0) shared += shared_ns(tile, keys, 1) * tile.groups_per_item;
  }
  if (!plan.counts.rebalanced) std::ranges::sort(runs, std::greater{}, &TaskRun::ns);
  double end = tile.launch_ns + expected_end_ns(tile, runs, shared);
  if (plan.merges.empty()) return end;
  end += config.merge.launch_ns;
  for (const ClaMergeItem& merge : plan.merges) end += merge_ns(config.merge, 1, merge.num_splits);
  return end;
}

// By what is written, and not by what was predicted. 5 % for tiles that the other plan counts as
// equal.
TEST(RebalancedCuts, AreChosenWhereTheyEndEarlier) {
  double of_all = 0;
  int chosen = 0;
  test::expect_property(
      [&] {
        TileClass tile = ring_of(one_of({1, 2, 4, 8}));
        tile.workers = one_of({78, 108, 114, 132});
        tile.costs.key_ns = one_of({2.7, 5.4, 9.2});
        tile.costs.parallel = one_of({0.0, 61.5, 76.0});
        tile.merges_splits = *rc::gen::arbitrary<bool>();
        PlannerConfig config = planner_of(tile);
        config.merge = {.launch_ns = 3300, .token_ns = 20, .row_ns = 20};
        std::vector<test::Request> requests(static_cast<std::size_t>(between(1, 60)));
        const std::int32_t most = one_of({300, 3000, 30000, 60000});
        const std::int32_t least = one_of({1, most / 4, most});
        for (auto& request : requests) request = {1, between(least, most)};
        const test::Plan rebalanced = plan_of(config, requests);
        const auto count = static_cast<std::int32_t>(requests.size());
        const PlanCounts bound = plan_upper_bound(
            config, {.max_num_reqs = count, .max_num_batched_tokens = count, .max_model_len = most},
            1);
        RC_ASSERT(rebalanced.counts.num_items[0] <= bound.num_items[0]);
        RC_ASSERT(rebalanced.counts.num_partial_rows <= bound.num_partial_rows);
        RC_ASSERT(rebalanced.counts.num_merges <= bound.num_merges);
        RC_ASSERT(rebalanced.counts.most_splits <= bound.most_splits);
        config.fixed_groups = true;
        const test::Plan other = plan_of(config, requests);
        RC_ASSERT(!other.counts.rebalanced);
        if (!rebalanced.counts.rebalanced) return;
        const double ratio = end_of(rebalanced, config) / end_of(other, config);
        RC_ASSERT(ratio <= 1.05);
        of_all += ratio;
        ++chosen;
      },
      2000);
  EXPECT_GT(chosen, 200 / test::kRunsDivisor);
  EXPECT_LT(of_all / chosen, 0.96);
}

TEST(RebalancedCuts, UseWholeSetsOfGroups) {
  PlannerConfig config = planner_of(ring_of(8));
  const auto plan_of_equal = [&](std::size_t requests, std::int32_t keys) {
    return plan_of(config, std::vector<test::Request>(requests, {1, keys}));
  };
  const test::Plan rebalanced = plan_of_equal(20, 5000);
  EXPECT_TRUE(rebalanced.counts.rebalanced);
  EXPECT_EQ(rebalanced.counts.workers[0], 16 * 8);
  EXPECT_EQ(rebalanced.counts.slower[0], 0) << "no launch beside it";
  EXPECT_FALSE(plan_of_equal(16, 5000).counts.rebalanced) << "even already";
  EXPECT_FALSE(plan_of_equal(1, 1000).counts.rebalanced) << "too short";
  EXPECT_FALSE(plan_of_equal(2000, 5000).counts.rebalanced) << "too many tiles";
  EXPECT_FALSE(plan_of_equal(20, 200).counts.rebalanced) << "less than two steps";

  config.fixed_groups = true;
  EXPECT_EQ(plan_of_equal(20, 5000).counts.workers[0], 0);
  config.fixed_groups = false;
  config.max_partial_rows = 10;
  EXPECT_FALSE(plan_of_equal(20, 5000).counts.rebalanced) << "no room for its partial results";
  config.max_partial_rows = 1 << 20;
  config.tiles[0].ends_at_padding = false;
  EXPECT_FALSE(plan_of_equal(20, 5000).counts.rebalanced) << "its kernel does not stop at padding";
}

}  // namespace
}  // namespace clattn::detail
