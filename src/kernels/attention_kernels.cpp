#include "kernels/attention_kernels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "base/error.hpp"

namespace clattn::detail {

namespace {

// Planner constants by kind of device. GPUs: 4 work-groups a compute unit hide latency, and a split
// below 256 keys costs more to merge than it saves. CPUs: a work-group is a thread's unit of work;
// 16 a core even out ragged batches, and even 32 keys outweigh the start of a work-group (3-7 ns on
// PoCL).
struct PlannerDefaults {
  std::int32_t items_per_compute_unit;
  std::int32_t min_split_keys;
  ItemOrder order;
};
constexpr PlannerDefaults kGpuPlan{4, 256, ItemOrder::kHeavyFirst};
constexpr PlannerDefaults kCpuPlan{16, 32, ItemOrder::kLightFirst};

/// Decode tiles hold all query heads of a KV head.
bool tile_holds_group(const Variant& variant, const KernelShape& shape) {
  return variant.role != Role::kDecode || variant.block_rows >= shape.group();
}

/// Whether a smaller tile would read the keys of a KV head more often than a larger one.
bool reads_more(const Variant& variant, const KernelShape& shape,
                const std::vector<BuiltKernel>& larger) {
  return !larger.empty() &&
         head_tiling(variant, shape).head_chunks > larger.front().tiling.head_chunks;
}

/// A row of the same tile is what takes over where the first does not fit.
bool is_spare(const Variant& variant, const std::vector<BuiltKernel>& built) {
  return std::any_of(built.begin(), built.end(), [&](const BuiltKernel& kernel) {
    return variant.block_rows > 0 && kernel.variant->block_rows == variant.block_rows;
  });
}

std::vector<BuiltKernel> build_fitting(Runtime& runtime, const KernelShape& shape,
                                       KernelFamily family, Role role, std::size_t most,
                                       std::vector<std::string>* rejected) {
  const DeviceCapabilities& capabilities = runtime.capabilities();
  std::vector<BuiltKernel> built;
  for (const KernelFamily rung : family_ladder(family, capabilities)) {
    for (const Variant& variant : variants()) {
      if (variant.role != role || variant.family != rung || built.size() == most) continue;
      if (!tile_holds_group(variant, shape) || reads_more(variant, shape, built)) continue;
      if (!takes_types(variant, shape) || is_spare(variant, built)) continue;
      const auto reasons = why_not(variant, capabilities);
      if (!reasons.empty()) {
        rejected->push_back(fmt::format("{}: {}", variant.name, fmt::join(reasons, ", ")));
        continue;
      }
      std::shared_ptr<KernelPool> pool;
      try {
        pool = runtime.kernel(kernel_source(variant, shape, capabilities));
      } catch (const Error& error) {  // a tile that this driver cannot build: the next one may do
        if (error.code() != ErrorCode::kOpenCL) throw;
        rejected->push_back(fmt::format("{}: {}", variant.name, error.what()));
        continue;
      }
      if (!fits_after_build(variant, *pool, capabilities)) {
        rejected->push_back(
            fmt::format("{}: built, but it needs {} B of local and {} B of private memory",
                        variant.name, pool->local_mem_bytes(), pool->private_mem_bytes()));
        continue;
      }
      built.push_back({&variant, std::move(pool), head_tiling(variant, shape)});
    }
    if (!built.empty()) break;
  }
  return built;
}

PlannerConfig planner_config(const AttentionKernels& kernels,
                             const DeviceCapabilities& capabilities) {
  const PlannerDefaults& defaults =
      kernels.merge.variant->family == KernelFamily::kCpu ? kCpuPlan : kGpuPlan;
  PlannerConfig config;
  for (const BuiltKernel& stage : kernels.stages) {
    const std::int32_t tokens = stage.tiling.item_tokens;
    config.tiles.at(static_cast<std::size_t>(config.num_tiles++)) = {
        tokens, tokens, joins_splits(*stage.variant), resident_groups(*stage.variant)};
  }
  // Without pages any cut will do; this one keeps items apart by whole cache lines.
  config.block_size = kernels.shape.block_size > 0 ? kernels.shape.block_size : 16;
  config.groups_per_item = kernels.shape.num_kv_heads * kernels.stages.front().tiling.head_chunks;
  config.compute_units = std::max(capabilities.compute_units, 1);
  config.items_per_compute_unit = defaults.items_per_compute_unit;
  config.min_split_keys = defaults.min_split_keys;
  config.item_order = defaults.order;
  return config;
}

/// Which roles serve a form of cache: `shorter`, if any, takes queries before `longer` does.
struct FormRoles {
  std::optional<Role> shorter;
  Role longer;
  std::optional<Role> cache_write;
};
FormRoles roles_of(CacheForm form) {
  constexpr std::array<FormRoles, 3> kRoles = {{
      {Role::kDecode, Role::kPrefill, Role::kCacheWrite},
      {std::nullopt, Role::kMLADecode, std::nullopt},
      {std::nullopt, Role::kPackedDecode, std::nullopt},
  }};
  return kRoles.at(static_cast<std::size_t>(form));
}

std::shared_ptr<AttentionKernels> compile(Runtime& runtime, const KernelShape& shape,
                                          KernelFamily family) {
  auto kernels = std::make_shared<AttentionKernels>();
  kernels->runtime = &runtime;
  kernels->shape = shape;
  std::vector<std::string> rejected;
  auto& stages = kernels->stages;
  const FormRoles roles = roles_of(shape.form);
  if (roles.shorter) stages = build_fitting(runtime, shape, family, *roles.shorter, 1, &rejected);
  auto prefill = build_fitting(runtime, shape, family, roles.longer, 2, &rejected);
  if (prefill.empty()) {
    throw_unsupported("no {} kernel fits this device: {}", to_string(roles.longer),
                      fmt::join(rejected, "; "));
  }
  // The rows stand largest tile first; classes go from short queries to long ones. A smaller tile
  // is kept only where it takes queries that the decode kernel does not, and leaves the longer
  // ones.
  std::reverse(prefill.begin(), prefill.end());
  for (BuiltKernel& tile : prefill) {
    const bool last = &tile == &prefill.back();
    const std::int32_t tokens = tile.tiling.item_tokens;
    const bool longer = stages.empty() || tokens > stages.back().tiling.item_tokens;
    const bool shorter = tokens < prefill.back().tiling.item_tokens;
    if (last || (longer && shorter)) stages.push_back(std::move(tile));
  }
  kernels->merge = build_first_fitting(runtime, shape, family, Role::kMerge);
  if (shape.block_size > 0 && roles.cache_write) {
    kernels->cache_write = build_first_fitting(runtime, shape, family, *roles.cache_write);
  }
  kernels->planner = planner_config(*kernels, runtime.capabilities());
  return kernels;
}

}  // namespace

BuiltKernel build_first_fitting(Runtime& runtime, const KernelShape& shape, KernelFamily family,
                                Role role) {
  std::vector<std::string> rejected;
  auto built = build_fitting(runtime, shape, family, role, 1, &rejected);
  if (built.empty()) {
    throw_unsupported("no {} kernel fits this device: {}", to_string(role),
                      fmt::join(rejected, "; "));
  }
  return std::move(built.front());
}

bool AttentionKernels::runs_plan_of(const AttentionKernels& other) const {
  if (this == &other) return true;
  const KernelShape& a = shape;
  const KernelShape& b = other.shape;
  if (runtime != other.runtime || a.num_heads != b.num_heads || a.num_kv_heads != b.num_kv_heads ||
      a.head_size != b.head_size || a.block_size != b.block_size || a.dtype != b.dtype ||
      a.cache_dtype != b.cache_dtype || a.form != b.form) {
    return false;
  }
  if (stages.back().tiling.item_tokens < other.stages.back().tiling.item_tokens) return false;
  for (std::size_t i = 0; i < other.stages.size(); ++i) {  // who leaves the merge to the kernel
    const BuiltKernel& own = stages[stage_for(other, i)];
    if (joins_splits(*other.stages[i].variant) && !joins_splits(*own.variant)) return false;
  }
  return true;
}

std::size_t AttentionKernels::stage_for(const AttentionKernels& planned,
                                        std::size_t tile_class) const {
  const std::int32_t tokens = planned.stages.at(tile_class).tiling.item_tokens;
  const auto holds = [&](const BuiltKernel& stage) { return stage.tiling.item_tokens >= tokens; };
  if (stages.size() == planned.stages.size() && holds(stages[tile_class])) return tile_class;
  return static_cast<std::size_t>(std::find_if(stages.begin(), stages.end(), holds) -
                                  stages.begin());
}

KeyWindow window_of(const AttentionConfig& config) {
  KeyWindow window;
  window.chunk = config.attention_chunk_size;
  if (config.sliding_window > 0) {
    window.left = config.sliding_window - 1;
    window.right = config.attn_type == AttentionType::kDecoder ? 0 : window.left;
  }
  return window;
}

std::shared_ptr<const AttentionKernels> attention_kernels(Runtime& runtime,
                                                          const KernelShape& shape,
                                                          KernelFamily family) {
  const std::string key =
      fmt::format("attention form {} {}/{}x{}+{} page {} {}/{} {}{}", static_cast<int>(shape.form),
                  shape.num_heads, shape.num_kv_heads, shape.head_size, shape.rope_dim,
                  shape.block_size, to_string(shape.dtype), to_string(shape.cache_dtype),
                  to_string(family), option_macros(shape.options, Role::kPrefill));
  return std::static_pointer_cast<const AttentionKernels>(
      runtime.shared_object(key, [&] { return compile(runtime, shape, family); }));
}

}  // namespace clattn::detail
