#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "oracle/row_scales.hpp"
#include "program/common/attention_call.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Attention over the `prefix` tokens that all requests share, or over all others.
oracle::AttentionCase level_of(oracle::AttentionCase call, std::int32_t prefix, bool shared) {
  for (std::int32_t& seq_len : call.seq_lens)
    seq_len = shared ? std::min(seq_len, prefix) : std::max(seq_len - prefix, 0);
  call.keep_keys.clear();  // there is no window
  if (shared) {
    call.causal = false;
    call.sinks.clear();
    call.looks.clear();
    call.spans.clear();
    call.tree_parents.clear();
    return call;
  }
  for (oracle::Span& span : call.spans)
    span = {span.request, std::max(span.first - prefix, 0), std::max(span.end - prefix, 0)};
  const std::ptrdiff_t pages = prefix / call.block_size;
  std::rotate(call.block_table.begin(), call.block_table.begin() + pages, call.block_table.end());
  return call;
}

/// Attention over the keys of both. An LSE that is off by D moves its part's share by e^±2D.
oracle::AttentionResult joined(const oracle::AttentionResult& one,
                               const oracle::AttentionResult& other) {
  oracle::AttentionResult both = other;
  both.lse_bound.resize(both.lse.size());
  const std::size_t width = both.out.size() / std::max<std::size_t>(both.lse.size(), 1);
  for (std::size_t row = 0; row < both.lse.size(); ++row) {
    const double most = std::max(one.lse[row], other.lse[row]);
    if (std::isinf(most)) continue;  // no key in either
    both.lse[row] =
        most + std::log(std::exp(one.lse[row] - most) + std::exp(other.lse[row] - most));
    for (const oracle::AttentionResult* each : {&one, &other}) {
      if (each->lse_bound.empty()) continue;
      both.lse_bound[row] = std::max(both.lse_bound[row], each->lse_bound[row]);
    }
    const double share = std::exp(one.lse[row] - both.lse[row]);
    const double growth = std::expm1(std::min(2 * both.lse_bound[row], 100.0));
    const auto mixed = [&](double a, double b) { return share * a + (1 - share) * b; };
    for (std::size_t i = row * width; i < (row + 1) * width; ++i) {
      const double apart = share * (1 - share) * std::abs(one.out[i] - other.out[i]);
      both.out[i] = mixed(one.out[i], other.out[i]);
      both.weight_rounding[i] = mixed(one.weight_rounding[i], other.weight_rounding[i]);
      both.bound[i] = mixed(one.bound[i], other.bound[i]) + growth * apart / 2;  // counts twice
    }
  }
  return both;
}

/// The truth of a call that multiplied in fp8, from that of exact queries. Each level of a cascade
/// takes exact or rounded ones on its own; the first is one request of all query tokens.
oracle::AttentionResult truth_in_fp8(const AttentionCall& call, bool cascaded,
                                     const oracle::AttentionResult& exact) {
  const oracle::Element element = element_of(call.config.dtype);
  const double scale = call.scales.empty() ? 1 : static_cast<double>(call.query_scale);
  const oracle::AttentionCase whole = oracle_case(call);
  if (!cascaded) {
    oracle::AttentionResult truth = exact;
    put_fp8_rows(call.config, whole, element, scale, truth);
    return truth;
  }
  const oracle::AttentionCase shared = level_of(whole, call.computed_prefix_len(), true);
  const oracle::AttentionCase rest = level_of(whole, call.computed_prefix_len(), false);
  oracle::AttentionResult own = oracle::attention(rest, element);
  put_fp8_rows(call.config, rest, element, scale, own);
  const bool rounded = multiplied_in_fp8(call.config, call.num_tokens());
  return joined(rounded ? oracle::attention_in_fp8(shared, element, scale)
                        : oracle::attention(shared, element),
                own);
}

/// Adds what a cascade rounds besides: each level's result, weighted with the level's share of the
/// denominator, and its LSE, which moves that share.
void bound_cascade(const AttentionCall& call, oracle::AttentionResult& truth) {
  const oracle::Element element = element_of(call.config.dtype);
  const oracle::AttentionCase whole = oracle_case(call);
  const std::size_t width = to_size(call.config.output_head_size());
  for (const bool shared : {true, false}) {
    const oracle::AttentionResult level = front_of_rows(
        oracle::attention(level_of(whole, call.computed_prefix_len(), shared), element),
        call.config.head_size, call.config.output_head_size());
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
  const bool scaled_up =
      cache == DType::kFp8E4M3 || cache == DType::kInt8 || cache == DType::kUInt4x2;
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

std::vector<std::byte> bytes_of(const std::vector<float>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

/// Judges the rows that were stored with a scale of their own, and puts what was expected in their
/// place: all other bytes are to be as they were.
Deviation take_stored_rows(const AttentionCall& call, const LogicalCache& expected,
                           LogicalCache& cache) {
  Deviation deviation;
  if (!call.config.cache_format().scales_per_row()) return deviation;
  const auto width = to_size(call.config.head_size), heads = to_size(call.config.num_kv_heads);
  const oracle::Element element = element_of(call.config.cache_dtype());
  const auto judge = [&](const std::vector<std::byte>& given, const auto codes, const auto scales) {
    const std::vector<double> values = decode_elements(call.config.dtype, given);
    for (std::size_t row = 0; row < values.size() / width; ++row) {
      const std::int64_t slot = call.slot_mapping[row / heads];
      if (slot < 0) continue;
      const std::size_t at = to_size(slot) * heads + row % heads;
      std::vector<std::uint8_t> stored;
      for (std::size_t i = at * width; i < (at + 1) * width; ++i) {
        stored.push_back(std::to_integer<std::uint8_t>((cache.*codes)[i]));
        (cache.*codes)[i] = (expected.*codes)[i];
      }
      const std::string why = oracle::why_not_stored(std::span(values).subspan(row * width, width),
                                                     {element, stored, (cache.*scales)[at]});
      (cache.*scales)[at] = (expected.*scales)[at];
      deviation.add(why.empty() ? 0 : 1, 0, 0.5);
    }
  };
  judge(call.key, &LogicalCache::key, &LogicalCache::key_scales);
  judge(call.value, &LogicalCache::value, &LogicalCache::value_scales);
  return deviation;
}

}  // namespace

Deviation judge_output(const AttentionCall& call, const AttentionOutcome& outcome,
                       const oracle::AttentionResult& one_pass) {
  oracle::AttentionResult truth = one_pass;
  const bool cascaded = std::ranges::find(outcome.launches, kCascadeRole, &LaunchReport::role) !=
                        outcome.launches.end();
  if (outcome.multiplies_fp8) truth = truth_in_fp8(call, cascaded, truth);
  if (cascaded) bound_cascade(call, truth);
  if (outcome.flushes_f16) bound_flushes(call, truth);
  Deviation deviation =
      compare(call.config.dtype, outcome.out, outcome.lse, truth, outcome.rounds_probabilities);
  if (deviation.passed() && call.config.output_fp8) {
    deviation.merge(compare_fp8(outcome.out_fp8, static_cast<double>(call.output_scale), truth,
                                outcome.rounds_probabilities));
  }
  return deviation;
}

Deviation judge_cache(const AttentionCall& call, const AttentionOutcome& outcome,
                      const LogicalCache& expected) {
  LogicalCache cache = outcome.cache;
  Deviation stored = take_stored_rows(call, expected, cache);
  stored.merge(compare_bytes(cache.key, expected.key));
  stored.merge(compare_bytes(cache.value, expected.value));
  for (const auto side : {&LogicalCache::key_scales, &LogicalCache::value_scales})
    if (!(expected.*side).empty())
      stored.merge(compare_bytes(bytes_of(cache.*side), bytes_of(expected.*side)));
  return stored;
}

oracle::AttentionResult oracle_result(const AttentionCall& call) {
  oracle::AttentionResult result =
      oracle::attention(oracle_case(call), element_of(call.config.dtype));
  if (call.config.output_head_size() == call.config.head_size) return result;
  return front_of_rows(result, call.config.head_size, call.config.output_head_size());
}

}  // namespace clattn::cli
