#pragma once

#include <clattn/opencl.hpp>

#include <clattn/attention.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>

namespace CLATTN_API clattn {

/// Block `source` is copied to block `destination`.
struct BlockPair {
  std::int64_t source = 0;       ///< block id
  std::int64_t destination = 0;  ///< block id
};

/// Copies whole blocks inside every layer's own cache, K and V, all layers alike (vLLM:
/// copy_blocks, for copy-on-write). The caches may lie in one buffer or in many and in any layout,
/// but must have one shape and the same strides. Asynchronous; `mapping` is read before the call
/// returns. No caches or no pairs: nothing happens and `event` is left empty. Throws
/// kInvalidArgument for an id outside a cache, a destination named twice, a block that is both
/// source and destination, and for layers whose blocks differ in type or in where their bytes lie.
void copy_blocks(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 std::span<const BlockPair> mapping, Event* event = nullptr);
/// The same for the caches of latent attention (vLLM: copy_blocks_mla).
void copy_blocks_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, std::span<const BlockPair> mapping,
                     Event* event = nullptr);

/// Which stored tokens move to which slots of the same cache. After a tree of drafts is verified,
/// for example, those of the accepted path move to where they would be without the others. Slot s
/// is token s % block_size of block s / block_size. Host memory, read before the call returns.
struct TokenMoves {
  std::span<const std::int64_t> src_slots = {};  ///< [number], of the tokens
  std::span<const std::int64_t> dst_slots = {};  ///< [number], where they go
  /// [num_requests + 1], prefix sums: the pairs of a request, moved one after the other, so that a
  /// token may go where an earlier one came from.
  std::span<const std::int32_t> starts = {};
};
/// The same in buffers on the device, which may hold more pairs than the last of `starts` says. A
/// pair with a slot outside the caches moves nothing.
struct DeviceTokenMoves {
  Buffer src_slots = {};          ///< i64 [>= the last of starts]
  Buffer dst_slots = {};          ///< i64 [the same]
  Buffer starts = {};             ///< i32 [num_requests + 1]
  std::int32_t num_requests = 0;  ///< at least 0
};

/// Moves tokens inside every layer's own cache, K and V, all layers alike. The caches are as for
/// copy_blocks(). Bytes move unchanged, so keys must have been rotated (RoPE) for the position
/// that they move to, as drafts are that were rotated by their depth in the tree. Pages that
/// requests share must be copied first. Asynchronous. No caches or no pairs: nothing happens and
/// `event` is left empty. Throws kInvalidArgument for lists of unequal length, slots outside the
/// caches, starts that are not prefix sums of the pairs, and a slot to which one request moves a
/// token while another one moves a token from it or to it.
///@{
void move_tokens(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 const TokenMoves& moves, Event* event = nullptr);
void move_tokens_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, const TokenMoves& moves,
                     Event* event = nullptr);
///@}
/// The same by lists on the device; may be recorded. What the lists hold is not checked.
///@{
void move_tokens(const Context& context, cl_command_queue queue, std::span<const KVCache> caches,
                 const DeviceTokenMoves& moves, Event* event = nullptr);
void move_tokens_mla(const Context& context, cl_command_queue queue,
                     std::span<const MLACache> caches, const DeviceTokenMoves& moves,
                     Event* event = nullptr);
///@}

/// Host memory that the device copies from and to fastest; uninitialised.
class PinnedMemory {
 public:
  /// Throws kOpenCL where the driver has none left.
  PinnedMemory(const Context& context, std::size_t size_bytes);
  /// The memory, for as long as this object lives.
  std::span<std::byte> bytes() const noexcept { return view_.bytes(); }

 private:
  HostView view_;
};

/// Where swap_blocks takes blocks from or puts them: a cache on the device, or a host image of one.
/// An image of N blocks holds the bytes that a cache of N blocks in the other side's order has:
/// [2][N] or [N][2] (K, V) times a block's bytes, as the device cache orders them; of latent
/// attention [N]. N is what the image's bytes hold; padding of pages is not part of it.
using SwapSpace = std::variant<KVCache, MLACache, std::span<std::byte>>;

/// Copies whole blocks, K and V, from one space to another: device to host, host to device, or
/// device to device (vLLM: swap_blocks). Pairs that continue each other on both sides travel as one
/// copy. Asynchronous: `mapping` is read before the call returns, but a host image must stay alive,
/// and on the way to the device unchanged, until `event` or a later synchronisation of the queue;
/// copies overlap with the host's work only from and to PinnedMemory. No pairs: nothing happens and
/// `event` is left empty. Throws kInvalidArgument for out-of-order queues, for two host images
/// (`Invalid device combination`), for caches of two contexts
/// (`src and dst must be on the same GPU`) or of differing shape, for ids out of range, a
/// destination named twice, and for a destination whose bytes a pair also reads, even through
/// another cache, offset or sub-buffer.
void swap_blocks(const Context& context, cl_command_queue queue, const SwapSpace& source,
                 const SwapSpace& destination, std::span<const BlockPair> mapping,
                 Event* event = nullptr);

/// Log-sum-exps, f32, one per token and head. Strides in elements; both 0 = [tokens, heads], this
/// library's order. [heads, tokens] (vLLM) is token_stride 1, head_stride = tokens.
struct LseRef {
  cl_mem buffer = nullptr;        ///< not retained
  std::int64_t offset = 0;        ///< elements before token 0, head 0
  std::int64_t token_stride = 0;  ///< elements from token to token
  std::int64_t head_stride = 0;   ///< elements from head to head
};

/// An attention result over part of the keys: output [tokens, heads, head_size] and its LSE.
struct OutputWithLse {
  TensorRef output = {};  ///< [tokens, heads, head_size]
  LseRef lse = {};        ///< one per token and head of output
};

/// Base of a log-sum-exp.
enum class LseBase : std::uint8_t { kE, k2 };

/// What is merged: results of a prefix and a suffix of the keys, token by token.
struct MergeAttnStates {
  std::int64_t num_tokens = 0;     ///< rows of each tensor
  std::int32_t num_heads = 1;      ///< query heads
  std::int32_t head_size = 128;    ///< a multiple of 8
  DType dtype = DType::kF16;       ///< of the outputs that are joined: f32, f16 or bf16
  LseBase lse_base = LseBase::kE;  ///< of all LSEs
  /// Tokens from this one on have no prefix: output and LSE are the suffix's as they are,
  /// infinities and NaN too (an output of 8 bits is rounded). Negative = all have one.
  std::int64_t prefill_tokens_with_context = -1;
  /// Of the merged output: nullopt = dtype, or an 8-bit type, which holds type(out / output_scale)
  /// rounded to nearest even and saturated, in memory of its own.
  std::optional<DType> output_dtype = std::nullopt;
  Buffer output_scale = {};  ///< 8-bit types only: f32 [1] on the device. Empty = 1; int8 needs it
};

/// Joins attention over a prefix and over a suffix of the keys into attention over both (vLLM:
/// merge_attn_states), in f32:
///   out = (e^p P + e^s S) / (e^p + e^s), lse = ln(e^p + e^s).
/// Of tokens with a prefix, an LSE of +inf counts as -inf. A side with LSE -inf adds nothing,
/// whatever its output holds; if both have it, the output is 0 and the LSE -inf. If `merged.lse`
/// has no buffer, it is not written. `merged` may be one of the inputs itself, but not overlap one
/// otherwise; an output of 8 bits overlaps none. Asynchronous.
void merge_attn_states(const Context& context, cl_command_queue queue,
                       const MergeAttnStates& config, const OutputWithLse& merged,
                       const OutputWithLse& prefix, const OutputWithLse& suffix,
                       Event* event = nullptr);

/// Work-items per group of concat_and_cache_mla() and merge_attn_states() on a device, for reports.
std::int32_t cache_op_work_group_size(const DeviceCapabilities& device);

/// Page lists on the device: request r's pages are indices[indptr[r]] … indices[indptr[r + 1] - 1].
struct PagedKVLists {
  Buffer indices = {};        ///< i32, at least as many as indptr's last element says
  Buffer indptr = {};         ///< i32 [num_reqs + 1]
  std::int32_t num_reqs = 0;  ///< requests that the lists have
};

/// Stores token i's key and value at position positions[i] of request batch_indices[i], both i32 on
/// the device, in the pages that the lists name; they must include the new tokens (FlashInfer:
/// append_paged_kv_cache). A negative batch index stores nothing, nor does a position outside the
/// lists or the cache. Converts and divides as reshape_and_cache_flash. Asynchronous.
void append_paged_kv_cache(const Context& context, cl_command_queue queue, TensorRef key,
                           TensorRef value, DType dtype, const KVCache& cache,
                           const Buffer& batch_indices, const Buffer& positions,
                           std::int64_t num_tokens, const PagedKVLists& lists,
                           Event* event = nullptr);

/// The same for latent attention: stores ckv[i] [kv_lora_rank] followed by kpe[i] [rope_dim], as
/// concat_and_cache_mla does (FlashInfer: append_paged_mla_kv_cache, whose two caches are one
/// here).
void append_paged_mla_kv_cache(const Context& context, cl_command_queue queue, TensorRef ckv,
                               TensorRef kpe, DType dtype, const MLACache& cache,
                               const Buffer& batch_indices, const Buffer& positions,
                               std::int64_t num_tokens, const PagedKVLists& lists,
                               Event* event = nullptr);

/// Errors that kernels found in metadata on the device: they skip the row and note the lowest one
/// here.
class DeviceErrors {
 public:
  /// Allocates and clears the word; asynchronous on `queue`.
  DeviceErrors(const Context& context, cl_command_queue queue);
  /// Waits for the queue and throws kInvalidArgument for the lowest row that was found wrong since
  /// the last call, naming row and reason.
  void check(cl_command_queue queue);
  /// i32 [1], 0 = nothing was found; for kernels of the library alone.
  const Buffer& word() const noexcept { return word_; }

 private:
  Buffer word_;
};

/// Where the device keeps the lengths of a step's requests, and the slots of its new tokens.
struct DeviceLengths {
  /// i32 [num_reqs], tokens in the cache including this step's; of a step with graph_batch_size as
  /// many as its (padded) batch size.
  Buffer seq_lens = {};
  /// i64 [num_actual_tokens], slots outside the cache store nothing. Empty = those of the positions
  /// seq_len - query_len + i.
  Buffer slot_mapping = {};
};

/// Gives a step of a builder with BuilderOptions::device_seq_lens its lengths, without the host.
/// One launch, in the order of the queue, rewrites the metadata's work items and slots for every
/// later write_kv_cache() and forward() with it; what the host reads of the metadata stays that of
/// the bounds. As often as wanted after one build(); before the first, the bounds count as lengths.
/// While a graph is recorded, the launch is recorded, too.
///
/// Results have the bits of a step that was built with these lengths if its splits are the same:
/// always with SplitPolicy::kDeterministic, num_splits or fast_build; with other plans if lengths
/// equal their bounds and either that step is recorded or its decode kernel is not persistent.
/// Otherwise a request has at most as many splits as its bound.
///
/// A length below the request's query tokens or above its bound is noted in `errors`; the request's
/// outputs are 0, its LSE -inf (with a sink, the sink) and its slots kPadSlotId. Requests without
/// query tokens are not looked at. Asynchronous. Throws kInvalidArgument for other metadata, for a
/// buffer that is too small or lies in that metadata, and for out-of-order queues.
void update_seq_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                     const DeviceLengths& lengths, DeviceErrors& errors, Event* event = nullptr);

/// Where the device keeps how a step's rows are shared out, and its lengths.
struct DeviceQueryLengths {
  /// i32 [num_reqs + 1]: the first row of each request and one past the last one's, from 0 on,
  /// ascending. Of a step with graph_batch_size as many as its (padded) batch size plus one; those
  /// behind the batch's requests repeat the last row (vLLM: query_start_loc).
  Buffer query_start_loc = {};
  Buffer seq_lens = {};      ///< i32 [num_reqs]: DeviceLengths::seq_lens
  Buffer slot_mapping = {};  ///< i64 [num_actual_tokens]: DeviceLengths::slot_mapping; those of
                             ///< rows behind the last request are not looked at
};

/// Gives a step of a builder with BuilderOptions::device_query_lens its query lengths and lengths,
/// without the host: update_seq_lens() with other rows. A decode may have 0 … decode_threshold
/// query tokens, no more than its bound, if decodes that follow each other stay within the rows
/// that the batch gave them together; prefills keep the batch's rows. Rows behind the last request
/// are padding: their slots are kPadSlotId, and nothing is written to their outputs and LSEs.
/// Before the first call the batch's query_start_loc counts, and its bounds as lengths.
///
/// A request whose rows or length are illegal is noted in `errors`; nothing is written for it, and
/// its slots are kPadSlotId. Results have the bits of a step that was built with these lengths as
/// update_seq_lens() says, if that one runs the same kernel (chosen here for decode_threshold
/// query tokens) and its splits are the same; kDeterministic splits decodes only where
/// decode_threshold is 1. Throws what update_seq_lens() throws, which in turn refuses this
/// metadata, as does advance_step.
void update_query_lens(cl_command_queue queue, const AttentionMetadata& metadata,
                       const DeviceQueryLengths& lengths, DeviceErrors& errors,
                       Event* event = nullptr);

/// Where the device keeps lists of a step's requests; each is given if and only if the builder has
/// the option for it.
struct DeviceLists {
  /// With device_directions: u8 [num_reqs], the number of a Direction: 0 both ways, 1 causal, 2 a
  /// canvas (vLLM: `causal` of each request, as bytes). Of a step with graph_batch_size as many as
  /// its (padded) batch size.
  Buffer direction = {};
  /// With device_trees: i32 [num_reqs], nodes of each request's tree: its query tokens … what
  /// tree_start_loc allows, or 0 = none. Padded as `direction`.
  Buffer tree_sizes = {};
  /// With device_trees: u32 [num_actual_tokens, tree_bits_stride], for each query token that is a
  /// node of a tree the nodes that it sees, its ancestors and itself: bit n % 32, lowest first, of
  /// word n / 32 is node n. Query token i of a request with q of them and a tree of T nodes is node
  /// T - q + i. Other rows and later words are not looked at. (TensorRT-LLM:
  /// spec_decoding_packed_mask.) Along a path each node adds one position, so that depths, which
  /// windows, chunks and ALiBi count, follow from the bits.
  Buffer tree_bits = {};
  std::int64_t tree_bits_stride = 0;  ///< words from row to row; at least those of the batch's
                                      ///< largest tree_start_loc, which are 8 in recorded steps
};

/// Gives a step of a builder with BuilderOptions::device_directions or device_trees its lists,
/// without the host: one launch, in the order of the queue, lists anew what the step's rows see,
/// for every later forward() with it. As often as wanted after one build(), and before or after
/// update_seq_lens(); after update_query_lens() directions stay those of the requests. Before the
/// first call all requests have the direction that the batch's `causal` says, and drafts are a
/// chain. While a graph is recorded, the launch is recorded, too.
///
/// A direction or a size that is illegal is noted in `errors`; the request's outputs are 0, its LSE
/// -inf (with a sink, the sink), and its keys are stored. A row whose bits lack its own node, or
/// hold a later one, is noted, too: it sees what they say of earlier nodes, and itself.
/// Asynchronous. Throws kInvalidArgument for other metadata, for a buffer that is missing, not
/// wanted, too small or lies in that metadata, and for out-of-order queues.
void update_lists(cl_command_queue queue, const AttentionMetadata& metadata,
                  const DeviceLists& lists, DeviceErrors& errors, Event* event = nullptr);

/// A decode batch whose metadata lives on the device, one query token per row. Rows from
/// num_queries on are padding.
struct AdvanceStep {
  std::int32_t num_seqs = 0;            ///< rows, padding included
  std::int32_t num_queries = 0;         ///< 0 … num_seqs
  std::int32_t block_size = 16;         ///< tokens per block
  std::int64_t num_blocks = 0;          ///< of the cache
  Buffer input_tokens = {};             ///< i64 [num_seqs]
  Buffer sampled_token_ids = {};        ///< i64 [num_queries]
  Buffer input_positions = {};          ///< i64 [num_seqs]
  Buffer seq_lens = {};                 ///< i32 [num_seqs]
  Buffer slot_mapping = {};             ///< i64 [num_seqs]
  Buffer block_tables = {};             ///< i32 [num_seqs, block_table_stride]
  std::int64_t block_table_stride = 0;  ///< elements from row to row
  /// Of the next step: one launch more updates it as update_seq_lens() with seq_lens and
  /// slot_mapping does, and the step runs on it as it is. Its requests are the rows: the first
  /// num_queries have one query token, the others none. A row that is wrong or padding stores
  /// nothing and attends to nothing: its output is 0, its LSE -inf (or the sink's logit).
  /// Null = none.
  const AttentionMetadata* metadata = nullptr;
};

/// The page lists of that batch.
struct AdvanceStepPages {
  Buffer paged_kv_indices = {};        ///< i32
  Buffer paged_kv_indptr = {};         ///< i32 [num_seqs + 1]
  Buffer paged_kv_last_page_len = {};  ///< i32 [num_seqs]
  Buffer block_table_bound = {};       ///< i32 [num_seqs]
};

/// Makes the sampled tokens the next step's input, without the host: per row the token, one more
/// seq_len, its position and slot; padding rows get token 0, position 0, slot -1 (vLLM:
/// advance_step_flashattn). A row whose token would lie past its table, or whose table names a
/// block outside the cache, becomes padding, keeps its seq_len and is noted in `errors`.
/// Asynchronous. Throws kInvalidArgument for out-of-order queues, and if a buffer that is written
/// overlaps another one.
void advance_step_flashattn(const Context& context, cl_command_queue queue, const AdvanceStep& step,
                            DeviceErrors& errors, Event* event = nullptr);
/// The same, and the page lists with it: indptr, indices, last page lengths, and the pages of each
/// row as block_table_bound (vLLM: advance_step_flashinfer). A row that was found wrong has none.
/// The first row whose pages do not fit paged_kv_indices, and every row after it that has pages,
/// counts as wrong. Rows without pages keep their last page length, and padding rows their bound.
void advance_step_flashinfer(const Context& context, cl_command_queue queue,
                             const AdvanceStep& step, const AdvanceStepPages& pages,
                             DeviceErrors& errors, Event* event = nullptr);

}  // namespace clattn
