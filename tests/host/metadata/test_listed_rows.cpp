// What a batch may say of its requests beyond lengths (metadata/listed_rows.hpp): what is refused,
// and by which words.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <clattn/compat/derived_batches.hpp>
#include <clattn/compat/virtual_batches.hpp>

#include "host/metadata_batch.hpp"
#include "metadata/listed_rows.hpp"

namespace clattn::detail {
namespace {

using test::Batch;
using test::error_text;
using Ints = std::vector<std::int32_t>;

constexpr ListRules kAll{.spans = true, .directions = true, .first_keys = true, .keep_keys = true};

Batch three_requests() {
  return test::make_batch({{1, 9}, {0, 4}, {5, 7}}, 16);
}

std::string refusal(const Batch& batch, const ListRules& rules = kAll) {
  return error_text([&] { check_lists(batch.view(), rules); });
}

std::string refusal_of_spans(const Ints& starts, const Ints& spans) {
  Batch batch = three_requests();
  batch.span_start_loc = starts;
  batch.spans = spans;
  return refusal(batch);
}

TEST(CheckLists, TakesWhatIsLegal) {
  Batch batch = three_requests();
  EXPECT_EQ(refusal(batch), "no error");
  batch.direction = {Direction::kBothWays, Direction::kCausal, Direction::kCanvas};
  batch.first_keys = {9, 0, 3};
  batch.keep_keys = {0, 4, 7};
  batch.span_start_loc = {0, 1, 1, 4};
  batch.spans = {8, 900, 0, 0, 0, 2, 2, INT32_MAX};
  EXPECT_EQ(refusal(batch), "no error");
}

TEST(CheckLists, ListsThatNoRuleLooksAt) {
  Batch batch = three_requests();
  batch.span_start_loc = {0, 1, 1, 1};
  batch.spans = {0, 5};
  EXPECT_EQ(refusal(batch, {}), "no error") << "another layer may look at them";
  batch.direction.assign(3, Direction::kCausal);
  EXPECT_EQ(refusal(batch, {.spans = true}),
            "direction holds 3 elements, legal without use_directions: none");
  batch.direction.clear();
  batch.first_keys = {0, 0, 0};
  EXPECT_EQ(refusal(batch, {.directions = true}),
            "first_keys holds 3 elements, legal without use_first_keys: none");
  batch.first_keys.clear();
  batch.keep_keys = {0, 4, 2};
  EXPECT_EQ(refusal(batch, {.first_keys = true}), "no error") << "for the same reason";
  batch.keep_keys = {0, 4, -2};
  EXPECT_NE(refusal(batch, {}), "no error") << "nonsense is nonsense for all layers";
  batch.keep_keys.clear();
  batch.spans = {5, 0};
  EXPECT_NE(refusal(batch, {}), "no error") << "nonsense is nonsense for all layers";
}

TEST(CheckLists, Directions) {
  Batch batch = three_requests();
  batch.direction.assign(2, Direction::kCanvas);
  EXPECT_EQ(refusal(batch), "direction holds 2 elements, legal: 3 (num_reqs), or none");
  batch.direction.assign(4, Direction::kCanvas);
  EXPECT_EQ(refusal(batch), "direction holds 4 elements, legal: 3 (num_reqs), or none");
  batch.direction = {Direction::kCausal, Direction::kCausal, static_cast<Direction>(3)};
  EXPECT_EQ(refusal(batch),
            "request 2: direction is 3, legal: 0 (both ways), 1 (causal), 2 (canvas)");
}

TEST(CheckLists, Spans) {
  EXPECT_EQ(refusal_of_spans({}, {0, 2}),
            "span_start_loc holds 0 elements, legal: 4 (num_reqs + 1), or none");
  EXPECT_EQ(refusal_of_spans({0, 1, 1}, {0, 2}),
            "span_start_loc holds 3 elements, legal: 4 (num_reqs + 1), or none");
  EXPECT_EQ(refusal_of_spans({1, 1, 1, 1}, {0, 2}), "span_start_loc[0] is 1, legal: 0");
  EXPECT_EQ(refusal_of_spans({0, 1, 0, 1}, {0, 2}),
            "span_start_loc[2] is 0, legal: 1 … 1 (the rows of spans)");
  EXPECT_EQ(refusal_of_spans({0, 0, 0, 2}, {0, 2}),
            "span_start_loc[3] is 2, legal: 0 … 1 (the rows of spans)");
  EXPECT_EQ(refusal_of_spans({0, 0, 0, 1}, {0, 2, 3, 4}),
            "spans holds 4 elements, legal: 2 (2 * the last of span_start_loc), or none");
  EXPECT_EQ(refusal_of_spans({0, 0, 0, 1}, {0, 2, 3}),
            "spans holds 3 elements, legal: 2 (2 * the last of span_start_loc), or none");
  EXPECT_EQ(refusal_of_spans({0, 1, 1, 1}, {4, 3}),
            "request 0: spans[0] is 4 … 3, legal: from 0 on, ascending, disjoint");
  EXPECT_EQ(refusal_of_spans({0, 0, 0, 1}, {-1, 3}),
            "request 2: spans[0] is -1 … 3, legal: from 0 on, ascending, disjoint");
  EXPECT_EQ(refusal_of_spans({0, 1, 1, 3}, {0, 9, 0, 4, 3, 5}),
            "request 2: spans[2] is 3 … 5, legal: from 4 on, ascending, disjoint");
}

TEST(CheckLists, FirstKeys) {
  Batch batch = three_requests();
  batch.first_keys = {0};
  EXPECT_EQ(refusal(batch), "first_keys holds 1 elements, legal: 3 (num_reqs), or none");
  batch.first_keys = {0, 5, 0};
  EXPECT_EQ(refusal(batch), "request 1: first_keys is 5, legal: 0 … 4 (seq_lens)");
  batch.first_keys = {-1, 0, 0};
  EXPECT_EQ(refusal(batch), "request 0: first_keys is -1, legal: 0 … 9 (seq_lens)");
}

TEST(CheckLists, KeepKeys) {
  Batch batch = three_requests();
  batch.keep_keys = {0};
  EXPECT_EQ(refusal(batch), "keep_keys holds 1 elements, legal: 3 (num_reqs), or none");
  batch.keep_keys = {0, 5, 0};
  EXPECT_EQ(refusal(batch), "request 1: keep_keys is 5, legal: 0 … 4 (seq_lens)");
  batch.keep_keys = {-1, 0, 0};
  EXPECT_EQ(refusal(batch), "request 0: keep_keys is -1, legal: 0 … 9 (seq_lens)");
  batch.keep_keys = {0, 0, 3};
  const Ints starts = {0, 0, 0, 5}, parents = {-1, 0, 0, 1, 2};
  CommonAttentionMetadata view = batch.view();
  view.tree_start_loc = starts;
  view.tree_parents = parents;
  EXPECT_EQ(error_text([&] { check_lists(view, {.keep_keys = true, .trees = true}); }),
            "request 2: keep_keys is 3, legal with its tree: 0 … 2");
}

/// Three requests of 1, 0 and 5 query tokens and 9, 4 and 7 keys; the last has a tree.
CommonAttentionMetadata with_tree(const Batch& batch, const Ints& starts, const Ints& parents) {
  CommonAttentionMetadata view = batch.view();
  view.tree_start_loc = starts;
  view.tree_parents = parents;
  return view;
}

std::string refusal_of_tree(const Ints& starts, const Ints& parents,
                            void (*change)(Batch&) = nullptr) {
  Batch batch = three_requests();
  if (change != nullptr) change(batch);
  const ListRules rules{.spans = true, .directions = true, .first_keys = true, .trees = true};
  return error_text([&] { check_lists(with_tree(batch, starts, parents), rules); });
}

TEST(CheckLists, TreesThatAreLegal) {
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, {-1, 0, 0, 1, -1}), "no error");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 7}, {-1, 0, 0, 1, 1, 4, 2}), "no error");  // all its keys
  EXPECT_EQ(refusal_of_tree({0, 2, 4, 4}, {-1, 0, -1, -1}), "no error");  // 4 keys, no new token
  EXPECT_EQ(refusal_of_tree(
                {0, 0, 0, 5}, {-1, 0, 0, 1, -1},
                [](Batch& b) {
                  b.first_keys = {0, 0, 2};
                  b.span_start_loc = {0, 1, 1, 1};
                  b.spans = {0, 4};
                  b.direction = {Direction::kBothWays, Direction::kCanvas, Direction::kCausal};
                }),
            "no error");
}

TEST(CheckLists, TreesThatAreRefused) {
  const Ints five = {-1, 0, 0, 1, -1};
  EXPECT_EQ(refusal_of_tree({0, 0, 5}, five),
            "tree_start_loc holds 3 elements, legal: 4 (num_reqs + 1), or none");
  EXPECT_EQ(refusal_of_tree({}, five),
            "tree_start_loc holds 0 elements, legal: 4 (num_reqs + 1), or none");
  EXPECT_EQ(refusal_of_tree({1, 1, 1, 5}, five), "tree_start_loc[0] is 1, legal: 0");
  EXPECT_EQ(refusal_of_tree({0, 1, 0, 5}, five),
            "tree_start_loc[2] is 0, legal: 1 … 5 (tree_parents)");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 6}, five),
            "tree_start_loc[3] is 6, legal: 0 … 5 (tree_parents)");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, {-1, 0, 0, 1, -1, 2}),
            "tree_parents holds 6 elements, legal: 5 (the last of tree_start_loc), or none");
  const std::string legal = " (its query tokens … at most 256 and seq_lens), or none";
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 4}, {-1, 0, 0, 1}),
            "request 2: its tree has 4 nodes, legal: 5 … 7" + legal);
  EXPECT_EQ(refusal_of_tree({0, 0, 5, 5}, five),
            "request 1: its tree has 5 nodes, legal: 0 … 4" + legal);
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, {-1, 0, 2, 1, -1}),
            "request 2: the parent of node 2 is 2, legal: -1 … 1");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, {-1, 0, -2, 1, -1}),
            "request 2: the parent of node 2 is -2, legal: -1 … 1");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, five, [](Batch& b) { b.causal = false; }),
            "request 2: it has a tree and is not causal, legal: one of both");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, five,
                            [](Batch& b) { b.direction.assign(3, Direction::kBothWays); }),
            "request 2: it has a tree and is not causal, legal: one of both");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, five,
                            [](Batch& b) {
                              b.span_start_loc = {0, 0, 0, 1};
                              b.spans = {0, 1};
                            }),
            "request 2: it has a tree and spans, legal: one of both");
  EXPECT_EQ(refusal_of_tree({0, 0, 0, 5}, five,
                            [](Batch& b) {
                              b.first_keys = {0, 0, 3};
                            }),
            "request 2: first_keys is 3, legal with its tree: 0 … 2");
  const Batch batch = three_requests();
  const Ints starts = {0, 0, 0, 5};
  EXPECT_EQ(error_text([&] { check_lists(with_tree(batch, starts, five), {}); }),
            "tree_parents holds 5 elements, legal without use_trees: none");
  Batch long_one = test::make_batch({{1, 400}}, 16);
  EXPECT_EQ(error_text([&] {
              const Ints many(257, -1), of_one = {0, 257};
              check_lists(with_tree(long_one, of_one, many), {.trees = true});
            }),
            "request 0: its tree has 257 nodes, legal: 1 … 256" + legal);
}

/// Calls `expect` with a batch for each list, and what refuse_lists() says of it.
template <typename Expect>
void for_each_list(const Batch& plain, Expect expect) {
  Batch batch = plain;
  batch.direction.assign(static_cast<std::size_t>(batch.num_reqs), Direction::kCausal);
  expect(batch, fmt::format("direction holds {} elements, legal: none", batch.num_reqs));
  batch = plain;
  batch.span_start_loc.assign(static_cast<std::size_t>(batch.num_reqs) + 1, 1);
  batch.span_start_loc[0] = 0;
  batch.spans = {0, 1};
  expect(batch, "spans holds 2 elements, legal: none");
  batch = plain;
  batch.first_keys.assign(static_cast<std::size_t>(batch.num_reqs), 0);
  expect(batch, fmt::format("first_keys holds {} elements, legal: none", batch.num_reqs));
  batch = plain;
  batch.keep_keys.assign(static_cast<std::size_t>(batch.num_reqs), 0);
  expect(batch, fmt::format("keep_keys holds {} elements, legal: none", batch.num_reqs));
}

TEST(RefuseLists, BatchesThatAreMadeOfOthersHaveNone) {
  const auto refuse = [](const char* call, const Batch& plain, auto run) {
    run(plain.view());
    for_each_list(plain, [&](const Batch& batch, const std::string& why) {
      EXPECT_EQ(error_text([&] { run(batch.view()); }, ErrorCode::kUnsupported),
                fmt::format("{}: {}", call, why));
    });
  };
  refuse("make_kv_sharing_fast_prefill_common_attn_metadata", three_requests(),
         [](const CommonAttentionMetadata& batch) {
           make_kv_sharing_fast_prefill_common_attn_metadata(batch, Ints{0, 5});
         });
  refuse("advance_batch", three_requests(),
         [](const CommonAttentionMetadata& batch) { advance_batch(batch, true); });
  refuse("make_local_attention_virtual_batches", three_requests(),
         [](const CommonAttentionMetadata& batch) {
           make_local_attention_virtual_batches(16, batch, 16);
         });
  refuse("make_metadata_with_slice", three_requests(), [](const CommonAttentionMetadata& batch) {
    make_metadata_with_slice({{0, batch.num_reqs}, {0, batch.num_actual_tokens}}, batch);
  });
}

}  // namespace
}  // namespace clattn::detail
