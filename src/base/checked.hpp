#pragma once

#include <bit>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/error.hpp"

namespace clattn::detail {

/// The largest number of a 32-bit field, for sums that may not fit one.
inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

/// A number of things that is known not to be negative.
constexpr std::size_t to_size(std::integral auto count) {
  return static_cast<std::size_t>(count);
}

/// Sets `value` to the number that the whole text is; false if it is none.
template <typename Number>
bool parse_number(std::string_view text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end;
}

/// Throws kInvalidArgument unless the value of a field is at least `low`.
inline void check_at_least(std::string_view field, std::int64_t value, std::int64_t low) {
  throw_invalid_if(value < low, "{} is {}, legal: at least {}", field, value, low);
}

/// Throws kInvalidArgument unless the value of a field is one of `low` … `high`.
inline void check_between(std::string_view field, std::int64_t value, std::int64_t low,
                          std::int64_t high) {
  throw_invalid_if(value < low || value > high, "{} is {}, legal: {} … {}", field, value, low,
                   high);
}

/// a * b, or kInvalidArgument naming `what` when the product does not fit T.
template <std::integral T>
T checked_mul(T a, T b, std::string_view what) {
  T product{};
  throw_invalid_if(__builtin_mul_overflow(a, b, &product), "{}: {} * {} overflows", what, a, b);
  return product;
}

/// a + b, or kInvalidArgument naming `what` when the sum does not fit T.
template <std::integral T>
T checked_add(T a, T b, std::string_view what) {
  T sum{};
  if (__builtin_add_overflow(a, b, &sum)) throw_invalid("{}: {} + {} overflows", what, a, b);
  return sum;
}

/// a / b, for a >= 0 and b >= 1. Page sizes, by which every step divides hundreds of lengths, are
/// nearly always powers of two, and a shift takes a fraction of a division's time.
constexpr std::int32_t quotient(std::int32_t a, std::int32_t b) {
  const auto divisor = static_cast<std::uint32_t>(b);
  return std::has_single_bit(divisor) ? a >> std::countr_zero(divisor) : a / b;
}

template <std::integral T>
constexpr T ceil_div(T a, T b) {
  return static_cast<T>(a / b + (a % b != 0 ? 1 : 0));
}

template <std::integral T>
constexpr T round_up(T a, T multiple) {
  return static_cast<T>(ceil_div(a, multiple) * multiple);
}

}  // namespace clattn::detail
