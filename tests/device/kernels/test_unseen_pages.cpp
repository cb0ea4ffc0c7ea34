#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/config_fields.hpp>
#include <clattn/graph.hpp>
#include <functional>
#include <limits>
#include <vector>

#include "device/small_call.hpp"
#include "support/error_text.hpp"

// Block-table entries of pages that no query sees any more may hold anything.
namespace test_unseen_pages {

using small_test::Batch;
using small_test::Call;
using test::error_text;

constexpr std::int32_t kHuge = std::numeric_limits<std::int32_t>::max();

clattn::AttentionConfig windowed(std::int32_t window, std::int32_t chunk) {
  clattn::AttentionConfig config = small_test::config();
  config.sliding_window = window;
  config.attention_chunk_size = chunk;
  return config;
}

/// 23 keys in six pages of 4 and `queries` query tokens, of which the first `freed` pages are no
/// block any more; then a request that sees all of its keys.
struct Freed : Batch {
  Freed(std::int32_t queries, std::size_t freed)
      : Batch({0, queries, queries + 1}, {23, 3}, {7, 3, 9, 5, 8, 2, 6, -1, -1, -1, -1, -1}) {
    for (std::size_t i = 0; i < freed; ++i) table[i] = i % 2 == 0 ? -1 : kHuge;
  }
};

struct Case {
  std::int32_t window, chunk, queries;
  std::size_t unseen;  ///< pages
};
/// The first query stands at 23 - queries: a window of w sees w - 1 keys before it.
constexpr Case kCases[] = {{5, 0, 1, 4},  // from key 18 on: page 4
                           {7, 0, 1, 4},  // 16: the first of page 4
                           {8, 0, 1, 3},  // 15: the last of page 3
                           {5, 0, 3, 4},  // 16
                           {6, 0, 3, 3},  // 15
                           {0, 8, 1, 4},  // the chunk from 16 on
                           {0, 12, 3, 3}, {30, 0, 1, 0}};

/// The first `unseen` pages of the first request may hold anything, and so may their block ids; the
/// next one's may not. `say` adds to the batches.
void expect_unseen(
    const clattn::AttentionConfig& config, std::int32_t queries, std::size_t unseen,
    const std::function<void(clattn::CommonAttentionMetadata&)>& say = [](auto&) {}) {
  SCOPED_TRACE(to_string(config) + fmt::format(", {} queries", queries));
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, config);
    const auto tokens = static_cast<std::size_t>(queries) + 1;
    Freed whole(queries, 0), freed(queries, unseen), too_many(queries, unseen + 1);
    for (Freed* each : {&whole, &freed, &too_many}) say(each->metadata);
    call.forward(call.builder->build(call.queue, whole.metadata));
    const std::vector<float> want = call.rows(tokens);
    for (std::size_t i = 0; i < unseen; ++i) call.poison(whole.table[i]);
    call.poison(0);  // nobody's: what stands for a page that is not there
    call.forward(call.builder->build(call.queue, freed.metadata));
    EXPECT_EQ(call.rows(tokens), want);
    EXPECT_EQ(error_text([&] { call.builder->build(call.queue, too_many.metadata); }),
              fmt::format("request 0: block_table[{}] is {}, legal: 0 … 15 (num_blocks 16)", unseen,
                          unseen % 2 == 0 ? -1 : kHuge));
  }
}

TEST(UnseenPages, HoldAnythingAndAreNotRead) {
  for (const Case& c : kCases) expect_unseen(windowed(c.window, c.chunk), c.queries, c.unseen);
}

TEST(UnseenPages, AreThoseBehindTheLeftSideOfAWindow) {
  clattn::AttentionConfig config = small_test::config();
  config.window_left = 4;  // as windowed(5, 0)
  expect_unseen(config, 1, 4);
}

TEST(UnseenPages, AreThoseBeforeTheFirstKey) {
  const std::vector<std::int32_t> first_keys = {14, 0};  // in page 3
  for (const std::int32_t queries : {1, 3}) {
    for (const std::int32_t window : {0, 20, 5}) {
      clattn::AttentionConfig config = windowed(window, 0);
      config.use_first_keys = true;
      expect_unseen(config, queries, window == 5 ? 4 : 3,
                    [&](auto& batch) { batch.first_keys = first_keys; });
    }
  }
}

// The window of a canvas begins before its first query, a span where it does.
TEST(UnseenPages, AreThoseThatNoRowOfAListSees) {
  const std::vector<clattn::Direction> canvas = {clattn::Direction::kCanvas,
                                                 clattn::Direction::kCausal};
  clattn::AttentionConfig config = windowed(5, 0);
  config.use_directions = true;
  expect_unseen(config, 3, 4, [&](auto& batch) { batch.direction = canvas; });  // from 16 on
  const std::vector<std::int32_t> starts = {0, 2, 2}, spans = {0, 9, 13, 23};
  config.use_spans = true;
  expect_unseen(config, 1, 3, [&](auto& batch) {  // the whole span: from 13 on
    batch.span_start_loc = starts;
    batch.spans = spans;
  });
  config.span_rule = clattn::SpanRule::kClipLeft;
  expect_unseen(config, 1, 4, [&](auto& batch) {
    batch.span_start_loc = starts;
    batch.spans = spans;
  });
}

/// 23 keys in six pages of 4, of which a window sees those from page `seen` on and a request keeps
/// three: the pages between may hold anything, and so may their block ids.
void expect_unseen_gap(std::int32_t window, std::int32_t queries, std::int32_t num_splits,
                       std::size_t seen) {
  clattn::AttentionConfig config = windowed(window, 0);
  config.use_keep_keys = true;
  clattn::BuilderOptions options = Call::builder_options();
  options.num_splits = num_splits;
  const std::vector<std::int32_t> keep_keys = {3, 0};
  for (const auto& context : small_test::all_contexts()) {
    SCOPED_TRACE(fmt::format("{} queries, {} splits", queries, num_splits));
    const Call call(context, config, options);
    const auto tokens = static_cast<std::size_t>(queries) + 1;
    Freed whole(queries, 0), freed(queries, 0), too_many(queries, 0);
    for (std::size_t i = 1; i <= seen; ++i)
      (i < seen ? freed : too_many).table[i] = i % 2 == 0 ? -1 : kHuge;
    for (Freed* each : {&whole, &freed, &too_many}) each->metadata.keep_keys = keep_keys;
    call.forward(call.builder->build(call.queue, whole.metadata));
    const std::vector<float> want = call.rows(tokens);
    for (std::size_t i = 1; i < seen; ++i) call.poison(whole.table[i]);
    call.poison(0);  // nobody's: what stands for a page that is not there
    call.forward(call.builder->build(call.queue, freed.metadata));
    EXPECT_EQ(call.rows(tokens), want);
    EXPECT_EQ(error_text([&] { call.builder->build(call.queue, too_many.metadata); }),
              fmt::format("request 0: block_table[{}] is {}, legal: 0 … 15 (num_blocks 16)", seen,
                          seen % 2 == 0 ? -1 : kHuge));
  }
}

TEST(UnseenPages, AreThoseBetweenKeptKeysAndTheWindow) {
  for (const std::int32_t splits : {0, 1, 2}) {
    expect_unseen_gap(5, 1, splits, 4);  // from key 18 on: page 4
    expect_unseen_gap(5, 3, splits, 4);  // 16
    expect_unseen_gap(6, 3, splits, 3);  // 15
  }
}

TEST(UnseenPages, HoldAnythingInRecordedSteps) {
  for (const auto& context : small_test::all_contexts()) {
    clattn::BuilderOptions options = Call::builder_options();
    options.graph_batch_size = 2;
    const Call call(context, windowed(5, 0), options);
    const Freed whole(1, 0), freed(1, 4);
    const auto& metadata = call.builder->build(call.queue, whole.metadata);
    clattn::GraphCapture capture(call.queue);
    call.forward(metadata);
    const clattn::Graph graph = capture.end();
    graph.replay(call.queue);
    const std::vector<float> want = call.rows(2);
    EXPECT_NE(want.front(), -7);
    call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
    call.builder->build(call.queue, freed.metadata);
    graph.replay(call.queue);
    EXPECT_EQ(call.rows(2), want);
  }
}

TEST(UnseenPages, HoldAnythingInTheGapOfARecordedStep) {
  clattn::AttentionConfig config = windowed(5, 0);
  config.use_keep_keys = true;
  clattn::BuilderOptions options = Call::builder_options();
  options.graph_batch_size = 2;
  const std::vector<std::int32_t> keep_keys = {3, 0};
  for (const auto& context : small_test::all_contexts()) {
    const Call eager(context, config), call(context, config, options);
    Freed plain(1, 0), whole(1, 0), freed(1, 0);
    for (Freed* each : {&whole, &freed}) each->metadata.keep_keys = keep_keys;
    for (std::size_t page = 1; page < 4; ++page) freed.table[page] = -1;
    eager.forward(eager.builder->build(eager.queue, whole.metadata));
    const std::vector<float> want = eager.rows(2);
    const auto& metadata = call.builder->build(call.queue, plain.metadata);
    clattn::GraphCapture capture(call.queue);
    call.forward(metadata);
    const clattn::Graph graph = capture.end();
    call.builder->build(call.queue, freed.metadata);
    for (std::size_t page = 1; page < 4; ++page) call.poison(whole.table[page]);
    call.poison(0);
    graph.replay(call.queue);
    EXPECT_EQ(call.rows(2), want);
  }
}

TEST(UnseenPages, HoldAnythingForAnotherGroup) {
  const auto& context = small_test::all_contexts().at(0);
  const Call call(context, windowed(5, 0)), other(context, windowed(5, 0));
  const Freed whole(1, 0), freed(1, 4);
  call.forward(call.builder->build(call.queue, whole.metadata));
  const std::vector<float> want = call.rows(2);
  EXPECT_NE(want.front(), -7);
  call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
  const auto& taken = other.builder->build(call.queue, freed.metadata);
  call.forward(call.builder->update_block_table(
      call.queue, taken,
      {.block_table = freed.table, .block_table_stride = 6, .slot_mapping = {}}));
  EXPECT_EQ(call.rows(2), want);
}

// A length below its bound sees earlier keys, so all pages count.
TEST(UnseenPages, AreNoneWhereTheDeviceHasTheLengths) {
  const auto& context = small_test::all_contexts().at(0);
  clattn::BuilderOptions options = Call::builder_options();
  options.device_seq_lens = true;
  const Call call(context, windowed(5, 0), options);
  const Freed freed(1, 1);
  EXPECT_EQ(error_text([&] { call.builder->build(call.queue, freed.metadata); }),
            "request 0: block_table[0] is -1, legal: 0 … 15 (num_blocks 16)");
}

// Without a window, or with its right side alone, every page is read.
TEST(UnseenPages, AreNoneWithoutALeftSide) {
  const auto& context = small_test::all_contexts().at(0);
  for (const std::int32_t right : {-1, 4}) {
    clattn::AttentionConfig config = small_test::config();
    config.window_right = right;
    const Call call(context, config);
    const Freed freed(1, 1);
    EXPECT_EQ(error_text([&] { call.builder->build(call.queue, freed.metadata); }),
              "request 0: block_table[0] is -1, legal: 0 … 15 (num_blocks 16)");
  }
}

}  // namespace test_unseen_pages
