#include "op.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

namespace ggml_clattn {

namespace {

template <typename Value>
Value parameter(const ggml_tensor& node, std::size_t index) {
  Value value;
  std::memcpy(&value, node.op_params + index, sizeof value);
  return value;
}

std::optional<clattn::DType> cache_type(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F16:
      return clattn::DType::kF16;
    case GGML_TYPE_BF16:
      return clattn::DType::kBF16;
    case GGML_TYPE_F32:
      return clattn::DType::kF32;
    default:
      return std::nullopt;
  }
}

/// Why the shapes of query, mask and output cannot be a batch of CLAttn's.
std::string rows_refusal(const Op& op) {
  if (op.query->type != GGML_TYPE_F32 || op.query->nb[0] != sizeof(float))
    return "queries that are not rows of f32";
  if (op.query->ne[3] != op.streams) return "streams that share keys";
  if (op.mask == nullptr) return {};
  if (op.mask->type != GGML_TYPE_F16 || !ggml_is_contiguous(op.mask))
    return "a mask that is not contiguous f16";
  if (op.mask->ne[2] != 1) return "a mask for each head";
  if (op.mask->ne[0] != op.keys || op.mask->ne[1] < op.rows || op.streams % op.mask->ne[3] != 0)
    return "a mask of another shape";
  return {};
}

/// Why keys and values cannot be one paged cache.
std::string cache_refusal(const Op& op) {
  const ggml_tensor& key = *op.key;
  const ggml_tensor& value = *op.value;
  if (!cache_type(key.type) || key.type != value.type)
    return std::string("keys and values of ") + ggml_type_name(key.type) + " and " +
           ggml_type_name(value.type);
  if (key.ne[0] != value.ne[0]) return "values of another head size than keys";
  if (key.nb[0] != ggml_type_size(key.type) || !std::equal(key.nb, key.nb + 4, value.nb) ||
      !std::equal(key.ne, key.ne + 4, value.ne))
    return "values with other strides than keys";
  const std::size_t eight = 8 * ggml_type_size(key.type);
  if (std::any_of(key.nb + 1, key.nb + 4, [&](std::size_t stride) { return stride % eight != 0; }))
    return "keys that are not a multiple of 8 elements apart";
  if (op.streams > 1 && key.nb[3] % key.nb[1] != 0) return "streams that share a row of keys";
  return {};
}

/// Cuts the cells into pages: as long as divides both the cells and the way to the next stream.
void find_pages(Op& op) {
  op.page_tokens = std::gcd(op.keys, kMostPageTokens);
  if (op.streams == 1) return;
  const auto tokens = static_cast<std::int64_t>(op.key->nb[3] / op.key->nb[1]);
  op.page_tokens = std::gcd(op.page_tokens, tokens);
  op.pages_of_stream = tokens / op.page_tokens;
}

clattn::AttentionConfig config_of(const Op& op, const ggml_tensor& node) {
  const auto count = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  clattn::AttentionConfig config;
  config.num_heads = count(op.query->ne[2]);
  config.num_kv_heads = count(op.key->ne[2]);
  config.head_size = count(op.key->ne[0]);
  config.block_size = count(op.page_tokens);
  config.dtype = clattn::DType::kF32;
  config.kv_cache_dtype = cache_type(op.key->type);
  config.scale = parameter<float>(node, 0);
  config.logits_soft_cap = parameter<float>(node, 2);
  return config;
}

}  // namespace

Op read_op(const ggml_tensor& node) {
  Op op{.query = node.src[0],
        .key = node.src[1],
        .value = node.src[2],
        .mask = node.src[3],
        .sinks = node.src[4],
        .output = const_cast<ggml_tensor*>(&node),  // NOLINT: ggml computes into what it names
        .rows = node.src[0]->ne[1],
        .keys = node.src[1]->ne[1],
        .streams = node.src[1]->ne[3],
        .max_bias = parameter<float>(node, 1)};
  const std::int64_t largest =
      std::max({op.rows * op.streams, op.keys * op.streams, op.query->ne[2], op.key->ne[0]});
  if (largest > std::numeric_limits<std::int32_t>::max()) op.refusal = "more than 2^31 tokens";
  if (op.refusal.empty()) op.refusal = rows_refusal(op);
  if (op.refusal.empty()) op.refusal = cache_refusal(op);
  if (!op.refusal.empty()) return op;
  op.element_bytes = static_cast<std::int64_t>(ggml_type_size(op.key->type));
  find_pages(op);
  op.config = config_of(op, node);
  return op;
}

std::vector<float> alibi_slopes(std::int64_t num_heads, float max_bias) {
  const auto power = static_cast<std::int64_t>(std::exp2(std::floor(std::log2(num_heads))));
  const auto of_heads = static_cast<float>(power);
  const float first = std::pow(2.0F, -max_bias / of_heads);
  const float between = std::pow(2.0F, -max_bias / 2.0F / of_heads);
  std::vector<float> slopes;
  for (std::int64_t head = 0; head < num_heads; ++head) {
    const auto exponent = static_cast<float>(head < power ? head + 1 : 2 * (head - power) + 1);
    slopes.push_back(std::pow(head < power ? first : between, exponent));
  }
  return slopes;
}

}  // namespace ggml_clattn
