#pragma once

#include <clattn/types.hpp>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// The hash of a full block's token ids and of `parent`, the number that the pool gave to all that
/// comes before them (at the start of a sequence its cache_salt).
using BlockHash = std::uint64_t (*)(std::uint64_t parent, std::span<const std::int32_t> token_ids);
/// XXH3, what pools use unless told otherwise.
std::uint64_t hash_block(std::uint64_t parent, std::span<const std::int32_t> token_ids);

/// Hands out the blocks of a KV cache by reference count, and finds those that already hold the
/// beginning of a sequence (vLLM: BlockPool and its prefix caching). Only full blocks are found. A
/// block that nobody holds keeps its content until it is handed out anew: first those that were
/// released without content that can be found, then the least recently released. A block is found
/// by its token ids, all that come before and the sequence's cache_salt (vLLM's), compared one by
/// one: hashes that collide cost time, never a wrong block. Token ids and salt have to determine
/// what a block holds; sequences that differ in anything else, such as an image or a LoRA adapter,
/// need different salts. Host arithmetic without a device; for one thread at a time.
class BlockPool {
 public:
  /// The most blocks that a pool can have.
  static constexpr std::int32_t kMaxBlocks = std::numeric_limits<std::int32_t>::max() - 1;

  /// Blocks 0 … num_blocks - 1 of `block_size` tokens, all free. Takes about 52 + 4 * block_size
  /// bytes of memory for each; besides the vectors that allocate() and find_prefix() return,
  /// nothing is allocated later. Throws kInvalidArgument unless both are at least 1 and num_blocks
  /// is at most kMaxBlocks.
  BlockPool(std::int32_t num_blocks, std::int32_t block_size, BlockHash hash = hash_block);

  /// Blocks of the pool, free or held.
  std::int32_t num_blocks() const noexcept { return static_cast<std::int32_t>(blocks_.size()) - 1; }
  /// Tokens.
  std::int32_t block_size() const noexcept { return block_size_; }
  /// Blocks that nobody holds, those with content that can be found included.
  std::int32_t num_free() const noexcept { return num_free_; }
  /// Blocks that somebody holds.
  std::int32_t num_used() const noexcept { return num_blocks() - num_free_; }
  /// The most that were held at once so far.
  std::int32_t peak_used() const noexcept { return peak_used_; }
  /// How many holders the block has. Throws kInvalidArgument for a block that is not the pool's.
  std::int32_t reference_count(std::int32_t block) const;

  /// `count` free blocks, whose old content is forgotten; each has one holder now. Throws
  /// kOutOfBlocks, and takes none, if fewer are free.
  std::vector<std::int32_t> allocate(std::int32_t count);
  /// The blocks that were published by the same salt with the longest beginning of `token_ids`, in
  /// its order, held or free; they stay as they are until share(). A part of a block at the end is
  /// not looked for.
  std::vector<std::int32_t> find_prefix(std::span<const std::int32_t> token_ids,
                                        std::uint64_t cache_salt = 0) const;
  /// Whether publish() was called for the content that the block has. Throws kInvalidArgument for a
  /// block that is not the pool's.
  bool is_published(std::int32_t block) const;
  /// The number of the published content that the block has: the same for equal content, never used
  /// again for other content. 0 = none. Throws as is_published().
  std::uint64_t content_of(std::int32_t block) const;
  /// Adds a holder to each block, which must be held already or be a free one that find_prefix()
  /// named. Throws kInvalidArgument for others, and then shares none.
  void share(std::span<const std::int32_t> blocks);
  /// Lets find_prefix() find the full blocks of a sequence: blocks[i] holds token_ids[i *
  /// block_size] and those after it, and must not be written again. A part of a block at the end
  /// is left out, and what is published already stays so: call it as a sequence grows, always with
  /// the same salt. Throws kInvalidArgument for full blocks that are missing or that nobody holds.
  void publish(std::span<const std::int32_t> token_ids, std::span<const std::int32_t> blocks,
               std::uint64_t cache_salt = 0);
  /// Removes a holder from each block. Those left without one become free, the last first, so that
  /// the beginning of a sequence can be found for longest. Throws kInvalidArgument for a block that
  /// nobody holds, after it has released the blocks after that one.
  void release(std::span<const std::int32_t> blocks);

 private:
  /// What comes before a block: other content or, at the start of a sequence, its salt.
  struct Parent {
    std::uint64_t number = 0;
    bool is_salt = false;
    bool operator==(const Parent&) const = default;
  };
  struct Block {
    std::int32_t references = 0;
    std::int32_t previous = 0;  // in the ring of free blocks, whose head is the extra last element
    std::int32_t next = 0;
    std::int32_t next_in_bucket = -1;
    std::uint64_t content = 0;  // one number for equal tokens after equal ones; 0 = unpublished
    std::uint64_t hash = 0;
    Parent parent = {};
  };
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  void check_block(std::int32_t block, std::int32_t fewest_holders) const;
  std::span<const std::int32_t> tokens_of(std::int32_t block) const;
  const std::int32_t& bucket(std::uint64_t hash) const { return buckets_[hash % buckets_.size()]; }
  std::int32_t& bucket(std::uint64_t hash) { return buckets_[hash % buckets_.size()]; }
  std::int32_t find(Parent parent, std::uint64_t hash,
                    std::span<const std::int32_t> token_ids) const;
  void hold(std::int32_t block);
  void forget(std::int32_t block);

  std::int32_t block_size_;
  BlockHash hash_;
  std::vector<Block> blocks_;
  std::vector<std::int32_t> tokens_;   // [num_blocks, block_size], of published blocks
  std::vector<std::int32_t> buckets_;  // a list of published blocks each, by hash; -1 = none
  std::uint64_t num_contents_ = 0;     // numbers given out so far
  std::int32_t num_free_;
  std::int32_t peak_used_ = 0;
};

/// The blocks of a session's layers with one window (Session::window_blocks()).
struct WindowBlocks {
  std::int32_t window = 0;            ///< tokens that a row sees, itself included; of chunks: most
  const BlockPool* blocks = nullptr;  ///< the session's
};

}  // namespace clattn
