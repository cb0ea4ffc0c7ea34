#ifndef CLATTN_CLATTN_CASCADE_H
#define CLATTN_CLATTN_CASCADE_H

/* Cascades in C: keys that requests share are read once for all of them. What a call does in full
   is described at the C++ classes (clattn/cascade.hpp); clattn/clattn.h says what holds for all
   handles, structs and errors. Cascades are for one thread at a time, and what they run goes in
   order to one queue; cascade layers may be used by several threads at once. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** Plans of batches whose requests begin with the same tokens in the same pages: those are read
   once for all requests (clattn::CascadeAttention). */
typedef struct ClattnCascade ClattnCascade;
/** A layer's kernels for cascades (clattn::CascadeImpl). */
typedef struct ClattnCascadeLayer ClattnCascadeLayer;

/** One cascade serves all layers of the same configuration; `options` may be NULL. Layers with
   windows, chunks, ALiBi or masks are refused: CLATTN_ERROR_UNSUPPORTED. */
CLATTN_C_API ClattnResult clattn_cascade_create(const ClattnLayer* layer,
                                                const ClattnStepOptions* options,
                                                ClattnCascade** cascade);
CLATTN_C_API void clattn_cascade_destroy(ClattnCascade* cascade);
/** The kernels by which a cascade runs `layer`, which is refused as in clattn_cascade_create(). */
CLATTN_C_API ClattnResult clattn_cascade_layer_create(const ClattnLayer* layer,
                                                      ClattnCascadeLayer** cascade_layer);
CLATTN_C_API void clattn_cascade_layer_destroy(ClattnCascadeLayer* cascade_layer);
/** Plans a step. The batch's common_prefix_len is a multiple of block_size, at least one page.
   `step` becomes the cascade's, valid until its next build: what clattn_layer_store() takes. */
CLATTN_C_API ClattnResult clattn_cascade_build(ClattnCascade* cascade, const ClattnQueue* queue,
                                               const ClattnBatchInfo* batch,
                                               const ClattnStep** step);
/** Stores the step's `key` and `value` in the layer's cache, as the first half of
   clattn_layer_forward() does: nothing if kv_sharing_target_layer_name is set. Scales have to be
   loaded before. */
CLATTN_C_API ClattnResult clattn_layer_store(const ClattnLayer* layer, const ClattnQueue* queue,
                                             const ClattnTensors* tensors, const ClattnStep* step);
/** Attends to the cache of the layer that `cascade_layer` was made from, over the step that was
   last built. Reads query, output, lse and event of `tensors`; keys and values have been stored. */
CLATTN_C_API ClattnResult clattn_cascade_forward(const ClattnCascade* cascade,
                                                 const ClattnQueue* queue,
                                                 const ClattnCascadeLayer* cascade_layer,
                                                 const ClattnTensors* tensors);

/** One level of the keys: its sequence s holds the query tokens qo_indptr[s] ... qo_indptr[s + 1] -
   1 and the pages paged_kv_indices[paged_kv_indptr[s]] ... [paged_kv_indptr[s + 1] - 1]. The arrays
   are host memory, read before the call returns (clattn::CascadeLevel). */
typedef struct ClattnCascadeLevel {
  const int32_t* qo_indptr;              /**< [num_seqs + 1], ends at the step's tokens */
  const int32_t* paged_kv_indptr;        /**< [num_seqs + 1] */
  const int32_t* paged_kv_indices;       /**< [paged_kv_indptr[num_seqs]] */
  const int32_t* paged_kv_last_page_len; /**< [num_seqs], 1 ... block_size; 0 without pages */
  int32_t num_seqs;                      /**< sequences of the level */
  int32_t causal; /**< other than 0: queries are the newest tokens; the last level alone */
} ClattnCascadeLevel;

/** Plans of keys that requests share in any number of levels
   (clattn::MultiLevelCascadeAttentionWrapper). */
typedef struct ClattnLevelCascade ClattnLevelCascade;
/** For layers of this configuration; refused as in clattn_cascade_create(). The limits of `options`
   bound every level: max_num_reqs its sequences, max_model_len their keys. */
CLATTN_C_API ClattnResult clattn_level_cascade_create(const ClattnLayer* layer, int32_t num_levels,
                                                      const ClattnStepOptions* options,
                                                      ClattnLevelCascade** cascade);
CLATTN_C_API void clattn_level_cascade_destroy(ClattnLevelCascade* cascade);
/** Plans a step and uploads it; `num_levels` as it was made with. */
CLATTN_C_API ClattnResult clattn_level_cascade_plan(ClattnLevelCascade* cascade,
                                                    const ClattnQueue* queue,
                                                    const ClattnCascadeLevel* levels,
                                                    size_t num_levels);
/** As clattn_cascade_forward(), over the levels that were last planned. */
CLATTN_C_API ClattnResult clattn_level_cascade_run(const ClattnLevelCascade* cascade,
                                                   const ClattnQueue* queue,
                                                   const ClattnCascadeLayer* cascade_layer,
                                                   const ClattnTensors* tensors);

/** What the choice between one pass and a cascade depends on (clattn::CascadeQuery). */
typedef struct ClattnCascadeQuery {
  uint32_t struct_size;
  int32_t common_prefix_len;   /**< tokens that all requests share at their start */
  const int32_t* query_lens;   /**< [num_reqs] */
  size_t num_reqs;             /**< elements of query_lens */
  int32_t num_query_heads;     /**< a multiple of num_kv_heads */
  int32_t num_kv_heads;        /**< key/value heads */
  int32_t use_alibi;           /**< other than 0: layers have ALiBi slopes */
  int32_t use_sliding_window;  /**< other than 0: layers have a window */
  int32_t use_local_attention; /**< other than 0: layers are chunked-local */
  int32_t num_sms;             /**< compute units of the device, >= 1 */
} ClattnCascadeQuery;
/** vLLM's heuristic: `use` becomes 1 where a cascade is faster, else 0. Host arithmetic. */
CLATTN_C_API ClattnResult clattn_use_cascade_attention(const ClattnCascadeQuery* query,
                                                       int32_t* use);
/** The same for the layers of a step, 0 where they cannot cascade or its options say
   disable_cascade_attn. */
CLATTN_C_API ClattnResult clattn_step_use_cascade(const ClattnStep* step,
                                                  const ClattnCascadeQuery* query, int32_t* use);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
