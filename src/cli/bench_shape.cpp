#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cli/bench_shapes.hpp"

namespace clattn::cli {

AttentionConfig BenchModel::config() const {
  AttentionConfig config;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_size = head_size;
  config.block_size = block_size;
  config.dtype = dtype;
  config.kv_cache_dtype = kv_dtype;
  config.kernel_family = family;
  if (scale > 0) config.scale = scale;
  config.logits_soft_cap = soft_cap;
  config.sliding_window = window;
  config.use_mla = rope_dim > 0;
  if (config.use_mla) config.rope_dim = rope_dim;
  if (sinks) {
    for (std::int32_t h = 0; h < heads; ++h) {
      config.sinks.push_back(0.5F * static_cast<float>(h % 5) - 1.0F);
    }
  }
  return config;
}

std::string BenchShape::name() const {
  return fmt::format("{}/{}/{}{}{}", model.name, suite, batch, options.empty() ? "" : "/", options);
}

bool BenchShape::in_set(std::string_view set) const {
  return std::find(sets.begin(), sets.end(), set) != sets.end();
}

std::int32_t BenchShape::num_tokens() const {
  return std::accumulate(requests.begin(), requests.end(), 0,
                         [](std::int32_t sum, const BenchRequest& r) { return sum + r.query_len; });
}

std::int32_t BenchShape::max_query_len() const {
  return std::max_element(
             requests.begin(), requests.end(),
             [](const BenchRequest& a, const BenchRequest& b) { return a.query_len < b.query_len; })
      ->query_len;
}

std::int32_t BenchShape::max_seq_len() const {
  return std::max_element(
             requests.begin(), requests.end(),
             [](const BenchRequest& a, const BenchRequest& b) { return a.seq_len < b.seq_len; })
      ->seq_len;
}

}  // namespace clattn::cli
