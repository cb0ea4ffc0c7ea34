#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace clattn::cli {

enum class CheckExtent : std::uint8_t {
  kRepresentatives,  ///< one configuration for each family and kind of work
  kAll,              ///< every variant, type and option
};

/// A part of a check.
struct CheckStep {
  std::string name;               ///< what a progress line says of it
  std::function<void()> compile;  ///< has the driver make its kernels; run alongside others'
  std::function<void()> run;
};

/// What a check does: its steps' kernels are compiled side by side, then the steps run in order.
class CheckPlan {
 public:
  explicit CheckPlan(CheckExtent extent) : extent_(extent) {}

  /// Whether one of several checks of a kind is made; remembers those that are left out.
  bool takes(const std::string& kind, const std::string& name, bool representative);
  void add(CheckStep step) { steps_.push_back(std::move(step)); }
  /// Said by steps: something is wrong with the device.
  void fail() { passed_ = false; }

  /// Returns whether no step failed. What a compilation throws is dropped: whoever runs the kernel
  /// meets it again, and knows whose fault it is.
  bool run(std::size_t num_threads);
  /// Names by kind.
  const std::map<std::string, std::vector<std::string>>& left_out() const { return left_out_; }

 private:
  void compile(std::size_t num_threads) const;

  CheckExtent extent_;
  std::vector<CheckStep> steps_;
  std::map<std::string, std::vector<std::string>> left_out_;
  bool passed_ = true;
};

}  // namespace clattn::cli
