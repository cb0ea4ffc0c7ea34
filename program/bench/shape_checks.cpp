#include "program/bench/shape_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/config_fields.hpp>
#include <string_view>

namespace clattn::cli {

void check_op(const BenchShape& shape) {
  const CacheOp op = shape.model.op;
  const std::string name(to_string(op));
  if (op == CacheOp::kWrite) return;
  if (shape.suite != "cache") throw ShapeFault{"op", name, "in rows of suite cache"};
  const bool latent = shape.model.config.use_mla;
  if (op == CacheOp::kGather) {
    if (!latent) throw ShapeFault{"op", name, "of latent attention"};
    return;
  }
  if (op == CacheOp::kReshapeAndCache || op == CacheOp::kAppend) {
    if (latent) throw ShapeFault{"op", name, "not of latent attention"};
    if (op == CacheOp::kReshapeAndCache && shape.model.layout) {
      throw ShapeFault{"layout", std::string(to_string(*shape.model.layout)),
                       "none with op reshape_and_cache, whose x-packed pair is one of its own"};
    }
    return;
  }
  const auto more_than_a_page = [&](const RequestShape& request) {
    return request.seq_len > shape.model.config.block_size;
  };
  if (shape.num_reqs() < 2 && !more_than_a_page(shape.requests.front())) {
    throw ShapeFault{"batch", shape.batch, "two pages or more, half of which are copied"};
  }
}

void check_recurrent(const BenchShape& shape) {
  const DeltaNet& net = shape.model.delta_net;
  if (!net.in_chunks && shape.suite != "gdn_prefill")
    throw ShapeFault{"method", "loop", "in rows of suite gdn_prefill"};
  if (net.kernel_family != KernelFamily::kAuto && shape.suite != "gdn_prefill")
    throw ShapeFault{"method", "chunk_f32", "in rows of suite gdn_prefill"};
  if (net.num_v_heads % std::max(net.num_k_heads, 1) != 0) {
    throw ShapeFault{"num_v_heads", std::to_string(net.num_v_heads),
                     fmt::format("a multiple of num_k_heads, {}", net.num_k_heads)};
  }
  if (!shape.is_recurrent() && net.num_k_heads == 0 && net.num_v_heads == 0) return;
  for (const auto& [key, heads] :
       {std::pair{"num_k_heads", net.num_k_heads}, {"num_v_heads", net.num_v_heads}})
    if (heads == 0) throw ShapeFault{key, "missing", "num_k_heads and num_v_heads of the model"};
  if (shape.suite == "gdn_decode" && shape.max_query_len() > 1)
    throw ShapeFault{"batch", shape.batch, "in suite gdn_decode one new token a request"};
}

void check_format(const BenchShape& shape) {
  const CacheFormat format = shape.model.config.cache_format();
  if (!format.scales_per_row() || (shape.suite != "cache" && shape.suite != "metadata")) return;
  throw ShapeFault{"kv_cache_dtype", std::string(to_string(format)),
                   fmt::format("types in suite {}", shape.suite)};
}

void check_contiguous(const BenchShape& shape) {
  const AttentionConfig& config = shape.model.config;
  if (!config.contiguous_kv()) return;
  const std::string type(to_string(config.attn_type));
  if (shape.suite != "prefill")
    throw ShapeFault{"attn_type", type, "decoder, but in rows of suite prefill"};
  for_each_field([&](const auto& row) {
    const bool of_cache = row.name == "kv_cache_dtype" && config.cache_dtype() != config.dtype;
    if (!row.is_set(config) || (row.random.percent == 0 && !of_cache) || row.name == "scale")
      return;
    throw ShapeFault{std::string(row.name), to_text(config.*row.member),
                     fmt::format("none with attn_type {}", type)};
  });
  for (const RequestShape& request : shape.requests) {
    if (request.seq_len == request.query_len) continue;
    throw ShapeFault{"batch", shape.batch,
                     fmt::format("with attn_type {}, requests without context", type)};
  }
}

namespace {

/// A span in the middle of each prompt's new tokens.
void add_spans(BenchShape& shape) {
  bool any = false;
  for (RequestShape& request : shape.requests) {
    if (request.query_len == 1) continue;
    if (request.query_len < shape.model.span) {
      throw ShapeFault{"span", std::to_string(shape.model.span),
                       fmt::format("at most {}, the new tokens of a prompt", request.query_len)};
    }
    const std::int32_t first = request.seq_len - (request.query_len + shape.model.span) / 2;
    request.spans = {{first, first + shape.model.span}};
    any = true;
  }
  if (!any) throw ShapeFault{"span", std::to_string(shape.model.span), "0 in rows without prompts"};
}

/// Fields that count positions, which in a tree are not the tokens' places, or list other keys.
constexpr std::array<std::string_view, 9> kNotWithTrees = {
    "sliding_window", "window_left", "window_right",   "attention_chunk_size", "alibi_slopes",
    "attn_type",      "use_spans",   "use_directions", "use_first_keys"};

/// The new tokens of a request as a tree, level by level.
void add_trees(BenchShape& shape) {
  const AttentionConfig& config = shape.model.config;
  const std::string key = config.custom_mask ? "masked_tree" : "tree";
  const std::string value = std::to_string(shape.model.tree);
  if (config.custom_mask && config.use_trees) throw ShapeFault{key, value, "0 in rows with tree"};
  if (shape.suite != "spec") throw ShapeFault{key, value, "0 in rows of other suites than spec"};
  for_each_field([&](const auto& row) {
    if (row.is_set(config) && std::ranges::find(kNotWithTrees, row.name) != kNotWithTrees.end())
      throw ShapeFault{key, value, fmt::format("0 in rows with {}", row.name)};
  });
  for (RequestShape& request : shape.requests) {
    if (request.query_len > kMaxTreeNodes) {
      throw ShapeFault{"batch", shape.batch,
                       fmt::format("at most {} new tokens with {}", kMaxTreeNodes, key)};
    }
    for (std::int32_t node = 0; node < request.query_len; ++node)
      request.parents.push_back(node == 0 ? -1 : (node - 1) / shape.model.tree);
  }
}

/// Refuses what a row's lists are not measured with; `key` and `value` are those of one of them.
void check_lists(const BenchShape& shape, const std::string& key, const std::string& value) {
  const AttentionConfig& config = shape.model.config;
  for (const std::string_view suite : {"cache", "merge", "lengths"})
    if (shape.suite == suite) throw ShapeFault{key, value, fmt::format("none in suite {}", suite)};
  if (config.attention_chunk_size > 0)
    throw ShapeFault{key, value, "none with attention_chunk_size"};
  if (config.contiguous_kv()) {
    throw ShapeFault{key, value,
                     fmt::format("none with attn_type {}", to_string(config.attn_type))};
  }
}

/// First keys that the window does not hide.
void add_kept_keys(BenchShape& shape) {
  const AttentionConfig& config = shape.model.config;
  const std::string value = std::to_string(shape.model.keep_keys);
  check_lists(shape, "keep_keys", value);
  if (config.sliding_window == 0 && config.window_left < 0)
    throw ShapeFault{"keep_keys", value, "0 without sliding_window and window_left"};
  if (!config.alibi_slopes.empty())
    throw ShapeFault{"keep_keys", value, "0 in rows with alibi_slopes"};
  for (RequestShape& request : shape.requests)
    request.keep_keys = std::min(shape.model.keep_keys, request.seq_len);
}

}  // namespace

void add_lists(BenchShape& shape) {
  const AttentionConfig& config = shape.model.config;
  if (shape.model.tree > 0) add_trees(shape);
  if (shape.model.keep_keys > 0) add_kept_keys(shape);
  if (shape.model.span > 0) {
    check_lists(shape, "span", std::to_string(shape.model.span));
    add_spans(shape);
  }
  if (!config.use_directions) return;
  check_lists(shape, "directions", "yes");
  for (std::size_t r = 0; r < shape.requests.size(); ++r)
    shape.requests[r].direction = r % 2 == 0 ? Direction::kBothWays : Direction::kCausal;
}

}  // namespace clattn::cli
