#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "oracle/row_scales.hpp"

namespace {

using oracle::Element;
using oracle::StoredRow;
using Codes = std::vector<std::uint8_t>;

std::string judge(Element element, const std::vector<double>& row, const Codes& codes,
                  float scale) {
  return oracle::why_not_stored(row, {element, codes, scale});
}

TEST(RowScaleJudge, TellsLegalRowsOfInt8FromOthers) {
  const std::vector<double> row = {127, -3.4, 0.5, -127};
  EXPECT_EQ(judge(Element::kInt8, row, {127, 253, 0, 129}, 1), "");
  EXPECT_EQ(judge(Element::kInt8, row, {127, 253, 1, 129}, 1), "");  // a tie, either way
  EXPECT_NE(judge(Element::kInt8, row, {127, 252, 0, 129}, 1), "");  // -4 is further than -3
  EXPECT_NE(judge(Element::kInt8, row, {127, 253, 0, 128}, 1), "");  // -128 is never produced
  EXPECT_NE(judge(Element::kInt8, row, {127, 253, 0, 129}, 1 + 0x1p-15F), "");
  EXPECT_NE(judge(Element::kInt8, row, {64, 254, 0, 192}, 2), "");  // half of the codes unused
}

TEST(RowScaleJudge, TellsLegalRowsOfE4m3FromOthers) {
  const std::vector<double> row = {448, 17, -0.001};
  const auto code = [](double x) {
    return static_cast<std::uint8_t>(oracle::encode(Element::kFp8E4M3, x));
  };
  EXPECT_EQ(judge(Element::kFp8E4M3, row, {code(448), code(16), code(-0x1p-9)}, 1), "");
  EXPECT_EQ(judge(Element::kFp8E4M3, row, {code(448), code(18), code(-0x1p-9)}, 1), "");
  EXPECT_NE(judge(Element::kFp8E4M3, row, {code(448), code(20), code(-0x1p-9)}, 1), "");
  EXPECT_NE(judge(Element::kFp8E4M3, row, {0x7F, code(16), code(-0x1p-9)}, 1), "");  // NaN
}

TEST(RowScaleJudge, ZerosInfinitiesAndNaN) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(judge(Element::kInt8, {0, -0.0}, {0, 0}, 7), "");  // of zeros any scale
  EXPECT_NE(judge(Element::kInt8, {0, 2}, {0, 0}, 0), "");
  EXPECT_EQ(judge(Element::kInt8, {1, kInf, -kInf, std::nan("")}, {127, 127, 129, 0}, 1 / 127.0F),
            "");
  EXPECT_NE(judge(Element::kInt8, {1, kInf}, {127, 0}, 1 / 127.0F), "");
  EXPECT_NE(judge(Element::kFp8E4M3, {1, std::nan("")}, {0x7E, 0}, 1 / 448.0F), "");
  EXPECT_EQ(judge(Element::kFp8E4M3, {1, std::nan("")}, {0x7E, 0x7F}, 1 / 448.0F), "");
}

/// (hi - lo) / 15 and a zero that keeps 0 among the values.
TEST(RowScaleJudge, TellsLegalRowsOf4BitsFromOthers) {
  const auto with_zero = [](double scale, std::uint32_t zero) {
    return oracle::join_scale({scale, zero});
  };
  const std::vector<double> row = {-2, 13, 0.5, 3};
  EXPECT_EQ(judge(Element::kUInt4, row, {0, 15, 2, 5}, with_zero(1, 2)), "");
  EXPECT_EQ(judge(Element::kUInt4, row, {0, 15, 3, 5}, with_zero(1, 2)), "");  // a tie
  EXPECT_NE(judge(Element::kUInt4, row, {0, 15, 4, 5}, with_zero(1, 2)), "");
  EXPECT_NE(judge(Element::kUInt4, row, {1, 15, 2, 6}, with_zero(1, 3)), "");  // another zero
  EXPECT_NE(judge(Element::kUInt4, row, {0, 14, 2, 5}, with_zero(1 + 0x1p-15, 2)), "");
  // Of rows of one sign the range has 0, too (vLLM's has not: s = 1e-6, codes 0).
  EXPECT_EQ(judge(Element::kUInt4, {3, 3}, {15, 15}, with_zero(0.2F, 0)), "");
  EXPECT_NE(judge(Element::kUInt4, {3, 3}, {0, 0}, with_zero(1e-6F, 0)), "");
  EXPECT_EQ(judge(Element::kUInt4, {-1.5, 0}, {0, 15}, with_zero(0.1F, 15)), "");
}

TEST(RowScaleJudge, ZerosInfinitiesAndNaNOf4Bits) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(judge(Element::kUInt4, {0, -0.0}, {0, 0}, 0), "");
  EXPECT_NE(judge(Element::kUInt4, {0, -0.0}, {1, 0}, 0), "");
  EXPECT_NE(judge(Element::kUInt4, {0, 2}, {0, 0}, 0), "");
  EXPECT_EQ(judge(Element::kUInt4, {15, kInf, -kInf, std::nan("")}, {15, 15, 0, 0}, 1), "");
  EXPECT_NE(judge(Element::kUInt4, {15, kInf}, {15, 14}, 1), "");
}

/// The zero is the scale's 4 lowest bits, whatever its mantissa.
TEST(RowScaleJudge, ScalesHoldZeros) {
  for (const std::uint32_t zero : {0U, 7U, 15U}) {
    const auto parts = oracle::split_scale(oracle::join_scale({2 - 0x1p-23, zero}));
    EXPECT_EQ(parts.zero, zero);
    EXPECT_EQ(parts.scale, 2 - 0x1p-19);
  }
  EXPECT_EQ(oracle::row_value(Element::kUInt4, 3, oracle::join_scale({0.5, 15})), -6);
  EXPECT_EQ(oracle::row_value(Element::kInt8, 253, 0.5F), -1.5);
}

}  // namespace
