/* The ceiling of warpgroup products, compute capability 9.0: two warpgroups of a group multiply 64
   rows each by the same 128 columns, 64 steps of the sum at a time, both operands in local memory,
   over and over.

     D[r][n] = turns * sum_k A[r][k] B[n][k]     A = (5 r + 3 k) mod 7 - 3, B = (3 n + 5 k) mod 11 -
   5

   Integers: every sum is exact as long as turns * 64 * 15 < 2^24.

   macro        | unit       | legal values
   CLA_WG_SIZE  | work-items | 256
   CLA_Q_DTYPE  | -          | 1 f16 (tile/sm90.clh); CLA_KV_DTYPE the same

   Local memory: 32 KiB. */
#include "tile/sm90.clh"
#include "tile/sm90_stages.clh"

#if CLA_WG_SIZE != 2 * CLA_WARPGROUP
#error "CLA_WG_SIZE must be 256"
#endif

#define CLA_ROWS 128u    /* of a group */
#define CLA_COLUMNS 128u /* of the product */
#define CLA_STEPS 64u    /* of the sum: a row of a tile */

/* Writes (row_factor * row + step_factor * step) mod modulus - modulus / 2 to a tile. */
static inline void cla_fill_tile(__local uint4* tile, uint num_rows, uint first_row,
                                 uint row_factor, uint step_factor, uint modulus) {
  for (uint i = (uint)get_local_id(0); i < num_rows * CLA_STEPS; i += CLA_WG_SIZE) {
    const uint row = i / CLA_STEPS;
    const uint step = i % CLA_STEPS;
    const uint residue = (row_factor * (first_row + row) + step_factor * step) % modulus;
    __local half* unit = (__local half*)(tile + cla_swizzled(row, step / 8, num_rows));
    vstore_half((float)residue - (float)(modulus / 2), step % 8, unit);
  }
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_wgmma(
    int turns,                         /* a multiple of 4 */
    __global float* restrict products) /* [groups, 128, 128] */
{
  __local uint4 a_tiles[CLA_ROWS * CLA_STEPS / 8] __attribute__((aligned(1024)));
  __local uint4 b_tile[CLA_COLUMNS * CLA_STEPS / 8] __attribute__((aligned(1024)));
  const uint lid = (uint)get_local_id(0);
  const uint own = lid / CLA_WARPGROUP * 64u; /* the warpgroup's first row */
  for (uint first = 0; first < CLA_ROWS; first += 64u)
    cla_fill_tile(a_tiles + first * CLA_STEPS / 8, 64u, first, 5u, 3u, 7u);
  cla_fill_tile(b_tile, CLA_COLUMNS, 0u, 3u, 5u, 11u);
  cla_fence_for_products();
  barrier(CLK_LOCAL_MEM_FENCE); /* tiles written -> multiplied */

  const uint a = cla_shuffle_from(cla_tile_descriptor(a_tiles + own * CLA_STEPS / 8, 64u), 0);
  const uint b = cla_shuffle_from(cla_tile_descriptor(b_tile, CLA_COLUMNS), 0);
  float c[64];
#pragma unroll
  for (uint i = 0; i < 64; ++i) c[i] = 0.0f;
  for (int turn = 0; turn < turns; turn += 4) {
    cla_wgmma_fence();
#pragma unroll
    for (uint step = 0; step < 16; ++step)
      cla_wgmma_next_n128(c, a + CLA_NEXT_COLUMNS(step % 4, 64u),
                          b + CLA_NEXT_COLUMNS(step % 4, CLA_COLUMNS));
    cla_wgmma_commit();
    cla_wgmma_wait_all_but_1();
  }
  cla_wgmma_wait_all();
  CLA_PIN(c, 64);

  const uint lane = lid % 32u;
  const uint row = lid / 32u * 16u + lane / 4u;
  __global float* out = products + (get_group_id(0) * CLA_ROWS + row) * (size_t)CLA_COLUMNS;
#pragma unroll
  for (uint n = 0; n < 16; ++n) {
    const uint column = 8u * n + 2u * (lane % 4u);
    vstore2((float2)(c[4 * n], c[4 * n + 1]), 0, out + column);
    vstore2((float2)(c[4 * n + 2], c[4 * n + 3]), 0, out + 8u * CLA_COLUMNS + column);
  }
}
