/* The ceiling of NVIDIA's tensor cores: eight independent chains of 16 x 16 by 16 x 8 products in
   each warp, operands in registers.

   macro        | unit       | legal values
   CLA_WG_SIZE  | work-items | a multiple of 32
   CLA_Q_DTYPE  | -          | 1 f16, 2 bf16 (tile/sm80_instructions.clh); CLA_KV_DTYPE the same */
#include "tile/sm80_instructions.clh"

#ifndef CLA_WG_SIZE
#error "CLA_WG_SIZE must be defined"
#endif

#define CLA_CHAINS 8

/* Operands of 2^-12 make each element steps * 16 * 2^-24, exactly. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_mma(
    int steps, uint operand,        // a pair of equal elements
    __global float* restrict sums)  // [work-items]: of all the chains' elements
{
  const uint4 a = (uint4)(operand);
  const uint2 b = (uint2)(operand);
  float c[CLA_CHAINS][4];
#pragma unroll
  for (int i = 0; i < CLA_CHAINS; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < CLA_CHAINS; ++i) cla_mma(c[i], a, b);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < CLA_CHAINS; ++i) sum += (c[i][0] + c[i][1]) + (c[i][2] + c[i][3]);
  sums[get_global_id(0)] = sum;
}
