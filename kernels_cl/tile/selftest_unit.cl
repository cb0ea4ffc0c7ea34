/* Asks a unit of the contract (tile/CONTRACT.md) for products of small integers, which are exact,
   and gives every element to the host to compare. A compiler for another device must refuse the
   unit's header.

     S = A K^T     of one tile of A, and as many keys as both products want
     O = S V       S rounded to 16 bits on its way
     the largest element and the sum of each row of S

   A second kernel asks whether products keep subnormal elements.

   Each of two warps has matrices of its own: element (row, column) of matrix m of warp w is
   CLA_ELEMENT(w, m, row, column, size).

   CLA_WG_SIZE   2 * CLA_LANES
   CLA_Q_DTYPE   1 f16, 2 bf16; CLA_KV_DTYPE the same */
#include "tile/unit.clh"

#include "core/call.clh"
#include "tile/selftest_element.clh"
#include "tile/warps.clh"

#if CLA_WG_SIZE != 2 * CLA_LANES
#error "CLA_WG_SIZE must be 2 * CLA_LANES"
#endif
#define CLA_DIMS (CLA_B_TILES * CLA_TILE_COLUMNS)
#define CLA_KEYS (CLA_TILE_DEPTH > CLA_DIMS ? CLA_TILE_DEPTH : CLA_DIMS)
#define CLA_STRIDE (CLA_TILE_DEPTH / 8 | 1) /* units of a row of A or K */

#ifdef CLA_KEY_PLACE /* values arrive with their keys side by side */
#define CLA_V_ROWS CLA_DIMS
#define CLA_V_STRIDE (CLA_KEYS / 8 | 1)
#else
#define CLA_V_ROWS CLA_KEYS
#define CLA_V_STRIDE (CLA_DIMS / 8 | 1)
#endif

/* What a unit says of a tile of keys, for one step of BLOCK_KV keys. */
#define CLA_QK_STEPS 1
#define CLA_BLOCK_KV CLA_KEYS
#ifndef CLA_KEY_UNIT
#define CLA_KEY_UNIT(key, unit) ((key)*CLA_STRIDE + (unit))
#define CLA_KEY_TILE_UNITS (CLA_KEYS * CLA_STRIDE)
#endif

static inline void cla_set_element(__local uint4* row, uint column, uint value) {
  ((__local ushort*)row)[column] = (ushort)cla_mma_pair((float)value, 0.0f);
}

static inline void cla_fill(__local uint4* a, __local uint4* k, __local uint4* v, uint warp,
                            uint lane, uint seed) {
  for (uint i = lane; i < CLA_TILE_ROWS * CLA_TILE_DEPTH; i += CLA_LANES) {
    const uint row = i / CLA_TILE_DEPTH, column = i % CLA_TILE_DEPTH;
    cla_set_element(a + row * CLA_STRIDE, column, CLA_ELEMENT(warp, 0, row, column, 2));
  }
  for (uint i = lane; i < CLA_KEYS * CLA_TILE_DEPTH; i += CLA_LANES) {
    const uint row = i / CLA_TILE_DEPTH, column = i % CLA_TILE_DEPTH;
    cla_set_element(k + CLA_KEY_UNIT(row, column / 8), column % 8,
                    CLA_ELEMENT(warp, 1, row, column, 2));
  }
  for (uint i = lane; i < CLA_KEYS * CLA_DIMS; i += CLA_LANES) {
    const uint key = i / CLA_DIMS, dim = i % CLA_DIMS;
    const uint value = CLA_ELEMENT(warp, 2, key, dim, 4);
#ifdef CLA_KEY_PLACE
    cla_set_element(v + dim * CLA_V_STRIDE, CLA_KEY_PLACE(key), value);
#else
    cla_set_element(v + key * CLA_V_STRIDE, dim, value);
#endif
  }
}

CLA_KERNEL clattn_selftest_unit(
    __global float* restrict result,  // TILE_ROWS, KEYS, TILE_DEPTH, DIMS, warps; then for each
                                      // S[ROWS, KEYS], O[ROWS, DIMS], maxima[ROWS], sums[ROWS]
    uint seed) {
  __local uint4 a_tile[2][CLA_TILE_ROWS * CLA_STRIDE];
  __local uint4 k_tile[2][CLA_KEY_TILE_UNITS];
  __local uint4 v_tile[2][CLA_V_ROWS * CLA_V_STRIDE];
  const uint lane = (uint)get_local_id(0) % CLA_LANES;
  const uint warp = (uint)get_local_id(0) / CLA_LANES;
  cla_fill(a_tile[warp], k_tile[warp], v_tile[warp], warp, lane, seed);
  barrier(CLK_LOCAL_MEM_FENCE); /* matrices written -> read */

  float s[CLA_KEYS / CLA_TILE_COLUMNS * CLA_C_SIZE];
  float o[CLA_B_TILES * CLA_C_SIZE];
  for (uint i = 0; i < CLA_KEYS / CLA_TILE_COLUMNS * CLA_C_SIZE; ++i) s[i] = 0.0f;
  for (uint i = 0; i < CLA_B_TILES * CLA_C_SIZE; ++i) o[i] = 0.0f;
  ClaB b[CLA_B_TILES];
  const ClaA a = cla_load_a(a_tile[warp], CLA_STRIDE, lane);
  for (uint n = 0; n < CLA_KEYS / CLA_TILE_COLUMNS; n += CLA_B_TILES) {
    cla_load_b_columns(b, k_tile[warp] + CLA_KEY_UNIT(n * CLA_TILE_COLUMNS, 0), CLA_STRIDE, lane);
    for (uint i = 0; i < CLA_B_TILES; ++i) cla_mma(s + (n + i) * CLA_C_SIZE, a, b[i]);
  }
  for (uint step = 0; step < CLA_KEYS / CLA_TILE_DEPTH; ++step) {
#ifdef CLA_KEY_PLACE
    cla_load_b_columns(b, v_tile[warp] + step * (CLA_TILE_DEPTH / 8), CLA_V_STRIDE, lane);
#else
    cla_load_b_rows(b, v_tile[warp] + step * CLA_TILE_DEPTH * CLA_V_STRIDE, CLA_V_STRIDE, lane);
#endif
    const ClaA p = cla_a_of_c(s + step * CLA_TILE_DEPTH * CLA_C_SIZE / CLA_TILE_COLUMNS);
    for (uint i = 0; i < CLA_B_TILES; ++i) cla_mma(o + i * CLA_C_SIZE, p, b[i]);
  }

  if (get_local_id(0) == 0) {
    vstore4((float4)(CLA_TILE_ROWS, CLA_KEYS, CLA_TILE_DEPTH, CLA_DIMS), 0, result);
    result[4] = 2;
  }
  __global float* own = result + 5 + warp * CLA_TILE_ROWS * (CLA_KEYS + CLA_DIMS + 2);
  for (uint r = 0; r < CLA_C_ROWS; ++r) {
    const uint row = cla_c_row(lane) + CLA_C_ROW_STEP(r);
    const float* elements = s + r * CLA_C_COLUMNS;
    float largest = 0.0f, sum = 0.0f;
    for (uint n = 0; n < CLA_KEYS / CLA_TILE_COLUMNS; ++n) {
      cla_store_c_row(own + row * CLA_KEYS + n * CLA_TILE_COLUMNS, elements + n * CLA_C_SIZE,
                      CLA_TILE_COLUMNS / 8, 1.0f, lane);
      for (uint i = 0; i < CLA_C_COLUMNS; ++i) {
        largest = fmax(largest, elements[n * CLA_C_SIZE + i]);
        sum += elements[n * CLA_C_SIZE + i];
      }
    }
    for (uint n = 0; n < CLA_B_TILES; ++n)
      cla_store_c_row(own + CLA_TILE_ROWS * CLA_KEYS + row * CLA_DIMS + n * CLA_TILE_COLUMNS,
                      o + n * CLA_C_SIZE + r * CLA_C_COLUMNS, CLA_TILE_COLUMNS / 8, 1.0f, lane);
    largest = cla_row_max(largest);
    sum = cla_row_sum(sum);
    if (!cla_leads_row(lane)) continue;
    own[CLA_TILE_ROWS * (CLA_KEYS + CLA_DIMS) + row] = largest;
    own[CLA_TILE_ROWS * (CLA_KEYS + CLA_DIMS + 1) + row] = sum;
  }
}

/* The first element of A K^T where A is of ones and K of the smallest subnormal elements: 0 from a
   unit that takes these as 0. */
CLA_KERNEL clattn_selftest_subnormals(__global float* restrict result, uint seed) {
  __local uint4 a_tile[2][CLA_TILE_ROWS * CLA_STRIDE];
  __local uint4 k_tile[2][CLA_KEY_TILE_UNITS];
  const uint lane = (uint)get_local_id(0) % CLA_LANES;
  const uint warp = (uint)get_local_id(0) / CLA_LANES;
  const uint ones = cla_mma_pair(1.0f, 1.0f);
  for (uint i = lane; i < CLA_TILE_ROWS * CLA_STRIDE; i += CLA_LANES) a_tile[warp][i] = ones;
  for (uint i = lane; i < CLA_KEY_TILE_UNITS; i += CLA_LANES) k_tile[warp][i] = 0x00010001u;
  barrier(CLK_LOCAL_MEM_FENCE); /* matrices written -> read */

  float s[CLA_C_SIZE];
  for (uint i = 0; i < CLA_C_SIZE; ++i) s[i] = 0.0f;
  ClaB b[CLA_B_TILES];
  cla_load_b_columns(b, k_tile[warp], CLA_STRIDE, lane);
  cla_mma(s, cla_load_a(a_tile[warp], CLA_STRIDE, lane), b[0]);
  if (get_local_id(0) == 0) result[0] = s[0];
}
