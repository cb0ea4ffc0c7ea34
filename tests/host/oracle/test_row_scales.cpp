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

}  // namespace
