#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "cli/replay/block_allocator.hpp"

namespace {

using clattn::cli::BlockAllocator;

TEST(BlockAllocator, HandsOutEveryBlockOnceThenNone) {
  BlockAllocator blocks(3);
  EXPECT_EQ(blocks.allocate(), 0);
  EXPECT_EQ(blocks.allocate(), 1);
  EXPECT_EQ(blocks.allocate(), 2);
  EXPECT_EQ(blocks.allocate(), std::nullopt);
  EXPECT_EQ(blocks.num_free(), 0);
  EXPECT_EQ(blocks.peak_used(), 3);
}

TEST(BlockAllocator, ReusesTheLeastRecentlyReleased) {
  BlockAllocator blocks(3);
  for (int i = 0; i < 3; ++i) blocks.allocate();
  blocks.release(1);
  blocks.release(2);
  blocks.release(0);
  EXPECT_EQ(blocks.allocate(), 1);
  EXPECT_EQ(blocks.allocate(), 2);
  EXPECT_EQ(blocks.allocate(), 0);
}

TEST(BlockAllocator, ReleasedContentLivesUntilReuse) {
  BlockAllocator blocks(2);
  const auto block = blocks.allocate();
  ASSERT_EQ(block, 0);
  blocks.publish(0, 42);
  blocks.release(0);
  EXPECT_EQ(blocks.find(42), 0);
  EXPECT_EQ(blocks.allocate(), 1);  // never used before: released earlier than block 0
  blocks.share(0);                  // back from the free list
  EXPECT_EQ(blocks.num_free(), 0);
  blocks.release(0);
  EXPECT_EQ(blocks.allocate(), 0);
  EXPECT_EQ(blocks.find(42), std::nullopt);
}

TEST(BlockAllocator, SharedBlockIsFreeAfterItsLastHolder) {
  BlockAllocator blocks(1);
  blocks.allocate();
  blocks.share(0);
  blocks.release(0);
  EXPECT_EQ(blocks.num_free(), 0);
  EXPECT_EQ(blocks.reference_count(0), 1);
  blocks.release(0);
  EXPECT_EQ(blocks.num_free(), 1);
}

TEST(BlockAllocator, FirstBlockKeepsAName) {
  BlockAllocator blocks(2);
  blocks.allocate();
  blocks.allocate();
  blocks.publish(0, 5);
  blocks.publish(1, 5);
  EXPECT_EQ(blocks.find(5), 0);
  blocks.release(1);
  EXPECT_EQ(blocks.allocate(), 1);  // block 1 never had the name, so its reuse keeps block 0's
  EXPECT_EQ(blocks.find(5), 0);
}

// Random traffic against a plain model of who holds what.
TEST(BlockAllocator, AgreesWithAPlainModel) {
  constexpr std::int32_t kBlocks = 13;
  BlockAllocator blocks(kBlocks);
  std::map<std::int32_t, std::int32_t> holders;
  std::vector<std::int32_t> held;
  std::mt19937 random(20261120);
  std::uint64_t next_hash = 1;
  int allocations = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto action = random() % 3;
    if (action == 0) {
      const auto block = blocks.allocate();
      ASSERT_EQ(block.has_value(), holders.size() < kBlocks);
      if (!block) continue;
      ASSERT_EQ(holders.count(*block), 0U) << "handed out while held";
      blocks.publish(*block, next_hash++);
      holders[*block] = 1;
      held.push_back(*block);
      ++allocations;
    } else if (action == 1 && next_hash > 1) {
      const auto block = blocks.find(1 + random() % (next_hash - 1));
      if (!block) continue;
      blocks.share(*block);
      ++holders[*block];
      held.push_back(*block);
    } else if (!held.empty()) {
      const std::size_t pick = random() % held.size();
      const std::int32_t block = held[pick];
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(pick));
      blocks.release(block);
      if (--holders[block] == 0) holders.erase(block);
    }
    ASSERT_EQ(blocks.num_used(), static_cast<std::int32_t>(holders.size()));
    for (const auto& [block, count] : holders) ASSERT_EQ(blocks.reference_count(block), count);
  }
  EXPECT_GT(allocations, 1000);
}

}  // namespace
