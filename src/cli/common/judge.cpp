#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/common/attention_call.hpp"
#include "cli/common/elements.hpp"
#include "cli/common/error.hpp"

namespace clattn::cli {
namespace {

/// Attention over the `prefix` tokens that all requests share, or over all others.
oracle::AttentionCase level_of(oracle::AttentionCase call, std::int32_t prefix, bool shared) {
  for (std::int32_t& seq_len : call.seq_lens)
    seq_len = shared ? std::min(seq_len, prefix) : std::max(seq_len - prefix, 0);
  if (shared) {
    call.causal = false;
    call.sinks.clear();
    return call;
  }
  const std::ptrdiff_t pages = prefix / call.block_size;
  std::rotate(call.block_table.begin(), call.block_table.begin() + pages, call.block_table.end());
  return call;
}

/// Adds what a cascade rounds besides: each level's result, weighted with the level's share of the
/// denominator, and its LSE, which moves that share.
void bound_cascade(const AttentionCall& call, oracle::AttentionResult& truth) {
  const oracle::Element element = element_of(call.config.dtype);
  const oracle::AttentionCase whole = oracle_case(call);
  const std::size_t width = to_size(call.config.head_size);
  for (const bool shared : {true, false}) {
    const oracle::AttentionResult level =
        oracle::attention(level_of(whole, call.computed_prefix_len(), shared), element);
    for (std::size_t i = 0; i < truth.out.size(); ++i) {
      const double lse = level.lse[i / width];
      if (std::isinf(lse)) continue;  // no key
      const double share = std::exp(lse - truth.lse[i / width]);
      truth.bound[i] += share * (oracle::half_ulp(element, level.out[i]) +
                                 oracle::half_ulp(oracle::Element::kF32, lse) *
                                     std::abs(level.out[i] - truth.out[i]));
    }
  }
}

/// Adds to the bounds what is lost on matrix units that treat f16 below 2^-14 as 0: queries,
/// weights, and elements of caches that are multiplied as f16 without being scaled up, each as
/// stored * scale.
void bound_flushes(const AttentionCall& call, oracle::AttentionResult& truth) {
  constexpr double kSmallest = 0x1p-14;
  // Weights just below it are rounded up, and a kernel's own are off by their logits' rounding.
  constexpr double kWeight = 1.01 * kSmallest;
  const DType cache = call.config.cache_dtype();
  const bool scaled_up = cache == DType::kFp8E4M3 || cache == DType::kInt8;
  const std::size_t heads = to_size(call.config.num_kv_heads), given = call.scales.size() / 2;
  oracle::FlushLimits limits{.query = kSmallest, .weight = kWeight, .key = {}, .value = {}};
  for (std::size_t head = 0; head < heads; ++head) {
    const auto limit = [&](std::size_t kv) {
      if (scaled_up) return 0.0;
      return kSmallest * (given == 0 ? 1.0 : call.scales[kv * given + head % given]);
    };
    limits.key.push_back(limit(0));
    limits.value.push_back(limit(1));
  }
  oracle::FlushBound flushed = oracle::flush_bound(oracle_case(call), limits);
  const std::size_t width = to_size(call.config.head_size);
  const std::size_t kept = truth.lse.empty() ? width : truth.out.size() / truth.lse.size();
  for (std::size_t i = 0; i < truth.out.size(); ++i)
    truth.bound[i] += flushed.out[i / kept * width + i % kept] / 2;  // bounds count twice
  truth.lse_bound = std::move(flushed.lse);
}

}  // namespace

Deviation judge_output(const AttentionCall& call, const AttentionOutcome& outcome,
                       const oracle::AttentionResult& one_pass) {
  oracle::AttentionResult truth = one_pass;
  if (std::ranges::find(outcome.launches, kCascadeRole, &LaunchReport::role) !=
      outcome.launches.end())
    bound_cascade(call, truth);
  if (outcome.flushes_f16) bound_flushes(call, truth);
  Deviation deviation =
      compare(call.config.dtype, outcome.out, outcome.lse, truth, outcome.rounds_weights);
  if (deviation.passed() && call.config.output_fp8) {
    deviation.merge(compare_fp8(outcome.out_fp8, static_cast<double>(call.output_scale), truth,
                                outcome.rounds_weights));
  }
  return deviation;
}

Deviation judge_cache(const AttentionOutcome& outcome, const LogicalCache& expected) {
  Deviation stored = compare_bytes(outcome.cache.key, expected.key);
  stored.merge(compare_bytes(outcome.cache.value, expected.value));
  return stored;
}

oracle::AttentionResult oracle_result(const AttentionCall& call) {
  oracle::AttentionResult result =
      oracle::attention(oracle_case(call), element_of(call.config.dtype));
  if (call.config.output_head_size() == call.config.head_size) return result;
  return front_of_rows(result, call.config.head_size, call.config.output_head_size());
}

}  // namespace clattn::cli
