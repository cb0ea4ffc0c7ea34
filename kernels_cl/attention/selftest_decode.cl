/* Self-test of a unit of the contract for few rows (tile/CONTRACT.md), as tile/selftest_unit.cl for
   others: products of small integers by functions that decode_mma.cl and mla_mma.cl call.

     S = Q K^T     of a tile of queries, from registers that hold keys of a cache
     O = S V       S rounded to 16 bits on its way
     the largest element and the sum of each row of S, computed in steps as for latent rows

   Lane maps depend on CLA_HEAD_DIM. Warps that share keys, as with wide heads, get the same
   matrices. Not tested: several tiles of rows per warp, and heads above 128.

   CLA_WG_SIZE   2 * CLA_LANES
   CLA_HEAD_DIM  a multiple of 32, up to 128
   CLA_Q_DTYPE   1 f16, 2 bf16
   CLA_KV_DTYPE  CLA_Q_DTYPE, 4 e5m2 (f16 queries) or 5 int8 */
#define CLA_BLOCK_ROWS CLA_TILE_ROWS
#define CLA_BLOCK_KV CLA_TILE_KEYS
#define CLA_GROUP 1
#define CLA_HEADS_PER_ITEM 1
#define CLA_HEAD_CHUNKS 1
#define CLA_PAGE_SIZE 16
#include "attention/decode_tiles.clh"
#include "tile/selftest_element.clh"

#if CLA_WG_SIZE != 2 * CLA_LANES
#error "CLA_WG_SIZE must be 2 * CLA_LANES"
#endif
/* Word of `result` from which Q, K and V of each set lie, [rows or keys][HEAD_DIM] each. */
#define CLA_MATRICES_AT 8192
#define CLA_STEP_DIMS (8 * CLA_STEP_UNITS)
#define CLA_KEY_STRIDE (CLA_DIM_UNITS | 1)

/* Eight elements of a matrix, of the queries' type. */
static inline uint4 cla_matrix_unit(uint set, uint matrix, uint unit, uint size, uint seed) {
  uint pairs[4];
  for (uint p = 0; p < 4; ++p) {
    const uint dim = unit % CLA_DIM_UNITS * 8 + 2 * p;
    const uint first = CLA_ELEMENT(set, matrix, unit / CLA_DIM_UNITS, dim, size);
    const uint second = CLA_ELEMENT(set, matrix, unit / CLA_DIM_UNITS, dim + 1, size);
    pairs[p] = cla_mma_pair((float)first, (float)second);
  }
  return vload4(0, pairs);
}

/* K or V, by the work-items of the group. */
static inline void cla_fill_cache(__global CLA_KV_T* to, uint set, uint matrix, uint size,
                                  uint seed) {
  for (uint i = (uint)get_local_id(0); i < CLA_TILE_KEYS * CLA_DIM_UNITS; i += CLA_WG_SIZE) {
#if CLA_KV_DTYPE == 5
    char bytes[8];
    for (uint e = 0; e < 8; ++e)
      bytes[e] = (char)CLA_ELEMENT(set, matrix, i / CLA_DIM_UNITS, i % CLA_DIM_UNITS * 8 + e, size);
    vstore8(as_uchar8(vload8(0, bytes)), i, (__global uchar*)to);
#elif CLA_KV_QUANT /* e5m2 is the upper half of an f16 */
    const ushort8 halves = as_ushort8(cla_matrix_unit(set, matrix, i, size, seed));
    vstore8(convert_uchar8(halves >> (ushort)8), i, (__global uchar*)to);
#else
    ((__global uint4*)to)[i] = cla_matrix_unit(set, matrix, i, size, seed);
#endif
  }
}

/* S of the lane as mla_mma.cl computes it: K from local memory, queries in registers. */
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

/* acc += P V; the lane's units of V are loaded as decode_mma.cl loads them. */
static inline void cla_add_products(float* acc, const float* scores, __global const CLA_KV_T* v,
                                    long own, uint first_unit, uint lane) {
  ClaKvRaw raw[CLA_V_LOADS];
  cla_load_v(raw, v + 8 * cla_first_v_unit(first_unit, lane), own, first_unit, lane);
#if CLA_FEW_REGISTERS
  cla_multiply_pv(acc, scores, raw, lane);
#else
  uint words[CLA_V_WORDS];
  cla_v_words(words, raw);
  cla_multiply_pv(acc, scores, words, lane);
#endif
}

CLA_KERNEL clattn_selftest_unit(__global float* restrict result,  // as in tile/selftest_unit.cl;
                                                                  // matrices from MATRICES_AT on
                                uint seed) {
  __local uint4 queries[2][CLA_QUERY_LOADS * CLA_LANES];
  __local uint4 keys[2][CLA_TILE_KEYS * CLA_KEY_STRIDE];
  const uint lane = cla_lane();
  const uint warp = cla_warp();
  const uint set = cla_warp_keys(warp);
  const uint first_unit = cla_warp_unit(warp);
  __global uint4* matrices = (__global uint4*)(result + CLA_MATRICES_AT);
  const uint set_units = (CLA_TILE_ROWS + 2 * CLA_TILE_KEYS) * CLA_DIM_UNITS;
  const uint k_at = CLA_TILE_ROWS * CLA_DIM_UNITS, v_at = k_at + CLA_TILE_KEYS * CLA_DIM_UNITS;
  for (uint i = 0; i < CLA_KEY_WARPS; ++i) {
    __global uint4* own = matrices + i * set_units;
    for (uint unit = (uint)get_local_id(0); unit < k_at; unit += CLA_WG_SIZE)
      own[unit] = cla_matrix_unit(i, 0, unit, 2, seed);
    cla_fill_cache((__global CLA_KV_T*)(own + k_at), i, 1, 2, seed);
    cla_fill_cache((__global CLA_KV_T*)(own + v_at), i, 2, 4, seed);
  }
  barrier(CLK_GLOBAL_MEM_FENCE); /* matrices written -> read */

  __global const uint4* q = matrices + set * set_units;
  __global const CLA_KV_T* k = (__global const CLA_KV_T*)(q + k_at);
  __global const CLA_KV_T* v = (__global const CLA_KV_T*)(q + v_at);
  for (uint j = 0; j < CLA_QUERY_LOADS; ++j) {
    const uint unit = cla_k_unit(lane) + j * CLA_K_SPREAD;
    queries[warp][j * CLA_LANES + lane] =
        unit < CLA_DIM_UNITS ? q[cla_query_row(lane) * CLA_DIM_UNITS + unit] : (uint4)(0u);
  }
  for (uint i = lane; i < CLA_TILE_KEYS * CLA_DIM_UNITS; i += CLA_LANES)
    keys[warp][i / CLA_DIM_UNITS * CLA_KEY_STRIDE + i % CLA_DIM_UNITS] =
        cla_kv_words(cla_kv_raw_load(k + 8 * i));
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
  cla_score_by_steps(steps, (__global const CLA_Q_T*)q, keys[warp], lane);
  cla_add_products(acc, scores, v, own, first_unit, lane);
#if CLA_FEW_REGISTERS           /* the same of values in local memory */
  barrier(CLK_LOCAL_MEM_FENCE); /* keys read -> overwritten by values */
  for (uint i = lane; i < CLA_TILE_KEYS * CLA_DIM_UNITS; i += CLA_LANES)
    keys[warp][i / CLA_DIM_UNITS * CLA_KEY_STRIDE + i % CLA_DIM_UNITS] =
        cla_kv_words(cla_kv_raw_load(v + 8 * i));
  barrier(CLK_LOCAL_MEM_FENCE); /* values written -> read */
  float latent[CLA_O_SIZE];
  for (uint i = 0; i < CLA_O_SIZE; ++i) latent[i] = 0.0f;
  cla_multiply_latent_pv(latent, scores, keys[warp] + cla_first_v_unit(first_unit, lane),
                         CLA_KEY_STRIDE);
  for (uint i = 0; i < CLA_O_SIZE; ++i) acc[i] = latent[i] == acc[i] ? acc[i] : NAN;
#endif

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
      if (first_unit == 0) to_s[row * CLA_TILE_KEYS + key] = scores[i * CLA_C_ROWS + r];
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
    if (first_unit != 0 || !cla_leads_row(lane)) continue;
    to_maxima[row] = largest;
    to_maxima[CLA_TILE_ROWS + row] = sum;
  }
}
