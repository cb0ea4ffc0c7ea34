/* Paged attention for many rows per key range on a unit of the contract (tile/CONTRACT.md):
   products of 16-bit elements, sums and softmax in f32. Probabilities are rounded to the queries'
   type before they meet V, as the matrix units want it.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows against tiles of BLOCK_KV
   keys. A warp owns FRAGMENTS x TILE_ROWS rows and all their dims; rows never leave their warp, so
   that the softmax needs shuffles only.

     for each tile of keys up to the last one that any row sees
       start to copy K and V of the next tile     (in flight during all that follows)
       S = Q K^T
       P = 2^(S - max), O = O * 2^(old max - max) + P V

   With CLA_ROW_SCALES the scales of a tile's keys and values are copied to local memory, too, and
   multiply S and P (attention/tile_scales.clh). Codes of 4 bits are copied less their zeros, which
   their scales hold: so these are loaded two tiles ahead instead of one.

   Bytes and operations of a tile with 128 rows, 64 keys and 128 dims, per work-group: 32 KiB of K
   and V from global memory, 4.2 M multiply-adds, 160 KiB read from local memory by 4 warps of 32
   rows (8 warps of 16 rows would read 288 KiB and be bound by it), 8192 exponentials.

   macro                unit        legal values, beside those of core/task.clh, tile/CONTRACT.md
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_BLOCK_ROWS       rows        a multiple of TILE_ROWS * WG_SIZE / LANES, or a divisor of it
   CLA_BLOCK_KV         keys        a multiple of TILE_DEPTH and B_TILES * TILE_COLUMNS
   CLA_WG_SIZE          work-items  a multiple of LANES

   Local memory: ((BLOCK_ROWS + 2 * BLOCK_KV) * STRIDE + 2 * BLOCK_KV * V_STRIDE) * 16 B, 103 KiB
   with 128 rows, 64 keys and 128 dims. */
#define CLA_QK_STEPS ((CLA_HEAD_DIM + CLA_TILE_DEPTH - 1) / CLA_TILE_DEPTH)
/* Units of 16 bytes from row to row in local memory. Odd, so that eight rows lie in all banks. */
#define CLA_STEP_UNITS (CLA_TILE_DEPTH / 8)
#define CLA_STRIDE (CLA_STEP_UNITS * CLA_QK_STEPS | 1)
#define CLA_QUERY_UNIT(row, unit) ((row)*CLA_STRIDE + (unit))
#define CLA_V_STRIDE (CLA_STEP_UNITS * ((CLA_VALUE_DIM + CLA_TILE_DEPTH - 1) / CLA_TILE_DEPTH) | 1)
#define CLA_TILE_UNIT(row, unit) ((row)*CLA_V_STRIDE + (unit))
/* If there are more warps than row tiles, several warps share a row: each computes all of Q K^T,
   but only its own part of the dims of V and O, from unit FIRST_UNIT on. The last part starts
   earlier rather than running past the last dim, so two warps may compute the same units. */
#define CLA_DIM_PARTS \
  (CLA_TILE_ROWS * CLA_WARPS > CLA_BLOCK_ROWS ? CLA_TILE_ROWS * CLA_WARPS / CLA_BLOCK_ROWS : 1)
#define CLA_FIRST_UNIT(warp) \
  min((warp) % CLA_DIM_PARTS * CLA_ACC_TILES, (uint)(CLA_DIM_UNITS - CLA_ACC_TILES))

#include "tile/unit.clh"

#include "attention/row_tiles.clh"

#include "attention/tile_scales.clh"
#if CLA_KV_QUANT
#include "tile/code_pairs.clh"
#endif

#ifndef CLA_KEY_UNIT /* keys lie as queries do */
#define CLA_KEY_UNIT(key, unit) CLA_QUERY_UNIT(key, unit)
#define CLA_KEY_TILE_UNITS (CLA_BLOCK_KV * CLA_STRIDE)
#endif
/* The tiles of scales that are known: of the keys at hand, of those being copied, and being loaded.
   In functions of the loop's `tile`. */
#if CLA_KV_DTYPE == 6
#define CLA_SCALE_TILES 3
#define CLA_SCALES_TURN(n) (((uint)(tile - keys.begin) / CLA_BLOCK_KV + (n)) % 3)
#define CLA_SCALES_NOW CLA_SCALES_TURN(0)
#define CLA_SCALES_NEXT CLA_SCALES_TURN(1)
#define CLA_SCALES_LATER CLA_SCALES_TURN(2)
#define CLA_SCALES_BEFORE(tile) ((tile) + CLA_BLOCK_KV)
#else
#define CLA_SCALE_TILES 2
#define CLA_SCALES_NOW stage
#define CLA_SCALES_LATER next
#define CLA_SCALES_BEFORE(tile) tile
#endif
/* 0, of which the compiler cannot be sure with CLA_FEW_REGISTERS: it computes a lane's addresses
   anew for each tile, and they take no registers meanwhile. */
#define CLA_ZERO(tile) (CLA_FEW_REGISTERS ? (uint)((tile) >> 31) : 0u)
#define CLA_FRAGMENTS (CLA_BLOCK_ROWS * CLA_DIM_PARTS / (CLA_TILE_ROWS * CLA_WARPS))
#if CLA_BLOCK_ROWS * CLA_DIM_PARTS % (CLA_TILE_ROWS * CLA_WARPS) != 0 ||  \
    CLA_WG_SIZE % CLA_LANES != 0 || CLA_BLOCK_KV % CLA_TILE_DEPTH != 0 || \
    CLA_BLOCK_KV % (CLA_B_TILES * CLA_TILE_COLUMNS) != 0
#error "prefill_mma.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif
#if CLA_DIM_PARTS > 1 && CLA_TILE_COLUMNS != 8
#error "prefill_mma.cl: dims are shared in units of 8"
#endif

/* scores[FRAGMENTS][SCORE_TILES][C_SIZE] = Q K^T for the warp's rows. */
static inline void cla_prefill_multiply_qk(float* scores, __local const uint4* q_rows,
                                           __local const uint4* k_tile, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_FRAGMENTS * CLA_SCORE_TILES * CLA_C_SIZE; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint step = 0; step < CLA_QK_STEPS; ++step) {
    ClaA a[CLA_FRAGMENTS];
#pragma unroll
    for (uint m = 0; m < CLA_FRAGMENTS; ++m)
      a[m] = cla_load_a(q_rows + m * CLA_TILE_ROWS * CLA_STRIDE + step * CLA_STEP_UNITS, CLA_STRIDE,
                        lane);
#pragma unroll
    for (uint n = 0; n < CLA_SCORE_TILES; n += CLA_B_TILES) {
      ClaB b[CLA_B_TILES];
      cla_load_b_columns(b, k_tile + CLA_KEY_UNIT(n * CLA_TILE_COLUMNS, step * CLA_STEP_UNITS),
                         CLA_STRIDE, lane);
#pragma unroll
      for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
#pragma unroll
        for (uint i = 0; i < CLA_B_TILES; ++i)
          cla_mma(scores + (m * CLA_SCORE_TILES + n + i) * CLA_C_SIZE, a[m], b[i]);
      }
    }
  }
}

/* Copies eight elements of the cache to a unit of a tile, or starts to; zeros where `at` is -1.
   `stored`: the scale of its row. */
static inline void cla_start_unit(__local uint4* to, __global const CLA_KV_T* cache,
                                  long at CLA_STORED_PARAM) {
#if CLA_KV_QUANT
  const uint4 words = CLA_KV_WORDS(cla_kv_raw_load(cache + max(at, 0L)), stored);
  *to = at >= 0 ? words : (uint4)(0u);
#else
  cla_copy_async(to, cache + max(at, 0L), at >= 0);
#endif
}

/* The element of a unit of a place's row; -1 where that is -1. */
static inline long cla_place_unit(const ClaHeadRows* rows, long place, uint unit) {
  return place >= 0 ? cla_place_element(rows, place) + CLA_KV_ROOM(8 * unit) : -1;
}

/* The tile's keys and values to k_tile[BLOCK_KV][STRIDE] and v_tile[BLOCK_KV][V_STRIDE]; 0 for keys
   that no row sees, whose rows are not read. `zero`: CLA_ZERO. */
static inline void cla_start_copies(__local uint4* k_tile, __local uint4* v_tile,
                                    const ClaHeadRows* keys, const ClaHeadRows* values,
                                    __local const long* key_at, uint zero CLA_ZEROS_PARAM) {
#pragma unroll
  for (uint own = (uint)get_local_id(0); own < CLA_BLOCK_KV * CLA_QUERY_ROW_UNITS;
       own += CLA_WG_SIZE) {
    const uint i = own + zero;
    const uint key = i / CLA_QUERY_ROW_UNITS;
    const uint unit = i % CLA_QUERY_ROW_UNITS;
    const long place = key_at[key];
    cla_start_unit(k_tile + CLA_KEY_UNIT(key, unit), keys->first,
                   cla_place_unit(keys, place, unit) CLA_STORED(scales[key]));
    if (CLA_DIM_UNITS < CLA_QUERY_ROW_UNITS && unit >= CLA_DIM_UNITS) continue;
    cla_start_unit(v_tile + CLA_TILE_UNIT(key, unit), values->first,
                   cla_place_unit(values, place, unit) CLA_STORED(scales[CLA_BLOCK_KV + key]));
  }
}

/* Zeros the units behind the last dim that products meet, of queries and of a tile of keys. */
static inline void cla_prefill_zero_behind(__local uint4* q_tile, __local uint4* k_tile) {
#if CLA_STEP_UNITS * CLA_QK_STEPS != CLA_QUERY_ROW_UNITS
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_ROWS; i += CLA_WG_SIZE)
    q_tile[CLA_QUERY_UNIT(i, CLA_QUERY_ROW_UNITS)] = (uint4)(0u);
  for (uint i = (uint)get_local_id(0); i < 2 * CLA_BLOCK_KV; i += CLA_WG_SIZE)
    k_tile[CLA_KEY_UNIT(i, CLA_QUERY_ROW_UNITS)] = (uint4)(0u);
#endif
}

/* acc[FRAGMENTS][ACC_TILES][C_SIZE] += P V, P as left in `scores` by the softmax. */
static inline void cla_prefill_multiply_pv(float* acc, const float* scores,
                                           __local const uint4* v_tile, uint lane) {
#pragma unroll
  for (uint step = 0; step < CLA_KEY_STEPS; ++step) {
    ClaA a[CLA_FRAGMENTS];
#pragma unroll
    for (uint m = 0; m < CLA_FRAGMENTS; ++m)
      a[m] = cla_a_of_scores(scores + m * CLA_SCORE_TILES * CLA_C_SIZE, step);
#pragma unroll
    for (uint n = 0; n < CLA_ACC_TILES; n += CLA_B_TILES) {
      ClaB b[CLA_B_TILES];
      cla_load_b_rows(b, v_tile + step * CLA_TILE_DEPTH * CLA_V_STRIDE + n * CLA_TILE_COLUMNS / 8,
                      CLA_V_STRIDE, lane);
#pragma unroll
      for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
#pragma unroll
        for (uint i = 0; i < CLA_B_TILES; ++i)
          if (n + i < CLA_ACC_TILES)
            cla_mma(acc + (m * CLA_ACC_TILES + n + i) * CLA_C_SIZE, a[m], b[i]);
      }
    }
  }
}

/* Whether a tile of values holds what must not meet a row that does not see it. The same for a
   warp. */
static inline int cla_prefill_values_overflow(__local const uint4* v_tile, uint lane) {
  int any = 0;
  for (uint i = lane; i < CLA_BLOCK_KV * CLA_DIM_UNITS; i += CLA_LANES)
    any |= cla_unit_overflows(v_tile[CLA_TILE_UNIT(i / CLA_DIM_UNITS, i % CLA_DIM_UNITS)]);
  return cla_any_lane(any);
}

/* What a warp knows of its rows. */
typedef struct ClaWarpRows {
  ClaRow rows[CLA_FRAGMENTS * CLA_C_ROWS];
  ClaRowState state[CLA_FRAGMENTS * CLA_C_ROWS];
  uint first_row; /* of the tile */
} ClaWarpRows;

static inline uint cla_own_row(const ClaWarpRows* own, uint r, uint lane) {
  return own->first_row + r / CLA_C_ROWS * CLA_TILE_ROWS + cla_c_row(lane) +
         CLA_C_ROW_STEP(r % CLA_C_ROWS);
}

/* A tile's products with keys become probabilities, and the accumulator takes in its values. */
static inline void cla_prefill_take_tile(float* acc, float* scores, ClaWarpRows* own,
                                         const ClaOptions* opt, float scale, int tile, int masked,
                                         __local const uint4* v_tile, __local const float* scales,
                                         float* level, uint first_unit, uint lane) {
  const int first_key = tile + (int)cla_c_column(lane);
#pragma unroll
  for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
    float* products = scores + m * CLA_SCORE_TILES * CLA_C_SIZE;
    const ClaRow* rows = own->rows + m * CLA_C_ROWS;
    ClaRowState* state = own->state + m * CLA_C_ROWS;
    float factors[CLA_C_ROWS];
#if CLA_FEW_REGISTERS /* once, not apart for tiles without masks */
    cla_rows_to_probabilities(products, factors, state, rows, opt, scale, first_key, masked, 0);
#else
    if (masked) {
      cla_rows_to_probabilities(products, factors, state, rows, opt, scale, first_key, 1, 0);
    } else {
      cla_rows_to_probabilities(products, factors, state, rows, opt, scale, first_key, 0, 0);
    }
#endif
    cla_rescale_rows(acc + m * CLA_ACC_TILES * CLA_C_SIZE, factors);
  }
#if CLA_ROW_SCALES
  cla_weigh_tile(scores, acc, level, CLA_FRAGMENTS, scales + CLA_BLOCK_KV, lane);
#endif
  if (!masked || !cla_prefill_values_overflow(v_tile, lane)) {
    cla_prefill_multiply_pv(acc, scores, v_tile + first_unit, lane);
    return;
  }
#pragma unroll
  for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
    ClaA probabilities[CLA_KEY_STEPS];
    cla_round_rows(probabilities, scores + m * CLA_SCORE_TILES * CLA_C_SIZE);
    cla_add_seen_values(acc + m * CLA_ACC_TILES * CLA_C_SIZE, probabilities,
                        own->rows + m * CLA_C_ROWS, v_tile + first_unit, tile, lane);
  }
}

CLA_KERNEL clattn_prefill_mma(CLA_PARAMS) {
  __local uint4 q_tile[CLA_BLOCK_ROWS * CLA_STRIDE] __attribute__((aligned(128)));
  __local uint4 k_tile[2][CLA_KEY_TILE_UNITS] __attribute__((aligned(128)));
  __local uint4 v_tile[2][CLA_BLOCK_KV * CLA_V_STRIDE] __attribute__((aligned(128)));
  __local long key_at[2][CLA_BLOCK_KV]; /* key i's place (ClaHeadRows), -1: no row sees it; of the
                                           next tile and of the one behind it */
  __local float scales[CLA_SCALE_TILES][CLA_SCALES_ROOM]
      __attribute__((aligned(128))); /* of a tile's keys */

  ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const uint lane = cla_lane();
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  const float scale = cla_query_scale(&opt, &task, call.scale_log2e);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = CLA_PLACE_HEAD(task);
  const ClaHeadRows head_keys = CLA_HEAD_KEYS(task), head_values = CLA_HEAD_VALUES_OF(task);

  ClaWarpRows own;
  float acc[CLA_FRAGMENTS * CLA_ACC_TILES * CLA_C_SIZE];
  float level = CLA_FIRST_LEVEL; /* attention/row_scales.clh */
  const uint first_unit = CLA_DIM_PARTS == 1 ? 0 : CLA_FIRST_UNIT(cla_warp());
  own.first_row = cla_warp() / CLA_DIM_PARTS * (CLA_TILE_ROWS * CLA_FRAGMENTS);
#pragma unroll
  for (uint r = 0; r < CLA_FRAGMENTS * CLA_C_ROWS; ++r) {
    own.rows[r] = cla_row(&opt, &task, cla_own_row(&own, r, lane), call.causal);
    own.state[r] = cla_no_keys();
  }
#pragma unroll
  for (uint i = 0; i < CLA_FRAGMENTS * CLA_ACC_TILES * CLA_C_SIZE; ++i) acc[i] = 0.0f;

  const ClaTeam team = {0, CLA_BLOCK_ROWS, lid, CLA_WG_SIZE};
  cla_start_queries(q_tile, &task, team, q, call.q_offset, call.q_token_stride, scale);
  cla_prefill_zero_behind(q_tile, k_tile[0]);
  for (uint i = lid; i < 2 * CLA_BLOCK_KV; i += CLA_WG_SIZE)
    key_at[0][i] = cla_key_at(&task.item, pages, keys.end, keys.begin + (int)i, head_at,
                              call.block_stride, call.token_stride);
  ClaScalesAhead ahead = cla_first_scales(scales[0], &opt, &task, pages, keys);
  barrier(CLK_LOCAL_MEM_FENCE); /* key_at written -> read */
  if (!CLA_FEW_REGISTERS || keys.begin < keys.end)
    cla_start_copies(k_tile[0], v_tile[0], &head_keys, &head_values, key_at[0],
                     0 CLA_ZEROS_OF(scales[0]));

  uint stage = 0;
  for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
    const uint next = stage ^ 1;
    cla_wait_copies();
    barrier(CLK_LOCAL_MEM_FENCE); /* K, V and the next key_at written -> read; K, V and key_at of
                                     the last tile read -> overwritten */
    cla_start_copies(k_tile[next], v_tile[next], &head_keys, &head_values, key_at[next],
                     CLA_ZERO(tile) CLA_ZEROS_OF(scales[CLA_SCALES_NEXT]));
    cla_start_scales(&ahead, &opt, &task, pages, keys.end, CLA_SCALES_BEFORE(tile));
    long later_at[CLA_OWN_KEYS]; /* in flight, too */
#pragma unroll
    for (int i = 0; i < CLA_OWN_KEYS; ++i)
      later_at[i] = cla_key_at(&task.item, pages, keys.end,
                               tile + 2 * CLA_BLOCK_KV + (int)lid + i * CLA_WG_SIZE, head_at,
                               call.block_stride, call.token_stride);

    float scores[CLA_FRAGMENTS * CLA_SCORE_TILES * CLA_C_SIZE];
    cla_prefill_multiply_qk(scores, q_tile + (own.first_row + CLA_ZERO(tile)) * CLA_STRIDE,
                            k_tile[stage], lane);
    cla_scale_tile(scores, CLA_FRAGMENTS, scales[CLA_SCALES_NOW], lane);
    const int masked =
        CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end; /* for some row */
    cla_prefill_take_tile(acc, scores, &own, &opt, fabs(scale), tile, masked, v_tile[stage],
                          scales[CLA_SCALES_NOW], &level, first_unit, lane);
#pragma unroll
    for (uint i = 0; i < CLA_OWN_KEYS; ++i) {
      const uint key = lid + i * CLA_WG_SIZE;
      if (key < CLA_BLOCK_KV) key_at[stage][key] = later_at[i];
    }
    cla_put_scales(scales[CLA_SCALES_LATER], &ahead);
    stage = next;
  }
  cla_wait_copies();            /* of a tile past the end: zeros */
  barrier(CLK_LOCAL_MEM_FENCE); /* queries copied, even without a key -> overwritten */
  cla_leave_level(acc, CLA_FRAGMENTS, level);

#if CLA_OUT_FP8 && CLA_DIM_PARTS > 1
  opt.out_fp8 += 8 * first_unit;
#endif
  const ClaSideResults side = {CLA_PARTIAL_OUT + 8 * first_unit, CLA_PARTIAL_LSE2,
                               call.write_lse ? lse : 0};
#pragma unroll
  for (uint r = 0; r < CLA_FRAGMENTS * CLA_C_ROWS; ++r)
    cla_finish_row(
        &opt, &task, (uint)call.num_kv_heads, &side, q_tile + first_unit,
        cla_own_row(&own, r, lane), own.state[r],
        acc + r / CLA_C_ROWS * CLA_ACC_TILES * CLA_C_SIZE + r % CLA_C_ROWS * CLA_C_COLUMNS, lane);
  if (task.item.partial_row >= 0) return; /* the same for all */
  barrier(CLK_LOCAL_MEM_FENCE);           /* results staged -> stored */
  cla_store_results(q_tile, &task, team, out, call.out_offset, call.out_token_stride);
}
