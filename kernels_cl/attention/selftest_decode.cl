/* tile/selftest_unit.cl for a unit of the contract for few rows (tile/CONTRACT.md): the same
   products of small integers, by the functions that decode_mma.cl and mla_mma.cl call.

     S = Q K^T     of a tile of queries, from registers that hold keys of a cache
     O = S V       S rounded to 16 bits on its way
     the largest element and the sum of each row of S, S made step by step as of latent rows

   A lane has the maps that belong to CLA_HEAD_DIM. Warps that share keys, as wide heads may want,
   are given the same matrices.

   CLA_WG_SIZE   2 * CLA_LANES
   CLA_HEAD_DIM  a multiple of 32, up to 128
   CLA_Q_DTYPE   1 f16, 2 bf16; CLA_KV_DTYPE the same */
#define CLA_BLOCK_ROWS CLA_TILE_ROWS
#define CLA_BLOCK_KV CLA_TILE_KEYS
#define CLA_GROUP 1
#define CLA_HEADS_PER_ITEM 1
#define CLA_HEAD_CHUNKS 1
#define CLA_PAGE_SIZE 16
#include "attention/decode_tiles.clh"

#if CLA_WG_SIZE != 2 * CLA_LANES
#error "the unit has other lanes than the host believes"
#endif
#define CLA_ELEMENT(set, matrix, row, column, size) \
  ((((set)*64 + (matrix)*16384 + (row)*128 + (column) + seed) * 2654435761u >> 20) % (size))
/* Behind the results: Q, K and V of each set of matrices, [rows or keys][HEAD_DIM]. */
#define CLA_MATRICES_AT 8192
#define CLA_STEP_DIMS (8 * CLA_STEP_UNITS)
#define CLA_KEY_STRIDE (CLA_DIM_UNITS | 1)

static inline void cla_fill(__global uint4* to, uint set, uint matrix, uint rows, uint size,
                            uint seed) {
  for (uint i = (uint)get_local_id(0); i < rows * CLA_DIM_UNITS; i += CLA_WG_SIZE) {
    uint pairs[4];
    for (uint p = 0; p < 4; ++p) {
      const uint dim = i % CLA_DIM_UNITS * 8 + 2 * p;
      const uint first = CLA_ELEMENT(set, matrix, i / CLA_DIM_UNITS, dim, size);
      const uint second = CLA_ELEMENT(set, matrix, i / CLA_DIM_UNITS, dim + 1, size);
      pairs[p] = cla_mma_pair((float)first, (float)second);
    }
    to[i] = vload4(0, pairs);
  }
}

/* S of the lane, made as mla_mma.cl makes it: K comes from local memory, queries to registers. */
static inline void cla_score_by_steps(float* scores, __global const CLA_Q_T* q,
                                      __local const uint4* keys, uint lane) {
  keys += cla_k_key(lane) * CLA_KEY_STRIDE + cla_k_unit(lane);
  for (uint i = 0; i < CLA_C_SIZE; ++i) scores[i] = 0.0f;
  for (uint step = 0; step < CLA_DIM_UNITS / CLA_STEP_UNITS; ++step) {
    ClaQuery query;
#pragma unroll
    for (uint r = 0; r < CLA_QUERY_ROWS; ++r) {
      const uint row = CLA_QUERY_ROWS == 1 ? cla_query_row(lane) : r;
      cla_set_query(&query, r, q + row * CLA_HEAD_DIM + step * CLA_STEP_DIMS + cla_query_dim(lane),
                    0u);
    }
    cla_multiply_step(scores, keys + step * CLA_STEP_UNITS, query);
  }
}

/* acc += P V of the lane, its units of V from the cache as decode_mma.cl loads them. */
static inline void cla_add_products(float* acc, const float* scores, __global const CLA_KV_T* v,
                                    long own, uint first_unit, uint lane) {
  ClaKvRaw raw[CLA_V_LOADS];
  cla_load_v(raw, v + 8 * cla_first_v_unit(first_unit, lane), own, first_unit, lane);
#if CLA_FEW_REGISTERS
  cla_multiply_pv(acc, scores, raw, lane);
#else
  uint words[4 * CLA_V_LOADS];
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i) vstore4(cla_kv_words(raw[i]), i, words);
  cla_multiply_pv(acc, scores, words, lane);
#endif
}

CLA_KERNEL clattn_selftest_unit(
    __global float* restrict result,  // as of tile/selftest_unit.cl, and from MATRICES_AT matrices
    uint seed) {
  __local uint4 queries[2][CLA_QUERY_LOADS * CLA_LANES];
  __local uint4 rows_of_k[2][CLA_TILE_KEYS * CLA_KEY_STRIDE];
  const uint lane = cla_lane();
  const uint warp = cla_warp();
  const uint set = cla_warp_keys(warp);
  const uint first_unit = cla_warp_unit(warp);
  __global uint4* matrices = (__global uint4*)(result + CLA_MATRICES_AT);
  const uint set_units = (CLA_TILE_ROWS + 2 * CLA_TILE_KEYS) * CLA_DIM_UNITS;
  const uint k_at = CLA_TILE_ROWS * CLA_DIM_UNITS, v_at = k_at + CLA_TILE_KEYS * CLA_DIM_UNITS;
  for (uint i = 0; i < CLA_KEY_WARPS; ++i) {
    cla_fill(matrices + i * set_units, i, 0, CLA_TILE_ROWS, 2, seed);
    cla_fill(matrices + i * set_units + k_at, i, 1, CLA_TILE_KEYS, 2, seed);
    cla_fill(matrices + i * set_units + v_at, i, 2, CLA_TILE_KEYS, 4, seed);
  }
  barrier(CLK_GLOBAL_MEM_FENCE); /* matrices written -> read */

  __global const uint4* units = matrices + set * set_units;
  __global const CLA_KV_T* k = (__global const CLA_KV_T*)(units + k_at);
  __global const CLA_KV_T* v = (__global const CLA_KV_T*)(units + v_at);
  for (uint j = 0; j < CLA_QUERY_LOADS; ++j) {
    const uint unit = cla_k_unit(lane) + j * CLA_K_SPREAD;
    queries[warp][j * CLA_LANES + lane] =
        unit < CLA_DIM_UNITS ? units[cla_query_row(lane) * CLA_DIM_UNITS + unit] : (uint4)(0u);
  }
  for (uint i = lane; i < CLA_TILE_KEYS * CLA_DIM_UNITS; i += CLA_LANES)
    rows_of_k[warp][i / CLA_DIM_UNITS * CLA_KEY_STRIDE + i % CLA_DIM_UNITS] = units[k_at + i];
  barrier(CLK_LOCAL_MEM_FENCE); /* queries and keys written -> read */

  float scores[CLA_C_SIZE], steps[CLA_C_SIZE], acc[CLA_O_SIZE];
  for (uint i = 0; i < CLA_O_SIZE; ++i) acc[i] = 0.0f;
  const long own = (long)cla_own_key(lane) * CLA_HEAD_DIM;
#if CLA_FEW_REGISTERS
  cla_multiply_qk(scores, k + 8 * cla_k_unit(lane) + own, queries[warp], lane);
#else
  ClaKvRaw k_raw[CLA_K_LOADS];
  cla_load_k(k_raw, k + 8 * cla_k_unit(lane), own, lane);
  cla_multiply_qk(scores, k_raw, queries[warp], lane);
#endif
  cla_score_by_steps(steps, (__global const CLA_Q_T*)units, rows_of_k[warp], lane);
  cla_add_products(acc, scores, v, own, first_unit, lane);

  if (get_local_id(0) == 0) {
    vstore4((float4)(CLA_TILE_ROWS, CLA_TILE_KEYS, CLA_HEAD_DIM, CLA_HEAD_DIM), 0, result);
    result[4] = CLA_KEY_WARPS;
  }
  __global float* to_s = result + 5 + set * CLA_TILE_ROWS * (CLA_TILE_KEYS + CLA_HEAD_DIM + 2);
  __global float* to_o = to_s + CLA_TILE_ROWS * CLA_TILE_KEYS;
  __global float* to_maxima = to_o + CLA_TILE_ROWS * CLA_HEAD_DIM;
  for (uint r = 0; r < CLA_C_ROWS; ++r) {
    const uint row = cla_lane_row(r, lane);
    float largest = 0.0f, sum = 0.0f;
    for (uint i = 0; i < CLA_C_COLUMNS; ++i) {
      const uint key = cla_c_column(lane) + CLA_C_COLUMN_STEP(i);
      to_s[row * CLA_TILE_KEYS + key] = scores[i * CLA_C_ROWS + r];
      largest = fmax(largest, steps[i * CLA_C_ROWS + r]);
      sum += steps[i * CLA_C_ROWS + r];
    }
    for (uint u = 0; u < CLA_O_UNITS; ++u) {
      const uint unit = first_unit + cla_o_unit(lane) + CLA_OWN_UNIT(u);
      for (uint e = 0; e < 8 && unit < CLA_DIM_UNITS; ++e)
        to_o[row * CLA_HEAD_DIM + 8 * unit + e] = acc[CLA_ACC(r, u, e)];
    }
    largest = cla_row_max(largest);
    sum = cla_row_sum(sum);
    if (!cla_leads_row(lane)) continue;
    to_maxima[row] = largest;
    to_maxima[CLA_TILE_ROWS + row] = sum;
  }
}
