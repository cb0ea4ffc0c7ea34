#include "attention/session_pools.hpp"

#include <algorithm>

#include "base/checked.hpp"

namespace clattn {

using detail::ceil_div, detail::to_size;

Session::Pools::Pools(std::span<const Group> groups, std::int32_t block_size, BlockPool* states)
    : states_(states) {
  for (const Group& group : groups) {
    pools_.emplace_back(group.num_blocks, block_size);
    windows_.push_back(group.window);
  }
}

std::size_t Session::Pools::num_blocks_of(std::int32_t num_tokens) const {
  return to_size(ceil_div(num_tokens, block_size()));
}

/// The first block that a row behind `num_tokens` tokens may see.
std::size_t Session::Pools::first_needed(std::size_t group, std::int64_t num_tokens) const {
  if (group == 0) return 0;
  const std::int64_t first = num_tokens - windows_[group] + 1;
  return first <= 0 ? 0 : to_size(first / block_size());
}

std::span<const std::int32_t> Session::Pools::tokens_of(std::span<const std::int32_t> tokens,
                                                        std::size_t block) const {
  return tokens.subspan(block * to_size(block_size()), to_size(block_size()));
}

/// The pool's block with what block `known` of group 0 holds of these tokens, or -1.
std::int32_t Session::Pools::find_in(const BlockPool& pool, std::int32_t known,
                                     std::span<const std::int32_t> tokens) const {
  const auto found = pool.find_prefix(tokens, pools_[0].content_of(known));
  return found.empty() ? -1 : found[0];
}

/// How many of the first `num_blocks` known blocks a request may take over with all that the
/// group's window then reaches.
std::size_t Session::Pools::longest_seen(std::size_t group, std::span<const std::int32_t> known,
                                         std::span<const std::int32_t> tokens,
                                         std::span<const std::int32_t> own,
                                         std::size_t num_blocks) const {
  const auto is_there = [&](std::size_t block) {
    return block < own.size() ? own[block] >= 0
                              : find_in(pools_[group], known[block], tokens_of(tokens, block)) >= 0;
  };
  // A block that is missing is in the window of all ends behind it that are near enough.
  std::size_t checked = num_blocks;  // those from here to num_blocks are there
  while (num_blocks > 0) {
    const std::size_t first =
        first_needed(group, static_cast<std::int64_t>(num_blocks) * block_size());
    while (checked > first && is_there(checked - 1)) --checked;
    if (checked <= first) break;
    num_blocks = --checked;
  }
  return num_blocks;
}

/// How many of the first `num_blocks` known blocks there are up to the last one with a state.
std::size_t Session::Pools::longest_with_state(std::span<const std::int32_t> known,
                                               std::span<const std::int32_t> tokens,
                                               std::size_t num_blocks) const {
  while (states_ != nullptr && num_blocks > 0 &&
         find_in(*states_, known[num_blocks - 1], tokens_of(tokens, num_blocks - 1)) < 0)
    --num_blocks;
  return num_blocks;
}

std::int32_t Session::Pools::find_state(std::span<const std::int32_t> tokens,
                                        const BlockTables& known) const {
  return find_in(*states_, known[0].back(), tokens_of(tokens, known[0].size() - 1));
}

void Session::Pools::publish_state(std::span<const std::int32_t> tokens, const BlockTables& tables,
                                   std::int32_t slot) {
  const std::size_t last = tokens.size() / to_size(block_size()) - 1;
  states_->publish(tokens_of(tokens, last), std::span(&slot, 1),
                   pools_[0].content_of(tables[0][last]));
}

Session::BlockTables Session::Pools::find(std::span<const std::int32_t> tokens, std::uint64_t salt,
                                          const BlockTables& own) const {
  BlockTables found(num_groups());
  const std::size_t held = own[0].size();
  if (tokens.size() / to_size(block_size()) <= held) return found;
  const std::vector<std::int32_t> known = pools_[0].find_prefix(tokens, salt);
  std::size_t end = known.size(), longest = 0;
  do {  // a shorter one may need blocks that other groups lack
    longest = end;
    for (std::size_t group = 1; group < num_groups(); ++group)
      end = longest_seen(group, known, tokens, own[group], end);
    end = longest_with_state(known, tokens, end);
  } while (end < longest);
  if (end <= held) return found;
  for (std::size_t group = 0; group < num_groups(); ++group) {
    found[group].assign(end, -1);
    const std::size_t first =
        std::max(held, first_needed(group, static_cast<std::int64_t>(end) * block_size()));
    for (std::size_t block = first; block < end; ++block)
      found[group][block] = group == 0
                                ? known[block]
                                : find_in(pools_[group], known[block], tokens_of(tokens, block));
  }
  return found;
}

bool Session::Pools::holds_window(const BlockTables& tables, std::int32_t num_tokens) const {
  for (std::size_t group = 1; group < num_groups(); ++group) {
    for (std::size_t block = first_needed(group, num_tokens); block < num_blocks_of(num_tokens);
         ++block)
      if (tables[group][block] < 0) return false;
  }
  return true;
}

void Session::Pools::share(std::size_t group, std::span<const std::int32_t> blocks) {
  for (const std::int32_t& block : blocks)
    if (block >= 0) pools_[group].share(std::span(&block, 1));
}

void Session::Pools::share(const BlockTables& tables) {
  for (std::size_t group = 0; group < tables.size(); ++group) share(group, tables[group]);
}

std::vector<std::int32_t> Session::Pools::allocate(std::size_t group, std::size_t count) {
  return pools_[group].allocate(static_cast<std::int32_t>(count));
}

void Session::Pools::release(std::size_t group, std::span<const std::int32_t> blocks) {
  for (std::size_t i = blocks.size(); i-- > 0;)  // the last first, as BlockPool does
    if (blocks[i] >= 0) pools_[group].release(blocks.subspan(i, 1));
}

void Session::Pools::release_behind(BlockTables& tables, std::int32_t num_tokens) {
  const std::size_t held = num_blocks_of(num_tokens);
  for (std::size_t group = 0; group < tables.size(); ++group) {
    if (tables[group].size() <= held) continue;
    release(group, std::span(tables[group]).subspan(held));
    tables[group].resize(held);
  }
}

void Session::Pools::release_left(BlockTables& tables, std::int32_t num_tokens_before,
                                  std::int32_t num_tokens) {
  for (std::size_t group = 1; group < tables.size(); ++group) {
    const std::size_t first = first_needed(group, num_tokens_before);
    const std::size_t end = std::min(first_needed(group, num_tokens), tables[group].size());
    if (end <= first) continue;
    const auto left = std::span(tables[group]).subspan(first, end - first);
    release(group, left);
    std::ranges::fill(left, -1);
  }
}

void Session::Pools::publish(std::span<const std::int32_t> tokens, const BlockTables& tables,
                             std::uint64_t salt, std::int32_t num_tokens_before) {
  pools_[0].publish(tokens, tables[0], salt);
  const std::size_t num_full = tokens.size() / to_size(block_size());
  for (std::size_t group = 1; group < tables.size(); ++group) {
    for (std::size_t block = to_size(num_tokens_before / block_size()); block < num_full; ++block) {
      const auto own = std::span(tables[group]).subspan(block, 1);
      if (own[0] >= 0)
        pools_[group].publish(tokens_of(tokens, block), own,
                              pools_[0].content_of(tables[0][block]));
    }
  }
}

}  // namespace clattn
