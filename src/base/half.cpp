#include "base/half.hpp"

#include <bit>

namespace clattn::detail {
namespace {

constexpr std::uint32_t kMagnitudeMask = 0x7fffffffU;
constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr std::uint32_t kExponentGap = (127U - 15U) << 23U;  // the biases of f32 and f16

std::uint32_t sign_of_f16(std::uint32_t bits) {
  return (bits >> 16U) & 0x8000U;
}

// Rounds away the low `drop` bits to nearest even; a carry moves into the exponent, as it should.
std::uint32_t round_to_even(std::uint32_t bits, std::uint32_t drop) {
  const std::uint32_t odd = (bits >> drop) & 1U;
  return (bits + (1U << (drop - 1U)) - 1U + odd) >> drop;
}

}  // namespace

std::uint16_t f32_to_f16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = sign_of_f16(bits);
  const std::uint32_t magnitude = bits & kMagnitudeMask;
  std::uint32_t half = 0x7c00U;
  if (magnitude > kInfinity) {
    half = 0x7e00U | ((magnitude >> 13U) & 0x3ffU);
  } else if (magnitude < 0x38800000U) {
    // Below 2^-14 f16 counts in steps of 2^-24, which is one ulp of 0.5: the addition rounds.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else if (magnitude < 0x47800000U) {
    half = round_to_even(magnitude - kExponentGap, 13);
  }
  return static_cast<std::uint16_t>(sign | half);
}

float f16_to_f32(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16U;
  const std::uint32_t magnitude = bits & 0x7fffU;
  std::uint32_t wide = 0;
  if (magnitude >= 0x7c00U) {
    wide = kInfinity | ((magnitude & 0x3ffU) << 13U);
  } else if (magnitude >= 0x400U) {
    wide = (magnitude << 13U) + kExponentGap;
  } else {
    wide = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  }
  return std::bit_cast<float>(sign | wide);
}

std::uint16_t f32_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Truncating a NaN could leave an infinity: set the quiet bit.
  if ((bits & kMagnitudeMask) > kInfinity) return static_cast<std::uint16_t>((bits >> 16U) | 0x40U);
  return static_cast<std::uint16_t>(round_to_even(bits, 16));
}

float bf16_to_f32(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

}  // namespace clattn::detail
