/* Decode on a CPU: few query rows against a long range of paged keys, limited by memory.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r

   Loop order: tile of BLOCK_KV keys > KV head > bundle > chunk of 4 rows > scores, softmax, values.
   All rows of a KV head share one pass over K and V. Scores come as vectors whose lane 4 k + r is
   key k against row r: a chunk's softmax state is one vector (attention/cpu/row_lanes.clh). A
   bundle is the chunks that are multiplied together, at most BUNDLE: one, except with x86's tiles.

   A task takes KV_HEADS heads of a tile one after the other, because memory is read faster in
   longer runs than one head's part of a page: the heads of a page are neighbours in either layout.
   attention/cpu/fetch.clh asks for every cache line ahead of its turn.

   CLA_DOT chooses the unit that multiplies, each of which defines the same functions
   (tile/cpu/README.md). Those of bf16 take queries and keys as they are, and probabilities
   rounded to bf16.

   Macros: core/vec.clh and core/options.clh, which says what may be added to the logits. Here
   BLOCK_KV is a multiple of 16, and 32 with tiles. */

#define CLA_LANE_ROWS 4 /* a chunk */
#define CLA_LANE_STEPS (CLA_BLOCK_KV * CLA_LANE_ROWS / CLA_VEC)

#include "attention/cpu/fetch.clh"
#include "attention/cpu/merge.clh"
#include "attention/cpu/row_lanes.clh"
#include "attention/cpu/task.clh"
#if CLA_DOT == 2
#include "tile/cpu/amx_decode.clh"
#elif CLA_DOT
#include "tile/cpu/avx512_bf16_decode.clh"
#else
#include "tile/cpu/vectors_decode.clh"
#endif

#define CLA_BUNDLE_ROWS (CLA_BUNDLE * CLA_CHUNK)
#define CLA_BUNDLES (CLA_ROUND_UP(CLA_BLOCK_ROWS, CLA_BUNDLE_ROWS) / CLA_BUNDLE_ROWS)

/* Turns a chunk's scores in a tile into probabilities relative to its largest logits so far, which
   its accumulator follows. */
static inline void cla_decode_probabilities(ClaRowLanes* rows, const ClaOptions* opt,
                                            __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                            const ClaDecodeTile* tile, int masked, cla_vf* s,
                                            cla_vf* o) {
  cla_vf factor;
#if CLA_ROW_SCALES
  cla_row_lanes_scale_keys(s, tile->k_scales, 0, CLA_STEPS);
#endif
  if (cla_row_lanes_softmax(rows, opt, tile->score_unit, tile->at, 0, CLA_STEPS, tile->end, masked,
                            s, &factor)) {
    float f[CLA_VEC];
    CLA_CAT(vstore, CLA_VEC)(factor, 0, f);
#pragma unroll 1
    for (int r = 0; r < CLA_CHUNK; ++r)
      for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] *= f[r];
  }
#pragma unroll
  for (int step = 0; step < CLA_STEPS; ++step) {
    cla_fetch_ahead(k, v, tile, step);
    s[step] = cla_row_lanes_probabilities(rows, s[step], masked);
    rows->sum += s[step];
#if CLA_ROW_SCALES
    s[step] = cla_row_lanes_scaled(s[step], tile->v_scales + step * CLA_STEP_KEYS);
#endif
  }
}

/* What a bundle of chunks holds in private memory. */
typedef struct ClaDecodeBundle {
  cla_vf query[CLA_BUNDLE_ROWS * CLA_QUERY_VECS + 1]; /* tile/cpu/amx_decode.clh */
  cla_vf o[CLA_BUNDLE_ROWS * CLA_NUM_VECS];
  ClaRowLanes rows[CLA_BUNDLE];
  float score_unit;
} ClaDecodeBundle;

/* One bundle against one tile of keys. */
static inline void cla_decode_tile(ClaDecodeBundle* own, const ClaOptions* opt,
                                   __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                   ClaDecodeTile* tile, ClaDecodeOperands* operands) {
  cla_start_qk(own->query, k, v, tile, operands);
#pragma unroll 1
  for (tile->chunk = 0; tile->chunk < tile->chunks; ++tile->chunk) {
    ClaRowLanes* rows = &own->rows[tile->chunk];
    cla_vf* o = own->o + tile->chunk * CLA_CHUNK * CLA_NUM_VECS;
    cla_vf s[CLA_STEPS];
    cla_multiply_qk(own->query, k, v, tile, operands, s);
    const int masked = cla_row_lanes_masked(rows, tile->at, tile->at + CLA_BLOCK_KV);
    cla_decode_probabilities(rows, opt, k, v, tile, masked, s, o);
    cla_multiply_pv(s, k, v, tile, operands, masked, o);
  }
  cla_finish_pv(k, v, tile, operands, own->o);
}

static inline void cla_decode_begin(const ClaCpuTask* task, int first_row, int chunks,
                                    __global const CLA_Q_T* q, long q_token_stride, float scale,
                                    ClaDecodeBundle* bundle) {
  for (int c = 0; c < chunks; ++c)
    cla_row_lanes_begin(task, first_row + c * CLA_CHUNK, &bundle->rows[c]);
  bundle->score_unit = CLA_DOT ? scale : 1.0f; /* bf16 queries keep their bits, scores are scaled */
  for (int r = 0; r < chunks * CLA_CHUNK; ++r) {
    cla_vf* query = bundle->query + r * CLA_QUERY_VECS;
    cla_cpu_load_query(task, first_row + r, q, q_token_stride, CLA_DOT ? 1.0f : scale, query);
  }
  cla_order_queries(bundle->query, (uint)(chunks * CLA_CHUNK));
#pragma unroll 1
  for (int d = 0; d < chunks * CLA_CHUNK * CLA_NUM_VECS; ++d) bundle->o[d] = (cla_vf)(0.0f);
}

static inline void cla_decode_store(const ClaCpuTask* task, int first_row, const ClaRowLanes* rows,
                                    cla_vf* o, const ClaResults* to) {
  for (int r = 0; r < CLA_CHUNK && first_row + r < task->num_rows; ++r) {
    cla_order_results(o + r * CLA_NUM_VECS);
    cla_cpu_store_row(task, first_row + r, o + r * CLA_NUM_VECS, cla_cpu_value_unit(task),
                      cla_row_lanes_state(rows, r), to);
  }
}

/* All keys of a task against its bundles, bundles[head][num]. */
static inline void cla_decode_keys(const ClaCpuTask* task, const cla_vu* codes, int num, int chunks,
                                   __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                   ClaDecodeBundle* bundles) {
  const int begin = cla_cpu_row_begin(task, 0);              /* no row sees a key before it, */
  const int end = cla_cpu_row_end(task, task->num_rows - 1); /* none one from here on */
  ClaDecodeStages stages;
  if (begin < end) {
#pragma unroll 1
    for (int i = 0; i + 1 < CLA_STAGES; ++i)
      cla_decode_fill_stage(task, begin + i * CLA_BLOCK_KV, end, &stages);
    cla_decode_fetch_first(task, &stages, begin, k, v);
  }
  for (int at = begin; at < end; at += CLA_BLOCK_KV) {
    cla_decode_fill_stage(task, at + (CLA_STAGES - 1) * CLA_BLOCK_KV, end, &stages);
    for (int h = 0; h < task->kv_heads; ++h) {
      ClaDecodeTile tile = {.score_unit = bundles[h * num].score_unit,
                            .codes = codes,
                            .at = at,
                            .end = end,
                            .head = h * task->call->head_stride,
                            .now = stages.first[at / CLA_BLOCK_KV % CLA_STAGES],
                            .next = cla_decode_rows_ahead(task, &stages, at, h),
                            .chunks = chunks};
#if CLA_ROW_SCALES
      cla_cpu_row_scales(task, h, at, end, tile.k_scales, tile.v_scales);
#endif
      ClaDecodeOperands operands;
      for (int b = 0; b < num; ++b) {
        tile.fetch_begin = b * CLA_BLOCK_KV / num;
        tile.fetch_end = (b + 1) * CLA_BLOCK_KV / num;
        cla_decode_tile(&bundles[h * num + b], task->opt, k, v, &tile, &operands);
      }
    }
  }
}

CLA_KERNEL clattn_decode_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at; /* attention/cpu/queue.clh */
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;
  cla_vu codes[CLA_CODE_VECS];
  cla_make_codes(codes);

  ClaCpuTask task;
  while (cla_cpu_take_task(&call, meta, counters, &opt, &task)) {
    /* As few bundles as hold all rows, each of the same, smallest number of chunks. */
    const int num = (task.num_rows + CLA_BUNDLE_ROWS - 1) / CLA_BUNDLE_ROWS;
    const int bundle_rows = CLA_ROUND_UP((task.num_rows + num - 1) / num, CLA_CHUNK);
    const int chunks = CLA_BUNDLE == 1 ? 1 : bundle_rows / CLA_CHUNK;

    cla_begin_products(chunks * CLA_CHUNK);
    ClaDecodeBundle bundles[CLA_KV_HEADS * CLA_BUNDLES]; /* [head][num] */
    for (int h = 0; h < task.kv_heads; ++h) {
      const ClaCpuTask of_head = cla_cpu_head_task(&task, h);
      const float scale = call.scale_log2e * cla_cpu_key_unit(&of_head);
      for (int b = 0; b < num; ++b)
        cla_decode_begin(&of_head, b * chunks * CLA_CHUNK, chunks, q + call.q_offset,
                         call.q_token_stride, scale, &bundles[h * num + b]);
    }
    cla_decode_keys(&task, codes, num, chunks, k_cache + call.k_offset, CLA_VALUES, bundles);
    for (int h = 0; h < task.kv_heads; ++h) {
      const ClaCpuTask of_head = cla_cpu_head_task(&task, h);
      for (int c = 0; c < num * chunks; ++c) {
        ClaDecodeBundle* bundle = &bundles[h * num + c / chunks];
        cla_decode_store(&of_head, c * CLA_CHUNK, &bundle->rows[c % chunks],
                         bundle->o + c % chunks * CLA_CHUNK * CLA_NUM_VECS, &to);
      }
    }
    cla_cpu_merge_if_last(&task, &to, CLA_ARRIVALS);
  }
  cla_end_products();
  cla_queue_leave(counters);
}
