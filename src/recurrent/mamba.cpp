#include <array>
#include <cmath>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "recurrent/delta_rule.hpp"

namespace clattn {

namespace {

using detail::bind_tensor, detail::check_values, detail::DeltaRuleCall, detail::RecurrentCall;

void mamba2(const RecurrentCall& call, const SelectiveStateUpdate& given, const StateView& states,
            bool in_chunks, Event* event) {
  detail::begin_call(call, event);
  DeltaRuleCall rule;
  rule.gates = detail::GateSource::kStep;
  rule.rule = RecurrentRule::kAdditive;
  rule.dtype = rule.gate_dtype = given.dtype;
  rule.num_k_heads = given.n_groups;
  rule.num_v_heads = given.num_heads;
  rule.head_k_dim = given.state_size;
  rule.head_v_dim = given.head_dim;
  rule.softplus = given.dt_softplus;
  rule.in_chunks = in_chunks;
  detail::check_heads(call, rule);
  const std::int64_t values = std::int64_t{given.num_heads} * given.head_dim;
  const std::int64_t keys = std::int64_t{given.n_groups} * given.state_size;
  rule.query = bind_tensor(call, given.C, keys, given.dtype, "C", rule.terms.query);
  rule.key = bind_tensor(call, given.B, keys, given.dtype, "B", rule.terms.key);
  rule.value = bind_tensor(call, given.x, values, given.dtype, "x", rule.terms.value);
  rule.out = bind_tensor(call, given.out, values, given.dtype, "out", rule.terms.out);
  rule.decay = bind_tensor(call, given.dt, given.num_heads, given.dtype, "dt", rule.terms.decay);
  if (given.z.buffer != nullptr)
    rule.z = bind_tensor(call, given.z, values, given.dtype, "z", rule.terms.z);
  check_values(call, given.A, given.num_heads, DType::kF32, "A");
  if (given.D) check_values(call, given.D, given.num_heads, DType::kF32, "D");
  if (given.dt_bias) check_values(call, given.dt_bias, given.num_heads, DType::kF32, "dt_bias");
  rule.a_log = given.A;
  rule.d = given.D;
  rule.dt_bias = given.dt_bias;
  detail::throw_invalid_if(!(given.dt_min <= given.dt_max),
                           "{}: dt_min is {}, legal: at most dt_max, {}", call.name, given.dt_min,
                           given.dt_max);
  rule.terms.dt_min = given.dt_min;
  rule.terms.dt_max = given.dt_max;
  rule.terms.scale = 1;
  detail::run_delta_rule(call, rule, states, event);
}

}  // namespace

void selective_state_update(const Context& context, cl_command_queue queue,
                            const SelectiveStateUpdate& update, const StateView& states,
                            const RecurrentMetadata& metadata, Event* event) {
  mamba2({context, queue, "selective_state_update", metadata}, update, states, false, event);
}

void mamba_chunk_scan_combined(const Context& context, cl_command_queue queue,
                               const SelectiveStateUpdate& update, const StateView& states,
                               const RecurrentMetadata& metadata, Event* event) {
  mamba2({context, queue, "mamba_chunk_scan_combined", metadata}, update, states, true, event);
}

void lightning_attention(const Context& context, cl_command_queue queue,
                         const LightningAttention& attention, const StateView& states,
                         const RecurrentMetadata& metadata, Event* event) {
  const RecurrentCall call{context, queue, "lightning_attention", metadata};
  detail::begin_call(call, event);
  DeltaRuleCall rule;
  rule.gates = detail::GateSource::kConstant;
  rule.rule = RecurrentRule::kAdditive;
  rule.dtype = attention.dtype;
  rule.num_k_heads = rule.num_v_heads = attention.num_heads;
  rule.head_k_dim = rule.head_v_dim = attention.head_size;
  rule.in_chunks = true;
  detail::check_heads(call, rule);
  const std::int64_t width = std::int64_t{attention.num_heads} * attention.head_size;
  rule.query =
      bind_tensor(call, attention.query, width, attention.dtype, "query", rule.terms.query);
  rule.key = bind_tensor(call, attention.key, width, attention.dtype, "key", rule.terms.key);
  rule.value =
      bind_tensor(call, attention.value, width, attention.dtype, "value", rule.terms.value);
  rule.out = bind_tensor(call, attention.out, width, attention.dtype, "out", rule.terms.out);
  check_values(call, attention.log_decay, attention.num_heads, DType::kF32, "log_decay");
  rule.a_log = attention.log_decay;
  detail::throw_invalid_if(!std::isfinite(attention.scale),
                           "lightning_attention: scale is {}, legal: finite numbers",
                           attention.scale);
  rule.terms.scale = attention.scale;
  detail::run_delta_rule(call, rule, states, event);
}

}  // namespace clattn
