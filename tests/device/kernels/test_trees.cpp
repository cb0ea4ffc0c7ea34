// Drafts in a tree, in every kernel family: a row sees what leads to it. What no row of a request
// sees is NaN.
#include <algorithm>

#include "device/masks.hpp"
#include "device/tree_cases.hpp"

namespace test_trees {

using attention_test::CaseResult;
using attention_test::CaseSpec;
using attention_test::chain_of;
using attention_test::Keys;
using attention_test::Parents;
using attention_test::Request;
using attention_test::requests_with_trees;
using attention_test::with_tree;

class Trees : public attention_test::Masks {
 protected:
  static CaseSpec plain(std::int32_t window = 0) {
    CaseSpec spec;
    spec.config = attention_test::small_config();
    spec.config.use_trees = true;
    spec.config.sliding_window = window;
    spec.causal_encoder = true;
    spec.unseen_is_nan = true;
    return spec;
  }
};

TEST_P(Trees, T26_ARowSeesItsAncestors) {
  expect_keys(plain(), with_tree({-1, 0, 0, 1}, {4, 3}),
              {{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 5}, {0, 1, 2, 3, 4, 6}});
}

TEST_P(Trees, T28_WindowsCountAlongThePath) {
  expect_keys(plain(2), with_tree({-1, 0, 0, 1}, {4, 3}), {{2, 3}, {3, 4}, {3, 5}, {4, 6}});
}

TEST_P(Trees, T29_NodesOfEarlierSteps) {
  expect_keys(plain(), with_tree({-1, 0, 0, 1}, {2, 5}), {{0, 1, 2, 3, 5}, {0, 1, 2, 3, 4, 6}});
}

TEST_P(Trees, T30_SeveralRootsAndNoContext) {
  expect_keys(plain(), with_tree({-1, -1, 0, 1, 0}, {5, 0}), {{0}, {1}, {0, 2}, {1, 3}, {0, 4}});
}

TEST_P(Trees, T33_DepthsMayFall) {
  expect_keys(plain(), with_tree({-1, 0, 1, 0}, {4, 3}),
              {{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 6}});
  expect_keys(plain(3), with_tree({-1, 0, 1, 0}, {4, 3}),
              {{1, 2, 3}, {2, 3, 4}, {3, 4, 5}, {2, 3, 6}});
}

TEST_P(Trees, ChunksCountAlongThePath) {
  CaseSpec spec = plain();
  spec.config.attention_chunk_size = 4;
  expect_keys(spec, with_tree({-1, 0, 0, 1}, {4, 2}), {{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 4}, {5}});
  spec.config.chunk_lookback = 1;
  expect_keys(
      spec, with_tree({-1, 0, 0, 1}, {4, 6}),
      {{0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 8}, {4, 5, 6, 7, 9}});
}

TEST_P(Trees, FirstKeysInFrontOfATree) {
  CaseSpec spec = plain();
  spec.config.use_first_keys = true;
  Request request = with_tree({-1, 0, 0, 1}, {4, 3});
  request.first_key = 2;
  expect_keys(spec, request, {{2, 3}, {2, 3, 4}, {2, 3, 5}, {2, 3, 4, 6}});
}

TEST_P(Trees, T27_T31_ChainsHaveTheBitsOfCausality) {
  for (const auto& context : devices()) {
    CaseSpec spec = plain(20);
    spec.requests = {{1, 50}, {7, 40}, {33, 40}};
    const CaseResult causal = run(context, spec);
    spec.requests[0].parents = {-1};
    spec.requests[1].parents = chain_of(7);
    spec.requests[2].parents = chain_of(40);
    const CaseResult chains = run(context, spec);
    EXPECT_EQ(chains.out, causal.out);
    EXPECT_EQ(chains.lse, causal.lse);
  }
}

TEST_P(Trees, T32_TreesOfAllSizesOverPagesOfAllSizes) {
  for (const std::int32_t window : {0, 5, 100}) {
    CaseSpec spec = plain(window);
    spec.requests = requests_with_trees();
    spec.num_splits = window == 5 ? 0 : 3;
    for (const std::int32_t page : {1, 5, 16, 544}) {
      spec.config.block_size = page;
      expect_right(spec);
    }
  }
}

TEST_P(Trees, AlibiCountsAlongThePath) {
  for (const std::int32_t window : {0, 9}) {
    CaseSpec spec = plain(window);
    spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, -0.0625F};
    spec.requests = requests_with_trees();
    for (const std::int32_t page : {5, 16}) {
      spec.config.block_size = page;
      spec.num_splits = page == 5 ? 3 : 0;
      expect_right(spec);
    }
  }
}

TEST_P(Trees, WithMaskCapSinksAlibiAndOtherLists) {
  CaseSpec spec = plain(40);
  spec.config.custom_mask = spec.config.use_spans = spec.config.use_first_keys = true;
  spec.config.logits_soft_cap = 20;
  spec.config.sinks = {0.5F, -1, 2, 0};
  spec.config.alibi_slopes = {0.5F, 0.25F, 0.125F, -0.0625F};
  spec.requests = requests_with_trees();
  spec.requests[6].spans = {{100, 190}};
  spec.requests[7].first_key = 17;
  expect_right(spec);
  spec.config.attention_chunk_size = 64;
  spec.config.num_heads = 10;  // rows of a tile are heads of several tokens
  spec.config.sinks.assign(10, 0.5F);
  spec.config.alibi_slopes.assign(10, 0.25F);
  spec.split_policy = clattn::SplitPolicy::kDeterministic;
  expect_right(spec);
}

/// The output rows of one request.
std::vector<double> rows_of(const CaseSpec& spec, const CaseResult& result, std::size_t request) {
  std::size_t first = 0;
  for (std::size_t r = 0; r < request; ++r)
    first += static_cast<std::size_t>(spec.requests[r].query_len);
  const auto width = static_cast<std::size_t>(spec.config.num_heads) *
                     static_cast<std::size_t>(spec.config.head_size);
  const auto begin = result.out.begin() + static_cast<std::ptrdiff_t>(first * width);
  const auto count = static_cast<std::size_t>(spec.requests[request].query_len) * width;
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

// A tree over the keys of a chain of the same length: its first path has the chain's rows.
TEST_P(Trees, RowsBeforeTheFirstBranchAreTheChains) {
  for (const auto& context : devices()) {
    CaseSpec spec = plain();
    spec.split_policy = clattn::SplitPolicy::kDeterministic;
    Parents tree = chain_of(9);
    tree.back() = 2;
    spec.requests = {{9, 70}};
    const std::vector<double> chain = rows_of(spec, run(context, spec), 0);
    spec.requests = {with_tree(tree, {9, 70})};
    const std::vector<double> branched = rows_of(spec, run(context, spec), 0);
    const auto before = static_cast<std::ptrdiff_t>(chain.size() / 9 * 8);
    EXPECT_TRUE(std::equal(chain.begin(), chain.begin() + before, branched.begin()));
    EXPECT_NE(chain, branched);
  }
}

FOR_ALL_FAMILIES(Trees);

}  // namespace test_trees
