#pragma once

namespace clattn::detail {

/// In its lifetime the calls of its thread are parts of one that has been captured.
class CapturePause {
 public:
  CapturePause() { ++depth; }
  ~CapturePause() { --depth; }
  CapturePause(const CapturePause&) = delete;
  CapturePause& operator=(const CapturePause&) = delete;
  static bool active() { return depth > 0; }

 private:
  static inline thread_local int depth = 0;
};

}  // namespace clattn::detail
