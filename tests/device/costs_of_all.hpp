#pragma once

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>

namespace test {

/// Costs of every kernel of a context while it lives, in place of what the tuning database says.
class CostsOfAll {
 public:
  CostsOfAll(clattn::Context& context, const clattn::KernelCosts& costs) : context_(context) {
    clattn::CostRow cpu, gpu;  // kernels for GPUs have the costs of GPUs on a CPU, too
    cpu.device = "cpu";
    gpu.device = "gpu";
    cpu.costs = gpu.costs = costs;
    clattn::set_tuning(context_, {}, std::array{cpu, gpu});
  }
  ~CostsOfAll() { clattn::set_tuning(context_, {}); }
  CostsOfAll(const CostsOfAll&) = delete;
  CostsOfAll& operator=(const CostsOfAll&) = delete;

 private:
  clattn::Context& context_;
};

inline constexpr clattn::KernelCosts kCutsCostNothing{.task_us = 1e-6, .read_gbs = 1e-3};
inline constexpr clattn::KernelCosts kCutsCostAll{
    .launch_us = 1e6, .task_us = 1e6, .split_us = 1e6, .read_gbs = 1e6};

}  // namespace test
