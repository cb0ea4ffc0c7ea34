#pragma once

#include <clattn/context.hpp>
#include <clattn/types.hpp>

namespace clattn::cli {

/// What a device reaches at most, measured: kernels' speeds are given as shares of it.
struct Ceilings {
  double read_gb_per_s = 0;  ///< streaming read of a buffer that no cache holds
  /// Read of whole 4096-byte pages (16 tokens x 128 x 2 bytes) of that buffer in random order.
  double page_read_gb_per_s = 0;
  /// Copy of one half of that buffer to the other, bytes read plus bytes written: the best of a
  /// kernel, the driver's copy and, on CPUs, memcpy by a thread a compute unit.
  double copy_gb_per_s = 0;
  double fma_gflop_per_s = 0;  ///< independent chains of f32 fused multiply-adds, 2 flop each
  /// Products of bf16 matrices into f32 by x86's tiles (AMX) or, where those are missing, by its
  /// products of bf16 pairs; 0 where the device has neither.
  double bf16_gflop_per_s = 0;
  /// Products of 16-bit matrices into f32 by mma.sync with constant operands; 0 where inline PTX
  /// does not have it.
  double mma_gflop_per_s = 0;
  /// The same by a warpgroup's products (wgmma m64n128k16, both operands in local memory); 0 where
  /// the device has none.
  double wgmma_gflop_per_s = 0;
};

/// Their names in reports, which leave out those that are 0 unless they are there `always`.
struct CeilingName {
  const char* name;
  double Ceilings::*value;
  bool always;
};
inline constexpr CeilingName kCeilingNames[] = {
    {"read_gb_per_s", &Ceilings::read_gb_per_s, true},
    {"page_read_gb_per_s", &Ceilings::page_read_gb_per_s, true},
    {"copy_gb_per_s", &Ceilings::copy_gb_per_s, false},
    {"fma_gflop_per_s", &Ceilings::fma_gflop_per_s, true},
    {"bf16_gflop_per_s", &Ceilings::bf16_gflop_per_s, false},
    {"mma_gflop_per_s", &Ceilings::mma_gflop_per_s, false},
    {"wgmma_gflop_per_s", &Ceilings::wgmma_gflop_per_s, false}};

/// Measures them with small kernels, the best of several launches; takes about a second and up to
/// 1 GiB of device memory. Blocks. Other work on the device falsifies the result.
Ceilings measure_ceilings(const Context& context);

/// The fastest arithmetic that the device has for queries of a type.
struct Arithmetic {
  const char* ceiling;
  double gflop_per_s;
};
inline Arithmetic arithmetic_of(DType dtype, const Ceilings& ceilings) {
  if (dtype == DType::kBF16 && ceilings.bf16_gflop_per_s > 0) {
    return {"bf16", ceilings.bf16_gflop_per_s};
  }
  if (dtype == DType::kF32 || ceilings.mma_gflop_per_s == 0) {
    return {"fma", ceilings.fma_gflop_per_s};
  }
  if (ceilings.wgmma_gflop_per_s > 0) return {"wgmma", ceilings.wgmma_gflop_per_s};
  return {"mma", ceilings.mma_gflop_per_s};
}

}  // namespace clattn::cli
