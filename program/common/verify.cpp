#include "program/common/verify.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

constexpr double kOutFloor = 1e-7;  // below the last bit of f32 at the size of any real output
// An LSE is a logit plus a logarithm in f32: its error grows with its size.
constexpr double kLseAbsolute = 2e-5, kLseRelative = 2e-6;

}  // namespace

void Deviation::add(double got, double truth, double allowed) {
  double error = got == truth ? 0 : std::abs(got - truth);  // infinities are equal, too
  if (std::isnan(error)) error = std::numeric_limits<double>::infinity();  // as far as any
  merge({.max_error = error,
         .allowance = allowed,
         .worst_share = error == 0 || std::isinf(error) ? error : error / allowed,
         .compared = 1});
}

void Deviation::merge(const Deviation& other) {
  compared += other.compared;
  worst_share = std::max(worst_share, other.worst_share);
  if (other.max_error > max_error) {
    max_error = other.max_error;
    allowance = other.allowance;
  }
}

Deviation compare(DType dtype, std::span<const std::byte> out, std::span<const float> lse,
                  const oracle::AttentionResult& truth, bool rounds_probabilities) {
  Deviation deviation;
  const std::vector<double> got = decode_elements(dtype, out);
  if (got.size() != truth.out.size()) return {};
  if (!lse.empty() && lse.size() != truth.lse.size()) return {};
  for (std::size_t i = 0; i < got.size(); ++i) {
    deviation.add(got[i], truth.out[i], truth.allowed(i, rounds_probabilities) + kOutFloor);
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double moved = truth.lse_bound.empty() ? 0 : truth.lse_bound[i];
    const double allowed = kLseAbsolute + kLseRelative * std::abs(truth.lse[i]) + moved;
    deviation.add(static_cast<double>(lse[i]), truth.lse[i], allowed);
  }
  return deviation;
}

Deviation compare_fp8(std::span<const std::byte> out, double scale,
                      const oracle::AttentionResult& truth, bool rounds_probabilities) {
  constexpr int kFraction = 3, kLowestExponent = -6;
  Deviation deviation;
  const std::vector<double> got = decode_elements(DType::kFp8E4M3, out);
  if (got.size() != truth.out.size()) return {};
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double exact = truth.allowed(i, rounds_probabilities) + kOutFloor;
    const double most = (std::abs(truth.out[i]) + exact) / scale;
    const int exponent = most > 0 ? std::max(std::ilogb(most), kLowestExponent) : kLowestExponent;
    deviation.add(got[i] * scale, truth.out[i],
                  exact + std::ldexp(scale, exponent - kFraction - 1));
  }
  return deviation;
}

bool multiplied_in_fp8(const AttentionConfig& config, std::int64_t query_len) {
  return query_len * config.num_queries_per_kv() > kMostDecodeRows;
}

void put_fp8_rows(const AttentionConfig& config, const oracle::AttentionCase& call,
                  oracle::Element element, double query_scale, oracle::AttentionResult& truth) {
  const oracle::AttentionResult rounded = oracle::attention_in_fp8(call, element, query_scale);
  const std::size_t heads = to_size(call.num_heads),
                    rows = std::max<std::size_t>(truth.lse.size(), 1);
  const std::size_t width = truth.out.size() / rows;  // less than head_size of smaller values
  truth.lse_bound.resize(truth.lse.size());
  for (std::size_t r = 0; r + 1 < call.query_start_loc.size(); ++r) {
    const std::int32_t first = call.query_start_loc[r], last = call.query_start_loc[r + 1];
    if (!multiplied_in_fp8(config, last - first)) continue;
    for (std::size_t row = to_size(first) * heads; row < to_size(last) * heads; ++row) {
      truth.lse[row] = rounded.lse[row];
      truth.lse_bound[row] = rounded.lse_bound[row];
      for (std::size_t i = 0; i < width; ++i) {
        const std::size_t to = row * width + i, from = row * to_size(call.head_size) + i;
        truth.out[to] = rounded.out[from];
        truth.bound[to] = rounded.bound[from];
        truth.weight_rounding[to] = rounded.weight_rounding[from];
      }
    }
  }
}

void say_window_once(AttentionConfig& config) {
  if (config.window_left >= 0 || config.window_right >= 0) config.sliding_window = 0;
}

void put_window(const AttentionConfig& config, oracle::AttentionCase& call) {
  const bool both = config.sliding_window > 0;
  call.window_left = both ? config.sliding_window - 1 : config.window_left;
  call.window_right = both ? config.sliding_window - 1 : config.window_right;
}

void put_logit_options(const AttentionConfig& config, HeadRange heads,
                       oracle::AttentionCase& call) {
  const auto of_heads = [&](const std::vector<float>& values) {
    const auto end = values.begin() + (values.empty() ? 0 : heads.first + heads.count);
    return std::vector<double>(end - (values.empty() ? 0 : heads.count), end);
  };
  call.scale = config.scale ? static_cast<double>(*config.scale) : 1 / std::sqrt(config.head_size);
  call.soft_cap = static_cast<double>(config.logits_soft_cap);
  put_window(config, call);
  call.chunk = config.attention_chunk_size;
  call.chunk_lookback = config.chunk_lookback;
  call.alibi_slopes = of_heads(config.alibi_slopes);
  call.sinks = of_heads(config.sinks);
}

oracle::AttentionCase row_case(const AttentionConfig& config, std::int32_t num_keys,
                               HeadRange heads) {
  oracle::AttentionCase call;
  call.num_heads = static_cast<std::int32_t>(heads.count);
  call.num_kv_heads = 1;
  call.head_size = config.head_size;
  call.block_size = num_keys;
  put_logit_options(config, heads, call);
  call.query_start_loc = {0, 1};
  call.seq_lens = {num_keys};
  call.block_table = {0};
  call.max_blocks = 1;
  return call;
}

oracle::AttentionResult front_of_rows(const oracle::AttentionResult& all, std::int32_t width,
                                      std::int32_t kept) {
  oracle::AttentionResult part;
  part.lse = all.lse;
  part.lse_bound = all.lse_bound;
  for (std::size_t i = 0; i < all.out.size(); ++i) {
    if (i % static_cast<std::size_t>(width) >= static_cast<std::size_t>(kept)) continue;
    part.out.push_back(all.out[i]);
    part.bound.push_back(all.bound[i]);
    part.weight_rounding.push_back(all.weight_rounding[i]);
  }
  return part;
}

Deviation compare_bytes(std::span<const std::byte> got, std::span<const std::byte> expected) {
  Deviation deviation;
  if (got.size() != expected.size()) return deviation;
  for (std::size_t i = 0; i < got.size(); ++i) deviation.add(got[i] == expected[i] ? 0 : 1, 0, 0.5);
  return deviation;
}

}  // namespace clattn::cli
