#pragma once

#include <clattn/block_pool.hpp>
#include <clattn/session.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace clattn {

/// The blocks of a session's caches. Group 0 keeps all tokens of a request. Each further group is
/// of layers with a window and keeps the blocks that the window of a row may still reach, so its
/// tables begin with -1. Group 0 says by tokens which content a block has; in other groups a block
/// is found by the number of that content, so the blocks before it need not be there.
class Session::Pools {
 public:
  struct Group {
    std::int32_t num_blocks = 0;
    std::int32_t window = 0;  ///< tokens that a row sees, itself included; not read of group 0
  };
  /// `states`: slots of recurrent layers, or null; kept.
  Pools(std::span<const Group> groups, std::int32_t block_size, BlockPool* states);

  std::size_t num_groups() const noexcept { return pools_.size(); }
  std::int32_t block_size() const noexcept { return pools_[0].block_size(); }
  const BlockPool& pool(std::size_t group) const noexcept { return pools_[group]; }
  std::int32_t window(std::size_t group) const noexcept { return windows_[group]; }
  /// Blocks that hold this many tokens.
  std::size_t num_blocks_of(std::int32_t num_tokens) const;

  /// What published blocks hold of `tokens` beyond the full blocks of `own`: in each group the
  /// blocks that rows after these tokens need and `own` lacks, -1 for all others. Group 0 has as
  /// many entries as blocks are known, own ones included; none = nothing more is known. Where there
  /// are states, one is known after these blocks.
  BlockTables find(std::span<const std::int32_t> tokens, std::uint64_t salt,
                   const BlockTables& own) const;
  /// The slot of the state after the blocks that find() knows of `tokens`.
  std::int32_t find_state(std::span<const std::int32_t> tokens, const BlockTables& known) const;
  /// Lets find() end with the blocks of `tokens`, which are full and published, after which the
  /// state is in `slot`.
  void publish_state(std::span<const std::int32_t> tokens, const BlockTables& tables,
                     std::int32_t slot);
  /// Whether each group holds what rows after the first `num_tokens` tokens may see.
  bool holds_window(const BlockTables& tables, std::int32_t num_tokens) const;

  /// Adds a holder to each block of a group.
  void share(std::size_t group, std::span<const std::int32_t> blocks);
  void share(const BlockTables& tables);
  std::vector<std::int32_t> allocate(std::size_t group, std::size_t count);
  /// Removes a holder from each block, but -1. Throws nothing.
  void release(std::size_t group, std::span<const std::int32_t> blocks);
  /// Gives up the blocks behind the first `num_tokens` tokens.
  void release_behind(BlockTables& tables, std::int32_t num_tokens);
  /// Gives up the blocks that no row after `num_tokens` tokens sees, of tables from which those
  /// before `num_tokens_before` have gone.
  void release_left(BlockTables& tables, std::int32_t num_tokens_before, std::int32_t num_tokens);
  /// Lets find() find the full blocks of `tokens`, of which those of the first
  /// `num_tokens_before` are published.
  void publish(std::span<const std::int32_t> tokens, const BlockTables& tables, std::uint64_t salt,
               std::int32_t num_tokens_before);

 private:
  std::size_t first_needed(std::size_t group, std::int64_t num_tokens) const;
  std::int32_t find_in(const BlockPool& pool, std::int32_t known,
                       std::span<const std::int32_t> tokens) const;
  std::size_t longest_with_state(std::span<const std::int32_t> known,
                                 std::span<const std::int32_t> tokens,
                                 std::size_t num_blocks) const;
  std::size_t longest_seen(std::size_t group, std::span<const std::int32_t> known,
                           std::span<const std::int32_t> tokens, std::span<const std::int32_t> own,
                           std::size_t num_blocks) const;
  std::span<const std::int32_t> tokens_of(std::span<const std::int32_t> tokens,
                                          std::size_t block) const;

  std::vector<BlockPool> pools_;
  BlockPool* states_;
  std::vector<std::int32_t> windows_;
};

}  // namespace clattn
