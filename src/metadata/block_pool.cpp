#include <xxhash.h>

#include <algorithm>
#include <clattn/block_pool.hpp>
#include <utility>

#include "base/checked.hpp"

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

std::uint64_t hash_block(std::uint64_t parent, std::span<const std::int32_t> token_ids) {
  return XXH3_64bits_withSeed(token_ids.data(), token_ids.size_bytes(), parent);
}

BlockPool::BlockPool(std::int32_t num_blocks, std::int32_t block_size, BlockHash hash)
    : block_size_(block_size), hash_(hash), num_free_(num_blocks) {
  throw_invalid_if(num_blocks < 1 || num_blocks > kMaxBlocks,
                   "BlockPool: num_blocks is {}, legal: 1 … {}", num_blocks, kMaxBlocks);
  throw_invalid_if(block_size < 1, "BlockPool: block_size is {}, legal: >= 1", block_size);
  blocks_.resize(to_size(num_blocks) + 1);
  tokens_.resize(to_size(num_blocks) * to_size(block_size));
  buckets_.assign(to_size(num_blocks), -1);
  for (std::int32_t block = 0; block <= num_blocks; ++block) {  // a ring through the head
    at(block).next = block == num_blocks ? 0 : block + 1;
    at(block).previous = block == 0 ? num_blocks : block - 1;
  }
}

void BlockPool::check_block(std::int32_t block, std::int32_t fewest_holders) const {
  throw_invalid_if(block < 0 || block >= num_blocks(), "BlockPool: block is {}, legal: 0 … {}",
                   block, num_blocks() - 1);
  throw_invalid_if(at(block).references < fewest_holders,
                   "BlockPool: block {} has {} holders, legal: at least {}", block,
                   at(block).references, fewest_holders);
}

std::int32_t BlockPool::reference_count(std::int32_t block) const {
  check_block(block, 0);
  return at(block).references;
}

std::uint64_t BlockPool::content_of(std::int32_t block) const {
  check_block(block, 0);
  return at(block).content;
}

bool BlockPool::is_published(std::int32_t block) const {
  return content_of(block) != 0;
}

std::span<const std::int32_t> BlockPool::tokens_of(std::int32_t block) const {
  return std::span(tokens_).subspan(to_size(block) * to_size(block_size_), to_size(block_size_));
}

void BlockPool::hold(std::int32_t block) {
  if (at(block).references++ > 0) return;
  at(at(block).previous).next = at(block).next;
  at(at(block).next).previous = at(block).previous;
  --num_free_;
  peak_used_ = std::max(peak_used_, num_used());
}

void BlockPool::forget(std::int32_t block) {
  if (at(block).content == 0) return;
  std::int32_t* link = &bucket(at(block).hash);
  while (*link != block) link = &at(*link).next_in_bucket;
  *link = at(block).next_in_bucket;
  at(block).content = 0;
}

std::vector<std::int32_t> BlockPool::allocate(std::int32_t count) {
  throw_invalid_if(count < 0, "BlockPool: count is {}, legal: >= 0", count);
  if (count > num_free_) {
    throw Error(ErrorCode::kOutOfBlocks,
                fmt::format("BlockPool: count is {}, legal: up to the {} free blocks of {}", count,
                            num_free_, num_blocks()));
  }
  std::vector<std::int32_t> blocks(to_size(count));
  for (std::int32_t& block : blocks) {
    block = at(num_blocks()).next;
    forget(block);
    hold(block);
  }
  return blocks;
}

/// A published block with this content, or -1.
std::int32_t BlockPool::find(Parent parent, std::uint64_t hash,
                             std::span<const std::int32_t> token_ids) const {
  std::int32_t block = bucket(hash);
  while (block >= 0 && (at(block).hash != hash || at(block).parent != parent ||
                        !std::ranges::equal(token_ids, tokens_of(block)))) {
    block = at(block).next_in_bucket;
  }
  return block;
}

std::vector<std::int32_t> BlockPool::find_prefix(std::span<const std::int32_t> token_ids,
                                                 std::uint64_t cache_salt) const {
  std::vector<std::int32_t> blocks;
  Parent parent{cache_salt, true};
  for (; token_ids.size() >= to_size(block_size_);
       token_ids = token_ids.subspan(to_size(block_size_))) {
    const auto tokens = token_ids.first(to_size(block_size_));
    const std::int32_t block = find(parent, hash_(parent.number, tokens), tokens);
    if (block < 0) break;
    blocks.push_back(block);
    parent = {at(block).content, false};
  }
  return blocks;
}

void BlockPool::share(std::span<const std::int32_t> blocks) {
  for (const std::int32_t block : blocks) {
    check_block(block, 0);
    throw_invalid_if(at(block).references == 0 && at(block).content == 0,
                     "BlockPool: block {} is free and unpublished, legal: a held block, or one "
                     "that find_prefix() named",
                     block);
  }
  for (const std::int32_t block : blocks) hold(block);
}

void BlockPool::publish(std::span<const std::int32_t> token_ids,
                        std::span<const std::int32_t> blocks, std::uint64_t cache_salt) {
  const std::size_t num_full = token_ids.size() / to_size(block_size_);
  throw_invalid_if(blocks.size() < num_full,
                   "BlockPool: {} blocks are given, legal: at least the {} that {} tokens fill",
                   blocks.size(), num_full, token_ids.size());
  std::size_t begin = num_full;  // of those that are not published yet
  for (; begin > 0; --begin) {
    check_block(blocks[begin - 1], 1);
    if (at(blocks[begin - 1]).content != 0) break;
  }
  Parent parent{cache_salt, true};
  if (begin > 0) parent = {at(blocks[begin - 1]).content, false};
  for (std::size_t i = begin; i < num_full; ++i) {
    const auto tokens = token_ids.subspan(i * to_size(block_size_), to_size(block_size_));
    const std::uint64_t hash = hash_(parent.number, tokens);
    const std::int32_t same = find(parent, hash, tokens);
    Block& block = at(blocks[i]);
    throw_invalid_if(block.content != 0,
                     "BlockPool: block {} is given twice, legal: a block of its own for each {} "
                     "tokens",
                     blocks[i], block_size_);
    block.content = same < 0 ? ++num_contents_ : at(same).content;
    block.parent = parent;
    block.hash = hash;
    std::ranges::copy(tokens, tokens_.begin() + std::int64_t{blocks[i]} * block_size_);
    block.next_in_bucket = std::exchange(bucket(hash), blocks[i]);
    parent = {block.content, false};
  }
}

void BlockPool::release(std::span<const std::int32_t> blocks) {
  const std::int32_t head = num_blocks();
  for (std::size_t i = blocks.size(); i-- > 0;) {
    const std::int32_t block = blocks[i];
    check_block(block, 1);
    if (--at(block).references > 0) continue;
    const std::int32_t after = at(block).content == 0 ? head : at(head).previous;
    at(block).previous = after;
    at(block).next = at(after).next;
    at(at(after).next).previous = block;
    at(after).next = block;
    ++num_free_;
  }
}

}  // namespace clattn
