#pragma once

#include <cstdint>
#include <vector>

#include "oracle/oracle.hpp"

/// The double-precision truth of recurrent layers: token by token, from their equations. All
/// numbers are given as they are stored, widened to double.
namespace oracle {

/// Where requests find their states. Padding and requests without a slot have negative ones.
struct RecurrentRequests {
  std::vector<std::int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<std::int32_t> slots;            // [num_reqs, columns]
  std::int32_t columns = 1;
  std::vector<std::uint8_t> has_initial_state;  // [num_reqs]
  /// [num_reqs], 1 ... columns of a request with drafts: it reads the slot of column accepted - 1
  /// and stores the state after its token i to column i. Negative: it has none, reads and writes
  /// column 0. Empty: no request has drafts.
  std::vector<std::int32_t> num_accepted_tokens;
  std::int32_t num_requests() const {
    return static_cast<std::int32_t>(query_start_loc.size()) - 1;
  }
  std::int32_t tokens_of(std::int32_t request) const;
  bool drafts(std::int32_t request) const;
  /// The slot that the request's state comes from and whose index is read, whether or not it has an
  /// initial state.
  std::int32_t slot_read(std::int32_t request) const;
  /// The slot that gets the state after the request's token i; negative: none.
  std::int32_t slot_written(std::int32_t request, std::int32_t token) const;
};

/// S <- S decay; d = beta (v - S k) or, additive, v; S <- S + d k^T; o = scale S q, with value head
/// h on key head h / (num_v_heads / num_k_heads).
struct DeltaRuleCase {
  RecurrentRequests requests;
  std::int32_t num_k_heads = 0, num_v_heads = 0, head_k_dim = 0, head_v_dim = 0;
  bool l2_norm = true;            // k and q are x / sqrt(sum x^2 + 1e-6)
  bool additive = false;          // no beta, no prediction
  bool decay_by_channel = false;  // g: [tokens, num_v_heads, head_k_dim]
  double scale = 1.0;
  std::vector<double> query, key;  // [tokens, num_k_heads, head_k_dim]
  std::vector<double> value;       // [tokens, num_v_heads, head_v_dim]
  std::vector<double> g;           // [tokens, num_v_heads]: the logarithm of the decay
  std::vector<double> beta;        // [tokens, num_v_heads]
  std::vector<double> states;      // [slots, num_v_heads, head_v_dim, head_k_dim]
};

/// What a kernel rounds: half a unit in the last place, relative.
struct RecurrentRounding {
  Element out = Element::kF32;
  Element state = Element::kF32;
  double products = 0;  // of operands of the large products: 2^-8 bf16, 2^-11 f16, 0 in f32
};

/// A tensor, its truth and what a result may be off by: the standard deviation of its rounding
/// errors, and a floor below which an error proves nothing: infinite where any number is right.
struct JudgedTensor {
  std::vector<double> exact, sigma, floor;
};
struct DeltaRuleResult {
  JudgedTensor out;
  JudgedTensor states;                // of pages that are not written: as given, 0, 0
  std::vector<std::uint8_t> written;  // [slots]
};
/// Errors obey the recurrence of the states, whose norm is at most the decay, so a variance for
/// each row of a state follows from that of each token's roundings.
DeltaRuleResult delta_rule(const DeltaRuleCase& call, const RecurrentRounding& rounding);

/// Gates of raw projections: beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias), or with a
/// lower bound g = bound sigmoid(exp(A_log) (a + dt_bias)).
double sigmoid(double x);
double softplus(double x);
double delta_rule_decay(double a, double a_log, double dt_bias);
double bounded_decay(double a, double a_log, double dt_bias, double lower_bound);

/// The largest error in units of what is allowed (`sigmas` sigma + floor), and its root mean square
/// in units of sigma + floor / sigmas; the second is allowed to be 1.5. NaN and infinity count as
/// infinite unless the truth is the same.
struct Verdict {
  double worst = 0, rms = 0;
  std::size_t at = 0;
};
inline constexpr double kOutSigmas = 12, kStateSigmas = 20;
Verdict judge(const JudgedTensor& tensor, const std::vector<double>& values, double sigmas);

/// y_t = act(bias + sum_j w[j] x_{t - W + 1 + j}), a channel by itself. What came before a
/// request's first token are rows of its page; of a request with drafts from row accepted - 1 on.
struct CausalConvCase {
  RecurrentRequests requests;
  std::int32_t channels = 0, width = 0, state_rows = 0;
  bool silu = true;
  std::vector<double> x;       // [tokens, channels]
  std::vector<double> weight;  // [channels, width]
  std::vector<double> bias;    // [channels]; empty = 0
  std::vector<double> states;  // [slots, state_rows, channels]
};
struct CausalConvResult {
  JudgedTensor out;            // allowed: `floor`; sigma is 0
  std::vector<double> states;  // exact copies
};
CausalConvResult causal_conv(const CausalConvCase& call, Element out);

/// norm(x) = x / sqrt(mean x^2 + eps) over a row; norm(x) weight act(z), or with the gate before
/// the norm norm(x act(z)) weight.
struct GatedNormCase {
  std::int32_t width = 0;
  double eps = 1e-6;
  bool sigmoid_gate = false;  // else silu
  bool norm_before_gate = true;
  std::vector<double> x, z;    // [rows, width]; no z: no gate
  std::vector<double> weight;  // [width]
};
JudgedTensor gated_norm(const GatedNormCase& call, Element out);

}  // namespace oracle
