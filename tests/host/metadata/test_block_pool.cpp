#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <clattn/error.hpp>
#include <map>
#include <string>
#include <vector>

#include "support/counting_new.hpp"
#include "support/error_text.hpp"
#include "support/properties.hpp"

namespace {

using clattn::BlockHash;
using clattn::BlockPool;
using clattn::ErrorCode;
using test::between;
using test::error_text;
using Ints = std::vector<std::int32_t>;

std::uint64_t always_the_same(std::uint64_t, std::span<const std::int32_t>) {
  return 7;
}

TEST(BlockPool, HandsOutAllThatIsAskedForOrNothing) {
  BlockPool pool(3, 16);
  EXPECT_EQ(pool.allocate(2), (Ints{0, 1}));
  EXPECT_EQ(error_text([&] { pool.allocate(2); }, ErrorCode::kOutOfBlocks),
            "BlockPool: count is 2, legal: up to the 1 free blocks of 3");
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.allocate(1), (Ints{2}));
  EXPECT_EQ(pool.allocate(0), Ints{});
  EXPECT_EQ(pool.peak_used(), 3);
  pool.release(Ints{0, 1, 2});
  EXPECT_EQ(pool.num_used(), 0);
  EXPECT_EQ(pool.peak_used(), 3);
}

TEST(BlockPool, ReusesTheLeastRecentlyReleasedAndOfOneCallTheLast) {
  BlockPool pool(4, 1);
  pool.publish(Ints{5, 6, 7, 8}, pool.allocate(4));
  pool.release(Ints{1});
  pool.release(Ints{2, 3, 0});
  EXPECT_EQ(pool.allocate(4), (Ints{1, 0, 3, 2}));
}

// Room for drafts that are rejected, say, costs no prefix however often it is taken.
TEST(BlockPool, ReusesBlocksWithoutContentFirst) {
  BlockPool pool(6, 1);
  const Ints first = pool.allocate(2);
  pool.publish(Ints{5, 6}, first);
  pool.release(first);
  for (int round = 0; round < 4; ++round) pool.release(pool.allocate(2));
  EXPECT_EQ(pool.find_prefix(Ints{5, 6}), first);
  pool.release(pool.allocate(4));
  EXPECT_EQ(pool.find_prefix(Ints{5, 6}), first);
  EXPECT_EQ(pool.allocate(5).back(), first[1]);
}

TEST(BlockPool, FindsFullBlocksUntilTheyAreReused) {
  BlockPool pool(4, 2);
  const Ints tokens = {5, 6, 7, 8, 9}, blocks = pool.allocate(3);
  pool.publish(tokens, blocks);
  EXPECT_EQ(pool.find_prefix(tokens), (Ints{0, 1}));  // the third is not full
  EXPECT_EQ(pool.find_prefix(Ints{5, 6, 7}), (Ints{0}));
  EXPECT_EQ(pool.find_prefix(Ints{5, 6, 7, 9}), (Ints{0}));
  EXPECT_EQ(pool.find_prefix(Ints{7, 8}), Ints{});  // the same tokens, but not after 5, 6
  pool.release(blocks);
  EXPECT_EQ(pool.find_prefix(tokens), (Ints{0, 1}));
  pool.share(Ints{0});  // back from the free ones
  EXPECT_EQ(pool.num_used(), 1);
  EXPECT_EQ(pool.allocate(3), (Ints{2, 3, 1}));
  EXPECT_EQ(pool.find_prefix(tokens), (Ints{0}));
}

// Of blocks with one content each is as good as the other, and so is what follows them.
TEST(BlockPool, ContentIsLostOnlyWithItsLastBlock) {
  BlockPool pool(5, 1);
  const Ints first = pool.allocate(2), second = pool.allocate(3);
  pool.publish(Ints{1, 2}, first);
  pool.publish(Ints{1, 2, 3}, second);
  pool.release(first);
  pool.allocate(2);  // those of `first`
  EXPECT_EQ(pool.find_prefix(Ints{1, 2, 3}), second);
}

TEST(BlockPool, SharedBlocksAreFreeAfterTheirLastHolder) {
  BlockPool pool(1, 16);
  const Ints block = pool.allocate(1);
  pool.share(block);
  pool.release(block);
  EXPECT_EQ(pool.reference_count(0), 1);
  EXPECT_EQ(pool.num_free(), 0);
  pool.release(block);
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(BlockPool, FindsWhatWasPublishedByTheSameSalt) {
  for (const clattn::BlockHash hash : {BlockHash{clattn::hash_block}, BlockHash{always_the_same}}) {
    BlockPool pool(6, 2, hash);
    const Ints tokens = {5, 6, 5, 6}, salted = pool.allocate(2), plain = pool.allocate(2);
    pool.publish(tokens, salted, 9);
    EXPECT_EQ(pool.find_prefix(tokens), Ints{});
    EXPECT_EQ(pool.find_prefix(tokens, 8), Ints{});
    EXPECT_EQ(pool.find_prefix(tokens, 9), salted);
    pool.publish(tokens, plain);
    EXPECT_EQ(pool.find_prefix(tokens), plain);
    EXPECT_EQ(pool.find_prefix(tokens, 9), salted);
    // The second blocks' parents have the numbers of contents, which are not those salts.
    for (std::uint64_t salt = 1; salt < 9; ++salt)
      EXPECT_EQ(pool.find_prefix(tokens, salt), Ints{});
  }
}

// So nothing can be left half published.
TEST(BlockPool, PublishesAndForgetsWithoutAllocating) {
  BlockPool pool(40, 1);
  Ints tokens(40);
  std::ranges::generate(tokens, [next = 0]() mutable { return next++; });
  const Ints blocks = pool.allocate(40);
  EXPECT_EQ(test::allocations_of([&] { pool.publish(tokens, blocks); }), 0U);
  EXPECT_EQ(pool.find_prefix(tokens), blocks);
  EXPECT_TRUE(pool.is_published(39));
  pool.release(blocks);
  EXPECT_EQ(test::fail_each_allocation([&] { pool.allocate(40); }), 1U);
  EXPECT_FALSE(pool.is_published(39));
  EXPECT_EQ(pool.find_prefix(tokens), Ints{});
}

TEST(BlockPool, NamesWhatItRefuses) {
  EXPECT_EQ(error_text([] { BlockPool(0, 16); }),
            "BlockPool: num_blocks is 0, legal: 1 … 2147483646");
  EXPECT_EQ(error_text([] { BlockPool(INT32_MAX, 16); }),
            "BlockPool: num_blocks is 2147483647, legal: 1 … 2147483646");
  EXPECT_EQ(error_text([] { BlockPool(1, 0); }), "BlockPool: block_size is 0, legal: >= 1");
  BlockPool pool(2, 2);
  EXPECT_EQ(error_text([&] { pool.allocate(-1); }), "BlockPool: count is -1, legal: >= 0");
  EXPECT_EQ(error_text([&] { pool.reference_count(2); }), "BlockPool: block is 2, legal: 0 … 1");
  EXPECT_EQ(error_text([&] { pool.release(Ints{0}); }),
            "BlockPool: block 0 has 0 holders, legal: at least 1");
  const Ints held = pool.allocate(1);
  EXPECT_EQ(error_text([&] {
              pool.share(Ints{0, 1});
            }),
            "BlockPool: block 1 is free and unpublished, legal: a held block, or one that "
            "find_prefix() named");
  EXPECT_EQ(pool.reference_count(0), 1);
  EXPECT_EQ(error_text([&] {
              pool.publish(Ints{1, 2, 3, 4}, held);
            }),
            "BlockPool: 1 blocks are given, legal: at least the 2 that 4 tokens fill");
  EXPECT_EQ(error_text([&] {
              pool.publish(Ints{1, 2, 3, 4}, Ints{0, 1});
            }),
            "BlockPool: block 1 has 0 holders, legal: at least 1");
  EXPECT_EQ(pool.find_prefix(Ints{1, 2}), Ints{});
  EXPECT_EQ(error_text([&] {
              pool.publish(Ints{1, 2, 3, 4}, Ints{0, 0});
            }),
            "BlockPool: block 0 is given twice, legal: a block of its own for each 2 tokens");
  EXPECT_EQ(pool.find_prefix(Ints{1, 2, 3, 4}), Ints{0});
}

/// Sequences that start, grow, fork and end on a pool, and what each block really holds.
class Traffic {
 public:
  Traffic(std::int32_t num_blocks, std::int32_t block_size, clattn::BlockHash hash)
      : pool_(num_blocks, block_size, hash), written_(static_cast<std::size_t>(num_blocks)) {}

  void act() {
    const std::int32_t action = between(0, 4);
    if (action == 0 || live_.empty()) return start();
    const auto pick = static_cast<std::size_t>(between(0, static_cast<int>(live_.size()) - 1));
    if (action == 1) return grow(live_[pick]);
    if (action == 2 && live_[pick].tokens.size() % size() == 0) {
      pool_.share(live_[pick].blocks);
      live_.push_back(Sequence(live_[pick]));
    } else {
      pool_.release(live_[pick].blocks);
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }

  void check() const {
    std::map<std::int32_t, std::int32_t> holders;
    for (const Sequence& sequence : live_) {
      for (const std::int32_t block : sequence.blocks) ++holders[block];
      // Everything that is alive is found, and whatever is found is what would be computed anew.
      const Ints found = pool_.find_prefix(sequence.tokens);
      RC_ASSERT(found.size() == sequence.tokens.size() / size());
      for (std::size_t i = 0; i < sequence.blocks.size(); ++i)
        RC_ASSERT(holds(sequence.blocks[i], sequence.tokens, i));
      for (std::size_t i = 0; i < found.size(); ++i) RC_ASSERT(holds(found[i], sequence.tokens, i));
    }
    RC_ASSERT(pool_.num_used() == static_cast<std::int32_t>(holders.size()));
    RC_ASSERT(pool_.num_used() + pool_.num_free() == pool_.num_blocks());
    for (std::int32_t block = 0; block < pool_.num_blocks(); ++block)
      RC_ASSERT(pool_.reference_count(block) == holders[block]);
  }

 private:
  struct Sequence {
    Ints tokens, blocks;
  };

  std::size_t size() const { return static_cast<std::size_t>(pool_.block_size()); }
  static Ints some_tokens() {  // of two values, so that many sequences begin alike
    Ints tokens(static_cast<std::size_t>(between(1, 9)));
    for (std::int32_t& token : tokens) token = between(0, 1);
    return tokens;
  }
  /// What block i of a sequence holds: its tokens and, since keys depend on them, all before.
  Ints content(const Ints& tokens, std::size_t i) const {
    const std::size_t end = std::min((i + 1) * size(), tokens.size());
    return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(end)};
  }
  bool holds(std::int32_t block, const Ints& tokens, std::size_t i) const {
    return written_[static_cast<std::size_t>(block)] == content(tokens, i);
  }

  void start() {
    Sequence sequence{some_tokens(), {}};
    sequence.blocks = pool_.find_prefix(sequence.tokens);
    for (std::size_t i = 0; i < sequence.blocks.size(); ++i)
      RC_ASSERT(holds(sequence.blocks[i], sequence.tokens, i));
    pool_.share(sequence.blocks);
    if (write(sequence, sequence.blocks.size())) {
      live_.push_back(sequence);
    } else {
      pool_.release(sequence.blocks);
    }
  }

  void grow(Sequence& sequence) {
    Sequence grown = sequence;
    const Ints more = some_tokens();
    grown.tokens.insert(grown.tokens.end(), more.begin(), more.end());
    if (write(grown, sequence.tokens.size() / size())) sequence = grown;
  }

  /// Writes the tokens from block `first` on. False, and nothing has changed, if there is no room.
  bool write(Sequence& sequence, std::size_t first) {
    const std::size_t needed = (sequence.tokens.size() + size() - 1) / size();
    const auto missing = static_cast<std::int32_t>(needed - sequence.blocks.size());
    const std::int32_t free = pool_.num_free();
    if (missing > free) {
      const std::string text =
          error_text([&] { pool_.allocate(missing); }, ErrorCode::kOutOfBlocks);
      RC_ASSERT(!text.empty());
      RC_ASSERT(pool_.num_free() == free);
      return false;
    }
    for (const std::int32_t block : pool_.allocate(missing)) {
      RC_ASSERT(pool_.reference_count(block) == 1);
      sequence.blocks.push_back(block);
    }
    for (std::size_t i = first; i < needed; ++i)
      written_[static_cast<std::size_t>(sequence.blocks[i])] = content(sequence.tokens, i);
    pool_.publish(sequence.tokens, sequence.blocks);
    return true;
  }

  BlockPool pool_;
  std::vector<Ints> written_;
  std::vector<Sequence> live_;
};

void expect_right_traffic(clattn::BlockHash hash) {
  test::expect_property(
      [hash] {
        Traffic traffic(between(1, 12), between(1, 3), hash);
        for (int i = between(1, 40); i > 0; --i) {
          traffic.act();
          traffic.check();
        }
      },
      1000);
}

TEST(BlockPool, KeepsCountsAndContentsUnderAnyTraffic) {
  expect_right_traffic(clattn::hash_block);
}

TEST(BlockPool, IsRightWhenAllHashesCollide) {
  expect_right_traffic(always_the_same);
}

}  // namespace
