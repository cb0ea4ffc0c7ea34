
#include "cli/replay/block_allocator.hpp"

#include <algorithm>

namespace clattn::cli {

BlockAllocator::BlockAllocator(std::int32_t num_blocks)
    : blocks_(static_cast<std::size_t>(num_blocks) + 1), num_free_(num_blocks) {
  for (std::int32_t block = 0; block <= num_blocks; ++block) {  // a ring through the head
    at(block).next = block == num_blocks ? 0 : block + 1;
    at(block).previous = block == 0 ? num_blocks : block - 1;
  }
}

void BlockAllocator::unlink(std::int32_t block) {
  at(at(block).previous).next = at(block).next;
  at(at(block).next).previous = at(block).previous;
}

void BlockAllocator::hold(std::int32_t block) {
  if (at(block).references++ > 0) return;
  unlink(block);
  --num_free_;
  peak_used_ = std::max(peak_used_, num_used());
}

std::optional<std::int32_t> BlockAllocator::find(BlockHash hash) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return {};
  return found->second;
}

void BlockAllocator::share(std::int32_t block) {
  hold(block);
}

std::optional<std::int32_t> BlockAllocator::allocate() {
  if (num_free_ == 0) return {};
  const std::int32_t block = at(num_blocks()).next;
  if (at(block).hash) by_hash_.erase(*at(block).hash);
  at(block).hash.reset();
  hold(block);
  return block;
}

void BlockAllocator::publish(std::int32_t block, BlockHash hash) {
  if (by_hash_.emplace(hash, block).second) at(block).hash = hash;
}

void BlockAllocator::release(std::int32_t block) {
  if (--at(block).references > 0) return;
  const std::int32_t head = num_blocks();
  at(block).previous = at(head).previous;
  at(block).next = head;
  at(at(head).previous).next = block;
  at(head).previous = block;
  ++num_free_;
}

}  // namespace clattn::cli
