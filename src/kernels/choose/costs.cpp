#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {

namespace {

constexpr double kNsPerUs = 1000;
constexpr double kBesideNs = 8e3;  // what events between two queues are taken to cost

/// The closest row of costs for a kernel or its tasks of few rows; null if none fits the shape.
const CostRow* cost_row(const TunedDevice& device, const KernelShape& shape, const Variant& variant,
                        std::string_view kernel) {
  TuningQuery query = tuning_query(device.capabilities, shape, variant.family());
  query.kernel = kernel;
  return device.table.find_costs(query);
}

/// The costs of a kernel's tasks of at most KernelTraits::few_rows rows, from the row whose kernel
/// is "few:" and its name; none without such a row, or where keys are not copied by tensor maps, as
/// they were when it was measured.
std::optional<KernelCosts> few_rows_costs(const TunedDevice& device, const KernelShape& shape,
                                          const Variant& variant) {
  if (variant.kernel().few_rows == 0 || !copies_boxes(variant, shape, device.capabilities))
    return std::nullopt;
  const CostRow* row = cost_row(device, shape, variant, few_rows_name(variant));
  if (row == nullptr || !row->kernel.starts_with("few:")) return std::nullopt;
  return row->costs;
}

/// What a task of a stage costs: the bytes and products of a key, at the kernel's rates.
TaskCosts task_costs(const KernelCosts& costs, const KernelShape& shape, const HeadTiling& tiling) {
  const bool latent = shape.form == CacheForm::kLatent;
  const double heads = tiling.heads_per_item * tiling.kv_heads;
  const double width = shape.head_size + shape.value_size();
  const double elements = latent ? shape.head_size + shape.rope_dim : width;
  const double scales = shape.row_scales ? 2.0 * sizeof(float) : 0;
  const double bytes =
      tiling.kv_heads * (elements / codes_per_element(shape.cache_dtype) *
                             static_cast<double>(element_size_bytes(shape.cache_dtype)) +
                         scales);
  const double flops =
      heads * (latent ? 4.0 * shape.head_size + 2.0 * shape.rope_dim : 2.0 * width);
  // Bytes and products a nanosecond are GB and GFLOP a second.
  return {.task_ns = costs.task_us * kNsPerUs,
          .split_ns = costs.split_us * kNsPerUs,
          .key_ns = costs.read_gbs > 0 ? bytes / costs.read_gbs : 1e-3,
          .token_key_ns = costs.math_gflops > 0 ? flops / costs.math_gflops : 0,
          .parallel = costs.groups};
}

/// What merging a whole row of heads costs; `workers` groups run at once if the costs do not say.
MergeCosts merge_costs(const KernelCosts& costs, const KernelShape& shape, std::int32_t workers) {
  const double at_once = costs.groups > 0 ? costs.groups : workers;
  const double bytes = 4.0 * (shape.value_size() + 1);
  return {.launch_ns = costs.launch_us * kNsPerUs,
          .token_ns = shape.num_heads / at_once * costs.task_us * kNsPerUs,
          .row_ns = costs.read_gbs > 0 ? shape.num_heads / at_once * bytes / costs.read_gbs : 0};
}

}  // namespace

std::string few_rows_name(const Variant& variant) {
  return fmt::format("few:{}", variant.name);
}

KernelCosts kernel_costs(const TunedDevice& device, const KernelShape& shape,
                         const Variant& variant) {
  const CostRow* row = cost_row(device, shape, variant, variant.name);
  return row == nullptr ? KernelCosts{} : row->costs;  // shipped rows leave no kernel out
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

PlannerConfig planner_config(const AttentionKernels& kernels, const TunedDevice& device) {
  const KernelShape& shape = kernels.shape;
  const auto workers_of = [&](const Variant& variant) {
    return concurrent_groups(variant, shape.cache_dtype, device.capabilities);
  };
  PlannerConfig config;
  for (const BuiltKernel& stage : kernels.stages) {
    const Variant& variant = *stage.variant;
    const KernelTraits& kernel = variant.kernel();
    const std::int32_t tokens = stage.tiling.item_tokens;
    const KernelCosts costs = kernel_costs(device, shape, variant);
    TileClass& tile = config.tiles.at(static_cast<std::size_t>(config.num_tiles++));
    tile = {.max_query_len = tokens,
            .max_item_tokens = tokens,
            .groups_per_item = stage.tiling.groups_per_item,
            .merges_splits = merges_splits(variant),
            .ends_at_padding = kernel.ends_at_padding,
            .step_keys = step_keys(variant, shape.head_size),
            .workers = workers_of(variant),
            .dealing = kernel.tasks == Tasks::kDealt ? Dealing::kDealt : Dealing::kTaken,
            .launch_ns = costs.launch_us * kNsPerUs,
            .costs = task_costs(costs, shape, stage.tiling)};
    const auto few = few_rows_costs(device, shape, variant);
    if (!few) continue;
    tile.few_tokens = kernel.few_rows / stage.tiling.heads_per_item;
    tile.few = task_costs(*few, shape, stage.tiling);
  }
  config.beside_ns = kBesideNs;
  const Variant& merge = *kernels.merge.variant;
  config.merge = merge_costs(kernel_costs(device, shape, merge), shape, workers_of(merge));
  // Without pages any cut will do; this one keeps items apart by whole cache lines.
  config.block_size = shape.block_size > 0 ? shape.block_size : 16;
  // Without a queue, CPUs are handed the front of the list.
  const Variant& longest = *kernels.stages.back().variant;
  const bool queue = longest.kernel().tasks == Tasks::kQueue;
  config.item_order = longest.family() == KernelFamily::kCpu && !queue ? ItemOrder::kLightFirst
                                                                       : ItemOrder::kHeavyFirst;
  return config;
}

}  // namespace clattn::detail
