#include "kernels/choose/config_reasons.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {

namespace {

/// One float a query head, none of them NaN or +inf; -inf only where it means "no sink".
void check_per_head(std::string_view name, const std::vector<float>& values, std::int32_t num_heads,
                    bool minus_infinity, std::vector<std::string>& reasons) {
  if (values.empty()) return;
  append_if(reasons, std::cmp_not_equal(values.size(), num_heads),
            "{} holds {} values, supported: num_heads ({}) or none", name, values.size(),
            num_heads);
  for (const float value : values) {
    if (std::isfinite(value) || (minus_infinity && value < 0)) continue;
    reasons.push_back(fmt::format("{} has the value {}, supported: finite numbers{}", name, value,
                                  minus_infinity ? " and -inf" : ""));
    return;
  }
}

void check_logit_options(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const bool legal_cap = config.logits_soft_cap >= 0 && !std::isinf(config.logits_soft_cap);
  append_if(reasons, !legal_cap, "logits_soft_cap is {}, supported: finite numbers >= 0 (0 = none)",
            config.logits_soft_cap);
  append_if(reasons, config.sliding_window < 0, "sliding_window is {}, supported: >= 0 (0 = none)",
            config.sliding_window);
  append_if(reasons, config.attention_chunk_size < 0,
            "attention_chunk_size is {}, supported: >= 0 (0 = none)", config.attention_chunk_size);
  if (config.attention_chunk_size > 0 && !may_be_causal(config.attn_type)) {
    reasons.push_back(
        fmt::format("attention_chunk_size with attn_type {} not supported: chunks "
                    "are for decoders and encoder_only",
                    to_string(config.attn_type)));
  }
  check_per_head("alibi_slopes", config.alibi_slopes, config.num_heads, false, reasons);
  check_per_head("sinks", config.sinks, config.num_heads, true, reasons);
}

/// What other layers may ask for and latent attention does not compute.
void append_option_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const std::pair<bool, std::string_view> options[] = {
      {config.attn_type != AttentionType::kDecoder, "encoders"},
      {config.sliding_window != 0, "sliding window"},
      {config.attention_chunk_size != 0, "chunked-local attention"},
      {config.logits_soft_cap != 0, "logits_soft_cap"},
      {!config.alibi_slopes.empty(), "alibi_slopes"},
      {!config.sinks.empty(), "sinks"},
      {config.custom_mask, "custom_mask"},
      {config.output_fp8, "output_fp8"},
      {config.head_size_v != 0, "head_size_v"},
  };
  for (const auto& [wanted, what] : options)
    append_if(reasons, wanted, "MLA is not supported for {}", what);
}

/// Why a head_size_v other than head_size is refused: its size, or a paged cache.
void append_value_size_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const std::int32_t size = config.head_size_v;
  if (size == 0 || size == config.head_size) return;
  append_if(reasons, size < 8 || size > config.head_size || size % 8 != 0,
            "head_size_v {} not supported: 8 … {} (head_size) in steps of 8 are, or 0", size,
            config.head_size);
  append_if(
      reasons, !config.contiguous_kv(),
      "head_size_v {} with a paged cache not supported: 0 or {} (head_size) are, as pages hold "
      "K and V of one size",
      size, config.head_size);
}

}  // namespace

void append_engine_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  append_if(reasons, config.use_mm_prefix && !config.custom_mask,
            "mm_prefix without custom_mask not supported: the spans reach the kernels as a mask "
            "(make_mm_prefix_mask)");
  append_if(reasons, config.use_kv_connector,
            "KV connector not supported: layers call no hooks; an engine may move blocks between "
            "steps (swap_blocks)");
  append_if(reasons, config.use_pcp,
            "prefill context parallelism not supported: no kernel shares a prompt with other "
            "devices");
}

void append_type_reasons(DType dtype, std::optional<float> scale,
                         std::vector<std::string>& reasons) {
  append_if(reasons, is_quantized(dtype), "dtype {} not supported: f32, f16 and bf16 are",
            to_string(dtype));
  append_if(reasons, !std::isfinite(scale.value_or(0)), "scale is {}, supported: finite numbers",
            scale.value_or(0));
}

void append_config_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  append_if(reasons, config.num_heads < 1 || config.num_heads > kMaxHeads,
            "num_heads is {}, supported: 1 … {}", config.num_heads, kMaxHeads);
  append_if(reasons, config.num_kv_heads < 1, "num_kv_heads is {}, supported: >= 1",
            config.num_kv_heads);
  append_if(reasons, config.num_kv_heads >= 1 && config.num_heads % config.num_kv_heads != 0,
            "num_heads ({}) is not divisible by num_kv_heads ({})", config.num_heads,
            config.num_kv_heads);
  append_if(reasons, config.block_size < 1 && !config.contiguous_kv(),
            "block_size is {}, supported: >= 1", config.block_size);
  append_type_reasons(config.dtype, config.scale, reasons);
  check_logit_options(config, reasons);
  append_engine_reasons(config, reasons);
}

void append_head_size_reason(std::int32_t head_size, std::vector<std::string>& reasons) {
  append_if(reasons, !takes_head_size(head_size),
            "head_size {} not supported: 8 … 256 in steps of 8 are", head_size);
}

void append_common_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons) {
  append_config_reasons(config, reasons);
  if (config.contiguous_kv() && config.cache_dtype() != config.dtype) {
    reasons.push_back(fmt::format(
        "kv_cache_dtype {} with attn_type {} not supported: there is no "
        "cache, keys and values have the dtype ({})",
        to_string(config.cache_dtype()), to_string(config.attn_type), to_string(config.dtype)));
  }
  append_if(reasons, config.use_mla, "MLA not supported");
  append_value_size_reasons(config, reasons);
  if (capabilities == nullptr) return;
  // Else another family would serve quietly. For that of CPUs there is none.
  if (config.kernel_family != KernelFamily::kCpu) {
    if (const auto need = unmet_need(config.kernel_family, *capabilities))
      reasons.push_back(fmt::format("kernel family {} cannot run on {}: {}",
                                    to_string(config.kernel_family), capabilities->name, *need));
  }
  append_missing_kernels({Role::kPrefill, Role::kMerge, Role::kCacheWrite}, config.kernel_family,
                         *capabilities, reasons);
}

MLAConfig mla_config(const AttentionConfig& config) {
  return {.num_heads = config.num_heads,
          .kv_lora_rank = config.output_head_size(),
          .rope_dim = config.rope_dim,
          .block_size = config.block_size,
          .dtype = config.dtype,
          .kv_cache_dtype = config.kv_cache_dtype,
          .scale = config.scale,
          .kernel_family = config.kernel_family};
}

void append_latent_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons) {
  append_if(reasons, config.num_kv_heads != 1, "num_kv_heads is {}, supported: 1",
            config.num_kv_heads);
  MLAConfig mla = mla_config(config);
  const std::int32_t rank = mla.kv_lora_rank;
  if (rank < kKVLoraRankStep || rank > kMaxKVLoraRank || rank % kKVLoraRankStep != 0) {
    reasons.push_back(fmt::format(
        "head_size {} not supported: rope_dim ({}) more than {} … {} in steps of {} are",
        config.head_size, config.rope_dim, kKVLoraRankStep, kMaxKVLoraRank, kKVLoraRankStep));
    mla.kv_lora_rank = kMaxKVLoraRank;  // its reason is told
  }
  const auto others = validate_mla_configuration(mla, capabilities);
  reasons.insert(reasons.end(), others.begin(), others.end());
  append_option_reasons(config, reasons);
  append_engine_reasons(config, reasons);
}

void append_missing_kernels(std::initializer_list<Role> roles, KernelFamily family,
                            const DeviceCapabilities& capabilities,
                            std::vector<std::string>& reasons) {
  for (const Role role : roles) {
    const std::string why = why_none_runs(role, family, capabilities);
    append_if(reasons, !why.empty(), "no {} kernel of family {} runs on {}: {}", to_string(role),
              to_string(family), capabilities.name, why);
  }
}

void require_valid(std::string_view backend, const std::vector<std::string>& reasons) {
  if (reasons.empty()) return;
  throw_unsupported("backend {} does not support this configuration: {}", backend,
                    fmt::join(reasons, "; "));
}

}  // namespace clattn::detail
