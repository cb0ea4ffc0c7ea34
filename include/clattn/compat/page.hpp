#pragma once

// For engines that keep FlashInfer's page lists instead of block tables.

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// CSR page lists (FlashInfer's paging arrays): the pages of request r are indices[indptr[r] ..
/// indptr[r + 1]).
struct PagedKVMetadata {
  std::vector<std::int32_t> indptr = {};   ///< [num_reqs + 1]
  std::vector<std::int32_t> indices = {};  ///< [indptr.back()], physical block ids
  std::vector<std::int32_t> last_page_len =
      {};  ///< [num_reqs], 1 … block_size; 0 for an empty request
};
/// The page lists of a batch. Checks its lengths and block table as validate_batch() does.
PagedKVMetadata build_paged_kv_metadata(const CommonAttentionMetadata& batch,
                                        std::int32_t block_size);

/// [num_reqs]: the tokens on pages indptr[r] .. indptr[r + 1] of which the last holds
/// last_page_len[r] (1 … page_size, 0 for a request without pages).
std::vector<std::int32_t> get_seq_lens(std::span<const std::int32_t> indptr,
                                       std::span<const std::int32_t> last_page_len,
                                       std::int32_t page_size);

/// Where each new token belongs. Both [nnz].
struct BatchIndicesPositions {
  std::vector<std::int32_t> batch_indices = {};  ///< its request; -1 past the last new token
  std::vector<std::int32_t> positions = {};      ///< in its sequence; 0 past the last new token
};

/// New tokens are the last ones of their sequences: request r's are append_indptr[r] ..
/// append_indptr[r + 1]. `nnz`, at least append_indptr.back(), is the padded count of tokens;
/// `seq_lens` [num_reqs] include the new ones.
BatchIndicesPositions get_batch_indices_positions(std::span<const std::int32_t> append_indptr,
                                                  std::span<const std::int32_t> seq_lens,
                                                  std::int64_t nnz);

}  // namespace clattn
