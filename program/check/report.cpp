#include "program/check/report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "program/common/device_memory.hpp"
#include "program/common/progress.hpp"

namespace clattn::cli {

std::string types_of(DType dtype, DType cache_dtype) {
  return fmt::format("{}/{}", to_string(dtype), to_string(cache_dtype));
}

std::vector<LaunchReport> one_launch(std::string name, const Event& event) {
  if (!event) return {};
  return {{.name = std::move(name), .role = {}, .time_us = microseconds(event)}};
}

void CheckLine::run(const std::string& where, const std::function<Verdict()>& call) {
  try {
    const Verdict verdict = call();
    if (!verdict.deviation.passed()) failures.push_back(where + ": wrong result");
    if (verdict.launches.empty()) failures.push_back(where + ": launched no kernel");
    deviation.merge(verdict.deviation);
    double time_us = 0;
    for (const LaunchReport& launch : verdict.launches) {
      kernels.insert(launch.name);
      time_us += launch.time_us;
    }
    latency_us = std::max(latency_us, time_us);
  } catch (const Error& error) {
    failures.push_back(fmt::format("{}: {}", where, error.what()));
  }
}

CheckReport::CheckReport() {
  fmt::print("{:26} {:14} {:>10} {:>10} {:>7} {:>10}  {}\n", "work", "types", "max error",
             "allowed", "share", "time us", "kernels");
}

void CheckReport::add(const CheckLine& line) {
  ++num_lines_;
  num_passed_ += line.passed() ? 1 : 0;
  show_progress("");
  fmt::print("{:26} {:14} {:10.2e} {:10.2e} {:6.1f}% {:10.1f}  {}  {}\n", line.what, line.types,
             line.deviation.max_error, line.deviation.allowance,
             std::min(line.deviation.worst_share * 100, 999.9), line.latency_us,
             fmt::join(line.kernels, " + "), line.passed() ? "ok" : "FAILED");
  for (const std::string& failure : line.failures) fmt::print("    {}\n", failure);
  std::fflush(stdout);
}

void CheckReport::skip(std::string_view what, std::string_view types,
                       std::string_view reasons) const {
  show_progress("");
  fmt::print("{:26} {:14} not run: {}\n", what, types, reasons);
}

}  // namespace clattn::cli
