#include <algorithm>
#include <array>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/op_kernel.hpp"
#include "opencl/device/device_info.hpp"
#include "recurrent/bind.hpp"

namespace clattn {

namespace {

using detail::check_between, detail::check_tensor, detail::check_values, detail::RecurrentCall;
using detail::throw_invalid_if;

/// Gates of a short convolution.
struct ConvGates {
  TensorRef in = {}, out = {};
};

/// Tokens of a group: no fewer than the inputs before a token, which only the first group takes
/// from a page (kernels_cl/recurrent/causal_conv1d.cl).
constexpr std::int32_t kConvTokens = 32;

void check_conv(const RecurrentCall& call, const CausalConv1d& conv) {
  const auto name = [&](std::string_view field) { return fmt::format("{}: {}", call.name, field); };
  throw_invalid_if(conv.channels < 16 || conv.channels % 16 != 0,
                   "{}: channels is {}, legal: multiples of 16, at least 16", call.name,
                   conv.channels);
  check_between(name("width"), conv.width, 2, 8);
  throw_invalid_if(conv.activation == RecurrentActivation::kSigmoid,
                   "{}: activation is sigmoid, legal: none, silu", call.name);
  detail::check_plain_type(call, conv.weight_dtype, "weight");
  check_values(call, conv.weight, std::int64_t{conv.channels} * conv.width, conv.weight_dtype,
               "weight");
  if (conv.bias) check_values(call, conv.bias, conv.channels, conv.weight_dtype, "bias");
}

void check_conv_states(const RecurrentCall& call, const CausalConv1d& conv,
                       const StateView& states) {
  detail::check_states(call, states, std::array<std::int64_t, 2>{-1, conv.channels}, "conv_states");
  throw_invalid_if(states.tensor.dtype != conv.dtype, "{}: conv_states are {}, legal: {} (dtype)",
                   call.name, to_string(states.tensor.dtype), to_string(conv.dtype));
  throw_invalid_if(states.tensor.shape[0] < conv.width - 1,
                   "{}: conv_states have {} rows, legal: at least {} (width - 1)", call.name,
                   states.tensor.shape[0], conv.width - 1);
  throw_invalid_if(states.tensor.shape[0] > detail::kMaxInt32,
                   "{}: conv_states have {} rows, legal: up to {}", call.name,
                   states.tensor.shape[0], detail::kMaxInt32);
}

void run_conv(const RecurrentCall& call, const CausalConv1d& conv, const ConvGates* gates,
              const StateView& states, Event* event) {
  detail::begin_call(call, event);
  check_conv(call, conv);
  check_conv_states(call, conv, states);
  ClaCausalConv terms{};
  terms.x = check_tensor(call, conv.x, conv.channels, conv.dtype, "x");
  terms.out = check_tensor(call, conv.out, conv.channels, conv.dtype, "out");
  if (gates != nullptr) {
    terms.in_gate = check_tensor(call, gates->in, conv.channels, conv.dtype, "in_gate");
    terms.out_gate = check_tensor(call, gates->out, conv.channels, conv.dtype, "out_gate");
  }
  if (call.metadata.num_reqs == 0 || call.metadata.num_tokens == 0) return;
  const int vector = detail::recurrent_vector(call.context.capabilities());
  const detail::OpKernel kernel = detail::op_kernel(
      call.context, "clattn_causal_conv1d", "recurrent/causal_conv1d.cl",
      fmt::format("{} -DCLA_WIDTH={} -DCLA_TOKENS={} -DCLA_SILU={} -DCLA_HAS_BIAS={} "
                  "-DCLA_CONV_GATES={} {}",
                  detail::dtype_options(conv.dtype, conv.weight_dtype), conv.width, kConvTokens,
                  conv.activation == RecurrentActivation::kSilu ? 1 : 0, conv.bias ? 1 : 0,
                  gates != nullptr ? 1 : 0,
                  detail::vector_options(
                      call.context.capabilities(), vector,
                      std::array{terms.x.offset, terms.x.stride, terms.out.offset, terms.out.stride,
                                 terms.in_gate.offset, terms.in_gate.stride, terms.out_gate.offset,
                                 terms.out_gate.stride, states.offset, states.block_stride})));
  terms.lists = detail::bound_lists(call.metadata, states.num_blocks);
  terms.state_offset = states.offset;
  terms.state_stride = states.block_stride;
  terms.channels = conv.channels;
  terms.state_rows = static_cast<cl_int>(states.tensor.shape[0]);
  // A group of one work-item has as many channels as 64 of a larger one would.
  constexpr std::int32_t kSingleVectors = 64;
  const auto vectors =
      static_cast<std::int32_t>(kernel.group_size == 1 ? kSingleVectors : kernel.group_size);
  terms.channel_groups = detail::ceil_div(conv.channels, vectors * vector);
  const std::int64_t pieces = call.metadata.num_tokens / kConvTokens + call.metadata.num_reqs;
  detail::KernelLease lease = kernel.pool->acquire();
  lease.arg(terms);
  detail::bind_lists(lease, call.metadata);
  lease
      .args(conv.x.buffer, conv.weight, conv.bias, gates != nullptr ? gates->in.buffer : nullptr,
            gates != nullptr ? gates->out.buffer : nullptr, states.buffer, conv.out.buffer)
      .enqueue(call.queue,
               detail::checked_mul(detail::to_size(pieces), detail::to_size(terms.channel_groups),
                                   call.name),
               kernel.group_size, event);
}

}  // namespace

void causal_conv1d_fn(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                      const StateView& states, const RecurrentMetadata& metadata, Event* event) {
  run_conv({context, queue, "causal_conv1d_fn", metadata}, conv, nullptr, states, event);
}

void causal_conv1d_update(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                          const StateView& states, const RecurrentMetadata& metadata,
                          Event* event) {
  run_conv({context, queue, "causal_conv1d_update", metadata}, conv, nullptr, states, event);
}

void short_conv(const Context& context, cl_command_queue queue, const CausalConv1d& conv,
                TensorRef in_gate, TensorRef out_gate, const StateView& states,
                const RecurrentMetadata& metadata, Event* event) {
  const ConvGates gates{in_gate, out_gate};
  run_conv({context, queue, "short_conv", metadata}, conv, &gates, states, event);
}

}  // namespace clattn
