// How the host's own instructions treat denormals, which is how handlers compute.
#pragma once
#include <xmmintrin.h>

#include <cstdint>

#include "machine/wave.hpp"

namespace amdemu {

/// Gives the thread its own mode back at the end of the scope.
class HostFloatMode {
 public:
  HostFloatMode() : saved_(_mm_getcsr()) {}
  ~HostFloatMode() { _mm_setcsr(saved_); }
  HostFloatMode(const HostFloatMode&) = delete;
  HostFloatMode& operator=(const HostFloatMode&) = delete;

  /// As a wave's MODE register says. Exceptions are masked.
  static void set(std::uint32_t mode) {
    constexpr unsigned kDefault = 0x1f80U, kFlushInputsAndResults = 0x8040U;
    _mm_setcsr((mode & kModeDenormals32) == 0 ? kDefault | kFlushInputsAndResults : kDefault);
  }

 private:
  unsigned saved_;
};

}  // namespace amdemu
