#include "kernels/choose/attention_kernels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/checked.hpp"
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

/// Whether a built variant can run on the device: its local memory and its work-group size fit.
bool fits_after_build(const Variant& variant, const KernelPool& pool,
                      const DeviceCapabilities& capabilities) {
  // CPU drivers report fixed numbers for these (PoCL: 4096 work-items, 1024 private bytes).
  if (capabilities.kind == DeviceKind::kCpu) return true;
  // What the self-test saw work counts more than what the driver says.
  const std::uint64_t local_limit = capabilities.static_local_mem_bytes != 0
                                        ? capabilities.static_local_mem_bytes
                                        : capabilities.local_mem_bytes;
  // NVIDIA's driver answers a power of two; its assembler has seen that the group fits.
  const bool size_fits = variant.kernel().misjudged_size ||
                         pool.work_group_size() >= std::bit_floor(to_size(variant.work_group_size));
  return pool.local_mem_bytes() <= local_limit && size_fits;
}

/// The variants of a role that are built, tried one after the other.
class RoleKernels {
 public:
  RoleKernels(KernelChoice& choice, std::size_t most) : choice_(choice), most_(most) {}

  /// Builds a variant if the device can run it and no earlier one does its work.
  void add(const Variant& variant) {
    if (std::string why = why_not_shape(variant, choice_.shape); !why.empty())
      return choice_.pass(variant, std::move(why));
    keep_cheap_spill(variant.family());
    if (std::string why = why_unwanted(variant); !why.empty())
      return choice_.pass(variant, std::move(why));
    if (const auto reasons = why_not(variant, capabilities_); !reasons.empty())
      return choice_.reject(variant, fmt::format("{}", fmt::join(reasons, ", ")));
    if (choice_.runtime == nullptr) return built.push_back({variant, nullptr, tiling_of(variant)});
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
      return choice_.pass(variant, std::move(why));
    take_in(variant, std::move(pool));
  }

  /// The kernels that were built; if all spill, the one that spills least: better slow than none.
  std::vector<BuiltKernel> take() && {
    if (built.empty() && spilling_) built.push_back(std::move(*spilling_));
    return std::move(built);
  }

  std::vector<BuiltKernel> built;

 private:
  HeadTiling tiling_of(const Variant& variant) const {
    return head_tiling(variant, choice_.shape, capabilities_);
  }

  /// Null if the driver cannot build this tile or lacks the resources: a later one may work.
  std::shared_ptr<KernelPool> build(const Variant& variant) {
    try {
      return choice_.runtime->kernel(kernel_source(variant, choice_.shape, capabilities_),
                                     choice_.bundle);
    } catch (const Error& error) {
      const bool refused = is_build_refusal(error);
      if (!refused && !lacks_resources(error)) throw;
      if (refused) choice_.runtime->note_build_failure(variant.name, error.what());
      if (!refused) doubtful_.push_back(variant);
      choice_.reject(variant, error.what());
      return nullptr;
    }
  }

  void take_in(const Variant& variant, std::shared_ptr<KernelPool> pool) {
    const std::uint64_t private_bytes = pool->private_mem_bytes();
    if (!fits_after_build(variant, *pool, capabilities_)) {
      return choice_.reject(
          variant, fmt::format("built, but it needs {} B of local and {} B of private memory",
                               pool->local_mem_bytes(), private_bytes));
    }
    BuiltKernel kernel{variant, std::move(pool), tiling_of(variant)};
    if (!spills(variant, private_bytes, capabilities_)) return built.push_back(std::move(kernel));
    choice_.pass(variant, fmt::format("spills {} B", private_bytes));
    if (!spilling_ || private_bytes < spilling_->pool->private_mem_bytes())
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
    if (tiling_of(variant).head_chunks > built.front().tiling.head_chunks)
      return fmt::format("would read keys more often than {}", first.name);
    // A tile no smaller than the first is what takes over where the first does not fit.
    if (variant.block_rows >= first.block_rows)
      return fmt::format("its tile is no smaller than that of {}", first.name);
    return {};
  }

  KernelChoice& choice_;
  const DeviceCapabilities& capabilities_ = choice_.device.capabilities;
  std::size_t most_;
  std::optional<BuiltKernel> spilling_;  // the one that spills least
  std::vector<Variant> doubtful_;        // the driver lacked resources when they were built
};

std::vector<BuiltKernel> build_fitting(KernelChoice& choice, Role role, std::size_t most) {
  RoleKernels kernels(choice, most);
  const std::optional<Variant> tuned = choice.tuned(role);
  if (tuned) kernels.add(*tuned);
  const KernelFamily family = kernels.built.empty() ? choice.family : tuned->family();
  use_best_family(role, family, choice.device.capabilities, [&](const Variant& variant) {
    if (variant.kernel().wide) {
      std::string why = why_not_shape(variant, choice.shape);
      if (why.empty()) why = "built beside the first tile, where none is tuned";
      choice.pass(variant, std::move(why));
    } else if (variant.unit().asked_only) {
      choice.pass(variant, "taken only where a tuning row names it");
    } else {
      kernels.add(variant);
    }
    return !kernels.built.empty();
  });
  return std::move(kernels).take();
}

BuiltKernel first_fitting(KernelChoice& choice, Role role) {
  const std::size_t before = choice.rejected.size();
  auto built = build_fitting(choice, role, 1);
  throw_unsupported_if(built.empty(), "no {} kernel fits this device: {}", to_string(role),
                       fmt::join(std::span(choice.rejected).subspan(before), "; "));
  choice.finish_role(role, built);
  return std::move(built.front());
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

enum class Width : std::uint8_t { kUsual, kWide };

/// The first variant of a role that should work here, of the family that serves it: a tuned one, or
/// one whose tile has that width. Where a tuning row has chosen, there is no wide one.
std::optional<Variant> first_choice(const KernelChoice& choice, Role role, Width width) {
  if (auto tuned = choice.tuned(role)) return width == Width::kWide ? std::nullopt : tuned;
  const DeviceCapabilities& capabilities = choice.device.capabilities;
  std::optional<Variant> first;
  use_best_family(role, choice.family, capabilities, [&](const Variant& variant) {
    const bool fits = takes_shape(variant, choice.shape) && why_not(variant, capabilities).empty();
    if (fits && !first && variant.kernel().wide == (width == Width::kWide)) first = variant;
    return fits;
  });
  return first;
}

/// Builds, as one program, the kernels that compile() will probably choose; returns its name.
std::string expect_first_choices(const KernelChoice& choice, const FormRoles& roles) {
  std::vector<KernelSource> sources;
  const auto expect = [&](std::optional<Role> role, Width width) {
    const auto variant = role ? first_choice(choice, *role, width) : std::nullopt;
    if (!variant) return;
    sources.push_back(kernel_source(*variant, choice.shape, choice.device.capabilities));
  };
  expect(roles.shorter, Width::kUsual);
  expect(roles.longer, Width::kUsual);
  expect(Role::kMerge, Width::kUsual);
  if (choice.shape.block_size > 0) expect(roles.cache_write, Width::kUsual);
  expect(roles.longer, Width::kWide);
  return choice.runtime->expect(sources);
}

/// The stages of a shape except for the wide one, short queries first.
std::vector<BuiltKernel> build_stages(KernelChoice& choice, const FormRoles& roles) {
  std::vector<BuiltKernel> stages;
  if (roles.shorter) stages = build_fitting(choice, *roles.shorter, 1);
  auto longer = build_fitting(choice, roles.longer, 2);
  throw_unsupported_if(longer.empty(), "no {} kernel fits this device: {}", to_string(roles.longer),
                       fmt::join(choice.rejected, "; "));
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
  return stages;
}

/// Adds the wide tile, if there is one. Returns whether this layer's own plans use it: not if it
/// spills, but the layer must run plans of layers whose options leave more registers.
bool add_wide_tile(KernelChoice& choice, Role role, std::vector<BuiltKernel>& stages) {
  const auto wide = first_choice(choice, role, Width::kWide);
  if (!wide) return false;
  const HeadTiling& longest = stages.back().tiling;
  const HeadTiling tiling = head_tiling(*wide, choice.shape, choice.device.capabilities);
  if (tiling.item_tokens <= longest.item_tokens || tiling.head_chunks > longest.head_chunks)
    return false;
  RoleKernels kernels(choice, 1);
  kernels.add(*wide);
  const bool planned = !kernels.built.empty();
  std::ranges::move(std::move(kernels).take(), std::back_inserter(stages));
  return planned;
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
      to_string(shape.dtype), to_string(shape.cache_format()), shape.block_size,
      option_macros(shape.options, Role::kPrefill), fmt::join(names, " + "));
  log(LogLevel::kDebug, "considered:\n{}", to_string(kernels.candidates));
}

std::shared_ptr<AttentionKernels> compile(KernelChoice choice) {
  const FormRoles roles = roles_of(choice.shape.form);
  if (choice.runtime != nullptr) choice.bundle = expect_first_choices(choice, roles);
  auto kernels = std::make_shared<AttentionKernels>();
  kernels->runtime = choice.runtime;
  kernels->shape = choice.shape;
  kernels->stages = build_stages(choice, roles);
  const std::size_t num_usual = kernels->stages.size();
  const bool plans_wide = add_wide_tile(choice, roles.longer, kernels->stages);
  if (roles.shorter) choice.finish_role(*roles.shorter, kernels->stages);
  choice.finish_role(roles.longer, kernels->stages);
  kernels->merge = first_fitting(choice, Role::kMerge);
  if (choice.shape.block_size > 0 && roles.cache_write)
    kernels->cache_write = first_fitting(choice, *roles.cache_write);
  kernels->planner = planner_config(*kernels, choice.device);
  kernels->planner.num_tiles = static_cast<int>(num_usual) + (plans_wide ? 1 : 0);
  kernels->planner.last_is_wide = plans_wide;
  kernels->candidates = std::move(choice.considered);
  if (choice.runtime != nullptr) log_choice(*kernels, choice.device);
  return kernels;
}

}  // namespace

BuiltKernel build_first_fitting(Runtime& runtime, const KernelShape& shape, KernelFamily family,
                                Role role) {
  const RuntimeTuning tuning = runtime.tuning();
  KernelChoice choice{{runtime.capabilities(), *tuning.table}, shape, family, &runtime};
  return first_fitting(choice, role);
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
  compare("kv_cache_dtype", to_string(a.cache_format()), to_string(b.cache_format()));
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

void append_window_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const std::pair<const char*, std::int32_t> sides[] = {{"window_left", config.window_left},
                                                        {"window_right", config.window_right}};
  for (const auto& [name, keys] : sides)
    append_if(reasons, config.sliding_window > 0 && keys >= 0,
              "{} is {}, supported with a sliding_window, which says both sides: -1", name, keys);
}

KeyWindow window_of(const AttentionConfig& config) {
  KeyWindow window{.left = config.window_left, .right = config.window_right};
  window.chunk = config.attention_chunk_size;
  if (window.chunk > 0)  // or fewer, if these hold all keys that there can be: an int of tokens
    window.chunk_lookback = std::min(config.chunk_lookback, INT32_MAX / window.chunk);
  if (config.sliding_window > 0) window.left = window.right = config.sliding_window - 1;
  return window;
}

ListRules lists_of(const AttentionConfig& config) {
  const KeyWindow window = window_of(config);
  const bool hides_first_keys = window.left >= 0 || window.chunk > 0;
  return {.spans = config.use_spans,
          .directions = config.use_directions,
          .first_keys = config.use_first_keys,
          .keep_keys = config.use_keep_keys && hides_first_keys,
          .trees = config.use_trees,
          .span_rule = config.span_rule};
}

std::shared_ptr<const AttentionKernels> attention_kernels(Runtime& runtime,
                                                          const KernelShape& shape,
                                                          KernelFamily family) {
  const RuntimeTuning tuning = runtime.tuning();
  const std::string key = fmt::format(
      "attention form {} {}/{}x{}/{}+{} page {} {}/{}{} {}{} tuning {}",
      static_cast<int>(shape.form), shape.num_heads, shape.num_kv_heads, shape.head_size,
      shape.value_size(), shape.rope_dim, shape.block_size, to_string(shape.dtype),
      to_string(shape.cache_format()), shape.fp8_products ? " products" : "", to_string(family),
      option_macros(shape.options, Role::kPrefill), tuning.revision);
  return runtime.shared_object<const AttentionKernels>(key, [&] {
    return compile({{runtime.capabilities(), *tuning.table}, shape, family, &runtime});
  });
}

std::shared_ptr<const AttentionKernels> imagined_kernels(const TunedDevice& device,
                                                         const KernelShape& shape,
                                                         KernelFamily family) {
  return compile({device, shape, family, nullptr});
}

}  // namespace clattn::detail
