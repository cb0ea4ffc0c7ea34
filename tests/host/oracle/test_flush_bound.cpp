#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "oracle/oracle.hpp"

/// What oracle::flush_bound() says of products that take small elements as 0.
namespace {

constexpr double kSmallest = 0x1p-14;
constexpr std::size_t kKeys = 40, kHeads = 2, kDims = 16;

/// One query token over keys in one page. `spread` is the size of logits: at 20, most weights are
/// small.
oracle::AttentionCase make_case(double spread) {
  oracle::AttentionCase call;
  call.num_heads = kHeads;
  call.num_kv_heads = 1;
  call.head_size = kDims;
  call.block_size = kKeys;
  call.scale = 0.25;
  call.query_start_loc = {0, 1};
  call.seq_lens = {kKeys};
  call.block_table = {0};
  call.max_blocks = 1;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  const auto fill = [&](std::vector<double>& values, std::size_t count, double size) {
    for (std::size_t i = 0; i < count; ++i) values.push_back(size * normal(random));
  };
  fill(call.query, kHeads * kDims, spread);
  fill(call.key_cache, kKeys * kDims, 1);
  fill(call.value_cache, kKeys * kDims, 1);
  return call;
}

void make_every_third_small(std::vector<double>& values) {
  for (std::size_t i = 0; i < values.size(); i += 3)
    values[i] = std::copysign(kSmallest * 0.9, values[i]);
}
void flush(std::vector<double>& values) {
  for (double& value : values) value = std::abs(value) < kSmallest ? 0 : value;
}

/// The result of products that flush weights: plain softmax without options.
std::vector<double> flushed_weights(const oracle::AttentionCase& call,
                                    const oracle::AttentionResult& exact) {
  std::vector<double> out(call.query.size());
  for (std::size_t h = 0; h < kHeads; ++h) {
    std::vector<double> logits(kKeys);
    for (std::size_t j = 0; j < kKeys; ++j)
      for (std::size_t d = 0; d < kDims; ++d)
        logits[j] += call.scale * call.query[h * kDims + d] * call.key_cache[j * kDims + d];
    const double largest = *std::max_element(logits.begin(), logits.end());
    for (std::size_t j = 0; j < kKeys; ++j) {
      if (std::exp(logits[j] - largest) < kSmallest) continue;
      for (std::size_t d = 0; d < kDims; ++d)
        out[h * kDims + d] += std::exp(logits[j] - exact.lse[h]) * call.value_cache[j * kDims + d];
    }
  }
  return out;
}

/// Every difference is within the bound, and the largest bound is within `tight` times what is
/// seen.
void expect_bounded(const std::vector<double>& got, const std::vector<double>& exact,
                    const std::vector<double>& bound, double tight) {
  double seen = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(got[i] - exact[i]);
    EXPECT_LE(difference, bound[i] + 1e-15) << i;
    seen = std::max(seen, difference);
  }
  EXPECT_GT(seen, 0);
  EXPECT_LT(*std::max_element(bound.begin(), bound.end()), tight * seen);
}

const oracle::FlushLimits kLimits{
    .query = kSmallest, .weight = kSmallest, .key = {kSmallest}, .value = {kSmallest}};

TEST(FlushBound, HoldsForSmallElementsOfQueriesAndKeys) {
  for (const bool of_query : {true, false}) {
    oracle::AttentionCase call = make_case(1);
    make_every_third_small(of_query ? call.query : call.key_cache);
    const auto exact = oracle::attention(call, oracle::Element::kF16);
    const oracle::FlushBound bound = oracle::flush_bound(call, kLimits);
    flush(of_query ? call.query : call.key_cache);
    const auto flushed = oracle::attention(call, oracle::Element::kF16);
    expect_bounded(flushed.out, exact.out, bound.out, 40);
    expect_bounded(flushed.lse, exact.lse, bound.lse, 40);
  }
}

TEST(FlushBound, HoldsForSmallValues) {
  oracle::AttentionCase call = make_case(1);
  make_every_third_small(call.value_cache);
  const auto exact = oracle::attention(call, oracle::Element::kF16);
  const oracle::FlushBound bound = oracle::flush_bound(call, kLimits);
  flush(call.value_cache);
  expect_bounded(oracle::attention(call, oracle::Element::kF16).out, exact.out, bound.out, 4);
}

TEST(FlushBound, HoldsForSmallWeights) {
  const oracle::AttentionCase call = make_case(10);
  const auto exact = oracle::attention(call, oracle::Element::kF16);
  const oracle::FlushBound bound = oracle::flush_bound(call, kLimits);
  expect_bounded(flushed_weights(call, exact), exact.out, bound.out, 4);
}

TEST(FlushBound, IsNoneWhereNothingIsSmall) {
  oracle::AttentionCase call = make_case(0.01);
  for (auto* const values : {&call.query, &call.key_cache, &call.value_cache})
    for (double& value : *values) value = std::copysign(std::abs(value) + kSmallest, value);
  const oracle::FlushBound bound = oracle::flush_bound(call, kLimits);
  EXPECT_EQ(*std::max_element(bound.out.begin(), bound.out.end()), 0);
  EXPECT_EQ(*std::max_element(bound.lse.begin(), bound.lse.end()), 0);
}

}  // namespace
