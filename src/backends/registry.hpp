#pragma once

#include <algorithm>
#include <array>
#include <clattn/registry.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace clattn::detail {

// Each backend's file defines its function; the entry it returns lives as long as the process.
const AttentionBackend& flashinfer_backend();
const AttentionBackend& xformers_backend();
const AttentionBackend& mla_backend();

inline constexpr std::string_view kNoAttention = "NO_ATTENTION";

/// What attention-free models get; not in the list.
std::shared_ptr<const AttentionBackend> attention_free_backend();

/// Whether these are pages of `tokens` tokens.
constexpr bool takes(const SupportedBlockSize& pages, std::int32_t tokens) {
  return pages.multiples ? tokens % pages.size == 0 : tokens == pages.size;
}

/// All there are. NHD alone is its first(1).
inline constexpr std::array kBothLayouts = {KVCacheLayout::kNHD, KVCacheLayout::kHND};

/// A backend that says what it is by data. Memory holds the dimensions of its caches in their
/// order, under HND heads before tokens.
class DescribedBackend : public AttentionBackend {
 public:
  struct Facts {
    std::string_view name;
    std::span<const KVCacheLayout> layouts = {};
    KVCacheLayout preferred = KVCacheLayout::kNHD;
    std::int32_t kv_dimension = 0;
    AttentionCGSupport graph_support = AttentionCGSupport::kNever;
    bool device_query_lens = false;  ///< supports_device_cpu_query_lens_mismatch()
  };
  explicit DescribedBackend(const Facts& facts) : facts_(facts) {}

  std::string_view name() const noexcept override { return facts_.name; }
  std::span<const KVCacheLayout> supported_layouts() const noexcept override {
    return facts_.layouts;
  }
  KVCacheLayout preferred_layout(const DeviceCapabilities&) const noexcept override {
    return facts_.preferred;
  }
  std::int32_t kv_dimension() const noexcept override { return facts_.kv_dimension; }
  AttentionCGSupport graph_support() const noexcept override { return facts_.graph_support; }
  AttentionCGSupport get_cudagraph_support(const AttentionConfig& config) const override {
    const bool mixed = config.attn_type == AttentionType::kDecoder;
    return mixed ? facts_.graph_support
                 : std::min(facts_.graph_support, AttentionCGSupport::kUniformBatch);
  }
  std::optional<std::int32_t> get_varlen_cudagraph_max_query_len(
      const AttentionConfig& config, std::int32_t decode_threshold) const override {
    if (get_cudagraph_support(config) < AttentionCGSupport::kUniformBatch) return std::nullopt;
    return decode_threshold;
  }
  bool supports_device_cpu_query_lens_mismatch() const noexcept override {
    return facts_.device_query_lens;
  }
  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const override;

 private:
  Facts facts_;
};

/// A backend, and the impl that it made.
struct FittingBackend {
  std::shared_ptr<const AttentionBackend> backend;
  std::shared_ptr<const AttentionImpl> impl;
};
/// get_attn_backend() for a layer on a context's device, judged by building too: where the kernels
/// of a chosen backend turn out not to fit (no tile builds, or all need more local or private
/// memory than there is) or the device's compiler refuses one (CL_BUILD_PROGRAM_FAILURE, which the
/// context then lists among its build failures), the next that takes the configuration serves. No
/// other takes the place of one that the environment forces. Throws what get_attn_backend() and
/// make_impl() throw.
FittingBackend get_fitting_backend(const std::shared_ptr<Context>& context,
                                   const AttentionConfig& config);

using RegistryEntry = std::shared_ptr<const AttentionBackend>;
using RegistryEntries = std::vector<RegistryEntry>;
/// "FLASHINFER, XFORMERS"
std::string backend_names(const RegistryEntries& backends);

/// Takes this very entry out, if it is there: another may have its name by now.
void remove_entry(const RegistryEntry& backend) noexcept;

/// The arguments of vLLM's get_attn_backend that decide.
using RegistryQuery = std::tuple<std::int32_t, DType, std::string, std::int32_t, bool, bool>;
/// The remembered answer, else what `choose` says, to be remembered until the registry changes.
RegistryEntry remembered_answer(const RegistryQuery& query,
                                const std::function<RegistryEntry()>& choose);

}  // namespace clattn::detail
