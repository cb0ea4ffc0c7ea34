// FLASHINFER runs the kernels of every other built-in backend. Its own are the form of its metadata
// (page lists), NHD as its caches' default order, and which configurations it refuses.
#include <algorithm>
#include <array>
#include <clattn/compat/flashinfer.hpp>
#include <vector>

#include "backends/registry.hpp"
#include "base/checked.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/paged_impl.hpp"
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
  std::vector<std::int32_t> padded_indptr, padded_last_page_len;

  /// What follows from the arrays that are there already, of up to `max_num_reqs` requests.
  void derive(std::int32_t max_num_reqs) {
    seq_starts.reserve(to_size(max_num_reqs) + 1);
    seq_starts.assign(1, 0);
    for (const std::int32_t seq_len : seq_lens) seq_starts.push_back(seq_starts.back() + seq_len);
    seq_start_loc = seq_starts;
    decode_query_len = 1;
    const std::int32_t threshold = step()->batch.plan.decode_threshold;
    for (std::size_t r = 0; split().num_decodes > 0 && r < seq_lens.size(); ++r) {
      const std::int32_t query_len = query_start_loc[r + 1] - query_start_loc[r];
      if (query_len <= threshold) decode_query_len = std::max(decode_query_len, query_len);
    }
  }

  /// Fills the page lists of a recorded step up to `size` requests, as vLLM does: those that pad it
  /// have no pages. Of up to `max_num_reqs` requests.
  void pad_pages(std::int32_t size, std::int32_t max_num_reqs) {
    const auto pad = [&](std::span<const std::int32_t>& list, std::vector<std::int32_t>& padded,
                         std::int32_t count, std::int32_t value) {
      padded.reserve(to_size(max_num_reqs) + 1);
      padded.assign(list.begin(), list.end());
      padded.resize(to_size(count), value);
      list = padded;
    };
    pad(paged_kv_indptr, padded_indptr, size + 1, paged_kv_indptr.back());
    pad(paged_kv_last_page_len, padded_last_page_len, size, 0);
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
class FlashInferBackend final : public DescribedBackend {
 public:
  // HND is preferred: one head's tokens of a page lie together, so that a CPU core streams them and
  // a GPU's loads coalesce.
  FlashInferBackend()
      : DescribedBackend({.name = FlashInferMetadata::kBackend,
                          .layouts = kBothLayouts,
                          .preferred = KVCacheLayout::kHND,
                          .kv_dimension = 1,
                          .graph_support = AttentionCGSupport::kAlways,
                          .device_query_lens = true}) {}

  std::vector<std::string> validate_configuration(
      const AttentionConfig& config, const DeviceCapabilities* capabilities) const override {
    std::vector<std::string> reasons;
    append_head_size_reason(config.head_size, reasons);
    append_common_reasons(config, capabilities, reasons);
    return reasons;
  }

  std::array<std::int64_t, 5> get_kv_cache_shape(std::int64_t num_blocks, std::int32_t block_size,
                                                 std::int32_t num_kv_heads,
                                                 std::int32_t head_size) const override {
    return {num_blocks, 2, block_size, num_kv_heads, head_size};
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
    return std::make_unique<PagedMetadataBuilder<FlashInferStep>>(
        std::move(context), config, options, StepRules{.backend = name(), .cascades = true}, fill);
  }

 private:
  static void fill(FlashInferStep& metadata, const PagedBuilder& step,
                   const AttentionConfig& config) {
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
    if (step.view().recordable)
      metadata.pad_pages(step.view().prepared->batch_size, step.limits().max_num_reqs);
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
