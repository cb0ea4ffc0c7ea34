#include <algorithm>
#include <array>
#include <bit>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kv_cache/op_kernel.hpp"
#include "recurrent/bind.hpp"

namespace clattn {

namespace {

using detail::throw_invalid_if;

void check_norm(const RmsNormGated& norm) {
  detail::check_between("rms_norm_gated: num_tokens", norm.num_tokens, 0, detail::kMaxInt32);
  detail::check_at_least("rms_norm_gated: num_heads", norm.num_heads, 1);
  throw_invalid_if(norm.width < 8 || norm.width % 8 != 0,
                   "rms_norm_gated: width is {}, legal: multiples of 8, at least 8", norm.width);
  throw_invalid_if(!(norm.eps >= 0), "rms_norm_gated: eps is {}, legal: >= 0", norm.eps);
  throw_invalid_if(norm.activation == RecurrentActivation::kNone,
                   "rms_norm_gated: activation is none, legal: silu, sigmoid; without a gate z has "
                   "no buffer");
}

}  // namespace

void rms_norm_gated(const Context& context, cl_command_queue queue, const RmsNormGated& norm,
                    Event* event) {
  if (event != nullptr) event->reset();
  check_norm(norm);
  RecurrentMetadata rows;
  rows.num_tokens = norm.num_tokens;
  const detail::RecurrentCall call{context, queue, "rms_norm_gated", rows};
  const std::int64_t row = std::int64_t{norm.num_heads} * norm.width;
  const bool gate = norm.z.buffer != nullptr;
  ClaGatedNorm terms{};
  terms.x = detail::check_tensor(call, norm.x, row, norm.dtype, "x");
  terms.out = detail::check_tensor(call, norm.out, row, norm.dtype, "out");
  if (gate) terms.z = detail::check_tensor(call, norm.z, row, norm.dtype, "z");
  detail::check_plain_type(call, norm.weight_dtype, "weight");
  detail::check_values(call, norm.weight, norm.width, norm.weight_dtype, "weight");
  if (norm.num_tokens == 0) return;
  terms.num_rows = norm.num_tokens * norm.num_heads;
  terms.eps = norm.eps;
  terms.rows_per_token = norm.num_heads;
  terms.width = norm.width;
  const int most = detail::recurrent_vector(context.capabilities());
  const int vector = norm.width % most == 0 ? most : 8;
  const auto group = static_cast<std::uint32_t>(cache_op_work_group_size(context.capabilities()));
  std::uint32_t lanes =
      std::bit_floor(std::min(group, static_cast<std::uint32_t>(norm.width / vector)));
  while (group % lanes != 0) lanes /= 2;
  const int activation = norm.activation == RecurrentActivation::kSilu ? 1 : 2;
  const detail::OpKernel kernel = detail::op_kernel(
      context, "clattn_rms_norm_gated", "recurrent/rms_norm_gated.cl",
      fmt::format(
          "{} -DCLA_GATE={} -DCLA_GATE_FIRST={} -DCLA_LANES={} {}",
          detail::dtype_options(norm.dtype, norm.weight_dtype), gate ? activation : 0,
          gate && !norm.norm_before_gate ? 1 : 0, lanes,
          detail::vector_options(context.capabilities(), vector,
                                 std::array{terms.x.offset, terms.x.stride, terms.out.offset,
                                            terms.out.stride, terms.z.offset, terms.z.stride})));
  const std::int64_t groups = detail::ceil_div(terms.num_rows, std::int64_t{group / lanes});
  kernel.pool->acquire()
      .args(terms, norm.x.buffer, norm.z.buffer, norm.weight, norm.out.buffer)
      .enqueue(queue, detail::to_size(groups), kernel.group_size, event);
}

}  // namespace clattn
