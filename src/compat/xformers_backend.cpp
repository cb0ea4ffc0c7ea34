// XFORMERS runs the kernels of every other built-in backend. Its own are the form of its metadata
// (start positions, no page lists), and which configurations it refuses.
#include <fmt/ranges.h>

#include <array>
#include <clattn/compat/xformers.hpp>

#include "backends/registry.hpp"
#include "base/error.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/paged_impl.hpp"
#include "kernels/step/paged_builder.hpp"

namespace clattn::detail {

namespace {

/// All keys before all values, (2, num_blocks, block_size, num_kv_heads, head_size), addressed by a
/// padded block table (SPEC A5). The contract's limits are kept: 16-bit types, head sizes from 32,
/// pages of 16 tokens.
class XFormersBackend final : public DescribedBackend {
 public:
  XFormersBackend()
      : DescribedBackend({.name = XFormersMetadata::kBackend,
                          .layouts = std::span(kBothLayouts).first(1),
                          .graph_support = AttentionCGSupport::kAlways,
                          .device_query_lens = true}) {}

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    append_common_reasons(config, capabilities, reasons);
    append_if(reasons, config.dtype == DType::kF32, "dtype f32 not supported: f16 and bf16 are");
    append_if(reasons,
              config.dtype != DType::kF32 && config.cache_dtype() != config.dtype &&
                  !is_quantized(config.cache_dtype()),
              "kv_cache_dtype {} not supported: auto, the dtype ({}), fp8 and int8 are",
              to_string(config.cache_dtype()), to_string(config.dtype));
    append_own_head_size_reason(config.head_size, reasons);
    append_if(reasons, !config.contiguous_kv() && config.block_size % 16 != 0,
              "Block size must be a multiple of 16.");
    return reasons;
  }

  std::vector<SupportedBlockSize> get_supported_kernel_block_sizes() const override {
    return {{.size = 16, .multiples = true}};
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    if (block_size % 16 != 0) throw_invalid("Block size must be a multiple of 16.");
    return {2, num_blocks, block_size, num_kv_heads, head_size};
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_paged_impl(*context, config);
  }

  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return std::make_unique<PagedMetadataBuilder<XFormersMetadata>>(
        std::move(context), config, options,
        StepRules{.backend = name(), .page_table = PageTable::kDense}, fill);
  }

 private:
  /// vLLM's words; FLASHINFER stands where they name FLEX_ATTENTION.
  static void append_own_head_size_reason(std::int32_t head_size,
                                          std::vector<std::string>& reasons) {
    constexpr std::int32_t kMost = 256;
    if (takes_head_size(head_size, kMost) && head_size >= 32) return;
    std::vector<std::int32_t> supported;
    for (std::int32_t size = 32; size <= kMost; size += 8) supported.push_back(size);
    reasons.push_back(fmt::format(
        "Head size {} is not supported by XFormersAttention. Supported head sizes are: [{}].{}",
        head_size, fmt::join(supported, ", "),
        takes_head_size(head_size)
            ? " Set CLATTN_BACKEND=FLASHINFER to use a backend which supports "
              "8 … 512 in steps of 8."
            : ""));
  }

  static void fill(XFormersMetadata& metadata, const PagedBuilder& step, const AttentionConfig&) {
    const BatchRecord& batch = step.view().batch;
    metadata.query_start_loc = batch.query_start_loc;
    metadata.seq_lens = batch.seq_lens;
    metadata.block_table = batch.pages;
    metadata.block_table_stride = step.table_width();
  }
};

}  // namespace

const AttentionBackend& xformers_backend() {
  static const XFormersBackend backend;
  return backend;
}

}  // namespace clattn::detail
