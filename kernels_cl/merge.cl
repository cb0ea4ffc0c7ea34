/* Joins the partial results of query tokens whose key range was split.

     out[row, head, :] = sum_s w_s partial_out[s, :] / sum w     w = 2^(lse2 - max lse2)
     lse[row, head]    = ln 2 * (max lse2 + log2(sum w))

   Maximum and denominator also take in the head's sink, if there are sinks: partial results do not.
   Loops: over the splits for the maximum and the sum, then over the own dims, then over the splits
   in ascending order, so that bits do not depend on timing. A split without a denominator
   (lse2 = CLA_NEG_BIG) adds its partial output with the weight 0: zeros if it saw no key, but NaN
   if it saw keys of logit -inf whose V is inf or NaN, as one pass over all keys has it. If none has
   a denominator, the output is that sum and the LSE -inf. One group serves one head of one merge
   item; no barriers.

   macro          unit        legal values
   CLA_HEAD_DIM   elements    8 ... 512, steps of 8
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16: out
   CLA_KV_DTYPE   -           0 ... 5; not used
   CLA_WG_SIZE    work-items  1 (CPU): takes a whole head; or more
   CLA_VEC        elements    16 or 8: eight a work-item and turn; 4 or 0: four
   CLA_SINK       -           1: a sink a head (lib/options.clh)
   CLA_OUT_FP8    -           1: also writes fp8 (lib/options.clh)

   Launch: num_merges * num_heads groups of CLA_WG_SIZE. */
#if !defined(CLA_VEC)
#error "merge.cl needs CLA_VEC"
#endif
#include "lib/results.clh"

#if CLA_WG_SIZE == 1
#define CLA_QUADS (CLA_HEAD_DIM / 4) /* weights are worked out once: 2^x of one number is slow */
#elif CLA_VEC >= 8
#define CLA_QUADS 2
#else
#define CLA_QUADS 1
#endif

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
  const uint head = group % (uint)num_heads;
  const ClaMergeItem item =
      ((__global const ClaMergeItem*)(meta + merges_at))[group / (uint)num_heads];
  if (item.num_splits == 0) return; /* padding of a recorded step */
  const ulong first = (ulong)item.partial_row * (uint)num_heads + head;
  const ulong stride = (ulong)item.split_stride * (uint)num_heads;

  ClaDenominator all;
  all.max_log2 = CLA_NEG_BIG;
  all.sum = 0.0f;
  for (int s = 0; s < item.num_splits; ++s)
    all.max_log2 = fmax(all.max_log2, partial_lse2[first + (ulong)s * stride]);
  for (int s = 0; s < item.num_splits; ++s) {
    const float lse2 = partial_lse2[first + (ulong)s * stride];
    if (lse2 != CLA_NEG_BIG) all.sum += exp2(lse2 - all.max_log2);
  }
  const float max_lse2 = all.max_log2; /* of the splits */
  const float rescale = cla_join_sink(&opt, (uint)num_heads, head, &all);
  const float inverse = rescale * cla_inverse_sum(all.sum);

  const ulong row_at = (ulong)item.out_row * (uint)num_heads + head;
  __global CLA_Q_T* to =
      out + out_offset + (long)item.out_row * out_token_stride + (long)head * CLA_HEAD_DIM;
  for (uint dim = (uint)get_local_id(0) * 4 * CLA_QUADS; dim < CLA_HEAD_DIM;
       dim += CLA_WG_SIZE * 4 * CLA_QUADS) {
    float4 acc[CLA_QUADS];
    for (uint i = 0; i < CLA_QUADS; ++i) acc[i] = (float4)(0.0f);
    for (int s = 0; s < item.num_splits; ++s) {
      const ulong row = first + (ulong)s * stride;
      const float4 weight = (float4)(exp2(partial_lse2[row] - max_lse2) * inverse);
      __global const float* from = partial_out + row * CLA_HEAD_DIM + dim;
      for (uint i = 0; i < CLA_QUADS; ++i) acc[i] = mad(weight, vload4(i, from), acc[i]);
    }
    for (uint i = 0; i < CLA_QUADS; ++i)
      cla_store_result(&opt, acc[i], to + dim + 4 * i, row_at * CLA_HEAD_DIM + dim + 4 * (ulong)i);
  }
  if (write_lse && get_local_id(0) == 0) {
    lse[row_at] = cla_natural_lse(cla_lse2(all.max_log2, all.sum));
  }
}
