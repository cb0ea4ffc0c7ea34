#include "oracle/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace oracle {
namespace {

/// A binary floating-point format: significant bits (the hidden one included), exponent bias,
/// width, largest number and whether that stands for all that exceeds it.
struct Format {
  int precision, bias, width;
  double largest;
  bool saturates = false;
  int smallest_exponent() const { return 2 - bias - precision; }  // of the last subnormal bit
  std::uint32_t exponent_mask() const {
    return ((std::uint32_t{1} << (width - precision)) - 1) << (precision - 1);
  }
};

Format format_of(Element element) {
  switch (element) {
    case Element::kF32:
      break;
    case Element::kF16:
      return {11, 15, 16, 65504.0};
    case Element::kBF16:
      return {8, 127, 16, 0x1.FEp127};
    case Element::kFp8E4M3:
      return {4, 7, 8, 448.0, true};
    case Element::kFp8E5M2:
      return {3, 15, 8, 57344.0, true};
    case Element::kInt8:  // the last bit is worth 1 everywhere
      return {8, -6, 8, 127.0, true};
    case Element::kUInt4:  // likewise
      return {4, -2, 4, 15.0, true};
  }
  return {24, 127, 32, 0x1.FFFFFEp127};
}

/// One query row of one head: the plain softmax over the keys it sees.
struct Row {
  std::vector<std::int32_t> keys;  // positions
  std::vector<double> logits;      // [keys]
  std::vector<double>
      logit_size;  // [keys], sum of the absolute terms: what f32 rounding scales with
  double sink = -std::numeric_limits<double>::infinity();
  double largest = -std::numeric_limits<double>::infinity();  // of logits and sink
};

/// One query token of one request and head.
struct Cursor {
  const AttentionCase& call;
  std::int32_t request, token, position, head;
  std::int32_t kv_head() const { return head / (call.num_heads / call.num_kv_heads); }
  std::size_t row_of(std::int32_t p) const {
    const auto r = static_cast<std::size_t>(request);
    if (call.block_size == 0) {
      return static_cast<std::size_t>(call.key_start_loc[r]) + static_cast<std::size_t>(p);
    }
    const auto page = r * static_cast<std::size_t>(call.max_blocks) +
                      static_cast<std::size_t>(p / call.block_size);
    return static_cast<std::size_t>(call.block_table[page]) *
               static_cast<std::size_t>(call.block_size) +
           static_cast<std::size_t>(p % call.block_size);
  }
  /// Index of element 0 of the key or value of position `p`.
  std::size_t at(std::int32_t p) const {
    return (row_of(p) * static_cast<std::size_t>(call.num_kv_heads) +
            static_cast<std::size_t>(kv_head())) *
           static_cast<std::size_t>(call.head_size);
  }
};

/// Number of the chunk that holds the position. Queries that outnumber their keys stand before
/// position 0, in chunks of their own.
std::int32_t chunk_at(std::int32_t position, std::int32_t chunk) {
  return position >= 0 ? position / chunk : -1 - (-1 - position) / chunk;
}

bool share_span(const AttentionCase& call, std::int32_t request, std::int32_t p, std::int32_t q) {
  return std::any_of(call.spans.begin(), call.spans.end(), [&](const Span& span) {
    return span.request == request && span.first <= p && p < span.end && span.first <= q &&
           q < span.end;
  });
}

/// Where a stored key stands in the sequence that it continues: that of a tree's node is the path
/// to it.
std::int32_t place_of(const AttentionCase& call, std::int32_t request, std::int32_t stored) {
  const auto r = static_cast<std::size_t>(request);
  if (call.tree_parents.empty()) return stored;
  const std::vector<std::int32_t>& parents = call.tree_parents[r];
  const std::int32_t before = call.seq_lens[r] - static_cast<std::int32_t>(parents.size());
  if (stored < before) return stored;
  std::int32_t place = before;
  for (std::int32_t node = parents[static_cast<std::size_t>(stored - before)]; node >= 0;
       node = parents[static_cast<std::size_t>(node)])
    ++place;
  return place;
}

Row score(const double* query, const Cursor& cursor, std::int32_t seq_len) {
  const AttentionCase& call = cursor.call;
  const auto head = static_cast<std::size_t>(cursor.head);
  Row row;
  for (std::int32_t p = 0; p < seq_len; ++p) {
    if (!sees(call, cursor.request, cursor.token, p)) continue;
    const double* key = &call.key_cache[cursor.at(p)];
    double dot = 0, size = 0;
    for (std::int32_t d = 0; d < call.head_size; ++d) {
      dot += query[d] * key[d];
      size += std::abs(query[d] * key[d]);
    }
    double logit = call.scale * dot;
    size *= std::abs(call.scale);
    if (call.soft_cap > 0) logit = call.soft_cap * std::tanh(logit / call.soft_cap);
    if (!call.alibi_slopes.empty()) {
      const std::int32_t ahead =
          place_of(call, cursor.request, p) - place_of(call, cursor.request, cursor.position);
      const double bias = call.alibi_slopes[head] * ahead;
      logit += bias;
      size += std::abs(bias);
    }
    row.keys.push_back(p);
    row.logits.push_back(logit);
    row.logit_size.push_back(size);
    row.largest = std::isnan(logit) ? logit : std::max(row.largest, logit);  // max() keeps a NaN
  }
  if (!call.sinks.empty()) row.sink = call.sinks[head];
  row.largest = std::max(row.largest, row.sink);
  return row;
}

/// Writes what AttentionResult has of one row and returns its LSE.
double attend(const Row& row, const Cursor& cursor, Element element, double* out, double* bound,
              double* weight_rounding) {
  constexpr double kEpsilon = 0x1p-24;  // half an ulp of f32, relative
  const AttentionCase& call = cursor.call;
  if (std::isinf(row.largest) && row.largest < 0) return row.largest;  // no key, no sink
  std::vector<double> weight(row.logits.size()), rounded(row.logits.size());
  double sum = std::exp(row.sink - row.largest);
  for (std::size_t j = 0; j < weight.size(); ++j) {
    weight[j] = std::exp(row.logits[j] - row.largest);
    rounded[j] = round_to(element, weight[j]);
    sum += weight[j];
  }
  const double logit_terms = 4 + std::sqrt(static_cast<double>(call.head_size));
  const double sum_terms = 8 + std::sqrt(static_cast<double>(row.keys.size()));
  for (std::int32_t d = 0; d < call.head_size; ++d) {
    double exact = 0, low = 0, size = 0, square = 0;
    for (std::size_t j = 0; j < weight.size(); ++j) {
      const double value = call.value_cache[cursor.at(row.keys[j]) + static_cast<std::size_t>(d)];
      exact += weight[j] * value / sum;
      low += rounded[j] * value / sum;
      size += weight[j] * std::abs(value) / sum;
      square += std::pow(weight[j] * value / sum, 2);
    }
    // An error dx of a logit moves the result by p * |value - out| * dx.
    double logit_error = 0;
    for (std::size_t j = 0; j < weight.size(); ++j) {
      const double value = call.value_cache[cursor.at(row.keys[j]) + static_cast<std::size_t>(d)];
      const double shift = 2 * (row.largest - row.logits[j]) + std::abs(row.largest);
      logit_error +=
          weight[j] / sum * std::abs(value - exact) * (logit_terms * row.logit_size[j] + shift);
    }
    out[d] = exact;
    bound[d] = std::abs(low - exact) + half_ulp(element, exact) +
               kEpsilon * (logit_error + sum_terms * size);
    weight_rounding[d] = 2 / std::sqrt(3.0) * half_ulp(element, 1) * std::sqrt(square);
  }
  return row.largest + std::log(sum);
}

}  // namespace

double half_ulp(Element element, double value) {
  const Format format = format_of(element);
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(0.5, std::max(exponent - format.precision, format.smallest_exponent()));
}

double round_to(Element element, double value) {
  if (element == Element::kUInt4)
    return std::isnan(value) ? 0.0 : std::clamp(std::nearbyint(value), 0.0, 15.0);
  if (std::isnan(value)) return element == Element::kInt8 ? 0.0 : value;
  if (value == 0) return value;
  const Format format = format_of(element);
  const double beyond = format.saturates ? format.largest : std::numeric_limits<double>::infinity();
  if (std::isinf(value)) return std::copysign(beyond, value);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int last_bit = std::max(exponent - format.precision, format.smallest_exponent());
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit);
  return std::abs(result) <= format.largest ? result : std::copysign(beyond, value);
}

std::uint32_t encode(Element element, double value) {
  if (element == Element::kInt8) {
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(round_to(element, value)));
  }
  if (element == Element::kUInt4) return static_cast<std::uint32_t>(round_to(element, value));
  const Format format = format_of(element);
  const std::uint32_t sign = std::signbit(value) ? std::uint32_t{1} << (format.width - 1) : 0;
  const std::uint32_t exponents = format.exponent_mask();
  if (std::isnan(value)) {
    if (format.saturates) return sign | 0x7F;  // e4m3 has no other
    return sign | exponents | (std::uint32_t{1} << (format.precision - 2));
  }
  const double size = std::abs(round_to(element, value));
  if (std::isinf(size)) return sign | exponents;
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  // Subnormals have exponent field 0 and no hidden bit; the same sum carries into field 1 at
  // 2^(1-bias).
  const int field = std::max(exponent - 1 + format.bias, 1);
  const auto mantissa =
      static_cast<std::uint32_t>(std::ldexp(size, format.bias - field + format.precision - 1));
  return sign | ((static_cast<std::uint32_t>(field - 1) << (format.precision - 1)) + mantissa);
}

double decode(Element element, std::uint32_t bits) {
  if (element == Element::kInt8) return static_cast<std::int8_t>(bits);
  if (element == Element::kUInt4) return bits & 15;
  const Format format = format_of(element);
  const std::uint32_t exponents = format.exponent_mask();
  const std::uint32_t mantissas = (std::uint32_t{1} << (format.precision - 1)) - 1;
  const std::uint32_t mantissa = bits & mantissas;
  const double sign = (bits >> (format.width - 1) & 1U) != 0 ? -1.0 : 1.0;
  const bool last_binade = (bits & exponents) == exponents;
  if (last_binade && element == Element::kFp8E4M3) {  // numbers, but for the last
    if (mantissa == mantissas) return std::numeric_limits<double>::quiet_NaN();
  } else if (last_binade) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const auto field = static_cast<int>((bits & exponents) >> (format.precision - 1));
  const double hidden = field == 0 ? 0.0 : std::ldexp(1.0, format.precision - 1);
  const int exponent = std::max(field, 1) - format.bias - (format.precision - 1);
  return sign * std::ldexp(hidden + mantissa, exponent);
}

namespace {

/// Calls visit(cursor, seq_len) for every query row; row `at` of the query is [token, head].
template <typename Visit>
void for_each_row(const AttentionCase& call, const Visit& visit) {
  const auto num_reqs = static_cast<std::int32_t>(call.seq_lens.size());
  for (std::int32_t r = 0; r < num_reqs; ++r) {
    const std::int32_t begin = call.query_start_loc[static_cast<std::size_t>(r)];
    const std::int32_t end = call.query_start_loc[static_cast<std::size_t>(r) + 1];
    const std::int32_t seq_len = call.seq_lens[static_cast<std::size_t>(r)];
    for (std::int32_t token = begin; token < end; ++token) {
      const std::int32_t position = seq_len - (end - begin) + (token - begin);
      for (std::int32_t head = 0; head < call.num_heads; ++head) {
        const auto at = static_cast<std::size_t>(token) * static_cast<std::size_t>(call.num_heads) +
                        static_cast<std::size_t>(head);
        visit(Cursor{call, r, token, position, head}, seq_len, at);
      }
    }
  }
}

/// Adds flush_bound() of one row to its elements of `out`; returns that of its LSE.
double flush_row(const Row& row, const Cursor& cursor, const double* query,
                 const FlushLimits& limits, double* out) {
  const AttentionCase& call = cursor.call;
  const auto kv_head = static_cast<std::size_t>(cursor.kv_head());
  std::vector<double> weight(row.keys.size()), lacking(row.keys.size());
  double sum = std::exp(row.sink - row.largest), most = 0;
  for (std::size_t j = 0; j < weight.size(); ++j) {
    const double* key = &call.key_cache[cursor.at(row.keys[j])];
    for (std::int32_t d = 0; d < call.head_size; ++d) {
      if (std::abs(query[d]) < limits.query || std::abs(key[d]) < limits.key[kv_head])
        lacking[j] += std::abs(call.scale * query[d] * key[d]);
    }
    most = std::max(most, lacking[j]);
    weight[j] = std::exp(row.logits[j] - row.largest);
    sum += weight[j];
  }
  const double growth = std::exp(most);
  for (std::int32_t d = 0; d < call.head_size; ++d) {
    const auto value = [&](std::size_t j) {
      return call.value_cache[cursor.at(row.keys[j]) + static_cast<std::size_t>(d)];
    };
    double exact = 0;
    for (std::size_t j = 0; j < weight.size(); ++j) exact += weight[j] * value(j) / sum;
    for (std::size_t j = 0; j < weight.size(); ++j) {
      const double size = std::abs(value(j)), share = weight[j] / sum;
      out[d] += growth * share * std::expm1(lacking[j]) * std::abs(value(j) - exact);
      if (size < limits.value[kv_head] || weight[j] < growth * growth * limits.weight)
        out[d] += growth * growth * share * size;
    }
  }
  return most;
}

/// What errors of an output element add up to: at most the sum of their sizes, and but for chance
/// what they lean to together and six times the root of their squares.
struct Errors {
  double all = 0, square = 0, common = 0, toward_zero = 0;
  /// `direction`: the sign that the error has if it makes what it is of smaller.
  void add(double error, double direction) {
    all += std::abs(error);
    square += error * error;
    common += error;
    toward_zero += error * direction;
  }
  double bound() const {
    const double chance = std::abs(common) + std::abs(toward_zero) + 6 * std::sqrt(square);
    return std::min(all, chance);
  }
};

double sign_of(double value) {
  return value < 0 ? -1 : 1;
}

/// The largest sum of neighbours among values[first] … values[last - 1], whichever they are.
template <typename Value>
double largest_run(std::size_t first, std::size_t last, const Value& value) {
  double sum = 0, least = 0, most = 0;
  for (std::size_t i = first; i < last; ++i) {
    sum += value(i);
    least = std::min(least, sum);
    most = std::max(most, sum);
  }
  return most - least;
}

/// The largest of the terms and of the sums of the first 32, 64 ... of them.
template <typename Term>
double largest_in_steps(std::size_t count, const Term& term) {
  double sum = 0, most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += term(i);
    most = std::max(most, std::abs(term(i)));
    if (i % 32 == 31 || i + 1 == count) most = std::max(most, std::abs(sum));
  }
  return most;
}

/// Adds fp8_bound() of one row to its elements of `out`; returns that of its LSE.
double fp8_row(const Row& row, const Cursor& cursor, const double* query, double* out) {
  constexpr double kLost = 34 * 0x1p-13;  // of a step, in relation to its largest term
  constexpr double kTileSteps = 4;        // that a sum of P V is made of
  constexpr std::size_t kTile = 128;      // its keys; where the first begins is the plan's
  const AttentionCase& call = cursor.call;
  const auto dims = static_cast<std::size_t>(call.head_size);
  std::vector<double> weight(row.keys.size()), moved(row.keys.size()), sign(row.keys.size());
  double sum = std::exp(row.sink - row.largest), most = 0;
  for (std::size_t j = 0; j < weight.size(); ++j) {
    const double* key = &call.key_cache[cursor.at(row.keys[j])];
    const double largest = largest_in_steps(dims, [&](std::size_t d) { return query[d] * key[d]; });
    moved[j] = kLost * std::ceil(static_cast<double>(dims) / 32) * std::abs(call.scale) * largest;
    most = std::max(most, moved[j]);
    sign[j] = sign_of(std::inner_product(query, query + dims, key, 0.0));
    weight[j] = std::exp(row.logits[j] - row.largest);
    sum += weight[j];
  }
  const double growth = std::exp(most);
  for (std::size_t d = 0; d < dims; ++d) {
    const auto value = [&](std::size_t j) { return call.value_cache[cursor.at(row.keys[j]) + d]; };
    const auto term = [&](std::size_t j) { return weight[j] / sum * value(j); };
    double exact = 0;
    for (std::size_t j = 0; j < weight.size(); ++j) exact += term(j);
    Errors logits, tiles;
    double all = 0, square = 0;  // of roundings
    for (std::size_t first = 0; first < weight.size(); first += kTile) {
      double rounding = 0;  // of the tile
      for (std::size_t j = first; j < std::min(first + kTile, weight.size()); ++j) {
        const double error = std::max(weight[j] / 16, 0x1p-14) * std::abs(value(j)) / sum;
        logits.add(weight[j] / sum * std::expm1(moved[j]) * (value(j) - exact), sign[j]);
        all += error;
        square += error * error;
        rounding += error * error;
      }
      const std::size_t last = std::min(first + 2 * kTile, weight.size());
      const double largest = largest_run(first, last, term) + 6 * std::sqrt(2 * rounding);
      double tile = 0;
      for (std::size_t j = first; j < last; ++j) tile += term(j);
      tiles.add(kLost * kTileSteps * largest, sign_of(tile));
    }
    out[d] += growth * logits.bound() +
              growth * growth * (std::min(all, 6 * std::sqrt(square)) + tiles.bound());
  }
  return most;
}

/// What `of_row` makes of every row that sees keys, for results and their LSE.
template <typename OfRow>
FlushBound bound_rows(const AttentionCase& call, const OfRow& of_row) {
  const auto head_size = static_cast<std::size_t>(call.head_size);
  FlushBound bound{.out = std::vector<double>(call.query.size()),
                   .lse = std::vector<double>(call.query.size() / head_size)};
  for_each_row(call, [&](const Cursor& cursor, std::int32_t seq_len, std::size_t at) {
    const double* const query = &call.query[at * head_size];
    const Row row = score(query, cursor, seq_len);
    if (row.keys.empty()) return;
    bound.lse[at] = of_row(row, cursor, query, &bound.out[at * head_size]);
  });
  return bound;
}

}  // namespace

namespace {

/// sees() of a draft in a tree: asked of a case whose only sequence is the path to the draft, with
/// positions counted along that path.
bool sees_in_tree(const AttentionCase& call, std::int32_t request, std::int32_t token,
                  std::int32_t position) {
  const auto r = static_cast<std::size_t>(request);
  const std::vector<std::int32_t>& parents = call.tree_parents[r];
  const auto nodes = static_cast<std::int32_t>(parents.size());
  const std::int32_t before = call.seq_lens[r] - nodes;  // keys in front of the tree
  std::vector<std::int32_t> path;                        // nodes, from the draft to its root
  for (std::int32_t node = nodes - (call.query_start_loc[r + 1] - token); node >= 0;
       node = parents[static_cast<std::size_t>(node)])
    path.push_back(node);
  std::int32_t place = position;  // in that sequence
  if (position >= before) {
    const auto found = std::find(path.rbegin(), path.rend(), position - before);
    if (found == path.rend()) return false;
    place = before + static_cast<std::int32_t>(found - path.rbegin());
  }
  AttentionCase alone;
  alone.query_start_loc = {0, 1};
  alone.seq_lens = {before + static_cast<std::int32_t>(path.size())};
  alone.window_left = call.window_left;
  alone.chunk = call.chunk;
  alone.chunk_lookback = call.chunk_lookback;
  if (!call.first_keys.empty()) alone.first_keys = {call.first_keys[r]};
  if (!call.keep_keys.empty()) alone.keep_keys = {call.keep_keys[r]};
  if (!sees(alone, 0, 0, place)) return false;
  const std::int64_t at = token * call.custom_mask_stride + position;
  return call.custom_mask.empty() || call.custom_mask[static_cast<std::size_t>(at)] != 0;
}

}  // namespace

bool sees(const AttentionCase& call, std::int32_t request, std::int32_t token,
          std::int32_t position) {
  const auto r = static_cast<std::size_t>(request);
  if (!call.tree_parents.empty() && !call.tree_parents[r].empty())
    return sees_in_tree(call, request, token, position);
  const std::int32_t own =
      token + call.seq_lens[r] - call.query_start_loc[r + 1];  // where the query stands
  const Looks usual = call.causal ? Looks::kBack : Looks::kBothWays;
  const Looks looks = call.looks.empty() ? usual : call.looks[r];
  const bool canvas = looks == Looks::kCanvas;
  const std::int32_t origin = canvas ? own - (token - call.query_start_loc[r]) : own;
  const bool left = call.window_left < 0 || std::int64_t{origin} - position <= call.window_left;
  const bool right =
      call.window_right < 0 || canvas || std::int64_t{position} - own <= call.window_right;
  const std::int32_t back =
      call.chunk > 0 ? chunk_at(own, call.chunk) - chunk_at(position, call.chunk) : 0;
  const bool in_span = share_span(call, request, position, own);
  bool ahead = right;
  if (looks == Looks::kBack) {
    ahead = position <= own || (in_span && (call.span_cut == SpanCut::kLeft ||
                                            (call.span_cut == SpanCut::kBoth && right)));
  }
  const bool kept = !call.keep_keys.empty() && position < call.keep_keys[r];
  bool seen = ((left && back <= call.chunk_lookback) || kept) && ahead && back >= 0;
  if (call.span_cut == SpanCut::kNone && in_span) seen = true;
  if (!call.first_keys.empty() && position < call.first_keys[r]) return false;
  if (call.custom_mask.empty()) return seen;
  return seen &&
         call.custom_mask[static_cast<std::size_t>(token * call.custom_mask_stride + position)] !=
             0;
}

AttentionResult attention(const AttentionCase& call, Element element) {
  AttentionResult result;
  result.out.assign(call.query.size(), 0.0);
  result.bound.assign(call.query.size(), 0.0);
  result.weight_rounding.assign(call.query.size(), 0.0);
  const auto head_size = static_cast<std::size_t>(call.head_size);
  result.lse.assign(call.query.size() / head_size, -std::numeric_limits<double>::infinity());
  for_each_row(call, [&](const Cursor& cursor, std::int32_t seq_len, std::size_t at) {
    const Row row = score(&call.query[at * head_size], cursor, seq_len);
    result.lse[at] = attend(row, cursor, element, &result.out[at * head_size],
                            &result.bound[at * head_size], &result.weight_rounding[at * head_size]);
  });
  return result;
}

FlushBound flush_bound(const AttentionCase& call, const FlushLimits& limits) {
  return bound_rows(call, [&](const Row& row, const Cursor& cursor, const double* query,
                              double* out) { return flush_row(row, cursor, query, limits, out); });
}

FlushBound fp8_bound(const AttentionCase& call) {
  return bound_rows(call, fp8_row);
}

AttentionResult attention_in_fp8(AttentionCase call, Element element, double query_scale) {
  for (double& x : call.query) x = query_scale * round_to(Element::kFp8E4M3, x / query_scale);
  AttentionResult result = attention(call, element);
  FlushBound more = fp8_bound(call);
  for (std::size_t i = 0; i < result.bound.size(); ++i) result.bound[i] += more.out[i] / 2;
  result.weight_rounding.assign(result.weight_rounding.size(), 0.0);  // more.out includes it
  result.lse_bound = std::move(more.lse);
  return result;
}

}  // namespace oracle
