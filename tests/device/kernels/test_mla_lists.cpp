// What a batch says of the latent rows that the queries of a request see, in every kernel family.
// Positions before a first key are NaN.
#include "device/mla_case.hpp"
#include "device/runtime_fixture.hpp"
#include "support/error_text.hpp"

namespace test_mla_lists {

using clattn::Direction;
using clattn::DType;
using mla_test::Case;
using mla_test::Outcome;
using mla_test::small_case;
using test::error_text;

class MLALists : public mla_test::MLATest {};
INSTANTIATE_TEST_SUITE_P(Families, MLALists, mla_test::kAllKernels, mla_test::kernels_name);

TEST_P(MLALists, DirectionsOfRequests) {
  Case c = small_case();
  c.config.use_directions = true;
  for (std::size_t r = 0; r < c.requests.size(); ++r)
    c.requests[r].direction = static_cast<Direction>(r % 3);
  check(c);
  c.num_splits = 3;
  check(c);
}

TEST_P(MLALists, SpansFirstKeysAndDirectionsTogether) {
  Case c = small_case(DType::kBF16);
  c.config.kv_cache_dtype = DType::kFp8E4M3;
  c.cache_scale = 0.5;
  c.config.use_directions = c.config.use_spans = c.config.use_first_keys = true;
  c.requests = {{1, 40}, {7, 30}, {0, 9}, {16, 9}, {5, 100}, {3, 3}};
  c.requests[0].first_key = 41;  // it sees nothing
  c.requests[1].spans = {{31, 34}, {34, 36}};
  c.requests[3].spans = {{0, 20}, {21, 40}};
  c.requests[3].first_key = 6;
  c.requests[4].direction = Direction::kBothWays;
  c.requests[4].first_key = 97;
  c.requests[5].first_key = 4;
  for (const std::int32_t block_size : {1, 5, 16}) {
    c.config.block_size = block_size;
    for (const std::int32_t splits : {0, 3}) {
      c.num_splits = splits;
      check(c);
    }
  }
}

TEST_P(MLALists, TreesOfDrafts) {
  Case c = small_case();
  c.config.use_trees = c.config.use_first_keys = true;
  c.requests = {{4, 3}, {1, 50}, {6, 90}, {2, 30}, {5, 0}, {40, 20}};
  c.requests[0].parents = {-1, 0, 0, 1};
  c.requests[2].parents = {-1, 0, 1, 2, 3, 4};  // a chain
  c.requests[3].parents = {-1, 0, 0, 1, 2};     // three nodes are in the cache already
  c.requests[4].parents = {-1, -1, 0, 1, 0};    // two roots, no context
  for (std::int32_t node = 0; node < 40; ++node)
    c.requests[5].parents.push_back((node + 1) / 2 - 1);
  c.requests[5].first_key = 18;
  for (const std::int32_t splits : {0, 1, 3}) {
    c.num_splits = splits;
    check(c);
  }
  c.config.num_heads = 5;
  c.config.block_size = 5;
  check(c);
}

TEST_P(MLALists, AnOverflowedDraftHarmsNoOtherBranch) {
  Case c = small_case();
  c.config.use_trees = true;
  c.requests = {{4, 40}, {3, 20}, {7, 62}};
  c.requests[0].parents = {-1, 0, 0, 0};
  c.requests[1].parents = {-1, -1, -1};
  c.requests[2].parents = {-1, 0, 1, 1, 0, 0, 2};
  c.last_token_overflows = true;
  check(c);
}

TEST_P(MLALists, PlansOfOneCutAndOfPositionAlone) {
  Case c = small_case();
  c.config.use_trees = c.config.use_directions = true;
  c.requests[3].parents = {-1, 0, 0, 2};
  c.requests[4].direction = Direction::kBothWays;
  c.split_policy = clattn::SplitPolicy::kDeterministic;
  check(c);
  c.split_policy = clattn::SplitPolicy::kBalanced;
  c.fast_build = true;
  check(c);
  c.graph_batch_size = 8;
  c.requests = {{1, 40}, {0, 0}, {4, 30}, {1, 200}};
  c.requests[2].parents = {-1, 0, 0, 2};
  check(c);
}

// Without a window all first keys are seen anyway.
TEST_P(MLALists, KeptKeysChangeNothing) {
  Case c = small_case();
  const std::vector<Outcome> plain = check(c);
  for (mla_test::Request& request : c.requests) request.keep_keys = request.context_len / 2;
  const std::vector<Outcome> kept = check(c);
  ASSERT_EQ(plain.size(), kept.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(plain[i].out, kept[i].out);
    EXPECT_EQ(plain[i].kernels, kept[i].kernels);
  }
}

TEST(MLARefusals, ListsAreForLayersThatTakeThem) {
  const auto& context = attention_test::all_contexts().front();
  const Case c = small_case();
  const step_test::Layout layout({{2, 3}}, c.config.block_size);
  const clattn::Queue queue = context->create_queue();
  const auto plain = clattn::make_mla_builder(context, c.config, layout.options(0));
  clattn::CommonAttentionMetadata batch = layout.batch();
  const std::vector<std::int32_t> first_keys = {1};
  batch.first_keys = first_keys;
  EXPECT_EQ(error_text([&] { plain->build(queue, batch); }),
            "first_keys holds 1 elements, legal without use_first_keys: none");
  clattn::MLAConfig listing = c.config;
  listing.use_first_keys = true;
  const auto lists = clattn::make_mla_builder(context, listing, layout.options(0));
  const auto& metadata = lists->build(queue, batch);
  const auto impl = clattn::make_mla_impl(*context, c.config);
  const clattn::Buffer any = context->allocate(std::size_t{1} << 20);
  const clattn::MLACache cache{any, DType::kF16, layout.num_blocks, 16, 64, 16, {}};
  EXPECT_NE(error_text([&] {
              impl->forward(queue, {.query = {any.handle()}, .output = {any.handle()}}, cache,
                            metadata);
            }).find("attn_metadata: "),
            std::string::npos);
}

}  // namespace test_mla_lists
