#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <clattn/types.hpp>
#include <string>

#include "base/checked.hpp"
#include "support/error_text.hpp"

namespace clattn {
namespace {

using test::error_text;

TEST(Types, TheLibraryHasTheVersionOfItsHeaders) {
  EXPECT_EQ(version(), CLATTN_VERSION);
  EXPECT_EQ(version(), std::to_string(CLATTN_VERSION_MAJOR) + "." +
                           std::to_string(CLATTN_VERSION_MINOR) + "." +
                           std::to_string(CLATTN_VERSION_PATCH));
}

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
  for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
    EXPECT_EQ(parse_kv_cache_layout(to_string(layout)), layout);
  }
  EXPECT_EQ(to_string(KVCacheLayout::kHND), "HND");
  for (const std::string_view name :
       {"full", "sliding_window", "chunked_local", "encoder_only", "cross", "mamba"}) {
    EXPECT_EQ(to_string(parse_kv_cache_kind(name)), name);
  }
}

// Today's names of all dimensions: layers, blocks, heads, tokens, content.
TEST(Types, S5_LayoutsAndKindsAsVllmNamesThem) {
  EXPECT_EQ(parse_kv_cache_layout("LBNHC"), KVCacheLayout::kNHD);
  EXPECT_EQ(parse_kv_cache_layout("LBHNC"), KVCacheLayout::kHND);
  EXPECT_EQ(error_text([] { parse_kv_cache_layout("BLHNC"); }, ErrorCode::kInvalidArgument),
            "layout: 'BLHNC' is not one of NHD, HND");
  EXPECT_EQ(parse_kv_cache_kind("full_attention"), KVCacheKind::kFull);
  EXPECT_EQ(parse_kv_cache_kind("chunked_local_attention"), KVCacheKind::kChunkedLocal);
  EXPECT_EQ(parse_kv_cache_kind("encoder_only_attention"), KVCacheKind::kEncoderOnly);
  EXPECT_EQ(parse_kv_cache_kind("cross_attention"), KVCacheKind::kCross);
  EXPECT_EQ(error_text([] { parse_kv_cache_kind("mla_attention"); }, ErrorCode::kInvalidArgument),
            "kind: 'mla_attention' is not one of full, sliding_window, chunked_local, "
            "encoder_only, cross, mamba");
}

// M2: as PyTorch and vLLM spell them.
TEST(Types, M2_OtherSpellingsOfElementTypes) {
  const std::pair<std::string_view, DType> rows[] = {
      {"float32", DType::kF32},      {"float", DType::kF32},
      {"float16", DType::kF16},      {"half", DType::kF16},
      {"bfloat16", DType::kBF16},    {"fp8", DType::kFp8E4M3},
      {"fp8_e4m3", DType::kFp8E4M3}, {"float8_e4m3fn", DType::kFp8E4M3},
      {"fp8_e5m2", DType::kFp8E5M2}, {"float8_e5m2", DType::kFp8E5M2},
      {"int8", DType::kInt8}};
  for (const auto& [name, dtype] : rows) {
    EXPECT_EQ(parse_dtype(name), dtype) << name;
    EXPECT_EQ(parse_dtype("torch." + std::string(name)), dtype) << name;
    EXPECT_EQ(parse_kv_cache_dtype(name), dtype) << name;
    EXPECT_EQ(find_dtype(name), dtype) << name;
  }
  EXPECT_EQ(parse_kv_cache_dtype("auto"), std::nullopt);
  for (const char* name : {"", "torch.", "torch.torch.half", "double", "auto"})
    EXPECT_EQ(find_dtype(name), std::nullopt) << name;
  EXPECT_EQ(error_text([] { parse_kv_cache_dtype("fp4"); }, ErrorCode::kInvalidArgument),
            "kv_cache_dtype: 'fp4' is not one of auto, f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8");
}

// M10: in vLLM's words.
TEST(Types, M10_UnknownFp8Types) {
  EXPECT_EQ(error_text([] { parse_kv_cache_dtype("fp8_e3m4"); }, ErrorCode::kInvalidArgument),
            "Unrecognized FP8 dtype: fp8_e3m4, legal: fp8, fp8_e4m3, fp8_e5m2");
}

TEST(Types, UnknownNamesListTheLegalOnes) {
  EXPECT_EQ(error_text([] { parse_dtype("F32"); }, ErrorCode::kInvalidArgument),
            "dtype: 'F32' is not one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8");
  EXPECT_EQ(error_text([] { parse_kv_cache_layout(""); }, ErrorCode::kInvalidArgument),
            "layout: '' is not one of NHD, HND");
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
