/* Latent decode (MLA) on NVIDIA's compute capability 9.0: many heads against one latent row a key,
   by warpgroup products. Same meaning as mla_decode_gpu.cl, without options.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], c[p, :]>) c[p, 0 ... HEAD_DIM)
                 p: the keys that row r sees; c[p, :] has KEY_DIM = HEAD_DIM + ROPE_DIM elements

   A work-group stays for many tasks (a work item for one chunk of heads; cla_next_task): 64 rows
   (query token, head) against tiles of 64 keys, which are both keys and values. Two warpgroups
   multiply, a third one copies queries and tiles:

     the first                                 the second
     S = Q C^T, P = 2^(S - max)
     hands P and the factors of O over
     O[:, front half] += P C[:, front half]    O[:, back half] += P C[:, back half]
     S of the next tile, begun meanwhile

   The sums of 64 rows and 512 dims are half a multiprocessor's registers, so that neither warpgroup
   could hold them alone. A lane of the second one owns the same rows as its lane of the first, so
   that probabilities change hands in the order in which lanes hold them.

   Bytes and operations of a tile at 512 + 64: 72 KiB from the cache, 4.5 M multiply-adds, at best
   2 176 cycles of products, 4 096 exponentials. Groups of rows that share an item's keys stand next
   to each other in launch order, so that the second one finds them in the last cache.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    256, 512
   CLA_ROPE_DIM         elements    64
   CLA_Q_DTYPE          -           1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           CLA_Q_DTYPE: cache
   CLA_PAGE_SIZE        tokens      >= 1
   CLA_BLOCK_ROWS       rows        64
   CLA_BLOCK_KV         keys        64
   CLA_WG_SIZE          work-items  384

   Local memory: 192 * KEY_DIM * 2 B and 8.3 KiB beside, 225.3 KiB with what aligns them, at 512
   + 64. Launch: up to num_items * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. */
#if CLA_HEAD_DIM == 256
#define CLA_VALUE_DIM 128 /* of a warpgroup: half of them */
#elif CLA_HEAD_DIM == 512
#define CLA_VALUE_DIM 256
#else
#error "CLA_HEAD_DIM must be 256 or 512"
#endif
#define CLA_RESULT_DIM CLA_HEAD_DIM
#define CLA_QUERY_DIM CLA_KEY_DIM
#define CLA_TILE_UNIT(row, unit) cla_swizzled(row, unit, CLA_BLOCK_KV)
#define CLA_QUERY_UNIT(row, unit) cla_swizzled(row, unit, CLA_BLOCK_ROWS)
#define CLA_TILE_UNITS (CLA_BLOCK_KV * CLA_KEY_DIM / 8)
#define CLA_COPIERS 4
#define CLA_STAGES 2    /* tiles on their way or in use */
#define CLA_LANE_ROWS 4 /* of a tile, that a lane copies every eighth unit of */
#define CLA_HALF_UNITS (CLA_BLOCK_KV * CLA_HEAD_DIM / 2 / 8) /* from the front half to the back */

#include "core/latent.clh"
#include "tile/unit.clh"

#include "attention/wgmma/left_out.clh"
#include "attention/wgmma/results.clh"

#if CLA_KV_DTYPE != CLA_Q_DTYPE
#error "mla_wgmma.cl: the cache must hold the queries' type"
#endif
#if CLA_BLOCK_ROWS != 64 || CLA_BLOCK_KV != 64 || CLA_WG_SIZE != 3 * CLA_WARPGROUP
#error "mla_wgmma.cl: the tile is 64 rows, 64 keys, 384 work-items"
#endif
#if CLA_ROPE_DIM != 64
#error "CLA_ROPE_DIM must be 64"
#endif

/* Where tiles of keys end: there is one, all masked, also where no row sees a key. */
#define CLA_TILES_END(keys) max((keys).end, (keys).begin + 1)

/* Eight lanes copy a row of a tile. */
static inline uint cla_copied_row(uint i, uint warp, uint lane) {
  return warp * 16 + 4 * i + cla_unit_at(lane, 8).row;
}

/* Starts to copy the lane's units of a row; zeros where `wanted` is 0. */
static inline void cla_start_row(__local uint4* tile, uint row, __global const CLA_KV_T* from,
                                 int wanted, uint lane) {
  const uint unit = cla_unit_at(lane, 8).unit;
  __local uint4* to = tile + CLA_TILE_UNIT(row, unit);
#pragma unroll
  for (uint block = 0; block < CLA_KEY_DIM / 64; ++block)
    cla_copy_async(to + block * 64 * 8, from + block * 64 + 8 * unit, wanted);
}

/* Pages of the lane's keys in the tile at `tile`; 0 where there is none. */
static inline void cla_latent_pages(int* page, __global const int* pages, int tile, int end,
                                    uint warp, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_LANE_ROWS; ++i) {
    const int position = tile + (int)cla_copied_row(i, warp, lane);
    page[i] = position < end ? cla_page_of(pages, (uint)position) : 0;
  }
}

/* Starts to copy the lane's part of a tile; keys from `end` on become zeros. */
static inline void cla_start_latent(__local uint4* k_tile, __global const CLA_KV_T* cache,
                                    const int* page, int tile, int end, uint warp, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_LANE_ROWS; ++i) {
    const uint row = cla_copied_row(i, warp, lane);
    const uint position = (uint)tile + row;
    const long key = (long)page[i] * CLA_PAGE_SIZE + (long)(position % CLA_PAGE_SIZE);
    cla_start_row(k_tile, row, cache + key * CLA_KEY_DIM, (int)position < end, lane);
  }
}

/* Brings the task's queries and arrives at `full`. */
static inline void cla_load_latent_queries(__local uint4* q_tile, const ClaTask* task,
                                           __global const CLA_Q_T* q, long token_stride,
                                           float scale, __local ulong* full, uint warp, uint lane) {
  if (!cla_rows_aligned(q, token_stride) || scale < 0.0f) {
    const ClaTeam team = {0, CLA_BLOCK_ROWS, warp * CLA_LANES + lane, CLA_WARPGROUP};
    cla_start_queries(q_tile, task, team, q, 0, token_stride, scale);
    cla_fence_for_products();
    cla_barrier_arrive(full);
    return;
  }
#pragma unroll
  for (uint i = 0; i < CLA_LANE_ROWS; ++i) {
    const uint row = cla_copied_row(i, warp, lane);
    const int exists = cla_row_exists(task, row);
    const long at = exists ? cla_row_at(task, row, 0, token_stride, CLA_QUERY_DIM) : 0;
    cla_start_row(q_tile, row, q + at, exists, lane);
  }
  cla_barrier_arrive_after_copies(full);
}

/* What the first warpgroup hands to the second: words of a lane, and a factor of each row. */
typedef struct ClaHandover {
  __local uint4* words;   /* [KEY_STEPS][WARPGROUP] */
  __local float* factors; /* of the lane's first row */
  __local ulong *full, *empty;
} ClaHandover;

static inline void cla_hand_over(ClaHandover to, ClaPipeline* pipeline, const uint4* words,
                                 uint num_words, float2 factors, uint lid) {
  cla_barrier_wait(to.empty, pipeline->phase ^ 1);
#pragma unroll
  for (uint i = 0; i < num_words; ++i) to.words[i * CLA_WARPGROUP + lid] = words[i];
  if (cla_leads_row(lid)) {
    to.factors[CLA_C_ROW_STEP(0)] = factors.x;
    to.factors[CLA_C_ROW_STEP(1)] = factors.y;
  }
  cla_warp_barrier(); /* handed over -> full */
  if (cla_leads_warp(lid)) cla_barrier_arrive(to.full);
  *pipeline = cla_next_stage(*pipeline, 1);
}

static inline float2 cla_take_over(ClaHandover from, ClaPipeline* pipeline, uint4* words,
                                   uint num_words, uint lid) {
  cla_barrier_wait(from.full, pipeline->phase);
#pragma unroll
  for (uint i = 0; i < num_words; ++i) words[i] = from.words[i * CLA_WARPGROUP + lid];
  const float2 factors = (float2)(from.factors[CLA_C_ROW_STEP(0)], from.factors[CLA_C_ROW_STEP(1)]);
  cla_warp_barrier(); /* taken over -> empty */
  if (cla_leads_warp(lid)) cla_barrier_arrive(from.empty);
  *pipeline = cla_next_stage(*pipeline, 1);
  return factors;
}

/* A tile's products become probabilities. Gives what the sums so far are to be multiplied by. */
static inline float2 cla_scores_to_probabilities(float* scores, uint4* probabilities, ClaWork* work,
                                                 const ClaOptions* opt, int first_key, int masked) {
  const float to_logit = cla_to_logit(work->scale);
  cla_mask_rows(scores, work->rows, opt, work->scale, first_key, masked);
  const float2 bases = cla_find_bases(scores, work, to_logit);
  const float upper = cla_move_row(scores, work->state, 0, bases.x, to_logit);
  const float lower = cla_move_row(scores, work->state, 1, bases.y, to_logit);
  cla_round_rows(probabilities, scores);
  return (float2)(upper, lower);
}

/* The last warpgroup: loads queries and latent rows of all tasks into their stages. */
static inline void cla_produce_latent(const ClaCall call, const ClaOptions* opt,
                                      const ClaShared* at, __global const int* meta,
                                      __global const CLA_Q_T* q, __global const CLA_KV_T* k_cache,
                                      uint num_tasks, uint warp, uint lane, uint lid) {
  ClaPipeline pipeline = {0, 1}, q_pipe = {0, 1};
  for (ClaDeal deal = cla_first_task(); deal.number < num_tasks; deal = cla_next_task(deal)) {
    const ClaTask task = cla_task_of(meta, call.entries_at, 1, deal.number);
    const ClaRange keys = cla_keys_in_runs(opt, &task.item, call.causal);
    __global const int* pages = meta + call.pages_at + task.item.pages_at;
    int page[CLA_LANE_ROWS];
    cla_latent_pages(page, pages, keys.begin, keys.end, warp, lane);
    cla_wait_empty(&at->queries, q_pipe);
    if (lid == 0) {
      at->tasks[0] = task;
      cla_leave_nothing_out(at->left_out);
      cla_leave_nothing_out(at->left_out + 1);
      cla_barrier_arrive(at->queries.full);
    }
    cla_load_latent_queries(at->queries.tiles, &task, q + call.q_offset, call.q_token_stride,
                            call.scale_log2e, at->queries.full, warp, lane);
    if (task.item.q_count == 0) break; /* padding: consumers read it in `tasks` and stop, too */
    q_pipe = cla_next_stage(q_pipe, 1);
    for (int tile = keys.begin; tile < CLA_TILES_END(keys); tile += CLA_BLOCK_KV) {
      int next_page[CLA_LANE_ROWS];
      cla_latent_pages(next_page, pages, tile + CLA_BLOCK_KV, keys.end, warp, lane);
      cla_wait_empty(&at->keys, pipeline);
      cla_start_latent(at->keys.tiles + pipeline.stage * CLA_TILE_UNITS, k_cache, page, tile,
                       keys.end, warp, lane);
      cla_barrier_arrive_after_copies(at->keys.full + pipeline.stage);
      pipeline = cla_next_stage(pipeline, CLA_STAGES);
#pragma unroll
      for (uint i = 0; i < CLA_LANE_ROWS; ++i) page[i] = next_page[i];
    }
  }
  cla_wait_copies();
}

/* What a consumer knows all along. */
typedef struct ClaLatentConsumer {
  const ClaShared* at;
  const ClaOptions* opt;
  ClaHandover handover;
  __local uint4* own_v; /* its dims of the stages of latent rows */
  __local ClaLeftOut* left_out;
  uint lane, lid, name;
  uint q_desc, k_desc, v_desc;
} ClaLatentConsumer;

/* Makes this warpgroup's dims of a tile safe to multiply for rows that do not see it; its products
   with
   queries are done. */
static inline void cla_prepare_latent(const ClaLatentConsumer* own, const ClaWork* work,
                                      ClaPipeline pipeline, int tile) {
  cla_leave_out_values(own->own_v + pipeline.stage * CLA_TILE_UNITS, tile, work, own->left_out,
                       own->lid, own->name);
}

/* Adds this warpgroup's dims of a tile of values beside which no product runs. */
static inline void cla_take_latent(const ClaLatentConsumer* own, ClaPipeline* pipeline, float* acc,
                                   const ClaA* probabilities) {
  cla_start_pv(acc, probabilities, own->v_desc + pipeline->stage * CLA_TILE_UNITS);
  cla_wgmma_wait_all();
  CLA_PIN(acc, CLA_ACC_TILES * CLA_C_SIZE);
  cla_release(&own->at->keys, pipeline->stage, own->lane);
  *pipeline = cla_next_stage(*pipeline, CLA_STAGES);
}

/* A tile's products become probabilities, which the second warpgroup gets, too. */
static inline void cla_take_latent_scores(const ClaLatentConsumer* own, ClaWork* work,
                                          ClaPipeline* hand_pipe, float* acc, float* scores,
                                          ClaA* probabilities, int tile, int masked) {
  cla_wgmma_wait_all();
  CLA_PIN(scores, CLA_SCORE_TILES * CLA_C_SIZE);
  const float2 factors = cla_scores_to_probabilities(scores, probabilities, work, own->opt,
                                                     tile + (int)cla_c_column(own->lane), masked);
  cla_hand_over(own->handover, hand_pipe, probabilities, CLA_KEY_STEPS, factors, own->lid);
  cla_rescale_pair(acc, factors);
}

/* The first warpgroup: all products with keys, the softmax, and the front half of the values. */
static inline void cla_consume_front(const ClaLatentConsumer* own, ClaWork* work,
                                     ClaPipeline* pipeline, ClaPipeline* hand_pipe, float* acc) {
  const ClaShared* at = own->at;
  const int tiles_end = CLA_TILES_END(work->keys);
  int tile = work->keys.begin;
  ClaA probabilities[CLA_KEY_STEPS];
  float scores[CLA_SCORE_TILES * CLA_C_SIZE];
  int masked = cla_partly_seen(work, tile);
  cla_wait_tile(&at->keys, *pipeline);
  cla_start_qk(scores, own->q_desc, own->k_desc + pipeline->stage * CLA_TILE_UNITS);
  cla_take_latent_scores(own, work, hand_pipe, acc, scores, probabilities, tile, masked);
  for (;;) {
    if (masked) cla_prepare_latent(own, work, *pipeline, tile);
    tile += CLA_BLOCK_KV;
    if (tile >= tiles_end) break;
    const ClaPipeline next = cla_next_stage(*pipeline, CLA_STAGES);
    masked = cla_partly_seen(work, tile);
    cla_start_pv(acc, probabilities, own->v_desc + pipeline->stage * CLA_TILE_UNITS);
    cla_wait_tile(&at->keys, next);
    cla_start_qk(scores, own->q_desc, own->k_desc + next.stage * CLA_TILE_UNITS);
    cla_wgmma_wait_all_but_1();
    cla_pin_probabilities(probabilities); /* read until now */
    CLA_PIN(acc, CLA_ACC_TILES * CLA_C_SIZE);
    cla_release(&at->keys, pipeline->stage, own->lane);
    cla_take_latent_scores(own, work, hand_pipe, acc, scores, probabilities, tile, masked);
    *pipeline = next;
  }
  cla_take_latent(own, pipeline, acc, probabilities);
  const ClaRowState* state = work->state;
  const uint4 ends = as_uint4((float4)(state[0].base, state[0].sum, state[1].base, state[1].sum));
  cla_hand_over(own->handover, hand_pipe, &ends, 1, (float2)(1.0f), own->lid);
}

/* The second warpgroup: the back half of the values. */
static inline void cla_consume_back(const ClaLatentConsumer* own, ClaWork* work,
                                    ClaPipeline* pipeline, ClaPipeline* hand_pipe, float* acc) {
  const int tiles_end = CLA_TILES_END(work->keys);
  int tile = work->keys.begin;
  ClaA probabilities[CLA_KEY_STEPS];
  do {
    cla_wait_tile(&own->at->keys, *pipeline);
    cla_rescale_pair(
        acc, cla_take_over(own->handover, hand_pipe, probabilities, CLA_KEY_STEPS, own->lid));
    if (cla_partly_seen(work, tile)) cla_prepare_latent(own, work, *pipeline, tile);
    cla_take_latent(own, pipeline, acc, probabilities);
    tile += CLA_BLOCK_KV;
  } while (tile < tiles_end);
  uint4 ends;
  cla_take_over(own->handover, hand_pipe, &ends, 1, own->lid);
  work->state[0].base = as_float(ends.x);
  work->state[0].sum = as_float(ends.y);
  work->state[1].base = as_float(ends.z);
  work->state[1].sum = as_float(ends.w);
}

CLA_KERNEL clattn_mla_wgmma(CLA_PARAMS) {
  __local uint4 q_tile[CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local uint4 k_tiles[CLA_STAGES * CLA_TILE_UNITS] __attribute__((aligned(1024)));
  __local uint4 words[CLA_KEY_STEPS * CLA_WARPGROUP];
  __local float row_factors[CLA_BLOCK_ROWS];
  __local ClaTask tasks[1];
  __local ClaLeftOut left_out[2];
  __local ulong full_q[1], empty_q[1], full_k[CLA_STAGES], empty_k[CLA_STAGES];
  __local ulong full_words[1], empty_words[1];

  const ClaShared at = {.queries = {q_tile, full_q, empty_q},
                        .keys = {k_tiles, full_k, empty_k},
                        .tasks = tasks,
                        .left_out = left_out};
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaThread self = cla_thread();
  const uint num_tasks = (uint)call.num_entries * CLA_HEAD_CHUNKS;

  if (get_local_id(0) == 0) {
    cla_barrier_init(full_q, CLA_WARPGROUP + 1);
    cla_barrier_init(empty_q, 8);
    cla_barrier_init(full_words, 4);
    cla_barrier_init(empty_words, 4);
    for (uint s = 0; s < CLA_STAGES; ++s) {
      cla_barrier_init(full_k + s, CLA_WARPGROUP);
      cla_barrier_init(empty_k + s, 8);
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* barriers initialised -> used */
  if (self.group == 2) {
    CLA_KEEP_REGISTERS(40);
    cla_produce_latent(call, &opt, &at, meta, q, k_cache, num_tasks, self.warp, self.lane,
                       self.lid);
    return;
  }

  CLA_TAKE_REGISTERS(232);
  const uint warp_row = self.warp * CLA_TILE_ROWS;
  const uint own_row = warp_row + cla_c_row(self.lane);
  const uint own_dim = self.group * (CLA_HEAD_DIM / 2);
  __local uint4* own_q = q_tile + self.group * CLA_HALF_UNITS; /* where results are staged */
  __local uint4* own_v = k_tiles + self.group * CLA_HALF_UNITS;
  const ClaRowResults results = {
      {CLA_PARTIAL_OUT + own_dim, CLA_PARTIAL_LSE2, call.write_lse && self.group == 0 ? lse : 0},
      out,
      call.out_offset + own_dim,
      call.out_token_stride,
      (uint)call.num_kv_heads};
  const ClaValuesAt values = {k_cache + own_dim, meta + call.pages_at, 0,
                              CLA_PAGE_SIZE * CLA_KEY_DIM, CLA_KEY_DIM};
  const ClaLatentConsumer own = {&at,
                                 &opt,
                                 {words, row_factors + own_row, full_words, empty_words},
                                 own_v,
                                 left_out + self.group,
                                 self.lane,
                                 self.lid,
                                 1 + self.group,
                                 cla_tile_descriptor(q_tile, CLA_BLOCK_ROWS),
                                 cla_tile_descriptor(k_tiles, CLA_BLOCK_KV),
                                 cla_tile_descriptor(own_v, CLA_BLOCK_KV)};
  ClaPipeline pipeline = {0, 0}, q_pipe = {0, 0}, hand_pipe = {0, 0};
  float acc[CLA_ACC_TILES * CLA_C_SIZE];
#pragma unroll
  for (uint i = 0; i < CLA_ACC_TILES * CLA_C_SIZE; ++i) acc[i] = 0.0f;
  for (ClaDeal deal = cla_first_task(); deal.number < num_tasks; deal = cla_next_task(deal)) {
    ClaWork work;
    cla_wait_tile(&at.queries, q_pipe);
    if (tasks[0].item.q_count == 0) break; /* padding: the end */
    cla_begin_work(&work, tasks, q_pipe, &opt, own_row, call.causal, call.scale_log2e);
    if (self.group == 0) {
      cla_consume_front(&own, &work, &pipeline, &hand_pipe, acc);
    } else {
      cla_consume_back(&own, &work, &pipeline, &hand_pipe, acc);
    }
    const ClaTask task = tasks[0];
    cla_add_left_out(acc, *own.left_out, &opt, &task, &values, call.causal, own_row, self.lane);
    cla_end_rows(&task, work.state, &opt, &results, own_q, acc, warp_row, self.lane);
    cla_fence_for_products(); /* what was staged -> the next queries */
    cla_warp_barrier();
    cla_release(&at.queries, 0, self.lane);
    q_pipe = cla_next_stage(q_pipe, 1);
  }
}
