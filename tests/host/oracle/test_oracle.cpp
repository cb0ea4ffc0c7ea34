#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "oracle/oracle.hpp"

namespace {

using oracle::Element;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct BitsRow {
  Element element;
  double value;
  std::uint32_t bits;
};

// Patterns from IEEE 754 binary16 and binary32 and from the upper half of binary32 (bfloat16).
const BitsRow kBits[] = {
    {Element::kF16, 0.0, 0x0000},
    {Element::kF16, -0.0, 0x8000},
    {Element::kF16, 1.0, 0x3C00},
    {Element::kF16, -2.0, 0xC000},
    {Element::kF16, 65504.0, 0x7BFF},
    {Element::kF16, 65519.99, 0x7BFF},
    {Element::kF16, 65520.0, 0x7C00},
    {Element::kF16, 0x1p-24, 0x0001},
    {Element::kF16, 0x1p-25, 0x0000},      // a tie goes to the even zero
    {Element::kF16, 0x1.8p-24, 0x0002},    // a tie between 1 and 2 goes to 2
    {Element::kF16, 0x1.ff8p-15, 0x03FF},  // the largest subnormal
    {Element::kF16, 0x1.ffcp-15, 0x0400},  // rounds up into the normal numbers
    {Element::kF16, 1.0 + 0x1p-11, 0x3C00},
    {Element::kF16, 1.0 + 0x3p-11, 0x3C02},
    {Element::kF16, -kInfinity, 0xFC00},
    {Element::kBF16, 1.0, 0x3F80},
    {Element::kBF16, 1.0 + 0x1p-8, 0x3F80},
    {Element::kBF16, 1.0 + 0x3p-8, 0x3F82},
    {Element::kBF16, 3.4e38, 0x7F80},
    {Element::kBF16, 0x1p-133, 0x0001},
    {Element::kBF16, -0x1p-126, 0x8080},
    {Element::kF32, 1.0, 0x3F800000},
    {Element::kF32, 0x1p-149, 0x00000001},
    {Element::kF32, 1.0 + 0x1p-24, 0x3F800000},
    // The OCP 8-bit formats: e4m3 has no infinity, e5m2 is the upper half of f16.
    {Element::kFp8E4M3, 1.0, 0x38},
    {Element::kFp8E4M3, -448.0, 0xFE},
    {Element::kFp8E4M3, 1e9, 0x7E},
    {Element::kFp8E4M3, -kInfinity, 0xFE},
    {Element::kFp8E4M3, 0x1p-9, 0x01},
    {Element::kFp8E4M3, 0x1p-10, 0x00},  // a tie
    {Element::kFp8E4M3, 0x1.8p-9, 0x02},
    {Element::kFp8E4M3, 0x7p-9, 0x07},
    {Element::kFp8E4M3, 0x1p-6, 0x08},
    {Element::kFp8E4M3, 17.0, 0x58},  // between 16 and 18
    {Element::kFp8E4M3, 19.0, 0x5A},
    {Element::kFp8E4M3, -0.0, 0x80},
    {Element::kFp8E5M2, 1.0, 0x3C},
    {Element::kFp8E5M2, 57344.0, 0x7B},
    {Element::kFp8E5M2, 61440.0, 0x7B},
    {Element::kFp8E5M2, kInfinity, 0x7B},
    {Element::kFp8E5M2, 0x1p-16, 0x01},
    {Element::kFp8E5M2, 0x1p-17, 0x00},
    {Element::kFp8E5M2, 1.125, 0x3C},
    {Element::kFp8E5M2, 1.375, 0x3E},
    {Element::kInt8, 127.4, 0x7F},
    {Element::kInt8, -1e9, 0x81},
    {Element::kInt8, 0.5, 0x00},
    {Element::kInt8, 1.5, 0x02},
    {Element::kInt8, -1.0, 0xFF},
    {Element::kInt8, -126.5, 0x82},
    {Element::kInt8, kInfinity, 0x7F},
    {Element::kUInt4, -kInfinity, 0},
    {Element::kUInt4, 2.5, 2},
    {Element::kUInt4, 14.6, 15},
    {Element::kUInt4, 99, 15},
};

TEST(Oracle, EncodesKnownBitPatterns) {
  for (const BitsRow& row : kBits) {
    EXPECT_EQ(oracle::encode(row.element, row.value), row.bits) << row.value;
    EXPECT_EQ(oracle::decode(row.element, row.bits), oracle::round_to(row.element, row.value));
  }
}

TEST(Oracle, EverySixteenBitPatternSurvivesTheRoundTrip) {
  for (const Element element : {Element::kF16, Element::kBF16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double value = oracle::decode(element, bits);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(oracle::decode(element, oracle::encode(element, value))));
      } else {
        ASSERT_EQ(oracle::encode(element, value), bits);
      }
    }
  }
}

// A6.2: finite e4m3, e5m2 and int8 caches.
TEST(Oracle, EveryEightBitPatternSurvivesTheRoundTrip) {
  for (const Element element : {Element::kFp8E4M3, Element::kFp8E5M2, Element::kInt8}) {
    for (std::uint32_t bits = 0; bits < 0x100; ++bits) {
      const double value = oracle::decode(element, bits);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(oracle::decode(element, oracle::encode(element, value))));
      } else if (std::isfinite(value) && value != -128.0) {  // which saturation never stores
        ASSERT_EQ(oracle::encode(element, value), bits);
      }
    }
  }
  for (std::uint32_t bits = 0; bits < 0x100; ++bits) {
    const double half = oracle::decode(Element::kF16, bits << 8);
    const double value = oracle::decode(Element::kFp8E5M2, bits);
    EXPECT_TRUE(value == half || (std::isnan(value) && std::isnan(half))) << bits;
    EXPECT_EQ(std::isnan(oracle::decode(Element::kFp8E4M3, bits)), (bits & 0x7F) == 0x7F);
  }
  EXPECT_EQ(oracle::encode(Element::kInt8, std::numeric_limits<double>::quiet_NaN()), 0U);
}

TEST(Oracle, SinglePrecisionAgreesWithTheCompiler) {
  std::uint32_t state = 1;
  for (int i = 0; i < 20000; ++i) {
    state = state * 1664525U + 1013904223U;
    const auto value = std::bit_cast<float>(state);
    if (std::isnan(value)) continue;
    ASSERT_EQ(oracle::encode(Element::kF32, static_cast<double>(value)), state);
    ASSERT_EQ(oracle::decode(Element::kF32, state), static_cast<double>(value));
  }
  EXPECT_EQ(oracle::round_to(Element::kF32, 0.1), static_cast<double>(0.1F));
}

/// Two requests, two query heads on one KV head, pages of two tokens in shuffled order; everything
/// unused is NaN.
oracle::AttentionCase small_case() {
  oracle::AttentionCase call;
  call.num_heads = 2;
  call.num_kv_heads = 1;
  call.head_size = 1;
  call.block_size = 2;
  call.max_blocks = 2;
  call.query_start_loc = {0, 2, 3};
  call.seq_lens = {3, 1};
  call.block_table = {2, 0, 1, 99};
  call.query = {1, 2, 1, 0, 3, 5};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  call.key_cache = {std::log(2.0), nan, 1.5, nan, 0.0, std::log(3.0)};
  call.value_cache = {30, nan, -7, nan, 10, 20};
  return call;
}

TEST(Oracle, MatchesAttentionWorkedByHand) {
  const oracle::AttentionResult got = oracle::attention(small_case(), Element::kF32);
  // Request 0 has keys 0, ln 3, ln 2; its first query stands at position 1. Request 1 has one key.
  const std::array<double, 6> out = {
      (10 + 3 * 20) / 4.0, (10 + 9 * 20) / 10.0, (10 + 3 * 20 + 2 * 30) / 6.0, 20.0, -7.0, -7.0};
  const std::array<double, 6> lse = {
      std::log(4.0), std::log(10.0), std::log(6.0), std::log(3.0), 4.5, 7.5};
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(got.out[i], out[i], 1e-13);
    EXPECT_NEAR(got.lse[i], lse[i], 1e-13);
    EXPECT_GT(got.bound[i], 0);
    EXPECT_LT(got.bound[i], 1e-4);
  }
}

TEST(Oracle, CausalityAndPositionsMatter) {
  oracle::AttentionCase call = small_case();
  call.causal = false;
  const oracle::AttentionResult got = oracle::attention(call, Element::kF32);
  EXPECT_NEAR(got.out[0], (10 + 3 * 20 + 2 * 30) / 6.0, 1e-13);
}

TEST(Oracle, ARowWithoutKeysIsZeroWithLseMinusInfinity) {
  oracle::AttentionCase call = small_case();
  call.seq_lens = {2, 0};  // the only query of request 1 stands before position 0
  const oracle::AttentionResult got = oracle::attention(call, Element::kF32);
  EXPECT_EQ(got.out[4], 0);
  EXPECT_EQ(got.lse[5], -kInfinity);
}

TEST(Oracle, ARowWithoutALogitThatIsANumberIsNaN) {
  oracle::AttentionCase call = small_case();
  call.key_cache[2] = std::numeric_limits<double>::quiet_NaN();  // all that request 1 has
  const oracle::AttentionResult got = oracle::attention(call, Element::kF32);
  EXPECT_TRUE(std::isnan(got.out[4]));
  EXPECT_TRUE(std::isnan(got.lse[4]));
}

TEST(Oracle, BoundCoversOneRoundingOfTheResult) {
  for (const Element element : {Element::kF32, Element::kF16, Element::kBF16}) {
    const oracle::AttentionResult got = oracle::attention(small_case(), element);
    for (std::size_t i = 0; i < got.out.size(); ++i) {
      EXPECT_LE(std::abs(oracle::round_to(element, got.out[i]) - got.out[i]), got.bound[i]);
    }
  }
}

}  // namespace
