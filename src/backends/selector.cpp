#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <clattn/mla.hpp>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "backends/registry.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"
#include "opencl/runtime.hpp"

namespace clattn {

namespace {

/// vLLM's names for a backend of ours, or for another library's that computes what ours does.
struct VllmNames {
  std::string_view ours;
  bool same;  ///< false: another library's kernels, for which ours must not be used silently
  std::span<const std::string_view> names;
};
constexpr std::string_view kPaged = "FLASHINFER", kDense = "XFORMERS";
constexpr std::string_view kPagedNames[] = {
    "FLASHINFER_VLLM_V1", "vllm.attention.backends.flashinfer.FlashInferBackend",
    "vllm.v1.attention.backends.flashinfer.FlashInferBackend"};
constexpr std::string_view kDenseNames[] = {
    "XFORMERS_VLLM_V1", "vllm.v1.attention.backends.xformers.XFormersAttentionBackend"};
// Those with _VLLM_V1 behind are the same.
constexpr std::string_view kLikePaged[] = {
    "FLASH_ATTN",         "TRITON_ATTN",      "FLEX_ATTENTION", "TREE_ATTN",
    "TORCH_SDPA",         "HPC_ATTN",         "B12X",           "CPU_ATTN",
    "ROCM_FLASH",         "ROCM_ATTN",        "ROCM_AITER_FA",  "ROCM_AITER_UNIFIED_ATTN",
    "TRITON_ATTN_DIFFKV", "FLASH_ATTN_DIFFKV"};
constexpr std::string_view kLikeLatent[] = {"FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA",
                                            "TRITON_MLA",     "CUTLASS_MLA",    "CPU_MLA",
                                            "AMX_MLA",        "TOKENSPEED_MLA", "ROCM_AITER_MLA"};
constexpr VllmNames kVllmNames[] = {{kPaged, true, kPagedNames},
                                    {kDense, true, kDenseNames},
                                    {kPaged, false, kLikePaged},
                                    {kMLABackendName, false, kLikeLatent}};

/// Names of vLLM's whose attention no backend of ours computes, by a part of the name.
constexpr std::pair<std::string_view, std::string_view> kNotComputed[] = {
    {"SPARSE", "attention to a choice of keys"},
    {"_MSA", "attention to a choice of keys"},
    {"DUAL_CHUNK", "dual chunk attention"},
    {"TURBOQUANT", "attention over TurboQuant caches"}};

/// What an unknown name, in any letter case, may stand for, as the end of its error.
std::string hint_for(std::string_view given,
                     std::span<const std::shared_ptr<const AttentionBackend>> backends) {
  std::string name(given);
  for (char& letter : name)
    if (letter >= 'a' && letter <= 'z') letter = static_cast<char>(letter - 'a' + 'A');
  const auto is_registered = [&](std::string_view wanted) {
    return std::ranges::find(backends, wanted, &AttentionBackend::name) != backends.end();
  };
  if (is_registered(name)) return fmt::format("; {} is one of them", name);
  constexpr std::string_view kVersion = "_VLLM_V1";
  if (name.ends_with(kVersion)) name.resize(name.size() - kVersion.size());
  for (const auto& [ours, same, names] : kVllmNames) {
    if (std::ranges::find(names, name) != names.end() && is_registered(ours))
      return fmt::format("; {} computes what {} does", ours, given);
  }
  for (const auto& [part, what] : kNotComputed) {
    if (name.find(part) != std::string::npos) return fmt::format("; none computes {}", what);
  }
  return {};
}

std::shared_ptr<const AttentionBackend> forced_backend(std::string_view name,
                                                       const AttentionConfig& config,
                                                       const DeviceCapabilities* capabilities) {
  auto backend = find_attn_backend(name);
  const auto reasons = backend->validate_configuration(config, capabilities);
  if (reasons.empty()) return backend;
  detail::throw_unsupported("Selected backend {} is not valid for this configuration. Reason: {}",
                            backend->name(), fmt::join(reasons, "; "));
}

/// The name that is forced, by the caller or the environment; empty = none.
std::string_view forced_name(std::string_view name) {
  if (name.empty()) name = detail::environment().backend;
  return name == "auto" ? std::string_view() : name;
}

[[noreturn]] void throw_none_valid(const AttentionConfig& config,
                                   const DeviceCapabilities* capabilities,
                                   const std::vector<BackendChoice::Rejection>& rejected) {
  // The backend that comes nearest to it: of those for such caches the one with fewest reasons.
  const auto nearest = std::ranges::min_element(rejected, {}, [&](const auto& rejection) {
    return std::pair(find_attn_backend(rejection.name)->is_mla() != config.use_mla,
                     rejection.reasons.size());
  });
  const auto told = [](const BackendChoice::Rejection& rejection) {
    return fmt::format("{}: {}", rejection.name, fmt::join(rejection.reasons, "; "));
  };
  std::string reasons = nearest == rejected.end() ? "no backend is registered" : told(*nearest);
  const char* separator = " | other backends: ";
  for (auto other = rejected.begin(); other != rejected.end(); ++other) {
    if (other == nearest) continue;
    reasons += separator + told(*other);
    separator = " | ";
  }
  detail::throw_unsupported(
      "No valid attention backend found for {} with AttentionConfig({}). Reasons: {}",
      capabilities != nullptr ? capabilities->name : "any device", to_string(config), reasons);
}

/// Why a backend that takes the configuration does not serve after all; none = it does. Without a
/// function all of them serve.
using Trial = std::function<std::vector<std::string>(const AttentionBackend&)>;

/// The first backend that takes the configuration and passes the trial, which those after it are
/// not put to.
BackendChoice choose(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                     const Trial& trial) {
  BackendChoice choice;
  for (const auto& backend : list_attn_backends()) {
    auto reasons = backend->validate_configuration(config, capabilities);
    if (reasons.empty() && choice.backend == nullptr && trial) reasons = trial(*backend);
    if (!reasons.empty()) {
      choice.rejected.push_back({std::string(backend->name()), std::move(reasons)});
    } else if (choice.backend == nullptr) {
      choice.backend = backend;
    }
  }
  return choice;
}

/// The forced backend, which no other takes the place of, or the chosen one.
std::shared_ptr<const AttentionBackend> select(const AttentionConfig& config,
                                               const DeviceCapabilities* capabilities,
                                               std::string_view name, const Trial& trial) {
  if (config.is_attention_free) return detail::attention_free_backend();
  const std::string_view forced = forced_name(name);
  if (!forced.empty()) return forced_backend(forced, config, capabilities);
  const BackendChoice choice = choose(config, capabilities, trial);
  if (choice.backend == nullptr) throw_none_valid(config, capabilities, choice.rejected);
  return choice.backend;
}

}  // namespace

std::shared_ptr<const AttentionBackend> find_attn_backend(std::string_view name) {
  if (name == "auto") return nullptr;
  const auto backends = list_attn_backends();
  const auto registered = [&](std::string_view wanted) {
    const auto found = std::ranges::find_if(
        backends, [&](const auto& backend) { return backend->name() == wanted; });
    return found == backends.end() ? nullptr : *found;
  };
  if (auto backend = registered(name)) return backend;
  for (const auto& [ours, same, names] : kVllmNames) {
    if (!same || std::ranges::find(names, name) == names.end()) continue;
    if (auto backend = registered(ours)) return backend;
  }
  detail::throw_invalid("Invalid attention backend: '{}'. Valid backends are: auto, {}{}", name,
                        detail::backend_names(backends), hint_for(name, backends));
}

BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities) {
  if (config.is_attention_free) return {detail::attention_free_backend(), {}};
  return choose(config, capabilities, {});
}

std::shared_ptr<const AttentionBackend> get_attn_backend(const AttentionConfig& config,
                                                         const DeviceCapabilities* capabilities,
                                                         std::string_view name) {
  return select(config, capabilities, name, {});
}

std::shared_ptr<const AttentionBackend> get_attn_backend(std::int32_t head_size, DType dtype,
                                                         std::optional<CacheFormat> kv_cache_dtype,
                                                         std::int32_t block_size,
                                                         bool is_attention_free, bool use_mla,
                                                         bool has_sink) {
  AttentionConfig config;
  config.num_heads = config.num_kv_heads = 1;
  config.head_size = head_size;
  config.dtype = dtype;
  config.kv_cache_dtype = kv_cache_dtype;
  config.block_size = block_size;
  config.is_attention_free = is_attention_free;
  config.use_mla = use_mla;
  if (has_sink) config.sinks = {0.0F};
  if (is_attention_free) return get_attn_backend(config, nullptr);

  return detail::remembered_answer(
      {head_size, dtype, to_text(kv_cache_dtype), block_size, use_mla, has_sink},
      [&] { return get_attn_backend(config, nullptr); });
}

namespace detail {

FittingBackend get_fitting_backend(const std::shared_ptr<Context>& context,
                                   const AttentionConfig& config) {
  std::shared_ptr<const AttentionImpl> impl;
  const Trial builds = [&](const AttentionBackend& backend) -> std::vector<std::string> {
    try {
      impl = backend.make_impl(context, config);
    } catch (const Error& error) {
      // Its kernels do not fit the device, or its compiler refuses them.
      if (error.code() != ErrorCode::kUnsupported && !is_build_refusal(error)) throw;
      if (error.code() == ErrorCode::kOpenCL)
        context->runtime().note_build_failure(backend.name(), error.what());
      return {error.what()};
    }
    return {};
  };
  auto backend = select(config, &context->capabilities(), {}, builds);
  if (impl == nullptr) impl = backend->make_impl(context, config);
  return {std::move(backend), std::move(impl)};
}

}  // namespace detail

}  // namespace clattn
