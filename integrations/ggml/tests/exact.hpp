#pragma once

#include <ggml.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

/// FLASH_ATTN_EXT as ggml defines it, by plain loops in double precision over allocated tensors.
namespace exact {

inline double at(const ggml_tensor& tensor, std::int64_t i0, std::int64_t i1, std::int64_t i2,
                 std::int64_t i3) {
  const char* const element = static_cast<const char*>(tensor.data) + i0 * tensor.nb[0] +
                              i1 * tensor.nb[1] + i2 * tensor.nb[2] + i3 * tensor.nb[3];
  switch (tensor.type) {
    case GGML_TYPE_F32:
      return *reinterpret_cast<const float*>(element);
    case GGML_TYPE_F16:
      return ggml_fp16_to_fp32(*reinterpret_cast<const ggml_fp16_t*>(element));
    case GGML_TYPE_BF16:
      return ggml_bf16_to_fp32(*reinterpret_cast<const ggml_bf16_t*>(element));
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

inline double slope(std::int64_t head, std::int64_t heads, double max_bias) {
  if (max_bias <= 0) return 1;
  std::int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  const double exponent = head < power ? -max_bias / power * (head + 1)
                                       : -max_bias / 2 / power * (2 * (head - power) + 1);
  return std::exp2(exponent);
}

struct Parameters {
  double scale = 1;
  double max_bias = 0;
  double soft_cap = 0;
};

/// One row of one head, [value's elements].
inline std::vector<double> row(const ggml_tensor& op, const Parameters& parameters,
                               std::int64_t head, std::int64_t i, std::int64_t stream) {
  const ggml_tensor &q = *op.src[0], &k = *op.src[1], &v = *op.src[2];
  const ggml_tensor *mask = op.src[3], *sinks = op.src[4];
  const std::int64_t kv_head = head / (q.ne[2] / k.ne[2]);
  const double factor = slope(head, q.ne[2], parameters.max_bias);
  std::vector<double> logits(k.ne[1]);
  double most = -INFINITY;
  for (std::int64_t j = 0; j < k.ne[1]; ++j) {
    const double added = mask != nullptr ? at(*mask, j, i, 0, stream % mask->ne[3]) : 0;
    double logit = -INFINITY;
    if (added != -INFINITY) {
      logit = 0;
      for (std::int64_t d = 0; d < k.ne[0]; ++d)
        logit += at(q, d, i, head, stream) * at(k, d, j, kv_head, stream);
      logit *= parameters.scale;
      if (parameters.soft_cap > 0)
        logit = parameters.soft_cap * std::tanh(logit / parameters.soft_cap);
      logit += factor * added;
    }
    logits[j] = logit;
    most = std::max(most, logit);
  }
  std::vector<double> result(v.ne[0]);
  if (most == -INFINITY) return result;
  double sum = 0;
  if (sinks != nullptr) {
    const double sink = at(*sinks, head, 0, 0, 0);
    most = std::max(most, sink);
    sum = std::exp(sink - most);
  }
  for (std::int64_t j = 0; j < k.ne[1]; ++j) {
    if (logits[j] == -INFINITY) continue;
    const double weight = std::exp(logits[j] - most);
    sum += weight;
    for (std::int64_t d = 0; d < v.ne[0]; ++d) result[d] += weight * at(v, d, j, kv_head, stream);
  }
  for (double& element : result) element /= sum;
  return result;
}

/// Sum of the squares of the output's errors over that of exact results; NaN if either has one.
inline double normalised_error(const ggml_tensor& op, const Parameters& parameters) {
  double error = 0;
  double norm = 0;
  for (std::int64_t stream = 0; stream < op.ne[3]; ++stream) {
    for (std::int64_t i = 0; i < op.ne[2]; ++i) {
      for (std::int64_t head = 0; head < op.ne[1]; ++head) {
        const std::vector<double> wanted = row(op, parameters, head, i, stream);
        for (std::int64_t d = 0; d < op.ne[0]; ++d) {
          const double difference = at(op, d, head, i, stream) - wanted[d];
          error += difference * difference;
          norm += wanted[d] * wanted[d];
        }
      }
    }
  }
  return error == 0 ? 0 : error / norm;
}

}  // namespace exact
