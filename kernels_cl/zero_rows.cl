/* Zeroes rows of an output that belong to no token.

   The unit of work is eight elements; a row is row_units of them.

   macro         unit        legal values
   CLA_Q_DTYPE   -           0 f32, 1 f16, 2 bf16: the output
   CLA_WG_SIZE   work-items  >= 1 */
#if !defined(CLA_WG_SIZE) || !defined(CLA_Q_DTYPE)
#error "zero_rows.cl needs CLA_WG_SIZE and CLA_Q_DTYPE"
#endif
#define CLA_KV_DTYPE CLA_Q_DTYPE
#include "lib/storage.clh"

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_zero_rows(
    __global CLA_Q_T* restrict out, /* [rows, row_units * 8], rows contiguous */
    long offset,                    /* elements before the first row */
    long token_stride,              /* elements */
    int num_rows,                   /* rows */
    int row_units) {                /* units of 8 elements */
  const uint units = (uint)row_units;
  const ulong count = (ulong)num_rows * units;
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const ulong at = (ulong)offset + unit / units * (ulong)token_stride + unit % units * 8;
    CLA_Q_STORE4((float4)(0.0f), out + at);
    CLA_Q_STORE4((float4)(0.0f), out + at + 4);
  }
}
