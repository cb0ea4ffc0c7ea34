/* Paged attention for many rows per key range on NVIDIA's compute capability 9.0: warpgroup
   products that run beside the softmax. Same meaning and options as prefill_mma.cl.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   A work-group goes through the tasks (a work item for one KV head) that lie num_groups apart, so
   that loading for the next one runs beside the end of the last: BLOCK_ROWS rows against tiles of
   BLOCK_KV keys. Its last warpgroup only copies queries, keys and values; each of the others owns
   64 rows and all their dims:

     for each tile of keys up to the last one that any row sees
       S = Q K^T
       O = O + P V of the tile before (begun before S is awaited)
       P = 2^(S - max), O = O * 2^(old max - max)

   Masks are looked at in tiles that some row does not see wholly; an infinite or NaN value there
   that a row must not meet is seen before it is multiplied, and such a tile is added by hand. Full
   barriers end when copies have arrived, empty ones when the last warp has multiplied.

   Bytes and operations of a tile with 128 rows, 128 keys and 128 dims, per work-group: 64 KiB of K
   and V from global memory, 4.2 M multiply-adds, 16 384 exponentials.

   macro                unit        legal values
   CLA_HEAD_DIM         elements    64, 128, 256
   CLA_GROUP            heads       query heads per KV head, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           CLA_Q_DTYPE: k_cache, v_cache
   CLA_PAGE_SIZE        tokens      0: no pages
   CLA_BLOCK_ROWS       rows        a multiple of 64
   CLA_BLOCK_KV         keys        64, 128
   CLA_WG_SIZE          work-items  2 * BLOCK_ROWS + 128
   CLA_WINDOW ...       -           what a layer may add: lib/options.clh

   Local memory: (2 * BLOCK_ROWS + 4 * BLOCK_KV) * HEAD_DIM * 2 B and 2 KiB of barriers and marks,
   192 KiB with 128 rows, 128 keys and 128 dims; heads of 256 keep one tile of queries. Launch: up
   to num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on
   16-byte boundaries. */
#include "lib/wgmma.clh"
#define CLA_TILE_UNIT(row, unit) cla_swizzled(row, unit, CLA_BLOCK_KV)
#define CLA_QUERY_UNIT(row, unit) \
  ((row) / 64 * 64 * CLA_DIM_COLUMNS + cla_swizzled((row) % 64, unit, 64))
#include "lib/mma_tiles.clh"

#define CLA_CONSUMERS (CLA_BLOCK_ROWS / 64)
#if CLA_KV_DTYPE != CLA_Q_DTYPE
#error "prefill_wgmma.cl: the cache must hold the queries' type"
#endif
#if CLA_BLOCK_ROWS % 64 != 0 || CLA_WG_SIZE != CLA_WARPGROUP * (CLA_CONSUMERS + 1)
#error "prefill_wgmma.cl: CLA_BLOCK_ROWS and CLA_WG_SIZE do not tile"
#endif

#if CLA_BLOCK_KV == 64
#define cla_wgmma_keys_first cla_wgmma_first_n64
#define cla_wgmma_keys_next cla_wgmma_next_n64
#elif CLA_BLOCK_KV == 128
#define cla_wgmma_keys_first cla_wgmma_first_n128
#define cla_wgmma_keys_next cla_wgmma_next_n128
#else
#error "CLA_BLOCK_KV must be 64 or 128"
#endif
#if CLA_HEAD_DIM == 64
#define cla_wgmma_values cla_wgmma_values_n64
#elif CLA_HEAD_DIM == 128
#define cla_wgmma_values cla_wgmma_values_n128
#elif CLA_HEAD_DIM == 256
#define cla_wgmma_values cla_wgmma_values_n256
#else
#error "CLA_HEAD_DIM must be 64, 128 or 256"
#endif

/* Whether some row does not see some key of a tile. */
#define CLA_PARTLY_SEEN(tile) \
  (CLA_MASK || (tile) < common.begin || (tile) + CLA_BLOCK_KV > common.end)

#define CLA_TILE_UNITS (CLA_BLOCK_KV * CLA_DIM_COLUMNS)
#define CLA_QUERY_UNITS (CLA_BLOCK_ROWS * CLA_DIM_COLUMNS)
/* Tiles of keys, as many of values, and of queries, on their way or in use. */
#define CLA_STAGES 2
#define CLA_QUERY_STAGES (CLA_HEAD_DIM == 256 ? 1 : 2)

/* The stage of a tile, and the parity of the phase that brings it. */
typedef struct ClaTurn {
  uint stage, parity;
} ClaTurn;
static inline ClaTurn cla_next_turn(ClaTurn turn, uint num_stages) {
  turn.stage = turn.stage + 1 == num_stages ? 0 : turn.stage + 1;
  turn.parity ^= turn.stage == 0;
  return turn;
}

#define CLA_WARP_KEYS (CLA_BLOCK_KV / 4) /* of a tile, that a warp copies */
/* Keys that follow each other in memory, from a multiple of it on. */
#if CLA_PAGE_SIZE % 32 == 0 && CLA_WARP_KEYS >= 32
#define CLA_RUN 32
#elif CLA_PAGE_SIZE % 16 == 0
#define CLA_RUN 16
#elif CLA_PAGE_SIZE % 8 == 0
#define CLA_RUN 8
#else
#define CLA_RUN 1
#endif
#define CLA_KEYS_AT_ONCE (32 / CLA_DIM_COLUMNS) /* that a warp's instruction copies */
#define CLA_RUN_STEP (CLA_RUN < CLA_KEYS_AT_ONCE ? CLA_KEYS_AT_ONCE : CLA_RUN)

/* Copies the own warp's quarter of a tile; `at`: the element of the lane's key in the cache; keys
   from `num_keys` on become zeros. Few instructions between copies: one group of warps feeds two
   that multiply. */
static inline void cla_start_quarter(__local uint4* tile, __global const CLA_KV_T* cache, long at,
                                     long token_stride, int num_keys, uint warp, uint lane) {
  const uint unit = lane % CLA_DIM_COLUMNS;
  const uint own = lane / CLA_DIM_COLUMNS;
  const uint first = cla_swizzled(warp * CLA_WARP_KEYS + own, unit, CLA_BLOCK_KV);
  const int own_keys = num_keys - (int)own;
  const long step = CLA_KEYS_AT_ONCE * token_stride;
#pragma unroll
  for (uint run = 0; run < CLA_WARP_KEYS; run += CLA_RUN_STEP) {
    const uint leader = CLA_RUN < CLA_KEYS_AT_ONCE ? run + own : run;
    __global const CLA_KV_T* from = cache + cla_shuffle_from_long(at, leader) + 8 * unit;
    if (CLA_RUN >= CLA_KEYS_AT_ONCE) from += own * token_stride;
    __global const CLA_KV_T* other = from + step;
#pragma unroll
    for (uint key = run; key < run + CLA_RUN_STEP; key += CLA_KEYS_AT_ONCE) {
      /* The swizzle of key + own: their bits do not meet. */
      cla_copy_async(tile + ((first ^ key % 8) + 8 * key), from, (int)key < own_keys);
      __global const CLA_KV_T* after = from + 2 * step;
      from = other;
      other = after;
    }
  }
}

/* The page of a position, 0 where there is none. */
static inline int cla_page_within(__global const int* pages, int position, int end) {
  return position < end ? cla_page_of(pages, (uint)position) : 0;
}

/* The keys of an item from the start of a run on. */
static inline ClaRange cla_keys_in_runs(const ClaOptions* opt, const ClaWorkItem* item,
                                        int causal) {
  ClaRange keys = cla_item_keys(opt, item, causal);
  keys.begin -= keys.begin % CLA_RUN;
  return keys;
}

/* Waits until a tile has come to its stage. */
static inline void cla_await_tile(__local ulong* full, ClaTurn turn) {
  cla_barrier_await(full + turn.stage, turn.parity);
  cla_fence_for_products();
}

/* S = Q K^T, started. */
static inline void cla_start_qk(float* scores, uint q_tile, uint k_tile) {
  q_tile = cla_shuffle_from(q_tile, 0);
  k_tile = cla_shuffle_from(k_tile, 0);
  cla_wgmma_fence();
  cla_wgmma_keys_first(scores, q_tile, k_tile);
#pragma unroll
  for (uint step = 1; step < CLA_HEAD_DIM / 16; ++step)
    cla_wgmma_keys_next(scores, q_tile + CLA_NEXT_COLUMNS(step, 64),
                        k_tile + CLA_NEXT_COLUMNS(step, CLA_BLOCK_KV));
  cla_wgmma_commit();
}

/* O += P V, started. */
static inline void cla_start_pv(float* sums, const uint4* weights, uint v_tile) {
  v_tile = cla_shuffle_from(v_tile, 0);
  cla_wgmma_fence();
#pragma unroll
  for (uint step = 0; step < CLA_KEY_STEPS; ++step)
    cla_wgmma_values(sums, weights[step], v_tile + CLA_NEXT_ROWS(step));
  cla_wgmma_commit();
}

static inline void cla_pack_all(uint4* weights, const float* scores) {
#pragma unroll
  for (uint step = 0; step < CLA_KEY_STEPS; ++step) weights[step] = cla_pack_weights(scores, step);
}

/* Keeps the compiler from giving their registers to others while a product may still read them. */
static inline void cla_pin_weights(uint4* weights) {
#pragma unroll
  for (uint s = 0; s < CLA_KEY_STEPS; ++s)
    asm volatile(""
                 : "+r"(weights[s].x), "+r"(weights[s].y), "+r"(weights[s].z), "+r"(weights[s].w));
}

/* A row's weights, by way of code without masks where every row sees the tile. */
static inline float cla_weigh_in_tile(float* scores, ClaRowState* state, const ClaRow* rows, uint h,
                                      const ClaOptions* opt, float scale, int first_key,
                                      int masked) {
  return masked ? cla_weigh_row(scores, state, rows, h, opt, scale, first_key, 1)
                : cla_weigh_row(scores, state, rows, h, opt, scale, first_key, 0);
}

/* Stores what the work-item has made of a row, so that the assembler does not move that behind the
   wait that follows. */
static inline void cla_mark_row_done(__local float* mark, float sum) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(cla_local_address(mark)), "f"(sum)
               : "memory");
}

/* Whether keys first ... end - 1 of a tile hold values that must not meet a weight of 0. */
static inline int cla_keys_overflow(__local const uint4* v_tile, int first, int end, uint lid) {
  int any = 0;
  for (int key = max(first, 0) + (int)(lid / CLA_DIM_COLUMNS); key < min(end, CLA_BLOCK_KV);
       key += CLA_WARPGROUP / CLA_DIM_COLUMNS)
    any |= cla_unit_overflows(v_tile[CLA_TILE_UNIT((uint)key, lid % CLA_DIM_COLUMNS)]);
  return any;
}

/* Whether a tile of values holds what must not meet a row that does not see it. Keys that every row
   sees may hold anything; those beyond the last one are zeros. */
static inline int cla_values_overflow(__local const uint4* v_tile, int tile, ClaRange keys,
                                      ClaRange common, uint lid, uint name) {
  const int num_keys = keys.end - tile;
#if CLA_MASK
  const int any = cla_keys_overflow(v_tile, 0, num_keys, lid);
#else
  const int any = cla_keys_overflow(v_tile, 0, common.begin - tile, lid) |
                  cla_keys_overflow(v_tile, common.end - tile, num_keys, lid);
#endif
  (void)common;
  return cla_warpgroup_any(name, any);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_prefill_wgmma(
    __global const int* restrict meta,         /* items at items_at, page ids at pages_at */
    int items_at,                              /* ints, a multiple of 8 */
    int num_items,                             /* the launch says it too */
    int pages_at,                              /* ints */
    __global const CLA_Q_T* restrict q,        /* [tokens, num_heads, HEAD_DIM] */
    long q_offset,                             /* elements */
    long q_token_stride,                       /* elements */
    __global const CLA_KV_T* restrict k_cache, /* [page, token, kv head, HEAD_DIM] by strides */
    long k_offset,                             /* elements, a multiple of 8 */
    __global const CLA_KV_T* restrict v_cache, /* as k_cache */
    long v_offset,                             /* elements, a multiple of 8 */
    long block_stride,                         /* elements, a multiple of 8 */
    long token_stride,                         /* elements, a multiple of 8 */
    long head_stride,                          /* elements, a multiple of 8 */
    __global CLA_Q_T* restrict out,            /* [tokens, num_heads, HEAD_DIM] */
    long out_offset,                           /* elements */
    long out_token_stride,                     /* elements */
    __global float* restrict lse,              /* [tokens, num_heads], natural log; if write_lse */
    __global float* restrict partial_out,      /* [partial rows, num_heads, HEAD_DIM] */
    __global float* restrict partial_lse2,     /* [partial rows, num_heads], log2 */
    int num_kv_heads,                          /* heads */
    float scale_log2e,                         /* softmax scale * log2(e) */
    int causal,                                /* 0 or 1 */
    int write_lse                              /* 0 or 1 */
        CLA_OPTION_PARAMS) {                   /* lib/options.clh */
  __local uint4 q_tiles[CLA_QUERY_STAGES * CLA_QUERY_UNITS] __attribute__((aligned(1024)));
  __local uint4 k_tiles[CLA_STAGES * CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local uint4 v_tiles[CLA_STAGES * CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local float marks[CLA_WG_SIZE];
  __local ulong full_q[CLA_QUERY_STAGES], empty_q[CLA_QUERY_STAGES];
  __local ulong full_k[CLA_STAGES], full_v[CLA_STAGES], empty_k[CLA_STAGES], empty_v[CLA_STAGES];

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint thread = (uint)get_local_id(0);
  const uint lane = thread % 32;
  const uint group = cla_shuffle_from(thread / CLA_WARPGROUP, 0); /* the same for a warp */
  const uint warp = cla_shuffle_from(thread / 32 % 4, 0);
  const uint lid = thread % CLA_WARPGROUP;
  const uint num_tasks = (uint)num_items * (uint)num_kv_heads * CLA_HEAD_CHUNKS;

  if (thread == 0) {
    for (uint s = 0; s < CLA_QUERY_STAGES; ++s) {
      cla_barrier_init(full_q + s, CLA_WARPGROUP);
      cla_barrier_init(empty_q + s, 4 * CLA_CONSUMERS);
    }
    for (uint s = 0; s < CLA_STAGES; ++s) {
      cla_barrier_init(full_k + s, CLA_WARPGROUP);
      cla_barrier_init(full_v + s, CLA_WARPGROUP);
      cla_barrier_init(empty_k + s, 4 * CLA_CONSUMERS);
      cla_barrier_init(empty_v + s, 4 * CLA_CONSUMERS);
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* barriers initialised -> used */

  if (group == CLA_CONSUMERS) {
    CLA_KEEP_REGISTERS(40);
    const ClaTeam team = {0, CLA_BLOCK_ROWS, lid, CLA_WARPGROUP};
    const int first_key = (int)(warp * CLA_WARP_KEYS); /* the warp's in a tile */
    const int own_key = first_key + (int)(lane % CLA_WARP_KEYS);
    ClaTurn k_turn = {0, 1}, v_turn = {0, 1}, query_turn = {0, 1};
    for (uint number = (uint)get_group_id(0); number < num_tasks;
         number += (uint)get_num_groups(0)) {
      const ClaTask task = cla_task_of(meta, items_at, (uint)num_kv_heads, number);
      const ClaRange keys = cla_keys_in_runs(&opt, &task.item, causal);
      __global const int* pages = meta + pages_at + task.item.pages_at;
      const long head_at = (long)task.kv_head * head_stride;
      cla_barrier_await(empty_q + query_turn.stage, query_turn.parity);
      if (cla_start_queries(q_tiles + query_turn.stage * CLA_QUERY_UNITS, &task, team, q, q_offset,
                            q_token_stride, scale_log2e)) {
        cla_barrier_arrive_after_copies(full_q + query_turn.stage);
      } else {
        cla_fence_for_products();
        cla_barrier_arrive(full_q + query_turn.stage);
      }
      query_turn = cla_next_turn(query_turn, CLA_QUERY_STAGES);
      /* Keys run a tile ahead of values, as products want them, page ids a tile ahead of keys. */
      int page = cla_page_within(pages, keys.begin + own_key, keys.end);
      long values_at = 0;
      for (int tile = keys.begin; tile < keys.end + CLA_BLOCK_KV; tile += CLA_BLOCK_KV) {
        const int position = tile + own_key;
        const int next_page = cla_page_within(pages, position + CLA_BLOCK_KV, keys.end);
        const long keys_at =
            head_at + cla_key_row(&task.item, page, (uint)position, block_stride, token_stride);
        const int num_keys = keys.end - tile - first_key;
        if (tile < keys.end) {
          cla_barrier_await(empty_k + k_turn.stage, k_turn.parity);
          cla_start_quarter(k_tiles + k_turn.stage * CLA_TILE_UNITS, k_cache + k_offset, keys_at,
                            token_stride, num_keys, warp, lane);
          cla_barrier_arrive_after_copies(full_k + k_turn.stage);
          k_turn = cla_next_turn(k_turn, CLA_STAGES);
        }
        if (tile > keys.begin) {
          cla_barrier_await(empty_v + v_turn.stage, v_turn.parity);
          cla_start_quarter(v_tiles + v_turn.stage * CLA_TILE_UNITS, v_cache + v_offset, values_at,
                            token_stride, num_keys + CLA_BLOCK_KV, warp, lane);
          cla_barrier_arrive_after_copies(full_v + v_turn.stage);
          v_turn = cla_next_turn(v_turn, CLA_STAGES);
        }
        values_at = keys_at;
        page = next_page;
      }
    }
    cla_await_copies();
    return;
  }

  CLA_TAKE_REGISTERS(232);
  const uint first_row = group * 64;
  const uint own_row = first_row + warp * 16 + lane / 4; /* and the one 8 further on */
  const uint name = 1 + group;
  const ClaTeam team = {first_row, 64, lid, CLA_WARPGROUP};
  const ClaSideResults side = {partial_out, partial_lse2, write_lse ? lse : 0};
  const int lane_key = (int)(2 * (lane % 4));
  const float scale = fabs(scale_log2e);
  const uint q_first = cla_tile_descriptor(q_tiles + CLA_QUERY_UNIT(first_row, 0), 64);
  const uint k_desc = cla_tile_descriptor(k_tiles, CLA_BLOCK_KV);
  const uint v_desc = cla_tile_descriptor(v_tiles, CLA_BLOCK_KV);
  ClaTurn turn = {0, 0};
  ClaTurn query_turn = {0, 0};
  uint number = (uint)get_group_id(0);
  ClaTask task;
  if (number < num_tasks) task = cla_task_of(meta, items_at, (uint)num_kv_heads, number);
  while (number < num_tasks) {
    const ClaRange keys = cla_keys_in_runs(&opt, &task.item, causal);
    const ClaRange common = cla_common_keys(&opt, &task.item, causal);
    const uint q_desc = q_first + query_turn.stage * CLA_QUERY_UNITS;
    __local uint4* q_tile = q_tiles + query_turn.stage * CLA_QUERY_UNITS;
    ClaRow rows[2];
    ClaRowState state[2];
    float sums[CLA_DIM_COLUMNS * 4];
#pragma unroll
    for (uint h = 0; h < 2; ++h) {
      rows[h] = cla_row(&opt, &task, own_row + 8 * h, causal);
      state[h].base = CLA_NEG_BIG;
      state[h].sum = 0.0f;
    }
#pragma unroll
    for (uint i = 0; i < CLA_DIM_COLUMNS * 4; ++i) sums[i] = 0.0f;
    cla_await_tile(full_q, query_turn);

    int tile = keys.begin;
    while (tile < keys.end) { /* once, but for what is added by hand */
      float scores[CLA_KEY_COLUMNS * 4];
      uint4 weights[CLA_KEY_STEPS];
      int masked = CLA_PARTLY_SEEN(tile);
      int by_hand;
      cla_await_tile(full_k, turn);
      cla_start_qk(scores, q_desc, k_desc + turn.stage * CLA_TILE_UNITS);
      cla_wgmma_await_all();
      CLA_PIN(scores, CLA_KEY_COLUMNS * 4);
      if (lane == 0) cla_barrier_arrive(empty_k + turn.stage);
      const float upper =
          cla_weigh_in_tile(scores, state, rows, 0, &opt, scale, tile + lane_key, masked);
      const float lower =
          cla_weigh_in_tile(scores, state, rows, 1, &opt, scale, tile + lane_key, masked);
      cla_rescale_fragment(sums, (float2)(upper, lower));
      cla_pack_all(weights, scores);
      for (;;) {
        tile += CLA_BLOCK_KV;
        by_hand = 0;
        if (masked) {
          cla_await_tile(full_v, turn);
          by_hand = cla_values_overflow(v_tiles + turn.stage * CLA_TILE_UNITS, tile - CLA_BLOCK_KV,
                                        keys, common, lid, name);
        }
        if (by_hand || tile >= keys.end) break;
        const ClaTurn next = cla_next_turn(turn, CLA_STAGES);
        masked = CLA_PARTLY_SEEN(tile);
        cla_await_tile(full_k, next);
        cla_start_qk(scores, q_desc, k_desc + next.stage * CLA_TILE_UNITS);
        cla_await_tile(full_v, turn);
        cla_start_pv(sums, weights, v_desc + turn.stage * CLA_TILE_UNITS);
        cla_wgmma_await_all_but_1();
        CLA_PIN(scores, CLA_KEY_COLUMNS * 4);
        if (lane == 0) cla_barrier_arrive(empty_k + next.stage);
        const int first_key = tile + lane_key;
        const float first =
            cla_weigh_in_tile(scores, state, rows, 0, &opt, scale, first_key, masked);
        cla_mark_row_done(marks + thread, state[0].sum);
        cla_wgmma_await_all();
        cla_pin_weights(weights); /* read until now */
        CLA_PIN(sums, CLA_DIM_COLUMNS * 4);
        if (lane == 0) cla_barrier_arrive(empty_v + turn.stage);
        const float second =
            cla_weigh_in_tile(scores, state, rows, 1, &opt, scale, first_key, masked);
        cla_rescale_fragment(sums, (float2)(first, second));
        cla_pack_all(weights, scores);
        turn = next;
      }
      if (by_hand) {
        cla_add_seen_values(sums, weights, rows, v_tiles + turn.stage * CLA_TILE_UNITS,
                            tile - CLA_BLOCK_KV, lane);
        cla_warp_barrier(); /* values read -> told to be empty */
      } else {
        cla_await_tile(full_v, turn);
        cla_start_pv(sums, weights, v_desc + turn.stage * CLA_TILE_UNITS);
        cla_wgmma_await_all();
        CLA_PIN(sums, CLA_DIM_COLUMNS * 4);
      }
      if (lane == 0) cla_barrier_arrive(empty_v + turn.stage);
      turn = cla_next_turn(turn, CLA_STAGES);
    }

    number += (uint)get_num_groups(0);
    ClaTask next_task = task; /* comes while results leave */
    if (number < num_tasks) next_task = cla_task_of(meta, items_at, (uint)num_kv_heads, number);

    cla_warpgroup_barrier(name); /* queries multiplied -> results staged */
#pragma unroll
    for (uint h = 0; h < 2; ++h)
      cla_finish_row(&opt, &task, (uint)num_kv_heads, &side, q_tile, own_row + 8 * h, state[h],
                     sums + 2 * h, lane);
    if (task.item.partial_row < 0) {
      cla_warpgroup_barrier(name); /* results staged -> stored */
      cla_store_results(q_tile, &task, team, out, out_offset, out_token_stride);
    }
    cla_fence_for_products(); /* what was staged -> the next queries */
    cla_warp_barrier();
    if (lane == 0) cla_barrier_arrive(empty_q + query_turn.stage);
    query_turn = cla_next_turn(query_turn, CLA_QUERY_STAGES);
    task = next_task;
  }
}
