/* Paged attention for many rows per key range on a unit of the contract (tile/CONTRACT.md) that
   meets values with the keys of a dim side by side (CLA_KEY_PLACE), as AMD's do: products of 16-bit
   elements, sums and softmax in f32. Probabilities are rounded to the queries' type before they
   meet V.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows against tiles of BLOCK_KV
   keys. A warp owns TILE_ROWS rows and keeps their queries, scores and accumulator in registers.
   Keys and values pass through registers, too, on their way to local memory, which holds one tile
   of each, so that several groups fit on a compute unit: while one waits at a barrier or computes
   its softmax, another one multiplies. Waves that multiply issue first, which keeps the groups a
   phase apart; inside a phase the source gives the order of loads and products, and the first loads
   of a phase may be issued during the previous one (CLA_B_EARLY).

     for each tile of keys up to the last one that any row sees
       store K, and V transposed, to local memory     (8-bit types are converted here)
       start to load K and V of the next tile         (in flight during all that follows)
       S = Q K^T
       P = 2^(S - max), O = O * 2^(old max - max) + P V

   Per tile of 32 keys with 128 dims, a wave and lane, by count:

                                  MFMA, 32 rows a wave     WMMA, 16 rows a wave
     matrix instructions          32 (32 x 32 x 8)         32 (16 x 16 x 16)
     16-byte loads, local         16                       32, on RDNA 3 64
     16-byte loads, global        4                        4, RDNA 3: 20
     exponentials                 16                       16
     registers: accumulator       64                       64
       queries, scores, stage     32 + 16 + 16             32 (RDNA 3: 16) + 16 + 16

   A group of 256 with 128 rows has 23 KiB of local memory and 16 KiB in flight. Clang 19, bf16, no
   scratch: 209 registers on gfx90a and gfx942 (two waves a SIMD, 32 KiB in flight on a compute
   unit), 198 on gfx1100, 204 on gfx1201 (seven waves). With 256 dims one wave a SIMD and
   accumulation registers on MFMA; on WMMA tiles have 16 keys, since an accumulator of 128 registers
   leaves room for no more. What else the loop needs: bench/cards/loops.txt.

   With CLA_ROW_SCALES the scales of keys and values are looked up along with their addresses, lie
   beside these in local memory, and multiply S and P (attention/tile_scales.clh).

   macro                unit        legal values, beside those of core/task.clh, tile/CONTRACT.md
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_BLOCK_ROWS       rows        TILE_ROWS * WG_SIZE / LANES
   CLA_BLOCK_KV         keys        a multiple of TILE_DEPTH and TILE_COLUMNS
   CLA_WG_SIZE          work-items  a multiple of LANES, and of BLOCK_KV at least twice

   Local memory: K of BLOCK_KV rows of HEAD_DIM elements, V of HEAD_DIM rows of BLOCK_KV, 16 B more
   for each row, and 16 B a work-item, 32 with CLA_ROW_SCALES. */
#define CLA_QK_STEPS ((CLA_HEAD_DIM + CLA_TILE_DEPTH - 1) / CLA_TILE_DEPTH)
/* Units of 16 bytes from row to row in local memory. Odd, so that eight rows lie in all banks. */
#define CLA_STEP_UNITS (CLA_TILE_DEPTH / 8)
#define CLA_K_STRIDE (CLA_STEP_UNITS * CLA_QK_STEPS | 1)
#define CLA_V_STRIDE (CLA_BLOCK_KV / 8 | 1)
/* Maxima are exchanged only if one has grown, which is rare after the first tiles. */
#define CLA_EXCHANGES(grows) cla_any_lane(grows)
#define CLA_MARK_1 (CLA_Q_DTYPE == 1 ? 0x3c00u : 0x3f80u)
#define CLA_MARK_64 (CLA_Q_DTYPE == 1 ? 0x5400u : 0x4280u)
#define CLA_MARK_4096 (CLA_Q_DTYPE == 1 ? 0x6c00u : 0x4580u)

/* Steps of Q K^T for which a lane holds queries: all, where the registers suffice. Else they are
   read from the caches again, this many at a time. */
#define CLA_HELD_STEPS (4 * CLA_A_UNITS * CLA_QK_STEPS + CLA_ACC_SIZE <= 112 ? CLA_QK_STEPS : 2)

#define CLA_V_ROWS (CLA_ACC_TILES * CLA_TILE_COLUMNS)
/* Cache addresses are looked up for WG_SIZE keys at a time, one per work-item, into a ring of twice
   that length. */
#define CLA_KEY_RING (2 * CLA_WG_SIZE)
/* A work-item's units of a tile of K, and pairs of units, of two keys, of a tile of V. */
#define CLA_KEY_UNITS (CLA_BLOCK_KV * CLA_QUERY_ROW_UNITS)
#define CLA_VALUE_PAIRS (CLA_BLOCK_KV * CLA_DIM_UNITS / 2)
#define CLA_K_LOADS ((CLA_KEY_UNITS + CLA_WG_SIZE - 1) / CLA_WG_SIZE)
#define CLA_V_LOADS ((CLA_VALUE_PAIRS + CLA_WG_SIZE - 1) / CLA_WG_SIZE)

#include "tile/unit.clh"

#include "attention/row_tiles.clh"

#include "attention/tile_scales.clh"
#include "tile/code_pairs.clh"

#if CLA_BLOCK_ROWS != CLA_TILE_ROWS * CLA_WARPS || CLA_WG_SIZE % CLA_LANES != 0 || \
    CLA_BLOCK_KV % CLA_TILE_DEPTH != 0 || CLA_BLOCK_KV % CLA_TILE_COLUMNS != 0 ||  \
    CLA_WG_SIZE % CLA_BLOCK_KV != 0 || CLA_WG_SIZE < 2 * CLA_BLOCK_KV
#error "prefill_staged.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

/* What a work-item holds of a tile on its way. */
typedef struct ClaStage {
  ClaKvRaw k[CLA_K_LOADS];
  ClaKvRaw v[CLA_V_LOADS][2];
} ClaStage;

/* Load i of K: which unit of which key; row CLA_BLOCK_KV where there is none. */
static inline ClaUnitAt cla_k_load(uint i) {
  const uint lid = (uint)get_local_id(0);
  if (CLA_WG_SIZE % CLA_QUERY_ROW_UNITS != 0)
    return cla_unit_at(lid + i * CLA_WG_SIZE, CLA_QUERY_ROW_UNITS);
  ClaUnitAt at = cla_unit_at(lid, CLA_QUERY_ROW_UNITS);
  at.row += i * (CLA_WG_SIZE / CLA_QUERY_ROW_UNITS);
  return at;
}
/* Load i of V: which unit of which pair of places of keys. Work-items side by side have pairs side
   by side, which lie so in local memory. */
static inline ClaUnitAt cla_v_load(uint i) {
  return cla_unit_at((uint)get_local_id(0) + i * CLA_WG_SIZE, CLA_BLOCK_KV / 2);
}

/* A position's place (ClaHeadRows), or 0 if no row sees it: row 0 is always readable, as the host
   binds the queries where there are no keys. */
static inline long cla_readable_key(const ClaWorkItem* item, __global const int* pages, int end,
                                    int position, long head_at, long block_stride,
                                    long token_stride) {
  return max(cla_key_at(item, pages, end, position, head_at, block_stride, token_stride), 0L);
}

/* The scales of a position, or those of end - 1 if it lies behind; the range must not be empty. */
static inline float2 cla_scales_at(const ClaOptions* opt, const ClaTask* task,
                                   __global const int* pages, int end, int position) {
#if CLA_ROW_SCALES
  const uint own = (uint)min(position, end - 1);
  return cla_row_scales(opt, cla_page_of(pages, own), own % CLA_PAGE_SIZE, task->kv_head);
#else
  return (float2)(1.0f);
#endif
}
/* Stores those of the item's key `key` in scales[2][KEY_RING], of keys and of values. */
static inline void cla_put_ring_scales(__local float* scales, uint key, float2 own) {
#if CLA_ROW_SCALES
  scales[key % CLA_KEY_RING] = own.x;
  scales[CLA_KEY_RING + key % CLA_KEY_RING] = own.y;
#endif
}

/* Starts loading a tile of K and V from the cache into registers. */
static inline void cla_start_stage(ClaStage* stage, const ClaHeadRows* keys,
                                   const ClaHeadRows* values, __local const long* key_at) {
#pragma unroll
  for (uint i = 0; i < CLA_K_LOADS; ++i) {
    const ClaUnitAt at = cla_k_load(i);
    if (CLA_KEY_UNITS % CLA_WG_SIZE != 0 && at.row >= CLA_BLOCK_KV) continue;
    stage->k[i] = cla_kv_raw_load(keys->first + cla_place_element(keys, key_at[at.row]) +
                                  CLA_KV_ROOM(8 * at.unit));
  }
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i) {
    const ClaUnitAt at = cla_v_load(i);
    if (CLA_VALUE_PAIRS % CLA_WG_SIZE != 0 && at.row >= CLA_DIM_UNITS) continue;
#pragma unroll
    for (uint p = 0; p < 2; ++p) {
      const long place = key_at[CLA_KEY_PLACE(2 * at.unit + p)];
      stage->v[i][p] = cla_kv_raw_load(values->first + cla_place_element(values, place) +
                                       CLA_KV_ROOM(8 * at.row));
    }
  }
}

/* Zeroes all keys of the tile after the first num_keys. */
static inline void cla_cut_stage(ClaStage* stage, int num_keys) {
#pragma unroll
  for (uint i = 0; i < CLA_K_LOADS; ++i)
    if ((int)cla_k_load(i).row >= num_keys) stage->k[i].bits = 0;
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i) {
#pragma unroll
    for (uint p = 0; p < 2; ++p)
      if ((int)CLA_KEY_PLACE(2 * cla_v_load(i).unit + p) >= num_keys) stage->v[i][p].bits = 0;
  }
}

/* Eight dims of two keys side by side to V^T. */
static inline void cla_store_pair(__local uint4* v_tile, uint unit, uint pair, uint4 first,
                                  uint4 second) {
  __local uint* to = (__local uint*)(v_tile + 8 * unit * CLA_V_STRIDE) + pair;
  uint a[4], b[4];
  vstore4(first, 0, a);
  vstore4(second, 0, b);
#pragma unroll
  for (uint d = 0; d < 4; ++d) {
    to[2 * d * CLA_V_STRIDE * 4] = cla_low_halves(a[d], b[d]);
    to[(2 * d + 1) * CLA_V_STRIDE * 4] = cla_high_halves(a[d], b[d]);
  }
}

/* Stores the loaded tile to local memory, V transposed. */
static inline void cla_store_stage(const ClaStage* stage, __local uint4* k_tile,
                                   __local uint4* v_tile CLA_ZEROS_PARAM) {
#pragma unroll
  for (uint i = 0; i < CLA_K_LOADS; ++i) {
    const ClaUnitAt at = cla_k_load(i);
    if (CLA_KEY_UNITS % CLA_WG_SIZE != 0 && at.row >= CLA_BLOCK_KV) continue;
    k_tile[at.row * CLA_K_STRIDE + at.unit] = CLA_KV_WORDS(stage->k[i], scales[at.row]);
  }
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i) {
    const ClaUnitAt at = cla_v_load(i);
    if (CLA_VALUE_PAIRS % CLA_WG_SIZE != 0 && at.row >= CLA_DIM_UNITS) continue;
    cla_store_pair(
        v_tile, at.row, at.unit,
        CLA_KV_WORDS(stage->v[i][0], scales[CLA_KEY_RING + CLA_KEY_PLACE(2 * at.unit)]),
        CLA_KV_WORDS(stage->v[i][1], scales[CLA_KEY_RING + CLA_KEY_PLACE(2 * at.unit + 1)]));
  }
}

/* Zeros what products meet behind the last dim: a unit of each key, rows of V^T. */
static inline void cla_staged_zero_behind(__local uint4* k_tile, __local uint4* v_tile) {
  if (CLA_STEP_UNITS * CLA_QK_STEPS != CLA_QUERY_ROW_UNITS) {
    for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_KV; i += CLA_WG_SIZE)
      k_tile[i * CLA_K_STRIDE + CLA_QUERY_ROW_UNITS] = (uint4)(0u);
  }
  for (uint i = CLA_VALUE_DIM * CLA_V_STRIDE + (uint)get_local_id(0); i < CLA_V_ROWS * CLA_V_STRIDE;
       i += CLA_WG_SIZE)
    v_tile[i] = (uint4)(0u);
}

/* The lane's row of queries, or any other, where it has none. */
typedef struct ClaQueries {
  __global const CLA_Q_T* row;
  uint signs; /* that a negative scale turns, so that the largest product gives the largest logit */
} ClaQueries;

/* Its units in the steps from `first` on. */
static inline void cla_staged_load_queries(ClaA* a, const ClaQueries* queries, uint first,
                                           uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_HELD_STEPS * CLA_A_UNITS; ++i) {
    const uint first_unit = (first + i / CLA_A_UNITS) * CLA_STEP_UNITS;
    const uint unit = first_unit + cla_a_unit(i % CLA_A_UNITS, lane);
    const int exists =
        first_unit + CLA_STEP_UNITS <= CLA_QUERY_ROW_UNITS || unit < CLA_QUERY_ROW_UNITS;
    a[i / CLA_A_UNITS].units[i % CLA_A_UNITS] =
        exists ? as_uint4(vload8(unit, queries->row)) ^ queries->signs : (uint4)(0u);
  }
}

/* Operands B being loaded. Loads are CLA_B_AHEAD before their products, and no more, for each
   takes registers. */
typedef struct ClaStagedOperands {
  ClaB b[2][CLA_B_AHEAD];
} ClaStagedOperands;

/* Loads those of products first ... first + B_AHEAD - 1 of num_tiles * num_steps; the columns of B
   are rows of `tile`. */
static inline void cla_load_operands(ClaStagedOperands* to, uint first, uint num_tiles,
                                     uint num_steps, __local const uint4* tile, uint stride,
                                     uint lane) {
#pragma unroll
  for (uint i = first; i < min(first + CLA_B_AHEAD, num_tiles * num_steps); ++i)
    cla_load_b_columns(
        &to->b[first / CLA_B_AHEAD % 2][i - first],
        tile + i % num_tiles * CLA_TILE_COLUMNS * stride + i / num_tiles * CLA_STEP_UNITS, stride,
        lane);
  CLA_KEEP_ORDER();
}

/* c[num_tiles][C_SIZE] += A B of num_steps steps; the first operands are loaded. */
static inline void cla_staged_multiply(float* c, uint num_tiles, const ClaA* a, uint num_steps,
                                       ClaStagedOperands* of, __local const uint4* tile,
                                       uint stride, uint lane) {
  const uint num = num_tiles * num_steps;
  CLA_SET_PRIORITY(1);
#pragma unroll
  for (uint first = 0; first < num; first += CLA_B_AHEAD) {
    cla_load_operands(of, first + CLA_B_AHEAD, num_tiles, num_steps, tile, stride, lane);
#pragma unroll
    for (uint i = first; i < min(first + CLA_B_AHEAD, num); ++i)
      cla_mma(c + i % num_tiles * CLA_C_SIZE, a[i / num_tiles],
              of->b[first / CLA_B_AHEAD % 2][i - first]);
    CLA_KEEP_ORDER();
  }
  CLA_SET_PRIORITY(0);
}

/* The first operands of S and of P V. */
static inline void cla_start_keys(ClaStagedOperands* of, __local const uint4* k_tile,
                                  uint first_step, uint num_steps, uint lane) {
  cla_load_operands(of, 0, CLA_SCORE_TILES, num_steps, k_tile + first_step * CLA_STEP_UNITS,
                    CLA_K_STRIDE, lane);
}
static inline void cla_staged_start_values(ClaStagedOperands* of, __local const uint4* v_tile,
                                           uint lane) {
  cla_load_operands(of, 0, CLA_ACC_TILES, CLA_KEY_STEPS, v_tile, CLA_V_STRIDE, lane);
}

/* scores[SCORE_TILES][C_SIZE] = Q K^T; `a` holds the queries of the first steps, `of` the first
   operands. */
static inline void cla_staged_multiply_qk(float* scores, ClaA* a, const ClaQueries* queries,
                                          ClaStagedOperands* of, __local const uint4* k_tile,
                                          uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_SCORE_TILES * CLA_C_SIZE; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint step = 0; step < CLA_QK_STEPS; step += CLA_HELD_STEPS) {
    if (CLA_HELD_STEPS != CLA_QK_STEPS) {
      uint again = 0; /* so that the compiler does not load them before the loop */
      CLA_KEEP_PLACE(again);
      const ClaQueries here = {queries->row + again, queries->signs};
      cla_staged_load_queries(a, &here, step, lane);
    }
    const uint num_steps = min(CLA_HELD_STEPS, CLA_QK_STEPS - (int)step);
    if (step > 0) cla_start_keys(of, k_tile, step, num_steps, lane);
    cla_staged_multiply(scores, CLA_SCORE_TILES, a, num_steps, of, k_tile + step * CLA_STEP_UNITS,
                        CLA_K_STRIDE, lane);
  }
}

/* Whether a tile of values holds what must not meet a row that does not see it. The same for a
   warp. */
static inline int cla_staged_values_overflow(__local const uint4* v_tile, uint lane) {
  int any = 0;
  for (uint i = lane; i < CLA_VALUE_DIM * (CLA_BLOCK_KV / 8); i += CLA_LANES) {
    const ClaUnitAt at = cla_unit_at(i, CLA_BLOCK_KV / 8);
    any |= cla_unit_overflows(v_tile[at.row * CLA_V_STRIDE + at.unit]);
  }
  return cla_any_lane(any);
}

/* Infinite and NaN values become marks, whose sums over keys tell which of them a row sees: 1 for
   infinity, 64, more than there are keys in a tile, for -infinity, 4096 for NaN. */
static inline uint cla_mark_half(uint bits) {
  const uint exponent = CLA_MMA_EXPONENTS & 0xffffu;
  const uint infinity = bits > 0x7fffu ? CLA_MARK_64 : CLA_MARK_1;
  const uint mark = (bits & 0x7fffu) > exponent ? CLA_MARK_4096 : infinity;
  return (bits & exponent) == exponent ? mark : 0u;
}
static inline uint cla_mark_pair(uint pair) {
  return cla_mark_half(pair & 0xffffu) | cla_mark_half(pair >> 16) << 16;
}
static inline float cla_sum_of_marks(float marks) {
  const uint sum = (uint)marks;
  const int mixed = sum >= 4096 || ((sum & 63u) != 0 && sum >= 64);
  const uint infinity = sum >= 64 ? 0xff800000u : 0x7f800000u;
  const uint bits = mixed ? 0x7fc00000u : infinity;
  return as_float(sum != 0 ? bits : 0u);
}
static inline uint cla_finite_pair(uint pair) {
  const uint exponents = pair & CLA_MMA_EXPONENTS;
  const uint low = (exponents & 0xffffu) == (CLA_MMA_EXPONENTS & 0xffffu) ? 0u : 0xffffu;
  const uint high = exponents >> 16 == CLA_MMA_EXPONENTS >> 16 ? 0u : 0xffff0000u;
  return pair & (low | high);
}

/* A product would let infinite or NaN values touch rows that do not see their keys. They are taken
   out of the tile, and added to the sums of the rows that see them. Slow, and seldom wanted; the
   whole group does it. `scores` are lost. */
static inline void cla_staged_extract_overflows(float* acc, float* scores, const ClaRow* row,
                                                __local uint4* v_tile, int first_key, uint lane) {
  ClaA seen[CLA_KEY_STEPS];
#pragma unroll
  for (uint i = 0; i < CLA_ROW_SCORES; ++i)
    scores[i] = cla_sees(row, first_key + CLA_SCORE_KEY(i)) ? 1.0f : 0.0f;
  cla_round_rows(seen, scores);
#pragma unroll
  for (uint n = 0; n < CLA_ACC_TILES; ++n) {
    float marks[CLA_C_SIZE];
#pragma unroll
    for (uint i = 0; i < CLA_C_SIZE; ++i) marks[i] = 0.0f;
#pragma unroll
    for (uint step = 0; step < CLA_KEY_STEPS; ++step) {
      ClaB b;
      cla_load_b_columns(&b, v_tile + n * CLA_TILE_COLUMNS * CLA_V_STRIDE + step * CLA_STEP_UNITS,
                         CLA_V_STRIDE, lane);
#pragma unroll
      for (uint i = 0; i < CLA_A_UNITS; ++i)
        b.units[i] = (uint4)(cla_mark_pair(b.units[i].x), cla_mark_pair(b.units[i].y),
                             cla_mark_pair(b.units[i].z), cla_mark_pair(b.units[i].w));
      cla_mma(marks, seen[step], b);
    }
#pragma unroll
    for (uint i = 0; i < CLA_C_SIZE; ++i) {
      acc[n * CLA_C_SIZE + i] += cla_sum_of_marks(marks[i]);
      CLA_KEEP_PLACE(acc[n * CLA_C_SIZE + i]);
    }
    CLA_KEEP_ORDER();
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* values read -> made finite */
  for (uint i = (uint)get_local_id(0); i < CLA_V_ROWS * CLA_V_STRIDE; i += CLA_WG_SIZE) {
    const uint4 x = v_tile[i];
    v_tile[i] = (uint4)(cla_finite_pair(x.x), cla_finite_pair(x.y), cla_finite_pair(x.z),
                        cla_finite_pair(x.w));
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* values made finite -> read */
}

/* A tile's products with keys become probabilities, and the accumulator takes in its values. */
static inline void cla_staged_take_tile(float* acc, float* scores, ClaRowState* state,
                                        const ClaRow* row, const ClaOptions* opt, float scale,
                                        int tile, int masked, __local uint4* v_tile,
                                        __local const float* scales, float* level, uint lane) {
  const int first_key = tile + (int)cla_c_column(lane);
  float factor;
  ClaA probabilities[CLA_KEY_STEPS];
  ClaStagedOperands of;
  if (CLA_B_EARLY) cla_staged_start_values(&of, v_tile, lane);
  cla_rows_to_probabilities(scores, &factor, state, row, opt, scale, first_key, masked, 0);
  cla_rescale_rows(acc, &factor);
#if CLA_ROW_SCALES
  cla_weigh_tile(scores, acc, level, 1, scales + CLA_KEY_RING, lane);
#endif
  cla_round_rows(probabilities, scores);
#if CLA_MASK /* gfx1100 spills (clang 19) if the compiler knows that every tile is masked */
  CLA_KEEP_PLACE(masked);
#endif
  const int overflow = masked && cla_staged_values_overflow(v_tile, lane);
  if (overflow) cla_staged_extract_overflows(acc, scores, row, v_tile, first_key, lane);
  if (overflow || !CLA_B_EARLY) cla_staged_start_values(&of, v_tile, lane);
  cla_staged_multiply(acc, CLA_ACC_TILES, probabilities, CLA_KEY_STEPS, &of, v_tile, CLA_V_STRIDE,
                      lane);
}

CLA_KERNEL clattn_prefill_staged(CLA_PARAMS) {
  __local uint4 k_tile[CLA_BLOCK_KV * CLA_K_STRIDE];
  __local uint4 v_tile[CLA_V_ROWS * CLA_V_STRIDE];
  __local long key_at[CLA_KEY_RING]; /* cla_readable_key() of each key, counted from the item's
                                        first */
  __local float scales[CLA_ROW_SCALES ? 2 * CLA_KEY_RING : 1]; /* of these keys, then values */

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const uint lane = cla_lane();
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  const float scale = cla_query_scale(&opt, &task, call.scale_log2e);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = CLA_PLACE_HEAD(task);
  const ClaHeadRows head_keys = CLA_HEAD_KEYS(task), head_values = CLA_HEAD_VALUES_OF(task);

  const uint own_row = cla_warp() * CLA_TILE_ROWS + cla_c_row(lane);
  const ClaRow row = cla_row(&opt, &task, own_row, call.causal);
  ClaRowState state = cla_no_keys();
  const long queries_at =
      cla_row_exists(&task, own_row)
          ? cla_row_at(&task, own_row, call.q_offset, call.q_token_stride, CLA_QUERY_DIM)
          : call.q_offset;
  const ClaQueries queries = {q + queries_at, scale < 0.0f ? 0x80008000u : 0u};
  ClaA held[CLA_HELD_STEPS];
  float acc[CLA_ACC_SIZE];
  float level = CLA_FIRST_LEVEL; /* attention/row_scales.clh */
  cla_staged_load_queries(held, &queries, 0, lane);
#pragma unroll
  for (uint i = 0; i < CLA_ACC_SIZE; ++i) acc[i] = 0.0f;

  cla_staged_zero_behind(k_tile, v_tile);
  key_at[lid] = cla_readable_key(&task.item, pages, keys.end, keys.begin + (int)lid, head_at,
                                 call.block_stride, call.token_stride);
  if (CLA_ROW_SCALES && keys.begin < keys.end)
    cla_put_ring_scales(scales, lid,
                        cla_scales_at(&opt, &task, pages, keys.end, keys.begin + (int)lid));
  barrier(CLK_LOCAL_MEM_FENCE); /* key_at written -> read */
  ClaStage stage;
  cla_start_stage(&stage, &head_keys, &head_values, key_at);

  for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
    const uint first = (uint)(tile - keys.begin);
    const int looks_up = first % CLA_WG_SIZE == 0;
    barrier(CLK_LOCAL_MEM_FENCE); /* K and V of the last tile read -> overwritten */
    if (keys.end - tile < CLA_BLOCK_KV) cla_cut_stage(&stage, keys.end - tile);
    cla_store_stage(&stage, k_tile, v_tile CLA_ZEROS_OF(scales + first % CLA_KEY_RING));
    barrier(CLK_LOCAL_MEM_FENCE); /* K, V and later key_at written -> read */
    ClaStagedOperands of;
    if (CLA_B_EARLY) cla_start_keys(&of, k_tile, 0, CLA_HELD_STEPS, lane);
    cla_start_stage(&stage, &head_keys, &head_values,
                    key_at + (first + CLA_BLOCK_KV) % CLA_KEY_RING);
    long later_at = 0; /* loads in flight, too */
    if (looks_up)
      later_at = cla_readable_key(&task.item, pages, keys.end, tile + CLA_WG_SIZE + (int)lid,
                                  head_at, call.block_stride, call.token_stride);

    float scores[CLA_SCORE_TILES * CLA_C_SIZE];
    if (!CLA_B_EARLY) cla_start_keys(&of, k_tile, 0, CLA_HELD_STEPS, lane);
    cla_staged_multiply_qk(scores, held, &queries, &of, k_tile, lane);
    float2 later_scales = (float2)(1.0f); /* their pages have come meanwhile */
    if (CLA_ROW_SCALES && looks_up)
      later_scales = cla_scales_at(&opt, &task, pages, keys.end, tile + CLA_WG_SIZE + (int)lid);
    cla_scale_tile(scores, 1, scales + first % CLA_KEY_RING, lane);
    const int masked =
        CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end; /* for some row */
    cla_staged_take_tile(acc, scores, &state, &row, &opt, fabs(scale), tile, masked, v_tile,
                         scales + first % CLA_KEY_RING, &level, lane);
    if (looks_up) key_at[(first + CLA_WG_SIZE + lid) % CLA_KEY_RING] = later_at;
    if (looks_up) cla_put_ring_scales(scales, first + CLA_WG_SIZE + lid, later_scales);
  }

  cla_leave_level(acc, 1, level);
  const ClaSideResults side = {CLA_PARTIAL_OUT, CLA_PARTIAL_LSE2, call.write_lse ? lse : 0};
  float factor;
  if (!cla_finish_aside(&opt, &task, (uint)call.num_kv_heads, &side, own_row, state, acc, lane,
                        &factor))
    return;
  __global CLA_Q_T* to =
      out + cla_result_at(&task, own_row, call.out_offset, call.out_token_stride);
#pragma unroll
  for (uint n = 0; n < CLA_ACC_TILES; ++n)
    cla_put_c_row(to + n * CLA_TILE_COLUMNS, acc + n * CLA_C_SIZE, CLA_ACC_UNITS(n), factor, lane);
  cla_store_fp8(&opt, &task, (uint)call.num_kv_heads, own_row, acc, factor, lane);
}
