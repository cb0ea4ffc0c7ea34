#ifndef CLATTN_CLATTN_LAYERS_H
#define CLATTN_CLATTN_LAYERS_H

/* More about layers and their steps in C; clattn/clattn.h has what every program needs, and says
   what holds for all handles, structs and errors (clattn/layer.hpp, clattn/attention.hpp). */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** The integer between the dots of a layer's name: 3 of "model.layers.3.self_attn.attn". */
CLATTN_C_API ClattnResult clattn_extract_layer_index(const char* layer_name, int32_t* index);
/** The cache that is bound to the layer, its target's if it shares one: a handle to be destroyed.
   CLATTN_ERROR_INVALID_ARGUMENT: none is bound. */
CLATTN_C_API ClattnResult clattn_layer_cache(const ClattnLayer* layer, ClattnCache** cache);
/** CLATTN_ERROR_INVALID_ARGUMENT or _UNSUPPORTED where clattn_layer_bind_cache() would fail. */
CLATTN_C_API ClattnResult clattn_layer_check_cache(const ClattnLayer* layer,
                                                   const ClattnCache* cache);
/** f32 [3] on the device, of K, V and Q: a handle to be destroyed; NULL where the cache is not
   quantised. `prob_scale` becomes that of the probabilities. */
CLATTN_C_API ClattnResult clattn_layer_scales(const ClattnLayer* layer, ClattnBuffer** scales,
                                              float* prob_scale);
/** Takes the layer's scales from these tensors, of which `num_tokens` rows are read, of key and
   value `num_keys` (0 = num_tokens): Attention::calc_kv_scales(). Once; asynchronous.
   clattn_layer_forward() does it by itself for the first batch. Does nothing for layers without
   calculate_kv_scales and caches that came with scales. Reads query, key and value of `tensors`. */
CLATTN_C_API ClattnResult clattn_layer_calc_kv_scales(ClattnLayer* layer, const ClattnQueue* queue,
                                                      const ClattnTensors* tensors,
                                                      int64_t num_tokens, int64_t num_keys);

/** Device memory for counters and partial results, shared by steps, states and cascades whose work
   runs in order on one queue (ClattnStepOptions.workspace): memory for the largest of them instead
   of the sum (clattn::AttentionWorkspace). */
typedef struct ClattnWorkspace ClattnWorkspace;
/** An empty workspace; steps take the memory they need. */
CLATTN_C_API ClattnResult clattn_workspace_create(ClattnWorkspace** workspace);
CLATTN_C_API void clattn_workspace_destroy(ClattnWorkspace* workspace);

/** The bytes of partial results that clattn_step_build() would use for the batch. */
CLATTN_C_API ClattnResult clattn_step_workspace_bytes(const ClattnStep* step,
                                                      const ClattnBatchInfo* batch,
                                                      uint64_t* size_bytes);
/** From the next build on, partial results go to `workspace`. */
CLATTN_C_API ClattnResult clattn_step_set_workspace(ClattnStep* step,
                                                    const ClattnWorkspace* workspace);
/** Launches the kernel of clattn_update_seq_lens() once without work, of a step with
   device_seq_lens; blocks. clattn_warm_up() is for layers. */
CLATTN_C_API ClattnResult clattn_step_warm_up(ClattnStep* step, const ClattnQueue* queue);
/** The slots of the step's last batch: the device's buffer, i64 from `offset_bytes` on, as a handle
   to be destroyed, valid until the next build. NULL: the batch has none. */
CLATTN_C_API ClattnResult clattn_step_slot_mapping(const ClattnStep* step, ClattnBuffer** slots,
                                                   size_t* offset_bytes);
/** The launches of the step's plan, each with its predicted time: lines of text, as in
   clattn_layer_explain(); empty for third-party backends. */
CLATTN_C_API ClattnResult clattn_step_planned_launches(const ClattnStep* step, char* text,
                                                       size_t capacity, size_t* size);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
