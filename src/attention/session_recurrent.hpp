#pragma once

#include <clattn/block_pool.hpp>
#include <clattn/session.hpp>
#include <clattn/session_states.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "opencl/staging.hpp"

namespace clattn {

/// The states of a session's recurrent layers. A step reads a request's state in one slot and
/// stores what follows in others: decodes and drafts by columns of state_indices, others after a
/// copy. A convolution's rows, which operations change in place, are always copied.
class Session::States {
 public:
  States(const RecurrentLayers& layers, std::int32_t block_size, const Context& context,
         const Queue& queue);

  BlockPool& pool() noexcept { return pool_; }
  const BlockPool& pool() const noexcept { return pool_; }
  std::size_t num_layers() const noexcept { return views_.size(); }
  std::int32_t max_drafts() const noexcept { return max_drafts_; }
  /// Tokens from a kept state to the next; 0 = none is kept.
  std::int32_t interval() const noexcept { return interval_; }

  void share(const StateSlots& slots);
  void release(std::int32_t slot) noexcept;
  void release(const StateSlots& slots) noexcept;
  /// Gives up what the request's current step, or its drafts, hold.
  void drop_step(Request& request) noexcept;
  /// The current step counts.
  void advance(Request& request) noexcept;
  /// So do the first `count` drafts of the last one.
  void accept(Request& request, std::size_t count) noexcept;

  /// Lists of a step on the device.
  void build(const Queue& queue, const Step& step, std::span<const Scheduled> scheduled);
  /// Copies what the layer's operations would overwrite, and says what they take.
  RecurrentStep begin(const Context& context, const Queue& queue, std::size_t layer) const;
  /// Launches all copies once, before there is a request.
  void warm_up(const Context& context, const Queue& queue);

 private:
  struct Lists;
  struct Views {
    StateView conv, state;
  };
  std::vector<Views> views_;
  std::int32_t max_drafts_ = 0, interval_ = 0;
  BlockPool pool_;
  detail::StagedUpload staging_;
  RecurrentMetadata rule_, conv_, copy_;  ///< of the current step
  DeviceList conv_targets_, state_targets_;
  bool copies_conv_ = false, copies_states_ = false;
};

}  // namespace clattn
