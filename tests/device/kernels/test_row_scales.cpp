// Attention over caches with a scale for each token and head (CacheFormat::per_row), whose scales
// differ by powers of two from row to row. Whatever belongs to no request, scales too, is NaN.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "kernels/choose/variants.hpp"

namespace test_row_scales_kernels {

using attention_test::all_contexts;
using attention_test::CaseResult;
using attention_test::CaseSpec;
using clattn::CacheFormat;
using clattn::DType;
using clattn::KernelFamily;
using clattn::KVCacheLayout;

CaseSpec row_case(DType code, DType dtype = DType::kF16) {
  CaseSpec spec;
  spec.config = attention_test::small_config();
  spec.config.dtype = dtype;
  spec.config.kv_cache_dtype = CacheFormat::per_row(code);
  spec.requests = {{1, 40, 1}, {1, 0, 2}, {2, 15, 3}, {6, 30, 4}, {70, 16, 5}};
  return spec;
}

void expect_right(const std::shared_ptr<clattn::Context>& context, const CaseSpec& spec) {
  const CaseResult result = attention_test::run_case(context, spec);
  EXPECT_EQ(result.fault, "") << describe(spec);
  EXPECT_LE(result.worst_share, 1.0) << describe(spec) << "\n " << result.worst_place << "\n by "
                                     << (result.kernels.empty() ? "" : result.kernels.front());
}

/// Each family that the device has, and CPUs the one of GPUs besides.
void for_each_family(const auto& run) {
  for (const auto& context : all_contexts())
    for (const KernelFamily family : {KernelFamily::kAuto, KernelFamily::kGpu})
      run(context, family);
}

TEST(RowScales, EachRowIsReadByItsOwn) {
  for_each_family([](const auto& context, KernelFamily family) {
    for (const auto& [code, dtype] :
         {std::pair{DType::kInt8, DType::kF16}, std::pair{DType::kFp8E4M3, DType::kF32},
          std::pair{DType::kFp8E4M3, DType::kBF16}, std::pair{DType::kUInt4x2, DType::kF16},
          std::pair{DType::kUInt4x2, DType::kF32}, std::pair{DType::kUInt4x2, DType::kBF16}}) {
      CaseSpec spec = row_case(code, dtype);
      spec.config.kernel_family = family;
      spec.layout = dtype == DType::kF16 ? KVCacheLayout::kNHD : KVCacheLayout::kHND;
      expect_right(context, spec);
    }
  });
}

TEST(RowScales, ShapesOfHeadsAndPages) {
  struct Shape {
    std::int32_t heads, kv_heads, head_size, block_size;
  };
  for_each_family([](const auto& context, KernelFamily family) {
    for (const Shape& shape : {Shape{1, 1, 8, 1}, Shape{7, 1, 80, 5}, Shape{3, 3, 72, 5},
                               Shape{24, 4, 128, 17}, Shape{2, 1, 512, 16}}) {
      for (const DType code : {DType::kInt8, DType::kUInt4x2}) {
        CaseSpec spec = row_case(code);
        spec.config.num_heads = shape.heads;
        spec.config.num_kv_heads = shape.kv_heads;
        spec.config.head_size = shape.head_size;
        spec.config.block_size = shape.block_size;
        spec.config.kernel_family = family;
        spec.requests = {{1, shape.block_size - 1, 1}, {1, shape.block_size, 2}, {9, 50, 3}};
        expect_right(context, spec);
      }
    }
  });
}

TEST(RowScales, WithWhatALayerAdds) {
  for_each_family([](const auto& context, KernelFamily family) {
    for (const DType code : {DType::kInt8, DType::kUInt4x2}) {
      CaseSpec windowed = row_case(code);
      windowed.config.kernel_family = family;
      windowed.config.sliding_window = 13;
      windowed.config.logits_soft_cap = 5;
      windowed.config.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
      windowed.config.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
      expect_right(context, windowed);
    }
    for (const DType code : {DType::kFp8E4M3, DType::kUInt4x2}) {
      CaseSpec masked = row_case(code, DType::kBF16);
      masked.config.kernel_family = family;
      masked.config.custom_mask = true;
      masked.config.output_fp8 = true;
      masked.unseen_is_nan = true;
      expect_right(context, masked);
    }
  });
}

TEST(RowScales, SplitsPaddedPagesAndLargeLogits) {
  for_each_family([](const auto& context, KernelFamily family) {
    for (const DType code : {DType::kInt8, DType::kUInt4x2}) {
      CaseSpec spec = row_case(code, DType::kF32);
      spec.config.kernel_family = family;
      spec.page_padding = 64;
      spec.num_splits = 3;
      spec.requests = {{1, 300, 1}, {1, 16, 2}, {3, 200, 3}};
      expect_right(context, spec);
      spec.page_padding = 0;
      spec.sharpness = 8;  // logits of about +-60
      expect_right(context, spec);
    }
  });
}

/// More tasks than a device computes at once, so that groups take several, and heads whose queries
/// come while the task before them is multiplied.
TEST(RowScales, MoreTasksThanGroups) {
  for_each_family([](const auto& context, KernelFamily family) {
    for (const std::int32_t head_size : {64, 128}) {
      CaseSpec spec = row_case(DType::kInt8);
      spec.config.kernel_family = family;
      spec.config.head_size = head_size;
      spec.config.num_heads = spec.config.num_kv_heads = 8;
      spec.requests.clear();
      for (std::uint32_t r = 0; r < 40; ++r)
        spec.requests.push_back({65 + static_cast<std::int32_t>(r % 7), 20, r});
      expect_right(context, spec);
    }
  });
}

/// A kernel that cannot is passed over, by a reason that names the format.
TEST(RowScales, KernelsWithoutThemSayWhy) {
  clattn::AttentionConfig config = attention_test::small_config();
  for (const DType code : {DType::kInt8, DType::kUInt4x2}) {
    config.kv_cache_dtype = CacheFormat::per_row(code);
    const auto shape = clattn::detail::kernel_shape(config);
    EXPECT_TRUE(shape.row_scales);
    std::size_t takers = 0;
    for (const auto& variant : clattn::detail::variants()) {
      const std::string why = clattn::detail::why_not_types(variant, shape);
      const bool takes_code =
          (clattn::detail::unit_of(variant.unit_id).cache & clattn::detail::type_set(code)) != 0;
      if (variant.kernel().row_scales && variant.unit().row_scales && takes_code) {
        if (why.empty()) ++takers;
        continue;
      }
      EXPECT_NE(why, "") << variant.name;
    }
    EXPECT_GE(takers, 6U);
  }
}

}  // namespace test_row_scales_kernels
