#pragma once

#include <clattn/opencl.hpp>

#include <clattn/attention_config.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <cstdint>
#include <span>

namespace CLATTN_API clattn {

/// Which keys the query tokens may attend to, within causality, window and chunk: bytes, 1 = the
/// token may attend to the key at that position of its sequence, or the same as bits, the lowest of
/// a byte first (NumPy: packbits with bitorder="little").
struct MaskRef {
  cl_mem buffer = nullptr;   ///< u8 [tokens, stride]; null = no mask
  std::int64_t stride = 0;   ///< bytes from token to token, enough for the longest sequence
  bool packed_bits = false;  ///< eight keys a byte
};

/// What attention() and paged_attention() read and write. Tensors and masks are on the device,
/// arrays of integers on the host, where they are read before the call returns. Sequences follow
/// one another: tokens query_start_loc[s] … query_start_loc[s + 1] - 1 are sequence s, and the last
/// of them has the position of its sequence's last key.
struct AttentionArguments {
  TensorRef query = {};   ///< [tokens, num_heads, head_size]
  TensorRef key = {};     ///< [keys, num_kv_heads, head_size]; paged: as many rows as the query
  TensorRef value = {};   ///< as key, with head_size_v elements a head where that is set
  TensorRef output = {};  ///< as query, with head_size_v elements a head where that is set
  std::span<const std::int32_t> query_start_loc = {};  ///< [sequences + 1], starts with 0
  /// attention() only: where each sequence's keys start, [sequences + 1]; empty =
  /// query_start_loc. The numbers of keys and of query tokens are independent of each other; a
  /// token that sees no key has output 0.
  std::span<const std::int32_t> key_start_loc = {};
  /// paged_attention() only: tokens of each sequence in the cache, this call's included.
  std::span<const std::int32_t> seq_lens = {};
  /// paged_attention() only: ids of each sequence's pages, [sequences, columns].
  std::span<const std::int32_t> block_table = {};
  /// If given, block_table is a list instead of rows: sequence s has the pages
  /// block_table[page_start_loc[s]] … block_table[page_start_loc[s + 1] - 1] (FlashInfer:
  /// paged_kv_indptr).
  std::span<const std::int32_t> page_start_loc = {};
  bool causal = true;  ///< a token sees no key after its own position
  /// Lists that say for each sequence which keys its tokens see, as CommonAttentionMetadata does
  /// for requests. A list that is given sets use_directions, use_spans, use_first_keys,
  /// use_keep_keys or use_trees of the configuration.
  ///@{
  std::span<const Direction> direction = {};          ///< [sequences], instead of causal
  std::span<const std::int32_t> span_start_loc = {};  ///< [sequences + 1], prefix sums
  std::span<const std::int32_t> spans = {};           ///< [number, 2]: positions [first, end)
  std::span<const std::int32_t> first_keys = {};      ///< [sequences]: positions
  std::span<const std::int32_t> keep_keys = {};       ///< [sequences]: how many
  std::span<const std::int32_t> tree_start_loc = {};  ///< [sequences + 1], prefix sums
  std::span<const std::int32_t> tree_parents = {};    ///< [nodes]: a node of the tree, -1 = a root
  ///@}
  /// f32, the log of the softmax denominator; no buffer = not wanted. With an offset, strides or
  /// base 2 it needs a buffer that holds nothing else of the call.
  LseRef lse = {};
  LseBase lse_base = LseBase::kE;  ///< of lse
  MaskRef mask = {};               ///< no buffer = none
  cl_mem output_fp8 = nullptr;     ///< u8, as output: fp8 e4m3 of output / output_scale[0], or null
  cl_mem output_scale = nullptr;   ///< f32 [1], with output_fp8
};

/// Attention of `call`'s queries over contiguous keys and values, on the queue's device:
///
///     attention(queue, {.query = {q}, .key = {k}, .value = {v}, .output = {o},
///                       .query_start_loc = starts},
///               {.num_heads = 32, .num_kv_heads = 8, .head_size = 128});
///
/// Every option of the configuration takes effect, except that block_size and attn_type are not
/// used, and that custom_mask and output_fp8 follow from `call`, as do fields that its lists set.
/// The first call on a device with a configuration compiles its kernels, or takes them from the
/// program cache; what later calls need is kept for the 64 combinations of queue, configuration and
/// number of pages used last, and clear_attention_functions() frees it. Engines that serve many
/// steps plan once for all layers instead (AttentionMetadataBuilder).
///
/// Asynchronous: `event` completes with the last kernel. Thread-safe; calls on one queue are
/// enqueued one after another. The queue must be in-order. Throws kInvalidArgument naming field,
/// value and legal range, and kUnsupported with the reasons against a configuration; a refused call
/// has written nothing.
void attention(cl_command_queue queue, const AttentionArguments& call,
               const AttentionConfig& config, Event* event = nullptr);

/// The same over the pages of `cache`, whose page size, element type, KV heads and layout replace
/// those of the configuration; a cache of latent rows needs use_mla. `key` and `value`, if given,
/// are stored first, at the last positions of their sequences.
void paged_attention(cl_command_queue queue, const AttentionArguments& call, const KVCache& cache,
                     const AttentionConfig& config, Event* event = nullptr);

/// Frees the contexts, kernels and memory that the two functions keep. Work under way still
/// completes. Thread-safe.
void clear_attention_functions();

}  // namespace clattn
