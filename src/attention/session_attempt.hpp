#pragma once

#include <clattn/session.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/session_pools.hpp"
#include "attention/session_recurrent.hpp"

namespace clattn {

/// A step that is being made: unless it is kept, it is given up and its blocks go back.
class Session::Attempt {
 public:
  explicit Attempt(Session& session)
      : session_(session), returning_(pools().num_groups()), replaced_(pools().num_groups()) {}
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt() {
    for (std::size_t group = 0; group < returning_.size(); ++group)
      pools().release(group, returning_[group]);
    for (const StateSlots& slots : read_) session_.states_->release(slots);
    for (const std::int32_t slot : written_) session_.states_->release(slot);
    if (!kept_) session_.give_up_step();
  }

  void share(const BlockTables& blocks) {
    for (std::size_t group = 0; group < blocks.size(); ++group) {
      returning_[group].reserve(returning_[group].size() + blocks[group].size());
      pools().share(group, blocks[group]);
      returning_[group].insert(returning_[group].end(), blocks[group].begin(), blocks[group].end());
    }
  }
  std::vector<std::int32_t> allocate(std::size_t group, std::size_t count) {
    returning_[group].reserve(returning_[group].size() + count);
    std::vector<std::int32_t> blocks = pools().allocate(group, count);
    returning_[group].insert(returning_[group].end(), blocks.begin(), blocks.end());
    return blocks;
  }
  void share(const StateSlots& slots) {
    read_.reserve(read_.size() + 1);
    session_.states_->share(slots);
    read_.push_back(slots);
  }
  std::vector<std::int32_t> allocate_states(std::size_t count) {
    written_.reserve(written_.size() + count);
    std::vector<std::int32_t> slots =
        session_.states_->pool().allocate(static_cast<std::int32_t>(count));
    written_.insert(written_.end(), slots.begin(), slots.end());
    return slots;
  }
  /// A block that the step no longer holds if it is kept.
  void replace(std::size_t group, std::int32_t block) { replaced_[group].push_back(block); }
  void keep() noexcept {
    returning_.swap(replaced_);
    read_.clear();
    written_.clear();
    kept_ = true;
  }

 private:
  Pools& pools() const { return *session_.pools_; }

  Session& session_;
  BlockTables returning_, replaced_;
  std::vector<StateSlots> read_;       ///< of recurrent layers
  std::vector<std::int32_t> written_;  ///< the same
  bool kept_ = false;
};

}  // namespace clattn
