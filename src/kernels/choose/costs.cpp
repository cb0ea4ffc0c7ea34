#include "kernels/choose/costs.hpp"

#include <algorithm>

namespace clattn::detail {

KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant) {
  TuningQuery query = tuning_query(device.capabilities, shape, variant.family());
  query.kernel = variant.name;
  const CostRow* row = device.table.find_costs(query);
  return row == nullptr ? KernelCosts{} : row->costs;  // shipped rows leave no kernel out
}

std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities) {
  // On a CPU a group keeps a core. Elsewhere four hide each other's waiting for memory.
  constexpr std::int32_t kHidingGroups = 4;
  const KernelTraits& traits = variant.kernel();
  const bool narrow = is_quantized(cache_dtype) && traits.groups_8bit > 0;
  const std::int32_t known = narrow ? traits.groups_8bit : traits.groups;
  const std::int32_t each = variant.family() == KernelFamily::kCpu ? 1
                            : known > 0                            ? known
                                                                   : kHidingGroups;
  return std::max(capabilities.compute_units, 1) * each;
}

}  // namespace clattn::detail
