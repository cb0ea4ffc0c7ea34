#include "oracle/row_scales.hpp"

#include <algorithm>
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

}  // namespace

std::string why_not_stored(std::span<const double> row, const StoredRow& stored) {
  std::ostringstream why;
  why.precision(12);
  const double most = stored.element == Element::kInt8 ? 127 : 448;
  const double wanted = largest_finite(row) / most;
  const double scale = stored.scale;
  const bool all_zero = std::ranges::all_of(
      stored.codes, [&](std::uint8_t code) { return decode(stored.element, code) == 0; });
  if (!all_zero) {
    const double allowed = half_ulp(Element::kF32, wanted) + kScaleSlack * wanted;
    const bool is_near = std::abs(scale - wanted) <= allowed;
    if (!is_near && !(scale == 0 && wanted < kSmallest)) {
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
