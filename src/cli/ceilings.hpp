#pragma once

#include <clattn/ceilings.hpp>
#include <memory>

namespace clattn::cli {

/// The device's ceilings in the units of the reports.
struct Ceilings {
  double read_gb_per_s = 0;
  double fma_gflop_per_s = 0;
};

inline Ceilings measure_ceilings(const std::shared_ptr<clattn::Context>& context) {
  const DeviceCeilings measured = clattn::measure_ceilings(*context);
  return {measured.read_bytes_per_s * 1e-9, measured.fma_flop_per_s * 1e-9};
}

}  // namespace clattn::cli
