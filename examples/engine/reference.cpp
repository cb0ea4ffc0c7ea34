// The model in double precision: plain loops over the whole sequence for every token, and nothing
// of the library.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "model.hpp"

namespace engine {

namespace {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

std::size_t index(int value) {
  return static_cast<std::size_t>(value);
}

Row times(const Row& row, const Matrix& matrix) {
  Row result(index(matrix.cols));
  for (std::size_t i = 0; i < row.size(); ++i)
    for (std::size_t j = 0; j < result.size(); ++j)
      result[j] += row[i] * double{matrix.values[i * result.size() + j]};
  return result;
}

void add(Row& sum, const Row& row) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
}

Row norm(const Row& row, const Matrix& weight) {
  double squares = 0;
  for (const double x : row) squares += x * x;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(row.size()) + kNormEpsilon);
  Row result = row;
  for (std::size_t i = 0; i < row.size(); ++i) result[i] *= scale * double{weight.values[i]};
  return result;
}

/// Turns the pairs (i, i + half) of every query and key head by the token's position.
void rotate(Row& qkv, int position) {
  constexpr int kHalf = kHeadSize / 2;
  for (int head = 0; head < kHeads + kKVHeads; ++head) {
    for (int i = 0; i < kHalf; ++i) {
      const double angle = position * std::pow(double{kRopeBase}, -double(i) / kHalf);
      double& a = qkv[index(head * kHeadSize + i)];
      double& b = qkv[index(head * kHeadSize + i + kHalf)];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = turned;
    }
  }
}

/// The attention of token `t` to itself and those before it.
Row attend(const Rows& qkv, int t) {
  Row result(index(kQueryWidth));
  for (int head = 0; head < kHeads; ++head) {
    const int kv_head = head / (kHeads / kKVHeads);
    const double* query = &qkv[index(t)][index(head * kHeadSize)];
    Row weights;
    for (int j = 0; j <= t; ++j) {
      const double* key = &qkv[index(j)][index(kQueryWidth + kv_head * kHeadSize)];
      double logit = 0;
      for (int i = 0; i < kHeadSize; ++i) logit += query[i] * key[i];
      weights.push_back(logit / std::sqrt(double{kHeadSize}));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - largest);
    for (int j = 0; j <= t; ++j) {
      const double* value = &qkv[index(j)][index(kQueryWidth + kKVWidth + kv_head * kHeadSize)];
      for (int i = 0; i < kHeadSize; ++i)
        result[index(head * kHeadSize + i)] += weights[index(j)] / sum * value[i];
    }
  }
  return result;
}

Row gated(const Row& gate_up) {
  Row result(index(kInner));
  for (std::size_t i = 0; i < result.size(); ++i)
    result[i] = gate_up[i] / (1 + std::exp(-gate_up[i])) * gate_up[i + index(kInner)];
  return result;
}

int next_token(const Weights& weights, const Tokens& tokens) {
  const Matrix& embedding = weights.at("embedding");
  Rows x;
  for (const int token : tokens) {
    const auto first = embedding.values.begin() + token * kHidden;
    x.emplace_back(first, first + kHidden);
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto of = [&](const char* name) -> const Matrix& {
      return weights.at(std::to_string(layer) + "." + name);
    };
    Rows qkv;
    for (std::size_t t = 0; t < x.size(); ++t) {
      qkv.push_back(times(norm(x[t], of("norm_1")), of("qkv")));
      rotate(qkv.back(), static_cast<int>(t));
    }
    for (std::size_t t = 0; t < x.size(); ++t) {
      add(x[t], times(attend(qkv, static_cast<int>(t)), of("out")));
      add(x[t], times(gated(times(norm(x[t], of("norm_2")), of("gate_up"))), of("down")));
    }
  }
  const Row logits = times(norm(x.back(), weights.at("norm")), weights.at("head"));
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

bool judge(const Weights& weights, std::span<const Tokens> prompts,
           std::span<const Tokens> continuations) {
  bool right = true;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Tokens tokens = prompts[i];
    for (const int token : continuations[i]) {
      const int wanted = next_token(weights, tokens);
      std::printf("%s%d", tokens.size() == prompts[i].size() ? "" : " ", token);
      if (token != wanted) std::printf(" (wrong, %d is right)", wanted);
      right = right && token == wanted;
      tokens.push_back(wanted);
    }
    std::printf("\n");
  }
  return right;
}

}  // namespace engine
