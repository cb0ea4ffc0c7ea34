#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/choose/tuned.hpp"

namespace clattn::detail {

KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant) {
  TuningQuery query = tuning_query(device.capabilities, shape, variant.family());
  query.kernel = variant.name;
  const CostRow* row = device.table.find_costs(query);
  return row == nullptr ? KernelCosts{} : row->costs;  // shipped rows leave no kernel out
}

std::string few_rows_name(const Variant& variant) {
  return fmt::format("few:{}", variant.name);
}

std::optional<KernelCosts> few_rows_costs(const TunedDevice& device, const KernelShape& shape,
                                          const Variant& variant) {
  // The rows were measured where tensor maps copy the keys.
  if (variant.kernel().few_rows == 0 || !copies_boxes(variant, shape, device.capabilities))
    return std::nullopt;
  const std::string name = few_rows_name(variant);
  TuningQuery query = tuning_query(device.capabilities, shape, variant.family());
  query.kernel = name;
  const CostRow* row = device.table.find_costs(query);
  if (row == nullptr || !row->kernel.starts_with("few:")) return std::nullopt;
  return row->costs;
}

std::int32_t concurrent_groups(const Variant& variant, DType cache_dtype,
                               const DeviceCapabilities& capabilities) {
  // On a CPU a group keeps a core. Elsewhere four hide each other's waiting for memory where no
  // other number was measured; on NVIDIA 1024 work-items of scalar prefill do (docs/journal.md,
  // "Planning").
  constexpr std::int32_t kHidingGroups = 4, kScalarItems = 1024, kMostGroups = 16;
  const bool many = capabilities.inline_ptx && unit_of(variant.unit_id).header.empty() &&
                    variant.role == Role::kPrefill;
  const KernelTraits& traits = variant.kernel();
  const bool narrow = is_quantized(cache_dtype) && traits.groups_8bit > 0;
  const std::int32_t known = narrow ? traits.groups_8bit : traits.groups;
  const std::int32_t each =
      variant.family() == KernelFamily::kCpu ? 1
      : known > 0                            ? known
      : many ? std::clamp(kScalarItems / variant.work_group_size, kHidingGroups, kMostGroups)
             : kHidingGroups;
  return std::max(capabilities.compute_units, 1) * each;
}

TaskCosts task_costs(const KernelCosts& costs, const KernelShape& shape, const HeadTiling& tiling) {
  const bool latent = shape.form == CacheForm::kLatent;
  const double heads = tiling.heads_per_item * tiling.kv_heads;
  const double width = shape.head_size + shape.value_size();
  const double elements = latent ? shape.head_size + shape.rope_dim : width;
  const double bytes =
      elements * tiling.kv_heads * static_cast<double>(element_size_bytes(shape.cache_dtype));
  const double flops =
      heads * (latent ? 4.0 * shape.head_size + 2.0 * shape.rope_dim : 2.0 * width);
  // Bytes and products a nanosecond are GB and GFLOP a second.
  return {.task_ns = costs.task_us * kNsPerUs,
          .split_ns = costs.split_us * kNsPerUs,
          .key_ns = costs.read_gbs > 0 ? bytes / costs.read_gbs : 1e-3,
          .token_key_ns = costs.math_gflops > 0 ? flops / costs.math_gflops : 0,
          .parallel = costs.groups};
}

MergeCosts merge_costs(const KernelCosts& costs, const KernelShape& shape, std::int32_t workers) {
  const double at_once = costs.groups > 0 ? costs.groups : workers;
  const double bytes = 4.0 * (shape.value_size() + 1);
  return {.launch_ns = costs.launch_us * kNsPerUs,
          .token_ns = shape.num_heads / at_once * costs.task_us * kNsPerUs,
          .row_ns = costs.read_gbs > 0 ? shape.num_heads / at_once * bytes / costs.read_gbs : 0};
}

}  // namespace clattn::detail
