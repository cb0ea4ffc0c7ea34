#pragma once

#include <clattn/ceilings.hpp>
#include <memory>

namespace clattn::cli {

/// The device's ceilings in the units of the reports; what they are: clattn/ceilings.hpp.
struct Ceilings {
  double read_gb_per_s = 0;
  double fma_gflop_per_s = 0;
  double page_read_gb_per_s = 0;
  double mma_gflop_per_s = 0;  ///< 0 = the device has none
};

inline Ceilings measure_ceilings(const std::shared_ptr<clattn::Context>& context) {
  const DeviceCeilings measured = clattn::measure_ceilings(*context);
  return {measured.read_bytes_per_s * 1e-9, measured.fma_flop_per_s * 1e-9,
          measured.page_read_bytes_per_s * 1e-9, measured.mma_flop_per_s * 1e-9};
}

}  // namespace clattn::cli
