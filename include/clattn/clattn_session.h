#ifndef CLATTN_CLATTN_SESSION_H
#define CLATTN_CLATTN_SESSION_H

/* Sessions in C: from a model's shape to decoded tokens. A session owns layers, caches, blocks and
   each request's tokens; embedding, projections and sampling are the application's. What a call
   does in full is described at clattn::Session (clattn/session.hpp); clattn/clattn.h says what
   holds for all handles, structs and errors. A session is for one thread at a time. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

struct ClattnKVCacheSpec;       /* clattn/clattn_kv_cache.h */
struct ClattnStateView;         /* clattn/clattn_kv_cache.h */
struct ClattnRecurrentMetadata; /* clattn/clattn_recurrent.h */
struct ClattnPrepareQKV;        /* clattn/clattn_ops.h */

/** Caches, layers, blocks and requests of a model (clattn::Session). */
typedef struct ClattnSession ClattnSession;

/** clattn::SessionConfig. */
typedef struct ClattnSessionConfig {
  uint32_t struct_size;
  int32_t no_prefix_caching; /**< other than 0: requests that begin alike share no blocks */
  /** [num_layers]. Block size and type of queries are the same for all; equal layers may share one
     struct. Layers without a name are called "layers.N". Where some layers see all keys, caches of
     those with a window may be smaller, as clattn::SessionConfig says. */
  const ClattnLayerConfig* const* layers;
  size_t num_layers;    /**< elements of layers */
  int64_t num_blocks;   /**< of each layer's cache; 0 = as many as cache_bytes hold */
  uint64_t cache_bytes; /**< of the caches of all layers */
  const char* layout;   /**< as in clattn_cache_create(); NULL = the fastest one */
  const ClattnStepOptions*
      step_options;         /**< limits of a step (its num_blocks is ignored), or NULL */
  const ClattnQueue* queue; /**< on which all its work runs; NULL = one of its own */
  ClattnProgress progress;  /**< called while layers are made, which compiles; or NULL */
  void* progress_user;      /**< its `user` */
  /** Other than 0: steps count when clattn_session_commit() says so, not with the last
     clattn_session_attend(). For models that run on several sessions in lockstep. */
  int32_t explicit_commit;
  int32_t num_state_slots; /**< with recurrent_layers: RecurrentLayers::num_slots */
  /** [num_recurrent_layers], specs of "mamba" (clattn::RecurrentLayers), or NULL. */
  const struct ClattnKVCacheSpec* const* recurrent_layers;
  size_t num_recurrent_layers; /**< elements of recurrent_layers */
} ClattnSessionConfig;

/** Allocates the caches, zeroes them (waits for that) and compiles the layers' kernels. */
CLATTN_C_API ClattnResult clattn_session_create(const ClattnContext* context,
                                                const ClattnSessionConfig* config,
                                                ClattnSession** session);
CLATTN_C_API void clattn_session_destroy(ClattnSession* session);
/** A handle of its queue, to be destroyed like any other. */
CLATTN_C_API ClattnResult clattn_session_queue(const ClattnSession* session, ClattnQueue** queue);
/** clattn_warm_up() for all layers. Called before the first request, it warms up the copying of
   blocks, which forks need, as well. */
CLATTN_C_API ClattnResult clattn_session_warm_up(ClattnSession* session, ClattnProgress progress,
                                                 void* user);
/** As clattn_layer_explain(), of layer 0 ... num_layers - 1. */
CLATTN_C_API ClattnResult clattn_session_explain(const ClattnSession* session, int32_t layer,
                                                 char* text, size_t capacity, size_t* size);
/** As clattn_layer_load_kv_scales(), of layer 0 ... num_layers - 1. */
CLATTN_C_API ClattnResult clattn_session_load_kv_scales(ClattnSession* session, int32_t layer,
                                                        const ClattnKVScales* scales);

/** How large the session is, and how full. */
typedef struct ClattnSessionInfo {
  uint32_t struct_size;
  int32_t num_layers;           /**< of the model */
  int32_t block_size;           /**< tokens */
  int32_t num_blocks;           /**< of each cache of layers that keep all tokens */
  int32_t num_free_blocks;      /**< cached blocks that no request holds included */
  int32_t num_windows;          /**< of layers that give up what their window has left */
  int32_t num_recurrent_layers; /**< which are not in num_layers */
  int32_t num_slots;            /**< for states of recurrent layers */
  int32_t num_free_slots;       /**< cached states that no request holds included */
} ClattnSessionInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_session_info(const ClattnSession* session,
                                              ClattnSessionInfo* info);

/** The blocks of layers with one window (clattn::WindowBlocks). */
typedef struct ClattnWindowInfo {
  uint32_t struct_size;
  int32_t window;          /**< tokens that a row sees, itself included; of chunks: most */
  int32_t num_blocks;      /**< of each of their caches */
  int32_t num_free_blocks; /**< cached blocks that no request holds included */
} ClattnWindowInfo;
/** Fills in `info`, whose struct_size is set, for `window` 0 ... num_windows - 1. */
CLATTN_C_API ClattnResult clattn_session_window_info(const ClattnSession* session, int32_t window,
                                                     ClattnWindowInfo* info);

/** Adds a request with the token ids of its prompt, at least one; `id` becomes its number. It holds
   the cached blocks with the prompt's beginning. Only requests of one salt share blocks: token ids
   and salt have to determine keys and values. */
CLATTN_C_API ClattnResult clattn_session_add(ClattnSession* session, const int32_t* prompt,
                                             size_t num_tokens, uint64_t cache_salt, int64_t* id);
/** Another request with the same tokens and, so far, the same blocks; `copy` becomes its number. A
   request with drafts is refused. */
CLATTN_C_API ClattnResult clattn_session_fork(ClattnSession* session, int64_t id, int64_t* copy);
/** Gives up its blocks, keeps its tokens: a later step computes them again (preemption). Drafts are
   dropped. */
CLATTN_C_API ClattnResult clattn_session_evict(ClattnSession* session, int64_t id);
/** Ends the request; its blocks become free. */
CLATTN_C_API ClattnResult clattn_session_finish(ClattnSession* session, int64_t id);
/** Takes the request back to its first `length` tokens, 1 to all of them, and gives up the blocks
   behind them; what other requests hold, and what is published, stays. Refused for a request with
   drafts and for one in a step that does not count yet. */
CLATTN_C_API ClattnResult clattn_session_truncate(ClattnSession* session, int64_t id,
                                                  int32_t length);

/** The session owns the arrays. They are valid until its next call other than
   clattn_session_info() and clattn_session_request_info(). */
typedef struct ClattnRequestInfo {
  uint32_t struct_size;
  int32_t num_tokens;          /**< in a step or not, without drafts */
  int32_t num_computed_tokens; /**< that have keys and values in the cache */
  int32_t num_blocks;          /**< elements of block_table */
  const int32_t* tokens;       /**< [num_tokens] */
  const int32_t* block_table;  /**< [num_blocks] */
} ClattnRequestInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_session_request_info(const ClattnSession* session, int64_t id,
                                                      ClattnRequestInfo* info);

/** A request's part of a step. */
typedef struct ClattnStepRequest {
  int64_t id;                /**< of clattn_session_add() or clattn_session_fork() */
  const int32_t* new_tokens; /**< [num_new_tokens], token ids that join the request's */
  size_t num_new_tokens;     /**< elements of new_tokens */
  int64_t max_tokens; /**< compute at most this many, < 2^31; 0 = all that are not computed */
  int32_t compute_every_row; /**< other than 0: also those that cached blocks hold */
  int32_t reserved;          /**< must be 0: elements of an array have no struct_size to grow by */
  /** [num_spans, 2]: first position and one past the last of tokens that see one another, such as
     images, in this step; NULL = none. Only with layers of use_spans. Where prefixes are shared,
     token ids and salt have to determine them. */
  const int32_t* spans;
  size_t num_spans; /**< pairs in spans */
  /** [num_drafts], token ids of guesses at what follows, which are computed, too, and join the
     request's tokens by clattn_session_accept() alone, before its next step. max_tokens must let
     all tokens before them be computed. */
  const int32_t* drafts;
  size_t num_drafts; /**< elements of drafts */
  /** [num_drafts]: the number of the earlier draft that each follows, from 0; -1 = the request's
     last token. All layers then have use_trees. NULL = a chain, each follows the one before it. */
  const int32_t* draft_parents;
} ClattnStepRequest;

/** The rows of a step, request after request in the caller's order. The arrays are the session's,
   valid until its next step. */
typedef struct ClattnStepRows {
  uint32_t struct_size;
  int32_t num_requests; /**< of the step */
  int32_t num_tokens;   /**< rows of every tensor */
  int32_t reserved;
  const int32_t* token_ids;       /**< [num_tokens]: whose query, key and value to compute */
  const int32_t* positions;       /**< [num_tokens], in their request, for rotary embeddings */
  const int32_t* query_start_loc; /**< [num_requests + 1]: request i has rows [i] ... [i + 1] - 1;
                                     the logits of the last of them that is no draft give its next
                                     token */
  const int32_t* seq_lens;        /**< [num_requests]: computed after the step, with drafts */
  const int32_t* num_drafts;      /**< [num_requests]: how many of its last rows are drafts */
} ClattnStepRows;
/** Begins a step, in which clattn_session_attend() is called once for every layer: adds the new
   tokens, allocates blocks, uploads the step's metadata. Requests may be in any order, each once
   and with at least one token to compute. A former step in which some layer was not attended, or
   that was not committed where it must be, is given up first, so after any failure the same call
   begins the step again. CLATTN_ERROR_OUT_OF_BLOCKS: evict or finish a request. */
CLATTN_C_API ClattnResult clattn_session_step(ClattnSession* session,
                                              const ClattnStepRequest* requests,
                                              size_t num_requests, ClattnStepRows* rows);
/** How many free blocks clattn_session_step() with the same requests would take: needed[0] of
   layers that keep all tokens, needed[1 + i] of window i. `num_pools` is 1 + num_windows. Changes
   nothing but the order in which blocks that it finds are reused; refused in a step that does not
   count yet. */
CLATTN_C_API ClattnResult clattn_session_blocks_needed(ClattnSession* session,
                                                       const ClattnStepRequest* requests,
                                                       size_t num_requests, int64_t* needed,
                                                       size_t num_pools);
/** clattn_prepare_qkv() of a layer over the current step, before its clattn_session_attend(), which
   then takes no key and value. The session sets num_tokens, num_heads, num_kv_heads, head_size,
   dtype, cache and slots, and positions where there are none; slot_mapping, num_padding_tokens and
   event must be absent. */
CLATTN_C_API ClattnResult clattn_session_prepare_qkv(ClattnSession* session, int32_t layer,
                                                     const struct ClattnPrepareQKV* call);
/** clattn_layer_forward() of a layer over the current step. After the last layer the step's tokens
   count as computed, unless explicit_commit leaves that to clattn_session_commit(). */
CLATTN_C_API ClattnResult clattn_session_attend(ClattnSession* session, int32_t layer,
                                                const ClattnTensors* tensors);
/** What the operations of a recurrent layer are given in a step (clattn::RecurrentStep): the
   session's, valid until ClattnRecur returns. */
typedef struct ClattnRecurrentStep {
  uint32_t struct_size;
  int32_t reserved;
  const struct ClattnStateView* conv_states;           /**< NULL: the layer has no convolution */
  const struct ClattnRecurrentMetadata* conv_metadata; /**< of clattn_causal_conv1d() */
  const struct ClattnStateView* states;           /**< NULL: the layer has a convolution alone */
  const struct ClattnRecurrentMetadata* metadata; /**< of the other operations */
} ClattnRecurrentStep;
/** Enqueues a layer's operations on the session's queue. */
typedef ClattnResult (*ClattnRecur)(void* user, const ClattnRecurrentStep* step);
/** Runs recurrent layer 0 ... num_recurrent_layers - 1 over the current step, each once, in any
   order with clattn_session_attend(). Where `run` fails, the layer has not run; its result is this
   function's. */
CLATTN_C_API ClattnResult clattn_session_recur(ClattnSession* session, int32_t layer,
                                               ClattnRecur run, void* user);
/** With explicit_commit: the step, whose layers have all been attended, counts. */
CLATTN_C_API ClattnResult clattn_session_commit(ClattnSession* session);
/** Settles the drafts of the request's last step, once that counts: those of `path`, [num_accepted]
   numbers of drafts of which each follows the one before it and the first the request's last token,
   join its tokens; the others are dropped. What the model gives after the last of them is the next
   step's new token. Asynchronous on the session's queue. */
CLATTN_C_API ClattnResult clattn_session_accept(ClattnSession* session, int64_t id,
                                                const int32_t* path, size_t num_accepted);

/** The drafts that clattn_session_accept_all() keeps of a request. */
typedef struct ClattnAccepted {
  int64_t id;          /**< each request once */
  const int32_t* path; /**< [num_accepted], as clattn_session_accept() takes it */
  size_t num_accepted; /**< elements of path */
} ClattnAccepted;
/** clattn_session_accept() for several requests, whose tokens move together. If one of them is
   refused, none has changed. */
CLATTN_C_API ClattnResult clattn_session_accept_all(ClattnSession* session,
                                                    const ClattnAccepted* requests,
                                                    size_t num_requests);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
