#pragma once

// For engines that read the FLASHINFER backend's page lists. Its kernels are those of every other
// built-in backend; what differs is the metadata's form, the cache's default layout and refusals.

#include <clattn/compat/batch_view.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <string_view>

namespace CLATTN_API clattn {

/// What the FLASHINFER backend's builder makes (metadata_as<FlashInferMetadata>() of its build()).
/// Host arrays, valid until the next build(); page lists are CSR: the pages of request r are
/// paged_kv_indices[paged_kv_indptr[r] .. paged_kv_indptr[r + 1]).
class FlashInferMetadata : public BatchMetadata {
 public:
  static constexpr std::string_view kBackend = "FLASHINFER";  ///< for metadata_as()

  /// One side of the batch. Its paged_kv_indptr is not rebased: it indexes the whole batch's
  /// paged_kv_indices, which all views hold.
  struct View : BatchView {
    std::span<const std::int32_t> paged_kv_indptr = {};         ///< [num_reqs + 1]
    std::span<const std::int32_t> paged_kv_indices = {};        ///< the whole batch's
    std::span<const std::int32_t> paged_kv_last_page_len = {};  ///< [num_reqs]
  };

  std::span<const std::int64_t> seq_start_loc;  ///< [num_reqs + 1], prefix sums of seq_lens
  /// [num_reqs + 1]; of a recorded step [batch size + 1]: the requests that fill it have no pages.
  std::span<const std::int32_t> paged_kv_indptr;
  std::span<const std::int32_t> paged_kv_indices;  ///< [paged_kv_indptr.back()]
  /// [num_reqs], of a recorded step [batch size]: 1 … page_size; 0 when empty.
  std::span<const std::int32_t> paged_kv_last_page_len;
  std::int32_t num_qo_heads = 0;      ///< query heads
  std::int32_t num_kv_heads = 0;      ///< key/value heads
  std::int32_t head_dim = 0;          ///< elements
  std::int32_t page_size = 0;         ///< tokens
  DType data_type = DType::kF16;      ///< of the cache
  DType q_data_type = DType::kF16;    ///< of the query
  std::int32_t decode_query_len = 1;  ///< of the longest decode, 1 without decodes
  /// A decoder's batch has tokens, and all their slots are kPadSlotId, as when an engine measures
  /// memory before there is a cache. The plan is as for any other batch. False of recorded steps.
  bool is_profile_run = false;

  /// The decodes. Throws kUnsupported if they and the prefills are interleaved.
  View decode_metadata() const { return with_pages(decodes(), decodes_at_); }
  /// The prefills. Throws as decode_metadata().
  View prefill_metadata() const { return with_pages(prefills(), prefills_at_); }

 private:
  View with_pages(const BatchView& side, std::int32_t first) const;
};

}  // namespace clattn
