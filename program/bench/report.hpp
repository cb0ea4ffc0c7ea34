#pragma once

#include <clattn/device.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "program/bench/shapes.hpp"
#include "program/bench/workload.hpp"
#include "program/ceilings/ceilings.hpp"

namespace clattn::cli {

/// What `clattn bench` found out about one shape.
struct BenchRow {
  BenchShape shape;
  std::string asked_backend{};                   ///< of several that --backend names
  double median_us = 0, p10_us = 0, p90_us = 0;  ///< of a launch, over the rounds
  int launches = 0, rounds = 0;                  ///< launches a round
  Work work{};
  /// What bounds the work: "read", "copy" (suites cache, merge and those of
  /// recurrent layers), "fma", "bf16", "mma" or
  /// "wgmma"; empty = host time.
  std::string ceiling{};
  double rate = 0;  ///< in rate_unit()
  /// The least time that the ceiling allows, as a share of the median. None of bytes that a cache
  /// of the device holds, which say nothing about its memory.
  std::optional<double> share{};
  bool resident = false;  ///< what launches rotate over fits twice in the device's last cache
  Deviation deviation{};
  std::string backend{}, skipped{};
  std::vector<BenchKernel> kernels{};
  std::vector<BenchLaunch> plan{};  ///< of --plan

  /// What the plan expects the median to be; 0 without one.
  double predicted_us() const;
  /// How much more the plan expects, as a share of the median.
  double prediction_error() const { return predicted_us() / median_us - 1; }

  /// The shape's name, then the backend where the run compares several.
  std::string name() const;
  bool passed() const { return !skipped.empty() || deviation.passed(); }
  /// Whether the rounds differ so much that the median says little: by more than 20 % of it.
  bool unsteady() const { return p90_us - p10_us > 0.2 * median_us; }
  /// Whether it claims more than the ceiling by more than ceilings vary: one of the two is wrong.
  bool above_ceiling() const { return share.value_or(0) > 1.05; }
  bool moves_bytes() const { return ceiling == "read" || ceiling == "copy"; }
  const char* rate_unit() const { return moves_bytes() ? "GB/s" : "GFLOP/s"; }
};

/// Sets ceiling, rate and share from work, median, residency and kernels. What only moves bytes is
/// compared with a copy; swaps have no share, because what a copy on the device takes does not
/// bound what crosses the bus. 16-bit queries are compared with the fastest matrix units of the
/// device, whichever kernel ran; where warpgroup products have no ceiling, their kernels have no
/// share: mma.sync does not bound them.
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
/// A line for each member and for each of its rows, as bench/report_file.py writes it.
std::string report_text(const nlohmann::ordered_json& report);

void print_header(const BenchReport& report);
void print_row(const BenchRow& row);
/// Says what the marks of the rows mean, if any has one.
void print_notes(const BenchReport& report);

}  // namespace clattn::cli
