#include <fmt/ranges.h>

#include <clattn/attention.hpp>
#include <string>
#include <utility>

#include "backends/registry.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

const AttentionBackend& forced_backend(std::string_view name, const AttentionConfig& config,
                                       const DeviceCapabilities* capabilities) {
  const BackendList backends = list_attn_backends();
  for (const AttentionBackend* backend : backends) {
    if (backend->name() != name) continue;
    const auto reasons = backend->validate_configuration(config, capabilities);
    if (!reasons.empty()) {
      detail::throw_unsupported(
          "Selected backend {} is not valid for this configuration. Reason: {}", name,
          fmt::join(reasons, "; "));
    }
    return *backend;
  }
  detail::throw_invalid("Invalid attention backend: '{}'. Valid backends are: auto, {}", name,
                        detail::backend_names(backends));
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

}  // namespace

BackendChoice choose_attn_backend(const AttentionConfig& config,
                                  const DeviceCapabilities* capabilities) {
  BackendChoice choice;
  if (config.is_attention_free) {
    choice.backend = detail::attention_free_backend().shared_from_this();
    return choice;
  }
  for (const AttentionBackend* backend : list_attn_backends()) {
    auto reasons = backend->validate_configuration(config, capabilities);
    if (!reasons.empty()) {
      choice.rejected.push_back({std::string(backend->name()), std::move(reasons)});
    } else if (choice.backend == nullptr) {
      choice.backend = backend->shared_from_this();
    }
  }
  return choice;
}

const AttentionBackend& get_attn_backend(const AttentionConfig& config,
                                         const DeviceCapabilities* capabilities,
                                         std::string_view name) {
  if (config.is_attention_free) return detail::attention_free_backend();
  const std::string_view forced = forced_name(name);
  if (!forced.empty()) return forced_backend(forced, config, capabilities);
  const BackendChoice choice = choose_attn_backend(config, capabilities);
  if (choice.backend == nullptr) throw_none_valid(config, capabilities, choice.rejected);
  return *choice.backend;
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
  const DeviceCapabilities* const capabilities = &context->capabilities();
  if (config.is_attention_free || !forced_name({}).empty()) {
    const AttentionBackend& only = get_attn_backend(config, capabilities);
    return {only.shared_from_this(), only.make_impl(context, config)};
  }
  std::vector<BackendChoice::Rejection> rejected;
  for (const AttentionBackend* backend : list_attn_backends()) {
    auto reasons = backend->validate_configuration(config, capabilities);
    if (reasons.empty()) {
      try {
        return {backend->shared_from_this(), backend->make_impl(context, config)};
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnsupported) throw;
        reasons = {error.what()};
      }
    }
    rejected.push_back({std::string(backend->name()), std::move(reasons)});
  }
  throw_none_valid(config, capabilities, rejected);
}

}  // namespace detail

}  // namespace clattn
