/* Decode over x-packed caches (the original paged_attention_v1 and v2): one query token a request.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     kv_begin <= p < kv_end

   keys   [pages, num_kv_heads, HEAD_DIM / X, PAGE_SIZE, X], X = 16 bytes of elements
   values [pages, num_kv_heads, HEAD_DIM, PAGE_SIZE]

   One work-group serves one work item for one KV head; its rows are the query heads of that head.

     for each tile of BLOCK_KV keys
       K: cache -> local memory, as f32 rows        (a run of tokens is what lies together)
       scores: one (row, key) a work-item and turn
       V: cache -> local memory, turned into rows;  softmax: one row a work-item
       acc[row][quad] += p V                        one (row, quad of dims) a work-item and turn

   K and V are read once for all rows: 2 HEAD_DIM multiply-adds a row for 2 HEAD_DIM elements, so
   memory is the limit up to some eight rows. The same code serves CPUs with groups of one.

   macro                unit        legal values
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8 and of X
   CLA_GROUP            heads       query heads per KV head, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           0 f32, 1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           0 f32, 1 f16, 2 bf16, 3 fp8_e4m3, 4 fp8_e5m2, 5 int8: caches
   CLA_CACHE_X          elements    4, 8 or 16 for 4, 2 and 1 bytes
   CLA_PAGE_SIZE        tokens      >= 1; multiples of 8 let V be read eight tokens at a time
   CLA_BLOCK_ROWS       rows        >= CLA_HEADS_PER_ITEM
   CLA_BLOCK_KV         keys        multiples of 8
   CLA_WG_SIZE          work-items  1 (CPU) or more

   Local memory at HEAD_DIM 256, BLOCK_KV 16: 17 KiB for the tile and 1 KiB a row.
   Launch: num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. */
#include "core/options.clh"
#include "core/task.clh"

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
static inline ClaF8 cla_load_key(__global const CLA_KV_T* plane, uint octet, uint token) {
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
      x = cla_load_key(cache + cla_plane_at(task, pages, position, num_kv_heads), octet,
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
  (void)left;
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

/* A logit in base 2: <q, k>, scaled already, plus what the layer adds. */
static inline float cla_score(const ClaOptions* opt, const ClaTask* task, __local const float4* q,
                              __local const float4* k, uint row, int position) {
  float4 even = (float4)(0.0f), odd = (float4)(0.0f);
  for (uint d = 0; d < CLA_QUADS; d += 2) {
    even = mad(q[d], k[d], even);
    odd = mad(q[d + 1], k[d + 1], odd);
  }
  const float4 sum = even + odd;
  float logit = (sum.x + sum.y) + (sum.z + sum.w);
#if CLA_ALIBI
  logit += opt->head_params[task->first_head + row] * (float)(position - task->item.q_pos);
#else
  (void)opt;
  (void)task;
  (void)row;
  (void)position;
#endif
  return position < task->item.kv_end ? logit : CLA_NEG_BIG;
}

/* What rows carry from tile to tile, and the weights of the tile. */
typedef struct ClaRowsState {
  float max[CLA_BLOCK_ROWS];    /* largest logit so far, base 2 */
  float sum[CLA_BLOCK_ROWS];    /* the denominator */
  float factor[CLA_BLOCK_ROWS]; /* what the sums before the tile count */
  float p[CLA_BLOCK_ROWS * CLA_BLOCK_KV];
} ClaRowsState;

/* Turns a row's logits into weights; keys from `left` on get the weight 0. */
static inline void cla_softmax(__local ClaRowsState* state, uint row, int left) {
  __local float* p = state->p + row * CLA_BLOCK_KV;
  const float before = state->max[row];
  float new_max = before;
  for (int i = 0; i < CLA_BLOCK_KV; ++i) new_max = fmax(new_max, p[i]);
  const float factor = cla_weight_exp2(before - new_max);
  float sum = state->sum[row] * factor;
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    const float weight = i < left ? cla_weight_exp2(p[i] - new_max) : 0.0f;
    p[i] = weight;
    sum += weight;
  }
  state->max[row] = new_max;
  state->sum[row] = sum;
  state->factor[row] = factor;
}

#if CLA_KV_QUANT
#define CLA_K_UNIT (cla_k_scale(&opt, task.kv_head) * CLA_KV_UNIT)
#define CLA_V_UNIT (cla_v_scale(&opt, task.kv_head, (uint)call.num_kv_heads) * CLA_KV_UNIT)
#else
#define CLA_K_UNIT 1.0f
#define CLA_V_UNIT 1.0f
#endif

CLA_KERNEL clattn_paged_attention(CLA_PARAMS) {
  __local float4 q_rows[CLA_BLOCK_ROWS * CLA_QUADS];
  __local float4 tile[CLA_BLOCK_KV * CLA_STRIDE]; /* keys, then values */
  __local ClaRowsState state;

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const uint rows = task.item.q_count > 0 ? task.num_heads : 0; /* 0: padding of recorded steps */
  const int end = task.item.kv_end;
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  v_cache = CLA_VALUES;
  k_cache += call.k_offset;

  for (uint i = lid; i < rows * CLA_QUADS / 2; i += CLA_WG_SIZE) {
    const uint row = i / (CLA_QUADS / 2);
    const uint dim = i % (CLA_QUADS / 2) * 8;
    const ClaF8 x = cla_scale8(
        CLA_Q_LOAD8(q + cla_query_at(&task, row, call.q_offset, call.q_token_stride) + dim),
        call.scale_log2e * CLA_K_UNIT);
    q_rows[2 * i] = x.lo;
    q_rows[2 * i + 1] = x.hi;
  }
  for (uint row = lid; row < rows; row += CLA_WG_SIZE) {
    state.max[row] = CLA_NEG_BIG;
    state.sum[row] = 0.0f;
  }
  float4 acc[CLA_ACCS];
  CLA_UNROLL_ACCS
  for (uint i = 0; i < CLA_ACCS; ++i) acc[i] = (float4)(0.0f);
  barrier(CLK_LOCAL_MEM_FENCE); /* q_rows and state written -> read */

  for (int at = task.item.kv_begin; at < end; at += CLA_BLOCK_KV) {
    cla_stage_keys(tile, &task, pages, k_cache, at, (uint)call.num_kv_heads);
    barrier(CLK_LOCAL_MEM_FENCE); /* keys written -> read */
    for (uint i = lid; i < rows * CLA_BLOCK_KV; i += CLA_WG_SIZE) {
      const uint row = i / CLA_BLOCK_KV;
      const uint key = i % CLA_BLOCK_KV;
      state.p[i] = cla_score(&opt, &task, q_rows + row * CLA_QUADS, tile + key * CLA_STRIDE, row,
                             at + (int)key);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* keys read -> overwritten; logits written -> read */
    cla_stage_values(tile, &task, pages, v_cache, at, (uint)call.num_kv_heads);
    for (uint row = lid; row < rows; row += CLA_WG_SIZE) cla_softmax(&state, row, end - at);
    barrier(CLK_LOCAL_MEM_FENCE); /* values, weights and factors written -> read */
    CLA_UNROLL_ACCS
    for (uint i = 0; i < CLA_ACCS; ++i) {
      const uint pair = lid + i * CLA_WG_SIZE;
      const uint row = pair / CLA_QUADS;
      if (row < rows) {
        float4 sum = acc[i] * state.factor[row];
        for (uint key = 0; key < CLA_BLOCK_KV; ++key)
          sum = mad((float4)(state.p[row * CLA_BLOCK_KV + key]),
                    tile[key * CLA_STRIDE + pair % CLA_QUADS], sum);
        acc[i] = sum;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* values and weights read -> overwritten */
  }

  CLA_UNROLL_ACCS
  for (uint i = 0; i < CLA_ACCS; ++i) {
    const uint pair = lid + i * CLA_WG_SIZE;
    const uint row = pair / CLA_QUADS;
    const uint dim = pair % CLA_QUADS * 4;
    if (row < rows) {
      const float4 result = acc[i] * (cla_inverse_sum(state.sum[row]) * CLA_V_UNIT);
      const float lse2 = cla_lse2(state.max[row], state.sum[row]);
      const ulong result_row = cla_result_row(&task, row, (uint)call.num_kv_heads);
      if (task.item.partial_row >= 0) {
        cla_store4_f32(result, CLA_PARTIAL_OUT + result_row * CLA_HEAD_DIM + dim);
        if (dim == 0) CLA_PARTIAL_LSE2[result_row] = lse2;
      } else {
        CLA_Q_STORE4(result,
                     out + cla_query_at(&task, row, call.out_offset, call.out_token_stride) + dim);
        if (dim == 0 && call.write_lse) lse[result_row] = cla_natural_lse(lse2);
      }
    }
  }
}
