/* Zeroes rows of an output that belong to no token.

   The unit of work is eight elements; a row is row_units of them. Zero bits are 0 in every type.

   macro              unit        legal values
   CLA_ELEMENT_BYTES  bytes       1, 2, 4: of the output's type
   CLA_WG_SIZE        work-items  >= 1 */
#if !defined(CLA_WG_SIZE) || !defined(CLA_ELEMENT_BYTES)
#error "zero_rows.cl needs CLA_WG_SIZE and CLA_ELEMENT_BYTES"
#endif
#if CLA_ELEMENT_BYTES == 1
typedef uchar ClaBits;
typedef uchar8 ClaBits8;
#elif CLA_ELEMENT_BYTES == 2
typedef ushort ClaBits;
typedef ushort8 ClaBits8;
#elif CLA_ELEMENT_BYTES == 4
typedef uint ClaBits;
typedef uint8 ClaBits8;
#else
#error "CLA_ELEMENT_BYTES must be 1, 2 or 4"
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_zero_rows(
    __global ClaBits* restrict out, /* [rows, row_units * 8], rows contiguous */
    long offset,                    /* elements before the first row */
    long token_stride,              /* elements */
    int num_rows,                   /* rows */
    int row_units) {                /* units of 8 elements */
  const uint units = (uint)row_units;
  const ulong count = (ulong)num_rows * units;
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const ulong at = (ulong)offset + unit / units * (ulong)token_stride + unit % units * 8;
    vstore8((ClaBits8)(0), 0, out + at);
  }
}
