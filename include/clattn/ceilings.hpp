#pragma once

#include <clattn/context.hpp>

namespace clattn {

/// What a device reaches at most, measured: the measure that a kernel's speed is a share of.
struct DeviceCeilings {
  double read_bytes_per_s = 0;  ///< streaming read of a buffer that no cache holds
  /// Read of whole 4096-byte pages (16 tokens x 128 x 2 bytes) of that buffer in random order.
  double page_read_bytes_per_s = 0;
  /// Copy of one half of that buffer to the other, bytes read plus bytes written: the best of a
  /// kernel, the driver's copy and, on CPUs, memcpy by a thread a compute unit.
  double copy_bytes_per_s = 0;
  double fma_flop_per_s = 0;  ///< independent chains of f32 fused multiply-adds, 2 flop each
  /// Products of 16-bit matrices into f32 by mma.sync with constant operands; 0 where inline PTX
  /// does not have it.
  double mma_flop_per_s = 0;
  /// The same by a warpgroup's products (wgmma m64n128k16, both operands in local memory); 0 where
  /// the device has none.
  double wgmma_flop_per_s = 0;
};

/// Measures them with small kernels, the best of several launches; takes about a second and up to
/// 1 GiB of device memory. Blocks. Thread-safe, but other work on the device falsifies the result.
DeviceCeilings measure_ceilings(const Context& context);

}  // namespace clattn
