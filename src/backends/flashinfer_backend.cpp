// FLASHINFER runs the kernels of every other built-in backend. Its own are the form of its metadata
// (page lists), NHD as its caches' default order, and which configurations it refuses.
#include <algorithm>
#include <array>
#include <clattn/compat/flashinfer.hpp>
#include <numeric>
#include <vector>

#include "backends/registry.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/step/paged_builder.hpp"

namespace clattn {

FlashInferMetadata::View FlashInferMetadata::with_pages(const BatchView& side,
                                                        std::int32_t first) const {
  if (side.num_reqs == 0) return {};
  return {side, rows(paged_kv_indptr, first, side.num_reqs + 1), paged_kv_indices,
          rows(paged_kv_last_page_len, first, side.num_reqs)};
}

namespace detail {

namespace {

/// With the memory of the array that nothing else keeps.
struct FlashInferStep : FlashInferMetadata {
  std::vector<std::int64_t> seq_starts;

  /// What follows from the arrays that are there already, of up to `max_num_reqs` requests.
  void derive(std::int32_t max_num_reqs) {
    seq_starts.reserve(static_cast<std::size_t>(max_num_reqs) + 1);
    seq_starts.assign(seq_lens.size() + 1, 0);
    std::inclusive_scan(seq_lens.begin(), seq_lens.end(), seq_starts.begin() + 1, std::plus<>(),
                        std::int64_t{0});
    seq_start_loc = seq_starts;
    decode_query_len = 1;
    const std::int32_t threshold = step()->batch.plan.decode_threshold;
    for (std::size_t r = 0; split().num_decodes > 0 && r < seq_lens.size(); ++r) {
      const std::int32_t query_len = query_start_loc[r + 1] - query_start_loc[r];
      if (query_len <= threshold) decode_query_len = std::max(decode_query_len, query_len);
    }
  }

  /// Recorded steps are captured with such slots too, and cross attention has no others.
  void find_profile_run(AttentionType attn_type) {
    is_profile_run =
        attn_type == AttentionType::kDecoder && !step()->recordable && num_actual_tokens() > 0 &&
        std::ranges::all_of(slot_mapping(), [](std::int64_t slot) { return slot == kPadSlotId; });
  }
};

/// Pages of K and V side by side, (num_blocks, 2, block_size, num_kv_heads, head_size), addressed
/// by CSR page lists (SPEC A4).
class FlashInferBackend final : public AttentionBackend {
 public:
  std::string_view name() const noexcept override { return FlashInferMetadata::kBackend; }

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    append_head_size_reason(config.head_size, reasons);
    append_common_reasons(config, capabilities, reasons);
    return reasons;
  }

  AttentionCGSupport graph_support() const noexcept override {
    return AttentionCGSupport::kUniformBatch;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    return {num_blocks, 2, block_size, num_kv_heads, head_size};
  }

  std::array<std::int32_t, 5> get_kv_cache_stride_order(KVCacheLayout layout) const override {
    if (layout == KVCacheLayout::kNHD) return {0, 1, 2, 3, 4};
    return {0, 1, 3, 2, 4};
  }

  std::int32_t kv_dimension() const noexcept override { return 1; }

  std::span<const KVCacheLayout> supported_layouts() const noexcept override {
    static constexpr std::array kLayouts = {KVCacheLayout::kNHD, KVCacheLayout::kHND,
                                            KVCacheLayout::kHDN};
    return kLayouts;
  }

  KVCacheLayout preferred_layout(const DeviceCapabilities&) const noexcept override {
    // One head's tokens of a page lie together: a CPU core streams them, a GPU's loads coalesce.
    return KVCacheLayout::kHND;
  }

  std::shared_ptr<const AttentionImpl> make_impl(std::shared_ptr<Context> context,
                                                 const AttentionConfig& config) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return PagedAttentionImpl::make(*context, config);
  }

  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      std::shared_ptr<Context> context, const AttentionConfig& config,
      const BuilderOptions& options) const override {
    require_valid(name(), validate_configuration(config, &context->capabilities()));
    return std::make_unique<PagedMetadataBuilder<FlashInferStep>>(
        std::move(context), config, options, StepStyle{name(), PageTable::kCsr, true}, fill);
  }

 private:
  static void fill(FlashInferStep& metadata, const PagedStep& step, const AttentionConfig& config) {
    const BatchRecord& batch = step.view().batch;
    metadata.query_start_loc = batch.query_start_loc;
    metadata.seq_lens = batch.seq_lens;
    metadata.paged_kv_indptr = batch.pages_at;
    metadata.paged_kv_indices = batch.pages;
    metadata.paged_kv_last_page_len = step.last_page_len();
    metadata.num_qo_heads = config.num_heads;
    metadata.num_kv_heads = config.num_kv_heads;
    metadata.head_dim = config.head_size;
    metadata.page_size = config.block_size;
    metadata.data_type = config.cache_dtype();
    metadata.q_data_type = config.dtype;
    metadata.derive(step.limits().max_num_reqs);
    metadata.find_profile_run(config.attn_type);
  }
};

}  // namespace

const AttentionBackend& flashinfer_backend() {
  static const FlashInferBackend backend;
  return backend;
}

}  // namespace detail
}  // namespace clattn
