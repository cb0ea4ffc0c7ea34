/* Merges the partial results of query tokens whose keys were split by an attention kernel that
   does not merge its own splits (core/merge.clh). Each work-item takes four dims of a head (on CPUs
   all of them), and a group as many heads of one merge item as it has work-items for; no
   barriers.

   macro          unit        legal values
   CLA_HEAD_DIM   elements    8 ... 512, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16: out
   CLA_GROUP      heads       query heads a KV head
   CLA_WG_SIZE    work-items  1 (CPU): takes a whole head; or more

   Options and the parameter list: core/options.clh, core/call.clh.
   Launch: call.num_entries * ceil(num_heads / CLA_MERGE_HEADS) groups of CLA_WG_SIZE. */
#include "core/merge.clh"

/* Work-items of a head, and heads of a group: merge_heads() of src/kernels counts them as well. */
#define CLA_HEAD_ITEMS ((uint)min(CLA_WG_SIZE, CLA_RESULT_DIM / CLA_MERGE_DIMS))
#define CLA_MERGE_HEADS ((uint)CLA_WG_SIZE / CLA_HEAD_ITEMS)

CLA_KERNEL clattn_merge(CLA_PARAMS) {
  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint num_heads = (uint)call.num_kv_heads * CLA_GROUP;
  const uint group = (uint)get_group_id(0);
  const uint chunks = (num_heads + CLA_MERGE_HEADS - 1) / CLA_MERGE_HEADS;
  const uint work_item = (uint)get_local_id(0);
  const uint head = group % chunks * CLA_MERGE_HEADS + work_item / CLA_HEAD_ITEMS;
  const ClaMergeItem item =
      ((__global const ClaMergeItem*)(meta + call.entries_at))[group / chunks];
  /* Padding of a recorded step, work-items and heads beyond the last one. */
  if (item.num_splits == 0 || work_item >= CLA_MERGE_HEADS * CLA_HEAD_ITEMS || head >= num_heads)
    return;
  const ClaSplits splits = {(ulong)item.partial_row * num_heads + head,
                            (ulong)item.split_stride * num_heads, item.num_splits};
  const ClaResults results = CLA_RESULTS;
  for (uint dim = work_item % CLA_HEAD_ITEMS * CLA_MERGE_DIMS; dim < CLA_RESULT_DIM;
       dim += CLA_HEAD_ITEMS * CLA_MERGE_DIMS)
    cla_merge_dims(&opt, &results, &splits, item.out_row, head, dim);
}
