// When attending to a shared prefix on its own pays, and the levels of a cascade as batches.
#include <algorithm>
#include <clattn/cascade.hpp>
#include <clattn/config_fields.hpp>
#include <utility>

#include "base/checked.hpp"
#include "metadata/cascade_batch.hpp"
#include "metadata/page_list.hpp"
#include "metadata/validate.hpp"

namespace clattn {
namespace {

using detail::ceil_div, detail::checked_mul, detail::throw_invalid_if;

// vLLM 76b494444f, flash_attn.py: a shorter prefix or a smaller batch does not pay for the merge;
// tiles are those of FlashAttention.
constexpr std::int32_t kLeastPrefix = 256;
constexpr std::size_t kLeastRequests = 8;
constexpr std::int64_t kTile = 128;

void check(const CascadeQuery& query) {
  detail::check_at_least("common_prefix_len", query.common_prefix_len, 0);
  detail::check_at_least("num_kv_heads", query.num_kv_heads, 1);
  detail::check_at_least("num_query_heads", query.num_query_heads, 1);
  detail::check_at_least("num_sms", query.num_sms, 1);
  throw_invalid_if(query.num_query_heads % query.num_kv_heads != 0,
                   "num_query_heads is {}, legal: a multiple of num_kv_heads {}",
                   query.num_query_heads, query.num_kv_heads);
}

}  // namespace

std::vector<std::string> validate_cascade_configuration(const AttentionConfig& config) {
  std::vector<std::string> reasons;
  for (const std::string& option : fields_not_taken(config, field::kCascades))
    reasons.push_back(fmt::format("Cascade attention does not support {}.", option));
  return reasons;
}

bool use_cascade_attention(const CascadeQuery& query) {
  check(query);
  if (query.common_prefix_len < kLeastPrefix || query.query_lens.size() < kLeastRequests ||
      query.use_alibi || query.use_sliding_window || query.use_local_attention) {
    return false;
  }
  const std::int64_t group = query.num_query_heads / query.num_kv_heads;
  const bool flash_decoding =
      group > 1 &&
      std::ranges::all_of(query.query_lens, [](std::int32_t length) { return length == 1; });
  if (!flash_decoding) return true;

  const auto num_reqs = static_cast<std::int64_t>(query.query_lens.size());
  const auto tiles = ceil_div<std::int64_t>(query.common_prefix_len, kTile);
  const std::int64_t sms = query.num_sms;
  const auto cascade_groups =
      checked_mul<std::int64_t>(query.num_query_heads, ceil_div(num_reqs, kTile), "cascade groups");
  const std::int64_t decoding_groups =
      checked_mul(checked_mul<std::int64_t>(num_reqs, query.num_kv_heads, "decoding groups"),
                  checked_mul(ceil_div(group, kTile), tiles, "decoding groups"), "decoding groups");
  const std::int64_t cascade_time =
      checked_mul(ceil_div(cascade_groups, sms), tiles, "cascade time");
  return cascade_time < ceil_div(decoding_groups, sms);
}

}  // namespace clattn

namespace clattn::detail {

/// Fills the block table: sequence s has the pages at pages_of(s), as many as seq_lens_ need.
template <typename PagesOf>
void CascadeBatch::take_pages(std::int32_t block_size, const PagesOf& pages_of) {
  const auto longest = std::ranges::max_element(seq_lens_);
  stride_ = longest == seq_lens_.end() ? 0 : page_count(*longest, block_size);
  block_table_.resize(
      checked_mul(seq_lens_.size(), to_size(stride_), "entries of a level's block table"));
  for (std::size_t s = 0; s < seq_lens_.size(); ++s) {
    std::copy_n(pages_of(s), page_count(seq_lens_[s], block_size),
                block_table_.data() + s * to_size(stride_));
  }
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
  take_pages(block_size, [&](std::size_t s) {
    return level.paged_kv_indices.data() + level.paged_kv_indptr[s];
  });
  slots_ = {};
  causal_ = level.causal;
}

void CascadeBatch::set_prefix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                              std::int32_t prefix_len) {
  const std::size_t owner = first_active_request(batch);
  const bool any = owner < to_size(batch.num_reqs);
  query_start_loc_.assign({0, token_count(batch)});
  seq_lens_.assign({any ? prefix_len : 0});
  take_pages(block_size, [&](std::size_t) { return table_row(batch, owner); });
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
  take_pages(block_size,
             [&](std::size_t r) { return table_row(batch, r) + prefix_len / block_size; });
  slots_ = batch.slot_mapping;
  causal_ = batch.is_causal();
  take_lists(batch, prefix_len);
}

/// Every query token sees the whole prefix, whatever its direction and span; so do drafts of trees
/// that stand behind it. Without a window keep_keys change nothing.
void CascadeBatch::take_lists(const CommonAttentionMetadata& batch, std::int32_t prefix_len) {
  direction_ = batch.direction;
  span_start_loc_.assign(batch.span_start_loc.begin(), batch.span_start_loc.end());
  spans_.clear();
  for (const std::int32_t position : batch.spans)
    spans_.push_back(std::max(position - prefix_len, 0));
  tree_start_loc_.assign(batch.tree_start_loc.empty() ? 0 : 1, 0);
  tree_parents_.clear();
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const bool idle = query_len_of(batch, r) == 0;
    const std::int32_t first_key = batch.first_keys.empty() || idle ? 0 : batch.first_keys[r];
    throw_invalid_if(first_key > 0, "request {}: first_keys is {}, legal in a cascade: 0", r,
                     first_key);
    if (tree_start_loc_.empty()) continue;
    const auto first = to_size(batch.tree_start_loc[r]), end = to_size(batch.tree_start_loc[r + 1]);
    const auto parents = batch.tree_parents.subspan(first, idle ? 0 : end - first);
    throw_invalid_if(std::cmp_greater(parents.size(), seq_lens_[r]),
                     "request {}: its tree has {} nodes, legal in a cascade: 0 … {} (its keys "
                     "behind the common prefix)",
                     r, parents.size(), seq_lens_[r]);
    tree_parents_.insert(tree_parents_.end(), parents.begin(), parents.end());
    tree_start_loc_.push_back(static_cast<std::int32_t>(tree_parents_.size()));
  }
}

CommonAttentionMetadata CascadeBatch::batch() const {
  CommonAttentionMetadata batch =
      CommonAttentionMetadata::of(query_start_loc_, seq_lens_, block_table_);
  batch.block_table_stride = stride_;
  batch.slot_mapping = slots_;
  batch.direction = direction_;
  if (direction_.empty()) batch.causal = causal_;
  batch.span_start_loc = span_start_loc_;
  batch.spans = spans_;
  batch.tree_start_loc = tree_start_loc_;
  batch.tree_parents = tree_parents_;
  return batch;
}

}  // namespace clattn::detail
