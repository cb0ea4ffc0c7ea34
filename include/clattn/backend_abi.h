#ifndef CLATTN_BACKEND_ABI_H
#define CLATTN_BACKEND_ABI_H

/* The contract between CLAttn and an attention backend in a shared object of its own, in C, so that
   compilers and library versions on both sides may differ. The shared object exports

     int clattn_backend_plugin_v3(const ClattnHostApi* host, ClattnBackendPlugin* plugin);

   which fills *plugin and returns 0, or sets plugin->refusal and returns another number. Loaded by
   clattn::load_backend_plugin() or the environment's CLATTN_PLUGINS.

   Units: tensors' offsets and strides count elements, *_bytes bytes. Pointers that a call is given
   are valid until it returns, those in ClattnBatch for as long as the batch (until the next one is
   built). Functions may be called by several threads at once; none may throw. A plugin in
   C++ has to be compiled with GCC's -fno-gnu-unique to be unloadable. */

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300
#endif
#include <CL/cl.h>
#include <clattn/attention_config.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Changes with every change of what follows; a plugin of another version is refused. */
#define CLATTN_BACKEND_ABI_VERSION 3u
/** The name of the exported function. */
#define CLATTN_BACKEND_PLUGIN_ENTRY "clattn_backend_plugin_v3"

/** Element types, as clattn::DType. */
enum ClattnDType {
  CLATTN_F32,
  CLATTN_F16,
  CLATTN_BF16,
  CLATTN_FP8_E4M3,
  CLATTN_FP8_E5M2,
  CLATTN_INT8
};
/** Orders of a page in memory: [token, head, dim] or [head, token, dim]. */
enum ClattnLayout { CLATTN_NHD, CLATTN_HND };
/** How a call ended, as clattn::ErrorCode. */
enum ClattnStatusCode { CLATTN_OK, CLATTN_INVALID_ARGUMENT, CLATTN_UNSUPPORTED, CLATTN_OPENCL };

/** What the library tells the plugin about itself. */
typedef struct ClattnHostApi {
  uint32_t abi_version;        /**< CLATTN_BACKEND_ABI_VERSION of the library */
  uint32_t struct_size;        /**< bytes of this struct */
  const char* library_version; /**< "0.1.0" */
} ClattnHostApi;

/** How a call ended. Zeroed before the call. */
typedef struct ClattnStatus {
  int32_t code;      /**< ClattnStatusCode */
  int32_t cl_code;   /**< OpenCL status behind CLATTN_OPENCL */
  char message[504]; /**< ends in 0 */
} ClattnStatus;

/** One layer's configuration, all defaults resolved: the rows of attention_config.inc. A plugin is
   asked only about decoders over K and V in pages. */
typedef struct ClattnAttentionConfig {
#define CLATTN_FIELD(kind, name, ...) CLATTN_C_##kind name;
#include <clattn/attention_config.inc>
#undef CLATTN_FIELD
} ClattnAttentionConfig;

/** Kinds of devices, as clattn::DeviceKind. */
enum ClattnDeviceKind { CLATTN_GPU, CLATTN_CPU, CLATTN_OTHER };

/** A device as the driver reports it. */
typedef struct ClattnDevice {
  uint32_t struct_size;         /**< bytes of this struct */
  int32_t kind;                 /**< ClattnDeviceKind */
  int32_t compute_units;        /**< CL_DEVICE_MAX_COMPUTE_UNITS */
  const char* name;             /**< CL_DEVICE_NAME */
  const char* vendor;           /**< CL_DEVICE_VENDOR */
  const char* driver_version;   /**< CL_DRIVER_VERSION */
  uint64_t max_work_group_size; /**< work-items */
  uint64_t global_mem_bytes;    /**< of all buffers together */
  uint64_t max_alloc_bytes;     /**< of one buffer */
  uint64_t local_mem_bytes;     /**< of a work-group */
} ClattnDevice;

/** [tokens, heads, head_size], heads and dims contiguous. */
typedef struct ClattnTensor {
  cl_mem buffer;        /**< not retained */
  int64_t offset;       /**< elements before token 0 */
  int64_t token_stride; /**< elements from token to token */
} ClattnTensor;

/** One layer's cache: element (block, token, head, dim) of K lies at k_offset + block *
   block_stride
   + token * token_stride + head * head_stride + dim of the buffer, V's at v_offset + the same. */
typedef struct ClattnKVCache {
  cl_mem buffer;           /**< not retained */
  int32_t dtype;           /**< ClattnDType */
  int32_t block_size;      /**< tokens per page */
  int32_t num_kv_heads;    /**< heads of a token */
  int32_t head_size;       /**< elements */
  int64_t num_blocks;      /**< pages */
  int64_t k_offset;        /**< elements before the first K */
  int64_t v_offset;        /**< elements before the first V */
  int64_t block_stride;    /**< elements from page to page */
  int64_t token_stride;    /**< elements from token to token */
  int64_t head_stride;     /**< elements from head to head */
  cl_mem scales;           /**< f32 [2][1 or num_kv_heads]: K, then V; NULL = 1 */
  int32_t scales_per_head; /**< other than 0: num_kv_heads scales for K and as many for V */
} ClattnKVCache;

/** Which keys a query sees: key j if kept_begin <= j < kept_end, and if begin <= j < end and either
   j < tree_begin or bit (j - tree_begin) % 32 of word (j - tree_begin) / 32 of the query's row of
   tree_bits is 1. Direction, window, chunk, spans, first and kept keys of the layer and its batch
   have been counted in. */
typedef struct ClattnSeenKeys {
  int32_t position;   /**< of the query, along its path if its request has a tree; ALiBi counts from
                         here. A key from tree_begin on stands as many positions before it as bits
                         between theirs, the query's own included, are 1 */
  int32_t kept_begin; /**< key of the request */
  int32_t kept_end;   /**< one past the last, at most seq_len; kept_begin = none are kept */
  int32_t begin;      /**< key of the request */
  int32_t end;        /**< one past the last, at most seq_len */
  int32_t tree_begin; /**< first key that is a draft in a tree; seq_len = none */
} ClattnSeenKeys;

/** One step's batch, validated: the same arrays on the host and, from the named byte offsets on, in
   one device buffer. The first num_decodes requests are decodes (few query tokens: one, unless
   speculating); 0 if decodes do not come first. */
typedef struct ClattnBatch {
  uint32_t struct_size;       /**< bytes of this struct */
  int32_t num_reqs;           /**< requests */
  int32_t num_actual_tokens;  /**< query tokens of all requests */
  int32_t num_decodes;        /**< requests that come first */
  int32_t max_query_len;      /**< of any request */
  int32_t max_seq_len;        /**< of any request, in tokens */
  int32_t causal;             /**< other than 0: a query sees only keys up to its own position */
  int64_t block_table_stride; /**< columns of a row */
  const int32_t* query_start_loc; /**< [num_reqs + 1] */
  const int32_t* seq_lens;        /**< [num_reqs], this step's tokens included */
  const int32_t* block_table;     /**< [num_reqs, block_table_stride]; 0 past a request's pages */
  const int64_t* slot_mapping;    /**< [num_actual_tokens]; negative = store nothing */
  cl_mem device;                  /**< the same arrays, at these offsets: */
  uint64_t query_start_loc_bytes; /**< i32 */
  uint64_t seq_lens_bytes;        /**< i32 */
  uint64_t block_table_bytes;     /**< i32 */
  uint64_t slot_mapping_bytes;    /**< i64 */
  /** [num_actual_tokens]: what counts in place of `causal` and of the layer's window, chunk and
     span_rule. NULL for layers that take no lists of a batch, or none that hides or shows keys. */
  const ClattnSeenKeys* seen_keys;
  const uint32_t* tree_bits; /**< [num_actual_tokens, tree_words]; NULL without trees */
  int64_t tree_words;        /**< words of the largest tree; 0 without trees */
  uint64_t seen_keys_bytes;  /**< where they are in `device` */
  uint64_t tree_bits_bytes;  /**< u32 */
} ClattnBatch;

/** Takes one sentence per call. */
typedef void (*ClattnAddReason)(void* sink, const char* reason);

/** What the plugin fills in. `self` and `impl` are the plugin's own. No function may be NULL. */
typedef struct ClattnBackendPlugin {
  uint32_t abi_version; /**< CLATTN_BACKEND_ABI_VERSION */
  uint32_t struct_size; /**< bytes of this struct, as the plugin was compiled */
  /** sizeof(ClattnAttentionConfig), as the plugin was compiled: layers that set a field after that
     are refused. A library that knows fewer fields than the plugin refuses the plugin. */
  uint64_t config_size;
  const char* name;         /**< upper case, unique in the registry */
  const char* version;      /**< of the plugin, for reports */
  const char* refusal;      /**< why the entry point returned a number other than 0 */
  void* self;               /**< the plugin's own, given to every function */
  int32_t kv_dimension;     /**< logical dimension of K (0) and V (1): 0 or 1 */
  uint32_t layouts;         /**< supported layouts: bit CLATTN_NHD, bit CLATTN_HND; at least one */
  int32_t preferred_layout; /**< ClattnLayout, one of them */
  /** Other than 0: forward() attends by ClattnBatch.seen_keys where there are any, so that layers
     may have use_spans, use_directions, use_first_keys, use_keep_keys and use_trees, which
     validate() may refuse one by one. 0: all of them are refused. */
  int32_t takes_seen_keys;

  /** Once, after the last impl has gone and before the shared object is closed. */
  void (*destroy)(void* self);
  /** Calls add_reason for every reason why the configuration cannot run; device is NULL when only
     the configuration is to be judged. */
  void (*validate)(void* self, const ClattnAttentionConfig* config, const ClattnDevice* device,
                   ClattnAddReason add_reason, void* sink);
  /** Logical shape of a cache: K/V and blocks in either order, then token, head, dim. */
  void (*kv_cache_shape)(void* self, int64_t num_blocks, int32_t block_size, int32_t num_kv_heads,
                         int32_t head_size, int64_t shape[5], ClattnStatus* status);
  /** Which logical dimension is at each place in memory, slowest first. */
  void (*kv_cache_stride_order)(void* self, int32_t layout, int32_t order[5], ClattnStatus* status);
  /** The kernels of a configuration, compiled; NULL and a status if that fails. */
  void* (*impl_create)(void* self, cl_context context, cl_device_id device,
                       const ClattnAttentionConfig* config, ClattnStatus* status);
  /** Ends what impl_create() made. */
  void (*impl_destroy)(void* self, void* impl);
  /** Enqueue and return; *event, unless event is NULL, may be set to the last command's. */
  void (*write_kv_cache)(void* self, void* impl, cl_command_queue queue, const ClattnTensor* key,
                         const ClattnTensor* value, const ClattnKVCache* cache,
                         const ClattnBatch* batch, cl_event* event, ClattnStatus* status);
  /** lse: f32 [num_actual_tokens, num_heads], natural logarithm, or NULL. */
  void (*forward)(void* self, void* impl, cl_command_queue queue, const ClattnTensor* query,
                  const ClattnKVCache* cache, const ClattnBatch* batch, const ClattnTensor* output,
                  cl_mem lse, cl_event* event, ClattnStatus* status);
} ClattnBackendPlugin;

/** The function that the shared object exports. */
typedef int (*ClattnBackendPluginEntry)(const ClattnHostApi* host, ClattnBackendPlugin* plugin);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
