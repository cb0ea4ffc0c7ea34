#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/mla.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "backends/registry.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"
#include "opencl/runtime.hpp"

namespace clattn {

namespace {

/// One of vLLM's backend names, and our name for the same backend or for one that computes the
/// same.
struct VllmName {
  std::string_view name, ours;
  bool same;  ///< false: another library's kernels, for which ours must not be used silently
};
constexpr std::string_view kPaged = "FLASHINFER", kDense = "XFORMERS", kLatent = kMLABackendName;
constexpr VllmName kVllmNames[] = {
    {"FLASHINFER_VLLM_V1", kPaged, true},
    {"vllm.attention.backends.flashinfer.FlashInferBackend", kPaged, true},
    {"vllm.v1.attention.backends.flashinfer.FlashInferBackend", kPaged, true},
    {"XFORMERS_VLLM_V1", kDense, true},
    {"vllm.v1.attention.backends.xformers.XFormersAttentionBackend", kDense, true},
    {"FLASH_ATTN", kPaged, false},
    {"FLASH_ATTN_VLLM_V1", kPaged, false},
    {"TRITON_ATTN", kPaged, false},
    {"TRITON_ATTN_VLLM_V1", kPaged, false},
    {"FLEX_ATTENTION", kPaged, false},
    {"TREE_ATTN", kPaged, false},
    {"TORCH_SDPA", kPaged, false},
    {"TORCH_SDPA_VLLM_V1", kPaged, false},
    {"CPU_ATTN", kPaged, false},
    {"ROCM_FLASH", kPaged, false},
    {"ROCM_ATTN", kPaged, false},
    {"FLASHINFER_MLA", kLatent, false},
    {"FLASH_ATTN_MLA", kLatent, false},
    {"FLASHMLA", kLatent, false},
    {"FLASHMLA_VLLM_V1", kLatent, false},
    {"TRITON_MLA", kLatent, false},
    {"TRITON_MLA_VLLM_V1", kLatent, false},
    {"CUTLASS_MLA", kLatent, false},
    {"CUTLASS_MLA_VLLM_V1", kLatent, false},
    {"CPU_MLA", kLatent, false},
};

std::shared_ptr<const AttentionBackend> forced_backend(std::string_view name,
                                                       const AttentionConfig& config,
                                                       const DeviceCapabilities* capabilities) {
  auto backend = find_attn_backend(name);
  const auto reasons = backend->validate_configuration(config, capabilities);
  if (reasons.empty()) return backend;
  detail::throw_unsupported("Selected backend {} is not valid for this configuration. Reason: {}",
                            backend->name(), fmt::join(reasons, "; "));
}

/// The configuration for a message: what every layer has, then what this one adds.
std::string describe(const AttentionConfig& config) {
  std::string text = fmt::format(
      "num_heads={}, num_kv_heads={}, head_size={}, block_size={}, dtype={}, kv_cache_dtype={}, "
      "attn_type={}",
      config.num_heads, config.num_kv_heads, config.head_size, config.block_size,
      to_string(config.dtype), config.kv_cache_dtype ? to_string(*config.kv_cache_dtype) : "auto",
      to_string(config.attn_type));
  const std::pair<bool, std::string_view> options[] = {
      {config.logits_soft_cap != 0, "logits_soft_cap"},
      {config.sliding_window != 0, "sliding_window"},
      {config.attention_chunk_size != 0, "attention_chunk_size"},
      {!config.alibi_slopes.empty(), "alibi_slopes"},
      {!config.sinks.empty(), "sinks"},
      {config.custom_mask, "custom_mask"},
      {config.output_fp8, "output_fp8"},
      {config.use_mla, "use_mla"},
      {config.use_non_causal, "use_non_causal"},
      {config.use_batch_invariant, "use_batch_invariant"},
      {config.use_per_head_quant_scales, "use_per_head_quant_scales"},
      {config.use_mm_prefix, "use_mm_prefix"},
      {config.use_kv_connector, "use_kv_connector"},
      {config.use_pcp, "use_pcp"}};
  for (const auto& [set, name] : options) {
    if (set) text += fmt::format(", {}", name);
  }
  return text;
}

/// The name that is forced, by the caller or the environment; empty = none.
std::string_view forced_name(std::string_view name) {
  if (name.empty()) name = detail::environment().backend;
  return name == "auto" ? std::string_view() : name;
}

[[noreturn]] void throw_none_valid(const AttentionConfig& config,
                                   const DeviceCapabilities* capabilities,
                                   const std::vector<BackendChoice::Rejection>& rejected) {
  std::string reasons;
  for (const BackendChoice::Rejection& rejection : rejected) {
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : " | ", rejection.name,
                           fmt::join(rejection.reasons, "; "));
  }
  detail::throw_unsupported(
      "No valid attention backend found for {} with AttentionConfig({}). Reasons: {}",
      capabilities != nullptr ? capabilities->name : "any device", describe(config), reasons);
}

/// Why a backend that takes the configuration does not serve after all; none = it does. Without a
/// function all of them serve.
using Trial = std::function<std::vector<std::string>(const AttentionBackend&)>;

/// The first backend that takes the configuration and passes the trial, which those behind it are
/// not put to.
BackendChoice choose(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                     const Trial& trial) {
  BackendChoice choice;
  for (const AttentionBackend* backend : list_attn_backends()) {
    auto reasons = backend->validate_configuration(config, capabilities);
    if (reasons.empty() && choice.backend == nullptr && trial) reasons = trial(*backend);
    if (!reasons.empty()) {
      choice.rejected.push_back({std::string(backend->name()), std::move(reasons)});
    } else if (choice.backend == nullptr) {
      choice.backend = backend->shared_from_this();
    }
  }
  return choice;
}

/// The forced backend, which no other takes the place of, or the chosen one.
std::shared_ptr<const AttentionBackend> select(const AttentionConfig& config,
                                               const DeviceCapabilities* capabilities,
                                               std::string_view name, const Trial& trial) {
  if (config.is_attention_free) return detail::attention_free_backend().shared_from_this();
  const std::string_view forced = forced_name(name);
  if (!forced.empty()) return forced_backend(forced, config, capabilities);
  const BackendChoice choice = choose(config, capabilities, trial);
  if (choice.backend == nullptr) throw_none_valid(config, capabilities, choice.rejected);
  return choice.backend;
}

}  // namespace

std::shared_ptr<const AttentionBackend> find_attn_backend(std::string_view name) {
  const BackendList backends = list_attn_backends();
  const auto registered = [&](std::string_view wanted) {
    const auto found = std::ranges::find(backends, wanted, &AttentionBackend::name);
    return found == backends.end() ? nullptr : (*found)->shared_from_this();
  };
  if (auto backend = registered(name)) return backend;
  std::string hint;
  const auto* const known = std::ranges::find(kVllmNames, name, &VllmName::name);
  if (known != std::end(kVllmNames)) {
    auto backend = registered(known->ours);
    if (backend != nullptr && known->same) return backend;
    if (backend != nullptr) hint = fmt::format("; {} computes what {} does", known->ours, name);
  }
  detail::throw_invalid("Invalid attention backend: '{}'. Valid backends are: auto, {}{}", name,
                        detail::backend_names(backends), hint);
}

BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities) {
  if (config.is_attention_free) return {detail::attention_free_backend().shared_from_this(), {}};
  return choose(config, capabilities, {});
}

const AttentionBackend& get_attn_backend(const AttentionConfig& config,
                                         const DeviceCapabilities* capabilities,
                                         std::string_view name) {
  return *select(config, capabilities, name, {});
}

const AttentionBackend& get_attn_backend(std::int32_t head_size, DType dtype,
                                         std::optional<DType> kv_cache_dtype,
                                         std::int32_t block_size, bool is_attention_free,
                                         bool use_mla, bool has_sink) {
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

  detail::Registry& registry = detail::Registry::instance();
  const detail::Registry::Query query{head_size,  dtype,   kv_cache_dtype,
                                      block_size, use_mla, has_sink};
  std::uint64_t generation = 0;
  if (const auto known = registry.recall(query, generation)) return *known;
  const AttentionBackend& chosen = get_attn_backend(config, nullptr);
  registry.remember(query, chosen.shared_from_this(), generation);
  return chosen;
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
