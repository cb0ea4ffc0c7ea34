#ifndef CLATTN_CLATTN_OPS_H
#define CLATTN_CLATTN_OPS_H

/* Operations on KV caches and attention results in C. What a call does in full is described at the
   C++ function of nearly the same name (clattn/cache_ops.hpp, clattn/mla.hpp); clattn/clattn.h says
   what holds for all handles, structs and errors. All are asynchronous; what they read on the host
   is read before the call returns. Their events, unless NULL, complete with the operation. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** What clattn_reshape_and_cache() stores. */
typedef struct ClattnCacheWrite {
  uint32_t struct_size;
  const char* dtype;                /**< of key and value; NULL = "f16" */
  ClattnTensorRef key;              /**< [num_tokens, num_kv_heads, head_size] */
  ClattnTensorRef value;            /**< as key */
  const ClattnBuffer* slot_mapping; /**< i64 [num_tokens]: block * block_size + offset; -1 = none */
  size_t slot_offset_bytes;         /**< bytes before the first slot */
  int64_t num_tokens;               /**< rows that are stored */
  ClattnEvent* event;               /**< completes with the write, or NULL */
} ClattnCacheWrite;
/** Stores keys and values at the slots, without a step; clattn_layer_forward() does it by itself.
   Of a layer with use_mla, `key` holds the latents, [num_tokens, kv_lora_rank], and `value` the
   rotary parts, [num_tokens, rope_dim] (concat_and_cache_mla). */
CLATTN_C_API ClattnResult clattn_reshape_and_cache(const ClattnContext* context,
                                                   const ClattnQueue* queue,
                                                   const ClattnCache* cache,
                                                   const ClattnCacheWrite* write);

/** What clattn_append_paged_kv_cache() stores, and the page lists in which it finds the places. All
   buffers are on the device. */
typedef struct ClattnCacheAppend {
  uint32_t struct_size;
  int32_t num_reqs;                  /**< requests that the lists have */
  const char* dtype;                 /**< of key and value; NULL = "f16" */
  ClattnTensorRef key;               /**< as in ClattnCacheWrite, as value */
  ClattnTensorRef value;             /**< as key */
  const ClattnBuffer* batch_indices; /**< i32 [num_tokens]: the request; negative stores nothing */
  const ClattnBuffer* positions;     /**< i32 [num_tokens], in the request */
  const ClattnBuffer* indices;       /**< i32: request r has the pages indices[indptr[r]] ... */
  const ClattnBuffer* indptr;        /**< i32 [num_reqs + 1] */
  int64_t num_tokens;                /**< rows that are stored */
  ClattnEvent* event;                /**< completes with the write, or NULL */
} ClattnCacheAppend;
/** Stores tokens by request and position instead of by slot. */
CLATTN_C_API ClattnResult clattn_append_paged_kv_cache(const ClattnContext* context,
                                                       const ClattnQueue* queue,
                                                       const ClattnCache* cache,
                                                       const ClattnCacheAppend* append);

/** Copies blocks pairs[2 i] to pairs[2 i + 1] inside each of the caches, which are alike. */
CLATTN_C_API ClattnResult clattn_copy_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                             const ClattnCache* const* caches, size_t num_caches,
                                             const int64_t* pairs, size_t num_pairs,
                                             ClattnEvent* event);

/** Moves tokens inside each of the caches, which are alike (clattn::move_tokens): slot dst_slots[i]
   gets what slot src_slots[i] holds, the pairs starts[r] to starts[r + 1] - 1 of a request one
   after the other. Host memory: [starts[num_requests]] slots, [num_requests + 1] starts. */
CLATTN_C_API ClattnResult clattn_move_tokens(const ClattnContext* context, const ClattnQueue* queue,
                                             const ClattnCache* const* caches, size_t num_caches,
                                             const int64_t* src_slots, const int64_t* dst_slots,
                                             const int32_t* starts, size_t num_requests,
                                             ClattnEvent* event);
/** The same by buffers on the device, of i64 and i32 (clattn::DeviceTokenMoves). */
CLATTN_C_API ClattnResult clattn_move_tokens_by_device(
    const ClattnContext* context, const ClattnQueue* queue, const ClattnCache* const* caches,
    size_t num_caches, const ClattnBuffer* src_slots, const ClattnBuffer* dst_slots,
    const ClattnBuffer* starts, int32_t num_requests, ClattnEvent* event);

/** Where clattn_swap_blocks() takes blocks from or puts them: a cache, or memory of the host. */
typedef struct ClattnSwapSpace {
  uint32_t struct_size;
  int32_t reserved;
  const ClattnCache* cache; /**< NULL = host */
  void* host;               /**< whole blocks, [2][N] or [N][2] as the other side's cache orders K
                               and V, of latent rows [N]; NULL = cache */
  size_t host_bytes;        /**< of host */
} ClattnSwapSpace;
/** Copies blocks pairs[2 i] of `source` to pairs[2 i + 1] of `destination`, of which at most one is
   host memory. That must stay alive, and on the way to the device unchanged, until the event or a
   later synchronisation of the queue; clattn_pinned_memory_create() makes the fastest. */
CLATTN_C_API ClattnResult clattn_swap_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                             const ClattnSwapSpace* source,
                                             const ClattnSwapSpace* destination,
                                             const int64_t* pairs, size_t num_pairs,
                                             ClattnEvent* event);

/** Which tokens of a latent cache to gather, and where to. The arrays are host memory. */
typedef struct ClattnGather {
  uint32_t struct_size;
  int32_t num_reqs;            /**< requests */
  const char* dtype;           /**< of destination; NULL = "f16" */
  const int32_t* cu_seq_lens;  /**< [num_reqs + 1], prefix sums of the tokens */
  const int32_t* block_table;  /**< [num_reqs, block_table_stride] */
  int64_t block_table_stride;  /**< columns of a row */
  const int32_t* seq_starts;   /**< [num_reqs], multiples of block_size to pass over; NULL = 0 */
  ClattnTensorRef destination; /**< [cu_seq_lens[num_reqs], kv_lora_rank + rope_dim] */
  ClattnEvent* event;          /**< completes with the copy, or NULL */
} ClattnGather;
/** Copies requests' rows out of the cache of a layer with use_mla, times its scale. */
CLATTN_C_API ClattnResult clattn_gather_and_maybe_dequant_cache(const ClattnContext* context,
                                                                const ClattnQueue* queue,
                                                                const ClattnCache* cache,
                                                                const ClattnGather* gather);

/** Attention over a part of the keys: the result and its log-sum-exps. */
typedef struct ClattnAttnState {
  ClattnTensorRef output;   /**< [num_tokens, num_heads, head_size] */
  const ClattnBuffer* lse;  /**< f32, one for each token and head; NULL, merged alone: not wanted */
  int64_t lse_offset;       /**< elements before token 0, head 0 */
  int64_t lse_token_stride; /**< elements; 0, as lse_head_stride: [num_tokens, num_heads] */
  int64_t lse_head_stride;  /**< elements from head to head */
} ClattnAttnState;
/** What clattn_merge_attn_states() joins (clattn::MergeAttnStates). */
typedef struct ClattnMerge {
  uint32_t struct_size;
  int32_t num_heads;                /**< query heads */
  int32_t head_size;                /**< a multiple of 8 */
  int32_t lse_base2;                /**< other than 0: all LSEs are of base 2, else of base e */
  int64_t num_tokens;               /**< rows of each tensor */
  int64_t tokens_without_prefix;    /**< the last ones: their result is the suffix's */
  const char* dtype;                /**< of prefix and suffix; NULL = "f16" */
  const char* output_dtype;         /**< of merged: dtype (also NULL) or an 8-bit type */
  const ClattnBuffer* output_scale; /**< f32 [1], of 8-bit types; NULL = 1, int8 needs it */
  ClattnAttnState merged;           /**< may be one of the inputs itself */
  ClattnAttnState prefix;           /**< over the first part of the keys */
  ClattnAttnState suffix;           /**< over the others */
  ClattnEvent* event;               /**< completes with the merge, or NULL */
} ClattnMerge;
/** Joins attention over two parts of the keys into attention over both. */
CLATTN_C_API ClattnResult clattn_merge_attn_states(const ClattnContext* context,
                                                   const ClattnQueue* queue,
                                                   const ClattnMerge* merge);

/** Errors that kernels found in metadata on the device: they skip the row and note the lowest one
   here (clattn::DeviceErrors). */
typedef struct ClattnDeviceErrors ClattnDeviceErrors;
/** Allocates and clears the word; asynchronous. */
CLATTN_C_API ClattnResult clattn_device_errors_create(const ClattnContext* context,
                                                      const ClattnQueue* queue,
                                                      ClattnDeviceErrors** errors);
CLATTN_C_API void clattn_device_errors_destroy(ClattnDeviceErrors* errors);
/** Waits for the queue. CLATTN_ERROR_INVALID_ARGUMENT: a row was wrong since the last call; the
   text names the lowest one and the reason. */
CLATTN_C_API ClattnResult clattn_device_errors_check(ClattnDeviceErrors* errors,
                                                     const ClattnQueue* queue);

/** What clattn_prepare_qkv() does to the rows of a layer's projection (clattn::PrepareQKV). */
typedef struct ClattnPrepareQKV {
  uint32_t struct_size;
  int32_t num_heads;         /**< of queries; 0 = 1 */
  int32_t num_kv_heads;      /**< of keys and values; 0 = 1 */
  int32_t head_size;         /**< 8 to 512 in steps of 8; 0 = 128 */
  int64_t num_tokens;        /**< rows of each tensor */
  const char* dtype;         /**< of the tensors: f32, f16 or bf16; NULL = "bf16" */
  ClattnTensorRef query;     /**< [num_tokens, num_heads, head_size]; absent: keys alone */
  ClattnTensorRef key;       /**< [num_tokens, num_kv_heads, head_size]; absent: queries alone */
  ClattnTensorRef value;     /**< as key, with a cache */
  ClattnTensorRef query_out; /**< with query, which it may be */
  ClattnTensorRef key_out;   /**< may be key; absent: keys go to the cache alone */
  ClattnTensorRef gate_out;  /**< as query_out, of queries with gates; absent: they have none */

  int32_t norm;            /**< other than 0: RMSNorm of each head of queries and keys */
  int32_t norm_unrounded;  /**< other than 0: stays f32 until it has been rotated */
  int32_t weight_plus_one; /**< other than 0: weights are 1 + what the buffers hold */
  int32_t reserved;
  double eps;                   /**< of the norm, >= 0 */
  const ClattnBuffer* q_weight; /**< [head_size]; NULL = 1 */
  const ClattnBuffer* k_weight; /**< the same for keys */
  const char* weight_dtype;     /**< f32, f16 or bf16; NULL = dtype */

  /** [positions, rotary_dim]: cosines, then sines; NULL: nothing is rotated. */
  const ClattnBuffer* cos_sin_cache;
  const char* cos_sin_dtype;     /**< f32, f16 or bf16; NULL = "f32" */
  int32_t rotary_dim;            /**< rotated elements of a head; 0 = all */
  int32_t is_interleaved;        /**< other than 0: pairs are 2 i and 2 i + 1 (not NeoX's) */
  int32_t rotates_tail;          /**< other than 0: the last elements of a head are rotated */
  int32_t mrope_section[3];      /**< angles of time, height and width; 0: one position a token */
  int32_t mrope_interleaved;     /**< other than 0: they take turns */
  int32_t position_bits;         /**< of a position: 32 or 64; 0 = 64 */
  const ClattnBuffer* positions; /**< i64 or i32 [num_tokens], with mrope_section [3, num_tokens] */
  int64_t positions_offset;      /**< elements before the first */
  int64_t positions_stride;      /**< elements from row to row; 0 = num_tokens */
  ClattnDeviceErrors* errors;    /**< notes positions outside of cos_sin_cache; or NULL */

  const ClattnBuffer* slot_mapping; /**< i64: where a cache stores tokens; negative: nowhere */
  size_t slot_offset_bytes;         /**< bytes before the first slot */
  int64_t num_padding_tokens;       /**< the last tokens, so many, have no slot */
  ClattnEvent* event;               /**< completes with the operation, or NULL */
} ClattnPrepareQKV;
/** Norm, rotary embedding and write of queries, keys and values in one launch. `cache`: where keys
   and values are stored; NULL: nowhere. */
CLATTN_C_API ClattnResult clattn_prepare_qkv(const ClattnContext* context, const ClattnQueue* queue,
                                             const ClattnCache* cache,
                                             const ClattnPrepareQKV* call);

/** Gives a step with ClattnStepOptions.device_seq_lens its lengths: `seq_lens`, i32 [num_reqs], and
   its slots: `slot_mapping`, i64 [num_actual_tokens], NULL = those of the positions. */
CLATTN_C_API ClattnResult clattn_update_seq_lens(const ClattnQueue* queue, const ClattnStep* step,
                                                 const ClattnBuffer* seq_lens,
                                                 const ClattnBuffer* slot_mapping,
                                                 ClattnDeviceErrors* errors, ClattnEvent* event);

/** Gives a step with ClattnStepOptions.device_query_lens its rows: `query_start_loc`, i32 [num_reqs
   + 1], and its lengths: `seq_lens`, i32 [num_reqs]; `slot_mapping` as above
   (clattn::update_query_lens). */
CLATTN_C_API ClattnResult clattn_update_query_lens(const ClattnQueue* queue, const ClattnStep* step,
                                                   const ClattnBuffer* query_start_loc,
                                                   const ClattnBuffer* seq_lens,
                                                   const ClattnBuffer* slot_mapping,
                                                   ClattnDeviceErrors* errors, ClattnEvent* event);

/** clattn::DeviceLists; what the step has no option for is NULL. */
typedef struct ClattnDeviceLists {
  uint32_t struct_size;
  int32_t tree_bits_stride;       /**< words of a row of tree_bits */
  const ClattnBuffer* direction;  /**< u8 [num_reqs], with ClattnStepOptions.device_directions: 0 =
                                     both ways, 1 = causal, 2 = a canvas */
  const ClattnBuffer* tree_sizes; /**< i32 [num_reqs], with ClattnStepOptions.device_trees: nodes,
                                     0 = no tree */
  const ClattnBuffer* tree_bits;  /**< u32 [num_actual_tokens, tree_bits_stride], with it: the nodes
                                     that each node sees, lowest bit first */
} ClattnDeviceLists;
/** Gives a step with device_directions or device_trees its lists (clattn::update_lists). */
CLATTN_C_API ClattnResult clattn_update_lists(const ClattnQueue* queue, const ClattnStep* step,
                                              const ClattnDeviceLists* lists,
                                              ClattnDeviceErrors* errors, ClattnEvent* event);

/** A decode batch whose metadata lies on the device, one query token a row (clattn::AdvanceStep,
   AdvanceStepPages). */
typedef struct ClattnAdvanceStep {
  uint32_t struct_size;
  int32_t num_seqs;                      /**< rows, padding included */
  int32_t num_queries;                   /**< rows that are no padding, the first ones */
  int32_t block_size;                    /**< tokens per block; 0 = 16 */
  int64_t num_blocks;                    /**< of the cache */
  const ClattnBuffer* input_tokens;      /**< i64 [num_seqs] */
  const ClattnBuffer* sampled_token_ids; /**< i64 [num_queries] */
  const ClattnBuffer* input_positions;   /**< i64 [num_seqs] */
  const ClattnBuffer* seq_lens;          /**< i32 [num_seqs] */
  const ClattnBuffer* slot_mapping;      /**< i64 [num_seqs] */
  const ClattnBuffer* block_tables;      /**< i32 [num_seqs, block_table_stride] */
  int64_t block_table_stride;            /**< elements from row to row */
  const ClattnStep* step;                /**< of the next step, which gets its lengths; or NULL */
  const ClattnBuffer* paged_kv_indices;  /**< i32; these four all or none: the page lists */
  const ClattnBuffer* paged_kv_indptr;   /**< i32 [num_seqs + 1] */
  const ClattnBuffer* paged_kv_last_page_len; /**< i32 [num_seqs] */
  const ClattnBuffer* block_table_bound;      /**< i32 [num_seqs] */
} ClattnAdvanceStep;
/** Makes the sampled tokens the next step's input, without the host (advance_step_flashattn, with
   page lists advance_step_flashinfer). */
CLATTN_C_API ClattnResult clattn_advance_step(const ClattnContext* context,
                                              const ClattnQueue* queue,
                                              const ClattnAdvanceStep* advance,
                                              ClattnDeviceErrors* errors, ClattnEvent* event);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
