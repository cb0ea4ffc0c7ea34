#pragma once

#include <clattn/types.hpp>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "program/common/attention_call.hpp"
#include "program/common/verify.hpp"

namespace clattn::cli {

/// Each call of a check runs this often; the last run is timed: the first pays for lazy
/// compilation.
inline constexpr int kCheckRepeats = 2;

/// "f16/fp8_e4m3": of queries and of the cache.
std::string types_of(DType dtype, DType cache_dtype);

/// What one call did and how far it was off.
struct Verdict {
  Deviation deviation{};
  std::vector<LaunchReport> launches{};
};

/// The launch of an operation that reports none itself.
std::vector<LaunchReport> one_launch(std::string name, const Event& event);

/// One line of the table: a kind of work with one pair of types.
struct CheckLine {
  std::string what;
  std::string types;
  Deviation deviation{};
  double latency_us = 0;
  std::set<std::string> kernels{};
  std::vector<std::string> failures{};

  bool passed() const { return failures.empty() && deviation.passed(); }
  /// Adds a call: passed if it did not throw, its result is right and it launched a kernel.
  void run(const std::string& where, const std::function<Verdict()>& call);
};

/// The table of a check, printed as it grows.
class CheckReport {
 public:
  CheckReport();
  void add(const CheckLine& line);
  /// Says why a kind of work was not run, which is no failure.
  void skip(std::string_view what, std::string_view types, std::string_view reasons) const;
  int num_lines() const { return num_lines_; }
  bool passed() const { return num_lines_ > 0 && num_passed_ == num_lines_; }
  int num_passed() const { return num_passed_; }

 private:
  int num_lines_ = 0, num_passed_ = 0;
};

}  // namespace clattn::cli
