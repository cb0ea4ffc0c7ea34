#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "oracle/recurrent.hpp"

/// Kernels of the delta rule in plain float, right ones and ones with the usual faults, by which
/// tests judge the judge. One request, one head, no drafts unless said.
namespace recurrent_test {

struct Faults {
  bool decay_after_prediction = false;
  bool slot_of_accepted = false;  // instead of accepted - 1
  bool rounds_inverse = false;    // of a chunk's triangle, to the type of the products
};

struct Results {
  std::vector<double> out, states;
};

inline float rounded(oracle::Element element, double x) {
  return static_cast<float>(oracle::round_to(element, x));
}

inline std::vector<float> normalised(const std::vector<double>& rows, std::size_t token,
                                     std::size_t size) {
  std::vector<float> x(size);
  float sum = 1e-6F;
  for (std::size_t i = 0; i < size; ++i) {
    x[i] = static_cast<float>(rows[token * size + i]);
    sum += x[i] * x[i];
  }
  for (float& element : x) element /= std::sqrt(sum);
  return x;
}

inline float dot(const float* x, const std::vector<float>& y) {
  float sum = 0;
  for (std::size_t i = 0; i < y.size(); ++i) sum += x[i] * y[i];
  return sum;
}

/// Token by token.
inline Results loop(const oracle::DeltaRuleCase& call, const Faults& faults,
                    oracle::Element stored = oracle::Element::kF32) {
  const auto k_dim = static_cast<std::size_t>(call.head_k_dim);
  const auto v_dim = static_cast<std::size_t>(call.head_v_dim);
  const oracle::RecurrentRequests& of = call.requests;
  const auto tokens = static_cast<std::size_t>(of.tokens_of(0));
  Results results{std::vector<double>(call.value.size()), call.states};
  const auto page = [&](std::int32_t slot) {
    return static_cast<std::size_t>(slot) * v_dim * k_dim;
  };
  std::vector<float> s(v_dim * k_dim);
  std::int32_t slot = of.slot_read(0);
  if (faults.slot_of_accepted)
    slot = of.slots[static_cast<std::size_t>(of.num_accepted_tokens[0] % of.columns)];
  if (of.has_initial_state[0] != 0)
    std::copy_n(call.states.begin() + static_cast<std::ptrdiff_t>(page(slot)), s.size(), s.begin());
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::vector<float> q = normalised(call.query, t, k_dim);
    const std::vector<float> k = normalised(call.key, t, k_dim);
    const float decay = std::exp(static_cast<float>(call.g[t]));
    const auto beta = static_cast<float>(call.beta[t]);
    for (std::size_t v = 0; v < v_dim; ++v) {
      float* const row = s.data() + v * k_dim;
      if (!faults.decay_after_prediction)
        for (std::size_t i = 0; i < k_dim; ++i) row[i] *= decay;
      const float d = beta * (static_cast<float>(call.value[t * v_dim + v]) - dot(row, k));
      if (faults.decay_after_prediction)
        for (std::size_t i = 0; i < k_dim; ++i) row[i] *= decay;
      for (std::size_t i = 0; i < k_dim; ++i) row[i] += d * k[i];
      results.out[t * v_dim + v] = static_cast<float>(call.scale) * dot(row, q);
    }
    const std::int32_t to = of.slot_written(0, static_cast<std::int32_t>(t));
    for (std::size_t i = 0; to >= 0 && i < s.size(); ++i)
      results.states[page(to) + i] = rounded(stored, s[i]);
  }
  return results;
}

/// In chunks, operands of the large products rounded to `element`.
class Chunked {
 public:
  Chunked(const oracle::DeltaRuleCase& call, oracle::Element element, std::size_t chunk,
          const Faults& faults)
      : call_(call),
        element_(element),
        chunk_(chunk),
        faults_(faults),
        k_dim_(static_cast<std::size_t>(call.head_k_dim)),
        v_dim_(static_cast<std::size_t>(call.head_v_dim)) {}

  Results run() {
    const auto tokens = static_cast<std::size_t>(call_.requests.tokens_of(0));
    Results results{std::vector<double>(call_.value.size()), call_.states};
    s_.assign(v_dim_ * k_dim_, 0.0F);
    if (call_.requests.has_initial_state[0] != 0)
      std::copy_n(call_.states.begin(), s_.size(), s_.begin());
    for (std::size_t first = 0; first < tokens; first += chunk_) {
      count_ = std::min(chunk_, tokens - first);
      prepare(first);
      for (std::size_t v = 0; v < v_dim_; ++v) row(first, v, results.out);
    }
    std::copy(s_.begin(), s_.end(), results.states.begin());
    return results;
  }

 private:
  float operand(float x) const { return rounded(element_, x); }
  std::vector<float> operands(std::vector<float> x) const {
    for (float& element : x) element = operand(element);
    return x;
  }
  /// The decay from token j to token i of the chunk, by products.
  float decay(std::size_t i, std::size_t j) const {
    float all = 1;
    for (std::size_t t = j + 1; t <= i; ++t) all *= e_[t];
    return all;
  }

  void prepare(std::size_t first) {
    q_.clear(), k_.clear(), e_.clear(), beta_.clear();
    for (std::size_t t = first; t < first + count_; ++t) {
      q_.push_back(operands(normalised(call_.query, t, k_dim_)));
      k_.push_back(operands(normalised(call_.key, t, k_dim_)));
      e_.push_back(std::exp(static_cast<float>(call_.g[t])));
      beta_.push_back(static_cast<float>(call_.beta[t]));
    }
    l_.assign(count_ * count_, 0.0F);
    m_ = l_;
    for (std::size_t i = 0; i < count_; ++i) {
      for (std::size_t j = 0; j <= i; ++j) {
        m_[i * count_ + j] = operand(decay(i, j) * dot(q_[i].data(), k_[j]));
        if (j < i) l_[i * count_ + j] = beta_[i] * decay(i, j) * dot(k_[i].data(), k_[j]);
      }
    }
    inverse_.clear();
    for (std::size_t column = 0; column < count_; ++column) {
      std::vector<float> unit(count_, 0.0F);
      unit[column] = 1;
      inverse_.push_back(operands(solve(unit, false)));
    }
  }

  std::vector<float> solve(const std::vector<float>& x, bool rounds) const {
    std::vector<float> u(count_);
    if (!rounds) {
      for (std::size_t i = 0; i < count_; ++i) {
        u[i] = x[i];
        for (std::size_t j = 0; j < i; ++j) u[i] -= l_[i * count_ + j] * u[j];
      }
      return u;
    }
    for (std::size_t column = 0; column < count_; ++column)
      for (std::size_t i = column; i < count_; ++i)
        u[i] += inverse_[column][i] * operand(x[column]);
    return u;
  }

  void row(std::size_t first, std::size_t v, std::vector<double>& out) {
    const std::vector<float> s(s_.begin() + static_cast<std::ptrdiff_t>(v * k_dim_),
                               s_.begin() + static_cast<std::ptrdiff_t>((v + 1) * k_dim_));
    const std::vector<float> rounded_s = operands(s);
    std::vector<float> x(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      const auto value = static_cast<float>(call_.value[(first + i) * v_dim_ + v]);
      x[i] = beta_[i] * (value - e_[0] * decay(i, 0) * dot(rounded_s.data(), k_[i]));
    }
    const std::vector<float> u = solve(x, faults_.rounds_inverse), rounded_u = operands(u);
    for (std::size_t i = 0; i < count_; ++i) {
      float sum = e_[0] * decay(i, 0) * dot(rounded_s.data(), q_[i]);
      for (std::size_t j = 0; j <= i; ++j) sum += m_[i * count_ + j] * rounded_u[j];
      out[(first + i) * v_dim_ + v] = static_cast<float>(call_.scale) * sum;
    }
    const std::size_t last = count_ - 1;
    std::vector<float> decayed = u;
    for (std::size_t j = 0; j < count_; ++j) decayed[j] = operand(decay(last, j) * u[j]);
    for (std::size_t i = 0; i < k_dim_; ++i) {
      float sum = e_[0] * decay(last, 0) * s[i];
      for (std::size_t j = 0; j < count_; ++j) sum += decayed[j] * k_[j][i];
      s_[v * k_dim_ + i] = sum;
    }
  }

  const oracle::DeltaRuleCase& call_;
  oracle::Element element_;
  std::size_t chunk_, count_ = 0;
  Faults faults_;
  std::size_t k_dim_, v_dim_;
  std::vector<float> s_, e_, beta_, l_, m_;
  std::vector<std::vector<float>> q_, k_, inverse_;  // inverse_: by columns
};

}  // namespace recurrent_test
