#pragma once

#include <clattn/context.hpp>

namespace clattn {

/// What a device reaches at most, measured: the measure that a kernel's speed is a share of.
struct DeviceCeilings {
  double read_bytes_per_s = 0;  ///< streaming read of a buffer that no cache holds
  double fma_flop_per_s = 0;    ///< independent chains of f32 fused multiply-adds, 2 flop each
};

/// Measures both with small kernels, the best of several launches; takes about a second and up to
/// 1 GiB of device memory. Blocks. Thread-safe, but other work on the device falsifies the result.
DeviceCeilings measure_ceilings(const Context& context);

}  // namespace clattn
