/* Forms in which calls bring masks and want log-sum-exps, to and from those of the other kernels.

     mask[t, key] = bit key % 8 of byte bits[t, key / 8]
     out[t, h]    = factor * lse[t, h]              factor = 1, or log2(e) for base 2

   macro        unit        legal values
   CLA_WG_SIZE  work-items  >= 1

   Launch: any number of groups; the work-items share the elements. */
#if !defined(CLA_WG_SIZE)
#error "call_forms.cl needs CLA_WG_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_unpack_mask(
    __global const uchar* restrict bits, /* [tokens, token_stride] */
    __global uchar* restrict mask,       /* [tokens, row_bytes * 8] */
    long token_stride,                   /* bytes, of bits */
    int num_tokens,                      /* tokens */
    int row_bytes) {                     /* of bits that are read */
  const uint width = (uint)row_bytes;
  const ulong count = (ulong)num_tokens * width;
  for (ulong i = get_global_id(0); i < count; i += get_global_size(0)) {
    const uchar eight = bits[i / width * (ulong)token_stride + i % width];
    vstore8(((uchar8)(eight) >> (uchar8)(0, 1, 2, 3, 4, 5, 6, 7)) & (uchar8)(1), i, mask);
  }
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_lse_form(
    __global const float* restrict lse,        /* [tokens, heads] */
    __global float* restrict out, long offset, /* elements before token 0, head 0 */
    long token_stride,                         /* elements */
    long head_stride,                          /* elements */
    int num_tokens,                            /* tokens */
    int num_heads,                             /* heads */
    float factor) {
  const uint heads = (uint)num_heads;
  const ulong count = (ulong)num_tokens * heads;
  for (ulong i = get_global_id(0); i < count; i += get_global_size(0)) {
    const ulong at =
        (ulong)offset + i / heads * (ulong)token_stride + i % heads * (ulong)head_stride;
    out[at] = lse[i] * factor;
  }
}
