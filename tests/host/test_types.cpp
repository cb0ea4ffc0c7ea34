#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <clattn/types.hpp>

#include "base/checked.hpp"
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
       {KVCacheLayout::kNHD, KVCacheLayout::kHND, KVCacheLayout::kHDN}) {
    EXPECT_EQ(parse_kv_cache_layout(to_string(layout)), layout);
  }
  EXPECT_EQ(to_string(KVCacheLayout::kHND), "HND");
}

TEST(Types, UnknownNamesListTheLegalOnes) {
  EXPECT_EQ(error_text([] { parse_dtype("F32"); }, ErrorCode::kInvalidArgument),
            "dtype: 'F32' is not one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8");
  EXPECT_EQ(error_text([] { parse_kv_cache_layout(""); }, ErrorCode::kInvalidArgument),
            "layout: '' is not one of NHD, HND, HDN");
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

}  // namespace
}  // namespace clattn
