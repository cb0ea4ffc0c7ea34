#include <clattn/block_pool.hpp>
#include <clattn/cache_ops.hpp>
#include <unordered_map>

#include "attention/session_attempt.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"

// The blocks that a step takes, and how many it would take.

namespace clattn {

using detail::throw_invalid_if, detail::to_size;

/// What the parts lack in the group: blocks for tokens that have none yet, and a block of its own
/// for each part that would write into one which others hold or may find.
Session::Lack Session::count_lack(std::span<Scheduled> scheduled, std::size_t group) const {
  const BlockPool& pool = pools_->pool(group);
  std::unordered_map<std::int32_t, std::int32_t> leaving;  // holders that get a copy, by block
  Lack lack;
  for (Scheduled& part : scheduled) {
    lack.num_blocks += pools_->num_blocks_of(part.seq_len) - part.blocks[group].size();
    if (part.num_computed % pool.block_size() == 0) continue;
    std::int32_t& block = part.blocks[group][to_size(part.num_computed / pool.block_size())];
    if (pool.reference_count(block) - leaving[block] == 1 && !pool.is_published(block)) continue;
    ++leaving[block];
    lack.replaced.push_back(&block);
  }
  lack.num_blocks += lack.replaced.size();
  return lack;
}

/// Gives the parts what they lack in the group. The pairs are to be copied before anything is
/// stored.
std::vector<BlockPair> Session::take_blocks(std::span<Scheduled> scheduled, std::size_t group,
                                            const Lack& lack, Attempt& attempt) const {
  const std::vector<std::int32_t> fresh = attempt.allocate(group, lack.num_blocks);
  auto next = fresh.begin();
  std::vector<BlockPair> copies;
  for (std::int32_t* block : lack.replaced) {
    attempt.replace(group, *block);
    copies.push_back({*block, *next});
    *block = *next++;
  }
  for (Scheduled& part : scheduled) {
    auto& blocks = part.blocks[group];
    while (blocks.size() < pools_->num_blocks_of(part.seq_len)) blocks.push_back(*next++);
  }
  return copies;
}

std::vector<std::int64_t> Session::blocks_needed(std::span<const StepRequest> requests) {
  throw_invalid_if(!advancing_.empty() || !attended_.empty(),
                   "blocks_needed: called in a step of {} requests, legal: before step(), or once "
                   "the last step counts",
                   advancing_.size());
  std::vector<std::int64_t> needed;
  needed.reserve(pools_->num_groups());
  for (std::size_t group = 0; group < pools_->num_groups(); ++group)
    needed.push_back(pools_->pool(group).num_free());
  Attempt attempt(*this);  // given up: nothing is kept
  std::vector<Scheduled> scheduled = schedule(requests, attempt);
  for (std::size_t group = 0; group < needed.size(); ++group) {
    // Published blocks that nobody holds are free until the step shares them.
    needed[group] -= pools_->pool(group).num_free();
    needed[group] += static_cast<std::int64_t>(count_lack(scheduled, group).num_blocks);
  }
  return needed;
}

}  // namespace clattn
