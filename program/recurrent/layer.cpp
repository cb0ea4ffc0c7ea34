#include "program/recurrent/layer.hpp"

#include <cmath>
#include <utility>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {

DeltaNetLayer::DeltaNetLayer(const Context& context, const Queue& queue, const DeltaNet& net,
                             DType dtype)
    : net_(net), dtype_(dtype) {
  std::uint32_t seed = 11;
  const auto make = [&](Parameter& parameter, DType type, std::int64_t count, double size,
                        double mean) {
    const std::vector<std::byte> bytes = random_elements(type, to_size(count), seed++, size, mean);
    parameter = {upload(context, queue, bytes), decode_elements(type, bytes)};
  };
  make(conv_, dtype, net.channels() * net.conv_width, 0.5, 0);
  // Decays of a token from 0.5 to 1, as trained models have them.
  make(a_log_, DType::kF32, net.num_v_heads, 0.5, 0);
  make(dt_bias_, DType::kF32, net.num_v_heads, 1, -3);
  make(norm_, dtype, net.head_v_dim, 0.2, 1);
}

CausalConv1d DeltaNetLayer::conv(TensorRef x, cl_mem mixed) const {
  return {.x = x,
          .out = {mixed},
          .weight = conv_.buffer,
          .channels = static_cast<std::int32_t>(net_.channels()),
          .width = net_.conv_width,
          .dtype = dtype_,
          .weight_dtype = dtype_};
}

GatedDeltaRule DeltaNetLayer::rule(cl_mem mixed, TensorRef gates, cl_mem out) const {
  const std::int64_t stride = net_.channels(), heads = net_.num_v_heads;
  return {.query = {mixed, 0, stride},
          .key = {mixed, net_.keys(), stride},
          .value = {mixed, 2 * net_.keys(), stride},
          .out = {out},
          .a = {gates.buffer, gates.offset, 2 * heads},
          .b = {gates.buffer, gates.offset + heads, 2 * heads},
          .A_log = a_log_.buffer,
          .dt_bias = dt_bias_.buffer,
          .num_k_heads = net_.num_k_heads,
          .num_v_heads = net_.num_v_heads,
          .head_k_dim = net_.head_k_dim,
          .head_v_dim = net_.head_v_dim,
          .dtype = dtype_,
          .gate_dtype = dtype_,
          .kernel_family = net_.kernel_family};
}

RmsNormGated DeltaNetLayer::norm(cl_mem out, TensorRef z, cl_mem normed,
                                 std::int64_t tokens) const {
  return {.x = {out},
          .z = z,
          .out = {normed},
          .weight = norm_.buffer,
          .num_tokens = tokens,
          .num_heads = net_.num_v_heads,
          .width = net_.head_v_dim,
          .dtype = dtype_,
          .weight_dtype = dtype_};
}

oracle::CausalConvCase DeltaNetLayer::conv_case(std::int64_t first, std::int32_t count) const {
  oracle::CausalConvCase call;
  call.channels = count;
  call.width = net_.conv_width;
  call.state_rows = net_.conv_width - 1;
  const auto from = conv_.values.begin() + first * net_.conv_width;
  call.weight.assign(from, from + std::int64_t{count} * net_.conv_width);
  return call;
}

oracle::DeltaRuleCase DeltaNetLayer::rule_case(const HeadRows& rows, std::int32_t tokens,
                                               bool continues, const Inputs& inputs) const {
  const std::int32_t heads = heads_per_key(), k_dim = net_.head_k_dim;
  oracle::DeltaRuleCase call;
  call.requests = one_request(tokens, continues);
  call.num_k_heads = 1;
  call.num_v_heads = heads;
  call.head_k_dim = k_dim;
  call.head_v_dim = rows.count;
  call.scale = 1 / std::sqrt(static_cast<float>(k_dim));
  const std::int64_t query = std::int64_t{rows.key_head} * k_dim;
  call.query = inputs.mixed(query, k_dim);
  call.key = inputs.mixed(net_.keys() + query, k_dim);
  std::vector<std::vector<double>> values;
  values.reserve(to_size(heads));
  for (std::int32_t i = 0; i < heads; ++i)
    values.push_back(inputs.mixed(2 * net_.keys() + first_element(rows, i), rows.count));
  for (std::int32_t t = 0; t < tokens; ++t) {
    for (std::int32_t i = 0; i < heads; ++i) {
      const auto from = values[to_size(i)].begin() + std::int64_t{t} * rows.count;
      call.value.insert(call.value.end(), from, from + rows.count);
      const std::int32_t head = rows.key_head * heads + i;
      call.g.push_back(oracle::delta_rule_decay(inputs.gates(t, head), a_log_.values[to_size(head)],
                                                dt_bias_.values[to_size(head)]));
      call.beta.push_back(oracle::sigmoid(inputs.gates(t, net_.num_v_heads + head)));
    }
  }
  call.states.resize(to_size(std::int64_t{heads} * rows.count * k_dim));
  return call;
}

double DeltaNetLayer::chunk_rounding(const Context& context) const {
  if (!net_.in_chunks || !rounds_products(context, rule(nullptr, {}, nullptr))) return 0;
  return oracle::half_ulp(element_of(dtype_), 1);
}

oracle::GatedNormCase DeltaNetLayer::norm_case(std::vector<double> x, std::vector<double> z) const {
  return {.width = net_.head_v_dim, .x = std::move(x), .z = std::move(z), .weight = norm_.values};
}

Deviation compare(const oracle::JudgedTensor& truth, std::span<const double> values,
                  double sigmas) {
  Deviation deviation;
  if (values.size() != truth.exact.size()) return deviation;
  for (std::size_t i = 0; i < values.size(); ++i)
    deviation.add(values[i], truth.exact[i], sigmas * truth.sigma[i] + truth.floor[i]);
  return deviation;
}

oracle::RecurrentRequests one_request(std::int32_t tokens, bool continues) {
  oracle::RecurrentRequests requests;
  requests.query_start_loc = {0, tokens};
  requests.slots = {0};
  requests.has_initial_state = {static_cast<std::uint8_t>(continues ? 1 : 0)};
  return requests;
}

}  // namespace clattn::cli
