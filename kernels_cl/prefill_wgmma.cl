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

   Tiles that some row does not see wholly go one after the other, with masks. Full barriers end
   when copies have arrived, empty ones when the last warp has multiplied.

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

   Local memory: (2 * BLOCK_ROWS + 4 * BLOCK_KV) * HEAD_DIM * 2 B and 96 B of barriers, 192 KiB with
   128 rows, 128 keys and 128 dims; heads of 256 keep one tile of queries.
   Launch: up to num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows
   start on 16-byte boundaries. */
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

/* Copies the own warp's quarter of a tile; `at`: the element of the lane's key in the cache. */
static inline void cla_start_quarter(__local uint4* tile, __global const CLA_KV_T* cache, long at,
                                     uint warp, uint lane) {
  const uint unit = lane % CLA_DIM_COLUMNS;
#pragma unroll
  for (uint first = 0; first < CLA_BLOCK_KV / 4; first += 32 / CLA_DIM_COLUMNS) {
    const uint key = first + lane / CLA_DIM_COLUMNS;
    const long row = cla_shuffle_from_long(at, key);
    cla_copy_async(tile + cla_swizzled(warp * (CLA_BLOCK_KV / 4) + key, unit, CLA_BLOCK_KV),
                   cache + max(row, 0L) + 8 * unit, row >= 0);
  }
}

/* Waits until a tile has come to its stage. */
static inline void cla_await_tile(__local ulong* full, ClaTurn turn) {
  cla_barrier_await(full + turn.stage, turn.parity);
  cla_fence_for_products();
}

/* S = Q K^T, started. */
static inline void cla_start_qk(float* scores, ulong q_tile, ulong k_tile) {
  cla_wgmma_fence();
  cla_wgmma_keys_first(scores, q_tile, k_tile);
#pragma unroll
  for (uint step = 1; step < CLA_HEAD_DIM / 16; ++step)
    cla_wgmma_keys_next(scores, q_tile + CLA_NEXT_COLUMNS(step, 64),
                        k_tile + CLA_NEXT_COLUMNS(step, CLA_BLOCK_KV));
  cla_wgmma_commit();
}

/* O += P V, started. */
static inline void cla_start_pv(float* sums, const uint4* weights, ulong v_tile) {
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

/* Whether a tile of values holds what must not meet a row that does not see it. */
static inline int cla_values_overflow(__local const uint4* v_tile, uint lid, uint name) {
  int any = 0;
  for (uint i = lid; i < CLA_TILE_UNITS; i += CLA_WARPGROUP) any |= cla_unit_overflows(v_tile[i]);
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
    const int own_key = (int)(warp * (CLA_BLOCK_KV / 4) + lane % (CLA_BLOCK_KV / 4));
    ClaTurn turn = {0, 1};
    ClaTurn query_turn = {0, 1};
    for (uint number = (uint)get_group_id(0); number < num_tasks;
         number += (uint)get_num_groups(0)) {
      const ClaTask task = cla_task_of(meta, items_at, (uint)num_kv_heads, number);
      const ClaRange keys = cla_item_keys(&opt, &task.item, causal);
      __global const int* pages = meta + pages_at + task.item.pages_at;
      const long head_at = (long)task.kv_head * head_stride;
      long at = cla_key_at(&task.item, pages, keys.end, keys.begin + own_key, head_at, block_stride,
                           token_stride);
      cla_barrier_await(empty_q + query_turn.stage, query_turn.parity);
      cla_start_queries(q_tiles + query_turn.stage * CLA_QUERY_UNITS, &task, team, q, q_offset,
                        q_token_stride, scale_log2e);
      cla_commit_copies();
      for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
        const long next = cla_key_at(&task.item, pages, keys.end, tile + CLA_BLOCK_KV + own_key,
                                     head_at, block_stride, token_stride);
        cla_barrier_await(empty_k + turn.stage, turn.parity);
        cla_start_quarter(k_tiles + turn.stage * CLA_TILE_UNITS, k_cache + k_offset, at, warp,
                          lane);
        cla_barrier_arrive_after_copies(full_k + turn.stage);
        cla_commit_copies();
        cla_barrier_await(empty_v + turn.stage, turn.parity);
        cla_start_quarter(v_tiles + turn.stage * CLA_TILE_UNITS, v_cache + v_offset, at, warp,
                          lane);
        cla_barrier_arrive_after_copies(full_v + turn.stage);
        cla_commit_copies();
        if (tile == keys.begin) {
          CLA_AWAIT_COPIES_BUT(2);
          cla_fence_for_products();
          cla_barrier_arrive(full_q + query_turn.stage);
        }
        at = next;
        turn = cla_next_turn(turn, CLA_STAGES);
      }
      if (keys.begin >= keys.end) {
        cla_await_copies();
        cla_barrier_arrive(full_q + query_turn.stage);
      }
      query_turn = cla_next_turn(query_turn, CLA_QUERY_STAGES);
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
  const ulong q_first = cla_tile_descriptor(q_tiles + CLA_QUERY_UNIT(first_row, 0), 64);
  const ulong k_desc = cla_tile_descriptor(k_tiles, CLA_BLOCK_KV);
  const ulong v_desc = cla_tile_descriptor(v_tiles, CLA_BLOCK_KV);
  ClaTurn turn = {0, 0};
  ClaTurn query_turn = {0, 0};
  for (uint number = (uint)get_group_id(0); number < num_tasks; number += (uint)get_num_groups(0)) {
    const ClaTask task = cla_task_of(meta, items_at, (uint)num_kv_heads, number);
    const ClaRange keys = cla_item_keys(&opt, &task.item, causal);
    const ClaRange common = cla_common_keys(&opt, &task.item, causal);
    const ulong q_desc = q_first + query_turn.stage * CLA_QUERY_UNITS;
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
    while (tile < keys.end) {
      float scores[CLA_KEY_COLUMNS * 4];
      uint4 weights[CLA_KEY_STEPS];
      cla_await_tile(full_k, turn);
      cla_start_qk(scores, q_desc, k_desc + turn.stage * CLA_TILE_UNITS);
      cla_wgmma_await_all();
      CLA_PIN(scores, CLA_KEY_COLUMNS * 4);
      if (lane == 0) cla_barrier_arrive(empty_k + turn.stage);

      if (CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end) {
        const float2 factors =
            cla_weigh_fragment(scores, state, rows, &opt, scale, tile + lane_key, 1);
        cla_rescale_fragment(sums, factors);
        cla_pack_all(weights, scores);
        cla_await_tile(full_v, turn);
        if (cla_values_overflow(v_tiles + turn.stage * CLA_TILE_UNITS, lid, name)) {
          cla_add_seen_values(sums, weights, rows, v_tiles + turn.stage * CLA_TILE_UNITS, tile,
                              lane);
          cla_warp_barrier(); /* values read -> told to be empty */
        } else {
          cla_start_pv(sums, weights, v_desc + turn.stage * CLA_TILE_UNITS);
          cla_wgmma_await_all();
          CLA_PIN(sums, CLA_DIM_COLUMNS * 4);
        }
        if (lane == 0) cla_barrier_arrive(empty_v + turn.stage);
        tile += CLA_BLOCK_KV;
        turn = cla_next_turn(turn, CLA_STAGES);
        continue;
      }

      cla_rescale_fragment(
          sums, cla_weigh_fragment(scores, state, rows, &opt, scale, tile + lane_key, 0));
      cla_pack_all(weights, scores);
      for (tile += CLA_BLOCK_KV; tile + CLA_BLOCK_KV <= common.end; tile += CLA_BLOCK_KV) {
        const ClaTurn next = cla_next_turn(turn, CLA_STAGES);
        cla_await_tile(full_k, next);
        cla_start_qk(scores, q_desc, k_desc + next.stage * CLA_TILE_UNITS);
        cla_await_tile(full_v, turn);
        cla_start_pv(sums, weights, v_desc + turn.stage * CLA_TILE_UNITS);
        cla_wgmma_await_all_but_1();
        CLA_PIN(scores, CLA_KEY_COLUMNS * 4);
        if (lane == 0) cla_barrier_arrive(empty_k + next.stage);
        const float2 factors =
            cla_weigh_fragment(scores, state, rows, &opt, scale, tile + lane_key, 0);
        cla_wgmma_await_all();
        cla_pin_weights(weights); /* read until now */
        CLA_PIN(sums, CLA_DIM_COLUMNS * 4);
        if (lane == 0) cla_barrier_arrive(empty_v + turn.stage);
        cla_rescale_fragment(sums, factors);
        cla_pack_all(weights, scores);
        turn = next;
      }
      cla_await_tile(full_v, turn);
      cla_start_pv(sums, weights, v_desc + turn.stage * CLA_TILE_UNITS);
      cla_wgmma_await_all();
      CLA_PIN(sums, CLA_DIM_COLUMNS * 4);
      if (lane == 0) cla_barrier_arrive(empty_v + turn.stage);
      turn = cla_next_turn(turn, CLA_STAGES);
    }

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
  }
}
