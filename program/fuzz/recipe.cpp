#include "program/fuzz/recipe.hpp"
#include "program/common/verify.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/config_fields.hpp>
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

/// What stands before the options in the words for a layer.
bool is_shape(std::string_view name) {
  return name.ends_with("heads") || name == "head_size" || name == "block_size" ||
         name.ends_with("dtype") || name == "use_mla" || name == "rope_dim";
}

std::vector<Option> layer_options(const Recipe& recipe) {
  std::vector<Option> options = {{recipe.order == CacheOrder::kPacked, "x-packed"},
                                 {recipe.order == CacheOrder::kLatent, "latent rows"}};
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if (is_shape(row.name)) return;
    std::string words(row.name);
    if (!std::is_same_v<Value, bool> && !std::is_same_v<Value, std::vector<float>>)
      words += ' ' + to_text(recipe.config.*row.member);
    options.push_back({row.is_set(recipe.config), row.name, std::move(words)});
  });
  return options;
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
          {batch.padding > 0, "padding", fmt::format("{} rows of padding", batch.padding)},
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

/// "5 of 21", and what else a request says.
std::string words_of(const RequestShape& request) {
  std::string text = fmt::format("{} of {}", request.query_len, request.seq_len);
  if (request.direction == Direction::kBothWays) text += " both ways";
  if (request.direction == Direction::kCanvas) text += " as a canvas";
  if (request.first_key > 0) text += fmt::format(" from key {}", request.first_key);
  if (request.keep_keys > 0) text += fmt::format(" keeping {}", request.keep_keys);
  for (const KeySpan& span : request.spans)
    text += fmt::format(" span {}-{}", span.first, span.end);
  if (!request.parents.empty()) text += fmt::format(" tree of {}", fmt::join(request.parents, ","));
  return text;
}

/// A tree has at least the query tokens, which may have become more or fewer, and no more nodes
/// than there are keys. Its request is causal and has no span.
void fit_tree(const AttentionConfig& config, std::int32_t keys, RequestShape& request) {
  auto& parents = request.parents;
  const auto least = static_cast<std::size_t>(request.query_len);
  if (!config.use_trees || least > kMaxTreeNodes) parents.clear();
  if (parents.empty()) return;
  while (parents.size() < least) parents.push_back(static_cast<std::int32_t>(parents.size()) - 1);
  parents.resize(std::min(parents.size(), std::max(static_cast<std::size_t>(keys), least)));
  request.direction = Direction::kCausal;
  request.spans.clear();
}

/// A cascade's requests have neither first keys nor, in the prefix, nodes of trees.
void fit_prefix(std::int32_t prefix, RequestShape& request) {
  request.first_key = 0;
  const auto keys = static_cast<std::size_t>(std::max(request.seq_len - prefix, 0));
  if (request.parents.size() > keys) request.parents.clear();
}

/// Clears the lists that the layer does not take, and makes the others fit the lengths.
void normalise_lists(Recipe& recipe) {
  AttentionConfig& config = recipe.config;
  const bool own_keys = config.attn_type == AttentionType::kDecoder ||
                        config.attn_type == AttentionType::kEncoderOnly;
  const bool takes = recipe.order != CacheOrder::kPacked && own_keys;
  for (bool AttentionConfig::*use : {&AttentionConfig::use_spans, &AttentionConfig::use_directions,
                                     &AttentionConfig::use_first_keys,
                                     &AttentionConfig::use_keep_keys, &AttentionConfig::use_trees})
    config.*use = takes && config.*use;
  if (recipe.order == CacheOrder::kLatent) config.window_left = config.window_right = -1;
  if (!config.use_spans || recipe.order == CacheOrder::kLatent) config.span_rule = SpanRule::kWhole;
  for (RequestShape& request : recipe.batch.requests) {
    if (!takes) request.spans.clear();
    if (!config.use_directions) request.direction = Direction::kCausal;
    const std::int32_t keys = config.contiguous_kv() ? request.query_len : request.seq_len;
    fit_tree(config, keys, request);
    const auto nodes = static_cast<std::int32_t>(request.parents.size());
    request.first_key = config.use_first_keys ? std::min(request.first_key, keys - nodes) : 0;
    request.keep_keys = config.use_keep_keys ? std::min(request.keep_keys, keys - nodes) : 0;
  }
  if (config.use_directions || config.use_trees) recipe.batch.causal = true;
}

}  // namespace

void normalise(Recipe& recipe) {
  AttentionConfig& config = recipe.config;
  BatchFamily& batch = recipe.batch;
  config.num_heads = config.num_heads / config.num_kv_heads * config.num_kv_heads;
  if (config.cache_dtype() != DType::kFp8E4M3 || recipe.order != CacheOrder::kPages)
    config.fp8_products = false;
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if constexpr (std::is_same_v<Value, std::vector<float>>)
      if (row.is_set(config))
        config.*row.member = per_head_values(config.num_heads, row.legal.minus_infinity);
  });
  say_window_once(config);
  if (recipe.order != CacheOrder::kPages || config.head_size_v >= config.head_size)
    config.head_size_v = 0;
  if (config.attn_type == AttentionType::kEncoder ||
      config.attn_type == AttentionType::kEncoderDecoder)
    config.attention_chunk_size = 0;
  if (config.attn_type != AttentionType::kDecoder || recipe.order == CacheOrder::kPacked)
    batch.common_prefix_len = 0;
  if (config.attention_chunk_size == 0) config.chunk_lookback = 0;
  normalise_lists(recipe);
  if (config.block_size > 0) batch.common_prefix_len -= batch.common_prefix_len % config.block_size;
  const bool in_cache = config.attn_type == AttentionType::kDecoder;
  for (RequestShape& request : batch.requests) {
    if (recipe.order == CacheOrder::kPacked) request.query_len = 1;
    if (!in_cache) continue;
    request.seq_len = std::max(request.seq_len, request.query_len + batch.common_prefix_len);
    if (batch.common_prefix_len > 0) fit_prefix(batch.common_prefix_len, request);
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
  for (const RequestShape& request : recipe.batch.requests) requests.push_back(words_of(request));
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
