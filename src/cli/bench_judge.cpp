#include <algorithm>

#include "cli/bench_report.hpp"

namespace clattn::cli {

std::string BenchRow::name() const {
  return asked_backend.empty() ? shape.name() : shape.name() + "/" + asked_backend;
}

void judge(BenchRow& row, const Ceilings& ceilings) {
  if (row.work.bytes == 0 && row.work.flops == 0) return;
  const bool matrix_units = ceilings.mma_gflop_per_s > 0 && row.shape.model.dtype != DType::kF32;
  const double gflop_per_s = matrix_units ? ceilings.mma_gflop_per_s : ceilings.fma_gflop_per_s;
  const double read_us = row.work.bytes * 1e-3 / ceilings.read_gb_per_s;
  const double arithmetic_us = row.work.flops * 1e-3 / gflop_per_s;
  const bool reads = read_us >= arithmetic_us;
  row.ceiling = reads ? "read" : matrix_units ? "mma" : "fma";
  row.rate = (reads ? row.work.bytes : row.work.flops) * 1e-3 / row.median_us;
  const bool warpgroups = std::any_of(
      row.kernels.begin(), row.kernels.end(),
      [](const BenchKernel& kernel) { return kernel.name.find("wgmma") != std::string::npos; });
  const bool bounds = reads ? !row.resident : !(matrix_units && warpgroups);
  if (bounds) row.share = std::max(read_us, arithmetic_us) / row.median_us;
}

}  // namespace clattn::cli
