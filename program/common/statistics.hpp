#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <vector>

namespace clattn::cli {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Sums up what a step's launches take, in their order.
class StepTime {
 public:
  /// `beside_last`: it began with the launch before it.
  void add(double us, bool beside_last) {
    us_ += beside_last ? std::max(us - last_us_, 0.0) : us;
    last_us_ = us;
  }
  double us() const { return us_; }

 private:
  double us_ = 0, last_us_ = 0;
};

/// Nearest rank: the smallest value that `share` of all do not exceed; 0 of none.
inline double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(std::max<std::size_t>(rank, 1) - 1);
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

/// The middle value, or the mean of the two in the middle; of one value at least.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace clattn::cli
