#pragma once

#include <clattn/device.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_shapes.hpp"
#include "cli/bench_workload.hpp"
#include "cli/ceilings.hpp"

namespace clattn::cli {

/// What `clattn bench` found out about one shape.
struct BenchRow {
  BenchShape shape;
  double median_us = 0, p10_us = 0, p90_us = 0;  ///< of a launch, over the rounds
  int launches = 0, rounds = 0;                  ///< launches a round
  Work work{};
  std::string ceiling{};  ///< "read", "fma" or "mma": what bounds the work; empty = host time
  double rate = 0;        ///< in rate_unit()
  /// The least time that the ceiling allows, as a share of the median. None of bytes that a cache
  /// of the device holds, which say nothing about its memory.
  std::optional<double> share{};
  bool resident = false;  ///< what launches rotate over fits twice in the device's last cache
  Deviation deviation{};
  std::string backend{}, skipped{};
  std::vector<BenchKernel> kernels{};

  bool passed() const { return !skipped.empty() || deviation.passed(); }
  const char* rate_unit() const { return ceiling == "read" ? "GB/s" : "GFLOP/s"; }
};

/// Sets ceiling, rate and share from work, median and residency. 16-bit queries are held against
/// the matrix units where the device has them, whichever kernel ran.
void judge(BenchRow& row, const Ceilings& ceilings);

struct BenchReport {
  DeviceCapabilities device;
  Ceilings ceilings;
  bool quick = false;
  std::optional<KVCacheLayout> layout;  ///< asked for; nullopt = the backend's preference
  std::vector<BenchRow> rows;
};

/// docs/benchmark.md documents the fields; a change of their meaning raises the version.
inline constexpr int kBenchSchemaVersion = 1;
nlohmann::ordered_json to_json(const BenchReport& report);

void print_header(const BenchReport& report);
void print_row(const BenchRow& row);

}  // namespace clattn::cli
