#pragma once

#include <clattn/tuning.hpp>

#include "kernels/choose/tuned.hpp"

namespace clattn::detail {

/// What a kernel costs under a shape: of the closest row of the tuning database.
KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant);

/// Work-groups of a variant that run on the device at once with a cache of this type, as far as is
/// known.
std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
