#pragma once

#include <clattn/attention_config.hpp>
#include <cstddef>
#include <span>

#include "oracle/oracle.hpp"

namespace clattn::cli {

/// How far outputs are from the truth, in total and relative to what is allowed.
struct Deviation {
  double max_error = 0;    ///< largest |got - truth|
  double allowance = 0;    ///< what was allowed there
  double worst_share = 0;  ///< largest |got - truth| / allowed; above 1 fails; infinite for NaN
  std::size_t compared = 0;

  bool passed() const { return compared > 0 && worst_share <= 1; }
  void add(double got, double truth, double allowed);
  void merge(const Deviation& other);
};

/// Compares an output and (unless empty) its LSE with the oracle: |got - truth| <= 2 * bound +
/// floor, with what rounding weights costs if a kernel did so.
Deviation compare(DType dtype, std::span<const std::byte> out, std::span<const float> lse,
                  const oracle::AttentionResult& truth, bool rounds_probabilities = false);

/// The same for an output that was also stored as fp8 e4m3 of itself / `scale`: half a step of that
/// type more is allowed.
Deviation compare_fp8(std::span<const std::byte> out, double scale,
                      const oracle::AttentionResult& truth, bool rounds_probabilities);

/// Whether a call with launches that multiply in fp8 (LaunchRecord::multiplies_fp8) does so for a
/// request of `query_len` query tokens: few rows of a KV head go to kernels that decode.
bool multiplied_in_fp8(const AttentionConfig& config, std::int64_t query_len);

/// Replaces, in the truth of a call, the rows of such requests by the results for queries rounded
/// by their scale (AttentionConfig::fp8_products). Values have as many elements as queries.
void put_fp8_rows(const AttentionConfig& config, const oracle::AttentionCase& call,
                  oracle::Element element, double query_scale, oracle::AttentionResult& truth);

/// Query heads [first, first + count).
struct HeadRange {
  std::int64_t first = 0, count = 0;
};

/// Leaves the sides of a window where random values also say it in short.
void say_window_once(AttentionConfig& config);

/// The sides of a layer's window. Said apart from the library, which is judged by it.
void put_window(const AttentionConfig& config, oracle::AttentionCase& call);

/// What a configuration does to the logits of these heads.
void put_logit_options(const AttentionConfig& config, HeadRange heads, oracle::AttentionCase& call);

/// One query token over `num_keys` keys of one KV head, up to itself, as a batch of its own: these
/// heads of it. Queries, keys and values are still to come.
oracle::AttentionCase row_case(const AttentionConfig& config, std::int32_t num_keys,
                               HeadRange heads);

/// The first `kept` of every `width` elements of a result: what latent attention gives out.
oracle::AttentionResult front_of_rows(const oracle::AttentionResult& all, std::int32_t width,
                                      std::int32_t kept);

/// Exact comparison: every differing byte is an error of 1 where less than 1 is allowed.
Deviation compare_bytes(std::span<const std::byte> got, std::span<const std::byte> expected);

}  // namespace clattn::cli
