#include "kernels/choose/config_reasons.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
#include <iterator>
#include <string_view>

#include "base/error.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {

namespace {

/// Why a head_size_v other than head_size is refused.
void append_value_size_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const std::int32_t size = config.head_size_v;
  if (size <= 0 || size == config.head_size) return;
  append_if(reasons, size > config.head_size || size % 8 != 0,
            "head_size_v {} not supported: 8 … {} (head_size) in steps of 8 are, or 0", size,
            config.head_size);
}

/// Why a scale for each token and head is refused.
void append_row_scale_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  const CacheFormat format = config.cache_format();
  if (!format.scales_per_row() || !why_not(format).empty()) return;
  append_if(reasons, config.output_head_size() != config.head_size,
            "kv_cache_dtype {} with head_size_v {} not supported: {} (head_size) is",
            to_string(format), config.head_size_v, config.head_size);
  append_if(reasons, config.use_per_head_quant_scales,
            "use_per_head_quant_scales is true, supported with kv_cache_dtype {}: false",
            to_string(format));
}

/// Why chunks are refused where they would have no meaning.
void append_chunk_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  append_if(reasons, config.attention_chunk_size > 0 && !may_be_causal(config.attn_type),
            "attention_chunk_size with attn_type {} not supported: chunks are for decoders and "
            "encoder_only",
            to_string(config.attn_type));
  append_if(reasons, config.chunk_lookback > 0 && config.attention_chunk_size == 0,
            "chunk_lookback is {}, supported without attention_chunk_size: 0",
            config.chunk_lookback);
}

/// Reasons against what the engine means to do with the layer (AttentionConfig::use_…), whatever
/// the kernels.
void append_engine_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  append_if(reasons, config.span_rule != SpanRule::kWhole && !config.use_spans,
            "span_rule is {}, supported without use_spans: whole", to_string(config.span_rule));
  for (const auto& [name, use] : kListFields)
    append_if(reasons, config.*use && !may_be_causal(config.attn_type),
              "{} is true, supported with attn_type {}: false", name, to_string(config.attn_type));
  append_if(reasons, config.use_kv_connector,
            "KV connector not supported: layers call no hooks; an engine may move blocks between "
            "steps (swap_blocks)");
  append_if(reasons, config.use_pcp,
            "prefill context parallelism not supported: no kernel shares a prompt with other "
            "devices");
}

}  // namespace

void append_type_reasons(DType dtype, std::vector<std::string>& reasons) {
  append_if(reasons, is_quantized(dtype), "dtype {} not supported: f32, f16 and bf16 are",
            to_string(dtype));
}

void append_config_reasons(const AttentionConfig& config, std::vector<std::string>& reasons) {
  std::ranges::move(illegal_fields(config), std::back_inserter(reasons));
  append_if(reasons, config.num_kv_heads >= 1 && config.num_heads % config.num_kv_heads != 0,
            "num_heads ({}) is not divisible by num_kv_heads ({})", config.num_heads,
            config.num_kv_heads);
  append_if(reasons, config.block_size == 0 && !config.contiguous_kv(),
            "block_size is 0, supported: >= 1");
  append_type_reasons(config.dtype, reasons);
  append_window_reasons(config, reasons);
  append_chunk_reasons(config, reasons);
  append_engine_reasons(config, reasons);
}

void refuse_row_scales(const AttentionConfig& config, std::string_view by,
                       std::vector<std::string>& reasons) {
  if (!why_not(config.cache_format()).empty()) return;
  append_if(reasons, config.cache_format().scales_per_row(),
            "kv_cache_dtype {} not supported by {}: types are", to_string(config.cache_format()),
            by);
}

void append_head_size_reason(std::int32_t head_size, std::vector<std::string>& reasons,
                             std::int32_t most) {
  append_if(reasons, !takes_head_size(head_size, most),
            "head_size {} not supported: 8 … {} in steps of 8 are", head_size, most);
}

void append_common_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons) {
  append_config_reasons(config, reasons);
  append_row_scale_reasons(config, reasons);
  if (why_not(config.cache_format()).empty()) {  // else it has no name
    append_if(reasons, config.contiguous_kv() && config.cache_format() != CacheFormat(config.dtype),
              "kv_cache_dtype {} with attn_type {} not supported: there is no cache, keys and "
              "values have the dtype ({})",
              to_string(config.cache_format()), to_string(config.attn_type),
              to_string(config.dtype));
  }
  append_if(reasons, config.use_mla, "MLA not supported");
  append_value_size_reasons(config, reasons);
  if (capabilities == nullptr) return;
  // Else another family would serve quietly. For that of CPUs there is none.
  const auto need = unmet_need(config.kernel_family, *capabilities);
  append_if(reasons, config.kernel_family != KernelFamily::kCpu && need.has_value(),
            "kernel family {} cannot run on {}: {}", to_string(config.kernel_family),
            capabilities->name, need.value_or(""));
  append_missing_kernels({Role::kPrefill, Role::kMerge, Role::kCacheWrite}, config.kernel_family,
                         *capabilities, reasons);
}

MLAConfig mla_config(const AttentionConfig& config) {
  return {
      .num_heads = config.num_heads,
      .kv_lora_rank = config.output_head_size(),
      .rope_dim = config.rope_dim,
      .block_size = config.block_size,
      .dtype = config.dtype,
      .kv_cache_dtype = config.kv_cache_dtype ? std::optional(config.cache_dtype()) : std::nullopt,
      .scale = config.scale,
      .kernel_family = config.kernel_family,
      .use_spans = config.use_spans,
      .use_directions = config.use_directions,
      .use_first_keys = config.use_first_keys,
      .use_trees = config.use_trees};
}

void append_latent_reasons(const AttentionConfig& config, const DeviceCapabilities* capabilities,
                           std::vector<std::string>& reasons) {
  append_if(reasons, config.num_kv_heads != 1, "num_kv_heads is {}, supported: 1",
            config.num_kv_heads);
  refuse_row_scales(config, "MLA", reasons);
  MLAConfig mla = mla_config(config);
  const std::int32_t rank = mla.kv_lora_rank;
  if (rank < kKVLoraRankStep || rank > kMaxKVLoraRank || rank % kKVLoraRankStep != 0) {
    reasons.push_back(fmt::format(
        "head_size {} not supported: rope_dim ({}) more than {} … {} in steps of {} are",
        config.head_size, config.rope_dim, kKVLoraRankStep, kMaxKVLoraRank, kKVLoraRankStep));
    mla.kv_lora_rank = kMaxKVLoraRank;  // its reason is told
  }
  std::ranges::move(validate_mla_configuration(mla, capabilities), std::back_inserter(reasons));
  for (const std::string& option : fields_not_taken(config, field::kLatent))
    reasons.push_back(fmt::format("MLA is not supported for {}", option));
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
