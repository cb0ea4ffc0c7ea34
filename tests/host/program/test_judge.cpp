// What `clattn run --verify` and `clattn check` accept of calls that multiplied in fp8: outputs
// that the oracle computed, judged as a device's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "program/check/batches.hpp"
#include "program/common/attention_call.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace {

using namespace clattn;       // NOLINT(google-build-using-namespace): all of it is under test
using namespace clattn::cli;  // NOLINT(google-build-using-namespace)

/// Four heads of a KV head: four query tokens are few rows, five are not.
AttentionCall fp8_call(std::vector<RequestShape> requests) {
  AttentionConfig config;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_size = 32;
  config.block_size = 16;
  config.dtype = DType::kF16;
  config.kv_cache_dtype = DType::kFp8E4M3;
  config.fp8_products = true;
  AttentionCall call = make_call({"", std::move(requests)}, config, 3);
  call.query_scale = 0.75F;
  return call;
}

/// As a device that takes exact queries for requests of up to `few` tokens, rounded ones for
/// others.
AttentionOutcome fp8_answer(const AttentionCall& call, std::int32_t few, double query_scale) {
  oracle::AttentionResult result = oracle_result(call);
  const oracle::AttentionResult rounded =
      oracle::attention_in_fp8(oracle_case(call), oracle::Element::kF16, query_scale);
  const std::size_t heads = to_size(call.config.num_heads);
  const std::size_t width = to_size(call.config.head_size);
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int32_t first = call.query_start_loc[r], last = call.query_start_loc[r + 1];
    if (last - first <= few) continue;
    for (std::size_t row = to_size(first) * heads; row < to_size(last) * heads; ++row) {
      result.lse[row] = rounded.lse[row];
      std::copy_n(&rounded.out[row * width], width, &result.out[row * width]);
    }
  }
  AttentionOutcome outcome;
  outcome.out = encode_elements(call.config.dtype, result.out);
  outcome.lse.assign(result.lse.begin(), result.lse.end());
  outcome.multiplies_fp8 = true;
  return outcome;
}

bool passes_judge(const AttentionCall& call, const AttentionOutcome& outcome) {
  return judge_output(call, outcome, oracle_result(call)).passed();
}

TEST(Judge, RowsInFp8AreThoseOfRoundedQueries) {
  const AttentionCall call = fp8_call({{1, 40}, {4, 60}, {5, 60}, {40, 90}, {0, 0}});
  EXPECT_TRUE(passes_judge(call, fp8_answer(call, 4, 0.75)));
  EXPECT_FALSE(passes_judge(call, fp8_answer(call, 3, 0.75)));    // a request of few rows in fp8
  EXPECT_FALSE(passes_judge(call, fp8_answer(call, 5, 0.75)));    // one of many rows that was not
  EXPECT_FALSE(passes_judge(call, fp8_answer(call, 4, 1)));       // by another scale
  EXPECT_FALSE(passes_judge(call, fp8_answer(call, 100, 0.75)));  // nothing was
}

TEST(Judge, WithoutProductsInFp8QueriesAreExact) {
  const AttentionCall call = fp8_call({{1, 40}, {40, 90}});
  AttentionOutcome outcome = fp8_answer(call, 100, 0.75);
  outcome.multiplies_fp8 = false;
  EXPECT_TRUE(passes_judge(call, outcome));
  outcome = fp8_answer(call, 4, 0.75);
  outcome.multiplies_fp8 = false;
  EXPECT_FALSE(passes_judge(call, outcome));
}

/// As a cascade that shares two pages answers: the prefix in fp8, being one request of all tokens,
/// the rest of a request in fp8 if that has more than `few` tokens.
AttentionOutcome cascade_answer(const AttentionCall& call, std::int32_t few) {
  oracle::AttentionCase prefix = oracle_case(call), rest = prefix;
  prefix.causal = false;
  prefix.seq_lens.assign(call.seq_lens.size(), 32);
  for (std::int32_t& seq_len : rest.seq_lens) seq_len -= 32;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const auto row = rest.block_table.begin() + static_cast<std::ptrdiff_t>(r) * rest.max_blocks;
    std::rotate(row, row + 2, row + rest.max_blocks);
  }
  constexpr auto kElement = oracle::Element::kF16;
  const auto one = oracle::attention_in_fp8(prefix, kElement, 0.75);
  const auto rounded = oracle::attention_in_fp8(rest, kElement, 0.75);
  const auto exact = oracle::attention(rest, kElement);
  AttentionOutcome outcome = fp8_answer(call, few, 0.75);
  outcome.launches = {{.name = "merge_attn_states", .role = std::string(kCascadeRole)}};
  std::vector<double> out(one.out.size());
  const std::size_t rows = to_size(call.config.num_heads);
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const std::int32_t first = call.query_start_loc[r], last = call.query_start_loc[r + 1];
    const oracle::AttentionResult& other = last - first > few ? rounded : exact;
    for (std::size_t i = to_size(first) * rows; i < to_size(last) * rows; ++i) {
      const double lse = std::log(std::exp(one.lse[i]) + std::exp(other.lse[i]));
      outcome.lse[i] = static_cast<float>(lse);
      for (std::size_t d = i * 32; d < (i + 1) * 32; ++d)
        out[d] =
            std::exp(one.lse[i] - lse) * one.out[d] + std::exp(other.lse[i] - lse) * other.out[d];
    }
  }
  outcome.out = encode_elements(call.config.dtype, out);
  return outcome;
}

TEST(Judge, EachLevelOfACascadeIsRoundedOnItsOwn) {
  const AttentionConfig config = fp8_call({}).config;
  AttentionCall call = make_call(
      {.name = "", .requests = {{20, 60}, {2, 80}, {1, 90}}, .common_prefix_len = 32}, config, 3);
  call.query_scale = 0.75F;
  EXPECT_TRUE(passes_judge(call, cascade_answer(call, 4)));
  EXPECT_FALSE(passes_judge(call, cascade_answer(call, 1)));    // a request of few rows in fp8
  EXPECT_FALSE(passes_judge(call, cascade_answer(call, 100)));  // one of many rows that was not
  AttentionOutcome outcome = fp8_answer(call, 100, 0.75);       // nothing was
  outcome.launches = {{.name = "merge_attn_states", .role = std::string(kCascadeRole)}};
  EXPECT_FALSE(passes_judge(call, outcome));
}

}  // namespace
