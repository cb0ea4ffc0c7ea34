#ifndef CLATTN_CLATTN_KV_CACHE_H
#define CLATTN_CLATTN_KV_CACHE_H

/* Specs and groups of KV caches in C: what an engine needs whose model has layers of several kinds
   (clattn/kv_cache.hpp, clattn/attn_utils.hpp). clattn/clattn.h says what holds for all handles,
   structs and errors. Groups are for one thread at a time. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** The layout of caches that are made without one: "NHD", "HND", or NULL for the backend's
   preference. Never freed. Thread-safe, as clattn_set_kv_cache_layout(). */
CLATTN_C_API ClattnResult clattn_get_kv_cache_layout(const char** layout);
/** Overrides CLATTN_KV_CACHE_LAYOUT from now on; NULL removes the override. */
CLATTN_C_API ClattnResult clattn_set_kv_cache_layout(const char* layout);

/** One tensor of a constant state. */
typedef struct ClattnStateTensor {
  const char* dtype;    /**< of its elements; NULL = "f32" */
  const int64_t* shape; /**< [num_dims], of one request */
  size_t num_dims;      /**< elements of shape */
} ClattnStateTensor;

/** clattn::KVCacheSpec. */
typedef struct ClattnKVCacheSpec {
  uint32_t struct_size;
  int32_t block_size;   /**< tokens per block; 0 = 16 */
  const char* kind;     /**< "full" (also NULL), "sliding_window", "chunked_local", "encoder_only",
                           "cross" or "mamba": a constant state; "full_attention" and the
                           like, too */
  const char* dtype;    /**< as stored; NULL = "f16" */
  int32_t num_kv_heads; /**< 0 = 1 */
  int32_t head_size;    /**< elements; 0 = 128 */
  int32_t head_size_v;  /**< of V where it differs; 0 = head_size */
  int32_t sliding_window;          /**< tokens, the current one included; 0 = none */
  int32_t attention_chunk_size;    /**< tokens; 0 = none */
  int32_t use_mla;                 /**< other than 0: one latent vector serves as K and V */
  int32_t per_token_head_scales;   /**< other than 0: KVQuantMode::kPerTokenHead */
  int32_t num_speculative_blocks;  /**< of "mamba": pages for states after drafts */
  uint64_t page_size_padded;       /**< bytes that a page takes; 0 = its own */
  const ClattnStateTensor* states; /**< [num_states], of "mamba" */
  size_t num_states;               /**< elements of states */
  const char* mamba_cache_mode;    /**< of "mamba": "none" (also NULL), "align" or "all" */
} ClattnKVCacheSpec;

/** Bytes of a page. */
CLATTN_C_API ClattnResult clattn_kv_cache_spec_page_size_bytes(const ClattnKVCacheSpec* spec,
                                                               uint64_t* size_bytes);
/** Most bytes that one request of up to `max_model_len` tokens holds. */
CLATTN_C_API ClattnResult clattn_kv_cache_spec_max_memory_usage_bytes(
    const ClattnKVCacheSpec* spec, int64_t max_model_len, int64_t max_num_batched_tokens,
    int64_t encoder_len, uint64_t* size_bytes);
/** The spec of layers that share a block table. States of `merged` are those of specs[0]. */
CLATTN_C_API ClattnResult clattn_kv_cache_spec_merge(const ClattnKVCacheSpec* const* specs,
                                                     size_t num_specs, ClattnKVCacheSpec* merged);
/** Makes all pages equally large by changing block_size and page_size_padded of the specs. */
CLATTN_C_API ClattnResult clattn_unify_kv_cache_spec_page_size(ClattnKVCacheSpec* const* specs,
                                                               size_t num_specs);
/** What the layer keeps in its cache. CLATTN_ERROR_INVALID_ARGUMENT: it is no decoder, or has no
   cache of its own. Texts of `spec` are never freed. */
CLATTN_C_API ClattnResult clattn_layer_kv_cache_spec(const ClattnLayer* layer,
                                                     ClattnKVCacheSpec* spec);
/** clattn_cache_adopt() for pages of another spec than the layer's own: padded ones, or blocks of
   more tokens. `layout` as there. */
CLATTN_C_API ClattnResult clattn_cache_view(const ClattnLayer* layer, const ClattnBuffer* buffer,
                                            const ClattnKVCacheSpec* spec, const char* layout,
                                            ClattnCache** cache);

/** Where a buffer holds keys and values. Element (block, token, head, dim) of K lies at k_offset +
   block * block_stride + token * token_stride + head * head_stride + dim, that of V as far from
   v_offset; clattn::KVCache has the limits. */
typedef struct ClattnCacheStrides {
  uint32_t struct_size;
  int32_t reserved;
  int64_t num_blocks;   /**< pages of the layer's block_size */
  int64_t k_offset;     /**< elements before the first K */
  int64_t v_offset;     /**< elements before the first V */
  int64_t block_stride; /**< elements from page to page */
  int64_t token_stride; /**< elements from token to token */
  int64_t head_stride;  /**< elements from head to head */
} ClattnCacheStrides;
/** clattn_cache_adopt() for keys and values that lie anywhere in a buffer, such as two tensors of
   another library. Not for layers with use_mla. Calls that use the cache refuse one that does not
   lie in its buffer, or where their kernels cannot read it. */
CLATTN_C_API ClattnResult clattn_cache_adopt_strided(const ClattnLayer* layer,
                                                     const ClattnBuffer* buffer,
                                                     const ClattnCacheStrides* strides,
                                                     ClattnCache** cache);

/** A state tensor in a buffer's pages: that of page b lies at element offset + b * block_stride. */
typedef struct ClattnStateView {
  uint32_t struct_size;
  int32_t reserved;
  cl_mem buffer;        /**< not retained for the caller */
  int64_t num_blocks;   /**< pages */
  int64_t offset;       /**< elements before page 0's */
  int64_t block_stride; /**< elements from page to page */
} ClattnStateView;
/** State `index` of a buffer of "mamba" pages. */
CLATTN_C_API ClattnResult clattn_view_state_pages(const ClattnBuffer* buffer,
                                                  const ClattnKVCacheSpec* spec, size_t index,
                                                  ClattnStateView* view);

/** One zeroed buffer that several layers use, page by page. */
typedef struct ClattnCacheTensor {
  uint64_t size_bytes;          /**< whole pages */
  const char* const* shared_by; /**< [num_shared_by], names of layers */
  size_t num_shared_by;         /**< elements of shared_by */
} ClattnCacheTensor;
/** Layers that share one block table. */
typedef struct ClattnCacheGroup {
  const char* const* layer_names; /**< [num_layers] */
  size_t num_layers;              /**< elements of layer_names */
  const ClattnKVCacheSpec* spec;  /**< of each of them */
  /** [num_layers], or NULL: the specs of layers whose pages hold the same tokens in other bytes
     (clattn::KVCacheGroupSpec); NULL elements stand for `spec` */
  const ClattnKVCacheSpec* const* layer_specs;
} ClattnCacheGroup;
/** The caches of a model (clattn::KVCacheConfig). */
typedef struct ClattnKVCacheConfig {
  uint32_t struct_size;
  int32_t reserved;
  int64_t num_blocks;               /**< pages of every tensor; 0 = what its bytes hold */
  const ClattnCacheTensor* tensors; /**< [num_tensors]; each layer is in one */
  size_t num_tensors;               /**< elements of tensors */
  const ClattnCacheGroup* groups;   /**< [num_groups] */
  size_t num_groups;                /**< elements of groups */
} ClattnKVCacheConfig;

/** The KV cache groups of a model's layers, with one plan for each and step. */
typedef struct ClattnGroups ClattnGroups;
/** Groups over the layers of `model`; `options`, which all share, may be NULL. Destroy the groups
   before layers. clattn::init_attn_backend(). */
CLATTN_C_API ClattnResult clattn_groups_create(const ClattnContext* context,
                                               const ClattnModel* model,
                                               const ClattnKVCacheConfig* config,
                                               const ClattnStepOptions* options,
                                               ClattnGroups** groups);
CLATTN_C_API void clattn_groups_destroy(ClattnGroups* groups);
/** Allocates the caches and binds them to the layers; blocks until they are zeroed. `layout` as in
   clattn_cache_create(), but NULL = clattn_get_kv_cache_layout(), else "NHD". */
CLATTN_C_API ClattnResult clattn_groups_init_kv_cache(ClattnGroups* groups,
                                                      const ClattnQueue* queue, const char* layout);
/** State `index` of a layer of a "mamba" group, after clattn_groups_init_kv_cache(). */
CLATTN_C_API ClattnResult clattn_groups_state(const ClattnGroups* groups, const char* layer_name,
                                              size_t index, ClattnStateView* view);
/** A KV cache group's part of a step: pages and slots of its own. */
typedef struct ClattnGroupPages {
  const int32_t* block_table;  /**< [num_reqs, block_table_stride] */
  int64_t block_table_stride;  /**< columns of a row */
  const int64_t* slot_mapping; /**< [num_slots]; NULL = computed from the block table */
  int64_t num_slots;           /**< elements of slot_mapping */
} ClattnGroupPages;
/** Plans a step for every group. Pages and slots of `batch` are not read: `pages` has those of each
   group, in their order (of "mamba" groups not read). */
CLATTN_C_API ClattnResult clattn_groups_build(ClattnGroups* groups, const ClattnQueue* queue,
                                              const ClattnBatchInfo* batch,
                                              const ClattnGroupPages* pages, size_t num_pages);
/** The step of a layer, the groups', valid until the next clattn_groups_build(). */
CLATTN_C_API ClattnResult clattn_groups_step(const ClattnGroups* groups, const char* layer_name,
                                             const ClattnStep** step);

/** What clattn_step_build() would make of the batch of `planned` with these pages of `num_reqs`
   requests, for a further KV cache group: the plan is taken over. `planned` was created for an
   equal configuration and equal options, and has not been built since; both keep their batches
   (AttentionMetadataBuilder::update_block_table). */
CLATTN_C_API ClattnResult clattn_step_update_block_table(ClattnStep* step, const ClattnQueue* queue,
                                                         const ClattnStep* planned,
                                                         int32_t num_reqs,
                                                         const ClattnGroupPages* pages);
#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
