#pragma once

#include <clattn/metadata.hpp>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/checked.hpp"

namespace clattn::detail {

/// What the length checks learn about a batch on the way.
struct BatchSummary {
  std::int32_t max_query_len = 0;  ///< the longest query, not the caller's bound
  std::int32_t max_seq_len = 0;
  std::int32_t num_pages = 0;  ///< used block-table entries of all requests
};

/// Pages that hold `seq_len` >= 0 tokens.
constexpr std::int32_t page_count(std::int32_t seq_len, std::int32_t block_size) {
  const std::int32_t full = quotient(seq_len, block_size);
  return full + (full * block_size != seq_len ? 1 : 0);
}

/// Query tokens of a request.
inline std::int32_t query_len_of(const CommonAttentionMetadata& batch, std::size_t request) {
  return batch.query_start_loc[request + 1] - batch.query_start_loc[request];
}

/// Query tokens of all requests, padding left out.
inline std::int32_t token_count(const CommonAttentionMetadata& batch) {
  return batch.query_start_loc[static_cast<std::size_t>(batch.num_reqs)];
}

/// A valid batch whose num_actual_tokens are the requests' tokens.
inline CommonAttentionMetadata without_padding(CommonAttentionMetadata batch) {
  batch.num_actual_tokens = token_count(batch);
  return batch;
}

/// Block ids of a request.
inline const std::int32_t* table_row(const CommonAttentionMetadata& batch, std::size_t request) {
  return batch.block_table.data() + request * static_cast<std::size_t>(batch.block_table_stride);
}

/// Throws kInvalidArgument unless an array has as many elements as `why` asks for.
void check_size(std::string_view field, std::size_t size, std::int64_t needed,
                std::string_view why);

/// The largest legal block id: num_blocks - 1, or the largest int32 when num_blocks is unknown (<
/// 0) or larger than ids can be. -1 when the cache has no block.
std::int32_t last_block_id(std::int64_t num_blocks);

// validate_batch() in parts, so that a builder which copies page ids anyway checks them in that
// pass (append_pages). None of them allocates unless it throws.

/// Query starts and the bound max_query_len; returns the longest query. Reads num_reqs,
/// num_actual_tokens, max_query_len and query_start_loc only.
std::int32_t validate_queries(const CommonAttentionMetadata& batch);

/// The same and seq_lens, without a block table: a request has at least its queries' keys. Returns
/// the longest seq_len.
std::int32_t validate_sequences(const CommonAttentionMetadata& batch);

/// Where the keys of a batch come from, which decides what its lengths must obey.
enum class KeySource : std::uint8_t {
  kOwnPages,    ///< self-attention over the cache: the queries are the newest tokens of seq_lens
  kOtherPages,  ///< cross attention over the cache: seq_lens and queries are independent
  kContiguous,  ///< key and value tensors: key_start_loc instead of a block table
};
constexpr KeySource key_source_of(AttentionType attn_type, bool contiguous) {
  if (contiguous) return KeySource::kContiguous;
  return attn_type == AttentionType::kEncoderDecoder ? KeySource::kOtherPages
                                                     : KeySource::kOwnPages;
}

/// Whether a batch may be causal. The other types always see all keys.
constexpr bool may_be_causal(AttentionType attn_type) {
  return attn_type == AttentionType::kDecoder || attn_type == AttentionType::kEncoderOnly;
}

/// How many decodes and prefills a step has, whatever the order of its requests.
struct StepSplit {
  BatchSplit counts;
  /// First request of each side, if its requests are consecutive; -1 if they are interleaved.
  std::int32_t decodes_at = 0;
  std::int32_t prefills_at = 0;
};
/// A request without query tokens counts with the one before it, and with the decodes if it is
/// first. Without a cache all requests are prefills.
StepSplit split_step(const CommonAttentionMetadata& batch, std::int32_t decode_threshold,
                     KeySource source);

/// Everything except the values of block ids and slots.
BatchSummary validate_lengths(const CommonAttentionMetadata& batch, std::int32_t block_size,
                              KeySource source = KeySource::kOwnPages);

/// Whether all requests with query tokens keep the same block ids for their first
/// `common_prefix_len` keys, which none of their query tokens may be among. Lengths must be valid.
void validate_common_prefix(const CommonAttentionMetadata& batch, std::int32_t block_size,
                            std::int32_t common_prefix_len,
                            KeySource source = KeySource::kOwnPages);

/// The first request with query tokens; num_reqs if there is none. Such requests share a prefix.
std::size_t first_active_request(const CommonAttentionMetadata& batch);

/// seq_lens against the block table and the requests' queries; `starts`: query_start_loc, or empty
/// for requests without queries.
BatchSummary validate_tables(const CommonAttentionMetadata& batch, std::int32_t block_size,
                             std::span<const std::int32_t> starts = {});

/// Used block-table entries. Lengths must be valid.
void validate_page_ids(const CommonAttentionMetadata& batch, std::int32_t block_size,
                       std::int64_t num_blocks);

/// Checks the slots of the requests' tokens, if slots are given; all of them if they are not one
/// per query token. Lengths must be valid.
void validate_slots(const CommonAttentionMetadata& batch, std::int32_t block_size,
                    std::int64_t num_blocks, KeySource source = KeySource::kOwnPages);

/// Throws kInvalidArgument unless a builder's limits leave room for a token.
void validate_limits(const BatchLimits& limits);
/// Throws kInvalidArgument unless a batch with valid lengths stays within a builder's limits.
void validate_limits(const CommonAttentionMetadata& batch, const BatchSummary& summary,
                     const BatchLimits& limits);

/// Throws the error of the first bad block id in a request's used entries from number `first` on,
/// of which there is one.
[[noreturn]] void throw_bad_page_id(const CommonAttentionMetadata& batch, std::int32_t block_size,
                                    std::int64_t num_blocks, std::size_t request,
                                    std::size_t first = 0);

}  // namespace clattn::detail
