/* Structs that the host's planner writes and the kernels read. Plain C: C++ and OpenCL C include
 * it. */
#ifndef CLATTN_SHARED_WORK_ITEM_H
#define CLATTN_SHARED_WORK_ITEM_H

/* Ints of a workspace's counters that come before those of splits: the first counts the tasks that
   CPUs have taken, the others keep its cache line from theirs. */
#define CLA_QUEUE_INTS 16

/* Size of a tensor map (tile/sm90_tensor_map.clh). */
#define CLA_MAP_INTS 32

/* How GPUs share out a merge (attention/merge.cl). A column is CLA_COLUMN_DIMS dims of a head. One
   work-item merges a column of up to CLA_ALONE splits; CLA_COLUMN_PARTS work-items share one of
   more splits. */
#define CLA_COLUMN_DIMS 8
#define CLA_COLUMN_PARTS 4
#define CLA_ALONE 12 /* measured; 13 to 16 splits: two whole batches (CLA_MERGE_BATCH) in turn */

/* Padding, of recorded steps and of lists with rebalanced cuts: an item without query tokens, all
   zero but for partial_row, which is -1. Merges have none: ClaMergeCounts says how many there are.
 */

/* Rows whose keys do not follow from their position and the layer's window: those of requests with
   a direction, a first key or kept keys of their own, those that touch a span, and drafts in a
   tree. The metadata lists them, the rows of an item one after another, after its ClaListedItem. As
   q_pos such an item has CLA_LISTED + the number of its first row, counted from the metadata's
   start. */
typedef struct ClaListedItem {
  int begin, end;               /* positions that some row sees keys of */
  int common_begin, common_end; /* positions whose keys all rows see; empty if begin >= end */
} ClaListedItem;
typedef struct ClaListedRow {
  int begin;    /* position of the first key */
  int end;      /* one past that of the last one. From row to row of an item, neither decreases */
  int position; /* of the query, in the sequence that it continues */
  int gaps_at;  /* ints of the metadata where its ClaGapRow is; 0: it sees all between its ends */
} ClaListedRow;

/* Which keys between begin and end a row sees: before its tree the kept ones, which come first, and
   those from context_begin on; of the tree the nodes whose bits are set. The bits follow these
   fields, lowest first: bit n is node n. */
typedef struct ClaGapRow {
  int context_begin;
  int kept_end;   /* one past the last kept key; 0: none are kept */
  int tree_begin; /* position of node 0; without a tree, one past the last key */
  int words;      /* of bits */
} ClaGapRow;

#define CLA_LISTED (-2147483647 - 1) /* positions, which follow from lengths, are far above */
#define CLA_IS_LISTED(q_pos) ((q_pos) < CLA_LISTED / 2)

/* One tile of query tokens against one range of keys, for every KV head. Positions count tokens
   from the start of the request; query token i of the item stands at q_pos + i and, when causal,
   sees the keys 0 .. q_pos + i. */
typedef struct ClaWorkItem {
  int q_row;    /* row of the first query token in the batch's query tensor */
  int q_count;  /* query tokens, 1 .. the tile's limit; 0: padding */
  int q_pos;    /* position of the first query token in its request; or CLA_LISTED */
  int kv_begin; /* first key position, inclusive; a multiple of the page size */
  int kv_end;   /* one past the last key position; > kv_begin unless the item has no key at all */
  int pages_at; /* index in the page list of the page that holds position 0 of the request */
  int partial_row; /* row of the first query token's partial result, or -1: write the final output
                    */
  unsigned short split; /* which split of its tile's keys it is; their rows follow each other */
  unsigned short num_splits; /* how many; 0: there are none, or a launch of its own joins them */
} ClaWorkItem;

/* Joins the partial results of one query token: rows partial_row + s * split_stride, s <
 * num_splits. */
typedef struct ClaMergeItem {
  int out_row;      /* row in the batch's output */
  int partial_row;  /* of split 0 */
  int num_splits;   /* >= 2; 0: by the lengths on the device nothing is split */
  int split_stride; /* rows between the partial results of two splits */
} ClaMergeItem;

/* How many merges the step of a recorded launch has. The recorded arguments are only upper bounds
   for all steps of that size, so the merge reads these from the metadata instead. */
typedef struct ClaMergeCounts {
  int num_merges;
  int most_splits; /* no merge has more */
} ClaMergeCounts;

#endif
