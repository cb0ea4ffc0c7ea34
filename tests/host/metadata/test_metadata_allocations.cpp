#include <gtest/gtest.h>
#include <clattn/reorder.hpp>

#include <new>

#include "host/metadata_batch.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"
#include "support/counting_new.hpp"

namespace clattn::detail {
namespace {

using test::allocations_of;

TEST(MetadataAllocations, TheCounterCounts) {
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(24)); }), 1U);
  EXPECT_EQ(allocations_of([] {
              constexpr std::align_val_t kLine{64};
              ::operator delete(::operator new(24, kLine), kLine);
            }),
            1U);
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(24, std::nothrow)); }), 1U);
  EXPECT_EQ(allocations_of([] {}), 0U);
}

/// 256 requests of about 4096 tokens, decoding or mixed with prefills, and all that a step writes.
struct Step {
  explicit Step(std::int32_t num_prefills) {
    for (std::int32_t r = 0; r < 256; ++r) {
      const bool prefill = r >= 256 - num_prefills;
      requests.push_back({prefill ? 200 : 1, 4096 - 13 * (r % 50)});
      scheduled.push_back((r * 7) % 256 >= 256 - num_prefills ? 200 : 1);
    }
    batch = test::make_batch(requests, 16);
    slots.resize(static_cast<std::size_t>(batch.num_actual_tokens));
    pages_at.resize(256);
    order.resize(256);
    for (auto& list : items) list.resize(20000);
    merges.resize(60000);
    config.tiles = {TileClass{16, 16}, TileClass{0, 64}};
    config.num_tiles = 2;
    for (TileClass& tile : config.tiles) tile.workers = 132;
    config.max_partial_rows = 1 << 20;
  }

  std::vector<test::Request> requests;
  std::vector<std::int32_t> scheduled, pages_at, order;
  test::Batch batch;
  std::vector<std::int64_t> slots;
  std::vector<ClaWorkItem> items[2];
  std::vector<ClaMergeItem> merges;
  PlannerConfig config;
};

class StepAllocations : public testing::TestWithParam<std::int32_t> {};

TEST_P(StepAllocations, AreNone) {
  Step step(GetParam());
  const CommonAttentionMetadata batch = step.batch.view();
  const std::int64_t num_blocks = std::int64_t{1} << 20;
  EXPECT_EQ(allocations_of([&] { validate_batch(batch, 16, num_blocks); }), 0U);
  EXPECT_EQ(allocations_of([&] {
              validate_limits(batch, validate_lengths(batch, 16), {512, 1 << 20, 1 << 20, -1});
            }),
            0U);
  EXPECT_EQ(allocations_of([&] { compute_slot_mapping(batch, 16, step.slots); }), 0U);
  BatchSplit split;
  EXPECT_EQ(allocations_of([&] { split = split_decodes_and_prefills(batch); }), 0U);
  EXPECT_EQ(split.num_prefills, GetParam());
  bool moved = false;
  EXPECT_EQ(allocations_of([&] {
              moved = reorder_batch_to_split_decodes_and_prefills(step.scheduled, 1, step.order);
            }),
            0U);
  EXPECT_EQ(moved, GetParam() > 0);

  PlanOutput output;
  output.items = {step.items[0], step.items[1], {}};
  output.merges = step.merges;
  for (const SplitPolicy policy : {SplitPolicy::kBalanced, SplitPolicy::kDeterministic}) {
    for (const std::int64_t max_partial_rows : {1 << 20, 1 << 12}) {
      step.config.split_policy = policy;
      step.config.max_partial_rows = max_partial_rows;
      PlanCounts counts;
      EXPECT_EQ(allocations_of([&] {
                  const AttentionPlan plan(step.config, batch);
                  counts = plan.counts();
                  plan.write(step.pages_at, output);
                }),
                0U);
      EXPECT_GT(counts.num_items[0], 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(NumPrefills, StepAllocations, testing::Values(0, 3, 64));

}  // namespace
}  // namespace clattn::detail
