#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "oracle/oracle.hpp"

/// What oracle::fp8_bound() says of products of e4m3, against a model of the unit that makes them.
namespace {

constexpr std::size_t kFp8Dims = 128, kTile = 128, kStep = 32;

struct Values {
  double sharpness = 1;  ///< of logits
  double mean = 0;
  double following = 0;  ///< how much they follow their key's logit
};

/// One query token over `num_keys` keys in one page, all of them e4m3.
oracle::AttentionCase make_case(std::size_t num_keys, const Values& values) {
  oracle::AttentionCase call;
  call.num_heads = call.num_kv_heads = 1;
  call.head_size = kFp8Dims;
  call.block_size = static_cast<std::int32_t>(num_keys);
  call.scale = 1 / std::sqrt(double(kFp8Dims));
  call.query_start_loc = {0, 1};
  call.seq_lens = {static_cast<std::int32_t>(num_keys)};
  call.block_table = {0};
  call.max_blocks = 1;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  const auto add = [](std::vector<double>& all, double value) {
    all.push_back(oracle::round_to(oracle::Element::kFp8E4M3, value));
  };
  for (std::size_t d = 0; d < kFp8Dims; ++d) add(call.query, values.sharpness * normal(random));
  for (std::size_t j = 0; j < num_keys; ++j) {
    double logit = 0;
    for (std::size_t d = 0; d < kFp8Dims; ++d) {
      add(call.key_cache, normal(random));
      logit += call.scale * call.query[d] * call.key_cache.back();
    }
    const double mean = values.mean + values.following * logit / values.sharpness;
    for (std::size_t d = 0; d < kFp8Dims; ++d) add(call.value_cache, mean + normal(random));
  }
  return call;
}

/// A step of the unit: of each product and of the sum so far it drops what is below 2^-13 of the
/// largest one's power of two.
template <typename Product>
double multiply_step(double sum, const Product& product) {
  double largest = std::abs(sum);
  for (std::size_t i = 0; i < kStep; ++i) largest = std::max(largest, std::abs(product(i)));
  if (largest == 0) return 0;
  int exponent = 0;
  std::frexp(largest, &exponent);
  const double kept = std::ldexp(1.0, exponent - 1 - 13);
  double result = std::trunc(sum / kept) * kept;
  for (std::size_t i = 0; i < kStep; ++i) result += std::trunc(product(i) / kept) * kept;
  return result;
}

/// The call by such steps, probabilities rounded to e4m3.
std::vector<double> multiply(const oracle::AttentionCase& call) {
  const auto num_keys = static_cast<std::size_t>(call.seq_lens[0]);
  std::vector<double> weights(num_keys), out(kFp8Dims);
  double largest = -HUGE_VAL, sum = 0;
  for (std::size_t j = 0; j < num_keys; ++j) {
    double logit = 0;
    for (std::size_t d = 0; d < kFp8Dims; d += kStep)
      logit = multiply_step(logit, [&](std::size_t i) {
        return call.query[d + i] * call.key_cache[j * kFp8Dims + d + i];
      });
    weights[j] = call.scale * logit;
    largest = std::max(largest, weights[j]);
  }
  for (double& weight : weights) {
    sum += weight = 256 * std::exp(weight - largest);
    weight = oracle::round_to(oracle::Element::kFp8E4M3, weight);
  }
  for (std::size_t d = 0; d < kFp8Dims; ++d) {
    for (std::size_t tile = 0; tile < num_keys; tile += kTile) {
      double part = 0;
      for (std::size_t first = tile; first < tile + kTile; first += kStep) {
        part = multiply_step(part, [&](std::size_t i) {
          const std::size_t j = first + i;
          return j < num_keys ? weights[j] * call.value_cache[j * kFp8Dims + d] : 0.0;
        });
      }
      out[d] += part / sum;
    }
  }
  return out;
}

/// How far `out` is off, at its worst element, in relation to what is allowed.
double worst(const oracle::AttentionResult& want, const std::vector<double>& out) {
  double worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    worst = std::max(worst, std::abs(out[i] - want.out[i]) / want.allowed(i, false));
  return worst;
}

TEST(Fp8Bound, HoldsForTheUnitAndNotForZerosHoweverManyKeys) {
  const std::pair<Values, std::size_t> cases[] = {
      {{}, 100},           {{.sharpness = 0.05}, 2000}, {{.sharpness = 4}, 2000},
      {{.mean = 1}, 2000}, {{.following = 1}, 2000},    {{}, 20000}};
  for (const auto& [values, num_keys] : cases) {
    const oracle::AttentionCase call = make_case(num_keys, values);
    const auto want = oracle::attention_in_fp8(call, oracle::Element::kBF16, 1);
    SCOPED_TRACE(testing::Message() << num_keys << " keys, sharpness " << values.sharpness);
    EXPECT_LT(worst(want, multiply(call)), 0.25);
    EXPECT_GT(worst(want, std::vector<double>(kFp8Dims)), 1.2);
  }
}

}  // namespace
