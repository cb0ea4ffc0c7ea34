// Latent decode (MLA) on a CPU: many heads against one latent row a key.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], C[p, :]>) C[p, 0 .. HEAD_DIM),
//               kv_begin <= p < end of row r;   C[p, :] has KEY_DIM = HEAD_DIM + ROPE_DIM elements
//
// Loop order: tile of BLOCK_KV keys > read it once, as f32 rows and as columns > block of ROW_BLOCK
// rows (query token, head) > scores, softmax, values. A row does KEY_DIM + HEAD_DIM multiply-adds a
// key: with R rows an item does R (2 - ROPE_DIM / KEY_DIM) of them per element of the cache, read
// once for all of its rows. At 512 + 64 and 16 rows that is 60 operations a byte of a 16-bit cache:
// from a few heads on arithmetic is the limit, as in prefill.
//
// Macros: lib/vec.clh and lib/latent.clh. Here BLOCK_KV is a multiple of 2 VEC. Private memory is
// (BLOCK_ROWS (KEY_DIM + HEAD_DIM) + 2 BLOCK_KV KEY_DIM) floats: 688 KiB at 512 + 64, BLOCK_ROWS
// 128, BLOCK_KV 32. Of it one row block and the tile, 180 KiB, are in use at a time.

#include "lib/cpu_rows.clh"
#include "lib/latent.clh"

#if CLA_BLOCK_KV % (2 * CLA_VEC) != 0
#error "mla_decode_cpu: CLA_BLOCK_KV must be a multiple of 2 CLA_VEC"
#endif

#define CLA_ROW_BLOCK (CLA_VEC == 16 ? 8 : 4)  // rows computed together: 2 ROW_BLOCK sums
#define CLA_MAX_ROWS CLA_ROUND_UP(CLA_BLOCK_ROWS, 8)
#define CLA_TILE_VECS (CLA_BLOCK_KV / CLA_VEC)  // vectors of a row's scores in a tile
#define CLA_ROW_VECS (CLA_KEY_DIM / CLA_VEC)    // vectors of a cache row

#if CLA_VEC == 16
#define CLA_LANES ((cla_vi)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
#elif CLA_VEC == 8
#define CLA_LANES ((cla_vi)(0, 1, 2, 3, 4, 5, 6, 7))
#else
#define CLA_LANES ((cla_vi)(0, 1, 2, 3))
#endif

// What a row carries from tile to tile.
typedef struct ClaState {
  float m[CLA_MAX_ROWS];   // largest logit so far (base 2)
  cla_vf l[CLA_MAX_ROWS];  // the denominator: the sum of the lanes
  int end[CLA_MAX_ROWS];   // position that the row's keys end before
} ClaState;

// Reads row r of the query, times scale, into q[ROW_VECS]; rows that do not exist become 0.
CLA_INLINE void cla_read_latent_query(const ClaRows* rows, int r, __global const CLA_Q_T* query,
                                      long token_stride, float scale, cla_vf* q) {
  const int token = r / CLA_HEADS_PER_ITEM, head = r % CLA_HEADS_PER_ITEM;
  const int exists = r < rows->rows && head < rows->heads;
  __global const CLA_Q_T* row = query + (long)(rows->item.q_row + token) * token_stride +
                                (long)(rows->first_head + head) * CLA_KEY_DIM;
  for (int d = 0; d < CLA_ROW_VECS; ++d)
    q[d] = exists ? cla_load_q(row + d * CLA_VEC) * scale : (cla_vf)(0.0f);
}

// row[key][ROW_VECS]: the tile's cache rows as f32, each element read once.
CLA_INLINE void cla_read_rows(__global const CLA_KV_T* cache, const long* offsets, cla_vf* row) {
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; ++key)
#pragma unroll 4
    for (int d = 0; d < CLA_ROW_VECS; ++d)
      row[key * CLA_ROW_VECS + d] = cla_load_kv(cache + offsets[key] + d * CLA_VEC);
}

// column[pair of key vectors][d][2]: the same keys as columns.
CLA_INLINE void cla_turn_rows(const cla_vf* row, cla_vf* column) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv)
#pragma unroll 1
    for (int d = 0; d < CLA_ROW_VECS; ++d) {
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) a[i] = row[(kv * CLA_VEC + i) * CLA_ROW_VECS + d];
      cla_transpose(a);
      cla_vf* to = column + (kv / 2 * CLA_KEY_DIM + d * CLA_VEC) * 2 + kv % 2;
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) to[i * 2] = a[i];
    }
}

// sum[r][0 .. 2) += sum over x in begin .. end of left[r][x] * right[x][0 .. 2) for ROW_BLOCK rows.
// skip_zero: a row leaves out x where left is 0, since right may hold inf or NaN there; a constant
// at every call.
CLA_INLINE void cla_multiply(const float* left, int left_stride, const cla_vf* right,
                             int right_stride, int begin, int end, int skip_zero, cla_vf* sum) {
#pragma unroll 2
  for (int x = begin; x < end; ++x) {
    const cla_vf a = right[x * right_stride], b = right[x * right_stride + 1];
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      const float factor = left[r * left_stride + x];
      if (skip_zero && factor == 0.0f) continue;
      sum[r * 2] = fma((cla_vf)(factor), a, sum[r * 2]);
      sum[r * 2 + 1] = fma((cla_vf)(factor), b, sum[r * 2 + 1]);
    }
  }
}

CLA_INLINE void cla_zero_sums(cla_vf* sum) {
#pragma unroll
  for (int i = 0; i < CLA_ROW_BLOCK * 2; ++i) sum[i] = (cla_vf)(0.0f);
}

// s[r][TILE_VECS]: the block's rows times the first `keys` keys of the tile.
CLA_INLINE void cla_scores(const cla_vf* q, const cla_vf* column, int keys, cla_vf* s) {
#pragma unroll 1
  for (int pair = 0; pair * 2 * CLA_VEC < keys; ++pair) {
    cla_vf sum[CLA_ROW_BLOCK * 2];
    cla_zero_sums(sum);
    cla_multiply((const float*)q, CLA_KEY_DIM, column + pair * CLA_KEY_DIM * 2, 2, 0, CLA_KEY_DIM,
                 0, sum);
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      s[r * CLA_TILE_VECS + pair * 2] = sum[r * 2];
      s[r * CLA_TILE_VECS + pair * 2 + 1] = sum[r * 2 + 1];
    }
  }
}

// o[r] = o[r] * factor[r] + p[r] * rows of the tile's first `keys` keys, of which every row sees
// the first `full`. HEAD_DIM is an even number of vectors or, at VEC 16, may leave one: it then
// takes the vector behind it along, which is rotary or the next row's, and drops the sum.
CLA_INLINE void cla_values(const cla_vf* p, const float* factor, const cla_vf* row, int full,
                           int keys, cla_vf* o) {
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS; d += 2) {
    cla_vf sum[CLA_ROW_BLOCK * 2];
    cla_zero_sums(sum);
    cla_multiply((const float*)p, CLA_BLOCK_KV, row + d, CLA_ROW_VECS, 0, full, 0, sum);
    cla_multiply((const float*)p, CLA_BLOCK_KV, row + d, CLA_ROW_VECS, full, keys, 1, sum);
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      cla_vf* to = o + r * CLA_NUM_VECS + d;
      to[0] = fma(to[0], (cla_vf)(factor[r]), sum[r * 2]);
      if (d + 1 < CLA_NUM_VECS) to[1] = fma(to[1], (cla_vf)(factor[r]), sum[r * 2 + 1]);
    }
  }
}

CLA_INLINE float cla_max_lane(cla_vf x) {
  float lane[CLA_VEC];
  CLA_CAT(vstore, CLA_VEC)(x, 0, lane);
  float largest = lane[0];
#pragma unroll
  for (int i = 1; i < CLA_VEC; ++i) largest = lane[i] > largest ? lane[i] : largest;
  return largest;
}

// Turns one row's scores into probabilities relative to its largest logit so far; what was summed
// before counts the factor returned. `left`: keys of the tile that the row sees; the others become
// 0, whatever their scores.
CLA_INLINE float cla_softmax(ClaState* state, int r, int left, cla_vf* s) {
  const cla_vi seen = left - CLA_LANES;  // > VEC * i: the lane is seen in vector i
  cla_vf largest = (cla_vf)(CLA_NEG_BIG);
#pragma unroll
  for (int i = 0; i < CLA_TILE_VECS; ++i) {
    s[i] = seen > i * CLA_VEC ? s[i] : (cla_vf)(CLA_NEG_BIG);
    largest = cla_max(largest, s[i]);
  }
  const float before = state->m[r];
  const float here = cla_max_lane(largest);
  const float m = here > before ? here : before;
  const float factor = cla_exp2((cla_vf)(before - m)).s0;
  cla_vf l = state->l[r] * factor;
#pragma unroll
  for (int i = 0; i < CLA_TILE_VECS; ++i) {
    s[i] = seen > i * CLA_VEC ? cla_exp2(s[i] - m) : (cla_vf)(0.0f);
    l += s[i];
  }
  state->m[r] = m;
  state->l[r] = l;
  return factor;
}

// ROW_BLOCK rows from `first` against one tile.
CLA_INLINE void cla_row_block(int first, int tile_at, const cla_vf* q, const cla_vf* row,
                              const cla_vf* column, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_ROW_BLOCK * CLA_TILE_VECS];
  float factor[CLA_ROW_BLOCK];
  // No row of the block sees more keys than its last one, or fewer than its first one.
  const int keys = min(CLA_BLOCK_KV, state->end[first + CLA_ROW_BLOCK - 1] - tile_at);
  const int full = clamp(state->end[first] - tile_at, 0, keys);
  cla_scores(q, column, keys, s);
#pragma unroll 1
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
    factor[r] =
        cla_softmax(state, first + r, state->end[first + r] - tile_at, s + r * CLA_TILE_VECS);
  cla_values(s, factor, row, full, keys, o);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_mla_decode_cpu(
    __global const int* restrict meta,        // the step's metadata
    int items_at,                             // ints before the items: ClaWorkItem[num_items]
    int num_items,                            // this launch's
    int pages_at,                             // ints before the page lists: ClaWorkItem::pages_at
    __global const CLA_Q_T* restrict q,       // [tokens, num_heads, KEY_DIM]
    long q_offset,                            // elements before token 0
    long q_token_stride,                      // elements
    __global const CLA_KV_T* restrict cache,  // [pages, PAGE_SIZE, KEY_DIM]
    __global CLA_Q_T* restrict out,           // [tokens, num_heads, HEAD_DIM]
    long out_offset,                          // elements before token 0
    long out_token_stride,                    // elements
    __global float* restrict lse,             // [tokens, num_heads] natural log; only if write_lse
    __global float* restrict partial_out,     // [partial rows, num_heads, HEAD_DIM]
    __global float* restrict partial_lse2,    // [partial rows, num_heads] log2
    int num_kv_heads,                         // 1
    float scale_log2e,                        // softmax scale * log2(e)
    int causal,                               // 1: a token sees no later one
    int write_lse CLA_OPTION_PARAMS) {        // 1: lse is wanted
  if (get_group_id(0) >= (size_t)num_items * CLA_HEAD_CHUNKS) return;
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaRows rows = cla_rows(meta, items_at, num_kv_heads, causal, &opt);
  const float scale = scale_log2e * cla_key_unit(&rows);
  const ClaOutputs to = {out + out_offset, out_token_stride, lse,
                         partial_out,      partial_lse2,     write_lse};
  const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on

  cla_vf query[CLA_MAX_ROWS * CLA_ROW_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
  ClaState state;
  const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
  for (int r = 0; r < padded_rows; ++r) {
    state.m[r] = CLA_NEG_BIG;
    state.l[r] = (cla_vf)(0.0f);
    state.end[r] = cla_row_end(&rows, r);
    cla_read_latent_query(&rows, r, q + q_offset, q_token_stride, scale, query + r * CLA_ROW_VECS);
    for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] = (cla_vf)(0.0f);
  }

  cla_vf row[CLA_BLOCK_KV * CLA_ROW_VECS + 1], column[CLA_BLOCK_KV * CLA_ROW_VECS];
  row[CLA_BLOCK_KV * CLA_ROW_VECS] = (cla_vf)(0.0f);  // behind the last row: see cla_values
  long offsets[CLA_BLOCK_KV];
  int first = 0;  // rows before it see no key from here on
  for (int at = rows.item.kv_begin; at < end; at += CLA_BLOCK_KV) {
    cla_kv_rows(&rows, meta + pages_at, at, CLA_BLOCK_KV, end, (long)CLA_PAGE_SIZE * CLA_KEY_DIM,
                CLA_KEY_DIM, 0, offsets);
    cla_read_rows(cache, offsets, row);
    cla_turn_rows(row, column);
    while (state.end[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
    for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK)
      cla_row_block(r, at, query + r * CLA_ROW_VECS, row, column, &state, o + r * CLA_NUM_VECS);
  }

  for (int r = 0; r < rows.rows; ++r) {
    float l[CLA_VEC], sum = 0.0f;
    CLA_CAT(vstore, CLA_VEC)(state.l[r], 0, l);
    for (int i = 0; i < CLA_VEC; ++i) sum += l[i];
    cla_write_row(&rows, r, o + r * CLA_NUM_VECS, state.m[r], sum, &to);
  }
}
