#ifndef CLATTN_CLATTN_FUNCTIONS_H
#define CLATTN_CLATTN_FUNCTIONS_H

/* Attention by one call, without layers and steps (clattn/attention_functions.hpp); clattn/clattn.h
   says what holds for all handles, structs and errors. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** clattn::AttentionArguments. Tensors and masks are on the device, arrays of integers on the host,
   read before the call returns. Sequence s has the tokens query_start_loc[s] …
   query_start_loc[s + 1] - 1, the last of which has the position of its sequence's last key. */
typedef struct ClattnAttentionCall {
  uint32_t struct_size;
  int32_t num_seqs;               /**< sequences */
  ClattnTensorRef query;          /**< [tokens, num_heads, head_size] */
  ClattnTensorRef key;            /**< [keys, num_kv_heads, head_size]; paged: of the tokens */
  ClattnTensorRef value;          /**< as key, with head_size_v elements a head where it is set */
  ClattnTensorRef output;         /**< as query, with head_size_v elements a head likewise */
  const int32_t* query_start_loc; /**< [num_seqs + 1], starts with 0 */
  /** Where each sequence's keys start, [num_seqs + 1]; NULL = query_start_loc. Not paged. */
  const int32_t* key_start_loc;
  const int32_t* seq_lens; /**< paged: [num_seqs], tokens in the cache, this call's included */
  /** Paged: ids of pages, rows of num_pages / num_seqs, or lists with page_start_loc. */
  const int32_t* block_table;
  int64_t num_pages;             /**< elements of block_table */
  const int32_t* page_start_loc; /**< [num_seqs + 1]: where each list starts; NULL = rows */
  int32_t not_causal;            /**< other than 0: tokens also see keys after their position */
  int32_t lse_base_2;            /**< other than 0: log2 instead of the natural log */
  const ClattnBuffer* lse;       /**< f32, log of the softmax denominator; NULL = not wanted */
  int64_t lse_offset;            /**< elements before token 0, head 0 */
  int64_t lse_token_stride;      /**< elements; both strides 0 = [tokens, heads] */
  int64_t lse_head_stride;       /**< elements; [heads, tokens]: the number of tokens */
  const ClattnBuffer* mask;      /**< u8 [tokens, mask_stride]: 1 = may attend; NULL = none */
  int64_t mask_stride;           /**< bytes from token to token */
  int32_t mask_bits;             /**< other than 0: eight keys a byte, the lowest bit first */
  int32_t reserved;
  const ClattnBuffer* output_fp8;   /**< u8, as output: e4m3 of output / output_scale, or NULL */
  const ClattnBuffer* output_scale; /**< f32 [1], with output_fp8 */
  ClattnEvent* event;               /**< completes with the last kernel, or NULL */
  /** [num_seqs]: 0 = both ways, 1 = causal, 2 = a canvas, instead of not_causal; NULL = as that */
  const uint8_t* direction;
  const int32_t* span_start_loc; /**< [num_seqs + 1], prefix sums; NULL = no spans */
  /** [span_start_loc[num_seqs], 2]: first position, one past the last */
  const int32_t* spans;
  const int32_t* first_keys;     /**< [num_seqs]: the first position that holds a key; NULL = 0 */
  const int32_t* tree_start_loc; /**< [num_seqs + 1], prefix sums; NULL = no trees */
  /** [tree_start_loc[num_seqs]]: of each node of a tree of drafts the number of an earlier one,
     from 0 in its tree; -1 = a root */
  const int32_t* tree_parents;
  /** [num_seqs]: how many first keys neither the left side of the window nor chunks hide; NULL =
     0 */
  const int32_t* keep_keys;
} ClattnAttentionCall;

/** clattn::attention(): attention over contiguous keys and values. `config` describes
   the attention; its fields name, backend, kv_sharing_target_layer_name and calculate_kv_scales
   belong to layers and must be unset. A list that the call brings (direction, spans, first_keys,
   tree_parents, keep_keys) sets its use_directions, use_spans, use_first_keys, use_trees or
   use_keep_keys. Asynchronous, thread-safe. */
CLATTN_C_API ClattnResult clattn_attention(const ClattnQueue* queue,
                                           const ClattnLayerConfig* config,
                                           const ClattnAttentionCall* call);
/** clattn::paged_attention(): the same over the pages of a cache, which determines block_size,
   num_kv_heads and kv_cache_dtype. `key` and `value`, if given, are stored first. */
CLATTN_C_API ClattnResult clattn_paged_attention(const ClattnQueue* queue, const ClattnCache* cache,
                                                 const ClattnLayerConfig* config,
                                                 const ClattnAttentionCall* call);
/** Frees the kernels and memory that the two functions keep. */
CLATTN_C_API ClattnResult clattn_clear_attention_functions(void);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
