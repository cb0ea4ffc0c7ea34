/* Paged attention for many rows per key range: prompts and their chunks, on a GPU, in f32
   arithmetic.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows against tiles of BLOCK_KV
   keys.

     for each tile of keys up to the last one that any row sees
       for each CLA_DIMS_QK dims      S += Q K^T: both through local memory, 4 x CLA_KEYS a lane
       row maximum over the tile      one exchange through local memory
       P = 2^(S - max)                to local memory; its sums stay per lane until the end
       for each CLA_DIMS_PV dims      O += P V: V through local memory, 4 x 4 sums a lane

   A team of lanes owns four rows. A member's part of S are the keys member, member + TEAM, ...; of
   O, in every slice of CLA_DIMS_PV dims, dims 4 * member + 0 ... 3.
   Per float4 read from local memory S does 16 CLA_KEYS / (4 + CLA_KEYS) multiply-adds and O does 8.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    8 ... 512, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_BLOCK_ROWS       rows        multiples of 4
   CLA_BLOCK_KV         keys        32 or 64; a multiple of the columns, 4 * WG_SIZE / BLOCK_ROWS
   CLA_WG_SIZE          work-items  a multiple of BLOCK_ROWS / 4, at least BLOCK_KV

   Local memory: 27 KiB with 64 rows, 32 keys and 256 work-items; 47 KiB with 128 rows and 512. */
#define CLA_ROW_GROUPS (CLA_BLOCK_ROWS / 4)
#define CLA_TEAM (CLA_WG_SIZE / CLA_ROW_GROUPS)
#define CLA_KEYS (CLA_BLOCK_KV / CLA_TEAM)
#define CLA_DIMS_QK (CLA_HEAD_DIM < 32 ? CLA_HEAD_DIM : 32)
#define CLA_DIMS_PV (4 * CLA_TEAM)
#define CLA_SLICES ((CLA_VALUE_DIM + CLA_DIMS_PV - 1) / CLA_DIMS_PV)

#define CLA_TEAM_KEYS 1
#define CLA_LANE_ROWS 4
#define CLA_ROW_SCORES CLA_KEYS
#define CLA_ACC_QUADS CLA_SLICES

#include "core/dims.clh"
#include "tile/scalar.clh"

#include "attention/results.clh"
#include "attention/softmax.clh"

#if CLA_BLOCK_ROWS % 4 != 0 || CLA_WG_SIZE % CLA_ROW_GROUPS != 0 || \
    CLA_BLOCK_KV % CLA_TEAM != 0 || CLA_BLOCK_KV % 4 != 0 || CLA_WG_SIZE < CLA_BLOCK_KV
#error "prefill_gpu.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

/* Strides of local tiles, in float4. An odd one spreads lanes that read a column over all banks. */
#define CLA_QK_STRIDE (CLA_DIMS_QK / 4 + 1)
#define CLA_P_STRIDE (CLA_BLOCK_KV / 4 + (CLA_BLOCK_ROWS <= 64)) /* 128 rows fit 48 KiB without */
#define CLA_V_STRIDE CLA_TEAM
#define CLA_QK_QUADS ((CLA_BLOCK_ROWS + CLA_BLOCK_KV) * CLA_QK_STRIDE)
#define CLA_V_QUADS (CLA_BLOCK_KV * CLA_V_STRIDE)
#define CLA_STAGE_QUADS (CLA_QK_QUADS > CLA_V_QUADS ? CLA_QK_QUADS : CLA_V_QUADS)

/* Copies dims [dim, dim + width) of the tile's queries, scaled, to stage[BLOCK_ROWS][QK_STRIDE];
   0 where there is no row. */
static inline void cla_stage_q(__local float4* stage, const ClaTask* task,
                               __global const CLA_Q_T* q, long q_offset, long q_token_stride,
                               uint dim, uint width, float scale) {
  const uint units = width / 8;
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_ROWS * units; i += CLA_WG_SIZE) {
    const uint row = i / units;
    const uint unit = i % units;
    ClaF8 x = cla_zero8();
    if (cla_row_exists(task, row)) {
      x = cla_scale8(
          CLA_Q_LOAD8(q + cla_query_at(task, row, q_offset, q_token_stride) + dim + 8 * unit),
          scale);
    }
    stage[row * CLA_QK_STRIDE + 2 * unit] = x.lo;
    stage[row * CLA_QK_STRIDE + 2 * unit + 1] = x.hi;
  }
}

/* What reads a tile's keys or values: where they lie, and with CLA_ROW_SCALES their scales. */
#if CLA_ROW_SCALES
#define CLA_SCALES_PARAM , __local const float* scales
#define CLA_SCALES_OF(scales) , scales
#else
#define CLA_SCALES_PARAM
#define CLA_SCALES_OF(scales)
#endif

/* Copies dims [dim, dim + width) of the tile's keys or values to stage[BLOCK_KV][stride]; 0 for
   keys that no row sees, whose rows are not read. */
static inline void cla_stage_kv(__local float4* stage, uint stride, const ClaHeadRows* rows,
                                __local const long* key_at CLA_SCALES_PARAM, uint dim, uint width) {
  const uint units = width / 8;
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_KV * units; i += CLA_WG_SIZE) {
    const uint key = i / units;
    const uint unit = i % units;
    ClaF8 x = cla_zero8();
    if (key_at[key] >= 0)
      x = CLA_KV_EXPAND(cla_kv_raw_load(rows->first + cla_place_element(rows, key_at[key]) +
                                        CLA_KV_ROOM(dim + 8 * unit)),
                        scales[key]);
#if CLA_ROW_SCALES
    x = cla_scale8(x, CLA_SCALE(scales[key]));
#endif
    stage[key * stride + 2 * unit] = x.lo;
    stage[key * stride + 2 * unit + 1] = x.hi;
  }
}

/* scores[4][KEYS] += Q K^T over `width` staged dims. */
static inline void cla_add_qk(float* scores, __local const float4* q_rows,
                              __local const float4* k_rows, uint width) {
  for (uint d = 0; d < width / 4; ++d) {
    float4 x[4];
#pragma unroll
    for (uint r = 0; r < 4; ++r) x[r] = q_rows[r * CLA_QK_STRIDE + d];
#pragma unroll
    for (uint i = 0; i < CLA_KEYS; ++i) {
      const float4 k = k_rows[CLA_DEALT(0, i) * CLA_QK_STRIDE + d];
#pragma unroll
      for (uint r = 0; r < 4; ++r)
        scores[CLA_SCORE(r, i)] = cla_dot4(x[r], k, scores[CLA_SCORE(r, i)]);
    }
  }
}

/* sum + p * v. `masked`: the key may be one that the row does not see. */
static inline float4 cla_add_pv(float p, float4 v, float4 sum, int masked) {
  return masked && !cla_is_seen(p) ? sum : mad((float4)(p), v, sum);
}

/* acc[4 rows][SLICES] += P V over the tile's keys, for the four own dims of the first slice. */
static inline void cla_add_slice(float4* acc, __local const float4* p_rows,
                                 __local const float4* v_column, int masked) {
  for (uint key = 0; key < CLA_BLOCK_KV / 4; ++key) {
    float4 v[4];
#pragma unroll
    for (uint i = 0; i < 4; ++i) v[i] = v_column[(4 * key + i) * CLA_V_STRIDE];
#pragma unroll
    for (uint r = 0; r < 4; ++r) {
      const float4 p = p_rows[r * CLA_P_STRIDE + key];
      float4* sum = acc + r * CLA_SLICES;
      *sum = cla_add_pv(p.x, v[0], *sum, masked);
      *sum = cla_add_pv(p.y, v[1], *sum, masked);
      *sum = cla_add_pv(p.z, v[2], *sum, masked);
      *sum = cla_add_pv(p.w, v[3], *sum, masked);
    }
  }
}

/* scores[4][KEYS] = Q K^T of the lane's rows and keys, one piece of the dims after the other. */
static inline void cla_prefill_gpu_score_tile(float* scores, __local float4* stage,
                                              const ClaTask* task, __global const CLA_Q_T* q,
                                              long offset, long token_stride, float scale,
                                              const ClaHeadRows* keys,
                                              __local const long* key_at CLA_SCALES_PARAM,
                                              uint first_row) {
  __local float4* k_stage = stage + CLA_BLOCK_ROWS * CLA_QK_STRIDE;
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) scores[i] = 0.0f;
  for (uint dim = 0; dim < CLA_HEAD_DIM; dim += CLA_DIMS_QK) {
    const uint width = min((uint)CLA_DIMS_QK, CLA_HEAD_DIM - dim);
    cla_stage_q(stage, task, q, offset, token_stride, dim, width, scale);
    cla_stage_kv(k_stage, CLA_QK_STRIDE, keys, key_at CLA_SCALES_OF(scales), dim, width);
    barrier(CLK_LOCAL_MEM_FENCE); /* stage written -> read */
    cla_add_qk(scores, stage + first_row * CLA_QK_STRIDE, k_stage + cla_member() * CLA_QK_STRIDE,
               width);
    barrier(CLK_LOCAL_MEM_FENCE); /* stage read -> overwritten */
  }
}

CLA_KERNEL clattn_prefill_gpu(CLA_PARAMS) {
  __local float4 stage[CLA_STAGE_QUADS]; /* Q and K dims of a tile, then V dims */
  __local float4 p_tile[CLA_BLOCK_ROWS * CLA_P_STRIDE];
  __local float exchange[CLA_BLOCK_ROWS * CLA_TEAM]; /* maxima of members, in the end sums */
  __local long key_at[CLA_BLOCK_KV];                 /* key i's place, -1: no row sees it */
#if CLA_ROW_SCALES
  __local float k_scales[CLA_BLOCK_KV], v_scales[CLA_BLOCK_KV]; /* of key i */
#endif

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const uint first_row = 4 * cla_team();
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  const float query_scale = cla_query_scale(&opt, &task, call.scale_log2e);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = CLA_PLACE_HEAD(task);
  const ClaHeadRows head_keys = CLA_HEAD_KEYS(task), head_values = CLA_HEAD_VALUES_OF(task);

  ClaRow rows[4];
  ClaRowState state[4];
  float4 acc[CLA_ACC_SIZE];
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    rows[r] = cla_row(&opt, &task, first_row + r, call.causal);
    state[r] = cla_no_keys();
  }
#pragma unroll
  for (uint i = 0; i < CLA_ACC_SIZE; ++i) acc[i] = (float4)(0.0f);

  for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
    if (lid < CLA_BLOCK_KV) {
      /* Without a branch, in which clang 19 for gfx90a spoils the other lanes' -1. */
      const uint position = min((uint)tile + lid, (uint)keys.end - 1);
      const long at = head_at + cla_key_row(&task.item, cla_page_of(pages, position), position,
                                            call.block_stride, CLA_PLACE_STRIDE(call.token_stride));
      key_at[lid] = (uint)tile + lid < (uint)keys.end ? at : -1;
#if CLA_ROW_SCALES
      const float2 scales = cla_row_scales(&opt, cla_page_of(pages, position),
                                           position % CLA_PAGE_SIZE, task.kv_head);
      k_scales[lid] = scales.x;
      v_scales[lid] = scales.y;
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* key_at written -> read */

    const int masked =
        CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end; /* for some row */
    float scores[CLA_SCORES];
    float factors[4];
    cla_prefill_gpu_score_tile(scores, stage, &task, q, call.q_offset, call.q_token_stride,
                               query_scale, &head_keys, key_at CLA_SCALES_OF(k_scales), first_row);
    /* Readers of the exchange pass the next barrier before it is rewritten. All tiles as masked
       ones: fewer registers than two ways. */
    cla_rows_to_probabilities(scores, factors, state, rows, &opt, 1.0f, tile + (int)cla_member(), 1,
                              exchange);
    cla_rescale_rows(acc, factors);
#pragma unroll
    for (uint i = 0; i < CLA_SCORES; ++i)
      ((__local float*)p_tile)[(first_row + CLA_SCORE_ROW(i)) * CLA_P_STRIDE * 4 + cla_member() +
                               (uint)CLA_SCORE_KEY(i)] = scores[i];

#pragma unroll
    for (uint slice = 0; slice < CLA_SLICES; ++slice) {
      const uint dim = slice * CLA_DIMS_PV;
      const uint width = min((uint)CLA_DIMS_PV, CLA_VALUE_DIM - dim);
      cla_stage_kv(stage, CLA_V_STRIDE, &head_values, key_at CLA_SCALES_OF(v_scales), dim, width);
      barrier(CLK_LOCAL_MEM_FENCE); /* stage and p_tile written -> read */
      __local const float4* p_rows = p_tile + first_row * CLA_P_STRIDE;
      if (cla_member() * 4 < width) {
        if (masked) {
          cla_add_slice(acc + slice, p_rows, stage + cla_member(), 1);
        } else {
          cla_add_slice(acc + slice, p_rows, stage + cla_member(), 0);
        }
      }
      barrier(CLK_LOCAL_MEM_FENCE); /* stage read -> overwritten; behind the last slice also key_at
                                       and p_tile */
    }
  }

  float sums[4];
#pragma unroll
  for (uint r = 0; r < 4; ++r) sums[r] = state[r].sum;
  cla_reduce_rows(sums, exchange, 0);
  const ClaResults results = CLA_RESULTS;
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    state[r].sum = sums[r];
    cla_store_row(&opt, &task, &results, first_row + r, state[r], acc + r * CLA_SLICES, CLA_SLICES,
                  4 * cla_member(), CLA_DIMS_PV);
  }
}
