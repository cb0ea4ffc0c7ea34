#include "oracle/recurrent.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace oracle {

namespace {

constexpr double kU32 = 0x1p-24;
constexpr double kEps = 1e-6;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

double square(double x) {
  return x * x;
}

/// One head's vector of a token, normalised if the layer does.
std::vector<double> vector_of(const std::vector<double>& rows, std::int64_t row, std::int32_t size,
                              bool l2_norm) {
  const auto begin = rows.begin() + row * size;
  std::vector<double> x(begin, begin + size);
  if (!l2_norm) return x;
  const double norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), kEps));
  for (double& element : x) element /= norm;
  return x;
}

/// A row of a state and the variance of its errors: one for all elements, or for each where they
/// decay apart.
struct StateRow {
  std::vector<double> s, var;
  double largest_term = 0;  // of the rank-one terms in it, decayed
};

/// What all rows of a head take of a token.
struct StateToken {
  std::vector<double> q, k, decay;  // decay: one, or of each element
  double beta = 1, kk = 0, qq = 0;
};

class Head {
 public:
  Head(const DeltaRuleCase& call, const RecurrentRounding& rounding, std::int32_t head)
      : call_(call), rounding_(rounding), head_(head), size_(call.head_k_dim) {
    const double operand = square(rounding.products), single = 4 * square(kU32);
    product_ = (2 * operand + single) / 3;
    single_ = single / 3;
  }

  StateToken token(std::int64_t t) const {
    const std::int64_t key_head = head_ / (call_.num_v_heads / call_.num_k_heads);
    const std::int64_t row = t * call_.num_k_heads + key_head;
    const std::int64_t gate = t * call_.num_v_heads + head_;
    StateToken token{vector_of(call_.query, row, size_, call_.l2_norm),
                     vector_of(call_.key, row, size_, call_.l2_norm),
                     {},
                     1,
                     0,
                     0};
    const std::int64_t gates = call_.decay_by_channel ? size_ : 1;
    for (std::int64_t i = 0; i < gates; ++i)
      token.decay.push_back(std::exp(call_.g[at(gate * gates + i)]));
    if (!call_.additive) token.beta = call_.beta[at(gate)];
    for (const double x : token.k) token.kk += x * x;
    for (const double x : token.q) token.qq += x * x;
    return token;
  }

  /// One token of row v of the head's state, whose output goes to `out`.
  void step(const StateToken& token, std::int64_t t, std::int32_t v, StateRow& row,
            JudgedTensor& out) const {
    const bool one = token.decay.size() == 1;
    const auto count = static_cast<double>(size_);
    double p = 0, spread = 0;
    for (std::int32_t i = 0; i < size_; ++i) {
      double& s = row.s[at(i)];
      s *= token.decay[one ? 0 : at(i)];
      p += s * token.k[at(i)];
      spread += square(s * token.k[at(i)]);
    }
    const std::int64_t place = (t * call_.num_v_heads + head_) * call_.head_v_dim + v;
    const double value = call_.value[at(place)];
    const double d = call_.additive ? value : token.beta * (value - p);
    double largest = 0;
    for (std::int32_t i = 0; i < size_; ++i) {
      row.s[at(i)] += d * token.k[at(i)];
      largest = std::max(largest, std::abs(d * token.k[at(i)]));
    }
    const double mean_square =
        std::inner_product(row.s.begin(), row.s.end(), row.s.begin(), 0.0) / count;
    const double kept =
        call_.additive ? 1
                       : 1 - (2 * token.beta * token.kk - square(token.beta * token.kk)) / count;
    double added = product_ * square(d) * token.kk / count + single_ * mean_square;
    if (!call_.additive)
      added +=
          square(token.beta) * (product_ * spread + single_ * square(value)) * token.kk / count;
    for (std::size_t i = 0; i < row.var.size(); ++i)
      row.var[i] = square(token.decay[one ? 0 : i]) * kept * row.var[i] + added;
    const double slowest = *std::max_element(token.decay.begin(), token.decay.end());
    row.largest_term = std::max(row.largest_term * slowest, largest);
    output(token, place, row, out);
  }

 private:
  void output(const StateToken& token, std::int64_t place, const StateRow& row,
              JudgedTensor& out) const {
    double sum = 0, squares = 0, var = 0, size = 0;
    for (std::int32_t i = 0; i < size_; ++i) {
      const double term = row.s[at(i)] * token.q[at(i)];
      sum += term;
      squares += term * term;
      size += square(row.s[at(i)]);
      var += row.var[row.var.size() == 1 ? 0 : at(i)] * square(token.q[at(i)]);
    }
    const double o = call_.scale * sum;
    const double factor = (2 * square(rounding_.products) + 8 * square(kU32)) / 3;
    out.exact[at(place)] = o;
    out.sigma[at(place)] = std::sqrt(square(call_.scale) * (var + factor * squares) +
                                     square(half_ulp(rounding_.out, o)) / 3);
    out.floor[at(place)] =
        16 * kU32 * std::abs(call_.scale) * std::sqrt(size * token.qq) + half_ulp(rounding_.out, 0);
  }

  const DeltaRuleCase& call_;
  const RecurrentRounding& rounding_;
  std::int32_t head_, size_;
  double product_ = 0, single_ = 0;
};

/// A state that its type cannot hold is stored as infinity. Where the allowed error decides whether
/// that happens, any number is right.
void mark_overflow(Element state, std::size_t at, JudgedTensor& states) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double allowed = kStateSigmas * states.sigma[at] + states.floor[at];
  const double magnitude = std::abs(states.exact[at]);
  if (!std::isinf(round_to(state, magnitude + allowed))) return;
  if (std::isinf(round_to(state, std::max(magnitude - allowed, 0.0))))
    states.exact[at] = std::copysign(kInfinity, states.exact[at]);
  else
    states.floor[at] = kInfinity;
}

/// Stores a row of a state to a page and what it may be off by.
void store(const StateRow& row, const RecurrentRounding& rounding, std::int64_t begin,
           JudgedTensor& states) {
  for (std::size_t i = 0; i < row.s.size(); ++i) {
    const std::size_t to = at(begin) + i;
    const double stored = half_ulp(rounding.state, row.s[i]);
    states.exact[to] = row.s[i];
    states.sigma[to] = std::sqrt(row.var[row.var.size() == 1 ? 0 : i] + square(stored) / 3);
    states.floor[to] = 8 * kU32 * std::abs(row.s[i]) + rounding.products * row.largest_term +
                       half_ulp(rounding.state, 0);
    mark_overflow(rounding.state, to, states);
  }
}

void run_request(const DeltaRuleCase& call, const RecurrentRounding& rounding, std::int32_t request,
                 DeltaRuleResult& result) {
  const RecurrentRequests& of = call.requests;
  if (of.slot_read(request) < 0) return;
  const std::int64_t row_size = call.head_k_dim;
  const std::int32_t tokens = of.tokens_of(request);
  for (std::int32_t head = 0; head < call.num_v_heads; ++head) {
    const Head rule(call, rounding, head);
    const auto place = [&](std::int64_t slot, std::int64_t v) {
      return ((slot * call.num_v_heads + head) * call.head_v_dim + v) * row_size;
    };
    std::vector<StateRow> rows(at(call.head_v_dim));
    for (std::int32_t v = 0; v < call.head_v_dim; ++v) {
      StateRow& row = rows[at(v)];
      row.var.assign(call.decay_by_channel ? at(row_size) : 1, 0.0);
      row.s.assign(at(row_size), 0.0);
      if (of.has_initial_state[at(request)] == 0) continue;
      const auto from = call.states.begin() + place(of.slot_read(request), v);
      row.s.assign(from, from + row_size);
    }
    for (std::int32_t i = 0; i < tokens; ++i) {
      const std::int64_t t = of.query_start_loc[at(request)] + i;
      const StateToken token = rule.token(t);
      const std::int32_t slot = of.slot_written(request, i);
      for (std::int32_t v = 0; v < call.head_v_dim; ++v) {
        rule.step(token, t, v, rows[at(v)], result.out);
        if (slot >= 0) store(rows[at(v)], rounding, place(slot, v), result.states);
      }
      if (slot >= 0) result.written[at(slot)] = 1;
    }
  }
}

double activated(double x, bool silu) {
  return silu ? x * sigmoid(x) : x;
}

}  // namespace

std::int32_t RecurrentRequests::tokens_of(std::int32_t request) const {
  return query_start_loc[at(request) + 1] - query_start_loc[at(request)];
}

bool RecurrentRequests::drafts(std::int32_t request) const {
  return !num_accepted_tokens.empty() && num_accepted_tokens[at(request)] >= 0 &&
         has_initial_state[at(request)] != 0;
}

std::int32_t RecurrentRequests::slot_read(std::int32_t request) const {
  const std::int64_t row = std::int64_t{request} * columns;
  return slots[at(row + (drafts(request) ? num_accepted_tokens[at(request)] - 1 : 0))];
}

std::int32_t RecurrentRequests::slot_written(std::int32_t request, std::int32_t token) const {
  const std::int64_t row = std::int64_t{request} * columns;
  if (drafts(request)) return slots[at(row + token)];
  return token == tokens_of(request) - 1 ? slots[at(row)] : -1;
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

double delta_rule_decay(double a, double a_log, double dt_bias) {
  return -std::exp(a_log) * softplus(a + dt_bias);
}

double bounded_decay(double a, double a_log, double dt_bias, double lower_bound) {
  return lower_bound * sigmoid(std::exp(a_log) * (a + dt_bias));
}

DeltaRuleResult delta_rule(const DeltaRuleCase& call, const RecurrentRounding& rounding) {
  DeltaRuleResult result;
  const auto empty = [](std::size_t size) {
    return JudgedTensor{std::vector<double>(size), std::vector<double>(size),
                        std::vector<double>(size)};
  };
  result.out = empty(call.value.size());
  result.states = empty(call.states.size());
  result.states.exact = call.states;
  const std::int64_t page = std::int64_t{call.num_v_heads} * call.head_v_dim * call.head_k_dim;
  result.written.assign(call.states.size() / at(page), 0);
  for (std::int32_t r = 0; r < call.requests.num_requests(); ++r)
    run_request(call, rounding, r, result);
  return result;
}

Verdict judge(const JudgedTensor& tensor, const std::vector<double>& values, double sigmas) {
  Verdict verdict;
  double squares = 0;
  std::size_t counted = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double exact = tensor.exact[i], value = values[i];
    if (value == exact || (std::isnan(value) && std::isnan(exact))) continue;
    const double allowed = sigmas * tensor.sigma[i] + tensor.floor[i];
    if (std::isinf(allowed) && !std::isnan(value)) continue;
    double share = std::abs(value - exact) / allowed;
    if (!(share < std::numeric_limits<double>::infinity()))  // NaN, too
      share = std::numeric_limits<double>::infinity();
    if (share > verdict.worst) {
      verdict.worst = share;
      verdict.at = i;
    }
    squares += square(share * sigmas);
    ++counted;
  }
  // Elements that are exact say nothing of the others' errors.
  if (counted != 0) verdict.rms = std::sqrt(squares / static_cast<double>(counted));
  return verdict;
}

CausalConvResult causal_conv(const CausalConvCase& call, Element out) {
  CausalConvResult result;
  result.states = call.states;
  result.out.exact.assign(call.x.size(), 0.0);
  result.out.sigma = result.out.floor = result.out.exact;
  const RecurrentRequests& of = call.requests;
  const std::int64_t channels = call.channels, before = call.width - 1;
  for (std::int32_t r = 0; r < of.num_requests(); ++r) {
    const std::int32_t slot = of.slots[at(std::int64_t{r} * of.columns)];
    const std::int32_t tokens = of.tokens_of(r);
    if (slot < 0 || tokens == 0) continue;
    const std::int64_t page = std::int64_t{slot} * call.state_rows;
    const std::int64_t first = of.drafts(r) ? of.num_accepted_tokens[at(r)] - 1 : 0;
    for (std::int64_t c = 0; c < channels; ++c) {
      std::vector<double> seen;  // the window, then the request's own tokens
      seen.reserve(at(before + tokens));
      for (std::int64_t j = 0; j < before; ++j)
        seen.push_back(of.has_initial_state[at(r)] != 0
                           ? call.states[at((page + first + j) * channels + c)]
                           : 0);
      for (std::int32_t i = 0; i < tokens; ++i)
        seen.push_back(call.x[at((of.query_start_loc[at(r)] + i) * channels + c)]);
      for (std::int32_t i = 0; i < tokens; ++i) {
        double sum = call.bias.empty() ? 0 : call.bias[at(c)], size = std::abs(sum);
        for (std::int64_t j = 0; j < call.width; ++j) {
          const double term = call.weight[at(c * call.width + j)] * seen[at(i + j)];
          sum += term;
          size += std::abs(term);
        }
        const std::size_t to = at((of.query_start_loc[at(r)] + i) * channels + c);
        const double y = activated(sum, call.silu);
        result.out.exact[to] = y;
        result.out.floor[to] = 1.1 * (4 * kU32 * size + half_ulp(out, y)) + half_ulp(out, 0);
      }
      const auto total = static_cast<std::int64_t>(seen.size());
      const std::int64_t kept = of.drafts(r) ? total - 1 : before;
      for (std::int64_t j = 0; j < kept; ++j)
        result.states[at((page + j) * channels + c)] = seen[at(total - kept + j)];
    }
  }
  return result;
}

JudgedTensor gated_norm(const GatedNormCase& call, Element out) {
  JudgedTensor result;
  const auto width = at(call.width);
  for (std::size_t row = 0; row < call.x.size(); row += width) {
    std::vector<double> x(call.x.begin() + static_cast<std::ptrdiff_t>(row),
                          call.x.begin() + static_cast<std::ptrdiff_t>(row + width));
    std::vector<double> gate(width, 1.0);
    for (std::size_t i = 0; i < width && !call.z.empty(); ++i) {
      const double z = call.z[row + i];
      gate[i] = call.sigmoid_gate ? sigmoid(z) : activated(z, true);
      if (!call.norm_before_gate) x[i] *= gate[i];
    }
    const double mean =
        std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(call.width);
    for (std::size_t i = 0; i < width; ++i) {
      double y = x[i] / std::sqrt(mean + call.eps) * call.weight[i];
      if (call.norm_before_gate) y *= gate[i];
      result.exact.push_back(y);
      result.sigma.push_back(0);
      result.floor.push_back(half_ulp(out, y) + 16 * kU32 * std::abs(y) + half_ulp(out, 0));
    }
  }
  return result;
}

}  // namespace oracle
