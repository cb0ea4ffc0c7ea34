/* Paged attention for few rows per key range: decode and short queries, on a GPU.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows share every key read.
   The lanes of a team hold a row's head dims, eight each, or sixteen above 256; the teams walk the
   key range side by side, BLOCK_KV keys at a step:

     for each step of the group            (as many for every team: barriers, shuffles are uniform)
       load V of this step                 (in flight during the dots)
       s[row][key] = <q, k> over own dims  (q from local memory)
       load K of the next step             (in flight during all that follows)
       s = sum of s over the team's lanes  (the only exchange between lanes)
       online softmax per team; acc += p * V

   and one tree merge of the teams through local memory ends the item.

   Registers (ptxas for sm_90, 16-bit cache, head size 128, CLA_PTX 1, no spills; clang 19), and
   bytes of K and V that the resident groups of 128 can have in flight on a multiprocessor of 65 536
   registers:

     BLOCK_ROWS 1, BLOCK_KV 4:   118 registers    4 groups     64 KiB
     BLOCK_ROWS 4, BLOCK_KV 4:   147 registers    3 groups     48 KiB
     BLOCK_ROWS 8, BLOCK_KV 2:   174 registers    2 groups     16 KiB

   Local memory: at most 36 KiB with groups of 128 and BLOCK_ROWS * BLOCK_KV <= 32, 20 KiB up to 256
   dims.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    8 ... 512, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_PAGE_SIZE        tokens      0: no pages; multiples of CLA_BLOCK_KV need fewer look-ups
   CLA_BLOCK_ROWS       rows        1, 2, 4, 8
   CLA_BLOCK_KV         keys        per team and step: 1, 2, 4, 8
   CLA_WG_SIZE          work-items  power of two, 32 ... 256
   CLA_PTX              -           tile/scalar.clh
   CLA_MERGE_TAIL       -           core/last_arrival.clh */
#if !defined(CLA_PTX)
#error "decode_gpu.cl needs CLA_PTX"
#endif

/* Lanes of a key: HEAD_DIM / 8 rounded up to a power of two, at most 32; the lanes past the last
   dim hold zeros. A lane has UNITS times eight dims, TEAM * 8 apart. */
#define CLA_TEAM                                                                                \
  (1 << ((CLA_HEAD_DIM > 8) + (CLA_HEAD_DIM > 16) + (CLA_HEAD_DIM > 32) + (CLA_HEAD_DIM > 64) + \
         (CLA_HEAD_DIM > 128)))
#define CLA_UNITS (CLA_HEAD_DIM > 256 ? 2 : 1)
#define CLA_UNIT_STEP (CLA_TEAM * 8)
#define CLA_TEAM_KEYS 0
#define CLA_LANE_ROWS CLA_BLOCK_ROWS
#define CLA_ROW_SCORES CLA_BLOCK_KV
#define CLA_ACC_QUADS (2 * CLA_UNITS)
#include "core/dims.clh"
#include "tile/scalar.clh"

#include "attention/results.clh"
#include "attention/softmax.clh"
#include "core/last_arrival.clh"

#if CLA_BLOCK_ROWS != 1 && CLA_BLOCK_ROWS != 2 && CLA_BLOCK_ROWS != 4 && CLA_BLOCK_ROWS != 8
#error "CLA_BLOCK_ROWS must be 1, 2, 4 or 8"
#endif
#if CLA_BLOCK_KV != 1 && CLA_BLOCK_KV != 2 && CLA_BLOCK_KV != 4 && CLA_BLOCK_KV != 8
#error "CLA_BLOCK_KV must be 1, 2, 4 or 8"
#endif
#if CLA_WG_SIZE != 32 && CLA_WG_SIZE != 64 && CLA_WG_SIZE != 128 && CLA_WG_SIZE != 256
#error "CLA_WG_SIZE must be 32, 64, 128 or 256"
#endif

#define CLA_STEP_KEYS (CLA_TEAMS * CLA_BLOCK_KV)
/* Local memory: queries and, behind them, sums; in the end the merge of teams. */
#define CLA_QUERY_QUADS (CLA_BLOCK_ROWS * CLA_TEAM * CLA_ACC_QUADS)
#define CLA_STEP_QUADS (CLA_QUERY_QUADS + (CLA_SUM_FLOATS + 3) / 4)
#define CLA_MERGE_TEAM_QUADS ((CLA_MERGE_FLOATS + 3) / 4)
#define CLA_LOCAL_QUADS \
  (CLA_STEP_QUADS > CLA_MERGE_TEAM_QUADS ? CLA_STEP_QUADS : CLA_MERGE_TEAM_QUADS)

/* A team's keys start at a multiple of BLOCK_KV, so with such pages they share one. */
#define CLA_PAGES_PER_STEP (CLA_PAGE_SIZE % CLA_BLOCK_KV == 0 ? 1 : CLA_BLOCK_KV)

/* Physical pages of the BLOCK_KV keys from `first` on. Keys outside [begin, last] stand for the
   nearest one inside: what they load is valid and never used, and every lane runs the same straight
   code. */
static inline void cla_decode_gpu_find_pages(int* page, __global const int* pages, int first,
                                             int begin, int last) {
#pragma unroll
  for (int i = 0; i < CLA_PAGES_PER_STEP; ++i)
    page[i] = cla_page_of(pages, (uint)clamp(first + i, begin, last));
}

/* Elements from the start of the cache to the rows of those keys. */
static inline void cla_find_rows(long* row, const ClaWorkItem* item, const int* page, int first,
                                 int begin, int last, long block_stride, long token_stride) {
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    row[i] = cla_key_row(item, page[i % CLA_PAGES_PER_STEP], (uint)clamp(first + i, begin, last),
                         block_stride, token_stride);
  }
}

/* raw[UNITS][BLOCK_KV]: the lane's dims of rows, from its first, `dim`, on, as far as there are
   `num_dims`. */
static inline void cla_decode_gpu_load_rows(ClaKvRaw* raw, __global const CLA_KV_T* cache,
                                            const long* row, uint dim, uint num_dims) {
#pragma unroll
  for (uint u = 0; u < CLA_UNITS; ++u) {
    if (dim + u * CLA_UNIT_STEP >= num_dims) continue;
#pragma unroll
    for (int i = 0; i < CLA_BLOCK_KV; ++i)
      raw[(int)u * CLA_BLOCK_KV + i] =
          cla_kv_raw_load(cache + row[i] + (long)CLA_KV_ROOM((u * CLA_UNIT_STEP)));
  }
}

/* Scaled queries, else zeros, to q_tile[BLOCK_ROWS][UNITS][TEAM][2]. */
static inline void cla_decode_gpu_load_queries(__local float4* q_tile, const ClaTask* task,
                                               __global const CLA_Q_T* q, long offset,
                                               long token_stride, float scale) {
  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_ROWS * CLA_UNITS * CLA_TEAM;
       i += CLA_WG_SIZE) {
    const uint row = i / (CLA_UNITS * CLA_TEAM);
    const uint dim = i % (CLA_UNITS * CLA_TEAM) * 8;
    ClaF8 x = cla_zero8();
    if (cla_row_exists(task, row) && dim < CLA_HEAD_DIM)
      x = cla_scale8(CLA_Q_LOAD8(q + cla_query_at(task, row, offset, token_stride) + dim), scale);
    q_tile[2 * i] = x.lo;
    q_tile[2 * i + 1] = x.hi;
  }
}

/* Codes of 4 bits are expanded by the zero that their row's scale holds. */
#if CLA_KV_DTYPE == 6
#define CLA_ZEROS_PARAM , const float2* scales
#define CLA_ZEROS_OF(scales) , scales
#define CLA_SCALES_FIRST CLA_LOAD_SCALES
#define CLA_SCALES_LATER
#else
#define CLA_ZEROS_PARAM
#define CLA_ZEROS_OF(scales)
#define CLA_SCALES_FIRST
#define CLA_SCALES_LATER CLA_LOAD_SCALES
#endif
/* Those of a step's keys, once it needs them. */
#define CLA_LOAD_SCALES        \
  float2 scales[CLA_BLOCK_KV]; \
  cla_load_scales(scales, &opt, task.kv_head, pages, first, begin, last);

/* scores[BLOCK_ROWS][BLOCK_KV] = <q, k> over the lane's dims. */
static inline void cla_score_rows(float* scores, const ClaKvRaw* k_raw,
                                  __local const float4* q_tile CLA_ZEROS_PARAM) {
#pragma unroll
  for (uint u = 0; u < CLA_UNITS; ++u) {
    ClaF8 k[CLA_BLOCK_KV];
#pragma unroll
    for (uint i = 0; i < CLA_BLOCK_KV; ++i)
      k[i] = CLA_KV_EXPAND(k_raw[u * CLA_BLOCK_KV + i], scales[i].x);
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      const uint at = ((row * CLA_UNITS + u) * CLA_TEAM + cla_member()) * 2;
      ClaF8 x;
      x.lo = q_tile[at];
      x.hi = q_tile[at + 1];
#pragma unroll
      for (uint i = 0; i < CLA_BLOCK_KV; ++i) {
        float* score = scores + row * CLA_BLOCK_KV + i;
        *score = cla_dot8(x, k[i], u == 0 ? 0.0f : *score);
      }
    }
  }
}

#if CLA_ROW_SCALES
/* scales[BLOCK_KV]: those of keys (x) and values (y) from `first` on. */
static inline void cla_load_scales(float2* scales, const ClaOptions* opt, uint kv_head,
                                   __global const int* pages, int first, int begin, int last) {
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    const uint position = (uint)clamp(first + i, begin, last);
    scales[i] =
        cla_row_scales(opt, cla_page_of(pages, position), position % CLA_PAGE_SIZE, kv_head);
  }
}
#endif

/* Adds the values of a step's keys, times their probabilities, to the rows that see them. */
static inline void cla_decode_gpu_add_values(float4* acc, const float* probabilities,
                                             const ClaKvRaw* v_raw CLA_ZEROS_PARAM) {
#pragma unroll
  for (uint i = 0; i < CLA_UNITS * CLA_BLOCK_KV; ++i) {
    const ClaF8 v = CLA_KV_EXPAND(v_raw[i], scales[i % CLA_BLOCK_KV].y);
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      const float p = probabilities[row * CLA_BLOCK_KV + i % CLA_BLOCK_KV];
      if (!cla_is_seen(p)) continue; /* V may hold inf or NaN where this row must not look */
      float4* sum = acc + row * CLA_ACC_QUADS + i / CLA_BLOCK_KV * 2;
      sum[0] = mad((float4)(p), v.lo, sum[0]);
      sum[1] = mad((float4)(p), v.hi, sum[1]);
    }
  }
}

CLA_KERNEL clattn_decode_gpu(CLA_PARAMS) {
  __local float4 q_tile[CLA_LOCAL_QUADS]; /* scaled queries, else zeros */
  __local float* sums = (__local float*)(q_tile + CLA_QUERY_QUADS);

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint dim = 8 * cla_member();
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  cla_decode_gpu_load_queries(q_tile, &task, q, call.q_offset, call.q_token_stride,
                              cla_query_scale(&opt, &task, call.scale_log2e));
  barrier(CLK_LOCAL_MEM_FENCE); /* q_tile written -> read */

  ClaRowState state[CLA_BLOCK_ROWS];
  float4 acc[CLA_ACC_QUADS * CLA_BLOCK_ROWS];
#pragma unroll
  for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) state[row] = cla_no_keys();
#pragma unroll
  for (uint i = 0; i < CLA_ACC_QUADS * CLA_BLOCK_ROWS; ++i) acc[i] = (float4)(0.0f);

  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const int begin = keys.begin;
  const int last = keys.end - 1;
  const int aligned_begin = begin - begin % CLA_BLOCK_KV;
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = (long)task.kv_head * call.head_stride + CLA_KV_ROOM(dim);
  __global const CLA_KV_T* k_lane = k_cache + call.k_offset + head_at;
  __global const CLA_KV_T* v_lane = CLA_VALUES + head_at;

  int first = aligned_begin + (int)cla_team() * CLA_BLOCK_KV; /* the team's first key of the step */
  int page[CLA_PAGES_PER_STEP]; /* of the step after the rows in `at` */
  long at[CLA_BLOCK_KV];
  ClaKvRaw k_raw[CLA_UNITS * CLA_BLOCK_KV];
  ClaKvRaw v_raw[CLA_UNITS * CLA_BLOCK_KV];
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) at[i] = 0;
#pragma unroll
  for (int i = 0; i < CLA_UNITS * CLA_BLOCK_KV; ++i) {
    k_raw[i] = cla_kv_raw_zero();
    v_raw[i] = cla_kv_raw_zero();
  }
  if (begin <= last) {
    cla_decode_gpu_find_pages(page, pages, first, begin, last);
    cla_find_rows(at, &task.item, page, first, begin, last, call.block_stride, call.token_stride);
    cla_decode_gpu_find_pages(page, pages, first + CLA_STEP_KEYS, begin, last);
    cla_decode_gpu_load_rows(k_raw, k_lane, at, dim, CLA_HEAD_DIM);
  }

  for (int step = aligned_begin; step <= last; step += CLA_STEP_KEYS) {
    cla_decode_gpu_load_rows(v_raw, v_lane, at, dim, CLA_VALUE_DIM);

    CLA_SCALES_FIRST
    float scores[CLA_SCORES]; /* [BLOCK_ROWS][BLOCK_KV] */
    cla_score_rows(scores, k_raw, q_tile CLA_ZEROS_OF(scales));

    /* The next step's K; behind the last one, the range's last key again. */
    cla_find_rows(at, &task.item, page, first + CLA_STEP_KEYS, begin, last, call.block_stride,
                  call.token_stride);
    cla_decode_gpu_find_pages(page, pages, first + 2 * CLA_STEP_KEYS, begin, last);
    cla_decode_gpu_load_rows(k_raw, k_lane, at, dim, CLA_HEAD_DIM);

    cla_sum_over_team(scores, sums);
#if CLA_ROW_SCALES
    CLA_SCALES_LATER
#pragma unroll
    for (uint i = 0; i < CLA_SCORES; ++i) scores[i] *= CLA_SCALE(scales[i % CLA_BLOCK_KV].x);
#endif
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      const ClaRow sight = cla_row(&opt, &task, row, call.causal);
      float factor;
      cla_rows_to_probabilities(scores + row * CLA_BLOCK_KV, &factor, &state[row], &sight, &opt,
                                1.0f, first, 1, 0);
      cla_rescale_rows(acc + CLA_ACC_QUADS * row, &factor);
    }
#if CLA_ROW_SCALES
#pragma unroll
    for (uint i = 0; i < CLA_SCORES; ++i)
      scores[i] = cla_scaled_probability(scores[i], CLA_SCALE(scales[i % CLA_BLOCK_KV].y));
#endif
    cla_decode_gpu_add_values(acc, scores, v_raw CLA_ZEROS_OF(scales));
    first += CLA_STEP_KEYS;
  }

  cla_merge_teams(state, acc, (__local float*)q_tile);

  const ClaResults results = CLA_RESULTS;
#pragma unroll
  for (uint i = 0; i < CLA_BLOCK_ROWS * CLA_UNITS; ++i) {
    const uint row = i / CLA_UNITS;
    if (cla_team() == 0)
      cla_store_row(&opt, &task, &results, row, state[row], acc + 2 * i, 2,
                    dim + i % CLA_UNITS * CLA_UNIT_STEP, 4);
  }
#if CLA_MERGE_TAIL
  __local int last_arrival;
  cla_merge_if_last(&opt, &task, &results, CLA_ARRIVALS, &last_arrival);
#endif
}
