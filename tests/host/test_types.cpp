#include <gtest/gtest.h>

#include <bit>
#include <clattn/error.hpp>
#include <clattn/types.hpp>
#include <cmath>
#include <limits>

#include "base/checked.hpp"
#include "base/half.hpp"
#include "support/error_text.hpp"

namespace clattn {
namespace {

using test::error_text;

TEST(Types, NamesSizesAndParsersAgree) {
  const struct {
    DType dtype;
    std::string_view name;
    std::size_t size;
  } rows[] = {{DType::kF32, "f32", 4}, {DType::kF16, "f16", 2}, {DType::kBF16, "bf16", 2}};
  for (const auto& row : rows) {
    EXPECT_EQ(to_string(row.dtype), row.name);
    EXPECT_EQ(parse_dtype(row.name), row.dtype);
    EXPECT_EQ(element_size_bytes(row.dtype), row.size);
  }
  for (const KVCacheLayout layout :
       {KVCacheLayout::kNHD, KVCacheLayout::kHND, KVCacheLayout::kHDN, KVCacheLayout::kTiles}) {
    EXPECT_EQ(parse_kv_cache_layout(to_string(layout)), layout);
  }
  EXPECT_EQ(to_string(KVCacheLayout::kHND), "HND");
}

TEST(Types, UnknownNamesListTheLegalOnes) {
  EXPECT_EQ(error_text([] { parse_dtype("F32"); }, ErrorCode::kInvalidArgument),
            "dtype: 'F32' is not one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8");
  EXPECT_EQ(error_text([] { parse_kv_cache_layout(""); }, ErrorCode::kInvalidArgument),
            "layout: '' is not one of NHD, HND, HDN, tiles");
}

TEST(Checked, OverflowNamesTheProduct) {
  EXPECT_EQ(detail::checked_mul<std::int32_t>(46340, 46340, "area"), 2147395600);
  EXPECT_EQ(error_text([] { detail::checked_mul<std::int32_t>(65536, 32768, "area"); },
                       ErrorCode::kInvalidArgument),
            "area: 65536 * 32768 overflows");
  EXPECT_EQ(error_text([] { detail::checked_add<std::int8_t>(100, 28, "sum"); },
                       ErrorCode::kInvalidArgument),
            "sum: 100 + 28 overflows");
}

// The nearest of all finite f16 values by search in double, ties to the even one.
std::uint16_t nearest_f16(double value) {
  std::uint16_t best = 0;
  for (std::uint16_t bits = 0; bits <= 0x7c00; ++bits) {
    // Infinity stands where the next binade would begin.
    const auto at = [](std::uint16_t b) {
      return b == 0x7c00 ? 65536.0 : static_cast<double>(detail::f16_to_f32(b));
    };
    const double error = std::abs(at(bits) - value);
    const double best_error = std::abs(at(best) - value);
    if (error < best_error || (error == best_error && bits % 2 == 0)) best = bits;
  }
  return best;
}

TEST(Half, EveryF16SurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = detail::f16_to_f32(half);
    if ((bits & 0x7fffU) > 0x7c00U) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_TRUE(std::isnan(detail::f16_to_f32(detail::f32_to_f16(wide)))) << bits;
    } else {
      ASSERT_EQ(detail::f32_to_f16(wide), half);
    }
  }
  EXPECT_EQ(detail::f16_to_f32(0x3c00), 1.0F);
  EXPECT_EQ(detail::f16_to_f32(0x0001), 0x1p-24F);
  EXPECT_EQ(detail::f16_to_f32(0xfbff), -65504.0F);
}

TEST(Half, F16RoundsToNearestEven) {
  const float values[] = {0x1p-25F,     std::nextafter(0x1p-25F, 1.0F),
                          0x1.8p-24F,   0x1.ffcp-15F,
                          0x1.ffep-15F, 0x1.002p0F,
                          0x1.006p0F,   0x1.002002p0F,
                          3.14159265F,  65504.0F,
                          65519.996F,   65520.0F,
                          1e-30F};
  for (const float value : values) {
    EXPECT_EQ(detail::f32_to_f16(value), nearest_f16(static_cast<double>(value))) << value;
    EXPECT_EQ(detail::f32_to_f16(-value), nearest_f16(static_cast<double>(value)) | 0x8000)
        << value;
  }
  EXPECT_EQ(detail::f32_to_f16(1e30F), 0x7c00);
  EXPECT_EQ(detail::f32_to_f16(-std::numeric_limits<float>::infinity()), 0xfc00);
}

TEST(Half, Bf16RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(detail::f32_to_bf16(1.0F), 0x3f80);
  EXPECT_EQ(detail::f32_to_bf16(0x1.01p0F), 0x3f80);      // a tie, down to even
  EXPECT_EQ(detail::f32_to_bf16(0x1.03p0F), 0x3f82);      // a tie, up to even
  EXPECT_EQ(detail::f32_to_bf16(0x1.010002p0F), 0x3f81);  // above the tie
  EXPECT_EQ(detail::f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = detail::bf16_to_f32(half);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(detail::bf16_to_f32(detail::f32_to_bf16(wide)))) << bits;
    } else {
      ASSERT_EQ(detail::f32_to_bf16(wide), half);
    }
  }
  // Only low bits set: truncation would make it infinite.
  const auto narrow = std::bit_cast<float>(0x7f800001U);
  EXPECT_TRUE(std::isnan(detail::bf16_to_f32(detail::f32_to_bf16(narrow))));
}

}  // namespace
}  // namespace clattn
