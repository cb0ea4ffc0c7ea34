#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace clattn::cli {

/// Names the content of a full block and of everything before it.
using BlockHash = std::uint64_t;

/// Hands out cache blocks by reference count. A released block keeps its content: until it is
/// handed out anew (least recently released first), a request whose prefix has the same hash gets
/// it back.
class BlockAllocator {
 public:
  explicit BlockAllocator(std::int32_t num_blocks);

  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()) - 1; }
  /// Blocks that nobody holds, those with reusable content included.
  std::int32_t num_free() const { return num_free_; }
  std::int32_t num_used() const { return num_blocks() - num_free_; }
  std::int32_t peak_used() const { return peak_used_; }
  std::int32_t reference_count(std::int32_t block) const { return at(block).references; }

  /// The block with this content, held or not.
  std::optional<std::int32_t> find(BlockHash hash) const;
  /// One more holder of a block that find() named.
  void share(std::int32_t block);
  /// The least recently released block, its old content forgotten; nothing when all are held.
  std::optional<std::int32_t> allocate();
  /// Names the content of a held, full block. The first block of a name keeps it.
  void publish(std::int32_t block, BlockHash hash);
  /// One holder less; the last one makes the block free.
  void release(std::int32_t block);

 private:
  struct Block {
    std::int32_t references = 0;
    std::int32_t previous = 0;  // in the free list, whose head is the extra last element
    std::int32_t next = 0;
    std::optional<BlockHash> hash;
  };
  Block& at(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }
  const Block& at(std::int32_t block) const { return blocks_[static_cast<std::size_t>(block)]; }
  void unlink(std::int32_t block);
  void hold(std::int32_t block);

  std::vector<Block> blocks_;
  std::unordered_map<BlockHash, std::int32_t> by_hash_;
  std::int32_t num_free_ = 0;
  std::int32_t peak_used_ = 0;
};

}  // namespace clattn::cli
