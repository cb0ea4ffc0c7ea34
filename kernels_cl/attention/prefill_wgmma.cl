/* Paged attention for many rows per key range on NVIDIA's compute capability 9.0: warpgroup
   products that run beside the softmax. Same meaning and options as prefill_mma.cl.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   A work-group stays for many tasks (a work item for one KV head; cla_next_task), so that loading
   for the next one runs beside the end of the last: BLOCK_ROWS rows against tiles of BLOCK_KV keys.
   Its last warpgroup only copies queries, keys and values; each of the others owns 64 rows and all
   their dims:

     for each tile of keys up to the last one that any row sees
       S = Q K^T, in turns with the others
       O = O + P V of the tile before (begun before S is awaited)
       P = 2^(S - max), O = O * 2^(old max - max)

   The tile before may be the last one of the task before: its rows leave once O is done, beside
   the softmax of the new task's first tile. Masks are looked at in tiles that some row does not see
   wholly; an infinite or NaN value there that a row must not meet is seen before it is multiplied,
   and such a tile is added by hand. With CLA_BOXES 16 keys of a head are one copy by a tensor map
   (tile/sm90_tensor_map.clh), else many small ones. Full barriers end when
   copies have arrived, empty ones when the last warp has multiplied.

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
   CLA_BOXES            -           0; 1 if PAGE_SIZE is a multiple of 16: keys come by tensor maps
   CLA_WINDOW ...       -           what a layer may add: core/options.clh

   Local memory: (2 * BLOCK_ROWS + 4 * BLOCK_KV) * HEAD_DIM * 2 B and 3 KiB of barriers and marks,
   192 KiB with 128 rows, 128 keys and 128 dims; heads of 256 keep one tile of queries. Launch: up
   to num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on
   16-byte boundaries. */
#include "tile/sm90.clh"
#define CLA_TILE_UNIT CLA_KV_PLACE
#define CLA_QUERY_UNIT(row, unit) \
  ((row) / 64 * 64 * CLA_DIM_UNITS + cla_swizzled((row) % 64, unit, 64))
#include "attention/row_tiles.clh"

#define CLA_CONSUMERS (CLA_BLOCK_ROWS / 64)
#if CLA_KV_DTYPE != CLA_Q_DTYPE
#error "prefill_wgmma.cl: the cache must hold the queries' type"
#endif
#if CLA_BOXES && (CLA_PAGE_SIZE == 0 || CLA_PAGE_SIZE % 16 != 0)
#error "prefill_wgmma.cl: boxes are of pages of a multiple of 16 tokens"
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

#define CLA_TILE_UNITS (CLA_BLOCK_KV * CLA_DIM_UNITS)
#include "attention/wgmma_copies.clh"
#include "attention/wgmma_results.clh"
#include "attention/wgmma_rows.clh"

#define CLA_QUERY_UNITS (CLA_BLOCK_ROWS * CLA_DIM_UNITS)
/* Tiles of keys, as many of values, and of queries, on their way or in use. */
#define CLA_STAGES 2
#define CLA_QUERY_STAGES (CLA_HEAD_DIM == 256 ? 1 : 2)

/* Consumers begin a tile's products in turns, so that one's run beside the other's softmax: each
   waits for its turn once a tile, and gives the next one its own. */
#define CLA_ORDER_NAME(group) (1 + CLA_CONSUMERS + (group) % CLA_CONSUMERS)
static inline void cla_order_wait(uint group) {
  if (CLA_CONSUMERS > 1) cla_named_barrier(CLA_ORDER_NAME(group), 2 * CLA_WARPGROUP);
}
static inline void cla_order_arrive(uint group) {
  if (CLA_CONSUMERS > 1) cla_named_barrier_arrive(CLA_ORDER_NAME(group + 1), 2 * CLA_WARPGROUP);
}

/* Stores what the work-item has made of its rows, so that the assembler does not move that behind
   the wait that follows. */
static inline void cla_mark_rows_done(__local float* mark, float made) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(cla_local_address(mark)), "f"(made)
               : "memory");
}

CLA_KERNEL clattn_prefill_wgmma(CLA_PARAMS) {
  __local uint4 q_tiles[CLA_QUERY_STAGES * CLA_QUERY_UNITS] __attribute__((aligned(1024)));
  __local uint4 k_tiles[CLA_STAGES * CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local uint4 v_tiles[CLA_STAGES * CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local ClaTask tasks[CLA_QUERY_STAGES]; /* come with the queries */
  __local float marks[CLA_WG_SIZE];
  __local int maps[2 * CLA_MAP_INTS] __attribute__((aligned(128))); /* of keys, of values */
  __local ulong full_q[CLA_QUERY_STAGES], empty_q[CLA_QUERY_STAGES];
  __local ulong full_k[CLA_STAGES], full_v[CLA_STAGES], empty_k[CLA_STAGES], empty_v[CLA_STAGES];
  __local ulong made[1];

  const ClaOptions opt = CLA_OPTION_VALUES;
  __global int* tensor_maps = workspace + call.tensor_maps_at; /* made by the launch for itself */
  const uint thread = (uint)get_local_id(0);
  const uint lane = thread % 32;
  const uint group = cla_shuffle_from(thread / CLA_WARPGROUP, 0); /* the same for a warp */
  const uint warp = cla_shuffle_from(thread / 32 % 4, 0);
  const uint lid = thread % CLA_WARPGROUP;
  const uint num_tasks = (uint)call.num_entries * (uint)call.num_kv_heads * CLA_HEAD_CHUNKS;

  if (thread == 0) {
    cla_barrier_init(made, 2);
    for (uint s = 0; s < CLA_QUERY_STAGES; ++s) {
      cla_barrier_init(full_q + s, CLA_WARPGROUP + 1);
      cla_barrier_init(empty_q + s, 4 * CLA_CONSUMERS);
    }
    for (uint s = 0; s < CLA_STAGES; ++s) {
      cla_barrier_init(full_k + s, CLA_BOXES ? CLA_COPIERS : CLA_WARPGROUP);
      cla_barrier_init(full_v + s, CLA_BOXES ? CLA_COPIERS : CLA_WARPGROUP);
      cla_barrier_init(empty_k + s, 4 * CLA_CONSUMERS);
      cla_barrier_init(empty_v + s, 4 * CLA_CONSUMERS);
    }
    cla_fence_for_products(); /* initialised -> told by copies */
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* barriers initialised -> used */

  if (group == CLA_CONSUMERS) {
    CLA_KEEP_REGISTERS(40);
    const int first_key = (int)(warp * CLA_WARP_KEYS); /* the warp's in a tile */
    const int own_key = first_key + (int)CLA_OWN_KEY(lane);
    ClaPipe k_pipe = {0, 1}, v_pipe = {0, 1}, q_pipe = {0, 1};
#if CLA_BOXES
    const int head_pages = (int)(call.head_stride / call.block_stride);
    const int head_rest = (int)(call.head_stride % call.block_stride);
#endif
    for (ClaDeal deal = cla_first_task(); deal.number < num_tasks; deal = cla_next_task(deal)) {
      const ClaTask task = cla_task_of(meta, call.entries_at, (uint)call.num_kv_heads, deal.number);
      const ClaRange keys = cla_keys_in_runs(&opt, &task.item, call.causal);
      __global const int* pages = meta + call.pages_at + task.item.pages_at;
      cla_barrier_wait(empty_q + q_pipe.stage, q_pipe.phase);
      if (lid == 0) {
        tasks[q_pipe.stage] = task;
        cla_barrier_arrive(full_q + q_pipe.stage);
      }
      cla_load_queries(q_tiles + q_pipe.stage * CLA_QUERY_UNITS, &task, lid, q, call.q_offset,
                       call.q_token_stride, call.scale_log2e, full_q + q_pipe.stage);
      q_pipe = cla_next_stage(q_pipe, CLA_QUERY_STAGES);
      if (warp >= CLA_COPIERS) continue;
#if CLA_BOXES
      if (deal.number == (uint)get_group_id(0)) {
        cla_barrier_wait(made, 0);
        cla_take_map(tensor_maps);
        cla_take_map(tensor_maps + CLA_MAP_INTS);
      }
      const int head = (int)task.kv_head;
      const ClaSource k = {tensor_maps, head * head_rest, head * head_pages};
      const ClaSource v = {tensor_maps + CLA_MAP_INTS, k.at, k.more_pages};
#else
      const long head_at = (long)task.kv_head * call.head_stride;
      const ClaSource k = {k_cache + call.k_offset + head_at, call.block_stride, call.token_stride};
      const ClaSource v = {v_cache + call.v_offset + head_at, call.block_stride, call.token_stride};
#endif
      /* Keys run a tile ahead of values, as products want them, page ids a tile ahead of keys. */
      int page = cla_page_within(pages, keys.begin + own_key, keys.end);
      int values_page = 0;
      for (int tile = keys.begin; tile < keys.end + CLA_BLOCK_KV; tile += CLA_BLOCK_KV) {
        const int position = tile + own_key;
        const int next_page = cla_page_within(pages, position + CLA_BLOCK_KV, keys.end);
        const int num_keys = keys.end - tile - first_key;
        if (tile < keys.end) {
          cla_load_keys(k_tiles, full_k, empty_k, k_pipe, &k, &task.item, page, position, num_keys,
                        warp, lane);
          k_pipe = cla_next_stage(k_pipe, CLA_STAGES);
        }
        if (tile > keys.begin) {
          cla_load_keys(v_tiles, full_v, empty_v, v_pipe, &v, &task.item, values_page,
                        position - CLA_BLOCK_KV, num_keys + CLA_BLOCK_KV, warp, lane);
          v_pipe = cla_next_stage(v_pipe, CLA_STAGES);
        }
        values_page = page;
        page = next_page;
      }
    }
    cla_wait_copies();
    return;
  }

  if (CLA_BOXES && thread < 64) { /* beside the first queries' way */
    const ClaRowsAt rows = {warp == 0 ? k_cache + call.k_offset : v_cache + call.v_offset,
                            call.token_stride, call.block_stride};
    cla_make_map(tensor_maps + warp * CLA_MAP_INTS, maps + warp * CLA_MAP_INTS, &rows, lane);
    if (lane == 0) cla_barrier_arrive(made);
  }
  CLA_TAKE_REGISTERS(232);
  const uint first_row = group * 64;
  const uint warp_row = first_row + warp * 16;
  const uint own_row = warp_row + cla_c_row(lane);
  const uint name = 1 + group;
  const ClaResults results = {{CLA_PARTIAL_OUT, CLA_PARTIAL_LSE2, call.write_lse ? lse : 0},
                              out,
                              call.out_offset,
                              call.out_token_stride,
                              (uint)call.num_kv_heads};
  const int lane_key = (int)cla_c_column(lane);
  const float scale = fabs(call.scale_log2e);
  const float to_logit = cla_to_logit(scale);
  const uint q_first = cla_tile_descriptor(q_tiles + CLA_QUERY_UNIT(first_row, 0), 64);
  const uint k_desc = cla_tile_descriptor(k_tiles, CLA_KV_ROWS);
  const uint v_desc = cla_tile_descriptor(v_tiles, CLA_KV_ROWS);
  ClaDeal deal = cla_first_task();
  if (deal.number >= num_tasks) return;
  ClaWork work;
  ClaPipe pipe = {0, 0}; /* of the tile's values; of its keys, until they are multiplied */
  float acc[CLA_ACC_TILES * CLA_C_SIZE];
  work.q_pipe.stage = 0;
  work.q_pipe.phase = 0;
#pragma unroll
  for (uint i = 0; i < CLA_ACC_TILES * CLA_C_SIZE; ++i) acc[i] = 0.0f;
  cla_barrier_wait(full_q, 0);
  cla_begin_work(&work, tasks, work.q_pipe, &opt, own_row, call.causal);
  deal = cla_next_task(deal);
  int tile = work.keys.begin;
  if (group == CLA_CONSUMERS - 1) cla_order_arrive(group);
  for (;;) {
    if (tile < work.keys.end) { /* begins beside no other tile */
      float scores[CLA_SCORE_TILES * CLA_C_SIZE];
      ClaA probabilities[CLA_KEY_STEPS];
      float2 bases, factors;
      int masked = cla_partly_seen(&work, tile);
      int by_hand;
      cla_wait_tile(full_k, pipe);
      cla_order_wait(group);
      cla_start_qk(scores, q_first + work.q_pipe.stage * CLA_QUERY_UNITS,
                   k_desc + pipe.stage * CLA_TILE_UNITS);
      cla_order_arrive(group);
      cla_wgmma_wait_all();
      CLA_PIN(scores, CLA_SCORE_TILES * CLA_C_SIZE);
      if (lane == 0) cla_barrier_arrive(empty_k + pipe.stage);
      bases = cla_find_bases(scores, &work, &opt, scale, tile + lane_key, masked);
      factors.x = cla_row_to_probabilities(scores, work.state, 0, bases.x, to_logit);
      factors.y = cla_row_to_probabilities(scores, work.state, 1, bases.y, to_logit);
      cla_rescale_pair(acc, factors);
      cla_round_rows(probabilities, scores);
      for (;;) {
        by_hand = 0;
        if (masked) {
          cla_barrier_wait(full_v + pipe.stage, pipe.phase);
          by_hand =
              cla_values_overflow(v_tiles + pipe.stage * CLA_TILE_UNITS, tile, &work, lid, name);
        }
        if (by_hand) break;
        const ClaWork ended = work;
        const int last = tile + CLA_BLOCK_KV >= work.keys.end;
        if (last) { /* goes on with the next task's first tile */
          if (CLA_QUERY_STAGES == 1 || deal.number >= num_tasks) break;
          const ClaPipe q_pipe = cla_next_stage(work.q_pipe, CLA_QUERY_STAGES);
          cla_barrier_wait(full_q + q_pipe.stage, q_pipe.phase);
          if (!cla_has_keys(&opt, &tasks[q_pipe.stage].item, call.causal)) break;
          cla_begin_work(&work, tasks, q_pipe, &opt, own_row, call.causal);
          deal = cla_next_task(deal);
          tile = work.keys.begin;
        } else {
          tile += CLA_BLOCK_KV;
        }
        const ClaPipe next = cla_next_stage(pipe, CLA_STAGES);
        masked = cla_partly_seen(&work, tile);
        cla_barrier_wait(full_v + pipe.stage, pipe.phase);
        cla_wait_tile(full_k, next);
        cla_order_wait(group);
        cla_start_qk(scores, q_first + work.q_pipe.stage * CLA_QUERY_UNITS,
                     k_desc + next.stage * CLA_TILE_UNITS);
        cla_start_pv(acc, probabilities, v_desc + pipe.stage * CLA_TILE_UNITS);
        cla_order_arrive(group);
        cla_wgmma_wait_all_but_1();
        CLA_PIN(scores, CLA_SCORE_TILES * CLA_C_SIZE);
        if (lane == 0) cla_barrier_arrive(empty_k + next.stage);
        bases = cla_find_bases(scores, &work, &opt, scale, tile + lane_key, masked);
        factors.x = cla_row_to_probabilities(scores, work.state, 0, bases.x, to_logit);
        cla_mark_rows_done(marks + thread, work.state[0].sum + bases.y);
        cla_wgmma_wait_all();
        cla_pin_probabilities(probabilities); /* read until now */
        CLA_PIN(acc, CLA_ACC_TILES * CLA_C_SIZE);
        if (lane == 0) cla_barrier_arrive(empty_v + pipe.stage);
        if (last) {
          const uint stage = ended.q_pipe.stage;
          cla_warpgroup_barrier(name); /* queries multiplied -> results staged */
          cla_end_rows(&ended.task, ended.state, &opt, &results, q_tiles + stage * CLA_QUERY_UNITS,
                       acc, warp_row, lane);
          if (lane == 0) cla_barrier_arrive(empty_q + stage);
        }
        factors.y = cla_row_to_probabilities(scores, work.state, 1, bases.y, to_logit);
        cla_rescale_pair(acc, factors);
        cla_round_rows(probabilities, scores);
        pipe = next;
      }
      if (by_hand) {
        cla_add_seen_values(acc, probabilities, work.rows, v_tiles + pipe.stage * CLA_TILE_UNITS,
                            tile, lane);
        cla_warp_barrier(); /* values read -> told to be empty */
      } else {
        cla_wait_tile(full_v, pipe);
        cla_start_pv(acc, probabilities, v_desc + pipe.stage * CLA_TILE_UNITS);
        cla_wgmma_wait_all();
        CLA_PIN(acc, CLA_ACC_TILES * CLA_C_SIZE);
      }
      if (lane == 0) cla_barrier_arrive(empty_v + pipe.stage);
      pipe = cla_next_stage(pipe, CLA_STAGES);
      tile += CLA_BLOCK_KV;
      if (tile < work.keys.end) continue;
    }
    cla_warpgroup_barrier(name); /* queries multiplied -> results staged */
    cla_end_rows(&work.task, work.state, &opt, &results,
                 q_tiles + work.q_pipe.stage * CLA_QUERY_UNITS, acc, warp_row, lane);
    if (lane == 0) cla_barrier_arrive(empty_q + work.q_pipe.stage);
    if (deal.number >= num_tasks) break;
    const ClaPipe q_pipe = cla_next_stage(work.q_pipe, CLA_QUERY_STAGES);
    cla_barrier_wait(full_q + q_pipe.stage, q_pipe.phase);
    cla_begin_work(&work, tasks, q_pipe, &opt, own_row, call.causal);
    deal = cla_next_task(deal);
    tile = work.keys.begin;
  }
  if (group == 0) cla_order_wait(group); /* the last one's */
}
