#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <span>

namespace clattn {

/// What the FLASHINFER backend's builder makes (its build() returns one). Host arrays, valid until
/// the next build(); page lists are CSR: the pages of request r are
/// paged_kv_indices[paged_kv_indptr[r] .. paged_kv_indptr[r + 1]).
class FlashInferMetadata : public AttentionMetadata {
 public:
  std::span<const std::int32_t> query_start_loc;   ///< [num_reqs + 1]
  std::span<const std::int32_t> seq_lens;          ///< [num_reqs]
  std::span<const std::int32_t> paged_kv_indptr;   ///< [num_reqs + 1]
  std::span<const std::int32_t> paged_kv_indices;  ///< [paged_kv_indptr.back()]
  std::span<const std::int32_t>
      paged_kv_last_page_len;  ///< [num_reqs], 1 … page_size; 0 when empty
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t page_size = 0;
  DType data_type = DType::kF16;    ///< of the cache
  DType q_data_type = DType::kF16;  ///< of the query
};

}  // namespace clattn
