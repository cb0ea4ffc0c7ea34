/* Merges the partial results of query tokens whose keys were split by an attention kernel that
   does not merge its own splits (core/merge.clh). A column is CLA_COLUMN_DIMS dims of a head, on
   CPUs all of them. One work-item merges a column of up to CLA_ALONE splits; of a column with more,
   each of CLA_PARTS work-items merges an equal share, since a few tokens with many splits would
   otherwise give too few work-items, each of which waits for memory many times. The number of
   splits alone decides, so that a token's bits do not depend on other tokens.

   Groups are persistent. A task is CLA_WG_SIZE columns of a merge item, or CLA_PART_COLUMNS where
   columns are shared. If any item shares columns, all items have as many places for tasks as that
   one; in the others the last places are empty. Tasks are ordered by place, so that empty ones come
   last. At each place they start with a different item, so that the tasks of one item go to many
   groups even if the number of groups is a multiple of the number of items.

   macro          unit        legal values
   CLA_HEAD_DIM   elements    8 ... 512, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16: out
   CLA_GROUP      heads       query heads a KV head
   CLA_WG_SIZE    work-items  1 (CPU), or a multiple of CLA_PARTS

   Options and the parameter list: core/options.clh, core/call.clh. Local memory: 80 B a work-item.
   Launch: any number of groups of CLA_WG_SIZE; merge_tasks() of src/kernels counts the tasks. */
#if CLA_WG_SIZE == 1
#define CLA_PARTS 1
#define CLA_MERGE_DIMS CLA_RESULT_DIM /* each weight once: scalar exp2 is slow there */
#else
#define CLA_PARTS CLA_COLUMN_PARTS
#define CLA_MERGE_DIMS CLA_COLUMN_DIMS
#define CLA_MERGE_BATCH 8 /* more take so many registers that fewer groups wait at once */
#endif
#include "core/merge.clh"

#define CLA_PART_COLUMNS ((uint)CLA_WG_SIZE / CLA_PARTS)
#define CLA_HEAD_COLUMNS (CLA_RESULT_DIM / CLA_MERGE_DIMS)

/* Where the work-items of a group leave their parts. */
typedef struct ClaParts {
  __local float4* sums; /* [QUADS][WG_SIZE] */
  __local float2* states;
} ClaParts;

/* Adds the further parts of the column of a work-item of the first part, in ascending order. */
static inline void cla_merge_add_parts(ClaRowState* all, float4* acc, ClaParts parts,
                                       uint work_item) {
  for (uint part = 1; part < CLA_PARTS; ++part) {
    const uint at = part * CLA_PART_COLUMNS + work_item;
    const ClaRowState state = {parts.states[at].x, parts.states[at].y};
    const float factor = cla_raise_base(all, state.base);
    const float weight = cla_add_state(all, state);
#pragma unroll
    for (int k = 0; k < CLA_MERGE_QUADS; ++k)
      acc[k] = mad((float4)(weight), parts.sums[(uint)k * CLA_WG_SIZE + at], acc[k] * factor);
  }
}

/* Merges the columns of task `place` of an item, if it has that many. Called by the whole group. */
static inline void cla_merge_columns(const ClaOptions* opt, const ClaResults* results,
                                     const ClaMergeItem* item, uint place, uint columns,
                                     ClaParts parts) {
  const uint work_item = (uint)get_local_id(0);
  const int count = item->num_splits; /* 0: see ClaMergeItem */
  const int alone = count <= CLA_ALONE;
  const int part = alone ? 0 : (int)(work_item / CLA_PART_COLUMNS);
  const int num_parts = alone ? 1 : CLA_PARTS;
  const uint column = alone ? place * (uint)CLA_WG_SIZE + work_item
                            : place * CLA_PART_COLUMNS + work_item % CLA_PART_COLUMNS;
  const int exists = count > 0 && column < columns;
  const uint head = column / CLA_HEAD_COLUMNS;
  const uint dim = column % CLA_HEAD_COLUMNS * CLA_MERGE_DIMS;
  const ClaSplits splits = {(ulong)item->partial_row * results->num_heads + head,
                            (ulong)item->split_stride * results->num_heads, count};
  float4 acc[CLA_MERGE_QUADS];
  ClaRowState all = cla_sum_splits(acc, results, &splits, dim, count * part / num_parts,
                                   exists ? count * (part + 1) / num_parts : 0);
#if CLA_PARTS > 1
  if (!alone) {
#pragma unroll
    for (int k = 0; k < CLA_MERGE_QUADS; ++k)
      parts.sums[(uint)k * CLA_WG_SIZE + work_item] = acc[k];
    parts.states[work_item] = (float2)(all.base, all.sum);
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* written -> added; in every task (PoCL, docs/testing.md) */
  if (!alone && part == 0) cla_merge_add_parts(&all, acc, parts, work_item);
#endif
  if (exists && part == 0) cla_store_merged(opt, results, all, acc, item->out_row, head, dim);
}

CLA_KERNEL clattn_merge(CLA_PARAMS) {
#if CLA_PARTS > 1
  __local float4 sums[2 * CLA_MERGE_QUADS * CLA_WG_SIZE]; /* tasks take turns: one barrier does */
  __local float2 states[2 * CLA_WG_SIZE];
#else
  __local float4* const sums = 0;
  __local float2* const states = 0;
#endif
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults results = CLA_RESULTS;
  __global const ClaMergeItem* items = (__global const ClaMergeItem*)(meta + call.entries_at);
  const uint columns = results.num_heads * CLA_HEAD_COLUMNS;
  ClaMergeCounts counts = {call.num_entries, call.most_splits};
  if (call.merge_counts_at >= 0)
    counts = *(__global const ClaMergeCounts*)(meta + call.merge_counts_at);
  const uint task_columns = counts.most_splits > CLA_ALONE ? CLA_PART_COLUMNS : CLA_WG_SIZE;
  const uint num_places =
      counts.num_merges > 0 ? (columns + task_columns - 1) / task_columns : 0; /* of an item */
  const uint num_items = max((uint)counts.num_merges, 1u);
  const uint groups = (uint)get_num_groups(0), group = (uint)get_group_id(0);
  uint place = group / num_items, number = group % num_items;
  uint at = (number + place) % num_items; /* of the item */
  uint turn = 0;
  while (place < num_places) { /* advances without a division: most tasks may be empty, see above */
    const ClaMergeItem item = items[at];
    const ClaParts parts = {sums + turn * CLA_MERGE_QUADS * CLA_WG_SIZE,
                            states + turn * CLA_WG_SIZE};
    cla_merge_columns(&opt, &results, &item, place, columns, parts);
    turn ^= 1;
    place += groups / num_items;
    number += groups % num_items;
    at += (groups / num_items + groups % num_items) % num_items;
    if (number >= num_items) {
      number -= num_items;
      ++place;
      ++at;
    }
    if (at >= num_items) at -= num_items;
  }
}
