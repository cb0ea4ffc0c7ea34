#include <array>
#include <clattn/recurrent.hpp>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using Sizes = std::initializer_list<std::pair<std::string_view, std::int64_t>>;

void check_sizes(std::string_view name, const Sizes& sizes) {
  for (const auto& [field, size] : sizes)
    detail::check_at_least(fmt::format("{}: {}", name, field), size, 1);
}

std::int64_t conv_rows(std::string_view name, std::int32_t width, std::int32_t num_spec) {
  detail::check_at_least(fmt::format("{}: conv_width", name), width, 2);
  detail::check_at_least(fmt::format("{}: num_spec", name), num_spec, 0);
  return std::int64_t{width} - 1 + num_spec;
}

template <typename Value, std::size_t kCount>
Value parse_name(std::string_view what, std::string_view name,
                 const std::array<std::pair<std::string_view, Value>, kCount>& names,
                 std::string_view legal) {
  for (const auto& [known, value] : names)
    if (known == name) return value;
  detail::throw_invalid("{}: {}, legal: {}", what, name, legal);
}

}  // namespace

std::vector<StateTensor> gated_delta_net_state_shape(std::int32_t num_k_heads,
                                                     std::int32_t num_v_heads,
                                                     std::int32_t head_k_dim,
                                                     std::int32_t head_v_dim,
                                                     std::int32_t conv_width, std::int32_t num_spec,
                                                     DType conv_dtype, DType state_dtype) {
  constexpr std::string_view kName = "gated_delta_net_state_shape";
  check_sizes(kName, {{"num_k_heads", num_k_heads},
                      {"num_v_heads", num_v_heads},
                      {"head_k_dim", head_k_dim},
                      {"head_v_dim", head_v_dim}});
  const std::int64_t keys = std::int64_t{num_k_heads} * head_k_dim;
  const std::int64_t values = std::int64_t{num_v_heads} * head_v_dim;
  const std::int64_t channels =
      detail::checked_add(detail::checked_mul(std::int64_t{2}, keys, kName), values, kName);
  return {{{conv_rows(kName, conv_width, num_spec), channels}, conv_dtype},
          {{num_v_heads, head_v_dim, head_k_dim}, state_dtype}};
}

std::vector<StateTensor> mamba2_state_shape(std::int32_t num_heads, std::int32_t head_dim,
                                            std::int32_t n_groups, std::int32_t state_size,
                                            std::int32_t conv_width, std::int32_t num_spec,
                                            DType conv_dtype, DType state_dtype) {
  constexpr std::string_view kName = "mamba2_state_shape";
  check_sizes(kName, {{"num_heads", num_heads},
                      {"head_dim", head_dim},
                      {"n_groups", n_groups},
                      {"state_size", state_size}});
  const std::int64_t channels = detail::checked_add(
      std::int64_t{num_heads} * head_dim,
      detail::checked_mul(std::int64_t{2}, std::int64_t{n_groups} * state_size, kName), kName);
  return {{{conv_rows(kName, conv_width, num_spec), channels}, conv_dtype},
          {{num_heads, head_dim, state_size}, state_dtype}};
}

std::vector<StateTensor> short_conv_state_shape(std::int32_t channels, std::int32_t conv_width,
                                                DType conv_dtype) {
  constexpr std::string_view kName = "short_conv_state_shape";
  check_sizes(kName, {{"channels", channels}});
  return {{{conv_rows(kName, conv_width, 0), channels}, conv_dtype}};
}

std::string_view to_string(RecurrentActivation activation) {
  switch (activation) {
    case RecurrentActivation::kNone:
      return "none";
    case RecurrentActivation::kSilu:
      return "silu";
    case RecurrentActivation::kSigmoid:
      break;
  }
  return "sigmoid";
}

RecurrentActivation parse_recurrent_activation(std::string_view name) {
  using Named = std::pair<std::string_view, RecurrentActivation>;
  constexpr std::array kNames = {
      Named{"none", RecurrentActivation::kNone}, Named{"silu", RecurrentActivation::kSilu},
      Named{"swish", RecurrentActivation::kSilu}, Named{"sigmoid", RecurrentActivation::kSigmoid}};
  return parse_name("activation", name, kNames, "none, silu (or swish), sigmoid");
}

std::string_view to_string(RecurrentRule rule) {
  return rule == RecurrentRule::kDelta ? "delta" : "additive";
}

RecurrentRule parse_recurrent_rule(std::string_view name) {
  using Named = std::pair<std::string_view, RecurrentRule>;
  constexpr std::array kNames = {Named{"delta", RecurrentRule::kDelta},
                                 Named{"additive", RecurrentRule::kAdditive}};
  return parse_name("rule", name, kNames, "delta, additive");
}

}  // namespace clattn
