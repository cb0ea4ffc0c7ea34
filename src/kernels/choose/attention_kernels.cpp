#include "kernels/choose/attention_kernels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "kernels/choose/candidates.hpp"

namespace clattn::detail {

namespace {

/// How some drivers refuse a tile of more local memory or registers than there are: when they build
/// it, or when they make its kernel. What else a driver may say, that it has no memory or no device
/// any more, is no tile's fault.
bool lacks_resources(const Error& error) {
  constexpr std::array kStatuses = {CL_OUT_OF_RESOURCES, CL_INVALID_KERNEL_DEFINITION,
                                    CL_INVALID_PROGRAM_EXECUTABLE};
  return error.code() == ErrorCode::kOpenCL &&
         std::ranges::find(kStatuses, error.cl_code()) != kStatuses.end();
}

/// The device that kernels are for. Without a runtime nothing is built, and every variant that the
/// capabilities allow is assumed to fit.
struct Target {
  TunedDevice device;
  Runtime* runtime;
  std::string bundle = {};  ///< result of Runtime::expect()
};

/// The variants of a role that are built, tried one after the other.
class RoleKernels {
 public:
  RoleKernels(const Target& target, const KernelShape& shape, std::size_t most,
              Considered* considered)
      : target_(target), shape_(shape), most_(most), considered_(considered) {}

  /// Builds a variant if the device can run it and no earlier one does its work.
  void add(const Variant& variant) {
    if (std::string why = why_not_shape(variant, shape_); !why.empty())
      return considered_->pass(variant, std::move(why));
    keep_cheap_spill(variant.family());
    if (std::string why = why_unwanted(variant); !why.empty())
      return considered_->pass(variant, std::move(why));
    const DeviceCapabilities& capabilities = target_.device.capabilities;
    const auto reasons = why_not(variant, capabilities);
    if (!reasons.empty())
      return considered_->reject(variant, fmt::format("{}", fmt::join(reasons, ", ")));
    if (target_.runtime == nullptr) {
      return built.push_back({variant, nullptr, head_tiling(variant, shape_, capabilities)});
    }
    std::shared_ptr<KernelPool> pool = build(variant);
    if (pool == nullptr) return;
    // This one built, so earlier ones may have failed only because the driver was short of
    // resources for a moment: try them again. Those that fail again need more than it ever has.
    for (const Variant& doubtful : std::exchange(doubtful_, {})) {
      auto again = why_unwanted(doubtful).empty() ? build(doubtful) : nullptr;
      if (again != nullptr) take_in(doubtful, std::move(again));
    }
    doubtful_.clear();
    if (std::string why = why_unwanted(variant); !why.empty())
      return considered_->pass(variant, std::move(why));
    take_in(variant, std::move(pool));
  }

  /// The kernels that were built; if all spill, the one that spills least: better slow than none.
  std::vector<BuiltKernel> take() && {
    if (built.empty() && spilling_) built.push_back(std::move(*spilling_));
    return std::move(built);
  }

  std::vector<BuiltKernel> built;

 private:
  /// Null if the driver cannot build this tile or lacks the resources: a later one may work.
  std::shared_ptr<KernelPool> build(const Variant& variant) {
    try {
      return target_.runtime->kernel(kernel_source(variant, shape_, target_.device.capabilities),
                                     target_.bundle);
    } catch (const Error& error) {
      const bool refused = is_build_refusal(error);
      if (!refused && !lacks_resources(error)) throw;
      if (refused) target_.runtime->note_build_failure(variant.name, error.what());
      if (!refused) doubtful_.push_back(variant);
      considered_->reject(variant, error.what());
      return nullptr;
    }
  }

  void take_in(const Variant& variant, std::shared_ptr<KernelPool> pool) {
    const DeviceCapabilities& capabilities = target_.device.capabilities;
    if (!fits_after_build(variant, *pool, capabilities)) {
      return considered_->reject(
          variant, fmt::format("built, but it needs {} B of local and {} B of private memory",
                               pool->local_mem_bytes(), pool->private_mem_bytes()));
    }
    BuiltKernel kernel{variant, std::move(pool), head_tiling(variant, shape_, capabilities)};
    if (!spills(variant, kernel.pool->private_mem_bytes(), capabilities))
      return built.push_back(std::move(kernel));
    considered_->pass(variant, fmt::format("spills {} B", kernel.pool->private_mem_bytes()));
    if (!spilling_ || kernel.pool->private_mem_bytes() < spilling_->pool->private_mem_bytes())
      spilling_ = std::move(kernel);
  }

  /// Before another family is tried, a kernel that spills little will do.
  void keep_cheap_spill(KernelFamily next) {
    if (built.empty() && spilling_ && spilling_->variant->family() != next &&
        spilling_->pool->private_mem_bytes() <= kCheapSpillBytes)
      built.push_back(*std::exchange(spilling_, std::nullopt));
  }

  /// Why what is built makes it unnecessary; empty = it does not.
  std::string why_unwanted(const Variant& variant) const {
    if (built.empty()) return {};
    const Variant& first = *built.front().variant;
    if (first.family() != variant.family())
      return fmt::format("{} of another family serves the shape", first.name);
    if (built.size() >= most_) return fmt::format("{} is preferred", first.name);
    const DeviceCapabilities& capabilities = target_.device.capabilities;
    if (head_tiling(variant, shape_, capabilities).head_chunks > built.front().tiling.head_chunks)
      return fmt::format("would read keys more often than {}", first.name);
    // A tile no smaller than the first is what takes over where the first does not fit.
    if (variant.block_rows >= first.block_rows)
      return fmt::format("its tile is no smaller than that of {}", first.name);
    return {};
  }

  const Target& target_;
  const KernelShape& shape_;
  std::size_t most_;
  Considered* considered_;
  std::optional<BuiltKernel> spilling_;  // the one that spills least
  std::vector<Variant> doubtful_;        // the driver lacked resources when they were built
};

std::vector<BuiltKernel> build_fitting(const Target& target, const KernelShape& shape,
                                       KernelFamily family, Role role, std::size_t most,
                                       Considered* considered) {
  RoleKernels kernels(target, shape, most, considered);
  const std::optional<Variant> tuned = tuned_variant(target.device, shape, family, role);
  if (tuned) kernels.add(*tuned);
  const bool is_tuned = !kernels.built.empty();
  use_best_family(role, is_tuned ? tuned->family() : family, target.device.capabilities,
                  [&](const Variant& variant) {
                    if (variant.kernel().wide) {
                      std::string why = why_not_shape(variant, shape);
                      if (why.empty()) why = "built beside the first tile, where none is tuned";
                      considered->pass(variant, std::move(why));
                    } else if (variant.unit().asked_only) {
                      considered->pass(variant, "taken only where a tuning row names it");
                    } else {
                      kernels.add(variant);
                    }
                    return !kernels.built.empty();
                  });
  return std::move(kernels).take();
}

/// The wide tile beside the first one of a role; nothing where a tuning row has chosen.
std::optional<Variant> wide_choice(const TunedDevice& device, const KernelShape& shape,
                                   KernelFamily family, Role role) {
  if (tuned_variant(device, shape, family, role)) return std::nullopt;
  std::optional<Variant> wide;
  use_best_family(role, family, device.capabilities, [&](const Variant& variant) {
    const bool fits = takes_shape(variant, shape) && why_not(variant, device.capabilities).empty();
    if (fits && variant.kernel().wide) wide = variant;
    return fits;
  });
  return wide;
}

/// What events between two queues are taken to cost; chosen, not measured.
constexpr double kBesideNs = 8e3;

PlannerConfig planner_config(const AttentionKernels& kernels, const TunedDevice& device) {
  PlannerConfig config;
  for (const BuiltKernel& stage : kernels.stages) {
    const std::int32_t tokens = stage.tiling.item_tokens;
    const KernelCosts costs = kernel_costs(device, kernels.shape, *stage.variant);
    config.tiles.at(static_cast<std::size_t>(config.num_tiles++)) = {
        .max_query_len = tokens,
        .max_item_tokens = tokens,
        .groups_per_item = stage.tiling.groups_per_item,
        .merges_splits = merges_splits(*stage.variant),
        .ends_at_padding = stage.variant->kernel().ends_at_padding,
        .step_keys = step_keys(*stage.variant, kernels.shape.head_size),
        .workers =
            concurrent_groups(*stage.variant, kernels.shape.cache_dtype, device.capabilities),
        .dealing =
            stage.variant->kernel().tasks == Tasks::kDealt ? Dealing::kDealt : Dealing::kTaken,
        .launch_ns = costs.launch_us * kNsPerUs,
        .costs = task_costs(costs, kernels.shape, stage.tiling)};
    const auto few = few_rows_costs(device, kernels.shape, *stage.variant);
    if (!few) continue;
    TileClass& tile = config.tiles.at(static_cast<std::size_t>(config.num_tiles - 1));
    tile.few_tokens = stage.variant->kernel().few_rows / stage.tiling.heads_per_item;
    tile.few = task_costs(*few, kernels.shape, stage.tiling);
  }
  config.beside_ns = kBesideNs;
  config.merge = merge_costs(
      kernel_costs(device, kernels.shape, *kernels.merge.variant), kernels.shape,
      concurrent_groups(*kernels.merge.variant, kernels.shape.cache_dtype, device.capabilities));
  // Without pages any cut will do; this one keeps items apart by whole cache lines.
  config.block_size = kernels.shape.block_size > 0 ? kernels.shape.block_size : 16;
  // Without a queue, CPUs are handed the front of the list.
  const Variant& longest = *kernels.stages.back().variant;
  const bool queue = longest.kernel().tasks == Tasks::kQueue;
  config.item_order = longest.family() == KernelFamily::kCpu && !queue ? ItemOrder::kLightFirst
                                                                       : ItemOrder::kHeavyFirst;
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

/// The variant that is tried first for a role; nothing where none runs.
std::optional<Variant> first_choice(const TunedDevice& device, const KernelShape& shape,
                                    KernelFamily family, Role role) {
  if (const auto tuned = tuned_variant(device, shape, family, role)) return tuned;
  std::optional<Variant> first;
  use_best_family(role, family, device.capabilities, [&](const Variant& variant) {
    if (!first && takes_shape(variant, shape) && why_not(variant, device.capabilities).empty())
      first = variant;
    return first.has_value();
  });
  return first;
}

/// Builds, as one program, the kernels that compile() will probably choose; returns its name.
std::string expect_first_choices(const Target& target, const KernelShape& shape,
                                 KernelFamily family) {
  const FormRoles roles = roles_of(shape.form);
  std::vector<KernelSource> sources;
  for (const std::optional<Role>& role :
       {roles.shorter, std::optional(roles.longer), std::optional(Role::kMerge),
        shape.block_size > 0 ? roles.cache_write : std::nullopt}) {
    const auto variant = role ? first_choice(target.device, shape, family, *role) : std::nullopt;
    if (variant) sources.push_back(kernel_source(*variant, shape, target.device.capabilities));
  }
  if (const auto wide = wide_choice(target.device, shape, family, roles.longer))
    sources.push_back(kernel_source(*wide, shape, target.device.capabilities));
  return target.runtime->expect(sources);
}

BuiltKernel first_fitting(const Target& target, const KernelShape& shape, KernelFamily family,
                          Role role, Considered& considered) {
  const std::size_t before = considered.rejected.size();
  auto built = build_fitting(target, shape, family, role, 1, &considered);
  throw_unsupported_if(built.empty(), "no {} kernel fits this device: {}", to_string(role),
                       fmt::join(std::span(considered.rejected).subspan(before), "; "));
  finish_role(role, std::array{*built.front().variant}, target.device, shape, family, considered);
  return std::move(built.front());
}

struct Stages {
  std::vector<BuiltKernel> kernels;
  std::int32_t num_planned = 0;  ///< the first ones, which this layer's own plans use
  bool last_is_wide = false;     ///< the last of these
};

/// Adds the wide tile. This layer's own plans do not use one that spills, but it must run plans of
/// layers whose options leave more registers.
void add_wide_tile(const Target& target, const KernelShape& shape, const Variant& wide,
                   Stages& stages, Considered& considered) {
  const HeadTiling& longest = stages.kernels.back().tiling;
  const HeadTiling tiling = head_tiling(wide, shape, target.device.capabilities);
  if (tiling.item_tokens <= longest.item_tokens || tiling.head_chunks > longest.head_chunks) return;
  RoleKernels kernels(target, shape, 1, &considered);
  kernels.add(wide);
  stages.last_is_wide = !kernels.built.empty();
  if (stages.last_is_wide) ++stages.num_planned;
  for (BuiltKernel& built : std::move(kernels).take()) stages.kernels.push_back(std::move(built));
}

/// The stages of a shape, short queries first.
Stages build_stages(const Target& target, const KernelShape& shape, KernelFamily family,
                    const FormRoles& roles, Considered& considered) {
  Stages result;
  std::vector<BuiltKernel>& stages = result.kernels;
  if (roles.shorter) stages = build_fitting(target, shape, family, *roles.shorter, 1, &considered);
  auto longer = build_fitting(target, shape, family, roles.longer, 2, &considered);
  throw_unsupported_if(longer.empty(), "no {} kernel fits this device: {}", to_string(roles.longer),
                       fmt::join(considered.rejected, "; "));
  // The rows stand largest tile first; classes go from short queries to long ones. A smaller tile
  // is kept only where it takes queries that the decode kernel does not, and leaves the longer
  // ones.
  std::ranges::reverse(longer);
  for (BuiltKernel& tile : longer) {
    const bool last = &tile == &longer.back();
    const std::int32_t tokens = tile.tiling.item_tokens;
    const bool more = stages.empty() || tokens > stages.back().tiling.item_tokens;
    const bool fewer = tokens < longer.back().tiling.item_tokens;
    if (last || (more && fewer)) stages.push_back(std::move(tile));
  }
  result.num_planned = static_cast<std::int32_t>(stages.size());
  if (const auto wide = wide_choice(target.device, shape, family, roles.longer))
    add_wide_tile(target, shape, *wide, result, considered);
  std::vector<Variant> chosen;
  chosen.reserve(stages.size());
  for (const BuiltKernel& stage : stages) chosen.push_back(*stage.variant);
  if (roles.shorter) finish_role(*roles.shorter, chosen, target.device, shape, family, considered);
  finish_role(roles.longer, chosen, target.device, shape, family, considered);
  return result;
}

void log_choice(const AttentionKernels& kernels, const TunedDevice& device) {
  if (!logs(LogLevel::kInfo)) return;
  const KernelShape& shape = kernels.shape;
  std::vector<std::string_view> names;
  for (const Candidate& candidate : kernels.candidates) {
    if (candidate.chosen) names.push_back(candidate.name);
  }
  log(LogLevel::kInfo, "{}: {}/{} heads of {}, {} over {} in pages of {}{}: {}",
      device.capabilities.name, shape.num_heads, shape.num_kv_heads, shape.head_size,
      to_string(shape.dtype), to_string(shape.cache_dtype), shape.block_size,
      option_macros(shape.options, Role::kPrefill), fmt::join(names, " + "));
  log(LogLevel::kDebug, "considered:\n{}", to_string(kernels.candidates));
}

std::shared_ptr<AttentionKernels> compile(Target target, const KernelShape& shape,
                                          KernelFamily family) {
  if (target.runtime != nullptr) target.bundle = expect_first_choices(target, shape, family);
  auto kernels = std::make_shared<AttentionKernels>();
  kernels->runtime = target.runtime;
  kernels->shape = shape;
  Considered considered;
  const FormRoles roles = roles_of(shape.form);
  Stages stages = build_stages(target, shape, family, roles, considered);
  kernels->stages = std::move(stages.kernels);
  kernels->merge = first_fitting(target, shape, family, Role::kMerge, considered);
  if (shape.block_size > 0 && roles.cache_write) {
    kernels->cache_write = first_fitting(target, shape, family, *roles.cache_write, considered);
  }
  kernels->planner = planner_config(*kernels, target.device);
  kernels->planner.num_tiles = stages.num_planned;
  kernels->planner.last_is_wide = stages.last_is_wide;
  kernels->candidates = std::move(considered.all);
  if (target.runtime != nullptr) log_choice(*kernels, target.device);
  return kernels;
}

}  // namespace

BuiltKernel build_first_fitting(Runtime& runtime, const KernelShape& shape, KernelFamily family,
                                Role role) {
  const RuntimeTuning tuning = runtime.tuning();
  Considered considered;
  return first_fitting({{runtime.capabilities(), *tuning.table}, &runtime}, shape, family, role,
                       considered);
}

std::string AttentionKernels::why_not_plan_of(const AttentionKernels& other) const {
  if (this == &other) return {};
  if (runtime != other.runtime) return "its context is not this layer's";
  if (shape.form != other.shape.form) return "its caches are of another form";
  const KernelShape& a = shape;
  const KernelShape& b = other.shape;
  std::string difference;
  const auto compare = [&](std::string_view field, const auto& here, const auto& there) {
    if (difference.empty() && here != there)
      difference = fmt::format("{} is {}, legal: {}", field, there, here);
  };
  compare("num_heads", a.num_heads, b.num_heads);
  compare("num_kv_heads", a.num_kv_heads, b.num_kv_heads);
  compare("head_size", a.head_size, b.head_size);
  compare("head_size_v", a.value_size(), b.value_size());
  compare("block_size", a.block_size, b.block_size);
  compare("dtype", to_string(a.dtype), to_string(b.dtype));
  compare("kv_cache_dtype", to_string(a.cache_dtype), to_string(b.cache_dtype));
  if (!difference.empty()) return difference;
  constexpr const char* kTiles =
      "its kernels split work otherwise (kernel_family, options, tuning)";
  if (stages.back().tiling.item_tokens < other.stages.back().tiling.item_tokens) return kTiles;
  for (std::size_t i = 0; i < other.stages.size(); ++i) {  // who leaves the merge to the kernel
    const BuiltKernel& own = stages[stage_for(other, i)];
    if (merges_splits(*other.stages[i].variant) && !merges_splits(*own.variant)) return kTiles;
  }
  return {};
}

std::size_t AttentionKernels::stage_for(const AttentionKernels& planned,
                                        std::size_t tile_class) const {
  const std::int32_t tokens = planned.stages.at(tile_class).tiling.item_tokens;
  const auto holds = [&](const BuiltKernel& stage) { return stage.tiling.item_tokens >= tokens; };
  if (stages.size() == planned.stages.size() && holds(stages[tile_class])) return tile_class;
  return static_cast<std::size_t>(std::ranges::find_if(stages, holds) - stages.begin());
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
  const RuntimeTuning tuning = runtime.tuning();
  const std::string key = fmt::format(
      "attention form {} {}/{}x{}/{}+{} page {} {}/{}{} {}{} tuning {}",
      static_cast<int>(shape.form), shape.num_heads, shape.num_kv_heads, shape.head_size,
      shape.value_size(), shape.rope_dim, shape.block_size, to_string(shape.dtype),
      to_string(shape.cache_dtype), shape.fp8_products ? " products" : "", to_string(family),
      option_macros(shape.options, Role::kPrefill), tuning.revision);
  const Target target{{runtime.capabilities(), *tuning.table}, &runtime};
  return runtime.shared_object<const AttentionKernels>(
      key, [&] { return compile(target, shape, family); });
}

std::shared_ptr<const AttentionKernels> imagined_kernels(const TunedDevice& device,
                                                         const KernelShape& shape,
                                                         KernelFamily family) {
  return compile({device, nullptr}, shape, family);
}

}  // namespace clattn::detail
