#include <array>
#include <utility>

#include "backends/clblast_gemm.hpp"
#include "backends/gathered_attention.hpp"
#include "backends/gathered_step.hpp"
#include "backends/registry.hpp"
#include "base/error.hpp"
#include "kernels/paged_rules.hpp"

namespace clattn::detail {

namespace {

/// Attention by CLBlast's matrix products over gathered pages, a request at a time: what the
/// library's own kernels can be compared with, and a way for devices that none of them fits.
class ClblastBackend final : public AttentionBackend {
 public:
  std::string_view name() const noexcept override { return "CLBLAST"; }

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    if (!has_clblast()) reasons.emplace_back("built without CLBlast (CMake: CLATTN_CLBLAST)");
    append_common_reasons(config, nullptr, reasons);
    const std::pair<bool, std::string_view> missing[] = {
        {config.output_fp8, "output_fp8 not supported"},
        {config.use_batch_invariant,
         "batch invariance not supported: CLBlast chooses its kernels by the step's sizes"},
        {config.kernel_family != KernelFamily::kAuto,
         "kernel_family not supported: the kernels are CLBlast's"}};
    for (const auto& [wanted, reason] : missing) {
      if (wanted) reasons.emplace_back(reason);
    }
    if (capabilities != nullptr && !config.contiguous_kv())
      append_missing_kernels({Role::kCacheWrite}, KernelFamily::kAuto, *capabilities, reasons);
    return reasons;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    return {num_blocks, 2, block_size, num_kv_heads, head_size};
  }
  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const override {
    if (layout == KVCacheLayout::kHDN || layout == KVCacheLayout::kTiles)
      throw_unsupported("{}", unsupported_layout(*this, layout));
    if (layout == KVCacheLayout::kHND) return {0, 1, 3, 2, 4};
    return {0, 1, 2, 3, 4};
  }
  std::int32_t kv_dimension() const noexcept override { return 1; }
  std::span<const KVCacheLayout> supported_layouts() const noexcept override {
    static constexpr std::array kLayouts = {KVCacheLayout::kNHD, KVCacheLayout::kHND};
    return kLayouts;
  }
  KVCacheLayout preferred_layout(const DeviceCapabilities&) const noexcept override {
    return KVCacheLayout::kHND;  // a head's keys lie together, as they are gathered
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_gathered_impl(std::move(context), config);
  }
  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return make_gathered_builder(shared_from_this(), std::move(context), config, options);
  }
};

}  // namespace

const AttentionBackend& clblast_backend() {
  static const ClblastBackend backend;
  return backend;
}

}  // namespace clattn::detail
