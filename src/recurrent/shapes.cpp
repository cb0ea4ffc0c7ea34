#include <clattn/recurrent.hpp>
#include <utility>

#include "base/checked.hpp"
#include "base/names.hpp"

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

using detail::Named;

constexpr Named<RecurrentActivation> kActivations[] = {{RecurrentActivation::kNone, "none"},
                                                       {RecurrentActivation::kSilu, "silu"},
                                                       {RecurrentActivation::kSigmoid, "sigmoid"}};
constexpr Named<RecurrentRule> kRules[] = {{RecurrentRule::kDelta, "delta"},
                                           {RecurrentRule::kAdditive, "additive"}};

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
  return detail::row_of(kActivations, activation, "activation").name;
}

RecurrentActivation parse_recurrent_activation(std::string_view name) {
  if (name == "swish") return RecurrentActivation::kSilu;
  return detail::parse_named(kActivations, name, "activation");
}

std::string_view to_string(RecurrentRule rule) {
  return detail::row_of(kRules, rule, "rule").name;
}

RecurrentRule parse_recurrent_rule(std::string_view name) {
  return detail::parse_named(kRules, name, "rule");
}

}  // namespace clattn
