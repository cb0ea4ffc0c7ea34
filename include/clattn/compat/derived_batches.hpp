#pragma once

// For engines that derive a batch from another on the host as vLLM V1 does: fast prefill over a
// shared cache, the next step of a draft model, micro-batches, decode context parallelism.

#include <clattn/metadata.hpp>
#include <clattn/reorder.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// What layers that share another layer's KV cache need to compute: the tokens whose logits are
/// wanted.
struct FastPrefillBatch {
  std::vector<std::int32_t> query_start_loc = {};  ///< [num_reqs + 1]
  CommonAttentionMetadata original = {};           ///< the batch that it was made from
  /// The original's requests with those tokens alone, over this object's array: valid while it and
  /// the original's arrays live unchanged. No slots: such layers do not write.
  CommonAttentionMetadata metadata() const;
};

/// `logits_indices` are tokens of the batch, ascending; those of a request must be its last ones,
/// because queries stand at the end of their sequence. A batch of at most one query token a request
/// stays as it is. vLLM: make_kv_sharing_fast_prefill_common_attn_metadata.
FastPrefillBatch make_kv_sharing_fast_prefill_common_attn_metadata(
    const CommonAttentionMetadata& batch, std::span<const std::int32_t> logits_indices);

/// The step after a step: one new token for each request that had any.
struct AdvancedBatch {
  std::vector<std::int32_t> query_start_loc = {};  ///< [num_reqs + 1]
  std::vector<std::int32_t> seq_lens = {};         ///< [num_reqs]
  CommonAttentionMetadata original = {};           ///< a step later than this one
  /// The original's requests over this object's arrays: valid while it and the original's block
  /// table live unchanged. The table must have room for the new tokens; slots follow from it.
  CommonAttentionMetadata metadata() const;
};

/// What advance_step_flashattn() and advance_step_flashinfer() do to a batch on the device, on the
/// host, for build(). Requests without query tokens are padding and stay as they are. A request of
/// several query tokens is a prefill: with `turn_prefills_into_decodes` it becomes a decode (this
/// step finished its prompt), else it is refused. vLLM: FlashInferMetadata.advance_step.
AdvancedBatch advance_batch(const CommonAttentionMetadata& batch,
                            bool turn_prefills_into_decodes = false);

/// Tokens [begin, end) of a batch.
struct TokenRange {
  std::int32_t begin = 0;  ///< first token
  std::int32_t end = 0;    ///< one past the last token
  bool operator==(const TokenRange&) const = default;
};

/// A part of a batch that is run as a batch of its own. Its first and its last request may be cut:
/// the other tokens of those are in the parts before and after it.
struct UBatchSlice {
  RequestRange request_slice = {};  ///< requests that own one of the tokens
  TokenRange token_slice = {};      ///< tokens of the slice
  bool operator==(const UBatchSlice&) const = default;
};

/// Cuts a batch into `num_ubatches` slices of `split_point` tokens, the last of which takes what is
/// left: at least one token. A slice has the requests that own one of its tokens; the last one also
/// has the requests without tokens at the batch's end. vLLM: maybe_create_ubatch_slices.
std::vector<UBatchSlice> create_ubatch_slices(const CommonAttentionMetadata& batch,
                                              std::int32_t split_point,
                                              std::int32_t num_ubatches = 2);

/// Where the tokens of requests `request_slice` start when the first of those tokens is number 0:
/// [end - begin + 1]. `query_start_loc` holds ascending prefix sums.
std::vector<std::int32_t> slice_query_start_locs(std::span<const std::int32_t> query_start_loc,
                                                 RequestRange request_slice);

/// A slice as a batch. Its tokens are rows token_slice of the whole batch's query, key, value and
/// output tensors.
struct SlicedBatch {
  std::vector<std::int32_t> query_start_loc = {};  ///< [num_reqs + 1]
  std::vector<std::int32_t> seq_lens = {};  ///< [num_reqs], up to the last token that the slice has
  UBatchSlice slice = {};                   ///< which requests and tokens these are
  CommonAttentionMetadata original = {};    ///< the batch that it was cut from
  /// The slice's requests over this object's arrays and its rows of the original's block table and
  /// slots; valid while both live unchanged.
  CommonAttentionMetadata metadata() const;
};

/// The first and the last request of the slice must own its first and last token. Cutting within a
/// request is for causal attention over a cache: the request's earlier part sees no key of the
/// later one, which needs the earlier part's keys in the cache. Batches with key_start_loc are
/// refused. vLLM: _make_metadata_with_slice.
SlicedBatch make_metadata_with_slice(const UBatchSlice& slice,
                                     const CommonAttentionMetadata& batch);

/// Each slice as a batch. vLLM: split_attn_metadata.
std::vector<SlicedBatch> split_attn_metadata(std::span<const UBatchSlice> slices,
                                             const CommonAttentionMetadata& batch);

/// Decode context parallelism deals each sequence to `dcp_size` ranks in turns of
/// `cp_kv_cache_interleave_size` tokens.
struct DcpOptions {
  std::int32_t dcp_size = 1;                            ///< ranks, >= 1
  std::optional<std::int32_t> dcp_rank = std::nullopt;  ///< nullopt: all ranks
  std::int32_t cp_kv_cache_interleave_size = 1;         ///< consecutive tokens on a rank, >= 1
};

/// Tokens of each sequence that a rank holds: [num_reqs], or [num_reqs, dcp_size] for all ranks.
/// vLLM: get_dcp_local_seq_lens.
std::vector<std::int32_t> get_dcp_local_seq_lens(std::span<const std::int32_t> seq_lens,
                                                 const DcpOptions& options);

}  // namespace clattn
