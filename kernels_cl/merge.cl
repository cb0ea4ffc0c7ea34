/* Merges the partial results of query tokens whose keys were split by an attention kernel that
   does not merge its own splits (lib/merge.clh). Each work-item takes four dims of a head (on CPUs
   all of them), and a group as many heads of one merge item as it has work-items for; no
   barriers.

   macro          unit        legal values
   CLA_HEAD_DIM   elements    8 ... 512, steps of 8
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16: out
   CLA_KV_DTYPE   -           0 ... 5; not used
   CLA_WG_SIZE    work-items  1 (CPU): takes a whole head; or more
   CLA_SINK       -           1: a sink a head (lib/options.clh)
   CLA_OUT_FP8    -           1: also writes fp8 (lib/options.clh)

   Launch: num_merges * ceil(num_heads / CLA_MERGE_HEADS) groups of CLA_WG_SIZE. */
#include "lib/merge.clh"

/* Work-items of a head, and heads of a group: merge_heads() of src/kernels counts them as well. */
#define CLA_HEAD_ITEMS ((uint)min(CLA_WG_SIZE, CLA_HEAD_DIM / CLA_MERGE_DIMS))
#define CLA_MERGE_HEADS ((uint)CLA_WG_SIZE / CLA_HEAD_ITEMS)

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_merge(
    __global const int* restrict meta,           /* ClaMergeItem[num_merges] at merges_at */
    int merges_at,                               /* ints, a multiple of 4 */
    int num_merges,                              /* the launch says it too */
    __global const float* restrict partial_out,  /* [partial rows, num_heads, HEAD_DIM] */
    __global const float* restrict partial_lse2, /* [partial rows, num_heads], log2 */
    __global CLA_Q_T* restrict out,              /* [tokens, num_heads, HEAD_DIM] */
    long out_offset,                             /* elements */
    long out_token_stride,                       /* elements */
    __global float* restrict lse,         /* [tokens, num_heads], natural log; if write_lse */
    int num_heads,                        /* query heads */
    int write_lse                         /* 0 or 1 */
        CLA_HEAD_PARAMS CLA_OUT_PARAMS) { /* lib/options.clh */
  (void)num_merges;
  const ClaOptions opt = {CLA_HEAD_VALUES CLA_OUT_VALUES.always_zero = 0};
  const uint group = (uint)get_group_id(0);
  const uint chunks = ((uint)num_heads + CLA_MERGE_HEADS - 1) / CLA_MERGE_HEADS;
  const uint work_item = (uint)get_local_id(0);
  const uint head = group % chunks * CLA_MERGE_HEADS + work_item / CLA_HEAD_ITEMS;
  const ClaMergeItem item = ((__global const ClaMergeItem*)(meta + merges_at))[group / chunks];
  /* Padding of a recorded step, work-items and heads beyond the last one. */
  if (item.num_splits == 0 || work_item >= CLA_MERGE_HEADS * CLA_HEAD_ITEMS ||
      head >= (uint)num_heads)
    return;
  const ClaSplits splits = {(ulong)item.partial_row * (uint)num_heads + head,
                            (ulong)item.split_stride * (uint)num_heads, item.num_splits};
  const ClaResults results = {out + out_offset, out_token_stride, lse, write_lse, partial_out,
                              partial_lse2,     (uint)num_heads};
  for (uint dim = work_item % CLA_HEAD_ITEMS * CLA_MERGE_DIMS; dim < CLA_HEAD_DIM;
       dim += CLA_HEAD_ITEMS * CLA_MERGE_DIMS)
    cla_merge_dims(&opt, &results, &splits, item.out_row, head, dim);
}
