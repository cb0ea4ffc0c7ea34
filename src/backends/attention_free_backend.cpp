#include "backends/registry.hpp"

#include <clattn/device.hpp>
#include "base/error.hpp"

namespace clattn::detail {

namespace {

/// What a model without attention layers is given where a backend is asked for: it has a name, and
/// refuses everything that would need attention.
class AttentionFreeBackend final : public DescribedBackend {
 public:
  AttentionFreeBackend() : DescribedBackend({.name = kNoAttention}) {}

  std::vector<std::string> validate_configuration(const AttentionConfig& config,
                                                  const DeviceCapabilities*) const override {
    if (config.is_attention_free) return {};
    return {"for models without attention only"};
  }
  std::vector<SupportedBlockSize> get_supported_kernel_block_sizes() const override { return {}; }
  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t, std::int32_t, std::int32_t,
                                                 std::int32_t) const override {
    refuse("KV cache");
  }
  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout) const override {
    refuse("KV cache");
  }
  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context>,
                                                 const AttentionConfig&) const override {
    refuse("AttentionImpl");
  }
  std::unique_ptr<AttentionMetadataBuilder> make_builder(std::shared_ptr<Context>,
                                                         const AttentionConfig&,
                                                         const BuilderOptions&) const override {
    refuse("AttentionMetadataBuilder");
  }

 private:
  [[noreturn]] static void refuse(std::string_view what) {
    throw_unsupported("backend {}: the model has no attention, so there is no {}", kNoAttention,
                      what);
  }
};

}  // namespace

std::shared_ptr<const AttentionBackend> attention_free_backend() {
  static const auto& backend =  // never destroyed
      *new std::shared_ptr<const AttentionBackend>(std::make_shared<const AttentionFreeBackend>());
  return backend;
}

}  // namespace clattn::detail
