#pragma once

#include <atomic>
#include <string_view>

#include "base/error.hpp"

namespace clattn::detail {

/// A call that only one thread may be in at a time, from its beginning to its end.
class OneThread {
 public:
  /// `busy`: whether there is such a call. Throws kInvalidArgument naming `call` if so.
  OneThread(std::atomic<bool>& busy, std::string_view call) : busy_(busy) {
    throw_invalid_if(busy_.exchange(true, std::memory_order_acquire),
                     "{}: another thread is in a call of this builder, legal: one at a time", call);
  }
  ~OneThread() { busy_.store(false, std::memory_order_release); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  std::atomic<bool>& busy_;
};

}  // namespace clattn::detail
