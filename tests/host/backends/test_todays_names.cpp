// What other libraries' backends are called today, and pages that several backends read.
#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/registry.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/error_text.hpp"

namespace {

using clattn::AttentionConfig;

// Today's names, in any letter case, and what computes the same here, if anything does.
TEST(Selector, S5_NamesOfTodaySayWhatToUse) {
  const std::pair<std::string, std::string> rows[] = {
      {"flash_attn", "FLASHINFER computes what flash_attn does"},
      {"HPC_ATTN", "FLASHINFER computes what HPC_ATTN does"},
      {"B12X", "FLASHINFER computes what B12X does"},
      {"rocm_aiter_unified_attn", "FLASHINFER computes what rocm_aiter_unified_attn does"},
      {"AMX_MLA", "CLATTN_MLA computes what AMX_MLA does"},
      {"TokenSpeed_MLA", "CLATTN_MLA computes what TokenSpeed_MLA does"},
      {"FlashInfer", "FLASHINFER is one of them"},
      {"FLASHINFER_MLA_SPARSE_SM120", "none computes attention to a choice of keys"},
      {"FLASHMLA_SPARSE_DSV4", "none computes attention to a choice of keys"},
      {"Cutlass_MSA", "none computes attention to a choice of keys"},
      {"TRITON_ATTN_DIFFKV", "FLASHINFER computes what TRITON_ATTN_DIFFKV does"},
      {"TURBOQUANT", "none computes attention over TurboQuant caches"},
      {"DUAL_CHUNK_FLASH_ATTN", "none computes dual chunk attention"}};
  for (const auto& [name, hint] : rows) {
    const std::string& given = name;
    EXPECT_EQ(test::error_text([&] { (void)clattn::find_attn_backend(given); },
                               clattn::ErrorCode::kInvalidArgument),
              "Invalid attention backend: '" + name +
                  "'. Valid backends are: auto, FLASHINFER, XFORMERS, CLATTN_MLA; " + hint);
  }
}

/// Pages of 64 tokens or of 96 alone.
class FixedPages : public clattn::AttentionBackend {
 public:
  explicit FixedPages(std::vector<clattn::SupportedBlockSize> sizes) : sizes_(std::move(sizes)) {}
  std::string_view name() const noexcept override { return "FIXED"; }
  std::vector<clattn::SupportedBlockSize> get_supported_kernel_block_sizes() const override {
    return sizes_;
  }
  std::vector<std::string> validate_configuration(
      const AttentionConfig&, const clattn::DeviceCapabilities*) const override {
    return {};
  }
  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t, std::int32_t, std::int32_t,
                                                 std::int32_t) const override {
    return {};
  }
  std::array<std::int32_t, 5> get_kv_cache_stride_order(clattn::KVCacheLayout) const override {
    return {};
  }
  std::int32_t kv_dimension() const noexcept override { return 0; }
  std::span<const clattn::KVCacheLayout> supported_layouts() const noexcept override { return {}; }
  clattn::KVCacheLayout preferred_layout(
      const clattn::DeviceCapabilities&) const noexcept override {
    return {};
  }
  std::shared_ptr<const clattn::AttentionImpl> make_impl(std::shared_ptr<clattn::Context>,
                                                         const AttentionConfig&) const override {
    return nullptr;
  }
  std::unique_ptr<clattn::AttentionMetadataBuilder> make_builder(
      std::shared_ptr<clattn::Context>, const AttentionConfig&,
      const clattn::BuilderOptions&) const override {
    return nullptr;
  }

 private:
  std::vector<clattn::SupportedBlockSize> sizes_;
};

TEST(Backends, S5_BlockSizesThatAllKernelsRead) {
  using clattn::SupportedBlockSize;
  const auto fixed = std::make_shared<const FixedPages>(
      std::vector{SupportedBlockSize{96, false}, SupportedBlockSize{64, false}});
  const auto multiples =
      std::make_shared<const FixedPages>(std::vector{SupportedBlockSize{32, true}});
  EXPECT_EQ(fixed->get_preferred_block_size(64), 64);
  EXPECT_EQ(fixed->get_preferred_block_size(), 64);
  EXPECT_EQ(multiples->get_preferred_block_size(), 32);
  EXPECT_EQ(multiples->get_preferred_block_size(128), 128);
  EXPECT_EQ(clattn::find_attn_backend("FLASHINFER")->get_preferred_block_size(7), 7);
  EXPECT_EQ(test::error_text([&] { (void)fixed->get_preferred_block_size(0); }),
            "default_size is 0, legal: at least 1");
  std::vector<std::shared_ptr<const clattn::AttentionBackend>> both{multiples, fixed};
  EXPECT_EQ(clattn::select_common_block_size(96, both), 96);
  EXPECT_EQ(clattn::select_common_block_size(192, both), 96);  // 64 divides it as well
  EXPECT_EQ(clattn::select_common_block_size(128, both), 64);
  EXPECT_EQ(clattn::select_common_block_size(7, {}), 7);
  EXPECT_EQ(test::error_text([&] { clattn::select_common_block_size(160, both); }),
            "No common block size for 160.");
  EXPECT_EQ(test::error_text([&] { clattn::select_common_block_size(0, both); }),
            "block_size is 0, legal: at least 1");
}

}  // namespace
