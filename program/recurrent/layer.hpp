#pragma once

#include <clattn/recurrent.hpp>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "oracle/recurrent.hpp"
#include "program/common/verify.hpp"
#include "program/recurrent/delta_net.hpp"

namespace clattn::cli {

/// The parameters of a gated delta net, on the device and as the oracle takes them.
class DeltaNetLayer {
 public:
  DeltaNetLayer(const Context& context, const Queue& queue, const DeltaNet& net, DType dtype);

  /// The layer's operations over rows without gaps: x, mixed [tokens, channels]; gates [tokens,
  /// a of all value heads, then b]; out, z, normed [tokens, values].
  ///@{
  CausalConv1d conv(TensorRef x, cl_mem mixed) const;
  GatedDeltaRule rule(cl_mem mixed, TensorRef gates, cl_mem out) const;
  RmsNormGated norm(cl_mem out, TensorRef z, cl_mem normed, std::int64_t tokens) const;
  ///@}

  /// The convolution of `count` channels from `first` on; x, requests and states are to come.
  oracle::CausalConvCase conv_case(std::int64_t first, std::int32_t count) const;

  /// Rows of the states of the value heads on a key head, each of which gives an element of out.
  struct HeadRows {
    std::int32_t key_head = 0, first = 0, count = 0;
  };
  std::int32_t heads_per_key() const { return net_.num_v_heads / net_.num_k_heads; }
  /// Where value head `i` of a key head has the first of its rows in a token's out.
  std::int64_t first_element(const HeadRows& rows, std::int32_t i) const {
    return (std::int64_t{rows.key_head} * heads_per_key() + i) * net_.head_v_dim + rows.first;
  }
  /// What the rule's tensors hold of a request's first tokens.
  struct Inputs {
    /// [tokens, count] of a convolution's channels.
    std::function<std::vector<double>(std::int64_t first, std::int32_t count)> mixed;
    std::function<double(std::int32_t token, std::int64_t element)> gates;
  };
  /// One request's first tokens as a call of its own, of these rows of these heads. States are to
  /// come if it continues one.
  oracle::DeltaRuleCase rule_case(const HeadRows& rows, std::int32_t tokens, bool continues,
                                  const Inputs& inputs) const;
  /// By how much chunks round the operands of their products, relative; 0 in f32.
  double chunk_rounding(const Context& context) const;
  /// The norm of heads' outputs.
  oracle::GatedNormCase norm_case(std::vector<double> x, std::vector<double> z) const;

  const DeltaNet& net() const { return net_; }
  DType dtype() const { return dtype_; }

 private:
  struct Parameter {
    Buffer buffer;
    std::vector<double> values;
  };
  DeltaNet net_;
  DType dtype_;
  Parameter conv_, a_log_, dt_bias_, norm_;
};

/// Compares numbers of a recurrent layer with their truth.
Deviation compare(const oracle::JudgedTensor& truth, std::span<const double> values, double sigmas);

/// Lists of a request that has all of its page, for the oracle.
oracle::RecurrentRequests one_request(std::int32_t tokens, bool continues);

}  // namespace clattn::cli
