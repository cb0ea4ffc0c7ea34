#pragma once

#include <clattn/tuning.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/choose/variants.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn::detail {

/// Whether a kernel can be built with these constants: its file's legal values (kernels_cl/*.cl),
/// within what registers and local memory may hold.
bool is_legal_tile(const Variant& variant);

/// The variant that a row names, with the row's constants; nothing if there is none of `role`, or
/// the kernel does not take them.
std::optional<Variant> variant_of(const TuningRow& row, Role role);

/// A device, present or not, and its tuning rows.
struct TunedDevice {
  const DeviceCapabilities& capabilities;
  const TuningTable& table;
};

/// The variant to try first for a role of a shape; nothing = as variants.inc orders them.
std::optional<Variant> tuned_variant(const TunedDevice& device, const KernelShape& shape,
                                     KernelFamily family, Role role);

/// What the rows for a layer are found by, but for role and kernel. `family`: of the kernels that
/// are wanted; a device of another kind is then but a host for them.
TuningQuery tuning_query(const DeviceCapabilities& device, const KernelShape& shape,
                         KernelFamily family);

/// What a kernel costs under a shape: of the closest row of the tuning database.
KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant);

/// What rows for costs of its tasks of few rows call a kernel.
std::string few_rows_name(const Variant& variant);

/// Work-groups of a variant that run on the device at once with a cache of this type, as far as is
/// known.
std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities);

}  // namespace clattn::detail
