#include "kernels/choose/latent_config.hpp"

#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "kernels/choose/config_reasons.hpp"

namespace clattn::detail {
namespace {

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
  };
  for (const auto& [wanted, what] : options)
    append_if(reasons, wanted, "MLA is not supported for {}", what);
}

}  // namespace

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

}  // namespace clattn::detail
