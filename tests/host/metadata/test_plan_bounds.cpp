#include <gtest/gtest.h>

#include <random>
#include <span>
#include <sstream>

#include "host/metadata/plan_checker.hpp"

// plan_upper_bound() says how large recorded launches are (SPEC A2.7: they must hold every step of
// their size), so it must be enough for every step and not much more than the worst one needs.

namespace clattn::detail {
namespace {

using test::make_batch;

std::int32_t between(std::mt19937& random, std::int32_t low, std::int32_t high) {
  return std::uniform_int_distribution<std::int32_t>(low, high)(random);
}

template <typename T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return values.begin()[between(random, 0, static_cast<std::int32_t>(values.size()) - 1)];
}

/// As builders configure it: tiles that take what they hold, windows as wide ahead as back.
PlannerConfig any_config(std::mt19937& random) {
  PlannerConfig config;
  config.num_tiles = between(random, 1, 3);
  const std::int32_t first = one_of(random, {1, 2, 8});
  config.tiles = {TileClass{first, first}, TileClass{first * 4, first * 4}, TileClass{64, 64}};
  const std::int32_t step_keys = one_of(random, {32, 256});
  const std::int32_t workers = one_of(random, {1, 2, 64, 132, 264});
  const auto tiles = std::span(config.tiles).first(3);
  for (TileClass& tile : tiles) {
    tile.merges_splits = one_of(random, {false, true});
    tile.step_keys = step_keys;
    tile.workers = workers;  // and the finest cuts are the best: they cost nothing
  }
  config.block_size = one_of(random, {1, 7, 16, 128});
  for (TileClass& tile : tiles) tile.groups_per_item = one_of(random, {1, 8});
  config.deterministic_split_keys = one_of(random, {64, 512});
  config.max_partial_rows = one_of<std::int64_t>(random, {0, 40, 1000, 1 << 20});
  config.num_splits = one_of(random, {0, 0, 0, 1, 2, 7, 1000});
  config.split_policy = one_of(random, {SplitPolicy::kBalanced, SplitPolicy::kDeterministic});
  if (config.split_policy == SplitPolicy::kDeterministic) {
    config.max_split_query_len = 1;
    config.num_splits = 0;
  }
  const std::int32_t left = one_of(random, {-1, -1, 0, 40, 1000});
  config.window = {left, left, left < 0 ? one_of(random, {0, 0, 64}) : 0,
                   one_of(random, {0, 0, 1, 5})};
  return config;
}

/// A recorded step's limits.
struct Limits : BatchLimits {
  std::int32_t query_len;
  Limits(std::mt19937& random, PlannerConfig& config) : query_len(one_of(random, {1, 1, 1, 4, 9})) {
    max_num_reqs = between(random, 1, 12);
    max_num_batched_tokens = max_num_reqs * query_len;
    max_model_len = one_of(random, {16, 100, 3000, 20000});
    if (config.split_policy == SplitPolicy::kDeterministic) {
      config.deterministic_split_keys = fit_deterministic_split_keys(config, *this);
    }
  }
};

std::string describe(const PlannerConfig& config, const Limits& limits) {
  std::ostringstream text;
  text << limits.max_num_reqs << " requests of " << limits.query_len << " tokens and "
       << limits.max_model_len << " keys, page " << config.block_size << ", tiles of "
       << config.tiles[0].max_item_tokens << ", workers " << config.tiles[0].workers << ", step "
       << config.tiles[0].step_keys << ", fixed " << config.deterministic_split_keys << ", rows "
       << config.max_partial_rows << ", splits " << config.num_splits << ", policy "
       << static_cast<int>(config.split_policy) << ", window " << config.window.left << '/'
       << config.window.right << ", chunk " << config.window.chunk << '+'
       << config.window.chunk_lookback;
  return text.str();
}

void expect_within(const PlanCounts& counts, const PlanCounts& bound) {
  for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
    EXPECT_LE(counts.num_items[c], bound.num_items[c]) << "class " << c;
  }
  EXPECT_LE(counts.num_merges, bound.num_merges);
  EXPECT_LE(counts.most_splits, bound.most_splits);
  EXPECT_LE(counts.num_partial_rows, bound.num_partial_rows);
}

TEST(PlanBounds, NoStepExceedsThem) {
  std::mt19937 random(20240611);
  for (int run = 0; run < 20000 && !testing::Test::HasFailure(); ++run) {
    PlannerConfig config = any_config(random);
    config.window.right = one_of(random, {config.window.right, config.window.right, -1, 0, 7});
    config.last_is_wide = config.num_tiles > 1 && run % 2 == 1;
    for (TileClass& tile : config.tiles) {
      tile.dealing = one_of(random, {Dealing::kTaken, Dealing::kDealt});
      tile.ends_at_padding = tile.dealing == Dealing::kDealt;
    }
    const Limits limits(random, config);
    SCOPED_TRACE(describe(config, limits));
    std::vector<test::Request> requests(
        static_cast<std::size_t>(between(random, 0, limits.max_num_reqs)));
    const bool long_ones = between(random, 0, 1) == 1;
    for (auto& request : requests) {
      request.query_len = between(random, 0, std::min(limits.query_len, limits.max_model_len));
      request.seq_len = between(
          random,
          long_ones ? std::max(request.query_len, limits.max_model_len - 3) : request.query_len,
          limits.max_model_len);
    }
    test::Batch batch = make_batch(requests, config.block_size);
    batch.causal = one_of(random, {false, true});
    const auto view = batch.view();
    expect_within(AttentionPlan(config, view).counts(),
                  plan_upper_bound(config, limits, limits.query_len));
  }
}

void raise(PlanCounts& most, const PlanCounts& counts) {
  for (std::size_t c = 0; c < kMaxTileClasses; ++c) {
    most.num_items[c] = std::max(most.num_items[c], counts.num_items[c]);
  }
  most.num_merges = std::max(most.num_merges, counts.num_merges);
  most.most_splits = std::max(most.most_splits, counts.most_splits);
  most.num_partial_rows = std::max(most.num_partial_rows, counts.num_partial_rows);
}

/// The largest counts among steps of `shortest` or `longest` query tokens a request, of which some
/// see as many pages as may be and the rest only their queries.
PlanCounts worst_of(const PlannerConfig& config, const Limits& limits, std::int32_t shortest,
                    std::int32_t longest) {
  const std::int32_t most = limits.max_model_len;
  const std::int32_t chunk_end = most - most % std::max(config.window.chunk, 1);
  const std::int32_t window_from_the_last_key_of_a_page =
      most - std::max(most - config.window.left, 0) % config.block_size;
  PlanCounts worst;
  const auto raise_by = [&](const test::Request& some, std::int32_t num, std::int32_t rest) {
    std::vector<test::Request> requests(static_cast<std::size_t>(limits.max_num_reqs),
                                        {rest, rest});
    std::fill_n(requests.begin(), num, some);
    const test::Batch batch = make_batch(requests, config.block_size);
    const auto view = batch.view();
    raise(worst, AttentionPlan(config, view).counts());
  };
  for (const std::int32_t length : {most, chunk_end, window_from_the_last_key_of_a_page}) {
    if (length < longest) continue;
    for (std::int32_t num = 1; num <= limits.max_num_reqs; ++num) {
      for (const std::int32_t tokens : {shortest, longest}) {
        raise_by({tokens, length}, num, shortest);
        raise_by({tokens, length}, num, longest);
      }
    }
  }
  return worst;
}

// A bound of twice the worst step's work-groups at most, and its memory within twice as much, but
// for a page more of each request: windows and chunks may begin anywhere in one.
TEST(PlanBounds, TheWorstRecordedStepNeedsHalfOfThem) {
  std::mt19937 random(7);
  for (int run = 0; run < 500 && !testing::Test::HasFailure(); ++run) {
    PlannerConfig config = any_config(random);
    config.fixed_groups = true;
    Limits limits(random, config);
    SCOPED_TRACE(describe(config, limits));
    if (limits.query_len > limits.max_model_len) continue;
    // Splits of one step and a page take two steps, which keeps plans from being as fine as can be.
    for (TileClass& tile : config.tiles) tile.step_keys = 1;
    // One tile of several tokens may see two chunks, but not every one.
    if (limits.query_len > 1) config.window.chunk = 0;
    const PlanCounts bound = plan_upper_bound(config, limits, limits.query_len);
    for (std::size_t c = 0; c < static_cast<std::size_t>(config.num_tiles); ++c) {
      // Where memory for partial rows is short, a class of longer queries than one may need less.
      if (c > 0 && config.max_partial_rows < 1 << 20) break;
      const bool last = c + 1 == static_cast<std::size_t>(config.num_tiles);
      const std::int32_t shortest = c == 0 ? 1 : config.tiles[c - 1].max_query_len + 1;
      const std::int32_t longest =
          last ? limits.query_len : std::min(limits.query_len, config.tiles[c].max_query_len);
      const std::int32_t needed =
          longest < shortest ? 0 : worst_of(config, limits, shortest, longest).num_items[c];
      EXPECT_LE(bound.num_items[c], 2 * (needed + limits.max_num_reqs)) << "class " << c;
    }
    const PlanCounts worst = worst_of(config, limits, 1, limits.query_len);
    if (limits.query_len > 1) continue;  // more than one class adds up
    EXPECT_LE(bound.num_merges, 2 * worst.num_merges);
    EXPECT_LE(bound.most_splits, 2 * worst.most_splits);
    EXPECT_LE(bound.num_partial_rows, 2 * (worst.num_partial_rows + limits.max_num_reqs));
  }
}

// The usual cases, by hand: 8 decodes of up to 32768 keys.
TEST(PlanBounds, OfDecodesAreWhatTheLongestNeed) {
  PlannerConfig config;
  config.tiles = {TileClass{4, 4}, TileClass{0, 16}};
  config.num_tiles = 2;
  config.tiles[0].groups_per_item = 8;
  config.tiles[0].workers = 8;  // the finest cuts are for four waves: 4 items
  config.tiles[0].step_keys = 32;
  config.max_partial_rows = 16000;
  const BatchLimits limits{.max_num_reqs = 8, .max_num_batched_tokens = 8, .max_model_len = 32768};
  const auto items = [&] { return plan_upper_bound(config, limits, 1).num_items; };
  using Items = std::array<std::int32_t, kMaxTileClasses>;
  EXPECT_EQ(items(), (Items{8 + 3, 0, 0}));
  config.num_splits = 4;
  EXPECT_EQ(items(), (Items{8 * 4, 0, 0}));
  config.num_splits = 1;
  EXPECT_EQ(items(), (Items{8, 0, 0}));
  EXPECT_EQ(plan_upper_bound(config, limits, 1).num_merges, 0);
  config.num_splits = 0;
  config.split_policy = SplitPolicy::kDeterministic;  // every 512 keys
  EXPECT_EQ(items(), (Items{8 * 64, 0, 0}));
  EXPECT_EQ(plan_upper_bound(config, limits, 1).num_partial_rows, 8 * 64);
  config.window.left = config.window.right = 1023;  // nothing lies ahead of a decode
  EXPECT_EQ(items(), (Items{8 * 3, 0, 0}));  // 1024 keys and up to 15 more of their first page
  config.window.right = -1;
  EXPECT_EQ(items(), (Items{8 * 3, 0, 0}));
}

// A draft sees the window before the tree's first node, and its keys end with it: of the only query
// of a step up to a window and 256 keys.
TEST(PlanBounds, HoldTheTreesOfDrafts) {
  const std::vector<std::int32_t> parents(kMaxTreeNodes, -1), starts = {0, kMaxTreeNodes};
  const std::vector<std::int32_t> lens = {600}, query_start_loc = {0, 1};
  CommonAttentionMetadata batch = CommonAttentionMetadata::of(query_start_loc, lens, {});
  batch.tree_start_loc = starts;
  batch.tree_parents = parents;
  for (const KeyWindow& window : {KeyWindow{0, 0, 0, 0}, KeyWindow{400, 400, 0, 0},
                                  KeyWindow{-1, -1, 16, 0}, KeyWindow{-1, -1, 64, 3}}) {
    for (const bool deterministic : {false, true}) {
      PlannerConfig config;
      config.tiles = {TileClass{1, 1}, TileClass{64, 64}};
      config.num_tiles = 2;
      config.max_partial_rows = 1000;
      config.window = window;
      config.lists.trees = true;
      config.num_splits = deterministic ? 0 : 40;
      if (deterministic) config.split_policy = SplitPolicy::kDeterministic;
      config.deterministic_split_keys = 64;
      const PlanCounts needed = AttentionPlan(config, batch).counts();
      const PlanCounts bound = plan_upper_bound(
          config, {.max_num_reqs = 1, .max_num_batched_tokens = 1, .max_model_len = 600}, 1);
      EXPECT_GT(needed.num_partial_rows, 1);
      EXPECT_LE(needed.num_partial_rows, bound.num_partial_rows);
      EXPECT_LE(needed.num_items[0], bound.num_items[0]);
      EXPECT_LE(needed.num_merges, bound.num_merges);
      EXPECT_LE(needed.num_listed, bound.num_listed);
      EXPECT_LE(needed.num_gap_ints, bound.num_gap_ints);
    }
  }
}

}  // namespace
}  // namespace clattn::detail
