// Attention on a CPU by tiles of bf16 (tile/amx.clh or tile/avx512_bf16.clh): query rows against
// paged keys.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Products are computed transposed, S^T = K Q^T and O^T += V^T P^T, so that a lane of a vector is a
// query row (attention/cpu/tile_rows.clh) and P^T comes out of the softmax as the second product
// wants it.
//
// Loop order: tile of BLOCK_KV keys > load K as bf16 rows and V transposed > block of
// ROW_BLOCK query rows > scores, softmax, values. Queries become pairs of dims once for each task.
// Latent rows (MLA) are loaded once, as keys, and transposed into values.
//
// Probabilities are rounded to bf16, half up, before P V. Where a value is infinite or NaN and some
// row of the block does not see all of the tile, P V is computed with vectors, which skip masked
// keys.
//
// Macros: core/vec.clh, VEC 16; queries bf16, the cache bf16 or of 8 bits; HEAD_DIM, VALUE_DIM
// and ROPE_DIM multiples of 32, BLOCK_KV of 32. Private memory is BLOCK_ROWS (2 KEY_DIM + 4
// VALUE_DIM) + BLOCK_KV (2 KEY_DIM + 4 VALUE_DIM) bytes and a block's scores: 252 KiB at BLOCK_ROWS
// 256, BLOCK_KV 64, HEAD_DIM 128. Latent rows need 2 BLOCK_KV HEAD_DIM bytes less: 548 KiB at
// BLOCK_ROWS 128, BLOCK_KV 64, 512 + 64 dims.

#include "attention/cpu/merge.clh"
#include "attention/cpu/tile_operands.clh"
#include "attention/cpu/tile_rows.clh"

#if CLA_VEC != 16 || CLA_Q_DTYPE != 2 || CLA_KV_DTYPE < 2 || CLA_VALUE_DIM % 32 != 0 || \
    CLA_KEY_DIM % 32 != 0 || CLA_BLOCK_KV % 32 != 0
#error \
    "attention_tiles: needs vectors of 16, bf16 queries, bf16 or 8-bit caches, 32 n dims and keys"
#endif

#define CLA_KEY_VECS (CLA_KEY_DIM / CLA_TILE_DEPTH)  // vectors of a key in bf16

// o += P V of 16 rows, leaving out what a row does not see.
CLA_INLINE void cla_add_seen(const ClaSeen* seen, const cla_vu* values, const cla_vu* pairs,
                             cla_vf* o) {
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

// A tile of keys: rows of K, columns of V, and whether the latter hold an infinity or NaN.
typedef struct ClaTile {
  int at;
  int overflows;
  cla_vu keys[CLA_BLOCK_KV * CLA_KEY_VECS];
  cla_vu values[CLA_BLOCK_KV * CLA_VALUE_DIM / CLA_TILE_DEPTH];
} ClaTile;

// ROW_BLOCK rows from `first` against one tile; q and o are theirs.
CLA_INLINE void cla_row_block(const ClaRows* rows, int first, const ClaTile* tile, float unit,
                              const cla_vu* q, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_BLOCK_VECS * CLA_BLOCK_KV];
  cla_vu pairs[CLA_BLOCK_VECS * CLA_BLOCK_KV / 2];
  const ClaSeen seen = cla_seen(state, first, tile->at);
  const int vecs = rows->rows - first > CLA_VEC ? CLA_BLOCK_VECS : 1;  // that hold rows
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; key += CLA_STEP_KEYS)
    cla_multiply_block(tile->keys + key * CLA_KEY_VECS, 2 * CLA_KEY_DIM, q, 32 * CLA_KEY_DIM,
                       s + key, 64 * CLA_BLOCK_KV, vecs * CLA_VEC, CLA_KEY_VECS, 0);
#pragma unroll 1
  for (int i = 0; i < vecs; ++i) {
    cla_vf* scores = s + i * CLA_BLOCK_KV;
    cla_vu* own = pairs + i * (CLA_BLOCK_KV / 2);
    if (seen.masked)
      cla_softmax(rows, state, first + i * CLA_VEC, tile->at, &seen, 1, unit, scores, own,
                  o + i * CLA_VALUE_DIM);
    else
      cla_softmax(rows, state, first + i * CLA_VEC, tile->at, &seen, 0, unit, scores, own,
                  o + i * CLA_VALUE_DIM);
  }
  if (tile->overflows && seen.masked) {
    for (int i = 0; i < vecs; ++i)
      cla_add_seen(&seen, tile->values, pairs + i * (CLA_BLOCK_KV / 2), o + i * CLA_VALUE_DIM);
    return;
  }
#pragma unroll 1
  for (int d = 0; d < CLA_VALUE_DIM; d += 2 * CLA_TILE_ROWS)
    cla_multiply_block((const ushort*)tile->values + d * CLA_BLOCK_KV + seen.begin,
                       2 * CLA_BLOCK_KV, pairs + seen.begin / 2, 32 * CLA_BLOCK_KV, o + d,
                       64 * CLA_VALUE_DIM, vecs * CLA_VEC, (seen.end - seen.begin) / CLA_TILE_DEPTH,
                       1);
}

// Rows 16 n ... of the results, o[VALUE_DIM] being theirs transposed.
CLA_INLINE void cla_finish_rows(const ClaRows* rows, const ClaState* state, int n, const cla_vf* o,
                                const ClaResults* to) {
  cla_vf transposed[CLA_VEC * CLA_NUM_VECS];
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS; ++d) {
    cla_vf a[CLA_VEC];
#pragma unroll
    for (int i = 0; i < CLA_VEC; ++i) a[i] = o[d * CLA_VEC + i];
    cla_transpose_to(a, (cla_vu*)transposed + d, CLA_NUM_VECS);
  }
  for (int i = 0; i < CLA_VEC && n * CLA_VEC + i < rows->rows; ++i) {
    const ClaRowState end = {((const float*)&state->base[n])[i], ((const float*)&state->sum[n])[i]};
    cla_write_row(rows, n * CLA_VEC + i, transposed + i * CLA_NUM_VECS, cla_value_unit(rows), end,
                  to);
  }
}

// Where the keys of a tile lie, in elements.
typedef struct ClaPlaces {
  long rows[CLA_BLOCK_KV];
#if CLA_VALUES_APART
  long values[CLA_BLOCK_KV];
#endif
} ClaPlaces;

#if CLA_VALUES_APART
#define CLA_VALUE_ROWS values /* of values */
#else
#define CLA_VALUE_ROWS rows
#endif

CLA_INLINE void cla_find_keys(const ClaRows* rows, int at, int end, ClaPlaces* places) {
  cla_kv_rows(rows, at, end, places->rows);
#if CLA_VALUES_APART
  cla_value_rows(rows, at, end, places->values);
#endif
}

// Loads a tile and prefetches the next one.
CLA_INLINE void cla_load_kv_tile(__global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                 const ClaPlaces* now, const ClaPlaces* next, ClaTile* tile) {
#if defined(CLA_ROPE_DIM)
  cla_load_tile_rows(k, now->rows, next->rows, CLA_KEY_DIM, tile->keys);
  tile->overflows = cla_transpose_values(tile->keys, CLA_KEY_VECS, tile->values);
#else
  cla_load_tile_rows(k, now->rows, next->rows, CLA_KEY_DIM, tile->keys);
  cla_vu values[CLA_BLOCK_KV * CLA_VALUE_DIM / CLA_TILE_DEPTH];
  cla_load_tile_rows(v, now->CLA_VALUE_ROWS, next->CLA_VALUE_ROWS, CLA_VALUE_DIM, values);
  tile->overflows = cla_transpose_values(values, CLA_VALUE_DIM / CLA_TILE_DEPTH, tile->values);
#endif
}

CLA_KERNEL clattn_attention_tiles(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;
  cla_open_tiles();

  ClaRows rows;
  while (cla_take_rows(&call, meta, counters, &opt, &rows)) {
    const int begin = cla_row_begin(&rows, 0);                  // no row sees a key before it,
    const int end = cla_row_end(&rows, rows.rows - 1);          // none one from here on
    const float unit = call.scale_log2e * cla_key_unit(&rows);  // queries stay as they are

    cla_vu query[CLA_MAX_ROWS * CLA_KEY_VECS];
    cla_vf o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_state(&rows, padded_rows, &state);
    cla_pack_queries(&rows, padded_rows, q + call.q_offset, call.q_token_stride, query);
    for (int i = 0; i < padded_rows * CLA_NUM_VECS; ++i) o[i] = (cla_vf)(0.0f);

    ClaTile tile;
    ClaPlaces places[2];
    if (begin < end) cla_find_keys(&rows, begin, end, places);
    int first = 0, turn = 0;  // rows before `first` see no key from here on
    for (int at = begin; at < end; at += CLA_BLOCK_KV, turn ^= 1) {
      cla_find_keys(&rows, at + CLA_BLOCK_KV, end, places + (turn ^ 1));
      cla_load_kv_tile(k_cache + call.k_offset, CLA_VALUES, places + turn, places + (turn ^ 1),
                       &tile);
      tile.at = at;
      while (((const int*)state.end)[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
      for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK) {
#if CLA_WINDOW
        if (((const int*)state.begin)[r] >= at + CLA_BLOCK_KV) break;  // nor do later rows
#endif
        cla_row_block(&rows, r, &tile, unit, query + r * CLA_KEY_VECS, &state,
                      o + r * CLA_NUM_VECS);
      }
    }

    for (int n = 0; n * CLA_VEC < rows.rows; ++n)
      cla_finish_rows(&rows, &state, n, o + n * CLA_VALUE_DIM, &to);
    cla_merge_if_last(&rows, &to, CLA_ARRIVALS);
  }
  cla_close_tiles();
  cla_leave_queue(counters);
}
