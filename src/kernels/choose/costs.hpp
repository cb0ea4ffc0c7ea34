#pragma once

#include <clattn/tuning.hpp>
#include <cstdint>

#include "kernels/choose/tuned.hpp"
#include "metadata/planner.hpp"

namespace clattn::detail {

/// What a kernel costs under a shape: of the closest row of the tuning database.
KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant);

/// Work-groups of a variant that run on the device at once with a cache of this type, as far as is
/// known.
std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities);

/// What a task of a stage costs: rates of bytes and products, times what a key has of them.
TaskCosts task_costs(const KernelCosts& costs, const KernelShape& shape, const HeadTiling& tiling);

/// Of merging a whole row of heads, where `workers` groups run at once if the costs do not say.
MergeCosts merge_costs(const KernelCosts& costs, const KernelShape& shape, std::int32_t workers);

inline constexpr double kNsPerUs = 1000;

}  // namespace clattn::detail
