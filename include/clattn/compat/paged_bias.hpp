#pragma once

// For code that describes batches by xFormers' paged biases instead of start locations and lengths.

#include <clattn/metadata.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// One of xFormers' paged biases (xformers.ops.fmha.attn_bias) as what a builder takes. Request r
/// attends to kv_seqlen[r] keys that stand in a row among the slots of its pages: slot s is token
/// s % page_size of block block_tables[r][s / page_size]. Pages before the first key are left out,
/// and positions count from the first page kept. What depends on differences of positions (windows,
/// ALiBi) is not affected; chunks of attention_chunk_size shift.
struct PagedBias {
  std::vector<std::int32_t> query_start_loc = {};  ///< [num_reqs + 1]
  std::vector<std::int32_t> seq_lens = {};  ///< [num_reqs], keys and what is hidden before them
  std::vector<std::int32_t> first_keys =
      {};  ///< [num_reqs], 0 … page_size - 1 hidden before the first
  std::vector<std::int32_t> block_table =
      {};                               ///< [num_reqs, block_table_stride], 0 past the last page
  std::int64_t block_table_stride = 0;  ///< columns of a row
  bool causal = false;                  ///< as CommonAttentionMetadata::causal

  /// A batch over these arrays, valid while they live unchanged. Without slots the queries' tokens
  /// are the last of the keys, as causal biases have it anyway.
  CommonAttentionMetadata metadata(std::span<const std::int64_t> slot_mapping = {}) const;
  /// Whether some request's first key is not the first of its page: then metadata() has first_keys,
  /// which layers with use_first_keys take.
  bool needs_first_keys() const;
};

/// What from_seqlens() and make_paged() of the types below do. `block_tables` is [num_reqs, pages].
/// A causal request has at least as many keys as queries. Throws kInvalidArgument naming request,
/// field, value and legal range.
PagedBias make_paged_bias(std::span<const std::int32_t> q_seqlen,
                          std::span<const std::int32_t> kv_seqstarts,
                          std::span<const std::int32_t> kv_seqlen,
                          std::span<const std::int32_t> block_tables, std::int32_t page_size,
                          bool causal);

/// The keys are the first kv_seqlen[r] slots of the request's pages. Causal: the last query sees
/// all keys, each one before it one key less.
template <bool kCausal>
struct PagedPaddedKeysMask : PagedBias {
  /// As above.
  static PagedPaddedKeysMask from_seqlens(std::span<const std::int32_t> q_seqlen,
                                          std::span<const std::int32_t> kv_seqlen,
                                          std::span<const std::int32_t> block_tables,
                                          std::int32_t page_size) {
    const std::vector<std::int32_t> starts(kv_seqlen.size(), 0);
    return {make_paged_bias(q_seqlen, starts, kv_seqlen, block_tables, page_size, kCausal)};
  }
};
/// xFormers' name.
using PagedBlockDiagonalPaddedKeysMask = PagedPaddedKeysMask<false>;
/// xFormers' name.
using PagedBlockDiagonalCausalWithOffsetPaddedKeysMask = PagedPaddedKeysMask<true>;

/// The keys are slots kv_seqstarts[r] … kv_seqstarts[r] + kv_seqlen[r] - 1 of the request's pages.
template <bool kCausal>
struct PagedGappyKeysMask : PagedBias {
  /// As above, with one start per request.
  static PagedGappyKeysMask from_seqlens(std::span<const std::int32_t> q_seqlen,
                                         std::span<const std::int32_t> kv_seqstarts,
                                         std::span<const std::int32_t> kv_seqlen,
                                         std::span<const std::int32_t> block_tables,
                                         std::int32_t page_size) {
    return {make_paged_bias(q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, kCausal)};
  }
};
/// xFormers' name.
using PagedBlockDiagonalGappyKeysMask = PagedGappyKeysMask<false>;
/// xFormers' name.
using PagedBlockDiagonalCausalWithOffsetGappyKeysMask = PagedGappyKeysMask<true>;

/// Keys of one tensor without pages: request r's are kv_seqstarts[r] … kv_seqstarts[r] +
/// kv_seqlen[r] - 1 of it.
template <bool kCausal>
struct GappyKeysMask {
  std::vector<std::int32_t> q_seqlen = {};      ///< [num_reqs]
  std::vector<std::int32_t> kv_seqstarts = {};  ///< [num_reqs + 1], the last: the tensor's keys
  std::vector<std::int32_t> kv_seqlen = {};     ///< [num_reqs]

  /// The same where the tensor was cut into runs of `notional_padding` keys, one a request, and
  /// each run into pages.
  PagedGappyKeysMask<kCausal> make_paged(std::span<const std::int32_t> block_tables,
                                         std::int32_t page_size,
                                         std::int32_t notional_padding) const;
};
/// xFormers' name.
using BlockDiagonalGappyKeysMask = GappyKeysMask<false>;
/// xFormers' name.
using BlockDiagonalCausalWithOffsetGappyKeysMask = GappyKeysMask<true>;

}  // namespace clattn
