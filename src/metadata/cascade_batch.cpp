#include "metadata/cascade_batch.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "metadata/page_list.hpp"
#include "metadata/validate.hpp"

namespace clattn::detail {

/// Room for the pages of seq_lens_, every entry past a sequence's own of no meaning.
void CascadeBatch::resize_table(std::int32_t block_size) {
  const auto longest = std::ranges::max_element(seq_lens_);
  stride_ = longest == seq_lens_.end() ? 0 : page_count(*longest, block_size);
  block_table_.resize(
      checked_mul(seq_lens_.size(), to_size(stride_), "entries of a level's block table"));
}

void CascadeBatch::set_pages(const CascadeLevel& level, std::int32_t block_size) {
  if (level.qo_indptr.empty()) throw_invalid("qo_indptr is empty, legal: num_seqs + 1 elements");
  const std::size_t num_seqs = level.qo_indptr.size() - 1;
  check_indptr(level.qo_indptr, "qo_indptr", num_seqs);
  check_indptr(level.paged_kv_indptr, "paged_kv_indptr", num_seqs);
  throw_invalid_if(level.paged_kv_last_page_len.size() != num_seqs,
                   "paged_kv_last_page_len holds {} elements, legal: {} (num_seqs)",
                   level.paged_kv_last_page_len.size(), num_seqs);
  throw_invalid_if(std::cmp_less(level.paged_kv_indices.size(), level.paged_kv_indptr.back()),
                   "paged_kv_indices holds {} elements, legal: at least {} (paged_kv_indptr[{}])",
                   level.paged_kv_indices.size(), level.paged_kv_indptr.back(), num_seqs);
  write_seq_lens(level.paged_kv_indptr, level.paged_kv_last_page_len, block_size, seq_lens_);
  query_start_loc_.assign(level.qo_indptr.begin(), level.qo_indptr.end());
  resize_table(block_size);
  for (std::size_t s = 0; s < num_seqs; ++s) {
    const std::int32_t first = level.paged_kv_indptr[s];
    std::copy_n(level.paged_kv_indices.begin() + first, level.paged_kv_indptr[s + 1] - first,
                row(s));
  }
  slots_ = {};
  causal_ = level.causal;
}

void CascadeBatch::set_prefix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                              std::int32_t prefix_len) {
  const std::size_t owner = first_active_request(batch);
  const bool any = owner < to_size(batch.num_reqs);
  query_start_loc_.assign({0, batch.num_actual_tokens});
  seq_lens_.assign({any ? prefix_len : 0});
  resize_table(block_size);
  std::copy_n(table_row(batch, owner), stride_, row(0));
  slots_ = {};
  causal_ = false;
}

void CascadeBatch::set_suffix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                              std::int32_t prefix_len) {
  const auto num_reqs = to_size(batch.num_reqs);
  query_start_loc_.assign(batch.query_start_loc.begin(),
                          batch.query_start_loc.begin() + batch.num_reqs + 1);
  seq_lens_.resize(num_reqs);
  for (std::size_t r = 0; r < num_reqs; ++r) {
    const bool idle = batch.query_start_loc[r + 1] == batch.query_start_loc[r];
    seq_lens_[r] = idle ? 0 : batch.seq_lens[r] - prefix_len;
  }
  resize_table(block_size);
  for (std::size_t r = 0; r < num_reqs; ++r) {
    std::copy_n(table_row(batch, r) + prefix_len / block_size, page_count(seq_lens_[r], block_size),
                row(r));
  }
  slots_ = batch.slot_mapping;
  causal_ = batch.is_causal();
}

CommonAttentionMetadata CascadeBatch::batch() const {
  CommonAttentionMetadata batch =
      CommonAttentionMetadata::of(query_start_loc_, seq_lens_, block_table_);
  batch.block_table_stride = stride_;
  batch.slot_mapping = slots_;
  batch.causal = causal_;
  return batch;
}

}  // namespace clattn::detail
