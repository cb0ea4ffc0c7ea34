#ifndef CLATTN_CLATTN_H
#define CLATTN_CLATTN_H

/* CLAttn's C API, in C99: devices, contexts, queues and buffers, attention layers, their paged KV
   caches, and steps. clattn_session.h adds sessions, clattn_graph.h recorded steps and cascades.
   docs/howto.md has a program. What a call computes, and which values are legal, is described at
   the C++ function of nearly the same name (clattn/layer.hpp, clattn/attention.hpp,
   clattn/kv_cache.hpp).

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

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300
#endif
#include <CL/cl.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define CLATTN_C_API __attribute__((visibility("default")))
#else
#define CLATTN_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** This header's version, raised by incompatible changes; clattn_abi_version() is the library's. */
#define CLATTN_ABI_VERSION 1u
/** CLATTN_ABI_VERSION of the library. */
CLATTN_C_API uint32_t clattn_abi_version(void);
/** "0.1.0"; never freed. */
CLATTN_C_API const char* clattn_version(void);

/** How a call ended. */
typedef enum ClattnResult {
  CLATTN_SUCCESS = 0,
  CLATTN_ERROR_INVALID_ARGUMENT = 1, /**< the text names field, value and what is legal */
  CLATTN_ERROR_UNSUPPORTED = 2,      /**< legal, but not here: the text lists the reasons */
  CLATTN_ERROR_OPENCL = 3,           /**< the driver refused: clattn_last_cl_error() */
  CLATTN_ERROR_IO = 4,               /**< the text names the file */
  CLATTN_ERROR_OUT_OF_BLOCKS = 5,    /**< too few blocks of a KV cache are free */
  CLATTN_ERROR_OUT_OF_MEMORY = 100,  /**< the host's */
  CLATTN_ERROR_INTERNAL = 101        /**< a defect of the library or of a backend */
} ClattnResult;

/** "CLATTN_ERROR_UNSUPPORTED"; never freed. */
CLATTN_C_API const char* clattn_result_name(ClattnResult status);
/** Why this thread's last failed call failed; valid until its next one fails. */
CLATTN_C_API const char* clattn_last_error(void);
/** The OpenCL status behind it, CL_SUCCESS unless it was CLATTN_ERROR_OPENCL. */
CLATTN_C_API cl_int clattn_last_cl_error(void);

/** Levels: 0 off, 1 info, 2 debug, 3 trace (clattn/log.hpp). Called by the thread that has
   something to say, one message at a time, without a newline at its end; must not call the library.
 */
typedef void (*ClattnLogSink)(void* user, int32_t level, const char* message);
/** Sends messages up to `level` to `sink`, or to standard error if it is NULL. */
CLATTN_C_API ClattnResult clattn_set_log(int32_t level, ClattnLogSink sink, void* user);

/* --- Devices and contexts ------------------------------------------------------------------- */

/** A device as the driver lists it. */
typedef struct ClattnDeviceId {
  uint32_t struct_size;
  int32_t platform_index;  /**< "platform_index:device_index" is its selector */
  int32_t device_index;    /**< position among the platform's devices */
  cl_platform_id platform; /**< the handles belong to the driver */
  cl_device_id device;     /**< as platform */
} ClattnDeviceId;

/** How many devices all platforms have; may be 0. */
CLATTN_C_API ClattnResult clattn_device_count(size_t* count);
/** `index` in [0, count), in the drivers' order. */
CLATTN_C_API ClattnResult clattn_device_at(size_t index, ClattnDeviceId* device);

/** Everything slow and shared about one cl_context and device; keep it for as long as possible. */
typedef struct ClattnContext ClattnContext;

/** On the device of a selector: "gpu", "cpu", "P:D" or part of a name; NULL = the best one. */
CLATTN_C_API ClattnResult clattn_context_create(const char* selector, ClattnContext** context);
/** `device` must belong to `handle`. */
CLATTN_C_API ClattnResult clattn_context_adopt(cl_context handle, cl_device_id device,
                                               ClattnContext** context);
CLATTN_C_API void clattn_context_destroy(ClattnContext* context);

/** What the driver says about the device of a context. */
typedef struct ClattnContextInfo {
  uint32_t struct_size;
  int32_t compute_units; /**< CL_DEVICE_MAX_COMPUTE_UNITS */
  cl_context
      context; /**< not retained for the caller; like all fields, valid while the context lives */
  cl_device_id device;        /**< the driver's handle */
  const char* name;           /**< CL_DEVICE_NAME */
  const char* vendor;         /**< CL_DEVICE_VENDOR */
  const char* driver_version; /**< CL_DRIVER_VERSION */
  const char* kind;           /**< "gpu", "cpu" or "other" */
  uint64_t global_mem_bytes;  /**< of all buffers together */
  uint64_t max_alloc_bytes;   /**< of one buffer */
} ClattnContextInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_context_info(const ClattnContext* context,
                                              ClattnContextInfo* info);

/* --- Queues, buffers, events ---------------------------------------------------------------- */

/** An in-order command queue. */
typedef struct ClattnQueue ClattnQueue;

/** `profiling` other than 0: events have durations. */
CLATTN_C_API ClattnResult clattn_queue_create(const ClattnContext* context, int32_t profiling,
                                              ClattnQueue** queue);
/** Takes a queue of the application, which must be in order. */
CLATTN_C_API ClattnResult clattn_queue_adopt(cl_command_queue handle, ClattnQueue** queue);
CLATTN_C_API void clattn_queue_destroy(ClattnQueue* queue);
/** The OpenCL queue; the reference stays this one's. */
CLATTN_C_API ClattnResult clattn_queue_handle(const ClattnQueue* queue, cl_command_queue* handle);
/** Hands what was enqueued to the device, without waiting. */
CLATTN_C_API ClattnResult clattn_queue_flush(const ClattnQueue* queue);
/** Blocks until everything that was enqueued has run. */
CLATTN_C_API ClattnResult clattn_queue_finish(const ClattnQueue* queue);

/** A buffer of device memory. */
typedef struct ClattnBuffer ClattnBuffer;

/** Uninitialised device memory. */
CLATTN_C_API ClattnResult clattn_buffer_create(const ClattnContext* context, size_t size_bytes,
                                               ClattnBuffer** buffer);
/** Takes memory of the application. */
CLATTN_C_API ClattnResult clattn_buffer_adopt(cl_mem handle, ClattnBuffer** buffer);
CLATTN_C_API void clattn_buffer_destroy(ClattnBuffer* buffer);
/** The OpenCL memory; the reference stays the buffer's. */
CLATTN_C_API ClattnResult clattn_buffer_handle(const ClattnBuffer* buffer, cl_mem* handle);
/** Its size in bytes. */
CLATTN_C_API ClattnResult clattn_buffer_size(const ClattnBuffer* buffer, size_t* size_bytes);
/** Copies from the host into the buffer's range; blocks. */
CLATTN_C_API ClattnResult clattn_buffer_write(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                              size_t offset_bytes, const void* source,
                                              size_t size_bytes);
/** As clattn_buffer_write(), from the device. */
CLATTN_C_API ClattnResult clattn_buffer_read(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                             size_t offset_bytes, void* destination,
                                             size_t size_bytes);

/** Empty until a call that was given it has enqueued something. */
typedef struct ClattnEvent ClattnEvent;

/** An empty event. */
CLATTN_C_API ClattnResult clattn_event_create(ClattnEvent** event);
CLATTN_C_API void clattn_event_destroy(ClattnEvent* event);
/** NULL while empty; the reference stays the event's. */
CLATTN_C_API ClattnResult clattn_event_handle(const ClattnEvent* event, cl_event* handle);
/** Blocks; returns at once while empty. */
CLATTN_C_API ClattnResult clattn_event_wait(const ClattnEvent* event);
/** Device time of the last command, of queues with profiling. */
CLATTN_C_API ClattnResult clattn_event_duration_ns(const ClattnEvent* event, uint64_t* duration_ns);

/* --- Layers --------------------------------------------------------------------------------- */

/** The layers of one model by name: needed where a layer attends to another one's cache. */
typedef struct ClattnModel ClattnModel;

/** A model without layers. */
CLATTN_C_API ClattnResult clattn_model_create(ClattnModel** model);
CLATTN_C_API void clattn_model_destroy(ClattnModel* model);

/** clattn::AttentionOptions. */
typedef struct ClattnLayerConfig {
  uint32_t struct_size;
  int32_t num_heads;                        /**< query heads */
  int32_t num_kv_heads;                     /**< 0 = num_heads, with use_mla 1 */
  int32_t head_size;                        /**< elements; use_mla: latent and rotary part */
  int32_t block_size;                       /**< tokens per page of the cache; 0 = 16 */
  const char* name;                         /**< unique in its model */
  const char* dtype;                        /**< of query, key, value and output; NULL = "f16" */
  const char* kv_cache_dtype;               /**< NULL = "auto" = dtype */
  const char* attn_type;                    /**< NULL = "decoder" */
  const char* backend;                      /**< NULL = the first one that fits */
  const char* kernel_family;                /**< NULL = "auto" */
  const char* kv_sharing_target_layer_name; /**< attend to that layer's cache; NULL = its own */
  const float* alibi_slopes;                /**< [num_heads] or NULL */
  const float* sinks;                       /**< [num_heads] or NULL */
  float scale;                              /**< 0 = 1 / sqrt(head_size) */
  float logits_soft_cap;                    /**< 0 = none */
  int32_t sliding_window;                   /**< keys seen, the own one included; 0 = all */
  int32_t attention_chunk_size;             /**< 0 = none */
  int32_t use_mla;                          /**< other than 0: latent attention */
  int32_t rope_dim;                         /**< use_mla: the rotary part of head_size; 0 = 64 */
  int32_t custom_mask;                      /**< other than 0: every call brings a mask */
  int32_t output_fp8;                       /**< other than 0: every call also writes fp8 */
  int32_t calculate_kv_scales;              /**< take scales from the first batch */
  int16_t head_size_v;                      /**< of V where it is smaller; 0 = head_size */
  int16_t fp8_products;                     /**< other than 0: AttentionConfig::fp8_products */
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

/** A zeroed cache of `num_blocks` pages for layers like this one; blocks. `layout`: "NHD", "HND",
   "HDN" (CPUs); NULL = what the backend prefers on the device. */
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
  int64_t strides[5];       /**< of that shape; where keys lie by dim, of V alone */
  int64_t k_offset;         /**< elements before the first K */
  int64_t v_offset;         /**< elements before the first V */
  int64_t block_stride;     /**< elements from page to page */
  int64_t token_stride;     /**< elements from token to token */
  int64_t head_stride;      /**< elements from head to head */
  int64_t key_dim_stride;   /**< 1, or where keys lie by dim elements from dim to dim */
} ClattnCacheInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_cache_info(const ClattnCache* cache, ClattnCacheInfo* info);
/** For an 8-bit cache: f32 [2][1 or num_kv_heads], the factors of K, then those of V; `per_head`
   other than 0: num_kv_heads of each. Call it before the cache is bound. NULL removes them. A cache
   that is bound without any has the scales of its layer, which clattn_reshape_and_cache() and
   clattn_copy_blocks() use, too. */
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

/** What reshape_and_cache_flash() takes. */
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
 */
CLATTN_C_API ClattnResult clattn_reshape_and_cache(const ClattnContext* context,
                                                   const ClattnQueue* queue,
                                                   const ClattnCache* cache,
                                                   const ClattnCacheWrite* write);
/** Copies blocks pairs[2 i] to pairs[2 i + 1] inside each of the caches, which are alike. */
CLATTN_C_API ClattnResult clattn_copy_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                             const ClattnCache* const* caches, size_t num_caches,
                                             const int64_t* pairs, size_t num_pairs);

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
  int32_t side_by_side; /**< 0 or 1: two launches run beside each other where the plan predicts that
                           they end earlier (BuilderOptions::side_by_side); -1: always in turn */
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
  int64_t num_rows; /**< of the output, padding included, which is zeroed; 0 = num_actual_tokens */
  ClattnEvent* event; /**< completes with the last kernel, or NULL */
} ClattnTensors;
/** Stores the step's keys and values in the layer's cache, then attends (Attention::forward). */
CLATTN_C_API ClattnResult clattn_layer_forward(ClattnLayer* layer, const ClattnQueue* queue,
                                               const ClattnTensors* tensors,
                                               const ClattnStep* step);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
