/* Paged attention for many rows per key range: prompts and their chunks, on a GPU, in f32
   arithmetic.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows against tiles of BLOCK_KV
   keys.

     for each tile of keys up to the last one that any row sees
       for each CLA_DIMS_QK dims      S += Q K^T: both through local memory, 4 x CLA_KEYS a
   work-item row maximum over the tile      one exchange through local memory P = 2^(S - max) to
   local memory; its sums stay per work-item until the end for each CLA_DIMS_PV dims      O += P V:
   V through local memory, 4 x 4 sums a work-item

   Work-item (row_group, column) owns rows 4 * row_group + 0 ... 3 and, of S, the keys
   column + CLA_COLUMNS * i; of O, in every slice of CLA_DIMS_PV dims, dims 4 * column + 0 ... 3.
   Per float4 read from local memory S does 16 CLA_KEYS / (4 + CLA_KEYS) multiply-adds and O does 8.

   macro                unit        legal values
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8
   CLA_GROUP            heads       query heads per KV head, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           0 f32, 1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           0 f32, 1 f16, 2 bf16, 3 e4m3, 4 e5m2, 5 int8: k_cache, v_cache
   CLA_PAGE_SIZE        tokens      0: no pages
   CLA_BLOCK_ROWS       rows        multiples of 4
   CLA_BLOCK_KV         keys        32 or 64; a multiple of the columns, 4 * WG_SIZE / BLOCK_ROWS
   CLA_WG_SIZE          work-items  a multiple of BLOCK_ROWS / 4, at least BLOCK_KV
   CLA_WINDOW ...       -           what a layer may add: core/options.clh

   Local memory: 27 KiB with 64 rows, 32 keys and 256 work-items; 47 KiB with 128 rows and 512.
   Launch: num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on
   16-byte boundaries, those of 8-bit types on 8-byte ones. */
#include "core/merge.clh"
#include "core/task.clh"

#define CLA_ROW_GROUPS (CLA_BLOCK_ROWS / 4)
#define CLA_COLUMNS (CLA_WG_SIZE / CLA_ROW_GROUPS)
#define CLA_KEYS (CLA_BLOCK_KV / CLA_COLUMNS)
#if CLA_BLOCK_ROWS % 4 != 0 || CLA_WG_SIZE % CLA_ROW_GROUPS != 0 || \
    CLA_BLOCK_KV % CLA_COLUMNS != 0 || CLA_BLOCK_KV % 4 != 0 || CLA_WG_SIZE < CLA_BLOCK_KV
#error "prefill_gpu.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

#if CLA_HEAD_DIM < 32
#define CLA_DIMS_QK CLA_HEAD_DIM
#else
#define CLA_DIMS_QK 32
#endif
#define CLA_DIMS_PV (4 * CLA_COLUMNS)
#define CLA_SLICES ((CLA_HEAD_DIM + CLA_DIMS_PV - 1) / CLA_DIMS_PV)

/* Strides of local tiles, in float4. An odd one spreads lanes that read a column over all banks. */
#define CLA_QK_STRIDE (CLA_DIMS_QK / 4 + 1)
#define CLA_P_STRIDE (CLA_BLOCK_KV / 4 + (CLA_BLOCK_ROWS <= 64)) /* 128 rows fit 48 KiB without */
#define CLA_V_STRIDE CLA_COLUMNS
#define CLA_QK_QUADS ((CLA_BLOCK_ROWS + CLA_BLOCK_KV) * CLA_QK_STRIDE)
#define CLA_V_QUADS (CLA_BLOCK_KV * CLA_V_STRIDE)
#if CLA_QK_QUADS > CLA_V_QUADS
#define CLA_STAGE_QUADS CLA_QK_QUADS
#else
#define CLA_STAGE_QUADS CLA_V_QUADS
#endif

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

/* Copies dims [dim, dim + width) of the tile's keys or values to stage[BLOCK_KV][stride]; 0 for
   keys that no row sees, whose rows are not read. */
static inline void cla_stage_kv(__local float4* stage, uint stride, __global const CLA_KV_T* cache,
                                __local const long* key_at, uint dim, uint width) {
  const uint units = width / 8;
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_KV * units; i += CLA_WG_SIZE) {
    const uint key = i / units;
    const uint unit = i % units;
    ClaF8 x = cla_zero8();
    if (key_at[key] >= 0) x = cla_kv_expand(cla_kv_raw_load(cache + key_at[key] + dim + 8 * unit));
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
      const float4 k = k_rows[i * CLA_COLUMNS * CLA_QK_STRIDE + d];
#pragma unroll
      for (uint r = 0; r < 4; ++r)
        scores[r * CLA_KEYS + i] = cla_dot4(x[r], k, scores[r * CLA_KEYS + i]);
    }
  }
}

/* sum + weight * v. `masked`: the key may be one that the row does not see. */
static inline float4 cla_add_pv(float weight, float4 v, float4 sum, int masked) {
  return masked && !cla_is_seen(weight) ? sum : mad((float4)(weight), v, sum);
}

/* sums[4] += P V over the tile's keys, for the four own dims. */
static inline void cla_add_slice(float4* sums, __local const float4* p_rows,
                                 __local const float4* v_column, int masked) {
  for (uint key = 0; key < CLA_BLOCK_KV / 4; ++key) {
    float4 v[4];
#pragma unroll
    for (uint i = 0; i < 4; ++i) v[i] = v_column[(4 * key + i) * CLA_V_STRIDE];
#pragma unroll
    for (uint r = 0; r < 4; ++r) {
      const float4 p = p_rows[r * CLA_P_STRIDE + key];
      sums[r] = cla_add_pv(p.x, v[0], sums[r], masked);
      sums[r] = cla_add_pv(p.y, v[1], sums[r], masked);
      sums[r] = cla_add_pv(p.z, v[2], sums[r], masked);
      sums[r] = cla_add_pv(p.w, v[3], sums[r], masked);
    }
  }
}

/* The softmax of the work-item's four rows. */
typedef struct ClaRows {
  ClaRow sight[4];
  float max[4];
  float sum[4]; /* over the own keys only, until the end */
} ClaRows;

/* scores[4][KEYS] = Q K^T of the own rows and keys, a piece of the dims after the other. */
static inline void cla_score_tile(float* scores, __local float4* stage, const ClaTask* task,
                                  __global const CLA_Q_T* q, long offset, long token_stride,
                                  float scale, __global const CLA_KV_T* k_cache,
                                  __local const long* key_at, uint first_row, uint column) {
  __local float4* k_stage = stage + CLA_BLOCK_ROWS * CLA_QK_STRIDE;
#pragma unroll
  for (uint i = 0; i < 4 * CLA_KEYS; ++i) scores[i] = 0.0f;
  for (uint dim = 0; dim < CLA_HEAD_DIM; dim += CLA_DIMS_QK) {
    const uint width = min((uint)CLA_DIMS_QK, CLA_HEAD_DIM - dim);
    cla_stage_q(stage, task, q, offset, token_stride, dim, width, scale);
    cla_stage_kv(k_stage, CLA_QK_STRIDE, k_cache, key_at, dim, width);
    barrier(CLK_LOCAL_MEM_FENCE); /* stage written -> read */
    cla_add_qk(scores, stage + first_row * CLA_QK_STRIDE, k_stage + column * CLA_QK_STRIDE, width);
    barrier(CLK_LOCAL_MEM_FENCE); /* stage read -> overwritten */
  }
}

/* Products become logits; the largest of the own keys go to row_part. */
static inline void cla_mask_tile(float* scores, int* seen, const ClaRows* rows,
                                 const ClaOptions* opt, __local float* row_part, int tile,
                                 uint first_row, uint column) {
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    float highest = CLA_NEG_BIG;
#pragma unroll
    for (uint i = 0; i < CLA_KEYS; ++i) {
      const int key = tile + (int)(column + i * CLA_COLUMNS);
      float* score = &scores[r * CLA_KEYS + i];
      seen[r * CLA_KEYS + i] = cla_sees(&rows->sight[r], key);
      *score = seen[r * CLA_KEYS + i] ? cla_logit(opt, &rows->sight[r], *score, key) : CLA_NEG_BIG;
      highest = fmax(highest, *score);
    }
    row_part[(first_row + r) * CLA_COLUMNS + column] = highest;
  }
}

/* Logits become probabilities in p_tile; the accumulator follows the maxima. */
static inline void cla_weigh_tile(ClaRows* rows, float4 acc[CLA_SLICES][4], const float* scores,
                                  const int* seen, __local const float* row_part,
                                  __local float* p_tile, uint first_row, uint column) {
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    float new_max = rows->max[r];
    for (uint i = 0; i < CLA_COLUMNS; ++i)
      new_max = fmax(new_max, row_part[(first_row + r) * CLA_COLUMNS + i]);
    const float factor = cla_weight_exp2(rows->max[r] - new_max);
    rows->max[r] = new_max;
    rows->sum[r] *= factor;
#pragma unroll
    for (uint i = 0; i < CLA_SLICES; ++i) acc[i][r] *= factor;
#pragma unroll
    for (uint i = 0; i < CLA_KEYS; ++i) {
      const uint key = column + i * CLA_COLUMNS;
      const float weight = cla_weight_exp2(scores[r * CLA_KEYS + i] - new_max);
      const float p = seen[r * CLA_KEYS + i] ? weight : CLA_UNSEEN_WEIGHT;
      rows->sum[r] += p;
      p_tile[(first_row + r) * CLA_P_STRIDE * 4 + key] = p;
    }
  }
}

/* Stores the work-item's dims of a row that exists; `acc`: of that row, a slice every four. */
static inline void cla_store_row(const ClaOptions* opt, const ClaTask* task,
                                 const ClaResults* results, __global float* partial_out,
                                 __global float* partial_lse2, uint row, float max, float sum,
                                 float4 acc[CLA_SLICES][4], uint r, uint column) {
  const uint num_kv_heads = results->num_heads / CLA_GROUP;
  const ClaRowEnd end = cla_end_row(opt, task, row, num_kv_heads, max, sum);
  const ulong result_row = cla_result_row(task, row, num_kv_heads);
  __global CLA_Q_T* to = results->out + cla_query_at(task, row, 0, results->out_token_stride);
  const int partial = task->item.partial_row >= 0;
#pragma unroll
  for (uint slice = 0; slice < CLA_SLICES; ++slice) {
    const uint dim = slice * CLA_DIMS_PV + 4 * column;
    const ulong result_at = result_row * CLA_HEAD_DIM + dim;
    const float4 result = acc[slice][r] * end.factor;
    if (dim < CLA_HEAD_DIM && partial) cla_store4_f32(result, partial_out + result_at);
    if (dim < CLA_HEAD_DIM && !partial) cla_store_result(opt, result, to + dim, result_at);
  }
  if (column != 0) return;
  if (partial) {
    partial_lse2[result_row] = end.lse2;
  } else if (results->write_lse) {
    results->lse[result_row] = cla_natural_lse(end.lse2);
  }
}

CLA_KERNEL clattn_prefill_gpu(CLA_PARAMS) {
  __local float4 stage[CLA_STAGE_QUADS]; /* Q and K dims of a tile, then V dims */
  __local float4 p_tile[CLA_BLOCK_ROWS * CLA_P_STRIDE];
  __local float row_part[CLA_BLOCK_ROWS * CLA_COLUMNS]; /* maxima per column, in the end sums */
  __local long key_at[CLA_BLOCK_KV]; /* element of key i's row in the cache, -1: no row sees it */

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const uint column = lid % CLA_COLUMNS;
  const uint first_row = lid / CLA_COLUMNS * 4;
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  const float query_scale = cla_query_scale(&opt, &task, call.scale_log2e);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = (long)task.kv_head * call.head_stride;

  ClaRows rows;
  float4 acc[CLA_SLICES][4];
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    rows.sight[r] = cla_row(&opt, &task, first_row + r, call.causal);
    rows.max[r] = CLA_NEG_BIG;
    rows.sum[r] = 0.0f;
#pragma unroll
    for (uint i = 0; i < CLA_SLICES; ++i) acc[i][r] = (float4)(0.0f);
  }

  for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
    if (lid < CLA_BLOCK_KV) {
      const uint position = (uint)tile + lid;
      key_at[lid] = position < (uint)keys.end
                        ? head_at + cla_key_row(&task.item, cla_page_of(pages, position), position,
                                                call.block_stride, call.token_stride)
                        : -1;
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* key_at written -> read */

    float scores[4 * CLA_KEYS];
    int seen[4 * CLA_KEYS];
    cla_score_tile(scores, stage, &task, q, call.q_offset, call.q_token_stride, query_scale,
                   k_cache + call.k_offset, key_at, first_row, column);
    cla_mask_tile(scores, seen, &rows, &opt, row_part, tile, first_row, column);
    barrier(CLK_LOCAL_MEM_FENCE); /* row_part written -> read; its readers pass the next barrier
                                     before it is rewritten */
    cla_weigh_tile(&rows, acc, scores, seen, row_part, (__local float*)p_tile, first_row, column);

    const int masked =
        CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end; /* for some row */
#pragma unroll
    for (uint slice = 0; slice < CLA_SLICES; ++slice) {
      const uint dim = slice * CLA_DIMS_PV;
      const uint width = min((uint)CLA_DIMS_PV, CLA_HEAD_DIM - dim);
      cla_stage_kv(stage, CLA_V_STRIDE, CLA_VALUES, key_at, dim, width);
      barrier(CLK_LOCAL_MEM_FENCE); /* stage and p_tile written -> read */
      __local const float4* p_rows = p_tile + first_row * CLA_P_STRIDE;
      if (column * 4 < width) {
        if (masked) {
          cla_add_slice(acc[slice], p_rows, stage + column, 1);
        } else {
          cla_add_slice(acc[slice], p_rows, stage + column, 0);
        }
      }
      barrier(CLK_LOCAL_MEM_FENCE); /* stage read -> overwritten; behind the last slice also key_at
                                       and p_tile */
    }
  }

#pragma unroll
  for (uint r = 0; r < 4; ++r) row_part[(first_row + r) * CLA_COLUMNS + column] = rows.sum[r];
  barrier(CLK_LOCAL_MEM_FENCE); /* row_part written -> read */
  const ClaResults results = CLA_RESULTS;
#pragma unroll
  for (uint r = 0; r < 4; ++r) {
    const uint row = first_row + r;
    float sum = 0.0f;
    for (uint i = 0; i < CLA_COLUMNS; ++i) sum += row_part[row * CLA_COLUMNS + i];
    if (cla_row_exists(&task, row))
      cla_store_row(&opt, &task, &results, CLA_PARTIAL_OUT, CLA_PARTIAL_LSE2, row, rows.max[r], sum,
                    acc, r, column);
  }
}
