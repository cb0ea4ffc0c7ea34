#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>

#include "plan_checker.hpp"

// Random batches against the plain checks of plan_checker.hpp. A failure prints the smallest batch
// that RapidCheck finds.

namespace clattn::detail {
namespace {

using test::Batch;
using test::make_batch;
using test::Plan;
using test::plan_problem;

constexpr int kRuns = 10000;

/// Runs `property` on kRuns random inputs of a fixed seed.
template <typename Property>
void expect_property(const Property& property) {
  rc::detail::TestParams params;
  params.seed = 20240611;
  params.maxSuccess = kRuns;
  const rc::detail::TestResult result =
      rc::detail::checkTestable(property, rc::detail::TestMetadata(), params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  ADD_FAILURE() << text.str();
}

std::int32_t between(std::int32_t low, std::int32_t high) {
  return *rc::gen::inRange(low, high + 1);
}

template <typename T>
T one_of(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

/// Empty, decoding, speculating, extending and prefilling requests over short and long histories.
test::Request any_request() {
  const std::int32_t query_len = between(0, one_of({1, 1, 5, 16, 17, 150}));
  return {query_len, query_len + between(0, one_of({0, 20, 300, 5000}))};
}

std::vector<test::Request> any_requests(std::int32_t most) {
  std::vector<test::Request> requests(static_cast<std::size_t>(between(0, most)));
  for (auto& request : requests) request = any_request();
  return requests;
}

PlannerConfig any_config() {
  PlannerConfig config;
  config.num_tiles = between(1, 3);
  const std::int32_t short_limit = one_of({1, 4, 16});
  config.tiles = {TileClass{short_limit, one_of({1, 3, 16})},
                  TileClass{short_limit + between(1, 60), between(1, 40)},
                  TileClass{0, one_of({16, 64, 128})}};
  for (TileClass& tile : config.tiles) {
    tile.joins_splits = *rc::gen::arbitrary<bool>();
    tile.splits_finer = *rc::gen::arbitrary<bool>();
    tile.resident_groups = one_of({0, 0, 1, 2});
  }
  config.block_size = one_of({1, 2, 3, 7, 16, 17, 32, 128});
  for (TileClass& tile : config.tiles) tile.groups_per_item = between(1, 9);
  config.compute_units = one_of({1, 2, 7, 64, 132});
  config.items_per_compute_unit = between(1, 4);
  config.min_split_keys = one_of({1, 32, 33, 256});
  config.max_split_query_len = one_of({1, 16, 64});
  config.deterministic_split_keys = one_of({1, 50, 512});
  config.max_partial_rows = one_of<std::int64_t>({0, 1, 2, 17, 300, 1 << 20});
  config.num_splits = one_of({0, 0, 0, 1, 2, 7, 1000});
  config.window = {one_of({-1, -1, 0, 5, 33, 1000}), one_of({-1, -1, 0, 7}),
                   one_of({0, 0, 0, 1, 4, 64, 1000})};
  config.bidirectional = one_of({false, false, true});
  config.item_order = one_of({ItemOrder::kHeavyFirst, ItemOrder::kLightFirst, ItemOrder::kAsCut});
  return config;
}

std::int32_t longest_query(const Batch& batch) {
  std::int32_t longest = 0;
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto row = static_cast<std::size_t>(r);
    longest = std::max(longest, batch.query_start_loc[row + 1] - batch.query_start_loc[row]);
  }
  return longest;
}

TEST(PlannerProperties, PlansAreCorrectAndWithinBounds) {
  expect_property([] {
    const PlannerConfig config = any_config();
    Batch batch = make_batch(any_requests(12), config.block_size);
    batch.causal = *rc::gen::arbitrary<bool>();
    Plan plan;
    RC_ASSERT(plan_problem(config, batch, &plan) == "");

    BatchLimits limits;
    limits.max_num_reqs = batch.num_reqs;
    limits.max_num_batched_tokens = batch.num_actual_tokens;
    limits.max_model_len = 0;
    for (const std::int32_t length : batch.seq_lens) {
      limits.max_model_len = std::max(limits.max_model_len, length);
    }
    const PlanCounts bound = plan_upper_bound(config, limits, longest_query(batch));
    for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
      RC_ASSERT(plan.counts.num_items[c] <= bound.num_items[c]);
    }
    RC_ASSERT(plan.counts.num_merges <= bound.num_merges);
    RC_ASSERT(plan.counts.num_partial_rows <= bound.num_partial_rows);
  });
}

/// What a request's own part of a plan looks like, free of its place in the batch.
using Part = std::vector<std::array<std::int32_t, 6>>;
Part part_of(const Plan& plan, const Batch& batch, std::int32_t request) {
  Part part;
  const std::int32_t start = batch.query_start_loc[static_cast<std::size_t>(request)];
  std::int32_t first_row = std::numeric_limits<std::int32_t>::max();
  for (const auto& items : plan.items) {
    for (const ClaWorkItem& item : items) {
      if (test::request_of(item) == request && item.partial_row >= 0) {
        first_row = std::min(first_row, item.partial_row);
      }
    }
  }
  for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
    for (const ClaWorkItem& item : plan.items[c]) {
      if (test::request_of(item) != request) continue;
      part.push_back({static_cast<std::int32_t>(c), item.q_row - start, item.q_count, item.kv_begin,
                      item.kv_end, item.partial_row < 0 ? -1 : item.partial_row - first_row});
    }
  }
  std::sort(part.begin(), part.end());
  return part;
}

TEST(PlannerProperties, DeterministicPlansAreFreeOfTheBatch) {
  expect_property([] {
    PlannerConfig config = any_config();
    config.split_policy = SplitPolicy::kDeterministic;
    config.max_partial_rows = std::numeric_limits<std::int64_t>::max();
    const std::vector<test::Request> requests = any_requests(8);
    const Batch batch = make_batch(requests, config.block_size);
    Plan together;
    RC_ASSERT(plan_problem(config, batch, &together) == "");
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const Batch own = make_batch({requests[r]}, config.block_size);
      Plan alone;
      RC_ASSERT(plan_problem(config, own, &alone) == "");
      RC_ASSERT(part_of(together, batch, static_cast<std::int32_t>(r)) == part_of(alone, own, 0));
    }
  });
}

TEST(PlannerProperties, FittedDeterministicPlansAreNeverRefused) {
  expect_property([] {
    PlannerConfig config = any_config();
    config.split_policy = SplitPolicy::kDeterministic;
    config.num_splits = 0;
    config.max_partial_rows = between(0, 5000);
    const Batch batch = make_batch(any_requests(12), config.block_size);
    BatchLimits limits;
    limits.max_num_reqs = batch.num_reqs + between(0, 3);
    limits.max_num_batched_tokens = batch.num_actual_tokens + between(0, 50);
    limits.max_model_len = between(0, 100);
    for (const std::int32_t length : batch.seq_lens) {
      limits.max_model_len = std::max(limits.max_model_len, length);
    }
    config.deterministic_split_keys = fit_deterministic_split_keys(config, limits);
    Plan plan;
    RC_ASSERT(plan_problem(config, batch, &plan) == "");
    const PlanCounts bound = plan_upper_bound(config, limits);
    RC_ASSERT(plan.counts.num_partial_rows <= bound.num_partial_rows);
    RC_ASSERT(plan.counts.num_items[0] <= bound.num_items[0]);
  });
}

double cost_of(const PlannerConfig& config, const ClaWorkItem& item) {
  return static_cast<double>(item.kv_end - item.kv_begin) *
         std::max(item.q_count, config.max_split_query_len);
}

/// Latest end when every work-group goes to the compute unit that is free first, over the mean.
double imbalance(const PlannerConfig& config, std::int32_t groups_per_item,
                 const std::vector<ClaWorkItem>& items) {
  std::vector<double> busy(static_cast<std::size_t>(config.compute_units), 0.0);
  double total = 0;
  for (const ClaWorkItem& item : items) {
    for (std::int32_t group = 0; group < groups_per_item; ++group) {
      std::pop_heap(busy.begin(), busy.end(), std::greater<>());
      busy.back() += cost_of(config, item);
      total += cost_of(config, item);
      std::push_heap(busy.begin(), busy.end(), std::greater<>());
    }
  }
  return *std::max_element(busy.begin(), busy.end()) / (total / config.compute_units);
}

// Where a fair share is long against pages and shortest splits, greedy scheduling of any order ends
// within mean + share, plus what whole pages add.
TEST(PlannerProperties, RaggedBatchesAreBalanced) {
  int num_judged = 0;
  expect_property([&] {
    PlannerConfig config = any_config();
    config.num_splits = 0;
    config.max_partial_rows = 1 << 24;
    config.items_per_compute_unit = between(3, 4);
    config.min_split_keys = one_of({1, 32, 64});
    config.block_size = one_of({1, 7, 16});
    config.compute_units = one_of({2, 7, 16, 64});
    for (TileClass& tile : config.tiles)
      tile.resident_groups = 0;  // whole waves are no fair shares
    std::vector<test::Request> requests(static_cast<std::size_t>(between(1, 30)));
    for (auto& request : requests) {
      request = any_request();
      request.seq_len += between(0, one_of({10, 2000, 100000}));
    }
    const Batch batch = make_batch(requests, config.block_size);
    Plan plan;
    RC_ASSERT(plan_problem(config, batch, &plan) == "");
    for (std::size_t c = 0; c < std::size(plan.items); ++c) {
      const auto& items = plan.items[c];
      const std::int32_t groups_per_item = config.tiles.at(c).groups_per_item;
      double total = 0;
      std::int32_t most_tokens = config.max_split_query_len;
      for (const ClaWorkItem& item : items) {
        total += cost_of(config, item) * groups_per_item;
        most_tokens = std::max(most_tokens, item.q_count);
      }
      const double share_keys =
          total / most_tokens / (config.compute_units * config.items_per_compute_unit);
      const double share_of_item = share_keys / groups_per_item;
      if (share_of_item < 32 * config.block_size ||
          share_of_item < 2 * config.min_split_keys + 32) {
        continue;
      }
      RC_ASSERT(imbalance(config, groups_per_item, items) <= 1.35);
      ++num_judged;
    }
  });
  EXPECT_GT(num_judged, kRuns / 10);
}

}  // namespace
}  // namespace clattn::detail
