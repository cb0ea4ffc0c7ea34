#ifndef CLATTN_CLATTN_RECURRENT_H
#define CLATTN_CLATTN_RECURRENT_H

/* Recurrent layers in C: what a call does in full is described at the C++ function of nearly the
   same name (clattn/recurrent.hpp); clattn/clattn.h says what holds for all handles, structs and
   errors. All are asynchronous; their events, unless NULL, complete with the operation. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

struct ClattnStateView; /* clattn/clattn_kv_cache.h */

/** The requests of a step, on the host (clattn::RecurrentBatch). */
typedef struct ClattnRecurrentBatch {
  uint32_t struct_size;
  int32_t num_reqs;       /**< requests */
  int32_t state_columns;  /**< 1 + the most drafts of a request; 0 = 1 */
  int32_t has_null_block; /**< other than 0: null_block_id stands for no page */
  int32_t null_block_id;  /**< with has_null_block */
  int32_t reserved;
  const int32_t* query_start_loc;     /**< [num_reqs + 1], prefix sums from 0 on */
  const int32_t* state_indices;       /**< [num_reqs, state_columns]: pages, negative: none */
  const uint8_t* has_initial_state;   /**< [num_reqs]; NULL: all continue their states */
  const int32_t* num_accepted_tokens; /**< [num_reqs], negative without drafts; NULL: none has */
} ClattnRecurrentBatch;
/** The same in buffers on the device (clattn::RecurrentMetadata), which stay the application's. */
typedef struct ClattnRecurrentLists {
  uint32_t struct_size;
  int32_t num_reqs;       /**< requests */
  int32_t state_columns;  /**< 1 + the most drafts of a request; 0 = 1 */
  int32_t has_null_block; /**< other than 0: null_block_id stands for no page */
  int32_t null_block_id;  /**< with has_null_block */
  int32_t reserved;
  int64_t num_tokens;                      /**< rows of tensors */
  const ClattnBuffer* query_start_loc;     /**< i32 [num_reqs + 1] */
  const ClattnBuffer* state_indices;       /**< i32 [num_reqs, state_columns] */
  const ClattnBuffer* has_initial_state;   /**< u8 [num_reqs]; NULL: all continue their states */
  const ClattnBuffer* num_accepted_tokens; /**< i32 [num_reqs]; NULL: no request has drafts */
} ClattnRecurrentLists;

/** The requests of a step, for all its recurrent layers. Not thread-safe. */
typedef struct ClattnRecurrentMetadata ClattnRecurrentMetadata;
/** Without a batch. */
CLATTN_C_API ClattnResult clattn_recurrent_metadata_create(const ClattnContext* context,
                                                           ClattnRecurrentMetadata** metadata);
CLATTN_C_API void clattn_recurrent_metadata_destroy(ClattnRecurrentMetadata* metadata);
/** Checks lists of the host and brings them to the device. The arrays are read before the call
   returns; the queue must be in-order. */
CLATTN_C_API ClattnResult clattn_recurrent_metadata_build(ClattnRecurrentMetadata* metadata,
                                                          const ClattnQueue* queue,
                                                          const ClattnRecurrentBatch* batch);
/** Takes lists on the device, whose contents are not checked. */
CLATTN_C_API ClattnResult clattn_recurrent_metadata_adopt(ClattnRecurrentMetadata* metadata,
                                                          const ClattnRecurrentLists* lists);

/** Convolutions of channels (clattn::CausalConv1d), with gates a short convolution. */
typedef struct ClattnCausalConv1d {
  uint32_t struct_size;
  int32_t channels;           /**< a multiple of 16 */
  int32_t width;              /**< 2 to 8; 0 = 4 */
  int32_t state_rows;         /**< of a page, at least width - 1; 0 = width - 1 */
  const char* dtype;          /**< of tensors and states; NULL = "bf16" */
  const char* weight_dtype;   /**< of weight and bias; NULL = dtype */
  const char* activation;     /**< "silu" (also NULL) or "none" */
  ClattnTensorRef x;          /**< [num_tokens, channels] */
  ClattnTensorRef out;        /**< [num_tokens, channels] */
  ClattnTensorRef in_gate;    /**< as x, multiplies it; given with out_gate or not at all */
  ClattnTensorRef out_gate;   /**< as x, multiplies the result */
  const ClattnBuffer* weight; /**< [channels, width] */
  const ClattnBuffer* bias;   /**< [channels]; NULL = 0 */
  ClattnEvent* event;         /**< completes with the operation, or NULL */
} ClattnCausalConv1d;
/** causal_conv1d_fn(), causal_conv1d_update() and short_conv(). `states`: pages of [state_rows,
   channels]. */
CLATTN_C_API ClattnResult clattn_causal_conv1d(const ClattnContext* context,
                                               const ClattnQueue* queue,
                                               const ClattnCausalConv1d* conv,
                                               const struct ClattnStateView* states,
                                               const ClattnRecurrentMetadata* metadata);

/** The gated delta rule (clattn::GatedDeltaRule). */
typedef struct ClattnGatedDeltaRule {
  uint32_t struct_size;
  int32_t num_k_heads;      /**< of query and key; 0 = 1 */
  int32_t num_v_heads;      /**< a multiple; 0 = 1 */
  int32_t head_k_dim;       /**< a multiple of 16 up to 256; 0 = 128 */
  int32_t head_v_dim;       /**< the same */
  int32_t decay_by_channel; /**< other than 0: each element of a key decays by itself */
  int32_t additive;         /**< other than 0: no prediction, no beta */
  int32_t no_qk_l2norm;     /**< other than 0: queries and keys are taken as they are */
  int32_t in_chunks;        /**< other than 0: chunk_gated_delta_rule() */
  int32_t reserved;
  double scale;                /**< of queries; 0 = head_k_dim^-1/2 */
  double gate_lower_bound;     /**< with a: below 0; 0 = none */
  const char* dtype;           /**< of query, key, value and out; NULL = "bf16" */
  const char* gate_dtype;      /**< of g and beta, or a and b; NULL = "f32" */
  const char* state_dtype;     /**< of states; NULL = "f32" */
  const char* kernel_family;   /**< clattn::GatedDeltaRule::kernel_family; NULL = "auto" */
  ClattnTensorRef query;       /**< [num_tokens, num_k_heads, head_k_dim] */
  ClattnTensorRef key;         /**< as query */
  ClattnTensorRef value;       /**< [num_tokens, num_v_heads, head_v_dim] */
  ClattnTensorRef out;         /**< as value */
  ClattnTensorRef g;           /**< [num_tokens, num_v_heads]; by channel [.., head_k_dim] */
  ClattnTensorRef beta;        /**< [num_tokens, num_v_heads] */
  ClattnTensorRef a;           /**< instead of g, and as it */
  ClattnTensorRef b;           /**< instead of beta */
  const ClattnBuffer* A_log;   /**< f32 [num_v_heads], with a */
  const ClattnBuffer* dt_bias; /**< f32, one for each number of a token in a; NULL = 0 */
  ClattnEvent* event;          /**< completes with the operation, or NULL */
} ClattnGatedDeltaRule;
/** fused_recurrent_gated_delta_rule() and chunk_gated_delta_rule(). `states`: pages of
   [num_v_heads, head_v_dim, head_k_dim]. */
CLATTN_C_API ClattnResult clattn_gated_delta_rule(const ClattnContext* context,
                                                  const ClattnQueue* queue,
                                                  const ClattnGatedDeltaRule* rule,
                                                  const struct ClattnStateView* states,
                                                  const ClattnRecurrentMetadata* metadata);

/** Mamba 2 (clattn::SelectiveStateUpdate). */
typedef struct ClattnSelectiveStateUpdate {
  uint32_t struct_size;
  int32_t num_heads;   /**< of x; 0 = 1 */
  int32_t n_groups;    /**< divides num_heads; 0 = 1 */
  int32_t head_dim;    /**< a multiple of 16 up to 256; 0 = 64 */
  int32_t state_size;  /**< the same; 0 = 128 */
  int32_t no_softplus; /**< other than 0: dt does not pass softplus */
  int32_t in_chunks;   /**< other than 0: mamba_chunk_scan_combined() */
  int32_t reserved;
  double dt_min;               /**< lower limit of dt */
  double dt_max;               /**< upper limit; 0 = none */
  const char* dtype;           /**< of tensors; NULL = "bf16" */
  const char* state_dtype;     /**< of states; NULL = "f32" */
  ClattnTensorRef x;           /**< [num_tokens, num_heads, head_dim] */
  ClattnTensorRef dt;          /**< [num_tokens, num_heads] */
  ClattnTensorRef B;           /**< [num_tokens, n_groups, state_size] */
  ClattnTensorRef C;           /**< as B */
  ClattnTensorRef z;           /**< as x; absent: no gate */
  ClattnTensorRef out;         /**< as x */
  const ClattnBuffer* A;       /**< f32 [num_heads], below 0 */
  const ClattnBuffer* D;       /**< f32 [num_heads]; NULL = 0 */
  const ClattnBuffer* dt_bias; /**< f32 [num_heads]; NULL = 0 */
  ClattnEvent* event;          /**< completes with the operation, or NULL */
} ClattnSelectiveStateUpdate;
/** selective_state_update() and mamba_chunk_scan_combined(). `states`: pages of [num_heads,
   head_dim, state_size]. */
CLATTN_C_API ClattnResult clattn_selective_state_update(const ClattnContext* context,
                                                        const ClattnQueue* queue,
                                                        const ClattnSelectiveStateUpdate* update,
                                                        const struct ClattnStateView* states,
                                                        const ClattnRecurrentMetadata* metadata);

/** Lightning attention (clattn::LightningAttention). */
typedef struct ClattnLightningAttention {
  uint32_t struct_size;
  int32_t num_heads; /**< heads; 0 = 1 */
  int32_t head_size; /**< a multiple of 16 up to 256; 0 = 128 */
  int32_t reserved;
  double scale;                  /**< of queries; 0 = 1 */
  const char* dtype;             /**< of tensors; NULL = "bf16" */
  const char* state_dtype;       /**< of states; NULL = "f32" */
  ClattnTensorRef query;         /**< [num_tokens, num_heads, head_size] */
  ClattnTensorRef key;           /**< as query */
  ClattnTensorRef value;         /**< as query */
  ClattnTensorRef out;           /**< as query */
  const ClattnBuffer* log_decay; /**< f32 [num_heads] */
  ClattnEvent* event;            /**< completes with the operation, or NULL */
} ClattnLightningAttention;
/** `states`: pages of [num_heads, head_size of values, head_size of keys]. */
CLATTN_C_API ClattnResult clattn_lightning_attention(const ClattnContext* context,
                                                     const ClattnQueue* queue,
                                                     const ClattnLightningAttention* attention,
                                                     const struct ClattnStateView* states,
                                                     const ClattnRecurrentMetadata* metadata);

/** A norm of rows with a gate (clattn::RmsNormGated). */
typedef struct ClattnRmsNormGated {
  uint32_t struct_size;
  int32_t num_heads;          /**< rows of a token; 0 = 1 */
  int32_t width;              /**< a multiple of 8; 0 = 128 */
  int32_t gate_before_norm;   /**< other than 0: the norm is of x times the gate */
  double eps;                 /**< >= 0 */
  int64_t num_tokens;         /**< rows of the tensors */
  const char* dtype;          /**< of tensors; NULL = "bf16" */
  const char* weight_dtype;   /**< NULL = dtype */
  const char* activation;     /**< "silu" (also NULL) or "sigmoid" */
  ClattnTensorRef x;          /**< [num_tokens, num_heads, width] */
  ClattnTensorRef z;          /**< as x; absent: no gate */
  ClattnTensorRef out;        /**< as x, which it may be */
  const ClattnBuffer* weight; /**< [width] */
  ClattnEvent* event;         /**< completes with the operation, or NULL */
} ClattnRmsNormGated;
/** rms_norm_gated(). */
CLATTN_C_API ClattnResult clattn_rms_norm_gated(const ClattnContext* context,
                                                const ClattnQueue* queue,
                                                const ClattnRmsNormGated* norm);

/** Which states clattn_mamba_copy_blocks() copies, and where to. */
typedef struct ClattnMambaCopy {
  uint32_t struct_size;
  int32_t conv_rows;                         /**< rows of a page of conv_states */
  int64_t conv_channels;                     /**< elements of such a row */
  int64_t state_elements;                    /**< elements of a page of states */
  const char* conv_dtype;                    /**< of conv_states; NULL = "bf16" */
  const char* state_dtype;                   /**< of states; NULL = "f32" */
  const struct ClattnStateView* conv_states; /**< NULL: none is copied */
  const struct ClattnStateView* states;      /**< NULL: none is copied */
  const ClattnBuffer* targets; /**< i32 [num_reqs]: pages; negative: nothing is copied */
  int64_t targets_offset;      /**< elements in front of them */
  ClattnEvent* event;          /**< completes with the copy, or NULL */
} ClattnMambaCopy;
/** mamba_copy_blocks(). */
CLATTN_C_API ClattnResult clattn_mamba_copy_blocks(const ClattnContext* context,
                                                   const ClattnQueue* queue,
                                                   const ClattnMambaCopy* copy,
                                                   const ClattnRecurrentMetadata* metadata);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
