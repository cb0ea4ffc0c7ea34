/* Attention on a CPU by tiles of bf16 (tile/cpu/amx.clh or tile/cpu/avx512_bf16.clh): query rows
   against paged keys.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r

   Products are computed transposed, S^T = K Q^T and O^T += V^T P^T, so that a lane of a vector is a
   query row (attention/cpu/row_lanes.clh) and P^T comes out of the softmax as the second product
   wants it.

   Loop order: tile of BLOCK_KV keys > load K as bf16 rows and V transposed > block of
   ROW_BLOCK query rows > scores, softmax, values. Queries become pairs of dims once for each task.
   Latent rows (MLA) are loaded once, as keys, and transposed into values.

   Probabilities are rounded to bf16, half up, before P V. Where a value is infinite or NaN and some
   row of the block does not see all of the tile, P V is computed with vectors, which skip masked
   keys.

   Macros: core/vec.clh, VEC 16; queries bf16, the cache bf16 or of 8 bits; HEAD_DIM, VALUE_DIM
   and ROPE_DIM multiples of 32, BLOCK_KV of 32. Private memory is BLOCK_ROWS (2 KEY_DIM + 4
   VALUE_DIM) + BLOCK_KV (2 KEY_DIM + 4 VALUE_DIM) bytes and a block's scores: 252 KiB at BLOCK_ROWS
   256, BLOCK_KV 64, HEAD_DIM 128. Latent rows need 2 BLOCK_KV HEAD_DIM bytes less: 548 KiB at
   BLOCK_ROWS 128, BLOCK_KV 64, 512 + 64 dims. */

#define CLA_LANE_ROWS 16
#define CLA_LANE_STEPS 8

#include "attention/cpu/merge.clh"
#include "attention/cpu/row_lanes.clh"
#include "attention/cpu/task.clh"
#include "attention/cpu/tile_operands.clh"
#include "tile/unit.clh"

#if CLA_VEC != 16 || CLA_Q_DTYPE != 2 || CLA_KV_DTYPE < 2 || CLA_VALUE_DIM % 32 != 0 || \
    CLA_KEY_DIM % 32 != 0 || CLA_BLOCK_KV % 32 != 0
#error \
    "attention_tiles: needs vectors of 16, bf16 queries, bf16 or 8-bit caches, 32 n dims and keys"
#endif

#define CLA_BLOCK_VECS 2
#define CLA_ROW_BLOCK (CLA_BLOCK_VECS * CLA_VEC) /* rows computed together */
#define CLA_MAX_ROWS CLA_ROUND_UP(CLA_BLOCK_ROWS, CLA_ROW_BLOCK)
#define CLA_STEP_KEYS 32 /* keys whose probabilities a product sums at once */
#define CLA_KEY_VECS (CLA_KEY_DIM / CLA_TILE_DEPTH) /* vectors of a key in bf16 */

/* The keys of a tile that some row of a block sees, by whole steps, and whether each row sees all
   of them. */
typedef struct ClaBlockSteps {
  int begin, end, masked;
} ClaBlockSteps;

/* Neither the begins of rows nor their ends fall. */
static inline int cla_tiles_first_begin(const ClaRowLanes* block) {
#if CLA_WINDOW
  return ((const int*)&block->begin)[0];
#else
  return 0;
#endif
}
static inline int cla_tiles_last_end(const ClaRowLanes* block) {
  return ((const int*)&block[CLA_BLOCK_VECS - 1].end)[CLA_VEC - 1];
}

static inline ClaBlockSteps cla_tiles_block_steps(const ClaRowLanes* block, int tile_at) {
  const int end = min(CLA_BLOCK_KV, cla_tiles_last_end(block) - tile_at);
  ClaBlockSteps seen;
  seen.end = CLA_ROUND_UP(max(end, 0), CLA_STEP_KEYS);
  seen.begin =
      clamp(cla_tiles_first_begin(block) - tile_at, 0, seen.end) / CLA_STEP_KEYS * CLA_STEP_KEYS;
  seen.masked = 0;
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_VECS; ++i)
    seen.masked |= cla_row_lanes_masked(block + i, tile_at + seen.begin, tile_at + seen.end);
  return seen;
}

/* A tile of keys: rows of K, columns of V, and whether the latter hold an infinity or NaN. */
typedef struct ClaKvTile {
  int at;    /* position */
  int limit; /* no row of the task sees a key from here on */
  int overflows;
#if CLA_ROW_SCALES
  float k_scales[CLA_BLOCK_KV], v_scales[CLA_BLOCK_KV]; /* of keys and values */
#endif
  cla_vu keys[CLA_BLOCK_KV * CLA_KEY_VECS];
  cla_vu values[CLA_BLOCK_KV * CLA_VALUE_DIM / CLA_TILE_DEPTH];
} ClaKvTile;

/* Turns scores of 16 rows, s[BLOCK_KV], into probabilities relative to their largest logits so far,
   which their accumulator follows: pairs of keys in bf16. */
static inline __attribute__((always_inline)) void cla_tiles_probabilities(
    const ClaOptions* opt, ClaRowLanes* rows, const ClaKvTile* tile, const ClaBlockSteps* seen,
    int masked, float unit, cla_vf* s, cla_vu* pairs, cla_vf* o) {
  cla_vf factor;
#if CLA_ROW_SCALES
  cla_row_lanes_scale_keys(s, tile->k_scales, seen->begin, seen->end);
#endif
  if (cla_row_lanes_softmax(rows, opt, unit, tile->at, seen->begin, seen->end, tile->limit, masked,
                            s, &factor))
    for (int d = 0; d < CLA_VALUE_DIM; ++d) o[d] *= factor;
  cla_vf sum = rows->sum;
#pragma unroll 4
  for (int key = seen->begin; key < seen->end; key += 2) {
#if CLA_ROW_SCALES
    const cla_vf p = cla_row_lanes_probabilities(rows, s[key], masked);
    const cla_vf q = cla_row_lanes_probabilities(rows, s[key + 1], masked);
    const cla_vf even = cla_row_lanes_scaled(p, tile->v_scales + key);
    const cla_vf odd = cla_row_lanes_scaled(q, tile->v_scales + key + 1);
    sum += p + q;
#else
    const cla_vf even = cla_row_lanes_probabilities(rows, s[key], masked);
    const cla_vf odd = cla_row_lanes_probabilities(rows, s[key + 1], masked);
    sum += even + odd;
#endif
    pairs[key / 2] = (as_uint16(even) + 0x8000u) >> 16 | ((as_uint16(odd) + 0x8000u) & 0xffff0000u);
  }
  rows->sum = sum;
}

/* o += P V of 16 rows, leaving out what a row does not see. */
static inline void cla_tiles_add_seen(const ClaBlockSteps* seen, const cla_vu* values,
                                      const cla_vu* pairs, cla_vf* o) {
  const ushort* columns = (const ushort*)values;
#pragma unroll 1
  for (int key = seen->begin; key < seen->end; ++key) {
    const cla_vf p = as_float16(key % 2 != 0 ? pairs[key / 2] & 0xffff0000u : pairs[key / 2] << 16);
#pragma unroll 1
    for (int d = 0; d < CLA_VALUE_DIM; ++d) {
      const float v = as_float((uint)columns[d * CLA_BLOCK_KV + key] << 16);
      o[d] = as_int16(p) >= 0 ? fma(p, (cla_vf)(v), o[d]) : o[d];
    }
  }
}

/* A block of rows against one tile; q and o are theirs, `vecs` vectors hold rows. */
static inline void cla_tiles_block(const ClaOptions* opt, ClaRowLanes* block, int vecs,
                                   const ClaKvTile* tile, float unit, const cla_vu* q, cla_vf* o) {
  cla_vf s[CLA_BLOCK_VECS * CLA_BLOCK_KV];
  cla_vu pairs[CLA_BLOCK_VECS * CLA_BLOCK_KV / 2];
  const ClaBlockSteps seen = cla_tiles_block_steps(block, tile->at);
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; key += CLA_STEP_KEYS)
    cla_multiply_block(tile->keys + key * CLA_KEY_VECS, 2 * CLA_KEY_DIM, q, 32 * CLA_KEY_DIM,
                       s + key, 64 * CLA_BLOCK_KV, vecs * CLA_VEC, CLA_KEY_VECS, 0);
#pragma unroll 1
  for (int i = 0; i < vecs; ++i) {
    cla_vf* scores = s + i * CLA_BLOCK_KV;
    cla_vu* own = pairs + i * (CLA_BLOCK_KV / 2);
    cla_vf* acc = o + i * CLA_VALUE_DIM;
    if (seen.masked)
      cla_tiles_probabilities(opt, block + i, tile, &seen, 1, unit, scores, own, acc);
    else
      cla_tiles_probabilities(opt, block + i, tile, &seen, 0, unit, scores, own, acc);
  }
  if (tile->overflows && seen.masked) {
    for (int i = 0; i < vecs; ++i)
      cla_tiles_add_seen(&seen, tile->values, pairs + i * (CLA_BLOCK_KV / 2),
                         o + i * CLA_VALUE_DIM);
    return;
  }
#pragma unroll 1
  for (int d = 0; d < CLA_VALUE_DIM; d += 2 * CLA_TILE_ROWS)
    cla_multiply_block((const ushort*)tile->values + d * CLA_BLOCK_KV + seen.begin,
                       2 * CLA_BLOCK_KV, pairs + seen.begin / 2, 32 * CLA_BLOCK_KV, o + d,
                       64 * CLA_VALUE_DIM, vecs * CLA_VEC, (seen.end - seen.begin) / CLA_TILE_DEPTH,
                       1);
}

/* Rows 16 n ... of the results, o[VALUE_DIM] being theirs transposed. */
static inline void cla_tiles_store(const ClaCpuTask* task, const ClaRowLanes* rows, int n,
                                   const cla_vf* o, const ClaResults* to) {
  cla_vf transposed[CLA_VEC * CLA_NUM_VECS];
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS; ++d) {
    cla_vf a[CLA_VEC];
#pragma unroll
    for (int i = 0; i < CLA_VEC; ++i) a[i] = o[d * CLA_VEC + i];
    cla_tiles_transpose_to(a, (cla_vu*)transposed + d, CLA_NUM_VECS);
  }
  for (int i = 0; i < CLA_VEC && n * CLA_VEC + i < task->num_rows; ++i) {
    cla_cpu_store_row(task, n * CLA_VEC + i, transposed + i * CLA_NUM_VECS,
                      cla_cpu_value_unit(task), cla_row_lanes_state(rows, i), to);
  }
}

/* Where the keys of a tile lie, in elements. */
typedef struct ClaKvStage {
  long rows[CLA_BLOCK_KV];
#if CLA_VALUES_APART
  long values[CLA_BLOCK_KV];
#endif
} ClaKvStage;

#if CLA_VALUES_APART
#define CLA_VALUE_ROWS values /* of values */
#else
#define CLA_VALUE_ROWS rows
#endif

static inline void cla_tiles_fill_stage(const ClaCpuTask* task, int at, int end,
                                        ClaKvStage* stage) {
  cla_cpu_key_rows(task, at, end, stage->rows);
#if CLA_VALUES_APART
  cla_cpu_value_rows(task, at, end, stage->values);
#endif
}

/* Loads a tile and prefetches the next one. */
static inline void cla_tiles_load(__global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                  const ClaKvStage* now, const ClaKvStage* next, ClaKvTile* tile) {
#if defined(CLA_ROPE_DIM)
  cla_tiles_load_rows(k, now->rows, next->rows, CLA_KEY_DIM, tile->keys);
  tile->overflows = cla_tiles_transpose_values(tile->keys, CLA_KEY_VECS, tile->values);
#else
  cla_tiles_load_rows(k, now->rows, next->rows, CLA_KEY_DIM, tile->keys);
  cla_vu values[CLA_BLOCK_KV * CLA_VALUE_DIM / CLA_TILE_DEPTH];
  cla_tiles_load_rows(v, now->CLA_VALUE_ROWS, next->CLA_VALUE_ROWS, CLA_VALUE_DIM, values);
  tile->overflows =
      cla_tiles_transpose_values(values, CLA_VALUE_DIM / CLA_TILE_DEPTH, tile->values);
#endif
}

CLA_KERNEL clattn_attention_tiles(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at; /* attention/cpu/queue.clh */
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;
  cla_open_tiles();

  ClaCpuTask task;
  while (cla_cpu_take_task(&call, meta, counters, &opt, &task)) {
    const int begin = cla_cpu_row_begin(&task, 0);             /* no row sees a key before it, */
    const int end = cla_cpu_row_end(&task, task.num_rows - 1); /* none one from here on */
    const float unit = call.scale_log2e * cla_cpu_key_unit(&task); /* queries stay as they are */

    cla_vu query[CLA_MAX_ROWS * CLA_KEY_VECS];
    cla_vf o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaRowLanes lanes[CLA_MAX_ROWS / CLA_VEC];
    const int padded_rows = CLA_ROUND_UP(task.num_rows, CLA_ROW_BLOCK);
    for (int r = 0; r < padded_rows; r += CLA_VEC)
      cla_row_lanes_begin(&task, r, &lanes[r / CLA_VEC]);
    cla_tiles_pack_queries(&task, padded_rows, q + call.q_offset, call.q_token_stride, query);
    for (int i = 0; i < padded_rows * CLA_NUM_VECS; ++i) o[i] = (cla_vf)(0.0f);

    ClaKvTile tile;
    tile.limit = end;
    ClaKvStage stages[2];
    if (begin < end) cla_tiles_fill_stage(&task, begin, end, stages);
    int first = 0, turn = 0; /* rows before `first` see no key from here on */
    for (int at = begin; at < end; at += CLA_BLOCK_KV, turn ^= 1) {
      cla_tiles_fill_stage(&task, at + CLA_BLOCK_KV, end, stages + (turn ^ 1));
      cla_tiles_load(k_cache + call.k_offset, CLA_VALUES, stages + turn, stages + (turn ^ 1),
                     &tile);
      tile.at = at;
#if CLA_ROW_SCALES
      cla_cpu_row_scales(&task, 0, at, end, tile.k_scales, tile.v_scales);
#endif
      while (cla_tiles_last_end(lanes + first / CLA_VEC) <= at) first += CLA_ROW_BLOCK;
      for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK) {
        ClaRowLanes* block = lanes + r / CLA_VEC;
        if (cla_tiles_first_begin(block) >= at + CLA_BLOCK_KV) break; /* nor do later rows */
        const int vecs = task.num_rows - r > CLA_VEC ? CLA_BLOCK_VECS : 1;
        cla_tiles_block(&opt, block, vecs, &tile, unit, query + r * CLA_KEY_VECS,
                        o + r * CLA_NUM_VECS);
      }
    }

    for (int n = 0; n * CLA_VEC < task.num_rows; ++n)
      cla_tiles_store(&task, lanes + n, n, o + n * CLA_VALUE_DIM, &to);
    cla_cpu_merge_if_last(&task, &to, CLA_ARRIVALS);
  }
  cla_close_tiles();
  cla_queue_leave(counters);
}
