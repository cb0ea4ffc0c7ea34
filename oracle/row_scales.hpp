#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "oracle/oracle.hpp"

namespace oracle {

/// A row of values as a cache with a scale for each token and head holds it.
struct StoredRow {
  Element element = Element::kInt8;     ///< or kFp8E4M3, kUInt4
  std::span<const std::uint8_t> codes;  ///< each in a byte
  float scale = 0;                      ///< as stored: of kUInt4 with its zero
};

/// A scale of kUInt4 as stored: its 4 lowest bits are the zero, and 0 in the scale itself.
struct ScaleAndZero {
  double scale = 0;
  std::uint32_t zero = 0;
};
ScaleAndZero split_scale(float stored);
float join_scale(ScaleAndZero parts);
/// What a row's code stands for.
double row_value(Element element, std::uint8_t code, float stored_scale);

/// Why a writer may not have stored `row` so; empty = it may. With A the largest finite magnitude
/// and Q the largest code's value (127, 448): the scale is A / Q within half a unit of f32 in the
/// last place and 2^-18 of itself, or 0 where that is below the smallest normal number; a code is
/// as near to x / scale as any, within 2^-13 (of a step of int8, of the quotient of e4m3).
/// Infinities saturate, NaN is e4m3's or int8's 0. Of a row of zeros the scale may be anything.
///
/// Of kUInt4, with hi and lo the largest and smallest of the finite numbers and 0: the scale is (hi
/// - lo) / 15 as nearly, the zero as near to -lo / scale, and a code to x / scale + zero, within
/// 0 … 15, as any within 2^-13; NaN is code 0.
std::string why_not_stored(std::span<const double> row, const StoredRow& stored);

}  // namespace oracle
