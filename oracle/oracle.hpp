#pragma once

#include <cstdint>
#include <vector>

/// The double-precision truth that every kernel is judged by: plain loops over logical arrays.
/// Shares no code with the library; not even its element conversions.
namespace oracle {

/// Behind bf16 are the codes of caches, of 8 bits, then 0 … 15 of 4, each in a byte: they saturate,
/// infinities too.
enum class Element : std::uint8_t { kF32, kF16, kBF16, kFp8E4M3, kFp8E5M2, kInt8, kUInt4 };

/// Which keys the queries of one request see: all, those up to their own position, or, of a canvas,
/// all from where the window of its first query begins.
enum class Looks : std::uint8_t { kBothWays, kBack, kCanvas };

/// How the window cuts what the queries of a span see of it.
enum class SpanCut : std::uint8_t { kNone, kLeft, kBoth };

/// Positions first ... end - 1 of a request, whose queries see one another.
struct Span {
  std::int32_t request = 0, first = 0, end = 0;
};

/// One attention call over a paged cache, all values already widened to double from their stored
/// (rounded) form.
struct AttentionCase {
  std::int32_t num_heads = 0, num_kv_heads = 0, head_size = 0, block_size = 0;
  double scale = 1.0;
  bool causal = true;
  std::vector<std::int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<std::int32_t> seq_lens;         // [num_reqs]
  std::vector<std::int32_t> block_table;      // [num_reqs, max_blocks]
  std::int64_t max_blocks = 0;
  // Logit options; the defaults are none. Order: scale, soft cap, ALiBi, masks, sink.
  double soft_cap = 0;
  std::int32_t window_left = -1, window_right = -1;  // reach in tokens, -1 = unbounded
  std::int32_t chunk = 0;                            // a query sees its own aligned chunk only
  std::int32_t chunk_lookback = 0;                   // and this many before it
  std::vector<double> alibi_slopes;                  // [num_heads]
  std::vector<double> sinks;                         // [num_heads]
  std::vector<Looks> looks;                          // [num_reqs]; none = `causal` for all
  std::vector<Span> spans;
  SpanCut span_cut = SpanCut::kNone;
  // Trees: the newest tokens of request r, as many as it has parents, see what leads to them: the
  // keys before them all and the nodes from theirs up to the root, whose parent is -1.
  std::vector<std::vector<std::int32_t>> tree_parents;  // [num_reqs][nodes]; empty = none
  std::vector<std::int32_t> first_keys;   // [num_reqs], no query sees earlier ones; empty = 0
  std::vector<std::int32_t> keep_keys;    // [num_reqs], so many are seen beyond window and chunks
  std::vector<std::uint8_t> custom_mask;  // [tokens, custom_mask_stride], 1 = may attend
  std::int64_t custom_mask_stride = 0;
  // block_size 0: request r's keys are the rows key_start_loc[r] … of key_cache and value_cache.
  std::vector<std::int32_t> key_start_loc;

  std::vector<double> query;        // [tokens, num_heads, head_size]
  std::vector<double> key_cache;    // [num_blocks, block_size, num_kv_heads, head_size]
  std::vector<double> value_cache;  // same
};

/// Whether query token `token` of the batch, which is one of `request`, sees the key that is stored
/// at `position` of that request.
bool sees(const AttentionCase& call, std::int32_t request, std::int32_t token,
          std::int32_t position);

struct AttentionResult {
  std::vector<double> out;  // [tokens, num_heads, head_size]
  std::vector<double> lse;  // [tokens, num_heads], natural log; -inf where no key is seen (out = 0)
  std::vector<double> bound;            // [tokens, num_heads, head_size]: see attention()
  std::vector<double> weight_rounding;  // the same shape
  std::vector<double> lse_bound;        // [tokens, num_heads], beside any floor; empty = 0
  /// What a kernel may be off by at element i, twice the bound; matrix units round their weights.
  double allowed(std::size_t i, bool rounds_probabilities) const {
    return 2 * (bound[i] + (rounds_probabilities ? weight_rounding[i] : 0));
  }
  /// For a kernel that rounds its weights, once: the bound includes it from now on.
  void add_weight_rounding() {
    for (std::size_t i = 0; i < bound.size(); ++i) bound[i] += weight_rounding[i];
  }
};

/// `bound` is the error that the same maths would be allowed if each input-precision rounding
/// happened once: the absolute difference between the exact result and one computed from
/// probabilities and result rounded to `element`, plus an f32 summation floor. A kernel passes when
/// |kernel - out| <= 2 * bound + floor (FlashAttention's rule). One sample of that rounding says
/// little about another: a kernel that does round its weights to `element` before they meet V gets
/// `weight_rounding` on top, two standard deviations of independent errors that are uniform within
/// half a unit in the last place, at most u * weight: 2 u / sqrt(3) * |weights * values|.
AttentionResult attention(const AttentionCase& call, Element element);

/// Below which size products take an element as 0.
struct FlushLimits {
  double query = 0, weight = 0;    ///< weight: of a key, where the row's largest has 1
  std::vector<double> key, value;  // [num_kv_heads], of real values
};
struct FlushBound {
  std::vector<double> out;  // [tokens, num_heads, head_size]
  std::vector<double> lse;  // [tokens, num_heads]
};
/// How far such products may move exact results. The logit of key j lacks the products with a small
/// factor, at most D_j = scale * sum |q k|, and D is the largest D_j. So the LSE moves by at most
/// D, and with out = sum w v / sum w the result by
///
///     e^D sum w / sum w (e^D_j - 1) |v - out|     weights that are e^±D_j as large
///   + e^2D sum w / sum w |v|                      over the small values, and weights below
///                                                 e^2D times their limit
FlushBound flush_bound(const AttentionCase& call, const FlushLimits& limits);

/// The bound of products of e4m3 by a unit that keeps little of a sum (kernels_cl/tile/
/// sm90_fp8.clh), for a call whose queries are rounded to e4m3 already. A product sums 32 elements
/// and what it adds them to: of each of these 33 it loses less than u = 2^-13 of the largest, and
/// of the result less than u once more. So with L the largest of a logit's products and sums of
/// 32, 64 ... of them, all times scale, it is off by D_j <= 34 u D / 32 L_j, D the head size.
/// Weights, in relation to the row's largest: e_j = max(w_j / 16, 2^-14) is lost by rounding, half
/// a unit of e4m3 in the last place and its smallest number's half. The errors of an output
/// element, of sizes E, are taken for chance but for what makes them alike: all of one sign, or all
/// making smaller what they are of. So besides their sum, chance(E) is a bound, |sum E| + |sum of E
/// toward 0| + 6 sqrt(sum E^2), which by Hoeffding's inequality one of 3e7 results exceeds; of
/// roundings its last term alone. Without it zeros would pass for the mean of thousands of values
/// of both signs. With out = sum w v / sum w and least(E) = min(sum |E|, chance(E)):
///
///     least(w (e^D_j - 1) (v - out)) e^D / sum w      logits; D, the largest D_j, moves the LSE
///   + min(sum e |v|, 6 sqrt(sum (e v)^2)) e^2D / sum w
///   + least(4 * 34 u L_t) e^2D / sum w                the four steps of each tile t of 128 keys,
///                                                     whose sum is f32's
///
/// L_t is the largest sum of neighbouring w v among 256 keys, since the plan says where tiles
/// begin, and 6 sqrt(2 sum (e v)^2) for their rounding.
FlushBound fp8_bound(const AttentionCase& call);
/// attention() of queries rounded to e4m3 times query_scale, its bounds with those of fp8_bound().
AttentionResult attention_in_fp8(AttentionCase call, Element element, double query_scale);

/// Rounds to the element type (nearest even) and widens again; NaN stays NaN (int8: 0), f16
/// overflows to infinity, the 8-bit types saturate (e4m3 at 448, e5m2 at 57344, int8 at 127).
double round_to(Element element, double value);
/// The largest error of rounding to the element type at a value of this size.
double half_ulp(Element element, double value);
/// Bit pattern of a value in the element type, in the low bits; and back.
std::uint32_t encode(Element element, double value);
double decode(Element element, std::uint32_t bits);

}  // namespace oracle
