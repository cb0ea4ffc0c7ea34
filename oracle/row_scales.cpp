#include "oracle/row_scales.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

namespace oracle {

namespace {

constexpr double kSlack = 0x1p-13;       // of codes
constexpr double kScaleSlack = 0x1p-18;  // of scales
constexpr double kSmallest = 0x1p-126;   // normal f32

double largest_finite(std::span<const double> row) {
  double largest = 0;
  for (const double x : row)
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  return largest;
}

/// How far a quotient lies from the nearest value of e4m3.
double nearest_distance(double quotient) {
  double nearest = std::numeric_limits<double>::infinity();
  for (std::uint32_t code = 0; code < 256; ++code) {
    const double value = decode(Element::kFp8E4M3, code);
    if (std::isfinite(value)) nearest = std::min(nearest, std::abs(value - quotient));
  }
  return nearest;
}

bool is_legal(Element element, double x, double scale, std::uint8_t code) {
  const double value = decode(element, code);
  const bool is_int = element == Element::kInt8;
  if (std::isnan(x)) return is_int ? value == 0 : std::isnan(value);
  if (!std::isfinite(value) || (is_int && value == -128)) return false;
  if (scale == 0) return value == 0 || std::isinf(x);
  const double most = is_int ? 127 : 448;
  const double quotient = std::clamp(x / scale, -most, most);
  const double distance = std::abs(value - quotient);
  if (is_int) return distance <= 0.5 + kSlack;
  return distance <= nearest_distance(quotient) + kSlack * std::abs(quotient);
}

bool is_scale(double scale, double wanted) {
  const double allowed = half_ulp(Element::kF32, wanted) + kScaleSlack * wanted;
  return std::abs(scale - wanted) <= allowed || (scale == 0 && wanted < kSmallest);
}

bool is_nearest(double code, double wanted) {
  return std::abs(code - std::clamp(wanted, 0.0, 15.0)) <= 0.5 + kSlack;
}

std::string why_not_stored_with_zero(std::span<const double> row, const StoredRow& stored) {
  std::ostringstream why;
  why.precision(12);
  double lo = 0, hi = 0;
  for (const double x : row) {
    if (!std::isfinite(x)) continue;
    lo = std::min(lo, x);
    hi = std::max(hi, x);
  }
  const double wanted = (hi - lo) / 15;
  const auto [scale, zero] = split_scale(stored.scale);
  if (!is_scale(scale, wanted)) {
    why << "scale " << scale << ", expected " << wanted;
    return why.str();
  }
  if (scale > 0 && !is_nearest(zero, -lo / scale)) {
    why << "zero " << zero << ", expected " << -lo / scale;
    return why.str();
  }
  for (std::size_t i = 0; i < row.size(); ++i) {
    const double code = stored.codes[i];
    const bool is_zero = std::isnan(row[i]) || scale == 0;
    if (is_zero ? code == 0 : is_nearest(code, row[i] / scale + zero)) continue;
    why << "element " << i << ": " << row[i] << " with scale " << scale << " and zero " << zero
        << " is code " << code;
    return why.str();
  }
  return {};
}

}  // namespace

ScaleAndZero split_scale(float stored) {
  const auto bits = std::bit_cast<std::uint32_t>(stored);
  return {std::bit_cast<float>(bits & ~15U), bits & 15U};
}

float join_scale(ScaleAndZero parts) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(parts.scale));
  return std::bit_cast<float>((bits & ~15U) | parts.zero);
}

double row_value(Element element, std::uint8_t code, float stored_scale) {
  if (element != Element::kUInt4) return decode(element, code) * static_cast<double>(stored_scale);
  const auto [scale, zero] = split_scale(stored_scale);
  return (decode(element, code) - zero) * scale;
}

std::string why_not_stored(std::span<const double> row, const StoredRow& stored) {
  if (stored.element == Element::kUInt4) return why_not_stored_with_zero(row, stored);
  std::ostringstream why;
  why.precision(12);
  const double most = stored.element == Element::kInt8 ? 127 : 448;
  const double wanted = largest_finite(row) / most;
  const double scale = stored.scale;
  const bool all_zero = std::ranges::all_of(
      stored.codes, [&](std::uint8_t code) { return decode(stored.element, code) == 0; });
  if (!all_zero) {
    if (!is_scale(scale, wanted)) {
      why << "scale " << scale << ", expected " << wanted;
      return why.str();
    }
  }
  const double divisor = all_zero ? wanted : scale;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (is_legal(stored.element, row[i], divisor, stored.codes[i])) continue;
    if (all_zero && wanted < kSmallest && std::isfinite(row[i])) continue;  // the scale may be 0
    why << "element " << i << ": " << row[i] << " with scale " << divisor << " is code "
        << int{stored.codes[i]};
    return why.str();
  }
  return {};
}

}  // namespace oracle
