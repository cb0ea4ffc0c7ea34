// Arithmetic of the instructions: number formats, conversions, bit fields.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace amdemu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using f16 = _Float16;

template <class To, class From>
inline To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}
inline f16 half_of(u32 bits) {
  return as<f16>(static_cast<u16>(bits));
}
inline u32 bits_of(f16 value) {
  return as<u16>(value);
}
inline float bf16_of(u32 bits) {
  return as<float>(bits << 16);
}
inline u32 bf16_bits(float value) {  // to nearest even
  const u32 bits = as<u32>(value);
  if (value != value) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float flushed(float value) {
  return std::fabs(value) < 0x1p-126F ? std::copysign(0.0F, value) : value;
}
inline float flushed16(float value) {
  return std::fabs(value) < 0x1p-14F ? std::copysign(0.0F, value) : value;
}

inline float fp8_of(u32 byte, bool e5m2, bool fnuz) {
  const int mantissa_bits = e5m2 ? 2 : 3, bias = (e5m2 ? 15 : 7) + (fnuz ? 1 : 0);
  const u32 sign = byte >> 7 & 1, exponent = (byte & 0x7f) >> mantissa_bits;
  const u32 mantissa = byte & ((1U << mantissa_bits) - 1);
  if (fnuz && (byte & 0xff) == 0x80) return NAN;
  if (!fnuz && e5m2 && exponent == 31)
    return mantissa != 0 ? NAN : sign != 0U ? -INFINITY : INFINITY;
  if (!fnuz && !e5m2 && (byte & 0x7f) == 0x7f) return NAN;
  const float value = exponent == 0
                          ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                          : std::ldexp(static_cast<float>(mantissa + (1U << mantissa_bits)),
                                       static_cast<int>(exponent) - bias - mantissa_bits);
  return sign != 0U ? -value : value;
}
/// To nearest even. What is too large becomes the largest finite code where `clamps`, as MODE's
/// FP16_OVFL asks for; otherwise infinity, or NaN where the format has none.
inline u32 fp8_bits(float value, bool e5m2, bool fnuz, bool clamps) {
  const u32 nan = fnuz ? 0x80 : 0x7f;
  if (value != value || (fnuz && std::isinf(value))) return nan;
  const u32 sign = std::signbit(value) ? 0x80 : 0;
  const u32 infinity = fnuz ? nan : e5m2 ? sign | 0x7c : sign | 0x7f;
  if (std::isinf(value)) return infinity;
  const u32 largest = fnuz ? 0x7f : e5m2 ? 0x7b : 0x7e;
  const float magnitude = std::fabs(value), limit = fp8_of(largest, e5m2, fnuz);
  // The next code would stand half a step away; its mantissa is even, so that a tie goes there.
  const float step = limit - fp8_of(largest - 1, e5m2, fnuz);
  const bool tie_overflows = (largest & 1) != 0;
  const float edge = limit + step / 2;
  if (magnitude > edge || (magnitude == edge && tie_overflows)) {
    return clamps ? sign | largest : infinity;
  }
  u32 best = 0;
  float best_error = INFINITY;
  for (u32 code = 0; code <= largest; ++code) {
    const float error = std::fabs(fp8_of(code, e5m2, fnuz) - magnitude);
    if (error < best_error || (error == best_error && (code & 1) == 0)) {
      best = code, best_error = error;
    }
  }
  return fnuz && best == 0 ? 0 : sign | best;  // 0x80 is no zero there
}
inline float max_num(float a, float b) {
  return (a > b || b != b) ? a : (b > a || a != a) ? b : as<float>(as<u32>(a) & as<u32>(b));
}
inline float min_num(float a, float b) {
  return (a < b || b != b) ? a : (b < a || a != a) ? b : as<float>(as<u32>(a) | as<u32>(b));
}
inline double max_num(double a, double b) {
  return (a > b || b != b) ? a : (b > a || a != a) ? b : as<double>(as<u64>(a) & as<u64>(b));
}
inline double min_num(double a, double b) {
  return (a < b || b != b) ? a : (b < a || a != a) ? b : as<double>(as<u64>(a) | as<u64>(b));
}
inline f16 max_num(f16 a, f16 b) {
  return static_cast<f16>(max_num(static_cast<float>(a), static_cast<float>(b)));
}
inline f16 min_num(f16 a, f16 b) {
  return static_cast<f16>(min_num(static_cast<float>(a), static_cast<float>(b)));
}
inline float maximum(float a, float b) {
  return a != a || b != b ? NAN : max_num(a, b);
}
inline float minimum(float a, float b) {
  return a != a || b != b ? NAN : min_num(a, b);
}
template <class T>
inline T med3(T a, T b, T c) {
  if constexpr (!std::is_integral_v<T>) {
    if (a != a || b != b || c != c) return min_num(min_num(a, b), c);
    return max_num(min_num(a, b), min_num(max_num(a, b), c));
  } else {
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
  }
}
inline i32 to_i32(double value) {
  if (value != value) return 0;
  return value >= 2147483647.0    ? 2147483647
         : value <= -2147483648.0 ? INT32_MIN
                                  : static_cast<i32>(value);
}
inline u32 to_u32(double value) {
  if (!(value > 0)) return 0;
  return value >= 4294967295.0 ? 0xffffffffU : static_cast<u32>(value);
}
inline f16 to_half_rtz(float value) {
  const f16 nearest = static_cast<f16>(value);
  if (value != value || std::isinf(value)) return nearest;
  if (std::fabs(static_cast<float>(nearest)) > std::fabs(value))
    return as<f16>(static_cast<u16>(as<u16>(nearest) - 1));
  return nearest;
}
template <class F>
inline bool in_class(F value, u32 mask) {
  int bit = 0;
  const bool negative = std::signbit(static_cast<double>(value));
  const double d = static_cast<double>(value);
  double smallest = sizeof(F) == 2 ? 0x1p-14 : sizeof(F) == 4 ? 0x1p-126 : 0x1p-1022;
  if (d != d)
    bit = 1;
  else if (std::isinf(d))
    bit = negative ? 2 : 9;
  else if (d == 0)
    bit = negative ? 5 : 6;
  else if (std::fabs(d) < smallest)
    bit = negative ? 4 : 7;
  else
    bit = negative ? 3 : 8;
  if (bit == 1) return (mask & 3) != 0;
  return (mask >> bit & 1) != 0;
}
inline u32 perm(u32 a, u32 b, u32 selectors) {
  const u64 both = (u64(a) << 32) | b;
  u32 result = 0;
  for (int n = 0; n < 4; ++n) {
    const u32 s = selectors >> (8 * n) & 0xff;
    u32 byte = 0;
    if (s < 8)
      byte = static_cast<u32>(both >> (8 * s)) & 0xff;
    else if (s < 12)
      byte = (both >> (16 * (s - 8) + 15) & 1) != 0 ? 0xff : 0;
    else if (s == 12)
      byte = 0;
    else
      byte = 0xff;
    result |= byte << (8 * n);
  }
  return result;
}
inline u32 bfe(u32 a, u32 b, u32 c) {
  b &= 31, c &= 31;
  return (a >> b) & ((1U << c) - 1);
}
inline i32 bfe_signed(u32 a, u32 b, u32 c) {
  b &= 31, c &= 31;
  if (c == 0) return 0;
  const u32 field = (a >> b) & ((1U << c) - 1);
  const u32 sign = 1U << (c - 1);
  // Bits beyond the register repeat its sign.
  if (b + c > 32) return static_cast<i32>(a) >> b;
  return static_cast<i32>((field ^ sign) - sign);
}
inline i32 s24(u32 a) {
  return static_cast<i32>(a << 8) >> 8;
}
inline u32 u24(u32 a) {
  return a & 0xffffff;
}

inline f16 half_fma(f16 a, f16 b, f16 c) {
  return static_cast<f16>(
      __builtin_fma(static_cast<double>(a), static_cast<double>(b), static_cast<double>(c)));
}
/// Of [0, 1): what rounds up to 1 becomes the number before it.
template <class F>
inline F fraction(F a) {
  const F r = a - std::floor(a);
  return r < F(1) || r != r ? r : std::nextafter(F(1), F(0));
}
template <class F>
inline F mantissa(F a) {
  if (a == 0 || a != a || std::isinf(a)) return a;
  int e = 0;
  return std::frexp(a, &e);
}
template <class F>
inline i32 exponent(F a) {
  int e = 0;
  if (a == 0 || a != a || std::isinf(a)) return 0;
  std::frexp(a, &e);
  return e;
}
inline u32 clz_or_minus1(u32 a) {
  return a == 0 ? 0xffffffffU : static_cast<u32>(std::countl_zero(a));
}
inline u32 ctz_or_minus1(u32 a) {
  return a == 0 ? 0xffffffffU : static_cast<u32>(std::countr_zero(a));
}
inline u32 sign_run(u32 a) {
  const u32 flipped = static_cast<i32>(a) < 0 ? ~a : a;
  return flipped == 0 ? 0xffffffffU : static_cast<u32>(std::countl_zero(flipped));
}
inline i32 dot4_signed(u32 a, u32 b) {
  i32 sum = 0;
  for (int n = 0; n < 4; ++n) sum += static_cast<i8>(a >> (8 * n)) * static_cast<i8>(b >> (8 * n));
  return sum;
}
inline u32 dot4_unsigned(u32 a, u32 b) {
  u32 sum = 0;
  for (int n = 0; n < 4; ++n) sum += (a >> (8 * n) & 0xff) * (b >> (8 * n) & 0xff);
  return sum;
}
inline u32 rtz_pair(float a, float b) {
  return bits_of(to_half_rtz(a)) | (bits_of(to_half_rtz(b)) << 16);
}
inline u32 norm16(float v, float scale, float lowest) {
  const float scaled = std::nearbyint((v < lowest ? lowest
                                       : v > 1    ? 1.0F
                                       : v != v   ? 0.0F
                                                  : v) *
                                      scale);
  return static_cast<u32>(static_cast<i32>(scaled)) & 0xffff;
}

}  // namespace amdemu
