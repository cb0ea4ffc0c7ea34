#include "kernels/costs.hpp"

#include <algorithm>

namespace clattn::detail {

KernelCosts kernel_costs(const Runtime& /*runtime*/, const KernelShape& /*shape*/,
                         const Variant& variant) {
  if (variant.family == KernelFamily::kCpu) {
    return {.launch_us = 20, .task_us = 1, .split_us = 1, .read_gbs = 10, .math_gflops = 60};
  }
  return {.launch_us = 6, .task_us = 2, .split_us = 2, .read_gbs = 30, .math_gflops = 0};
}

std::int32_t concurrent_groups(const Variant& variant, const DeviceCapabilities& capabilities) {
  // On a CPU a group keeps a core. Elsewhere four hide each other's waiting for memory.
  constexpr std::int32_t kHidingGroups = 4;
  const std::int32_t known = std::max(resident_groups(variant), staying_groups(variant));
  const std::int32_t each = variant.family == KernelFamily::kCpu ? 1
                            : known > 0                          ? known
                                                                 : kHidingGroups;
  return std::max(capabilities.compute_units, 1) * each;
}

}  // namespace clattn::detail
