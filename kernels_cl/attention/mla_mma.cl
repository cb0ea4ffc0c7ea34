/* Latent decode (MLA) on a unit of the contract for few rows (tile/CONTRACT.md): many heads against
   one latent row a key. Same meaning as mla_decode_gpu.cl, without options; products of 16-bit
   elements, sums and softmax in f32. Probabilities are rounded to the queries' type before they
   meet values.

   One work-group serves BLOCK_ROWS rows (query token, head) of a work item. A warp has TILE_ROWS of
   them, and as many warps as the group has for these rows (DIM_PARTS) share the dims: each keeps
   its part of the queries and of the accumulator in registers, so that neither moves while the keys
   pass by:

     for each tile of TILE_KEYS keys
       the tile: registers -> local memory, in 16 bits      (read from the cache once)
       the next tile: cache -> registers                    (in flight during all that follows)
       S = Q K^T over the warp's dims of KEY_DIM            summed over DIM_PARTS warps
       P = 2^(S - max), O = O * 2^(old max - max)           the same in these warps
       O += P V for the warp's dims of HEAD_DIM             (the same local tile)

   A warp of 16 rows would need 128 registers a lane for their sums on MFMA, 256 on WMMA, and 72 and
   144 for queries of 576 dims. So, by count,

                        MFMA r64   MFMA r16   WMMA r32   DPAS16 r32   DPAS8 r32
     rows of a warp     16         16         16         8            8
     DIM_PARTS          1          4          4          4            8
     registers for O    128        32         64         64           64
       for Q            72         20         36 (*)     36           40
       for V            64         16         32         32           16
       on their way     20         20         20         20           12

   (*) RDNA 3, whose operands are whole in both halves of a wave: 72. Clang 19 and IGC 1.0.12504 use
   no scratch: MFMA r64 up to 468 of 512 registers (one wave a SIMD), r16 178, WMMA 236 on RDNA 3
   and 198 on RDNA 4, DPAS all 256. WMMA and DPAS have no smaller tile: warps without a row skip its
   softmax and values, and the memory bounds tiles that are not full.

   A tile of a group costs each TILE_ROWS of its rows KEY_DIM + HEAD_DIM dims of TILE_KEYS keys from
   local memory, 34 KiB at 16 keys in 16 bits. With 64 rows on MI300X, 128 bytes a clock, that is
   1 090 cycles beside 1 090 of products, while its share of the memory's rate brings the tile's
   18 KiB in some 2 200: there is room for 128 heads, whose second group finds the rows in a cache.
   Groups of rows that share an item's keys stand next to each other in launch order.

   macro                unit        legal values, beside those of core/task.clh, tile/CONTRACT.md
   CLA_HEAD_DIM         elements    512
   CLA_ROPE_DIM         elements    64
   CLA_PAGE_SIZE        tokens      >= 1
   CLA_BLOCK_ROWS       rows        a multiple of TILE_ROWS
   CLA_BLOCK_KV         keys        TILE_KEYS
   CLA_WG_SIZE          work-items  LANES * BLOCK_ROWS / TILE_ROWS times 1, 2, 4 or 8, of which a
                                    part of HEAD_DIM is a multiple of 8 V_SPREAD

   Local memory: TILE_KEYS * (KEY_DIM + 8) elements for the tile, 18.3 KiB at 16 keys in 16 bits,
   and 4 B a lane and register of S for the sums, 8 KiB. */
#include "core/latent.clh"

#include "attention/decode_rows.clh"

#define CLA_LATENT_UNITS (CLA_KEY_DIM / 8)
#define CLA_PAGE_ELEMENTS ((long)CLA_PAGE_SIZE * CLA_KEY_DIM)
/* Units from key to key in local memory: odd, so that keys lie in different banks. */
#define CLA_LATENT_STRIDE (CLA_LATENT_UNITS | 1)
/* Work-items that bring a key together, and the units of it that each does. */
#define CLA_TEAM (CLA_WG_SIZE / CLA_BLOCK_KV)
#define CLA_LATENT_LOADS ((CLA_LATENT_UNITS + CLA_TEAM - 1) / CLA_TEAM)
/* Steps of Q K^T, dealt to the warps that share rows: how many, and at most for each. */
#define CLA_QK_STEPS (CLA_LATENT_UNITS / CLA_STEP_UNITS)
#define CLA_OWN_STEPS ((CLA_QK_STEPS + CLA_DIM_PARTS - 1) / CLA_DIM_PARTS)

#if CLA_HEAD_DIM != 8 * CLA_DIM_PARTS * CLA_V_UNITS * CLA_V_SPREAD || \
    CLA_LATENT_UNITS % CLA_STEP_UNITS != 0 || CLA_WG_SIZE % CLA_BLOCK_KV != 0
#error "mla_mma.cl: CLA_HEAD_DIM, CLA_BLOCK_ROWS and CLA_WG_SIZE do not tile"
#endif

/* The warp's step i, and whether there is one. */
static inline uint cla_own_step(uint i, uint part) {
  return part + i * CLA_DIM_PARTS;
}
static inline int cla_has_step(uint i, uint part) {
  return CLA_QK_STEPS % CLA_DIM_PARTS == 0 || cla_own_step(i, part) < CLA_QK_STEPS;
}

/* The lane's part of the queries in the warp's steps; any others, where there is no row. A negative
   scale turns their signs: the softmax takes none. */
static inline void cla_mla_mma_load_queries(ClaQuery* queries, const ClaTask* task, uint first_row,
                                            __global const CLA_Q_T* q, long offset,
                                            long token_stride, float scale, uint part, uint lane) {
#pragma unroll
  for (uint r = 0; r < CLA_QUERY_ROWS; ++r) {
    const uint row = first_row + (CLA_QUERY_ROWS == 1 ? cla_query_row(lane) : r);
    const long at = cla_row_exists(task, row)
                        ? cla_row_at(task, row, offset, token_stride, CLA_KEY_DIM)
                        : offset;
#pragma unroll
    for (uint i = 0; i < CLA_OWN_STEPS; ++i) {
      if (!cla_has_step(i, part)) continue;
      const uint dim = 8 * CLA_STEP_UNITS * cla_own_step(i, part) + cla_query_dim(lane);
      cla_set_query(&queries[i], r, q + at + dim, scale < 0.0f ? 0x80008000u : 0u);
    }
  }
}

/* The work-item's key of a tile, and its unit i of that key: the last unit in place of none. */
static inline uint cla_team_key(void) {
  return (uint)get_local_id(0) / CLA_TEAM;
}
static inline uint cla_team_unit(uint i) {
  const uint unit = (uint)get_local_id(0) % CLA_TEAM + i * CLA_TEAM;
  return (i + 1) * CLA_TEAM <= CLA_LATENT_UNITS ? unit : min(unit, CLA_LATENT_UNITS - 1u);
}

/* The position of that key in the tile at `first`; the last one, which some row sees, in place of
   those behind it, which no row sees. */
static inline uint cla_team_position(int first, int end) {
  return (uint)min(first + (int)cla_team_key(), end - 1);
}

/* The own units of that tile; `page` is that of the position. */
static inline void cla_load_latent(ClaKvRaw* raw, __global const CLA_KV_T* cache,
                                   const ClaWorkItem* item, int page, uint position) {
  cache += cla_key_row(item, page, position, CLA_PAGE_ELEMENTS, CLA_KEY_DIM);
#pragma unroll
  for (uint i = 0; i < CLA_LATENT_LOADS; ++i)
    raw[i] = cla_kv_raw_load(cache + 8 * cla_team_unit(i));
}

/* tile[BLOCK_KV][LATENT_STRIDE] */
static inline void cla_store_latent(__local uint4* tile, const ClaKvRaw* raw) {
  tile += cla_team_key() * CLA_LATENT_STRIDE;
#pragma unroll
  for (uint i = 0; i < CLA_LATENT_LOADS; ++i) tile[cla_team_unit(i)] = cla_kv_words(raw[i]);
}

static inline int cla_latent_overflows(const ClaKvRaw* raw) {
  int overflow = 0;
#pragma unroll
  for (uint i = 0; i < CLA_LATENT_LOADS; ++i) overflow |= cla_kv_overflows(raw[i]);
  return overflow;
}

/* scores[C_SIZE] = Q K^T over the warp's dims. */
static inline void cla_mla_mma_score_tile(float* scores, const ClaQuery* queries,
                                          __local const uint4* tile, uint part, uint lane) {
  tile += cla_k_key(lane) * CLA_LATENT_STRIDE + cla_k_unit(lane);
#pragma unroll
  for (uint i = 0; i < CLA_C_SIZE; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint i = 0; i < CLA_OWN_STEPS; ++i)
    if (cla_has_step(i, part))
      cla_multiply_step(scores, tile + cla_own_step(i, part) * CLA_STEP_UNITS, queries[i]);
}

/* Sums scores over the warps that share rows; parts[WARPS][C_SIZE][LANES]. Called by the group. */
static inline void cla_sum_over_parts(float* scores, __local float* parts, uint warp, uint lane) {
  __local float* own = parts + warp * (CLA_C_SIZE * CLA_LANES) + lane;
  __local const float* first = own - warp % CLA_DIM_PARTS * (CLA_C_SIZE * CLA_LANES);
#pragma unroll
  for (uint i = 0; i < CLA_C_SIZE; ++i) own[i * CLA_LANES] = scores[i];
  barrier(CLK_LOCAL_MEM_FENCE); /* parts written -> read */
#pragma unroll
  for (uint i = 0; i < CLA_C_SIZE; ++i) {
    scores[i] = first[i * CLA_LANES];
#pragma unroll
    for (uint part = 1; part < CLA_DIM_PARTS; ++part)
      scores[i] += first[(part * CLA_C_SIZE + i) * CLA_LANES];
  }
}

#if CLA_FEW_REGISTERS
/* O += P V over a tile of keys; `by_hand`: a value is infinite or NaN, and some row does not see
   all of them. */
static inline void cla_add_latent(float* acc, const float* scores, const ClaRow* rows,
                                  const ClaValues* values, int by_hand, ClaRange tile, uint lane) {
  if (by_hand) {
    cla_decode_add_seen_values(acc, scores, rows, values, tile);
  } else {
    cla_multiply_latent_pv(acc, scores, values->lane, values->stride);
  }
}
#else
static inline void cla_add_latent(float* acc, const float* scores, const ClaRow* rows,
                                  const ClaValues* values, int by_hand, ClaRange tile, uint lane) {
  uint v[4 * CLA_V_LOADS]; /* [V_KEYS][V_UNITS][4] */
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i)
    vstore4(values->lane[(cla_v_key(lane) + CLA_V_KEY_STEP(i / CLA_V_UNITS)) * values->stride +
                         i % CLA_V_UNITS * CLA_V_SPREAD],
            i, v);
  if (by_hand) cla_decode_extract_overflows(acc, v, rows, values, tile, lane);
  cla_multiply_pv(acc, scores, v, lane);
}
#endif

/* Stores the lane's elements of its row r; `row` and `state` are that row's. */
static inline void cla_store_own(const ClaOptions* opt, const ClaTask* task,
                                 const ClaResults* results, uint row, uint r, ClaRowState state,
                                 const float* acc, uint first_unit, uint lane) {
  state.sum = cla_row_sum(state.sum);
#pragma unroll
  for (uint u = 0; u < CLA_O_UNITS; ++u) {
    const float4 sums[2] = {CLA_ACC_QUAD(acc, r, u, 0), CLA_ACC_QUAD(acc, r, u, 4)};
    cla_store_row(opt, task, results, row, state, sums, 2,
                  8 * (first_unit + cla_o_unit(lane) + CLA_OWN_UNIT(u)), 4);
  }
}
#define CLA_STORE_OWN(r)                                                                    \
  if ((r) < CLA_LANE_ROWS)                                                                  \
  cla_store_own(&opt, &task, &results, first_row + cla_lane_row(r, lane), r, state[r], acc, \
                first_unit, lane)

CLA_KERNEL clattn_mla_mma(CLA_PARAMS) {
  __local uint4 tile[CLA_BLOCK_KV * CLA_LATENT_STRIDE];
  __local int overflowing; /* position of the last tile of which a value is infinite or NaN, if some
                              row does not see all of its keys */
#if CLA_DIM_PARTS > 1
  __local float parts[CLA_WG_SIZE * CLA_C_SIZE];
#endif

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lane = cla_lane();
  const uint warp = cla_warp();
  const uint part = warp % CLA_DIM_PARTS;
  const uint first_row = cla_warp_row(warp);
  const uint first_unit = cla_warp_unit(warp);
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  const float scale = cla_query_scale(&opt, &task, call.scale_log2e);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  /* Else the warp has no row at all: it helps to bring tiles. Scoring them costs it no register. */
  const int works = cla_row_exists(&task, first_row);
  const ClaValues values = {tile + cla_first_v_unit(first_unit, lane), CLA_LATENT_STRIDE};

  ClaQuery queries[CLA_OWN_STEPS];
  ClaRow rows[CLA_LANE_ROWS];
  ClaRowState state[CLA_LANE_ROWS];
  float acc[CLA_ACC_SIZE];
  cla_mla_mma_load_queries(queries, &task, first_row, q, call.q_offset, call.q_token_stride, scale,
                           part, lane);
  cla_decode_begin_rows(rows, state, acc, &opt, &task, call.causal, first_row, lane);

  int first = keys.begin - keys.begin % CLA_BLOCK_KV;
  int page = 0; /* of the work-item's key in the tile after the one in raw */
  ClaKvRaw raw[CLA_LATENT_LOADS];
  if (first < keys.end) {
    const uint position = cla_team_position(first, keys.end);
    cla_load_latent(raw, k_cache, &task.item, cla_page_of(pages, position), position);
    page = cla_page_of(pages, cla_team_position(first + CLA_BLOCK_KV, keys.end));
  }
  if (get_local_id(0) == 0) overflowing = -1;
  barrier(CLK_LOCAL_MEM_FENCE); /* overflowing written -> overwritten */

  for (; first < keys.end; first += CLA_BLOCK_KV) {
    const int masked = first < common.begin || first + CLA_BLOCK_KV > common.end; /* for some row */
    if (masked && cla_latent_overflows(raw)) overflowing = first;
    cla_store_latent(tile, raw);
    barrier(CLK_LOCAL_MEM_FENCE); /* tile, overflowing written -> read */
    cla_load_latent(raw, k_cache, &task.item, page,
                    cla_team_position(first + CLA_BLOCK_KV, keys.end));
    page = cla_page_of(pages, cla_team_position(first + 2 * CLA_BLOCK_KV, keys.end));

    float scores[CLA_C_SIZE];
    cla_mla_mma_score_tile(scores, queries, tile, part, lane);
#if CLA_DIM_PARTS > 1
    cla_sum_over_parts(scores, parts, warp, lane);
#endif
    if (works) {
      cla_to_probabilities(scores, acc, state, rows, &opt, scale, first, masked, lane);
      cla_add_latent(acc, scores, rows, &values, masked && overflowing == first,
                     cla_range(first, first + CLA_BLOCK_KV), lane);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* tile, overflowing read -> overwritten */
  }

  const ClaResults results = CLA_RESULTS;
  /* No loop: IGC would not unroll one this long, and would then keep the accumulator in memory. */
  CLA_STORE_OWN(0);
  CLA_STORE_OWN(1);
  CLA_STORE_OWN(2);
  CLA_STORE_OWN(3);
  CLA_STORE_OWN(4);
  CLA_STORE_OWN(5);
  CLA_STORE_OWN(6);
  CLA_STORE_OWN(7);
}
