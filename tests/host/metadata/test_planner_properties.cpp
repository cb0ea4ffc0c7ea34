#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "host/metadata/plan_of_lengths.hpp"
#include "support/properties.hpp"

// Random batches against the plain checks of plan_checker.hpp. A failure prints the smallest batch
// that RapidCheck finds.

namespace clattn::detail {
namespace {

using test::Batch;
using test::between;
using test::expect_property;
using test::make_batch;
using test::one_of;
using test::Plan;
using test::plan_problem;

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
  config.last_is_wide = config.num_tiles > 1 && *rc::gen::arbitrary<bool>();
  for (TileClass& tile : config.tiles) {
    tile.merges_splits = *rc::gen::arbitrary<bool>();
    tile.step_keys = one_of({1, 32, 33, 128});
    tile.workers = one_of({1, 2, 7, 64, 132, 1500});
    tile.dealing = one_of({Dealing::kTaken, Dealing::kDealt});
    tile.ends_at_padding = tile.dealing == Dealing::kDealt && *rc::gen::arbitrary<bool>();
    tile.launch_ns = one_of({0, 3000});
    tile.costs = {.task_ns = one_of({0.0, 10.0, 2000.0}),
                  .split_ns = one_of({0.0, 0.5, 1500.0}),
                  .key_ns = one_of({0.5, 6.0, 900.0}),
                  .token_key_ns = one_of({0.0, 0.0, 3.0}),
                  .parallel = one_of({0.0, 0.0, 0.4, 0.9}) * tile.workers};
    tile.few_tokens = one_of({0, 0, 1, 16});
    tile.few = tile.costs;
    tile.few.key_ns = one_of({0.2, 3.0, 700.0});
  }
  config.merge = {.launch_ns = one_of({0.0, 50.0, 5000.0}),
                  .token_ns = one_of({0.0, 20.0}),
                  .row_ns = one_of({0.0, 1.0, 30.0})};
  config.block_size = one_of({1, 2, 3, 7, 16, 17, 32, 128});
  for (TileClass& tile : config.tiles) tile.groups_per_item = between(1, 9);
  config.max_split_query_len = one_of({1, 16, 64});
  config.deterministic_split_keys = one_of({1, 50, 512});
  config.max_partial_rows = one_of<std::int64_t>({0, 1, 2, 17, 300, 1 << 20});
  config.num_splits = one_of({0, 0, 0, 1, 2, 7, 1000});
  config.window = {one_of({-1, -1, 0, 5, 33, 1000}), one_of({-1, -1, 0, 7}),
                   one_of({0, 0, 0, 1, 4, 64, 1000}), one_of({0, 0, 1, 3, 30})};
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

BatchLimits limits_of(const Batch& batch) {
  BatchLimits limits;
  limits.max_num_reqs = batch.num_reqs;
  limits.max_num_batched_tokens = batch.num_actual_tokens;
  limits.max_model_len = 0;
  for (const std::int32_t length : batch.seq_lens)
    limits.max_model_len = std::max(limits.max_model_len, length);
  return limits;
}

void assert_within_bounds(const PlannerConfig& config, const Batch& batch, const Plan& plan) {
  const PlanCounts bound = plan_upper_bound(config, limits_of(batch), longest_query(batch));
  for (std::size_t c = 0; c < kMaxTileClasses; ++c)
    RC_ASSERT(plan.counts.num_items[c] <= bound.num_items[c]);
  RC_ASSERT(plan.counts.num_merges <= bound.num_merges);
  RC_ASSERT(plan.counts.most_splits <= bound.most_splits);
  RC_ASSERT(plan.counts.num_partial_rows <= bound.num_partial_rows);
  RC_ASSERT(plan.counts.num_listed <= bound.num_listed);
  RC_ASSERT(plan.counts.num_gap_ints <= bound.num_gap_ints);
}

TEST(PlannerProperties, PlansAreCorrectAndWithinBounds) {
  expect_property([] {
    const PlannerConfig config = any_config();
    Batch batch = make_batch(any_requests(12), config.block_size);
    batch.causal = *rc::gen::arbitrary<bool>();
    Plan plan;
    RC_ASSERT(plan_problem(config, batch, &plan) == "");
    assert_within_bounds(config, batch, plan);
  });
}

/// Spans of a request, now and then one that is empty, of one token, or not there yet.
void add_spans(Batch& batch, std::int32_t seq_len) {
  if (batch.span_start_loc.empty()) batch.span_start_loc = {0};
  for (std::int32_t at = 0; at <= seq_len && between(0, 2) > 0;) {
    const std::int32_t first = at + between(0, one_of({0, 4, seq_len}));
    at = first + between(0, one_of({0, 1, 20, 300}));
    batch.spans.insert(batch.spans.end(), {first, at});
  }
  batch.span_start_loc.push_back(static_cast<std::int32_t>(batch.spans.size() / 2));
}

/// A batch whose requests are short enough to look at each pair of a query and a key, and whose
/// lists the layer may or may not look at.
Batch any_listed_batch(PlannerConfig& config) {
  std::vector<test::Request> requests(static_cast<std::size_t>(between(0, 6)));
  for (auto& request : requests) {
    request.query_len = between(0, one_of({1, 5, 17, 70}));
    request.seq_len = request.query_len + between(0, one_of({0, 20, 200}));
  }
  Batch batch = make_batch(requests, config.block_size);
  batch.causal = *rc::gen::arbitrary<bool>();
  config.bidirectional = false;  // of layers that take no lists
  config.lists = {
      .spans = one_of({true, true, false}),
      .directions = *rc::gen::arbitrary<bool>(),
      .first_keys = *rc::gen::arbitrary<bool>(),
      .keep_keys = *rc::gen::arbitrary<bool>(),
      .span_rule = one_of({SpanRule::kWhole, SpanRule::kClipLeft, SpanRule::kClipBoth})};
  const bool directed = *rc::gen::arbitrary<bool>(), later = *rc::gen::arbitrary<bool>();
  const bool keeps = *rc::gen::arbitrary<bool>();
  for (const test::Request& request : requests) {
    if (directed)
      batch.direction.push_back(
          one_of({Direction::kBothWays, Direction::kCausal, Direction::kCanvas}));
    if (later) batch.first_keys.push_back(between(0, one_of({0, request.seq_len})));
    if (keeps)
      batch.keep_keys.push_back(
          std::min(between(0, one_of({0, 3, 40, request.seq_len})), request.seq_len));
    add_spans(batch, request.seq_len);
  }
  return batch;
}

/// Of each page of a request, whether a query sees a key in it.
std::vector<bool> seen_pages(const PlannerConfig& config, const Batch& batch, std::int32_t r) {
  const auto row = static_cast<std::size_t>(r);
  const std::int32_t seq_len = batch.seq_lens[row];
  const std::int32_t queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
  std::vector<bool> seen(static_cast<std::size_t>(seq_len / config.block_size) + 1);
  for (std::int32_t p = seq_len - queries; p < seq_len; ++p) {
    const test::LookingRow looking(config, batch, r, p);
    for (std::int32_t key = 0; key < seq_len; ++key) {
      if (looking.sees(key)) seen[static_cast<std::size_t>(key / config.block_size)] = true;
    }
  }
  return seen;
}

/// Pages whose ids may be anything are those that no query sees, left of all keys and in a gap.
void assert_unseen_pages(const PlannerConfig& config, const Batch& batch, std::int32_t r) {
  const std::vector<bool> seen = seen_pages(config, batch, r);
  const auto first = static_cast<std::size_t>(std::ranges::find(seen, true) - seen.begin());
  if (first == seen.size()) return;
  // Pages of new tokens are written, whatever their rows see.
  const auto row = static_cast<std::size_t>(r);
  const std::int32_t query_len = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
  const std::int32_t before = std::max(batch.seq_lens[row] - query_len, 0);
  const auto first_new = static_cast<std::size_t>(before / config.block_size);
  const UnseenPages unseen = unseen_pages(config, batch.view(), r);
  RC_ASSERT(unseen.first == std::min(first, first_new));
  for (std::size_t page = first; page < first_new; ++page)
    RC_ASSERT(seen[page] == !(unseen.gap_begin <= page && page < unseen.gap_end));
}

// Rows that lists say something of see what the rules say of each key.
TEST(PlannerProperties, PlansWithListsAreCorrectAndWithinBounds) {
  int num_listed = 0, num_plain = 0, num_around_gaps = 0;
  expect_property(
      [&] {
        PlannerConfig config = any_config();
        const Batch batch = any_listed_batch(config);
        if (*rc::gen::arbitrary<bool>()) {
          config.split_policy = SplitPolicy::kDeterministic;
          config.num_splits = 0;
          config.deterministic_split_keys = fit_deterministic_split_keys(config, limits_of(batch));
        }
        config.gap_split_query_len = fit_gap_split_query_len(config, limits_of(batch));
        if (*rc::gen::arbitrary<bool>())
          config.gap_split_query_len = std::min(config.gap_split_query_len, 5);
        Plan plan;
        RC_ASSERT(plan_problem(config, batch, &plan) == "");
        assert_within_bounds(config, batch, plan);
        (plan.counts.num_listed > 0 ? num_listed : num_plain) += 1;
        if (plan.counts.num_gap_ints > 0 && plan.counts.num_partial_rows > 0) ++num_around_gaps;
        for (std::int32_t r = 0; r < batch.num_reqs; ++r) assert_unseen_pages(config, batch, r);
      },
      10000);
  EXPECT_GT(num_listed, 2000 / test::kRunsDivisor);
  EXPECT_GT(num_plain, 1000 / test::kRunsDivisor);
  EXPECT_GT(num_around_gaps, 50 / test::kRunsDivisor);
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

// Of bounds, a device makes a correct plan of any lengths within them; where cuts do not follow
// from the batch, the same that a host makes.
TEST(PlannerProperties, PlansByBoundsServeAllLengths) {
  expect_property(
      [] {
        PlannerConfig config = any_config();
        config.split_policy = one_of({SplitPolicy::kBalanced, SplitPolicy::kDeterministic});
        config.fixed_groups = true;
        config.max_partial_rows = std::int64_t{1} << 30;
        const std::vector<test::Request> requests = any_requests(12);
        std::vector<test::Request> bounds = requests;
        const bool reached = *rc::gen::arbitrary<bool>();
        for (auto& request : bounds)
          request.seq_len += reached ? 0 : between(0, one_of({1, 50, 3000}));
        Batch batch = make_batch(requests, config.block_size);
        Batch bounded = make_batch(bounds, config.block_size);
        batch.causal = bounded.causal = *rc::gen::arbitrary<bool>();
        Plan host;
        RC_ASSERT(plan_problem(config, batch, &host) == "");
        config.lengths_are_bounds = true;
        std::string problem;
        const Plan planned = test::make_plan(config, bounded, &problem);
        RC_ASSERT(problem == "");
        const Plan device = test::plan_of_lengths(config, batch, planned);
        RC_ASSERT(test::PlanChecker(config, batch, device).problem() == "");
        const bool fixed =
            config.num_splits > 0 || config.split_policy == SplitPolicy::kDeterministic;
        if (!fixed && !reached) return;
        for (std::int32_t r = 0; r < batch.num_reqs; ++r)
          RC_ASSERT(part_of(device, batch, r) == part_of(host, batch, r));
      },
      3000);
}

/// The same requests with other query tokens, no more than `most`, in the rows that neighbours of
/// up to `most` have together: what a host may have said of them.
std::vector<test::Request> shared_out_anew(std::vector<test::Request> requests, std::int32_t most) {
  const auto is_open = [&](const test::Request& request) { return request.query_len <= most; };
  for (auto from = requests.begin(); from != requests.end();) {
    from = std::find_if(from, requests.end(), is_open);
    const auto end = std::find_if_not(from, requests.end(), is_open);
    for (auto request = from; request != end && from + 1 != end; ++request) {
      auto& other = from[between(0, static_cast<std::int32_t>(end - from) - 1)];
      const std::int32_t taken = between(0, std::min(request->query_len, most - other.query_len));
      request->query_len -= taken;
      other.query_len += taken;
    }
    // Behind the last request rows may be left over.
    if (end == requests.end() && from != end)
      requests.back().query_len += between(0, most - requests.back().query_len);
    from = end;
  }
  for (auto& request : requests)
    request.seq_len = std::max(request.seq_len, request.query_len) + between(0, one_of({0, 50}));
  return requests;
}

// And by bounds of query lengths, of any of these; before it has them, of the host's.
TEST(PlannerProperties, PlansByBoundsServeAllQueryLengths) {
  expect_property(
      [] {
        PlannerConfig config = any_config();
        config.split_policy = one_of({SplitPolicy::kBalanced, SplitPolicy::kDeterministic});
        config.fixed_groups = true;
        config.lengths_are_bounds = true;
        config.max_partial_rows = std::int64_t{1} << 30;
        config.most_query_len = between(1, config.tiles[0].max_query_len);
        const std::vector<test::Request> requests = any_requests(12);
        Batch batch = make_batch(requests, config.block_size);
        Batch bounded =
            make_batch(shared_out_anew(requests, config.most_query_len), config.block_size);
        batch.causal = bounded.causal = *rc::gen::arbitrary<bool>();
        std::string problem;
        const Plan planned = test::make_plan(config, bounded, &problem);
        RC_ASSERT(problem == "");
        for (const Batch* own : {&batch, &bounded}) {
          const Plan device = test::plan_of_lengths(config, *own, planned);
          RC_ASSERT(test::PlanChecker(config, *own, device).problem() == "");
        }
        for (const ClaSplit& split : planned.splits) {
          const auto at = static_cast<std::size_t>(split.item_at % (1 << 27) / 8);
          const ClaWorkItem now =
              test::SplitOfLengths(config, bounded, split).item(config.block_size);
          RC_ASSERT(std::memcmp(&planned.items[split.item_at >> 27].at(at), &now, sizeof now) == 0);
        }
        BatchLimits limits = limits_of(bounded);
        limits.max_num_batched_tokens += limits.max_num_reqs * config.most_query_len;
        const PlanCounts bound = plan_upper_bound(config, limits);
        RC_ASSERT(planned.counts.num_partial_rows <= bound.num_partial_rows);
        RC_ASSERT(planned.counts.num_merges <= bound.num_merges);
        for (std::size_t c = 0; c < kMaxTileClasses; ++c)
          RC_ASSERT(planned.counts.num_items[c] <= bound.num_items[c]);
      },
      3000);
}

/// A batch by the bounds of which a plan is made, and one that the device may turn it into.
struct ListedOnDevice {
  Batch bounded, batch;
  explicit ListedOnDevice(PlannerConfig& config) : bounded(any_listed_batch(config)) {
    bounded.spans.clear();
    bounded.span_start_loc.clear();
    config.lists.device_directions = config.lists.directions && *rc::gen::arbitrary<bool>();
    if (config.lists.device_directions) bounded.direction.clear();
    batch = bounded;
    for (std::size_t r = 0; r < batch.seq_lens.size(); ++r) {
      const std::int32_t queries = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
      batch.seq_lens[r] = between(queries, batch.seq_lens[r]);
      if (config.lists.device_directions)
        batch.direction.push_back(
            one_of({Direction::kBothWays, Direction::kCausal, Direction::kCanvas}));
    }
  }
};

// Whatever lengths and directions the device has, a tile's keys hold all that its rows then see,
// and there is an item for each of its splits.
TEST(PlannerProperties, TilesHoldWhateverRowsSeeByListsOfTheDevice) {
  int num_listed = 0;
  expect_property(
      [&] {
        PlannerConfig config = any_config();
        const ListedOnDevice made(config);
        config.split_policy = one_of({SplitPolicy::kBalanced, SplitPolicy::kDeterministic});
        config.fixed_groups = config.lengths_are_bounds = true;
        config.max_partial_rows = std::int64_t{1} << 30;
        config.gap_split_query_len = 0;
        std::string problem;
        const Plan planned = test::make_plan(config, made.bounded, &problem);
        RC_ASSERT(problem == "");
        const ClaSight sight = sight_of(config, made.batch.causal);
        for (const ClaSplit& split : planned.splits) {
          if (split.listed == 0 || split.split > 0) continue;
          ++num_listed;
          const std::int32_t length = made.batch.seq_lens[static_cast<std::size_t>(split.request)];
          const ClaCut cut = cla_cut_tile(
              &split, &sight,
              widest_rows_of(config.lists, made.bounded.view(), split.request, split.query_len),
              length);
          RC_ASSERT(cut.num_splits <=
                    std::ranges::count(planned.splits, split.listed, &ClaSplit::listed));
          for (std::int32_t i = 0; i < split.q_count; ++i) {
            const test::LookingRow row(config, made.batch, split.request,
                                       length - split.behind + i);
            for (std::int32_t key = 0; key < length; ++key)
              RC_ASSERT(!row.sees(key) ||
                        (cut.keys.first <= key && key < cut.keys.first + cut.keys.count));
          }
        }
      },
      3000);
  EXPECT_GT(num_listed, 1000 / test::kRunsDivisor);
}

TEST(PlannerProperties, FittedDeterministicPlansAreNeverRefused) {
  expect_property([] {
    PlannerConfig config = any_config();
    config.split_policy = SplitPolicy::kDeterministic;
    config.num_splits = 0;
    config.max_partial_rows = between(0, 5000);
    const Batch batch = make_batch(any_requests(12), config.block_size);
    BatchLimits limits = limits_of(batch);
    limits.max_num_reqs += between(0, 3);
    limits.max_num_batched_tokens += between(0, 50);
    limits.max_model_len = std::max(limits.max_model_len, between(0, 100));
    config.deterministic_split_keys = fit_deterministic_split_keys(config, limits);
    Plan plan;
    RC_ASSERT(plan_problem(config, batch, &plan) == "");
    const PlanCounts bound = plan_upper_bound(config, limits);
    RC_ASSERT(plan.counts.num_partial_rows <= bound.num_partial_rows);
    RC_ASSERT(plan.counts.num_items[0] <= bound.num_items[0]);
  });
}

/// The longest a plan is expected to take: its launches one after the other, and the merge.
double expected_ns(const PlannerConfig& config,
                   const std::array<CutChoice, kMaxTileClasses>& cuts) {
  double ns = 0;
  bool merges = false;
  for (const CutChoice& cut : cuts) {
    ns += cut.total_ns();
    merges = merges || cut.merges;
  }
  return ns + (merges ? config.merge.launch_ns : 0.0);
}

// Each candidate of each class, with what is best of the others.
TEST(PlannerProperties, NoBetterCutIsPassedOver) {
  constexpr int kPlans = 2000;  // each is judged some 50 times
  int num_cut = 0;
  expect_property(
      [&] {
        PlannerConfig config = any_config();
        config.num_splits = 0;
        config.max_partial_rows = 1 << 28;
        const Batch batch = make_batch(any_requests(30), config.block_size);
        const auto view = batch.view();
        const AttentionPlan plan(config, view);
        const PlanTiles tiles = count_tiles(config, view, plan.cuts().wide);
        const double chosen = expected_ns(config, plan.cuts().classes);
        if (plan.counts().num_partial_rows > 0) ++num_cut;
        for (std::size_t c = 0; c < static_cast<std::size_t>(config.num_tiles); ++c) {
          if (tiles[c].empty()) continue;
          for (int candidate = -1; candidate < TileCounts::kCandidates; ++candidate) {
            auto other = plan.cuts().classes;
            const double share = candidate < 0 ? CutChoice{}.share_ns
                                               : tiles[c].share_ns(config.tiles[c], candidate);
            other[c] = tiles[c].judge(config.tiles[c], config.merge, share);
            RC_ASSERT(chosen <= 1.03 * expected_ns(config, other));
          }
        }
      },
      kPlans);
  EXPECT_GT(num_cut, kPlans / 20 / test::kRunsDivisor);
}

}  // namespace
}  // namespace clattn::detail
