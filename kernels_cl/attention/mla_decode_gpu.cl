/* Latent decode (MLA) on a GPU: many heads against one latent row a key, in f32 arithmetic.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], c[p, :]>) c[p, 0 ... HEAD_DIM)
                 p: the keys that row r sees; c[p, :] has KEY_DIM = HEAD_DIM + ROPE_DIM elements

   One work-group serves BLOCK_ROWS rows (query token, head) of a work item. 32 lanes form a group
   of ROWS_EACH rows: lane `column` keeps, for each of them, the query and the sums of the quads
   (four dims) column, column + 32, ... in registers, so that neither moves while the keys pass by:

     for each tile of BLOCK_KV keys
       the tile: registers -> local memory, as f32           (read from the cache once)
       the next tile: cache -> registers                     (in flight during all that follows)
       s[row][key] = <q, c> over the own quads               then summed over the 32 lanes
       online softmax, the same in all lanes of a group
       acc[row] += p * c over the own quads of HEAD_DIM      (the same local tile)

   A float4 read from local memory does 4 ROWS_EACH multiply-adds. A row does KEY_DIM + HEAD_DIM
   multiply-adds a key; at 512 + 64 in 16 bits and 32 rows that is 60 operations a byte of cache
   read. Groups of rows that share an item's keys stand next to each other in launch order, so that
   the second one finds them in the last cache.

   Registers at 512 + 64 and ROWS_EACH 4: 80 for q, 64 for acc, 16 for s; half of it at ROWS_EACH 2.
   Local memory at 512 + 64, BLOCK_KV 4: 10 KiB for the tile, 18 KiB for the sums at WG_SIZE 256 and
   ROWS_EACH 4.

   macro                unit        legal values
   CLA_HEAD_DIM         elements    16 ... 512, steps of 16
   CLA_ROPE_DIM         elements    0 ... 64, steps of 8
   CLA_GROUP            heads       query heads, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           0 f32, 1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           0 f32, 1 f16, 2 bf16, 3 fp8_e4m3, 4 fp8_e5m2, 5 int8: cache
   CLA_PAGE_SIZE        tokens      >= 1
   CLA_BLOCK_ROWS       rows        WG_SIZE / 32 times 1, 2 or 4
   CLA_BLOCK_KV         keys        2, 4 or 8, and at most 32 / ROWS_EACH
   CLA_WG_SIZE          work-items  multiples of 32

   Launch: num_items * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. */
#include "core/latent.clh"
#include "core/task.clh"

#define CLA_COLUMNS 32
#define CLA_ROW_GROUPS (CLA_WG_SIZE / CLA_COLUMNS)
#define CLA_ROWS_EACH (CLA_BLOCK_ROWS / CLA_ROW_GROUPS)
#define CLA_SCORES (CLA_ROWS_EACH * CLA_BLOCK_KV)
#define CLA_PARTS (CLA_COLUMNS / CLA_SCORES) /* lanes that share the sum of a score */
#if CLA_WG_SIZE % CLA_COLUMNS != 0 || CLA_BLOCK_ROWS % CLA_ROW_GROUPS != 0 || \
    CLA_SCORES > CLA_COLUMNS || CLA_COLUMNS % CLA_SCORES != 0
#error "mla_decode_gpu.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

#define CLA_KEY_QUADS ((CLA_KEY_DIM / 4 + CLA_COLUMNS - 1) / CLA_COLUMNS) /* of a lane */
#define CLA_VALUE_QUADS ((CLA_HEAD_DIM / 4 + CLA_COLUMNS - 1) / CLA_COLUMNS)
#define CLA_ROW_QUADS                                                             \
  (CLA_KEY_QUADS * CLA_COLUMNS)     /* of a key in the tile: zeros behind KEY_DIM \
                                     */
#define CLA_UNITS (CLA_KEY_DIM / 8) /* loads of eight elements a key */
#define CLA_LOADS                                                                \
  ((CLA_BLOCK_KV * CLA_UNITS + CLA_WG_SIZE - 1) / CLA_WG_SIZE) /* of a work-item \
                                                                */
#define CLA_PARTIAL_STRIDE (CLA_WG_SIZE + 1) /* odd: lanes that read a column meet all banks */

/* Where the loads of a work-item lie. Load i is unit (lid + i * WG_SIZE) % UNITS of key
   (lid + i * WG_SIZE) / UNITS of a tile. */
static inline uint cla_load_key(uint i) {
  return ((uint)get_local_id(0) + i * CLA_WG_SIZE) / CLA_UNITS;
}
static inline uint cla_load_unit(uint i) {
  return ((uint)get_local_id(0) + i * CLA_WG_SIZE) % CLA_UNITS;
}

/* Pages of the own loads in the tile at `first`; keys from `end` on stand for the one before. */
static inline void cla_find_pages(int* page, __global const int* pages, int first, int end) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i)
    page[i] = pages[(uint)min(first + (int)cla_load_key(i), end - 1) / CLA_PAGE_SIZE];
}

/* The own loads of that tile; keys from `end` on are not read and stay 0. */
static inline void cla_load_tile(ClaKvRaw* raw, __global const CLA_KV_T* cache, const int* page,
                                 int first, int end) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i) {
    const uint key = cla_load_key(i);
    const int position = first + (int)key;
    raw[i] = cla_kv_raw_zero();
    if (key < CLA_BLOCK_KV && position < end) {
      const long row = (long)page[i] * CLA_PAGE_SIZE + (long)((uint)position % CLA_PAGE_SIZE);
      raw[i] = cla_kv_raw_load(cache + row * CLA_KEY_DIM + 8 * (long)cla_load_unit(i));
    }
  }
}

/* tile[BLOCK_KV][ROW_QUADS] */
static inline void cla_store_tile(__local float4* tile, const ClaKvRaw* raw) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i) {
    const uint key = cla_load_key(i);
    if (key < CLA_BLOCK_KV) {
      const ClaF8 x = cla_kv_expand(raw[i]);
      __local float4* to = tile + key * CLA_ROW_QUADS + 2 * cla_load_unit(i);
      to[0] = x.lo;
      to[1] = x.hi;
    }
  }
}

/* The own quads of a row of the query, scaled: q[KEY_QUADS], 0 where there is nothing. */
static inline void cla_read_row(float4* q, const ClaTask* task, uint row, uint column,
                                __global const CLA_Q_T* query, long token_stride, float scale) {
  const long token = (long)task->item.q_row + cla_row_token(row);
  __global const CLA_Q_T* from =
      query + token * token_stride + (long)(task->first_head + cla_row_head(row)) * CLA_KEY_DIM;
#pragma unroll
  for (uint i = 0; i < CLA_KEY_QUADS; ++i) {
    const uint quad = column + i * CLA_COLUMNS;
    q[i] = (float4)(0.0f);
    if (cla_row_exists(task, row) && quad < CLA_KEY_DIM / 4) {
      const ClaF8 x = CLA_Q_LOAD8(from + quad / 2 * 8);
      q[i] = (quad % 2 == 0 ? x.lo : x.hi) * scale;
    }
  }
}

/* Replaces each score [ROWS_EACH][BLOCK_KV] by its sum over the 32 lanes. partial: [SCORES]
   [PARTIAL_STRIDE]; sums: [ROW_GROUPS][SCORES][PARTS]. Called again only behind a barrier that
   every lane passes after its reads of the sums. */
static inline void cla_sum_over_columns(float* scores, __local float* partial,
                                        __local float* sums) {
  const uint lid = (uint)get_local_id(0);
  const uint column = lid % CLA_COLUMNS;
  const uint score = column % CLA_SCORES;
  const uint part = column / CLA_SCORES;
  __local float* own_sums = sums + lid / CLA_COLUMNS * CLA_COLUMNS;
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) partial[i * CLA_PARTIAL_STRIDE + lid] = scores[i];
  barrier(CLK_LOCAL_MEM_FENCE); /* partial written -> read */
  __local const float* from =
      partial + score * CLA_PARTIAL_STRIDE + (lid - column) + part * CLA_SCORES;
  float sum = 0.0f;
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) sum += from[i];
  own_sums[score * CLA_PARTS + part] = sum;
  barrier(CLK_LOCAL_MEM_FENCE); /* sums written -> read */
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) {
    scores[i] = 0.0f;
#pragma unroll
    for (uint j = 0; j < CLA_PARTS; ++j) scores[i] += own_sums[i * CLA_PARTS + j];
  }
}

/* What a row carries from tile to tile, beside its sums. */
typedef struct ClaRowState {
  float max; /* largest logit so far, base 2 */
  float sum; /* the denominator */
} ClaRowState;

/* One past the last key that the row sees; never below kv_begin. */
static inline int cla_row_kv_end(const ClaWorkItem* item, uint row, int causal) {
  const int bound = item->q_pos + (int)cla_row_token(row) + 1;
  return max(item->kv_begin, causal ? min(item->kv_end, bound) : item->kv_end);
}

/* Turns a row's logits of a tile into weights relative to its largest logit so far and returns what
   the sums before count. Keys from `end` on are not seen. */
static inline float cla_weigh_tile(ClaRowState* state, float* scores, int first, int end) {
  float new_max = state->max;
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    scores[i] = first + i < end ? scores[i] : CLA_NEG_BIG;
    new_max = fmax(new_max, scores[i]);
  }
  const float factor = cla_weight_exp2(state->max - new_max);
  state->max = new_max;
  state->sum *= factor;
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    const float weight = cla_weight_exp2(scores[i] - new_max);
    scores[i] = first + i < end ? weight : CLA_UNSEEN_WEIGHT;
    state->sum += scores[i];
  }
  return factor;
}

/* acc[ROWS_EACH][VALUE_QUADS] += p * c over the own quads. all_seen: else keys that a row does not
   see are left out, since they may hold inf or NaN; a constant at every call. */
static inline void cla_add_values(float4* acc, const float* p, __local const float4* tile,
                                  uint column, int all_seen) {
#pragma unroll
  for (uint key = 0; key < CLA_BLOCK_KV; ++key) {
#pragma unroll
    for (uint i = 0; i < CLA_VALUE_QUADS; ++i) {
      const float4 value = tile[key * CLA_ROW_QUADS + i * CLA_COLUMNS + column];
#pragma unroll
      for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
        const float weight = p[r * CLA_BLOCK_KV + key];
        float4* to = acc + r * CLA_VALUE_QUADS + i;
        if (all_seen || cla_is_seen(weight)) *to = mad((float4)(weight), value, *to);
      }
    }
  }
}

/* scores[ROWS_EACH][BLOCK_KV] = <q, k> over the own columns. */
static inline void cla_score_tile(float* scores, const float4* query, __local const float4* tile,
                                  uint column) {
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint key = 0; key < CLA_BLOCK_KV; ++key) {
#pragma unroll
    for (uint i = 0; i < CLA_KEY_QUADS; ++i) {
      const float4 k = tile[key * CLA_ROW_QUADS + i * CLA_COLUMNS + column];
#pragma unroll
      for (uint r = 0; r < CLA_ROWS_EACH; ++r)
        scores[r * CLA_BLOCK_KV + key] =
            cla_dot4(query[r * CLA_KEY_QUADS + i], k, scores[r * CLA_BLOCK_KV + key]);
    }
  }
}

CLA_KERNEL clattn_mla_decode_gpu(CLA_PARAMS) {
  __local float4 tile[CLA_BLOCK_KV * CLA_ROW_QUADS];
  __local float partial[CLA_SCORES * CLA_PARTIAL_STRIDE];
  __local float sums[CLA_WG_SIZE];

  const ClaOptions opt = CLA_OPTION_VALUES;
  const float unit = cla_latent_scale(&opt) * CLA_KV_UNIT;
  const uint lid = (uint)get_local_id(0);
  const uint column = lid % CLA_COLUMNS;
  const uint first_row = lid / CLA_COLUMNS * CLA_ROWS_EACH;
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const int begin = task.item.kv_begin;
  const int end =
      call.causal ? min(task.item.kv_end, task.item.q_pos + task.item.q_count) : task.item.kv_end;
  __global const int* pages = meta + call.pages_at + task.item.pages_at;

  for (uint i = lid; i < CLA_BLOCK_KV * CLA_ROW_QUADS; i += CLA_WG_SIZE) tile[i] = (float4)(0.0f);
  float4 query[CLA_ROWS_EACH * CLA_KEY_QUADS];
  float4 acc[CLA_ROWS_EACH * CLA_VALUE_QUADS];
  ClaRowState state[CLA_ROWS_EACH];
#pragma unroll
  for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
    cla_read_row(query + r * CLA_KEY_QUADS, &task, first_row + r, column, q + call.q_offset,
                 call.q_token_stride, call.scale_log2e * unit);
    state[r].max = CLA_NEG_BIG;
    state[r].sum = 0.0f;
  }
#pragma unroll
  for (uint i = 0; i < CLA_ROWS_EACH * CLA_VALUE_QUADS; ++i) acc[i] = (float4)(0.0f);

  int page[CLA_LOADS]; /* of the tile behind the one in raw */
  ClaKvRaw raw[CLA_LOADS];
  if (begin < end) {
    cla_find_pages(page, pages, begin, end);
    cla_load_tile(raw, k_cache, page, begin, end);
    cla_find_pages(page, pages, begin + CLA_BLOCK_KV, end);
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* tile's zeros written -> overwritten */

  for (int first = begin; first < end; first += CLA_BLOCK_KV) {
    cla_store_tile(tile, raw);
    barrier(CLK_LOCAL_MEM_FENCE); /* tile written -> read */
    cla_load_tile(raw, k_cache, page, first + CLA_BLOCK_KV, end);
    cla_find_pages(page, pages, first + 2 * CLA_BLOCK_KV, end);

    float scores[CLA_SCORES]; /* [ROWS_EACH][BLOCK_KV] */
    cla_score_tile(scores, query, tile, column);
    cla_sum_over_columns(scores, partial, sums);
#pragma unroll
    for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
      const float factor = cla_weigh_tile(&state[r], scores + r * CLA_BLOCK_KV, first,
                                          cla_row_kv_end(&task.item, first_row + r, call.causal));
#pragma unroll
      for (uint i = 0; i < CLA_VALUE_QUADS; ++i) acc[r * CLA_VALUE_QUADS + i] *= factor;
    }
    /* Row 0 sees fewest keys: where it sees the whole tile, so do the others. */
    if (first + CLA_BLOCK_KV <= cla_row_kv_end(&task.item, 0, call.causal)) {
      cla_add_values(acc, scores, tile, column, 1);
    } else {
      cla_add_values(acc, scores, tile, column, 0);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* tile and sums read -> overwritten */
  }

#pragma unroll
  for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
    const uint row = first_row + r;
    if (cla_row_exists(&task, row)) {
      const float inverse = cla_inverse_sum(state[r].sum) * unit;
      const float lse2 = cla_lse2(state[r].max, state[r].sum);
      const ulong result_row = cla_result_row(&task, row, (uint)call.num_kv_heads);
      const long out_at = cla_query_at(&task, row, call.out_offset, call.out_token_stride);
      const int is_partial = task.item.partial_row >= 0;
#pragma unroll
      for (uint i = 0; i < CLA_VALUE_QUADS; ++i) {
        const uint dim = 4 * (column + i * CLA_COLUMNS);
        const float4 result = acc[r * CLA_VALUE_QUADS + i] * inverse;
        if (dim < CLA_HEAD_DIM && is_partial)
          cla_store4_f32(result, CLA_PARTIAL_OUT + result_row * CLA_HEAD_DIM + dim);
        if (dim < CLA_HEAD_DIM && !is_partial) CLA_Q_STORE4(result, out + out_at + dim);
      }
      if (column == 0 && is_partial) CLA_PARTIAL_LSE2[result_row] = lse2;
      if (column == 0 && !is_partial && call.write_lse) lse[result_row] = cla_natural_lse(lse2);
    }
  }
}
