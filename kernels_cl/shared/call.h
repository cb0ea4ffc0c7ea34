/* Everything that an attention or merge launch takes besides memory, passed by value. Plain C: C++
   and OpenCL C include it. Wide members come first, so that there is no padding to disagree about;
   a start-up probe compares what a kernel sees (kernels_cl/tile/selftest.cl). */
#ifndef CLATTN_SHARED_CALL_H
#define CLATTN_SHARED_CALL_H

#ifdef __cplusplus
#define CLA_LONG cl_long
#else
#define CLA_LONG long
#endif

typedef struct ClaCall {
  /* Elements of the tensors that the application owns. */
  CLA_LONG q_offset; /* of the first token */
  CLA_LONG q_token_stride;
  CLA_LONG out_offset;
  CLA_LONG out_token_stride;
  CLA_LONG k_offset; /* of page 0, or of the first key where there are no pages */
  CLA_LONG v_offset;
  CLA_LONG block_stride; /* from page to page; without pages, of values from token to token */
  CLA_LONG token_stride; /* from token to token of a page */
  CLA_LONG head_stride;  /* from KV head to KV head */
  CLA_LONG mask_stride;  /* from query token to query token */
  /* Ints of the metadata. */
  int entries_at; /* ClaWorkItem[num_entries], of the merge ClaMergeItem[num_entries] */
  int num_entries;
  int pages_at; /* page ids; see ClaWorkItem::pages_at */
  /* Words of the workspace. */
  int counters_at;     /* int[CLA_QUEUE_INTS], then int [partial rows, num_heads]; all 0 */
  int tensor_maps_at;  /* int[2][CLA_MAP_INTS] */
  int partial_lse2_at; /* float [partial rows, num_heads], log2 */
  int partial_out_at;  /* float [partial rows, num_heads, RESULT_DIM] */

  int num_kv_heads;
  int causal;      /* 1: a token sees no later one */
  int write_lse;   /* 1: lse is wanted */
  int window_left; /* tokens that a query reaches back; -1 = all */
  int window_right;
  int chunk;         /* tokens of an aligned chunk that it is confined to; 0 = none */
  int scale_stride;  /* bit 0: kv_scales per KV head; bit 1: one of queries follows; -1: none */
  float scale_log2e; /* softmax scale * log2(e) */
  float soft_cap_log2e;
  /* Used only by the merge. */
  int merge_counts_at; /* ints of the metadata: the ClaMergeCounts of a recorded step, read instead
                          of num_entries and most_splits; -1: not recorded */
  int most_splits;     /* no entry has more */
} ClaCall;

#endif
