#pragma once

#include <clattn/tuning.hpp>

#include "kernels/choose/tuned.hpp"

namespace clattn::detail {

/// What a kernel costs under a shape: of the closest row of the tuning database.
KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant);

/// Work-groups of it that run on a device at once over such a cache, for all that is known.
std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
