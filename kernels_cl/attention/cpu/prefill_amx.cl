// Prefill on a CPU by tiles of bf16 (tile/amx.clh): many query rows against paged keys.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Products are computed transposed, S^T = K Q^T and O^T += V^T P^T, so that a lane of a vector is a
// query row: neither a row's largest logit nor its sum ever crosses lanes, and P^T comes out of the
// softmax as the pairs of keys that the second product wants.
//
// Loop order: tile of BLOCK_KV keys > bring K as bf16 rows and V as transposed ones > block of 32
// query rows > scores, softmax, values. Queries become pairs of dims once for each task.
//
// Probabilities are rounded to bf16 before they meet V, half up. Where a value is infinite or NaN
// and some row of the block does not see all of the tile, its products are those of vectors, which
// leave out what is not seen.
//
// Macros: core/vec.clh, VEC 16; queries bf16, the cache bf16 or of 8 bits; HEAD_DIM a multiple of
// 32, BLOCK_KV of 32. Private memory is 6 BLOCK_ROWS HEAD_DIM + 6 BLOCK_KV HEAD_DIM bytes and a
// block's scores: 252 KiB at BLOCK_ROWS 256, BLOCK_KV 64, HEAD_DIM 128.

#include "attention/cpu/queue.clh"
#include "attention/cpu/rows.clh"
#include "attention/cpu/words.clh"
#include "tile/unit.clh"

#if CLA_VEC != 16 || CLA_Q_DTYPE != 2 || CLA_KV_DTYPE < 2 || CLA_HEAD_DIM % 32 != 0 || \
    CLA_BLOCK_KV % 32 != 0
#error "prefill_amx: needs vectors of 16, bf16 queries, a cache of bf16 or 8 bits, 32 n dims, keys"
#endif

#define CLA_ROW_BLOCK 32  // query rows computed together: two vectors of them
#define CLA_MAX_ROWS CLA_ROUND_UP(CLA_BLOCK_ROWS, CLA_ROW_BLOCK)
#define CLA_ROW_VECS (CLA_MAX_ROWS / CLA_VEC)
#define CLA_STEP_KEYS CLA_TILE_DEPTH

// What rows carry from tile to tile; lane i of vector n is row 16 n + i.
typedef struct ClaState {
  cla_vf base[CLA_ROW_VECS];  // largest logit so far (base 2)
  cla_vf sum[CLA_ROW_VECS];   // of its probabilities
  cla_vi end[CLA_ROW_VECS];   // position that the row's keys end before
#if CLA_WINDOW
  cla_vi begin[CLA_ROW_VECS];  // position that they begin at
#endif
#if CLA_ALIBI
  cla_vi position[CLA_ROW_VECS];  // of the row's query
  cla_vf slope[CLA_ROW_VECS];     // of its head
#endif
} ClaState;

CLA_INLINE void cla_begin_state(const ClaRows* rows, int num_rows, ClaState* state) {
  for (int r = 0; r < num_rows; ++r) {
    ((int*)state->end)[r] = cla_row_end(rows, r);
#if CLA_WINDOW
    ((int*)state->begin)[r] = cla_row_begin(rows, r);
#endif
#if CLA_ALIBI
    ((int*)state->position)[r] = cla_row_position(rows, r);
    ((float*)state->slope)[r] = cla_row_slope(rows, r);
#endif
  }
  for (int i = 0; i < num_rows / CLA_VEC; ++i) {
    state->base[i] = (cla_vf)(CLA_NEG_BIG);
    state->sum[i] = (cla_vf)(0.0f);
  }
}

// Word j of 16 rows becomes row j of to[16], `stride` vectors apart.
CLA_INLINE void cla_turn(cla_vf* rows, cla_vu* to, int stride) {
  cla_transpose(rows);
#pragma unroll
  for (int i = 0; i < CLA_VEC; ++i) to[i * stride] = as_uint16(rows[i]);
}

// pairs[vector of rows][pair of dims]: the queries, rows that do not exist as 0.
CLA_INLINE void cla_pack_queries(const ClaRows* rows, int num_rows, __global const CLA_Q_T* q,
                                 long token_stride, cla_vu* pairs) {
#pragma unroll 1
  for (int first = 0; first < num_rows; first += CLA_VEC)
#pragma unroll 1
    for (int d = 0; d < CLA_HEAD_DIM; d += CLA_TILE_DEPTH) {
      cla_vf a[CLA_VEC];
      for (int i = 0; i < CLA_VEC; ++i) {
        __global const CLA_Q_T* row = cla_query_row(rows, first + i, q, token_stride);
        a[i] = row == 0 ? (cla_vf)(0.0f) : vload16(0, (__global const float*)(row + d));
      }
      cla_turn(a, pairs + (first / CLA_VEC * CLA_HEAD_DIM + d) / 2, 1);
    }
}

CLA_INLINE cla_vus cla_load_bf16(__global const CLA_KV_T* p) {
#if CLA_KV_DTYPE == 2
  return vload16(0, p);
#else
  return cla_to_2(cla_load_kv(p));  // exact: these types have no more digits
#endif
}

// rows[key][HEAD_DIM / 32]: a tile of the cache as bf16.
CLA_INLINE void cla_bring_rows(__global const CLA_KV_T* cache, const long* offsets, cla_vu* rows) {
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; ++key)
#pragma unroll
    for (int d = 0; d < CLA_HEAD_DIM; d += CLA_TILE_DEPTH) {
      __global const CLA_KV_T* from = cache + offsets[key] + d;
      cla_vu* to = rows + (key * CLA_HEAD_DIM + d) / CLA_TILE_DEPTH;
#if CLA_KV_DTYPE == 2
      *to = vload16(0, (__global const uint*)from);
#else
      vstore16(cla_load_bf16(from), 0, (ushort*)to);
      vstore16(cla_load_bf16(from + CLA_VEC), 1, (ushort*)to);
#endif
    }
}

// The same of keys that lie by dim. offsets[BLOCK_KV / 16].
CLA_INLINE void cla_bring_columns(__global const CLA_KV_T* cache, const long* offsets,
                                  long key_dim_stride, cla_vu* rows) {
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; key += CLA_VEC)
#pragma unroll 1
    for (int d = 0; d < CLA_HEAD_DIM; d += CLA_TILE_DEPTH) {
      __global const CLA_KV_T* from = cache + offsets[key / CLA_VEC] + d * key_dim_stride;
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) {
        const cla_vu even = convert_uint16(cla_load_bf16(from + 2L * i * key_dim_stride));
        const cla_vu odd = convert_uint16(cla_load_bf16(from + (2L * i + 1) * key_dim_stride));
        a[i] = as_float16(even | odd << 16);
      }
      cla_turn(a, rows + (key * CLA_HEAD_DIM + d) / CLA_TILE_DEPTH, CLA_HEAD_DIM / CLA_TILE_DEPTH);
    }
}

// columns[dim][BLOCK_KV / 32]: the transpose of rows[key][HEAD_DIM / 32]. Returns whether an
// element is infinite or NaN.
CLA_INLINE int cla_turn_values(const cla_vu* rows, cla_vu* columns) {
  const int width = CLA_HEAD_DIM / CLA_TILE_DEPTH;
  cla_vu overflows = (cla_vu)(0u);
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; key += CLA_TILE_DEPTH)
#pragma unroll 1
    for (int d = 0; d < width; ++d) {
      cla_vf first[CLA_VEC], second[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) {
        const cla_vu a = rows[(key + 2 * i) * width + d], b = rows[(key + 2 * i + 1) * width + d];
        // An exponent of ones carries into the sign's place, that of the lower element as well.
        overflows |= ((a & 0x7f807f80u) + 0x00800080u) | ((b & 0x7f807f80u) + 0x00800080u);
        first[i] = as_float16(cla_first_words(a, b));
        second[i] = as_float16(cla_second_words(a, b));
      }
      cla_transpose(first);
      cla_transpose(second);
      cla_vu* to = columns + (d * CLA_TILE_DEPTH * CLA_BLOCK_KV + key) / CLA_TILE_DEPTH;
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) {
        const int dim = i / 4 * 8 + i % 4;  // unpacking goes by quarters
        to[dim * (CLA_BLOCK_KV / CLA_TILE_DEPTH)] = as_uint16(first[i]);
        to[(dim + 4) * (CLA_BLOCK_KV / CLA_TILE_DEPTH)] = as_uint16(second[i]);
      }
    }
  return cla_any((overflows & 0x80008000u) != 0u);
}

// The keys of a tile that some row of a block sees, by whole steps, and whether each row sees all
// of them.
typedef struct ClaSeen {
  int begin, end, masked;
} ClaSeen;

CLA_INLINE ClaSeen cla_seen(const ClaState* state, int first, int tile_at) {
  const int last = first + CLA_ROW_BLOCK - 1;
  const int* ends = (const int*)state->end;  // neither end ever falls from row to row
  const int end = min(CLA_BLOCK_KV, ends[last] - tile_at);
  ClaSeen seen;
  seen.begin = 0;
  seen.end = CLA_ROUND_UP(max(end, 0), CLA_STEP_KEYS);
  seen.masked = ends[first] - tile_at < seen.end || CLA_MASK;
#if CLA_WINDOW
  const int* begins = (const int*)state->begin;
  seen.begin = clamp(begins[first] - tile_at, 0, seen.end) / CLA_STEP_KEYS * CLA_STEP_KEYS;
  seen.masked |= begins[last] - tile_at > seen.begin;
#endif
  return seen;
}

// Bit i of lane r: what row r's mask says of key i of the step at position `at`.
CLA_INLINE cla_vu cla_read_masks(const ClaRows* rows, const ClaState* state, int first, int at) {
  cla_vu allowed = (cla_vu)(~0u);
#if CLA_MASK
  for (int r = 0; r < CLA_VEC; ++r) {
    __global const uchar* mask = cla_row_mask(rows, first + r) + at;
    const int count = min(CLA_STEP_KEYS, ((const int*)state->end)[first + r] - at);
    uint bits = 0;
    for (int i = 0; i < count; ++i) bits |= (mask[i] != 0 ? 1u : 0u) << i;
    ((uint*)&allowed)[r] = bits;
  }
#endif
  return allowed;
}

// Makes logits of the scores of 16 rows, s[BLOCK_KV], and returns the largest ones so far.
CLA_INLINE cla_vf cla_logits(const ClaRows* rows, const ClaState* state, int first, int tile_at,
                             const ClaSeen* seen, int masked, float unit, cla_vf* s) {
  const int n = first / CLA_VEC;
  cla_vf largest = state->base[n];
#pragma unroll 1
  for (int step = seen->begin; step < seen->end; step += CLA_STEP_KEYS) {
    const cla_vu allowed CLA_MAY_IGNORE = cla_read_masks(rows, state, first, tile_at + step);
#pragma unroll 2
    for (int i = 0; i < CLA_STEP_KEYS; i += 4) {
      cla_vf x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = tile_at + step + i + j;
#if CLA_ALIBI
        x[j] = cla_adjust_scores(rows->opt, s[step + i + j] * unit, state->slope[n],
                                 at - state->position[n]);
#else
        x[j] = cla_adjust_scores(rows->opt, s[step + i + j] * unit, (cla_vf)(0.0f), (cla_vi)(0));
#endif
        if (masked) {
          cla_vi sees = state->end[n] > at;
#if CLA_WINDOW
          sees &= state->begin[n] <= at;
#endif
#if CLA_MASK
          sees &= (allowed >> (uint)(i + j) & 1u) != 0u;
#endif
          x[j] = sees ? x[j] : (cla_vf)(CLA_NEG_BIG);
        }
        s[step + i + j] = x[j];
      }
      largest = cla_max(largest, cla_max(cla_max(x[0], x[1]), cla_max(x[2], x[3])));
    }
  }
  return largest;
}

// Turns logits of 16 rows into probabilities, as pairs of keys in bf16.
CLA_INLINE void cla_weights(ClaState* state, int first, const ClaSeen* seen, int masked,
                            const cla_vf* s, cla_vu* pairs) {
  const cla_vf base = state->base[first / CLA_VEC];
  cla_vf sum = state->sum[first / CLA_VEC];
#pragma unroll 4
  for (int key = seen->begin; key < seen->end; key += 2) {
    cla_vf p[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      p[i] = cla_exp2(s[key + i] - base);
      if (masked) p[i] = s[key + i] == CLA_NEG_BIG ? (cla_vf)(CLA_UNSEEN_PROBABILITY) : p[i];
    }
    sum += p[0] + p[1];
    pairs[key / 2] =
        (as_uint16(p[0]) + 0x8000u) >> 16 | ((as_uint16(p[1]) + 0x8000u) & 0xffff0000u);
  }
  state->sum[first / CLA_VEC] = sum;
}

CLA_INLINE void cla_softmax(const ClaRows* rows, ClaState* state, int first, int tile_at,
                            const ClaSeen* seen, int masked, float unit, cla_vf* s, cla_vu* pairs,
                            cla_vf* o) {
  const int n = first / CLA_VEC;
  const cla_vf largest = cla_logits(rows, state, first, tile_at, seen, masked, unit, s);
  if (cla_any(largest > state->base[n])) {
    const cla_vf factor = cla_exp2(state->base[n] - largest);
    state->base[n] = largest;
    state->sum[n] *= factor;
    for (int d = 0; d < CLA_HEAD_DIM; ++d) o[d] *= factor;
  }
  cla_weights(state, first, seen, masked, s, pairs);
}

// o += P V of 16 rows, leaving out what a row does not see.
CLA_INLINE void cla_add_seen(const ClaSeen* seen, const cla_vu* values, const cla_vu* pairs,
                             cla_vf* o) {
  const ushort* columns = (const ushort*)values;
#pragma unroll 1
  for (int key = seen->begin; key < seen->end; ++key) {
    const cla_vf p = as_float16(key % 2 != 0 ? pairs[key / 2] & 0xffff0000u : pairs[key / 2] << 16);
#pragma unroll 1
    for (int d = 0; d < CLA_HEAD_DIM; ++d) {
      const float v = as_float((uint)columns[d * CLA_BLOCK_KV + key] << 16);
      o[d] = as_int16(p) >= 0 ? fma(p, (cla_vf)(v), o[d]) : o[d];
    }
  }
}

// A tile of keys: rows of K, columns of V, and whether the latter hold an infinity or NaN.
typedef struct ClaTile {
  int at;
  int overflows;
  cla_vu keys[CLA_BLOCK_KV * CLA_HEAD_DIM / CLA_TILE_DEPTH];
  cla_vu values[CLA_BLOCK_KV * CLA_HEAD_DIM / CLA_TILE_DEPTH];
} ClaTile;

// ROW_BLOCK rows from `first` against one tile; q and o are theirs.
CLA_INLINE void cla_row_block(const ClaRows* rows, int first, const ClaTile* tile, float unit,
                              const cla_vu* q, ClaState* state, cla_vf* o) {
  cla_vf s[2 * CLA_BLOCK_KV];
  cla_vu pairs[CLA_BLOCK_KV];
  const ClaSeen seen = cla_seen(state, first, tile->at);
  for (int key = seen.begin; key < seen.end; key += CLA_STEP_KEYS)
    cla_multiply_block(tile->keys + key * (CLA_HEAD_DIM / CLA_TILE_DEPTH), 2 * CLA_HEAD_DIM, q,
                       32 * CLA_HEAD_DIM, s + key, 64 * CLA_BLOCK_KV, CLA_HEAD_DIM / CLA_TILE_DEPTH,
                       0);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    cla_vf* scores = s + i * CLA_BLOCK_KV;
    cla_vu* own = pairs + i * (CLA_BLOCK_KV / 2);
    if (seen.masked)
      cla_softmax(rows, state, first + i * CLA_VEC, tile->at, &seen, 1, unit, scores, own,
                  o + i * CLA_HEAD_DIM);
    else
      cla_softmax(rows, state, first + i * CLA_VEC, tile->at, &seen, 0, unit, scores, own,
                  o + i * CLA_HEAD_DIM);
  }
  if (tile->overflows && seen.masked) {
    for (int i = 0; i < 2; ++i)
      cla_add_seen(&seen, tile->values, pairs + i * (CLA_BLOCK_KV / 2), o + i * CLA_HEAD_DIM);
    return;
  }
#pragma unroll 1
  for (int d = 0; d < CLA_HEAD_DIM; d += 2 * CLA_TILE_ROWS)
    cla_multiply_block((const ushort*)tile->values + d * CLA_BLOCK_KV + seen.begin,
                       2 * CLA_BLOCK_KV, pairs + seen.begin / 2, 32 * CLA_BLOCK_KV, o + d,
                       64 * CLA_HEAD_DIM, (seen.end - seen.begin) / CLA_TILE_DEPTH, 1);
}

// Rows 16 n ... of the results, o[HEAD_DIM] being theirs transposed.
CLA_INLINE void cla_finish_rows(const ClaRows* rows, const ClaState* state, int n, const cla_vf* o,
                                const ClaOutputs* to) {
  cla_vf turned[CLA_VEC * CLA_NUM_VECS];
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS; ++d) {
    cla_vf a[CLA_VEC];
#pragma unroll
    for (int i = 0; i < CLA_VEC; ++i) a[i] = o[d * CLA_VEC + i];
    cla_turn(a, (cla_vu*)turned + d, CLA_NUM_VECS);
  }
  for (int i = 0; i < CLA_VEC && n * CLA_VEC + i < rows->rows; ++i) {
    const ClaRowState end = {((const float*)&state->base[n])[i], ((const float*)&state->sum[n])[i]};
    cla_write_row(rows, n * CLA_VEC + i, turned + i * CLA_NUM_VECS, cla_value_unit(rows), end, to);
  }
}

CLA_KERNEL clattn_prefill_amx(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaOutputs to = {out + call.out_offset, call.out_token_stride, lse,
                         CLA_PARTIAL_OUT,       CLA_PARTIAL_LSE2,      call.write_lse};
  __global const int* pages = meta + call.pages_at;
  const uint tasks = CLA_TASKS(call.num_entries, call.num_kv_heads);
  cla_open_tiles();

  for (uint task = cla_take_task(counters); task < tasks; task = cla_take_task(counters)) {
    const ClaRows rows =
        cla_rows(meta, call.entries_at, task, call.num_kv_heads, call.causal, &opt);
    if (rows.rows == 0) break;  // the padding of a recorded step, as all that follows
    const int end = cla_row_end(&rows, rows.rows - 1);          // no row sees a key from here on
    const float unit = call.scale_log2e * cla_key_unit(&rows);  // of products: queries stay as
                                                                // they are

    cla_vu query[CLA_MAX_ROWS * CLA_HEAD_DIM / CLA_TILE_DEPTH];
    cla_vf o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_state(&rows, padded_rows, &state);
    cla_pack_queries(&rows, padded_rows, q + call.q_offset, call.q_token_stride, query);
    for (int i = 0; i < padded_rows * CLA_NUM_VECS; ++i) o[i] = (cla_vf)(0.0f);

    ClaTile tile;
    cla_vu values[CLA_BLOCK_KV * CLA_HEAD_DIM / CLA_TILE_DEPTH];
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from here on
    for (int at = cla_tiles_begin(&rows, call.key_dim_stride); at < end; at += CLA_BLOCK_KV) {
      if (CLA_MAY_BY_DIM && call.key_dim_stride != 1) {
        cla_key_vectors(&rows, pages, at, CLA_BLOCK_KV / CLA_VEC, end, call.block_stride,
                        call.head_stride, offsets);
        cla_bring_columns(k_cache + call.k_offset, offsets, call.key_dim_stride, tile.keys);
      }
      cla_kv_rows(&rows, pages, at, CLA_BLOCK_KV, end, call.block_stride, call.token_stride,
                  call.head_stride, offsets);
      if (!CLA_MAY_BY_DIM || call.key_dim_stride == 1)
        cla_bring_rows(k_cache + call.k_offset, offsets, tile.keys);
      cla_bring_rows(CLA_VALUES, offsets, values);
      tile.at = at;
      tile.overflows = cla_turn_values(values, tile.values);
      while (((const int*)state.end)[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
      for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK) {
#if CLA_WINDOW
        if (((const int*)state.begin)[r] >= at + CLA_BLOCK_KV) break;  // nor do later rows
#endif
        cla_row_block(&rows, r, &tile, unit, query + r * (CLA_HEAD_DIM / CLA_TILE_DEPTH), &state,
                      o + r * CLA_NUM_VECS);
      }
    }

    for (int n = 0; n * CLA_VEC < rows.rows; ++n)
      cla_finish_rows(&rows, &state, n, o + n * CLA_HEAD_DIM, &to);
  }
  cla_close_tiles();
  cla_leave_queue(counters);
}
