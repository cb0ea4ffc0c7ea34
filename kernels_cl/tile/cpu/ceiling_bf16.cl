/* The rate of products of bf16 matrices by a unit of x86: 32 x 256 by 256 x 32, `times` times added
   up. Sums go through memory in between, as they do in attention. */
#include "tile/unit.clh"

#define CLA_DEPTH 256
#define CLA_BF16(number) ((ushort)(as_uint((float)(number)) >> 16))

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void clattn_ceiling_bf16(
    int times, __global float* restrict sums) { /* [groups, columns / 16, 32 rows, 16 columns] */
  ushort a[32 * CLA_DEPTH] __attribute__((aligned(64)));
  ushort b[2 * CLA_DEPTH * 16] __attribute__((aligned(64))); /* [columns / 16][pair][16][2] */
  float c[32 * 32] __attribute__((aligned(64)));
  for (int k = 0; k < CLA_DEPTH; ++k)
    for (int i = 0; i < 32; ++i) {
      a[i * CLA_DEPTH + k] = CLA_BF16((5 * i + 3 * k) % 7 - 3);
      b[(i / 16 * CLA_DEPTH / 2 + k / 2) * 32 + i % 16 * 2 + k % 2] =
          CLA_BF16((3 * i + 5 * k) % 11 - 5);
    }
  for (int i = 0; i < 32 * 32; ++i) c[i] = 0.0f;
  cla_open_tiles();
  for (int i = 0; i < times; ++i)
    cla_multiply_block(a, 2 * CLA_DEPTH, b, 32 * CLA_DEPTH, c, 2048, 32, CLA_DEPTH / CLA_TILE_DEPTH,
                       1);
  cla_close_tiles();
  for (int i = 0; i < 32 * 32; ++i) sums[(int)get_group_id(0) * 32 * 32 + i] = c[i];
}
