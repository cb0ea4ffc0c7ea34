#include "cli/fuzz/recipe.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace clattn::cli {
namespace {

/// An option: whether it differs from its default, its name, and the words for it if these say
/// more.
struct Option {
  bool set;
  std::string_view name;
  std::string words = std::string(name);
};

std::vector<Option> layer_options(const Recipe& recipe) {
  const AttentionConfig& config = recipe.config;
  return {
      {recipe.order == CacheOrder::kPacked, "x-packed"},
      {recipe.order == CacheOrder::kLatent, "latent rows"},
      {config.attn_type != AttentionType::kDecoder, to_string(config.attn_type)},
      {config.scale.has_value(), "scale", fmt::format("scale {}", config.scale.value_or(0))},
      {config.logits_soft_cap > 0, "soft cap", fmt::format("soft cap {}", config.logits_soft_cap)},
      {config.sliding_window > 0, "window", fmt::format("window {}", config.sliding_window)},
      {config.attention_chunk_size > 0, "chunks",
       fmt::format("chunks of {}", config.attention_chunk_size)},
      {!config.alibi_slopes.empty(), "ALiBi"},
      {!config.sinks.empty(), "sinks"},
      {config.custom_mask, "mask"},
      {config.output_fp8, "fp8 output"},
      {config.fp8_products, "fp8 products"},
      {config.kernel_family != KernelFamily::kAuto, "family",
       fmt::format("family {}", to_string(config.kernel_family))}};
}

std::vector<Option> batch_options(const Recipe& recipe) {
  const BatchFamily& batch = recipe.batch;
  const PlanOptions& plan = recipe.plan;
  return {{!batch.causal, "not causal"},
          {batch.num_splits > 0, "splits", fmt::format("{} splits", batch.num_splits)},
          {plan.split_policy == SplitPolicy::kDeterministic, "deterministic"},
          {plan.fast_build, "fast build"},
          {!plan.side_by_side, "launches in turn"},
          {plan.decode_threshold > 1, "decode threshold",
           fmt::format("decode threshold {}", plan.decode_threshold)},
          {plan.limits.has_value(), "wide limits"},
          {batch.common_prefix_len > 0, "common prefix",
           fmt::format("common prefix {}", batch.common_prefix_len)},
          {batch.scales_per_head, "scales per head"},
          {batch.size != 1, "size", fmt::format("values of size {}", batch.size)},
          {!recipe.backend.empty(), "backend", recipe.backend},
          {recipe.layout.has_value(), to_string(recipe.layout.value_or(KVCacheLayout::kNHD))},
          {!recipe.stores, "filled cache"}};
}

std::string words_of(const std::vector<Option>& options) {
  std::string text;
  for (const Option& option : options) {
    if (option.set) text += ", " + option.words;
  }
  return text;
}

}  // namespace

void normalise(Recipe& recipe) {
  AttentionConfig& config = recipe.config;
  BatchFamily& batch = recipe.batch;
  config.num_heads = config.num_heads / config.num_kv_heads * config.num_kv_heads;
  if (config.cache_dtype() != DType::kFp8E4M3) config.fp8_products = false;
  for (const auto& [values, add] :
       {std::pair{&config.alibi_slopes, &add_alibi}, std::pair{&config.sinks, &add_sinks}}) {
    if (values->empty()) continue;
    values->clear();
    add(config);
  }
  if (config.attn_type != AttentionType::kDecoder || recipe.order == CacheOrder::kPacked)
    batch.common_prefix_len = 0;
  if (config.block_size > 0) batch.common_prefix_len -= batch.common_prefix_len % config.block_size;
  const bool in_cache = config.attn_type == AttentionType::kDecoder;
  for (RequestShape& request : batch.requests) {
    if (recipe.order == CacheOrder::kPacked) request.query_len = 1;
    if (!in_cache) continue;
    request.seq_len = std::max(request.seq_len, request.query_len + batch.common_prefix_len);
  }
}

AttentionCall make_call(const Recipe& recipe) {
  AttentionCall call = recipe.order == CacheOrder::kLatent
                           ? make_latent_call(recipe.batch, recipe.config, recipe.seed)
                           : make_call(recipe.batch, recipe.config, recipe.seed);
  call.plan = recipe.plan;
  if (!recipe.backend.empty()) call.backend = recipe.backend;
  if (recipe.layout) call.layout = recipe.layout;
  call.packed = recipe.order == CacheOrder::kPacked;
  if (recipe.stores || call.config.contiguous_kv()) return call;
  call.cache = expected_cache(call);
  call.key.clear();
  call.value.clear();
  return call;
}

std::string describe_layer(const Recipe& recipe) {
  const AttentionConfig& config = recipe.config;
  const std::string head = recipe.order == CacheOrder::kLatent
                               ? fmt::format("{}+{}", config.output_head_size(), config.rope_dim)
                               : std::to_string(config.head_size);
  return fmt::format("{}/{}, {} heads on {} of {}, pages of {}{}", to_string(config.dtype),
                     to_string(config.cache_dtype()), config.num_heads, config.num_kv_heads, head,
                     config.block_size, words_of(layer_options(recipe)));
}

std::string describe_batch(const Recipe& recipe) {
  std::vector<std::string> requests;
  requests.reserve(recipe.batch.requests.size());
  for (const RequestShape& request : recipe.batch.requests)
    requests.push_back(fmt::format("{} of {}", request.query_len, request.seq_len));
  return fmt::format("queries {}{}", fmt::join(requests, ", "), words_of(batch_options(recipe)));
}

std::vector<std::string_view> names_of_options(const Recipe& recipe) {
  std::vector<std::string_view> names;
  for (const auto& options : {layer_options(recipe), batch_options(recipe)}) {
    for (const Option& option : options) {
      if (option.set) names.push_back(option.name);
    }
  }
  return names;
}

}  // namespace clattn::cli
