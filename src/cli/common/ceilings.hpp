#pragma once

#include <clattn/ceilings.hpp>
#include <clattn/types.hpp>
#include <memory>

namespace clattn::cli {

/// The device's ceilings in the units of the reports; what they are: clattn/ceilings.hpp.
struct Ceilings {
  double read_gb_per_s = 0;
  double fma_gflop_per_s = 0;
  double page_read_gb_per_s = 0;
  double copy_gb_per_s = 0;      ///< bytes read plus bytes written
  double mma_gflop_per_s = 0;    ///< 0 = the device has none
  double wgmma_gflop_per_s = 0;  ///< 0 = the device has none
};

inline Ceilings measure_ceilings(const std::shared_ptr<clattn::Context>& context) {
  const DeviceCeilings measured = clattn::measure_ceilings(*context);
  return {.read_gb_per_s = measured.read_bytes_per_s * 1e-9,
          .fma_gflop_per_s = measured.fma_flop_per_s * 1e-9,
          .page_read_gb_per_s = measured.page_read_bytes_per_s * 1e-9,
          .copy_gb_per_s = measured.copy_bytes_per_s * 1e-9,
          .mma_gflop_per_s = measured.mma_flop_per_s * 1e-9,
          .wgmma_gflop_per_s = measured.wgmma_flop_per_s * 1e-9};
}

/// The fastest arithmetic that the device has for queries of a type.
struct Arithmetic {
  const char* ceiling;
  double gflop_per_s;
};
inline Arithmetic arithmetic_of(DType dtype, const Ceilings& ceilings) {
  if (dtype == DType::kF32 || ceilings.mma_gflop_per_s == 0) {
    return {"fma", ceilings.fma_gflop_per_s};
  }
  if (ceilings.wgmma_gflop_per_s > 0) return {"wgmma", ceilings.wgmma_gflop_per_s};
  return {"mma", ceilings.mma_gflop_per_s};
}

}  // namespace clattn::cli
