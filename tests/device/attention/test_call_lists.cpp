// What attention() and paged_attention() are told of each sequence beyond lengths, against the
// oracle: directions, spans, first keys, kept keys and trees.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/attention_functions.hpp>
#include <clattn/config_fields.hpp>
#include <cstdint>
#include <utility>
#include <vector>

#include "device/attention/call_sequences.hpp"
#include "device/attention_case.hpp"
#include "oracle/oracle.hpp"
#include "support/error_text.hpp"

namespace test_call_lists {

using attention_test::all_contexts;
using clattn::AttentionArguments;
using clattn::AttentionConfig;
using clattn::Direction;
using clattn::SpanRule;
using namespace call_test;  // NOLINT(google-build-using-namespace): of these tests

/// Lists of a call over kCached, and the same for the oracle.
struct Lists {
  std::vector<Direction> direction = {};
  std::vector<std::int32_t> span_start_loc = {};
  std::vector<std::int32_t> spans = {};
  std::vector<std::int32_t> first_keys = {};
  std::vector<std::int32_t> tree_start_loc = {};
  std::vector<std::int32_t> tree_parents = {};
  std::vector<std::int32_t> keep_keys = {};

  void give(AttentionArguments& call) const {
    call.direction = direction;
    call.span_start_loc = span_start_loc;
    call.spans = spans;
    call.first_keys = first_keys;
    call.tree_start_loc = tree_start_loc;
    call.tree_parents = tree_parents;
    call.keep_keys = keep_keys;
  }
  void tell(oracle::AttentionCase& exact, SpanRule rule) const {
    for (const Direction each : direction) exact.looks.push_back(static_cast<oracle::Looks>(each));
    exact.span_cut = static_cast<oracle::SpanCut>(rule);
    for (std::size_t s = 0; s + 1 < span_start_loc.size(); ++s) {
      for (auto i = static_cast<std::size_t>(span_start_loc[s]);
           i < static_cast<std::size_t>(span_start_loc[s + 1]); ++i)
        exact.spans.push_back({static_cast<std::int32_t>(s), spans[2 * i], spans[2 * i + 1]});
    }
    exact.first_keys = first_keys;
    exact.keep_keys = keep_keys;
    for (std::size_t s = 0; s + 1 < tree_start_loc.size(); ++s)
      exact.tree_parents.emplace_back(tree_parents.begin() + tree_start_loc[s],
                                      tree_parents.begin() + tree_start_loc[s + 1]);
  }
};

const std::vector<Direction> kDirections = {Direction::kBothWays, Direction::kCausal,
                                            Direction::kCanvas, Direction::kBothWays,
                                            Direction::kCanvas};
// Of the first sequence, an image; of the fourth, of which no token is computed, one; of the last,
// the end of one that earlier calls began, and two beside each other.
const std::vector<std::int32_t> kSpanStarts = {0, 1, 1, 1, 2, 5};
const std::vector<std::int32_t> kSpans = {1, 4, 0, 6, 10, 17, 17, 25, 25, 31};
const std::vector<std::int32_t> kFirstKeys = {0, 40, 9, 0, 14};

AttentionConfig windowed(std::int32_t left, std::int32_t right) {
  AttentionConfig layer = config();
  layer.window_left = left;
  layer.window_right = right;
  return layer;
}

/// Both functions, whatever the call's `causal` is where it does not count.
void expect_right(const AttentionConfig& layer, const Lists& lists) {
  for (const auto& context : all_contexts()) {
    const Sequences sequences(context, kCached);
    const Paged pages(sequences);
    for (const bool causal : {true, false}) {
      if (!causal && !lists.direction.empty()) continue;  // refused
      SCOPED_TRACE(fmt::format("{} causal {}", clattn::to_string(layer), causal));
      oracle::AttentionCase exact = sequences.exact(layer, causal);
      lists.tell(exact, layer.span_rule);
      const oracle::AttentionResult wanted = oracle::attention(exact, oracle::Element::kF32);
      AttentionArguments call = sequences.call();
      call.causal = causal;
      lists.give(call);
      clattn::attention(sequences.queue, call, layer);
      sequences.expect(wanted);
      call = pages.call(sequences);
      call.causal = causal;
      lists.give(call);
      clattn::paged_attention(sequences.queue, call, pages.cache, layer);
      sequences.expect(wanted);
    }
  }
}

TEST(CallLists, ADirectionForEachSequence) {
  for (const auto& [left, right] : {std::pair{-1, -1}, {3, -1}, {3, 2}})
    expect_right(windowed(left, right), {.direction = kDirections});
}

TEST(CallLists, SpansByEachRule) {
  for (const SpanRule rule : {SpanRule::kWhole, SpanRule::kClipLeft, SpanRule::kClipBoth}) {
    for (const std::int32_t window : {0, 3}) {
      AttentionConfig layer = config();
      layer.sliding_window = window;
      layer.span_rule = rule;
      expect_right(layer, {.span_start_loc = kSpanStarts, .spans = kSpans});
    }
  }
}

TEST(CallLists, FirstKeysMayHideAll) {
  expect_right(config(), {.first_keys = kFirstKeys});
}

TEST(CallLists, KeysThatAWindowDoesNotHide) {
  for (const std::int32_t left : {0, 3})
    expect_right(windowed(left, -1), {.first_keys = {0, 0, 1, 0, 0}, .keep_keys = {2, 1, 4, 0, 9}});
  expect_right(config(), {.keep_keys = {2, 1, 4, 0, 9}});  // hides nothing, so nothing is kept
}

TEST(CallLists, QueriesThatOutnumberTheirKeysStandInChunksOfTheirOwn) {
  AttentionConfig layer = config();
  layer.attention_chunk_size = 8;
  for (const Direction direction : {Direction::kBothWays, Direction::kCanvas}) {
    const Lists lists = {.direction = std::vector<Direction>(2, direction), .first_keys = {1, 0}};
    for (const auto& context : all_contexts()) {
      const Sequences sequences(context, {{4, 2}, {20, 9}});
      oracle::AttentionCase exact = sequences.exact(layer, true);
      lists.tell(exact, layer.span_rule);
      AttentionArguments call = sequences.call();
      lists.give(call);
      clattn::attention(sequences.queue, call, layer);
      sequences.expect(oracle::attention(exact, oracle::Element::kF32));
    }
  }
}

TEST(CallLists, TreesOfDrafts) {
  const Lists lists = {.tree_start_loc = {0, 5, 6, 9, 9, 33},
                       .tree_parents = {-1, 0, 0, 1, -1, -1, -1, 0, 0,  -1, 0,  0, 1,  1,  2,  4, 5,
                                        5,  6, 7, 7, 9,  10, 11, 3, 14, 15, 15, 2, 18, 19, 20, 21}};
  for (const std::int32_t window : {0, 3}) {
    AttentionConfig layer = config();
    layer.sliding_window = window;
    for (const auto& context : all_contexts()) {
      const Sequences sequences(context, kCached);
      const Paged pages(sequences);
      oracle::AttentionCase exact = sequences.exact(layer, true);
      lists.tell(exact, layer.span_rule);
      AttentionArguments call = pages.call(sequences);
      lists.give(call);
      clattn::paged_attention(sequences.queue, call, pages.cache, layer);
      sequences.expect(oracle::attention(exact, oracle::Element::kF32));
    }
  }
}

/// The rows that each node's query gives where only its path stands before it.
std::vector<float> rows_of_paths(const Sequences& tree, const AttentionConfig& layer,
                                 const std::vector<std::int32_t>& parents, std::int32_t kept) {
  const std::size_t before = tree.keys() - parents.size();
  std::vector<float> rows;
  for (std::size_t node = 0; node < parents.size(); ++node) {
    std::vector<std::size_t> path;
    for (auto at = static_cast<std::int32_t>(node); at >= 0;
         at = parents[static_cast<std::size_t>(at)])
      path.insert(path.begin(), before + static_cast<std::size_t>(at));
    Sequences chain(tree.context, {{1, static_cast<std::int32_t>(before + path.size())}});
    const auto along = [&](const std::vector<float>& all) {
      const auto width = static_cast<std::ptrdiff_t>(kKVRow);
      std::vector<float> taken(all.begin(),
                               all.begin() + static_cast<std::ptrdiff_t>(before) * width);
      for (const std::size_t at : path) {
        const auto row = all.begin() + static_cast<std::ptrdiff_t>(at) * width;
        taken.insert(taken.end(), row, row + width);
      }
      return taken;
    };
    const auto first = tree.query.begin() + static_cast<std::ptrdiff_t>(node * kRow);
    chain.q = chain.upload(std::vector<float>(first, first + std::ptrdiff_t{kRow}));
    chain.k = chain.upload(along(tree.key));
    chain.v = chain.upload(along(tree.value));
    AttentionArguments call = chain.call();
    const std::vector<std::int32_t> keep_keys = {kept};
    if (kept > 0) call.keep_keys = keep_keys;
    clattn::attention(chain.queue, call, layer);
    const std::vector<float> row = chain.download(chain.out);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

TEST(CallLists, ADraftsRowIsTheCausalOneOfItsPath) {
  const std::vector<std::int32_t> parents = {-1, 0, 0, 1, -1, 3, 2, 5, 5, 8}, nodes = {0, 10};
  for (const std::int32_t window : {0, 3, 8}) {
    AttentionConfig layer = config();
    layer.sliding_window = window;
    layer.alibi_slopes = {0.5F, 0.25F, 0, -0.125F};
    for (const auto& context : all_contexts()) {
      const Sequences tree(context, {{10, 33}});
      AttentionArguments call = tree.call();
      call.tree_start_loc = nodes;
      call.tree_parents = parents;
      const std::vector<std::int32_t> keep_keys = {window > 0 ? 4 : 0};
      if (window > 0) call.keep_keys = keep_keys;
      clattn::attention(tree.queue, call, layer);
      const std::vector<float> got = tree.download(tree.out);
      const std::vector<float> wanted = rows_of_paths(tree, layer, parents, keep_keys[0]);
      for (std::size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], wanted[i], 2e-6) << "window " << window << ", element " << i;
    }
  }
}

TEST(CallLists, AllAtOnceBesideOtherOptions) {
  AttentionConfig layer = config();
  layer.attention_chunk_size = 16;
  layer.logits_soft_cap = 2;
  layer.alibi_slopes = {0.5F, 0.25F, 0, -0.125F};
  layer.sinks = {0, 1, -2, 3};
  expect_right(layer, {kDirections, kSpanStarts, kSpans, kFirstKeys});
}

TEST(CallLists, AreRefusedByName) {
  const auto& context = all_contexts().front();
  const Sequences sequences(context, kCached);
  const Paged pages(sequences);
  const auto error = [&](const Lists& lists, const AttentionConfig& layer = config()) {
    AttentionArguments call = sequences.call();
    lists.give(call);
    const auto contiguous =
        test::error_text([&] { clattn::attention(sequences.queue, call, layer); });
    call = pages.call(sequences);
    lists.give(call);
    EXPECT_EQ(test::error_text(
                  [&] { clattn::paged_attention(sequences.queue, call, pages.cache, layer); }),
              contiguous);
    return contiguous;
  };
  EXPECT_EQ(error({.direction = {Direction::kCausal}}),
            "direction holds 1 elements, legal: 5 (num_reqs), or none");
  AttentionArguments both = sequences.call();
  both.causal = false;
  both.direction = kDirections;
  EXPECT_EQ(test::error_text([&] { clattn::attention(sequences.queue, both, config()); }),
            "causal is false, legal with a direction for each sequence: not given");
  Lists wrong = {.direction = kDirections};
  wrong.direction[2] = Direction{3};
  EXPECT_EQ(error(wrong),
            "request 2: direction is 3, legal: 0 (both ways), 1 (causal), 2 (canvas)");
  EXPECT_EQ(error({.spans = kSpans}),
            "span_start_loc holds 0 elements, legal: 6 (num_reqs + 1), or none");
  EXPECT_EQ(error({.span_start_loc = {0, 1, 1, 1, 2, 6}, .spans = kSpans}),
            "span_start_loc[5] is 6, legal: 2 … 5 (the rows of spans)");
  EXPECT_EQ(error({.span_start_loc = {0, 0, 0, 0, 0, 2}, .spans = {4, 8, 6, 9}}),
            "request 4: spans[1] is 6 … 9, legal: from 8 on, ascending, disjoint");
  EXPECT_EQ(error({.first_keys = {0, 0, 10, 0, 0}}),
            "request 2: first_keys is 10, legal: 0 … 9 (seq_lens)");
  EXPECT_EQ(error({.keep_keys = {0, 0, 10, 0, 0}}, windowed(3, -1)),
            "request 2: keep_keys is 10, legal: 0 … 9 (seq_lens)");
  EXPECT_EQ(sequences.download(sequences.out),
            std::vector<float>(sequences.tokens() * kRow, kUntouched));
}

}  // namespace test_call_lists
