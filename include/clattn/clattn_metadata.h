#ifndef CLATTN_CLATTN_METADATA_H
#define CLATTN_CLATTN_METADATA_H

/* Host arithmetic in C, without a device: how a batch is ordered and split, slots, page lists and
   the pool of blocks (clattn/metadata.hpp, reorder.hpp, block_pool.hpp). clattn/clattn.h says what
   holds for all handles, structs and errors. Functions are thread-safe, pools for one thread at a
   time. Of a ClattnBatchInfo they read num_reqs and the arrays that they need; slots, causality and
   directions are not theirs. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/* --- Order and split ------------------------------------------------------------------------ */

/** How a batch divides. */
typedef struct ClattnBatchSplit {
  uint32_t struct_size;
  int32_t num_decodes;        /**< requests */
  int32_t num_extends;        /**< requests; of clattn_split_decodes_prefills_and_extends() alone */
  int32_t num_prefills;       /**< requests */
  int32_t num_decode_tokens;  /**< query tokens */
  int32_t num_extend_tokens;  /**< query tokens */
  int32_t num_prefill_tokens; /**< query tokens */
  int32_t reserved;
} ClattnBatchSplit;
/** What clattn_split_decodes_and_prefills() takes beyond the batch (clattn::SplitOptions). */
typedef struct ClattnSplitOptions {
  uint32_t struct_size;
  int32_t decode_threshold;           /**< most query tokens of a decode; 0 = 1 */
  int32_t require_uniform;            /**< other than 0: decodes are of one query length */
  int32_t short_extends_are_prefills; /**< other than 0: as is_prefilling says */
  const uint8_t* is_prefilling;       /**< [num_reqs], 1 = the prompt is not computed yet */
} ClattnSplitOptions;
/** Where a batch divides whose decodes come first. Without options, requests of one query token are
   decodes and another order is refused; with options, the first prefill begins the prefills. */
CLATTN_C_API ClattnResult clattn_split_decodes_and_prefills(const ClattnBatchInfo* batch,
                                                            const ClattnSplitOptions* options,
                                                            ClattnBatchSplit* split);
/** Decodes, then extends (longer, with context), then prefills (longer, without). */
CLATTN_C_API ClattnResult clattn_split_decodes_prefills_and_extends(const ClattnBatchInfo* batch,
                                                                    int32_t decode_threshold,
                                                                    ClattnBatchSplit* split);
/** How far requests have got (clattn::RequestProgress), and where the answer goes. */
typedef struct ClattnReorder {
  uint32_t struct_size;
  int32_t decode_threshold;            /**< most scheduled tokens of a decode; 0 = 1 */
  const int32_t* num_scheduled_tokens; /**< [num_reqs], query tokens of this step */
  const int32_t* num_computed_tokens;  /**< [num_reqs]; NULL: decodes to the front, no more */
  const int32_t* num_prompt_tokens;    /**< [num_reqs]; NULL if num_computed_tokens is */
  size_t num_reqs;                     /**< elements of each array */
  int32_t* order;                      /**< [num_reqs]: which old index is at each new place */
  int32_t* swaps;    /**< [2 * num_reqs] or NULL: pairs of rows that change places in turn */
  size_t* num_swaps; /**< becomes the number of pairs; NULL if swaps is */
} ClattnReorder;
/** The order that brings decodes first, with all arrays decodes, short extends, long extends and
   prefills. `moved` becomes 1 if anything moves, else 0. */
CLATTN_C_API ClattnResult clattn_reorder_batch(const ClattnReorder* reorder, int32_t* moved);
/** 1 + num_speculative_tokens, 1 + twice as many where drafting is parallel. */
CLATTN_C_API ClattnResult clattn_reorder_batch_threshold(int32_t num_speculative_tokens,
                                                         int32_t parallel_drafting,
                                                         int32_t* decode_threshold);
/** Cuts prefills into runs of at most `workspace_size` tokens: requests ranges[2 i] ...
   ranges[2 i + 1] - 1, `request_offset` added. `ranges` is [2 * num_reqs]. */
CLATTN_C_API ClattnResult clattn_split_prefill_chunks(const int32_t* seq_lens, size_t num_reqs,
                                                      int64_t workspace_size,
                                                      int32_t request_offset, int32_t* ranges,
                                                      size_t* num_ranges);

/* --- Slots and pages ------------------------------------------------------------------------ */

/** CLATTN_ERROR_INVALID_ARGUMENT unless lengths, pages and slots are legal for a cache of
   `num_blocks` blocks (0 = unknown): what clattn_step_build() checks. */
CLATTN_C_API ClattnResult clattn_validate_batch(const ClattnBatchInfo* batch, int32_t block_size,
                                                int64_t num_blocks);
/** The slots of the batch's tokens by its block table; those past the tokens become -1. */
CLATTN_C_API ClattnResult clattn_compute_slot_mapping(const ClattnBatchInfo* batch,
                                                      int32_t block_size, int64_t* slots,
                                                      size_t num_slots);
/** Makes slots [num_actual_tokens, num_slots) -1. */
CLATTN_C_API ClattnResult clattn_pad_slot_mapping(int64_t* slots, size_t num_slots,
                                                  int32_t num_actual_tokens);
/** The block table of kernels whose pages are parts of larger blocks; `kernel_block_table` has
   num_entries * (block_size / kernel_block_size) elements. */
CLATTN_C_API ClattnResult clattn_map_to_kernel_blocks(const int32_t* block_table,
                                                      size_t num_entries, int32_t block_size,
                                                      int32_t kernel_block_size,
                                                      int32_t* kernel_block_table);
/** The batch's page lists: `indptr` [num_reqs + 1], `last_page_len` [num_reqs], and `indices`, of
   which at most `capacity` are written; `num_indices`, unless NULL, becomes their number. */
CLATTN_C_API ClattnResult clattn_build_paged_kv_metadata(const ClattnBatchInfo* batch,
                                                         int32_t block_size, int32_t* indptr,
                                                         int32_t* last_page_len, int32_t* indices,
                                                         size_t capacity, size_t* num_indices);

/* --- Blocks --------------------------------------------------------------------------------- */

/** The blocks of a KV cache by reference count, and which hold the beginning of a sequence
   (clattn::BlockPool). */
typedef struct ClattnBlockPool ClattnBlockPool;
/** Blocks 0 ... num_blocks - 1 of `block_size` tokens, all free. */
CLATTN_C_API ClattnResult clattn_block_pool_create(int32_t num_blocks, int32_t block_size,
                                                   ClattnBlockPool** pool);
CLATTN_C_API void clattn_block_pool_destroy(ClattnBlockPool* pool);
/** How large the pool is, and how full. */
typedef struct ClattnBlockPoolInfo {
  uint32_t struct_size;
  int32_t num_blocks; /**< free or held */
  int32_t block_size; /**< tokens */
  int32_t num_free;   /**< that nobody holds, those that can be found included */
  int32_t num_used;   /**< that somebody holds */
  int32_t peak_used;  /**< the most that were held at once */
} ClattnBlockPoolInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_block_pool_info(const ClattnBlockPool* pool,
                                                 ClattnBlockPoolInfo* info);
/** How many hold the block, and the number of its published content, the same for equal content
   (0 = none, so it cannot be found); either may be NULL. */
CLATTN_C_API ClattnResult clattn_block_pool_block(const ClattnBlockPool* pool, int32_t block,
                                                  int32_t* reference_count, uint64_t* content);
/** Takes `count` free blocks, one holder each, into `blocks`. CLATTN_ERROR_OUT_OF_BLOCKS: fewer are
   free, and none is taken. */
CLATTN_C_API ClattnResult clattn_block_pool_allocate(ClattnBlockPool* pool, int32_t count,
                                                     int32_t* blocks);
/** The blocks that hold the longest beginning of a sequence of this salt, into `blocks`
   [num_tokens / block_size]; `num_blocks` becomes their number. Nothing changes until
   clattn_block_pool_share(). */
CLATTN_C_API ClattnResult clattn_block_pool_find_prefix(const ClattnBlockPool* pool,
                                                        const int32_t* token_ids, size_t num_tokens,
                                                        uint64_t cache_salt, int32_t* blocks,
                                                        size_t* num_blocks);
/** Adds a holder to each block. */
CLATTN_C_API ClattnResult clattn_block_pool_share(ClattnBlockPool* pool, const int32_t* blocks,
                                                  size_t num_blocks);
/** Lets the full blocks of a sequence be found; they must not be written again. */
CLATTN_C_API ClattnResult clattn_block_pool_publish(ClattnBlockPool* pool, const int32_t* token_ids,
                                                    size_t num_tokens, const int32_t* blocks,
                                                    size_t num_blocks, uint64_t cache_salt);
/** Removes a holder from each block. */
CLATTN_C_API ClattnResult clattn_block_pool_release(ClattnBlockPool* pool, const int32_t* blocks,
                                                    size_t num_blocks);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
