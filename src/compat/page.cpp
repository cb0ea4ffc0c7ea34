#include <clattn/compat/page.hpp>

#include "base/checked.hpp"
#include "metadata/page_list.hpp"
#include "metadata/validate.hpp"

namespace clattn {

PagedKVMetadata build_paged_kv_metadata(const CommonAttentionMetadata& batch,
                                        std::int32_t block_size) {
  const detail::BatchSummary summary = detail::validate_tables(batch, block_size);
  detail::validate_page_ids(batch, block_size, -1);
  PagedKVMetadata result{.indptr = {0}};
  result.indices.reserve(detail::to_size(summary.num_pages));
  for (std::size_t r = 0; r < detail::to_size(batch.num_reqs); ++r) {
    const std::int32_t seq_len = batch.seq_lens[r];
    const std::int32_t pages = detail::page_count(seq_len, block_size);
    const std::int32_t* const row = detail::table_row(batch, r);
    result.indices.insert(result.indices.end(), row, row + pages);
    result.indptr.push_back(result.indptr.back() + pages);
    result.last_page_len.push_back(pages == 0 ? 0 : seq_len - (pages - 1) * block_size);
  }
  return result;
}

std::vector<std::int32_t> get_seq_lens(std::span<const std::int32_t> indptr,
                                       std::span<const std::int32_t> last_page_len,
                                       std::int32_t page_size) {
  std::vector<std::int32_t> seq_lens;
  detail::write_seq_lens(indptr, last_page_len, page_size, seq_lens);
  return seq_lens;
}

BatchIndicesPositions get_batch_indices_positions(std::span<const std::int32_t> append_indptr,
                                                  std::span<const std::int32_t> seq_lens,
                                                  std::int64_t nnz) {
  detail::check_indptr(append_indptr, "append_indptr", seq_lens.size());
  detail::throw_invalid_if(nnz < append_indptr.back(),
                           "nnz is {}, legal: at least {} (append_indptr[{}])", nnz,
                           append_indptr.back(), seq_lens.size());
  BatchIndicesPositions result{std::vector<std::int32_t>(detail::to_size(nnz), -1),
                               std::vector<std::int32_t>(detail::to_size(nnz), 0)};
  for (std::size_t r = 0; r < seq_lens.size(); ++r) {
    const std::int32_t count = append_indptr[r + 1] - append_indptr[r];
    detail::throw_invalid_if(seq_lens[r] < count,
                             "request {}: seq_lens is {}, legal: at least {} (its new tokens)", r,
                             seq_lens[r], count);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::size_t token = detail::to_size(append_indptr[r]) + detail::to_size(i);
      result.batch_indices[token] = static_cast<std::int32_t>(r);
      result.positions[token] = seq_lens[r] - count + i;
    }
  }
  return result;
}

}  // namespace clattn
