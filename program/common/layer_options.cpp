#include "program/common/layer_options.hpp"

#include "program/common/error.hpp"
#include "program/common/options.hpp"

namespace clattn::cli {

void LayerOptions::add_to(CLI::App& command, std::int32_t most_block_size,
                          std::span<const std::string_view> cache_names) {
  const auto add = [&](const char* name, auto& target, const std::string& help) {
    return command.add_option(name, target, help)->group("Model");
  };
  add("--model", model,
      fmt::format("Attention of a model; a wrong name lists them; default: {}", model));
  add("--heads", heads, "Query heads, instead of the model's")->check(number_in(1, 65536));
  add("--kv-heads", kv_heads, "Key/value heads, instead of the model's")
      ->check(number_in(1, 65536));
  add("--head-size", head_size, "Elements of a head, instead of the model's")
      ->check(number_in(1, 65536));
  add("--block-size", block_size, "Tokens per cache block, instead of the model's (of most 16)")
      ->check(number_in(1, most_block_size));
  add("--dtype", dtype,
      "Type of queries, keys, values and outputs, instead of the model's (of most f16)")
      ->transform(dtype_name)
      ->check(one_of({"f32", "f16", "bf16"}));
  add("--kv-dtype", kv_dtype, "Type of the cache, instead of the model's (auto: as --dtype)")
      ->transform(dtype_name)
      ->check(one_of(cache_names));
}

BenchModel LayerOptions::layer(WhyNot* why_not) const {
  BenchModel layer = model_named(model, why_not).layer;
  AttentionConfig& config = layer.config;
  config.num_heads = heads.value_or(config.num_heads);
  config.num_kv_heads = kv_heads.value_or(config.num_kv_heads);
  config.head_size = head_size.value_or(config.head_size);
  config.block_size = block_size.value_or(config.block_size);
  if (!dtype.empty()) {
    config.dtype = parse_dtype(dtype);
    config.kv_cache_dtype = std::nullopt;
  }
  if (!kv_dtype.empty()) config.kv_cache_dtype = parse_kv_cache_dtype(kv_dtype);
  if (!config.sinks.empty()) config.sinks.resize(to_size(config.num_heads));
  throw_invalid_if(config.num_heads % config.num_kv_heads != 0,
                   "--heads: {} is not a multiple of --kv-heads {}", config.num_heads,
                   config.num_kv_heads);
  return layer;
}

std::string LayerOptions::name() const {
  return heads || kv_heads || head_size ? "own shape" : model;
}

}  // namespace clattn::cli
