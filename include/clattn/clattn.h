#ifndef CLATTN_CLATTN_H
#define CLATTN_CLATTN_H

/* CLAttn's C API, in C99: devices, contexts, queues and buffers, attention layers, their paged KV
   caches, and steps. It includes the other headers of the C API: clattn_layers.h and
   clattn_kv_cache.h (more about layers, specs and groups of caches), clattn_ops.h (operations on
   caches), clattn_metadata.h (host arithmetic, the pool of blocks), clattn_device.h (devices,
   more about buffers), clattn_graph.h (recorded steps), clattn_cascade.h, clattn_session.h,
   clattn_tuning.h (tuning, backends, reports). docs/howto.md has a program, docs/bindings.md a list
   of all calls. What a call computes, and which values are legal, is described at the C++ function
   of nearly the same name (clattn/layer.hpp, clattn/attention.hpp, clattn/kv_cache.hpp).

   Every function that can fail returns a ClattnResult. Where it is not CLATTN_SUCCESS, nothing was
   made or enqueued, and clattn_last_error() has the reason: field, value and what is legal. No C++
   exception leaves a function.

   Handles are opaque. A _create or _adopt function makes one, and its _destroy function ends it;
   NULL may be destroyed. Handles keep alive what they were made from, so the order does not matter.
   An adopted OpenCL object is retained; the application may release its own reference.

   Structs begin with struct_size, their size in bytes when the application was compiled: later
   versions may add fields at the end. A field that is 0 or NULL has its default, so

     ClattnLayerConfig config = {.struct_size = sizeof config};

   is a whole initialiser. Fields named reserved must be 0. Element types, layouts and the like are
   named by text, as in vLLM; a text of NULL stands for the default.

   Offsets and strides of tensors count elements, *_bytes bytes. Where an array has no elements, its
   pointer may be NULL. Calls that take a queue return after enqueueing unless they say that they
   block; queues are in order.

   Thread safety: contexts and buffers may be used by several threads at once, and so may a layer
   whose cache is bound by clattn_layer_forward(), with outputs, queues and steps of each thread's
   own. Everything else is for one thread at a time per handle; making and destroying layers for one
   at a time per model. */

#include <clattn/attention_config.h>
#include <clattn/clattn_context.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/* --- Layers --------------------------------------------------------------------------------- */

/** The layers of one model by name: needed where a layer attends to another one's cache. */
typedef struct ClattnModel ClattnModel;

/** A model without layers. */
CLATTN_C_API ClattnResult clattn_model_create(ClattnModel** model);
CLATTN_C_API void clattn_model_destroy(ClattnModel* model);

/** clattn::AttentionOptions. The layer's own fields are followed by those of its configuration, the
   rows of attention_config.inc (docs/configuration.md is a table of them): numbers and flags as
   int64_t or double, types and other names as texts, lists as `const float*`. 0 and NULL are a
   field's default; CLATTN_ZERO is the number 0 where the default is another one. */
typedef struct ClattnLayerConfig {
  uint32_t struct_size;
  int32_t calculate_kv_scales;              /**< take scales from the first batch */
  const char* name;                         /**< unique in its model */
  const char* backend;                      /**< NULL or "auto" = the first one that fits */
  const char* kv_sharing_target_layer_name; /**< attend to that layer's cache; NULL = its own */
#define CLATTN_FIELD(kind, name, ...) CLATTN_C_##kind name;
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD
} ClattnLayerConfig;

/** An attention layer (clattn::Attention). */
typedef struct ClattnLayer ClattnLayer;

/** Chooses a backend and compiles its kernels. `model` may be NULL: a model of this layer alone. */
CLATTN_C_API ClattnResult clattn_layer_create(const ClattnContext* context, ClattnModel* model,
                                              const ClattnLayerConfig* config, ClattnLayer** layer);
/** Takes the layer out of its model: layers of one model are destroyed by one thread at a time. */
CLATTN_C_API void clattn_layer_destroy(ClattnLayer* layer);
/** The layer's backend and its kernels, and why the others were not chosen: lines of text. Copies
   at most `capacity` bytes to `text`, the last one 0; `size`, unless NULL, receives the length
   of the whole text, its last 0 included. `text` may be NULL if `capacity` is 0. */
CLATTN_C_API ClattnResult clattn_layer_explain(const ClattnLayer* layer, char* text,
                                               size_t capacity, size_t* size);

/** Per-tensor scales of a checkpoint, real = stored * scale; 0 or less = it has none. */
typedef struct ClattnKVScales {
  uint32_t struct_size;
  float k_scale;    /**< of K */
  float v_scale;    /**< of V */
  float q_scale;    /**< of Q */
  float prob_scale; /**< of the probabilities; no kernel reads it */
  int32_t fnuz;     /**< other than 0: LoadedKVScales::fnuz, which doubles what was loaded */
} ClattnKVScales;
/** Sets the scales of the layer's own cache (Attention::load_kv_scales). */
CLATTN_C_API ClattnResult clattn_layer_load_kv_scales(ClattnLayer* layer,
                                                      const ClattnKVScales* scales);

/** Called between layers, from the calling thread: `done` of `total` are warm. */
typedef void (*ClattnProgress)(void* user, size_t done, size_t total);
/** Launches every kernel of the layers once over no token, so that the first step waits for no
   compiler. After their caches are bound; blocks. `progress` may be NULL. */
CLATTN_C_API ClattnResult clattn_warm_up(ClattnLayer* const* layers, size_t num_layers,
                                         const ClattnQueue* queue, ClattnProgress progress,
                                         void* user);

/* --- KV caches ------------------------------------------------------------------------------ */

/** The paged KV cache of one layer. */
typedef struct ClattnCache ClattnCache;

/** A zeroed cache of `num_blocks` pages for layers like this one; blocks. `layout`: "NHD", "HND";
   NULL = default_kv_cache_layout(). */
CLATTN_C_API ClattnResult clattn_cache_create(const ClattnLayer* layer, const ClattnQueue* queue,
                                              int64_t num_blocks, const char* layout,
                                              ClattnCache** cache);
/** The same in memory of the application, as it is: whole pages, see page_size_bytes. */
CLATTN_C_API ClattnResult clattn_cache_adopt(const ClattnLayer* layer, const ClattnBuffer* buffer,
                                             const char* layout, ClattnCache** cache);
CLATTN_C_API void clattn_cache_destroy(ClattnCache* cache);

/** clattn::KVCache. */
typedef struct ClattnCacheInfo {
  uint32_t struct_size;
  int32_t block_size;       /**< tokens per page */
  int64_t num_blocks;       /**< pages */
  int32_t num_kv_heads;     /**< key/value heads */
  int32_t head_size;        /**< elements */
  const char* dtype;        /**< never freed */
  cl_mem buffer;            /**< the reference stays the cache's */
  uint64_t page_size_bytes; /**< of one page of the cache */
  int64_t shape[5];         /**< the backend's logical shape */
  int64_t strides[5];       /**< of that shape */
  int64_t k_offset;         /**< elements before the first K */
  int64_t v_offset;         /**< elements before the first V */
  int64_t block_stride;     /**< elements from page to page */
  int64_t token_stride;     /**< elements from token to token */
  int64_t head_stride;      /**< elements from head to head */
  int32_t head_size_v;      /**< elements of V */
  int32_t reserved;
} ClattnCacheInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_cache_info(const ClattnCache* cache, ClattnCacheInfo* info);
/** For an 8-bit cache (others refuse them): f32 [2][1 or num_kv_heads], the factors of K, then
   those of V; `per_head` other than 0: num_kv_heads of each. Call it before the cache is bound.
   NULL removes them. A cache that is bound without any has the scales of its layer, which
   clattn_reshape_and_cache() and clattn_copy_blocks() use, too. */
CLATTN_C_API ClattnResult clattn_cache_set_scales(ClattnCache* cache, const ClattnBuffer* scales,
                                                  int32_t per_head);
/** The same for scales with one more factor after V's: f32 [2][1 or num_kv_heads], then [1].
   Queries are divided by that one before they are rounded to 8 bits
   (ClattnLayerConfig.fp8_products); nothing else reads it. clattn_layer_forward() refuses a buffer
   that is too small. The cache keeps the buffer alive. */
CLATTN_C_API ClattnResult clattn_cache_set_scales_with_query(ClattnCache* cache,
                                                             const ClattnBuffer* scales,
                                                             int32_t per_head);
/** Binds the cache to a layer, which keeps its memory alive. Several layers of a model have one
   each, or share one by kv_sharing_target_layer_name. */
CLATTN_C_API ClattnResult clattn_layer_bind_cache(ClattnLayer* layer, ClattnCache* cache);

/** [tokens, heads, head_size] on the device, heads and dims contiguous; no buffer = absent. */
typedef struct ClattnTensorRef {
  const ClattnBuffer* buffer; /**< NULL = absent */
  int64_t offset;             /**< elements before token 0 */
  int64_t token_stride;       /**< elements from token to token; 0 = contiguous */
} ClattnTensorRef;

/* --- Steps ---------------------------------------------------------------------------------- */

/** clattn::BuilderOptions: limits and planning of all steps that one handle is built for. */
typedef struct ClattnStepOptions {
  uint32_t struct_size;
  int32_t max_num_reqs;           /**< 0 = 256 */
  int32_t max_num_batched_tokens; /**< 0 = 8192 */
  int32_t max_model_len;          /**< 0 = 131072 */
  int64_t num_blocks;       /**< of the cache: block ids are checked against it; 0 = unknown */
  int32_t decode_threshold; /**< most query tokens of a decode; 0 = 1 */
  int32_t num_splits;       /**< 0 = planned */
  int32_t deterministic;    /**< other than 0: a request's bits do not depend on its batch */
  int32_t side_by_side; /**< 0 or 1: two launches run at the same time where the plan predicts that
                           they end earlier (BuilderOptions::side_by_side); -1: always in turn */
  int32_t device_seq_lens;      /**< other than 0: a batch's seq_lens are upper bounds of lengths
                                   that clattn_update_seq_lens() takes from the device */
  int32_t disable_cascade_attn; /**< other than 0: clattn_step_use_cascade() always says no */
  const struct ClattnWorkspace* workspace; /**< clattn_workspace_create(); NULL = its own */
  int32_t device_query_lens; /**< other than 0: clattn_update_query_lens() also takes the query
                                lengths of decodes from the device, up to decode_threshold each;
                                only with device_seq_lens */
  int32_t graph_mixed;       /**< other than 0, for clattn_graph_state_create(): sizes of recorded
                                steps count query tokens, of any requests (BuilderOptions) */
  int32_t device_directions; /**< other than 0: clattn_update_lists() takes the directions of
                                requests from the device; ClattnBatchInfo.direction is NULL */
  int32_t device_trees;      /**< other than 0: it takes trees of drafts from the device;
                                ClattnBatchInfo.tree_start_loc says how many nodes they have at
                                most, and tree_parents is NULL */
} ClattnStepOptions;

/** The metadata of the last batch that it was built for; for one queue. */
typedef struct ClattnStep ClattnStep;

/** Serves the layers that are like this one and share its block table. `options` may be NULL. */
CLATTN_C_API ClattnResult clattn_step_create(const ClattnLayer* layer,
                                             const ClattnStepOptions* options, ClattnStep** step);
CLATTN_C_API void clattn_step_destroy(ClattnStep* step);

/** clattn::CommonAttentionMetadata. The arrays are host memory, read before the call returns. */
typedef struct ClattnBatchInfo {
  uint32_t struct_size;
  int32_t num_reqs;               /**< requests */
  const int32_t* query_start_loc; /**< [num_reqs + 1], prefix sums of the query lengths */
  const int32_t* seq_lens;        /**< [num_reqs], tokens in the cache including this step's */
  const int32_t* block_table;     /**< [num_reqs, block_table_stride] */
  int64_t block_table_stride;     /**< columns of a row */
  const int64_t* slot_mapping;    /**< [num_slots]; NULL = computed from the block table */
  int64_t num_slots;              /**< elements of slot_mapping */
  const int32_t* key_start_loc; /**< [num_reqs + 1], encoder types alone; NULL = query_start_loc */
  int32_t causal;               /**< 1 = yes, -1 = no, 0 = as attn_type says */
  int32_t common_prefix_len;    /**< tokens in pages that all requests share; 0 = none known */
  const int32_t* num_computed_tokens; /**< [num_reqs]; NULL = seq_lens minus query lengths */
  int32_t fast_build; /**< other than 0: BuildOptions::fast_build; clattn_step_build() alone */
  int32_t num_actual_tokens; /**< rows of the query, padding included; 0 = the requests' tokens */
  /** [num_reqs], of layers with use_directions: 0 = both ways, 1 = causal, 2 = a canvas
     (clattn::Direction); `causal` is 0 then. NULL = all as `causal` says. */
  const uint8_t* direction;
  /** [num_reqs + 1], prefix sums: the rows of `spans` that are a request's. NULL = no spans. */
  const int32_t* span_start_loc;
  /** [span_start_loc[num_reqs], 2], of layers with use_spans: first position, one past the last */
  const int32_t* spans;
  const int32_t* first_keys; /**< [num_reqs], of layers with use_first_keys; NULL = 0 for all */
  /** [num_reqs + 1], prefix sums: the elements of tree_parents that are a request's. NULL = no
     trees */
  const int32_t* tree_start_loc;
  /** [tree_start_loc[num_reqs]], of layers with use_trees: of each node of a tree of drafts the
     number of an earlier one, from 0 in its tree; -1 = a root */
  const int32_t* tree_parents;
  /** [num_reqs], of layers with use_keep_keys: how many first keys neither the left side of the
     window nor chunks hide; NULL = 0 for all */
  const int32_t* keep_keys;
} ClattnBatchInfo;
/** Checks the batch, plans its work and uploads both. Work enqueued before stays correct. A call
   with an illegal handle or struct leaves the step its former batch. A batch that is refused by
   what its arrays hold, and a failure of the driver, leave it none. */
CLATTN_C_API ClattnResult clattn_step_build(ClattnStep* step, const ClattnQueue* queue,
                                            const ClattnBatchInfo* batch);

/** Of the last batch. */
typedef struct ClattnStepInfo {
  uint32_t struct_size;
  int32_t num_actual_tokens;  /**< query tokens */
  int32_t num_decodes;        /**< requests */
  int32_t num_prefills;       /**< requests */
  int32_t num_decode_tokens;  /**< query tokens */
  int32_t num_prefill_tokens; /**< query tokens */
  int32_t max_query_len;      /**< of any request */
  int32_t max_seq_len;        /**< of any request, in tokens */
} ClattnStepInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_step_info(const ClattnStep* step, ClattnStepInfo* info);

/** The tensors of one layer's call; elements of V and of results: head_size_v where it is set. */
typedef struct ClattnTensors {
  uint32_t struct_size;
  ClattnTensorRef query;            /**< [rows, num_heads, head_size] */
  ClattnTensorRef key;              /**< without key and value nothing is stored */
  ClattnTensorRef value;            /**< as key */
  ClattnTensorRef output;           /**< [rows, num_heads, head_size] */
  const ClattnBuffer* lse;          /**< f32 [num_actual_tokens, num_heads], or NULL: not wanted */
  const ClattnBuffer* custom_mask;  /**< u8 [num_actual_tokens, custom_mask_stride] */
  int64_t custom_mask_stride;       /**< bytes from token to token */
  const ClattnBuffer* output_fp8;   /**< u8 [rows, num_heads, head_size] */
  const ClattnBuffer* output_scale; /**< f32 [1] */
  /** Of the output, padding included, which is zeroed; 0 = num_actual_tokens, legal with a step. */
  int64_t num_rows;
  ClattnEvent* event;               /**< completes with the last kernel, or NULL */
  int32_t no_kv_scales_calculation; /**< other than 0: the first batch's scales are not taken yet */
  int32_t reserved;
} ClattnTensors;
/** Stores the step's keys and values in the layer's cache, then attends (Attention::forward). A
   profiling run, before there are caches: a NULL step zeroes num_rows rows of the output, and of a
   layer without a cache the tokens of a step attend to the call's own keys. */
CLATTN_C_API ClattnResult clattn_layer_forward(ClattnLayer* layer, const ClattnQueue* queue,
                                               const ClattnTensors* tensors,
                                               const ClattnStep* step);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#include <clattn/clattn_cascade.h>
#include <clattn/clattn_device.h>
#include <clattn/clattn_functions.h>
#include <clattn/clattn_graph.h>
#include <clattn/clattn_kv_cache.h>
#include <clattn/clattn_layers.h>
#include <clattn/clattn_metadata.h>
#include <clattn/clattn_ops.h>
#include <clattn/clattn_recurrent.h>
#include <clattn/clattn_session.h>
#include <clattn/clattn_tuning.h>

#endif
