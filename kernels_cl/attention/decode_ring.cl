/* Paged attention for few rows per key range on a unit of the contract for few rows: the products
   of decode_mma.cl, with keys and values brought to local memory ahead of them. Same meaning, same
   registers.

   A work-group goes through many tasks (a work item for one KV head and chunk): first the one of
   its own number, then there and back over the list, which is sorted by work. Each of its warps has
   a ring of CLA_STAGES stages of local memory, each for 16 keys and their values, and fills it
   ahead of what it multiplies, across tasks, so that memory has work while tasks begin and end:

     for each task of the group
       for each of its tiles that is the warp's
         wait for the tile's stage
         S = K Q                             K read from the stage
         V to registers, then the tile that is CLA_STAGES ahead begins to come to the stage
         P = 2^(S - max), O *= 2^(old max - max), O += V P
       join the warps; the last group of the tile joins its splits (core/last_arrival.clh)

   macro                unit        legal values
   as in decode_mma.cl, but
   CLA_HEAD_DIM         elements    rows of K and V are 128, 256 or 512 bytes
   CLA_PAGE_SIZE        tokens      a multiple of 16

   Local memory: WG_SIZE / 32 * (CLA_STAGES * 32 rows of K + BLOCK_ROWS * (HEAD_DIM + 6) * 4 B) and
   BLOCK_ROWS * HEAD_DIM * 2 B for the queries: 163 KiB with 8 rows of 128 dims of 16 bits.
   Launch: up to num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows
   start on 16-byte boundaries. */
#include "attention/decode_rows.clh"

#define CLA_ROW_BYTES (CLA_HEAD_DIM * (CLA_KV_QUANT ? 1 : 2))
#define CLA_STAGES (CLA_ROW_BYTES <= 256 ? 2 : 1) /* of which eight warps' fit */
#if CLA_ROW_BYTES != 128 && CLA_ROW_BYTES != 256 && CLA_ROW_BYTES != 512
#error "decode_ring.cl: rows of K and V must be 128, 256 or 512 bytes"
#endif
#if CLA_PAGE_SIZE == 0 || CLA_PAGE_SIZE % 16 != 0
#error "decode_ring.cl: pages must be multiples of 16 tokens"
#endif
#define CLA_ROW_UNITS (CLA_ROW_BYTES / 16)
#define CLA_PIECE_UNITS (CLA_BLOCK_KV * CLA_ROW_UNITS) /* keys or values, in units of 16 bytes */
#define CLA_STAGE_UNITS (2 * CLA_PIECE_UNITS)

/* Units of queries that a lane brings: warps take turns, past the last one as well. */
#define CLA_QUERY_UNITS ((CLA_QUERY_LOADS + CLA_WARPS - 1) / CLA_WARPS)

/* Where a warp's copies stand: its next tile. */
typedef struct ClaAhead {
  ClaTask task;
  ClaRange keys;
  ClaDeal deal; /* of the task; from num_tasks on: there is no tile */
  int first;    /* position */
  int page;     /* of the tile */
} ClaAhead;

/* What the tasks of a launch share. */
typedef struct ClaLaunch {
  __global const int* meta;
  int items_at, pages_at;
  uint num_kv_heads, num_tasks;
  int causal;
} ClaLaunch;

/* The warp's first tile of a task. */
static inline int cla_first_tile(ClaRange keys, uint warp) {
  return keys.begin - keys.begin % CLA_BLOCK_KV + (int)warp * CLA_BLOCK_KV;
}

/* Begins with the task dealt, if there is one; padding is the end. */
static inline void cla_ring_enter_task(ClaAhead* ahead, const ClaLaunch* launch,
                                       const ClaOptions* opt, uint warp) {
  if (ahead->deal.number >= launch->num_tasks) return;
  ahead->task =
      cla_task_of(launch->meta, launch->items_at, launch->num_kv_heads, ahead->deal.number);
  ahead->keys = cla_item_keys(opt, &ahead->task.item, launch->causal);
  ahead->first = cla_first_tile(ahead->keys, warp);
  if (ahead->task.item.q_count == 0) ahead->deal.number = launch->num_tasks;
}

/* Goes on to the warp's next task that has a tile for it, if its task has none any more. */
static inline void cla_find_tile(ClaAhead* ahead, const ClaLaunch* launch, const ClaOptions* opt,
                                 uint warp) {
  while (ahead->deal.number < launch->num_tasks && ahead->first >= ahead->keys.end) {
    ahead->deal = cla_next_task(ahead->deal);
    cla_ring_enter_task(ahead, launch, opt, warp);
  }
  if (ahead->deal.number < launch->num_tasks)
    ahead->page = cla_page_of(launch->meta + launch->pages_at + ahead->task.item.pages_at,
                              (uint)ahead->first);
}

/* Where K and V lie. */
typedef struct ClaCache {
  __global const CLA_KV_T* k;
  __global const CLA_KV_T* v;
  long block_stride, token_stride, head_stride; /* elements */
  int halves;                                   /* units do not start on 16-byte boundaries */
} ClaCache;

/* Where unit `unit` of 16 bytes of a row is in a piece. */
static inline uint cla_key_at_unit(uint row, uint unit) {
  return row * CLA_ROW_UNITS + (unit ^ cla_k_swizzle(row));
}
static inline uint cla_value_at_unit(uint row, uint unit) {
  return row * CLA_ROW_UNITS + (unit ^ cla_v_swizzle(row));
}

/* Starts to bring the tile to a stage. */
static inline void cla_ring_load_tile(__local uint4* stage, const ClaAhead* ahead,
                                      const ClaCache* cache, uint lane) {
  const uint token = (uint)ahead->first % CLA_PAGE_SIZE;
  const long head_at =
      (long)ahead->page * cache->block_stride + (long)ahead->task.kv_head * cache->head_stride;
  const ClaUnitAt own = cla_unit_at(lane, CLA_ROW_UNITS);
  const long at = head_at + (long)(token + own.row) * cache->token_stride +
                  (long)own.unit * (CLA_KV_QUANT ? 16 : 8);
  const long step = CLA_LANES / CLA_ROW_UNITS * cache->token_stride;
  __global const CLA_KV_T* k = cache->k + at;
  __global const CLA_KV_T* v = cache->v + at;
#pragma unroll
  for (uint first = 0; first < CLA_BLOCK_KV; first += CLA_LANES / CLA_ROW_UNITS) {
    const uint row = first + own.row;
    cla_copy_unit(stage + cla_key_at_unit(row, own.unit), k, cache->halves, 1);
    cla_copy_unit(stage + CLA_PIECE_UNITS + cla_value_at_unit(row, own.unit), v, cache->halves, 1);
    k += step;
    v += step;
  }
}

/* Starts to bring the warp's next tile to a stage, if there is one, and looks for the one behind. A
   stage's copies are a group. */
static inline void cla_fill_stage(__local uint4* stage, ClaAhead* ahead, const ClaLaunch* launch,
                                  const ClaCache* cache, const ClaOptions* opt, uint warp,
                                  uint lane) {
  if (ahead->deal.number < launch->num_tasks) { /* the same for the warp */
    cla_ring_load_tile(stage, ahead, cache, lane);
    ahead->first += CLA_STEP_KEYS;
    cla_find_tile(ahead, launch, opt, warp);
  }
  cla_commit_copies();
}

/* Starts with the warp's first tiles. */
static inline void cla_fill_ring(__local uint4* ring, ClaAhead* ahead, const ClaLaunch* launch,
                                 const ClaCache* cache, const ClaOptions* opt, uint warp,
                                 uint lane) {
  ahead->keys = cla_range(0, 0);
  ahead->first = 0;
  ahead->deal = cla_first_task();
  cla_ring_enter_task(ahead, launch, opt, warp);
  cla_find_tile(ahead, launch, opt, warp);
  for (uint s = 0; s < CLA_STAGES; ++s)
    cla_fill_stage(ring + s * CLA_STAGE_UNITS, ahead, launch, cache, opt, warp, lane);
}

/* Eight elements of a row, of which `at` is the unit of 16 bytes. */
static inline ClaKvRaw cla_take_eight(__local const uint4* at, uint eight) {
  __local const CLA_KV_WORDS_T* words = (__local const CLA_KV_WORDS_T*)at;
  ClaKvRaw raw;
  raw.bits = words[CLA_KV_QUANT ? eight % 2 : 0];
  return raw;
}

/* K of a tile for this lane, and V. */
static inline void cla_take_k(ClaKvRaw* raw, __local const uint4* stage, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_K_LOADS; ++i) {
    const uint eight = cla_k_unit(lane) + i % CLA_K_UNITS * CLA_K_SPREAD;
    const uint row = cla_k_key(lane) + CLA_K_KEY_STEP(i / CLA_K_UNITS);
    raw[i] = cla_take_eight(stage + cla_key_at_unit(row, CLA_KV_QUANT ? eight / 2 : eight), eight);
  }
}

static inline void cla_take_v(ClaKvRaw* raw, __local const uint4* stage, uint lane) {
  CLA_HIDE(lane); /* worked out at each step, it takes no registers between steps */
#pragma unroll
  for (uint i = 0; i < CLA_V_LOADS; ++i) {
    const uint eight = cla_v_unit(lane) + i % CLA_V_UNITS * CLA_V_SPREAD;
    const uint row = cla_v_key(lane) + CLA_V_KEY_STEP(i / CLA_V_UNITS);
    raw[i] = cla_take_eight(
        stage + CLA_PIECE_UNITS + cla_value_at_unit(row, CLA_KV_QUANT ? eight / 2 : eight), eight);
  }
}

/* Starts to load the lane's units of the queries of a task, if there is one. */
static inline void cla_ring_load_queries(uint4* query, const ClaLaunch* launch, uint number,
                                         __global const CLA_Q_T* q, long q_offset,
                                         long q_token_stride, uint warp, uint lane) {
  if (number >= launch->num_tasks) return;
  const ClaTask task = cla_task_of(launch->meta, launch->items_at, launch->num_kv_heads, number);
#pragma unroll
  for (uint i = 0; i < CLA_QUERY_UNITS; ++i) {
    const uint unit = min(i * CLA_WARPS + warp, (uint)(CLA_QUERY_LOADS - 1));
    query[i] = cla_load_query(&task, unit, q, q_offset, q_token_stride, lane);
  }
}

CLA_KERNEL clattn_decode_ring(CLA_PARAMS) {
  __local uint4 stages[CLA_WARPS * CLA_STAGES * CLA_STAGE_UNITS] __attribute__((aligned(1024)));
  __local uint4 queries[CLA_QUERY_UNITS * CLA_WARPS * CLA_LANES]; /* units as the lanes want them */
  __local float4 sums_of[CLA_WARPS * CLA_BLOCK_ROWS * CLA_SUM_STRIDE / 4];
  __local float2 state_of[CLA_WARPS * CLA_BLOCK_ROWS];
  __local int last_arrival;

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lane = cla_lane();
  const uint warp = cla_warp();
  const ClaLaunch launch = {meta,
                            call.entries_at,
                            call.pages_at,
                            (uint)call.num_kv_heads,
                            (uint)call.num_entries * (uint)call.num_kv_heads * CLA_HEAD_CHUNKS,
                            call.causal};
  const ClaCache cache = {
      k_cache + call.k_offset, CLA_VALUES,
      call.block_stride,       call.token_stride,
      call.head_stride,        cla_in_halves(k_cache + call.k_offset, CLA_VALUES, call)};
  const ClaResults results = CLA_RESULTS;
  __local uint4* const ring = stages + warp * CLA_STAGES * CLA_STAGE_UNITS;

  ClaAhead ahead;
  cla_fill_ring(ring, &ahead, &launch, &cache, &opt, warp, lane);
  uint stage_at = 0;            /* of the next tile, in the ring */
  uint4 query[CLA_QUERY_UNITS]; /* of the task to come */
  cla_ring_load_queries(query, &launch, (uint)get_group_id(0), q, call.q_offset,
                        call.q_token_stride, warp, lane);
  for (ClaDeal deal = cla_first_task(); deal.number < launch.num_tasks;
       deal = cla_next_task(deal)) {
    const ClaTask task = cla_task_of(meta, call.entries_at, (uint)call.num_kv_heads, deal.number);
    if (task.item.q_count == 0) break; /* padding: the end */
    const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
    const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
    const ClaValues values = {
        &task.item, meta + call.pages_at + task.item.pages_at,
        cache.v + (long)task.kv_head * call.head_stride + 8 * cla_v_unit(lane), call.block_stride,
        call.token_stride};
    const float scale = cla_query_scale(&opt, &task, call.scale_log2e);
#pragma unroll
    for (uint i = 0; i < CLA_QUERY_UNITS; ++i)
      queries[(i * CLA_WARPS + warp) * CLA_LANES + lane] = cla_signed_query(query[i], scale);
    ClaRow rows[CLA_LANE_ROWS];
    ClaRowState state[CLA_LANE_ROWS];
    float acc[CLA_ACC_SIZE];
    cla_decode_begin_rows(rows, state, acc, &opt, &task, call.causal, 0, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* queries written -> read, the task before joined -> shared */

    for (int first = cla_first_tile(keys, warp); first < keys.end; first += CLA_STEP_KEYS) {
      const int masked = CLA_MASK || first < common.begin || first + CLA_BLOCK_KV > common.end;
      __local uint4* const stage = ring + stage_at;
      ClaKvRaw k_raw[CLA_K_LOADS];
      ClaKvRaw v_raw[CLA_V_LOADS];
      float scores[CLA_ROW_TILES * CLA_C_SIZE];
      CLA_WAIT_COPIES_BUT(CLA_STAGES - 1); /* the oldest stage's */
      cla_warp_barrier();                  /* each lane's copies arrived -> read */
      cla_take_k(k_raw, stage, lane);
      cla_multiply_qk(scores, k_raw, queries, lane);
      cla_take_v(v_raw, stage, lane);
      cla_warp_barrier(); /* read -> overwritten */
      cla_fill_stage(stage, &ahead, &launch, &cache, &opt, warp, lane);
      stage_at = CLA_STAGE_UNITS * (CLA_STAGES - 1) - stage_at;
      cla_to_probabilities(scores, acc, state, rows, &opt, scale, first, masked, lane);
      cla_decode_add_values(acc, scores, v_raw, rows, &values, masked,
                            cla_range(max(first, keys.begin), min(first + CLA_BLOCK_KV, keys.end)),
                            lane);
    }

    cla_ring_load_queries(query, &launch, cla_next_task(deal).number, q, call.q_offset,
                          call.q_token_stride, warp, lane);
    cla_share_warp(sums_of + warp * CLA_BLOCK_ROWS * CLA_SUM_STRIDE / 4,
                   state_of + warp * CLA_BLOCK_ROWS, acc, state, 0, 0, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* warps' results written -> joined */
    cla_end_task(&opt, &task, &results, sums_of, state_of, 0);
    cla_merge_if_last(&opt, &task, &results, CLA_ARRIVALS, &last_arrival);
  }
}
