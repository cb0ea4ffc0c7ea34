#pragma once

#include <cstdint>

namespace clattn::detail {

/// Conversions between float and the 16-bit storage types, given as their bits. Narrowing rounds to
/// nearest even, overflows to infinity and keeps NaN; widening is exact.
std::uint16_t f32_to_f16(float value) noexcept;
float f16_to_f32(std::uint16_t bits) noexcept;
std::uint16_t f32_to_bf16(float value) noexcept;
float bf16_to_f32(std::uint16_t bits) noexcept;

}  // namespace clattn::detail
