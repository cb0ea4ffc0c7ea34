#pragma once

#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <vector>

namespace test {

/// Costs of every kernel of a context while it lives, in place of what the tuning database says;
/// kernels that a row of `others` names have the costs of that row.
class CostsOfAll {
 public:
  CostsOfAll(clattn::Context& context, const clattn::KernelCosts& costs,
             std::vector<clattn::CostRow> others = {})
      : context_(context) {
    for (const char* kind : {"cpu", "gpu"}) {  // GPUs' kernels have a GPU's costs on a CPU, too
      clattn::CostRow& row = others.emplace_back();
      row.device = kind;
      row.costs = costs;
    }
    clattn::set_tuning(context_, {}, others);
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
