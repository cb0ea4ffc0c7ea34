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
  // uint4x2 is no format without scales in its pages.
  for (const std::string name : {"fp4", "uint4x2"}) {
    EXPECT_EQ(error_text([&] { parse_kv_cache_dtype(name); }, ErrorCode::kInvalidArgument),
              "kv_cache_dtype: '" + name +
                  "' is not one of auto, f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, "
                  "int8_per_token_head, fp8_per_token_head, uint4_per_token_head");
  }
}

/// Formats have names, and what no kernel reads is refused by field, value and reason.
TEST(Types, CacheFormats) {
  for (const auto& [name, code] : {std::pair{"int8_per_token_head", DType::kInt8},
                                   std::pair{"fp8_per_token_head", DType::kFp8E4M3},
                                   std::pair{"uint4_per_token_head", DType::kUInt4x2}}) {
    const auto format = parse_kv_cache_dtype(name);
    EXPECT_EQ(format, CacheFormat::per_row(code)) << name;
    EXPECT_NE(format, CacheFormat(code)) << name;
    EXPECT_TRUE(format->scales_per_row());
    EXPECT_EQ(to_string(*format), name);
  }
  EXPECT_EQ(to_string(CacheFormat(DType::kInt8)), "int8");
  const auto refusal = [](const auto& change) {
    CacheFormat format = CacheFormat::per_row(DType::kInt8);
    change(format.k);
    return error_text([&] { static_cast<void>(to_string(format)); }, ErrorCode::kUnsupported);
  };
  using Side = SideFormat;
  EXPECT_EQ(refusal([](Side& side) { side.group = Side::Group::kDims32; }),
            "cache format: k.group is 2, supported: kTensor, kRow (kernels know scales of tensors, "
            "of heads, and of a token's head)");
  EXPECT_EQ(refusal([](Side& side) { side.zero = Side::Zero::kOffset; }),
            "cache format: k.zero is 2, supported: kNone (kernels multiply codes by scales alone)");
  EXPECT_EQ(refusal([](Side& side) { side.scale = Side::Scale::kF16; }),
            "cache format: k.scale is 1, supported: kF32 (kernels read f32 scales)");
  EXPECT_EQ(refusal([](Side& side) { side.rotation = 64; }),
            "cache format: k.rotation is 64, supported: 0 (no kernel rotates queries)");
  EXPECT_EQ(refusal([](Side& side) { side.code = DType::kFp8E5M2; }),
            "cache format: k.code is fp8_e5m2, supported with group kRow: int8, fp8_e4m3, uint4x2");
  EXPECT_EQ(refusal([](Side& side) { side.code = DType::kUInt4x2; }),
            "cache format: k.zero is 0, supported: kInteger (kernels take one from codes of 4 "
            "bits)");
  EXPECT_EQ(refusal([](Side& side) { side = {.code = DType::kUInt4x2}; }),
            "cache format: k.group is 0, supported: kRow (codes of 4 bits have scales in their "
            "pages alone)");
  EXPECT_EQ(refusal([](Side& side) { side.code = DType::kFp8E4M3; }),
            "cache format: k and v differ, supported: the same (kernels read both by one loader)");
}

// M10: in vLLM's words.
TEST(Types, M10_UnknownFp8Types) {
  EXPECT_EQ(error_text([] { parse_kv_cache_dtype("fp8_e3m4"); }, ErrorCode::kInvalidArgument),
            "Unrecognized FP8 dtype: fp8_e3m4, legal: fp8, fp8_e4m3, fp8_e5m2, fp8_per_token_head");
}

/// vLLM rotates the rows of its caches of 4 bits.
TEST(Types, RotatedFormatsAreRefusedByName) {
  EXPECT_EQ(
      error_text([] { parse_kv_cache_dtype("int4_per_token_head"); }, ErrorCode::kUnsupported),
      "kv_cache_dtype: int4_per_token_head not supported: its keys and values are rotated, and no "
      "kernel rotates queries; without rotation: uint4_per_token_head");
}

TEST(Types, UnknownNamesListTheLegalOnes) {
  EXPECT_EQ(error_text([] { parse_dtype("F32"); }, ErrorCode::kInvalidArgument),
            "dtype: 'F32' is not one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, uint4x2");
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
