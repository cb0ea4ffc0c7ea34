#include <algorithm>

#include "program/bench/report.hpp"

namespace clattn::cli {

std::string BenchRow::name() const {
  return asked_backend.empty() ? shape.name() : shape.name() + "/" + asked_backend;
}

namespace {

bool uses_warpgroups(const BenchRow& row) {
  return std::ranges::any_of(row.kernels, [](const BenchKernel& kernel) {
    return kernel.name.find("wgmma") != std::string::npos;
  });
}

}  // namespace

void judge(BenchRow& row, const Ceilings& ceilings) {
  if (row.work.bytes == 0 && row.work.flops == 0) return;
  const bool copies =
      row.shape.suite == "cache" || row.shape.suite == "merge" || row.shape.is_recurrent();
  const Arithmetic arithmetic = arithmetic_of(row.shape.model.config.dtype, ceilings);
  const double gb_per_s = copies ? ceilings.copy_gb_per_s : ceilings.read_gb_per_s;
  const double memory_us = row.work.bytes * 1e-3 / gb_per_s;
  const double arithmetic_us = row.work.flops * 1e-3 / arithmetic.gflop_per_s;
  const bool moves = memory_us >= arithmetic_us;
  row.ceiling = !moves ? arithmetic.ceiling : copies ? "copy" : "read";
  row.rate = (moves ? row.work.bytes : row.work.flops) * 1e-3 / row.median_us;
  if (row.shape.model.op == CacheOp::kSwapOut || row.shape.model.op == CacheOp::kSwapIn) return;
  const bool bounds = moves ? !row.resident : row.ceiling != "mma" || !uses_warpgroups(row);
  if (bounds) row.share = std::max(memory_us, arithmetic_us) / row.median_us;
}

}  // namespace clattn::cli
