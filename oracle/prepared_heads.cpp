#include "oracle/prepared_heads.hpp"

#include <cmath>
#include <limits>

namespace oracle {

namespace {

constexpr double kSingle = 0x1p-24;  // f32's rounding

/// Which row of positions turns a pair.
std::size_t axis_of(const PreparedHeads& call, std::int32_t pair) {
  if (call.positions.size() == 1) return 0;
  if (call.sections_in_turn) {
    const auto axis = static_cast<std::size_t>(pair % 3);
    return pair < 3 * call.sections[axis] ? axis : 0;
  }
  if (pair < call.sections[0]) return 0;
  return pair < call.sections[0] + call.sections[1] ? 1 : 2;
}

/// Cosine and sine of a pair of a token.
std::array<double, 2> turn_of(const PreparedHeads& call, std::size_t token, std::int32_t pair) {
  const std::int64_t row = call.positions[axis_of(call, pair)][token];
  const auto rows = static_cast<std::int64_t>(call.table.size()) / call.rotary_dim;
  if (row < 0 || row >= rows) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan};
  }
  const auto begin = static_cast<std::size_t>(row * call.rotary_dim + pair);
  return {call.table[begin], call.table[begin + static_cast<std::size_t>(call.rotary_dim / 2)]};
}

void norm(const PreparedHeads& call, std::vector<double>& head) {
  double squares = 0;
  for (const double x : head) squares += x * x;
  const double root = std::sqrt(squares / call.head_size + call.eps);
  for (std::size_t i = 0; i < head.size(); ++i) {
    const double weight = call.weight.empty() ? 1 : call.weight[i] + call.beta;
    head[i] = root == 0 ? 0 : head[i] / root * weight;
  }
}

}  // namespace

JudgedTensor prepared_heads(const PreparedHeads& call, Element out) {
  JudgedTensor result;
  const auto size = static_cast<std::size_t>(call.head_size);
  for (std::size_t begin = 0; begin < call.x.size(); begin += size) {
    std::vector<double> head(size), allowed(size, 0.0);
    for (std::size_t i = 0; i < size; ++i) head[i] = call.x[begin + i];
    if (call.norm) {
      norm(call, head);
      for (std::size_t i = 0; i < size; ++i)
        allowed[i] = 2 * half_ulp(out, head[i]) + 8 * kSingle * std::abs(head[i]);
    }
    const std::size_t token = begin / size / static_cast<std::size_t>(call.heads);
    for (std::int32_t pair = 0; pair < call.rotary_dim / 2; ++pair) {
      const std::array<double, 2> turn = turn_of(call, token, pair);
      const double cosine = turn[0], sine = turn[1];
      const auto first = static_cast<std::size_t>(call.rotary_at + (call.neox ? pair : 2 * pair));
      const std::size_t second =
          first + (call.neox ? static_cast<std::size_t>(call.rotary_dim / 2) : 1);
      const double n1 = head[first], n2 = head[second];
      head[first] = n1 * cosine - n2 * sine;
      head[second] = n2 * cosine + n1 * sine;
      const double of_norm = call.norm && call.rounds_norm ? 1 : 0;
      const auto bound = [&](double o, double of_cosine, double of_sine) {
        const double terms = std::abs(of_cosine * cosine) + std::abs(of_sine * sine);
        const double rounded =
            half_ulp(out, of_cosine) * std::abs(cosine) + half_ulp(out, of_sine) * std::abs(sine);
        return 2 * half_ulp(out, o) + 8 * kSingle * terms + of_norm * rounded;
      };
      allowed[first] = bound(head[first], n1, n2);
      allowed[second] = bound(head[second], n2, n1);
    }
    for (std::size_t i = 0; i < size; ++i) {
      result.exact.push_back(head[i]);
      result.sigma.push_back(0);
      result.floor.push_back(allowed[i]);
    }
  }
  return result;
}

}  // namespace oracle
