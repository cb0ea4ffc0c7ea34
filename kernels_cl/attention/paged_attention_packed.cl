/* Decode over x-packed caches (the original paged_attention_v1 and v2): one query token a request.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     kv_begin <= p < kv_end

   keys   [pages, num_kv_heads, HEAD_DIM / X, PAGE_SIZE, X], X = 16 bytes of elements
   values [pages, num_kv_heads, HEAD_DIM, PAGE_SIZE]

   One work-group serves one work item for one KV head; its rows are the query heads of that head.

     for each tile of BLOCK_KV keys
       K: cache -> local memory, as f32 rows        (a run of tokens is what lies together)
       S = Q K^T: one (row, key) a work-item and turn
       V: cache -> local memory, turned into rows;  softmax: one row a work-item
       acc[row][quad] += p V                        one (row, quad of dims) a work-item and turn

   K and V are read once for all rows: 2 HEAD_DIM multiply-adds a row for 2 HEAD_DIM elements, so
   memory is the limit up to some eight rows. The same code serves CPUs with groups of one.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8 and of X
   CLA_CACHE_X          elements    4, 8 or 16 for 4, 2 and 1 bytes
   CLA_PAGE_SIZE        tokens      >= 1; multiples of 8 let V be read eight tokens at a time
   CLA_BLOCK_ROWS       rows        >= CLA_HEADS_PER_ITEM
   CLA_BLOCK_KV         keys        multiples of 8
   CLA_WG_SIZE          work-items  1 (CPU) or more

   Local memory at HEAD_DIM 256, BLOCK_KV 16: 17 KiB for the tile and 1 KiB a row. */
#define CLA_TEAM 1
#define CLA_TEAM_KEYS 0
#define CLA_LANE_ROWS 1
#define CLA_ROW_SCORES CLA_BLOCK_KV
#define CLA_ACC_QUADS 1 /* not of the row whose scores a lane holds */
#include "tile/scalar.clh"

#include "attention/results.clh"
#include "attention/softmax.clh"

#if CLA_HEAD_DIM % CLA_CACHE_X != 0 || CLA_BLOCK_KV % 8 != 0
#error "paged_attention_packed.cl: CLA_HEAD_DIM, CLA_CACHE_X and CLA_BLOCK_KV do not fit"
#endif

#define CLA_QUADS (CLA_HEAD_DIM / 4)
#define CLA_STRIDE \
  (CLA_QUADS + 1) /* of a key in the tile, in float4; spreads keys over the banks */
#define CLA_ACCS ((CLA_BLOCK_ROWS * CLA_QUADS + CLA_WG_SIZE - 1) / CLA_WG_SIZE)
#if CLA_WG_SIZE > 1
#define CLA_UNROLL_ACCS _Pragma("unroll") /* sums in registers */
#else
#define CLA_UNROLL_ACCS _Pragma("unroll 1") /* sums in memory, too many to unroll over */
#endif
#define CLA_PLANE ((long)CLA_HEAD_DIM * CLA_PAGE_SIZE) /* elements of a page's head, K or V */
#define CLA_RUN (CLA_PAGE_SIZE % 8 == 0 ? 8 : 1)       /* tokens of V that are read together */

/* One cache element, in the units of cla_kv_expand. */
static inline float cla_kv_load1(__global const CLA_KV_T* p) {
#if CLA_KV_DTYPE == 0
  return *p;
#elif CLA_KV_DTYPE == 1
  return vload_half(0, (__global const half*)p);
#elif CLA_KV_DTYPE == 2
  return as_float((uint)*p << 16);
#else
  return CLA_KV_DECODE(*p) * (1.0f / CLA_KV_UNIT);
#endif
}

/* Dims 8 * octet ... + 7 of a token. `plane`: its page's keys of this head. */
static inline ClaF8 cla_packed_load_key(__global const CLA_KV_T* plane, uint octet, uint token) {
  const long block = (long)(octet * 8 / CLA_CACHE_X) * CLA_PAGE_SIZE * CLA_CACHE_X;
  __global const CLA_KV_T* from =
      plane + block + (long)token * CLA_CACHE_X + octet * 8 % CLA_CACHE_X;
#if CLA_CACHE_X == 4
  ClaF8 x;
  x.lo = vload4(0, from);
  x.hi = vload4(0, from + (long)CLA_PAGE_SIZE * CLA_CACHE_X);
  return x;
#else
  return cla_kv_expand(cla_kv_raw_load(from));
#endif
}

/* The tile's page of a position and the plane of this head in it. */
static inline long cla_plane_at(const ClaTask* task, __global const int* pages, uint position,
                                uint num_kv_heads) {
  const long page = (long)pages[position / CLA_PAGE_SIZE];
  return (page * (long)num_kv_heads + (long)task->kv_head) * CLA_PLANE;
}

/* tile[BLOCK_KV][STRIDE]: the keys at tile_at ... + BLOCK_KV as rows; zeros from `end` on, where
   nothing is read. */
static inline void cla_stage_keys(__local float4* tile, const ClaTask* task,
                                  __global const int* pages, __global const CLA_KV_T* cache,
                                  int tile_at, uint num_kv_heads) {
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_KV * CLA_QUADS / 2; i += CLA_WG_SIZE) {
    const uint key = i % CLA_BLOCK_KV;
    const uint octet = i / CLA_BLOCK_KV;
    const uint position = (uint)tile_at + key;
    ClaF8 x = cla_zero8();
    if (position < (uint)task->item.kv_end) {
      x = cla_packed_load_key(cache + cla_plane_at(task, pages, position, num_kv_heads), octet,
                              position % CLA_PAGE_SIZE);
    }
    tile[key * CLA_STRIDE + 2 * octet] = x.lo;
    tile[key * CLA_STRIDE + 2 * octet + 1] = x.hi;
  }
}

/* RUN tokens of V at one dim, the first `left` of which exist; the others, whatever they hold,
   become 0. */
static inline void cla_load_run(__global const CLA_KV_T* from, int left, float* values) {
#if CLA_PAGE_SIZE % 8 == 0
  const ClaF8 x = cla_kv_expand(cla_kv_raw_load(from));
  vstore4(x.lo, 0, values);
  vstore4(x.hi, 1, values);
  for (int i = 1; i < 8; ++i) values[i] = i < left ? values[i] : 0.0f;
#else
  values[0] = cla_kv_load1(from);
#endif
}

/* The same for values, which lie token by token at each dim. */
static inline void cla_stage_values(__local float4* tile, const ClaTask* task,
                                    __global const int* pages, __global const CLA_KV_T* cache,
                                    int tile_at, uint num_kv_heads) {
  const uint runs = CLA_BLOCK_KV / CLA_RUN;
  for (uint i = (uint)get_local_id(0); i < runs * CLA_HEAD_DIM; i += CLA_WG_SIZE) {
    const uint key = i % runs * CLA_RUN;
    const uint dim = i / runs;
    const uint position = (uint)tile_at + key;
    float values[CLA_RUN];
    for (int j = 0; j < CLA_RUN; ++j) values[j] = 0.0f;
    if (position < (uint)task->item.kv_end) {
      cla_load_run(cache + cla_plane_at(task, pages, position, num_kv_heads) +
                       (long)dim * CLA_PAGE_SIZE + (long)(position % CLA_PAGE_SIZE),
                   task->item.kv_end - (int)position, values);
    }
    for (uint j = 0; j < CLA_RUN; ++j)
      ((__local float*)tile)[(key + j) * CLA_STRIDE * 4 + dim] = values[j];
  }
}

/* <q, k> */
static inline float cla_product(__local const float4* q, __local const float4* k) {
  float4 even = (float4)(0.0f), odd = (float4)(0.0f);
  for (uint d = 0; d < CLA_QUADS; d += 2) {
    even = mad(q[d], k[d], even);
    odd = mad(q[d + 1], k[d + 1], odd);
  }
  const float4 sum = even + odd;
  return (sum.x + sum.y) + (sum.z + sum.w);
}

/* What rows carry from tile to tile, and the probabilities of the tile. */
typedef struct ClaRowsState {
  ClaRowState state[CLA_BLOCK_ROWS];
  float factor[CLA_BLOCK_ROWS]; /* of the accumulator before the tile */
  float p[CLA_BLOCK_ROWS * CLA_BLOCK_KV];
} ClaRowsState;

/* Turns a row's scores into probabilities. */
static inline void cla_take_row(__local ClaRowsState* rows, uint r, const ClaTask* task,
                                const ClaOptions* opt, int tile) {
  __local float* p = rows->p + r * CLA_BLOCK_KV;
  const ClaRow row = cla_row(opt, task, r, 0);
  ClaRowState state = rows->state[r];
  float scores[CLA_BLOCK_KV];
  float factor;
#pragma unroll
  for (uint i = 0; i < CLA_BLOCK_KV; ++i) scores[i] = p[i];
  cla_rows_to_probabilities(scores, &factor, &state, &row, opt, 1.0f, tile,
                            tile + CLA_BLOCK_KV > row.keys.end, 0);
#pragma unroll
  for (uint i = 0; i < CLA_BLOCK_KV; ++i) p[i] = scores[i];
  rows->state[r] = state;
  rows->factor[r] = factor;
}

CLA_KERNEL clattn_paged_attention(CLA_PARAMS) {
  __local float4 q_rows[CLA_BLOCK_ROWS * CLA_QUADS];
  __local float4 tile[CLA_BLOCK_KV * CLA_STRIDE]; /* keys, then values */
  __local ClaRowsState row_states;

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const uint rows = task.item.q_count > 0 ? task.num_heads : 0; /* 0: padding of recorded steps */
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  v_cache = CLA_VALUES;
  k_cache += call.k_offset;

  for (uint i = lid; i < rows * CLA_QUADS / 2; i += CLA_WG_SIZE) {
    const uint row = i / (CLA_QUADS / 2);
    const uint dim = i % (CLA_QUADS / 2) * 8;
    const ClaF8 x = cla_scale8(
        CLA_Q_LOAD8(q + cla_query_at(&task, row, call.q_offset, call.q_token_stride) + dim),
        cla_query_scale(&opt, &task, call.scale_log2e));
    q_rows[2 * i] = x.lo;
    q_rows[2 * i + 1] = x.hi;
  }
  for (uint row = lid; row < rows; row += CLA_WG_SIZE) row_states.state[row] = cla_no_keys();
  float4 acc[CLA_ACCS];
  CLA_UNROLL_ACCS
  for (uint i = 0; i < CLA_ACCS; ++i) acc[i] = (float4)(0.0f);
  barrier(CLK_LOCAL_MEM_FENCE); /* q_rows and states written -> read */

  for (int at = task.item.kv_begin; at < task.item.kv_end; at += CLA_BLOCK_KV) {
    cla_stage_keys(tile, &task, pages, k_cache, at, (uint)call.num_kv_heads);
    barrier(CLK_LOCAL_MEM_FENCE); /* keys written -> read */
    for (uint i = lid; i < rows * CLA_BLOCK_KV; i += CLA_WG_SIZE) {
      const uint row = i / CLA_BLOCK_KV;
      const uint key = i % CLA_BLOCK_KV;
      row_states.p[i] = cla_product(q_rows + row * CLA_QUADS, tile + key * CLA_STRIDE);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* keys read -> overwritten; products written -> read */
    cla_stage_values(tile, &task, pages, v_cache, at, (uint)call.num_kv_heads);
    for (uint row = lid; row < rows; row += CLA_WG_SIZE)
      cla_take_row(&row_states, row, &task, &opt, at);
    barrier(CLK_LOCAL_MEM_FENCE); /* values, probabilities and factors written -> read */
    CLA_UNROLL_ACCS
    for (uint i = 0; i < CLA_ACCS; ++i) {
      const uint pair = CLA_GROUP_DEALT(i);
      const uint row = pair / CLA_QUADS;
      if (row < rows) {
        float4 sum = acc[i] * row_states.factor[row];
        for (uint key = 0; key < CLA_BLOCK_KV; ++key)
          sum = mad((float4)(row_states.p[row * CLA_BLOCK_KV + key]),
                    tile[key * CLA_STRIDE + pair % CLA_QUADS], sum);
        acc[i] = sum;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* values and probabilities read -> overwritten */
  }

  const ClaResults results = CLA_RESULTS;
  CLA_UNROLL_ACCS
  for (uint i = 0; i < CLA_ACCS; ++i) {
    const uint pair = CLA_GROUP_DEALT(i);
    const uint row = pair / CLA_QUADS;
    if (row < rows)
      cla_store_row(&opt, &task, &results, row, row_states.state[row], &acc[i], 1,
                    pair % CLA_QUADS * 4, 4);
  }
}
