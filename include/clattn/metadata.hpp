#pragma once

#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace CLATTN_API clattn {

/// The most nodes of a tree of drafts.
inline constexpr std::int32_t kMaxTreeNodes = 256;

/// One batch step, described once for all layers of a KV cache group (vLLM:
/// CommonAttentionMetadata). All arrays are host memory that the caller keeps until build()
/// returns; requests are ragged rows.
struct CommonAttentionMetadata {
  std::span<const std::int32_t> query_start_loc =
      {};  ///< [num_reqs + 1], prefix sums of the query lengths
  std::span<const std::int32_t> seq_lens =
      {};  ///< [num_reqs], tokens in the cache including this step's
  std::span<const std::int32_t> num_computed_tokens =
      {};                     ///< [num_reqs] or empty: seq_lens minus query lengths
  std::int32_t num_reqs = 0;  ///< number of requests
  /// Rows of the query: the requests' tokens and, where query_start_loc[num_reqs] is less, padding
  /// behind them. Nothing is read or written for padding, and metadata does not count it.
  std::int32_t num_actual_tokens = 0;
  std::int32_t max_query_len = 0;  ///< an upper bound; 0 = derive it
  std::int32_t max_seq_len = 0;    ///< of seq_lens: an upper bound; 0 = derive it
  /// [num_reqs, block_table_stride], physical block ids. Those of pages before the first key that
  /// the request's query tokens see may be anything (AttentionMetadataBuilder::build).
  std::span<const std::int32_t> block_table = {};
  std::int64_t block_table_stride =
      0;  ///< columns of a row; those past ceil(seq_len / block_size) are unused
  /// [>= the requests' tokens], or empty: computed from the block table. In cross attention over
  /// pages: one slot per encoder token that this step stores; empty if it stores none.
  std::span<const std::int64_t> slot_mapping = {};
  /// [num_reqs + 1], encoder types without a cache only: where each request's keys are in the key
  /// and value tensors, prefix sums of seq_lens. Empty = query_start_loc (self-attention). Such
  /// batches have no block table and no slots.
  std::span<const std::int32_t> key_start_loc = {};
  /// Whether a query sees only keys up to its own position. nullopt = true for decoders, false for
  /// the other attn_types. Decoders and encoder_only accept both values; encoder and
  /// encoder_decoder refuse true.
  std::optional<bool> causal = std::nullopt;
  /// One batch serves layers of all kinds. What it says of a request's tokens (direction,
  /// first_keys, trees) holds in all of them, so that builders of layers without the option refuse
  /// it. What certain layers see in addition (spans, keep_keys) is for layers with the option;
  /// others ignore it, once it was checked.
  ///
  /// [num_reqs] or empty: the direction of each request. It replaces `causal`, which must be unset
  /// then. Only for decoders and encoder_only, and for layers with use_directions.
  std::span<const Direction> direction = {};
  /// Spans of tokens that see one another in both directions, such as an image or the prompt of a
  /// prefix language model: those of request r are the rows span_start_loc[r] to
  /// span_start_loc[r + 1] - 1 of `spans`. A query in a span sees the span's keys, cut by the
  /// window as the layer's span_rule says, in addition to those that it sees anyway. Layers without
  /// use_spans ignore spans. The part of a span past seq_lens is not there yet, so a prompt that is
  /// split inside a span gives other results than one that is not.
  ///@{
  std::span<const std::int32_t> span_start_loc = {};  ///< [num_reqs + 1], prefix sums, or empty
  std::span<const std::int32_t> spans = {};  ///< [number, 2]: first position, one past the last;
                                             ///< ascending in a request, disjoint
  ///@}
  /// [num_reqs] or empty: the first position of a request that holds a key, 0 … its seq_len.
  /// Positions before it may hold anything, and so may the block ids of pages that end before it
  /// and hold no new token. Only for layers with use_first_keys.
  std::span<const std::int32_t> first_keys = {};
  /// [num_reqs] or empty: how many keys of a request, from position 0 on, its queries see whatever
  /// the left side of the window and chunks say, such as sinks or a prompt: 0 … its seq_len, less
  /// the nodes of its tree. Causality, the right side of the window, first_keys and the dense mask
  /// hide them as they hide others. Block ids of pages between them and what the window of the
  /// request's first query token reaches may be anything. Layers without use_keep_keys ignore it,
  /// and for layers with neither a window to the left nor chunks it changes nothing.
  std::span<const std::int32_t> keep_keys = {};
  /// Trees of drafts: the newest tokens of a request, in their order in the cache, are the nodes of
  /// a tree. Such a token sees the keys before the tree, its ancestors and itself; windows,
  /// chunks and ALiBi count positions along that path. The nodes of request r are the elements
  /// tree_start_loc[r] to tree_start_loc[r + 1] - 1 of tree_parents: none (no tree), or at least
  /// its query tokens (nodes before these are in the cache already) and at most kMaxTreeNodes. A
  /// request with a tree is causal and has no span. Only for layers with use_trees.
  ///@{
  std::span<const std::int32_t> tree_start_loc = {};  ///< [num_reqs + 1], prefix sums, or empty
  std::span<const std::int32_t> tree_parents = {};    ///< of each node: the number of an earlier
                                                      ///< one, from 0 in its tree; -1 = a root
  ///@}
  /// Of builders with graph_batch_size: the batch size whose recorded launches run this step, which
  /// is filled up to it (vLLM: cuda_graph_pad_size). 0 = graph_batch_size.
  std::int32_t graph_pad_size = 0;

  /// `causal`, or the default of layers of this type.
  bool is_causal(AttentionType attn_type = AttentionType::kDecoder) const {
    return causal.value_or(attn_type == AttentionType::kDecoder);
  }
  /// The usual step: every request's row of `block_table` is as long as the others'; the counts
  /// follow from the sizes.
  static CommonAttentionMetadata of(std::span<const std::int32_t> query_start_loc,
                                    std::span<const std::int32_t> seq_lens,
                                    std::span<const std::int32_t> block_table);
  /// The first `num_requests` requests with `num_tokens` rows of the query, such as a captured
  /// batch without its padding: views of the same arrays, the whole slot_mapping included. Throws
  /// kInvalidArgument unless num_requests is 0 … num_reqs and num_tokens at least their tokens and
  /// at most num_actual_tokens.
  CommonAttentionMetadata unpadded(std::int32_t num_tokens, std::int32_t num_requests) const;
  /// [num_reqs], query tokens of each request: differences of query_start_loc. Throws
  /// kInvalidArgument if that has fewer than num_reqs + 1 elements.
  std::vector<std::int32_t> naive_query_lens() const;
};

/// Calls visit(field...) for each list that CommonAttentionMetadata has of requests beyond lengths,
/// with that field of each struct: of that type, or of another that has fields of these names.
template <typename Visit, typename... Structs>
void for_each_list(const Visit& visit, Structs&&... structs) {
  visit(structs.direction...);
  visit(structs.span_start_loc...);
  visit(structs.spans...);
  visit(structs.first_keys...);
  visit(structs.keep_keys...);
  visit(structs.tree_start_loc...);
  visit(structs.tree_parents...);
}

/// A KV cache group's part of a step: every group has its own pages and slots
/// (CommonAttentionMetadata's fields of these names).
struct GroupPages {
  std::span<const std::int32_t> block_table = {};   ///< [num_reqs, block_table_stride]
  std::int64_t block_table_stride = 0;              ///< columns of a row
  std::span<const std::int64_t> slot_mapping = {};  ///< empty = computed from the block table
};

/// Upper bounds of a batch. A builder sizes its memory by them at its first step, so that later
/// steps allocate nothing (only page lists beyond a million entries grow); a batch beyond them is
/// refused.
struct BatchLimits {
  std::int32_t max_num_reqs = 256;             ///< requests of a step
  std::int32_t max_num_batched_tokens = 8192;  ///< query tokens of all requests
  std::int32_t max_model_len = 131072;         ///< tokens of a request in the cache
  std::int64_t num_blocks =
      -1;  ///< of the cache: block ids and slots are checked against it; -1 = unknown
};

/// How the keys of a query tile are split.
enum class SplitPolicy : std::uint8_t {
  kBalanced,       ///< equal work per item for this batch
  kDeterministic,  ///< cuts depend on the position alone: a request's bits do not depend on its
                   ///< batch
};

/// How a batch divides when decodes come first (vLLM: split_decodes_and_prefills).
struct BatchSplit {
  std::int32_t num_decodes = 0;         ///< requests
  std::int32_t num_prefills = 0;        ///< requests
  std::int32_t num_decode_tokens = 0;   ///< query tokens of the decodes
  std::int32_t num_prefill_tokens = 0;  ///< query tokens of the prefills
  bool operator==(const BatchSplit&) const = default;
};

/// Requests with at most `decode_threshold` query tokens are decodes and must stand before the
/// others; another order throws kInvalidArgument naming the request (builders accept any order). A
/// request without query tokens may be anywhere (padding comes last) and is counted with the
/// requests around it; tokens of padding with the last requests. Reads query_start_loc,
/// max_query_len (0 = unknown), num_reqs and num_actual_tokens.
BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch,
                                      std::int32_t decode_threshold = 1);

/// Brings decodes (scheduled tokens <= threshold) to the front with the fewest swaps: writes to
/// `order` which old index is at each new place and returns whether anything moved. The order
/// inside a class is not kept (vLLM: reorder_batch_to_split_decodes_and_prefills). `order` has one
/// element per request. Does not allocate.
bool reorder_batch_to_split_decodes_and_prefills(std::span<const std::int32_t> num_scheduled_tokens,
                                                 std::int32_t decode_threshold,
                                                 std::span<std::int32_t> order);

/// slots[query_start_loc[r] + i] = block_table[r][p / block_size] * block_size + p % block_size for
/// the token at position p = seq_lens[r] - query_len[r] + i. Slots that no request owns become
/// kPadSlotId. Validates like validate_batch. `slots` has at least num_actual_tokens elements.
void compute_slot_mapping(const CommonAttentionMetadata& batch, std::int32_t block_size,
                          std::span<std::int64_t> slots);

/// The block table of kernels whose pages are parts of the allocator's blocks: logical block b is
/// kernel blocks b * k .. b * k + k - 1 with k = block_size / kernel_block_size, so every token
/// keeps its slot and the same buffer is a cache of k times as many blocks. Entry i becomes entries
/// i * k .. i * k + k - 1 of `kernel_block_table`, which has k times the elements (a row's stride
/// grows by k). Entries that name no block, negative or with parts past INT32_MAX, become -1.
/// Throws kInvalidArgument unless kernel_block_size divides block_size. vLLM:
/// BlockTable.map_to_kernel_blocks.
void map_to_kernel_blocks(std::span<const std::int32_t> block_table, std::int32_t block_size,
                          std::int32_t kernel_block_size,
                          std::span<std::int32_t> kernel_block_table);

/// Makes slots [num_actual_tokens, end) kPadSlotId, so that a cache write over the padded length
/// stores nothing for them (vLLM: CommonAttentionMetadata's __post_init__).
void pad_slot_mapping(std::span<std::int64_t> slot_mapping, std::int32_t num_actual_tokens);

/// Throws kInvalidArgument naming request, field, value and legal range unless query_start_loc
/// starts at 0, never falls and ends at most at num_actual_tokens; 0 <= query_len <= seq_len; every
/// seq_len fits the table; used table entries lie in [0, num_blocks) and slots in [-1, num_blocks *
/// block_size) (num_blocks < 0: no upper bound known).
void validate_batch(const CommonAttentionMetadata& batch, std::int32_t block_size,
                    std::int64_t num_blocks);

}  // namespace clattn
