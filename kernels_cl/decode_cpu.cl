// Decode on a CPU: few query rows against a long range of paged keys, limited by memory.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   kv_begin <= p < end of row r
//
// Loop order: tile of BLOCK_KV keys > chunk of 4 rows > scores, softmax, values. All rows of the
// item share one pass over K and V. Scores come as vectors whose lane 4 k + r is key k against row
// r: a chunk's softmax state is one vector. Every cache line of the next tile is asked for while
// this one is computed, because a head's part of a page is too short a run for the hardware's own
// prefetcher.
//
// Macros: lib/vec.clh. Here BLOCK_KV is a multiple of 16.

#include "lib/cpu_rows.clh"

#if CLA_BLOCK_KV % 16 != 0
#error "decode_cpu: CLA_BLOCK_KV must be a multiple of 16"
#endif

#define CLA_CHUNK 4                               // rows computed together
#define CLA_STEP_KEYS (CLA_VEC / CLA_CHUNK)       // keys whose scores fill a vector
#define CLA_STEPS (CLA_BLOCK_KV / CLA_STEP_KEYS)  // vectors of scores in a tile
#define CLA_CHUNKS (CLA_ROUND_UP(CLA_BLOCK_ROWS, CLA_CHUNK) / CLA_CHUNK)
#define CLA_PV_VECS (CLA_VEC == 16 ? 4 : 2)  // vectors of V at a time: CHUNK times as many sums
#define CLA_LINE_ELEMS (64 / CLA_KV_BYTES)   // elements of a cache line

// Lane 4 k + r stands for key k of a step and row r: a value per row in all its lanes, each lane's
// key, and a vector moved by one key.
#if CLA_VEC == 16
#define CLA_REPEAT_ROWS(v) ((v).s0123012301230123)
#define CLA_LANE_KEYS ((cla_vi)(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
#define CLA_ROTATE_KEYS(x) ((x).s456789abcdef0123)
#elif CLA_VEC == 8
#define CLA_REPEAT_ROWS(v) ((v).s01230123)
#define CLA_LANE_KEYS ((cla_vi)(0, 0, 0, 0, 1, 1, 1, 1))
#define CLA_ROTATE_KEYS(x) ((x).s45670123)
#else
#define CLA_REPEAT_ROWS(v) (v)
#define CLA_LANE_KEYS ((cla_vi)(0))
#define CLA_ROTATE_KEYS(x) (x)
#endif

// What a chunk of rows carries from tile to tile; lane 4 k + r belongs to row r.
typedef struct ClaState {
  cla_vf m;      // largest logit so far (base 2), the same in all lanes of a row
  cla_vf l;      // the denominator: the sum over a row's lanes
  cla_vi end;    // position that the row's keys end before
  int full_end;  // the smallest of them: tiles before it need no mask
} ClaState;

// Where the keys at hand and those to fetch lie, in K and in V.
typedef struct ClaTile {
  const long* now;   // [BLOCK_KV] offsets
  const long* next;  // [BLOCK_KV] offsets in the next tile
  int fetch_begin;   // of the next tile's keys, this chunk fetches fetch_begin .. fetch_end
  int fetch_end;
} ClaTile;

CLA_INLINE int cla_fetches(const ClaTile* tile, int key) {
  return key >= tile->fetch_begin && key < tile->fetch_end;
}

CLA_INLINE void cla_init_state(const ClaRows* rows, int first_row, int causal, ClaState* state) {
  int4 end;
  end.x = cla_row_end(rows, first_row, causal);
  end.y = cla_row_end(rows, first_row + 1, causal);
  end.z = cla_row_end(rows, first_row + 2, causal);
  end.w = cla_row_end(rows, first_row + 3, causal);
  state->end = CLA_REPEAT_ROWS(end);
  state->full_end = end.x;  // later rows never see fewer keys
  state->m = (cla_vf)(CLA_NEG_BIG);
  state->l = (cla_vf)(0.0f);
}

// s[step], lane 4 k + r: q row r times key STEP_KEYS * step + k. VEC sums run at once, one for each
// lane of the result.
CLA_INLINE void cla_scores(const cla_vf* q, __global const CLA_KV_T* k, const ClaTile* tile,
                           cla_vf* s) {
#pragma unroll 1
  for (int step = 0; step < CLA_STEPS; ++step) {
    const int fetch = cla_fetches(tile, step * CLA_STEP_KEYS);
    const long* now = tile->now + step * CLA_STEP_KEYS;
    const long* next = tile->next + step * CLA_STEP_KEYS;
    cla_vf sum[CLA_VEC];
#pragma unroll
    for (int i = 0; i < CLA_VEC; ++i) sum[i] = (cla_vf)(0.0f);
#pragma unroll 2
    for (int d = 0; d < CLA_NUM_VECS; ++d) {
      if (fetch && d * CLA_VEC % CLA_LINE_ELEMS == 0) {
#pragma unroll
        for (int j = 0; j < CLA_STEP_KEYS; ++j) CLA_FETCH(k + next[j] + d * CLA_VEC);
      }
#pragma unroll
      for (int j = 0; j < CLA_STEP_KEYS; ++j) {
        const cla_vf key = cla_load_kv(k + now[j] + d * CLA_VEC);
#pragma unroll
        for (int r = 0; r < CLA_CHUNK; ++r)
          sum[j * CLA_CHUNK + r] = fma(q[r * CLA_NUM_VECS + d], key, sum[j * CLA_CHUNK + r]);
      }
    }
    s[step] = cla_transpose_add(sum);
  }
}

// Turns a tile's scores into probabilities relative to the largest logit so far. If that one grew,
// the sums of the chunk (l and o) are brought to the new scale; it seldom does after the first
// tiles.
CLA_INLINE void cla_softmax(ClaState* state, int tile_at, int masked, cla_vf* s, cla_vf* o) {
  const cla_vi left = state->end - tile_at - CLA_LANE_KEYS;  // > STEP_KEYS * step: the key is seen
  cla_vf largest = state->m;
#pragma unroll
  for (int step = 0; step < CLA_STEPS; ++step) {
    if (masked) s[step] = left > step * CLA_STEP_KEYS ? s[step] : (cla_vf)(CLA_NEG_BIG);
    largest = cla_max(largest, s[step]);
  }
#pragma unroll
  for (int i = CLA_STEP_KEYS; i > 1; --i) largest = cla_max(largest, CLA_ROTATE_KEYS(largest));
  if (any(largest > state->m)) {
    const cla_vf factor = cla_exp2(state->m - largest);
    float f[CLA_VEC];
    CLA_CAT(vstore, CLA_VEC)(factor, 0, f);
    state->m = largest;
    state->l *= factor;
#pragma unroll 1
    for (int r = 0; r < CLA_CHUNK; ++r)
      for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] *= f[r];
  }
#pragma unroll
  for (int step = 0; step < CLA_STEPS; ++step) {
    cla_vf p = cla_exp2(s[step] - largest);
    if (masked) p = left > step * CLA_STEP_KEYS ? p : (cla_vf)(0.0f);
    s[step] = p;
    state->l += p;
  }
}

// sum[r][0 .. n) += sum over the tile's keys of p[key][r] * V[key][d .. d + n). skip_zero: a row
// leaves out keys of weight 0, since V may hold inf or NaN where it must not look. n and skip_zero
// are constants at every call.
CLA_INLINE void cla_add_keys(const float* p, __global const CLA_KV_T* v, const ClaTile* tile, int d,
                             int n, int skip_zero, cla_vf* sum) {
#pragma unroll 2
  for (int key = 0; key < CLA_BLOCK_KV; ++key) {
    cla_vf value[CLA_PV_VECS];
    if (cla_fetches(tile, key)) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if ((d + i) * CLA_VEC % CLA_LINE_ELEMS == 0)
          CLA_FETCH(v + tile->next[key] + (d + i) * CLA_VEC);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = cla_load_kv(v + tile->now[key] + (d + i) * CLA_VEC);
#pragma unroll
    for (int r = 0; r < CLA_CHUNK; ++r) {
      const float weight = p[key * CLA_CHUNK + r];
      if (skip_zero && weight == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) sum[r * n + i] = fma((cla_vf)(weight), value[i], sum[r * n + i]);
    }
  }
}

// o[r][d .. d + n) += P V over the tile; masked: some row does not see all of it. n is a constant
// at every call.
CLA_INLINE void cla_values(const float* p, __global const CLA_KV_T* v, const ClaTile* tile,
                           int masked, int d, int n, cla_vf* o) {
  cla_vf sum[CLA_CHUNK * CLA_PV_VECS];
#pragma unroll
  for (int r = 0; r < CLA_CHUNK; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) sum[r * n + i] = o[r * CLA_NUM_VECS + d + i];
  if (masked)
    cla_add_keys(p, v, tile, d, n, 1, sum);
  else
    cla_add_keys(p, v, tile, d, n, 0, sum);
#pragma unroll
  for (int r = 0; r < CLA_CHUNK; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) o[r * CLA_NUM_VECS + d + i] = sum[r * n + i];
}

// One chunk of rows against one tile of keys.
CLA_INLINE void cla_chunk(const cla_vf* q, __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                          const ClaTile* tile, int tile_at, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_STEPS];
  cla_scores(q, k, tile, s);
  const int masked = tile_at + CLA_BLOCK_KV > state->full_end;
  cla_softmax(state, tile_at, masked, s, o);
  const int rest = CLA_NUM_VECS % CLA_PV_VECS;
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS - rest; d += CLA_PV_VECS)
    cla_values((const float*)s, v, tile, masked, d, CLA_PV_VECS, o);
  if (rest != 0) cla_values((const float*)s, v, tile, masked, CLA_NUM_VECS - rest, rest, o);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_decode_cpu(
    __global const int* restrict meta,   // the step's metadata
    int items_at,                        // ints before the items: ClaWorkItem[num_items]
    int num_items,                       // this launch's
    int pages_at,                        // ints before the page lists, see ClaWorkItem::pages_at
    __global const CLA_Q_T* restrict q,  // [tokens, num_heads, HEAD_DIM]
    long q_offset,                       // elements before token 0
    long q_token_stride,                 // elements
    __global const CLA_KV_T* restrict k_cache,  // [pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    long k_offset,                              // elements before page 0
    __global const CLA_KV_T* restrict v_cache,  // as k_cache
    long v_offset,                              // elements before page 0
    long block_stride,                          // elements from page to page
    long token_stride,                          // elements from token to token of a page
    long head_stride,                           // elements from KV head to KV head
    __global CLA_Q_T* restrict out,             // [tokens, num_heads, HEAD_DIM]
    long out_offset,                            // elements before token 0
    long out_token_stride,                      // elements
    __global float* restrict lse,           // [tokens, num_heads] natural log; only if write_lse
    __global float* restrict partial_out,   // [partial rows, num_heads, HEAD_DIM]
    __global float* restrict partial_lse2,  // [partial rows, num_heads] log2
    int num_kv_heads,                       // num_heads / GROUP
    float scale_log2e,                      // softmax scale * log2(e)
    int causal,                             // 1: a token sees no later one
    int write_lse) {                        // 1: lse is wanted
  if (get_group_id(0) >= (size_t)num_items * (size_t)num_kv_heads * CLA_HEAD_CHUNKS) return;
  const ClaRows rows = cla_rows(meta, items_at, num_kv_heads);
  const ClaOutputs to = {out + out_offset, out_token_stride, lse,
                         partial_out,      partial_lse2,     write_lse};
  __global const int* pages = meta + pages_at + rows.item.pages_at;
  const int chunks = (rows.rows + CLA_CHUNK - 1) / CLA_CHUNK;
  const int end = cla_row_end(&rows, rows.rows - 1, causal);  // no row sees a key from here on

  cla_vf query[CLA_CHUNKS][CLA_CHUNK * CLA_NUM_VECS];
  cla_vf o[CLA_CHUNKS][CLA_CHUNK * CLA_NUM_VECS];
  ClaState state[CLA_CHUNKS];
  for (int c = 0; c < chunks; ++c) {
    cla_init_state(&rows, c * CLA_CHUNK, causal, &state[c]);
    for (int r = 0; r < CLA_CHUNK; ++r)
      cla_read_query(&rows, c * CLA_CHUNK + r, q + q_offset, q_token_stride, scale_log2e,
                     query[c] + r * CLA_NUM_VECS);
    for (int d = 0; d < CLA_CHUNK * CLA_NUM_VECS; ++d) o[c][d] = (cla_vf)(0.0f);
  }

  long offsets[2][CLA_BLOCK_KV];
  int now = 0;
  if (rows.item.kv_begin < end)
    cla_kv_rows(&rows, pages, rows.item.kv_begin, CLA_BLOCK_KV, end, block_stride, token_stride,
                head_stride, offsets[now]);
  for (int at = rows.item.kv_begin; at < end; at += CLA_BLOCK_KV, now ^= 1) {
    cla_kv_rows(&rows, pages, at + CLA_BLOCK_KV, CLA_BLOCK_KV, end, block_stride, token_stride,
                head_stride, offsets[now ^ 1]);
    for (int c = 0; c < chunks; ++c) {
      const ClaTile tile = {offsets[now], offsets[now ^ 1], c * CLA_BLOCK_KV / chunks,
                            (c + 1) * CLA_BLOCK_KV / chunks};
      cla_chunk(query[c], k_cache + k_offset, v_cache + v_offset, &tile, at, &state[c], o[c]);
    }
  }

  for (int c = 0; c < chunks; ++c) {
    float m[CLA_VEC], l[CLA_VEC];
    CLA_CAT(vstore, CLA_VEC)(state[c].m, 0, m);
    CLA_CAT(vstore, CLA_VEC)(state[c].l, 0, l);
    for (int r = 0; r < CLA_CHUNK && c * CLA_CHUNK + r < rows.rows; ++r) {
      float sum = 0.0f;
      for (int i = r; i < CLA_VEC; i += CLA_CHUNK) sum += l[i];
      cla_write_row(&rows, c * CLA_CHUNK + r, o[c] + r * CLA_NUM_VECS, m[r], sum, &to);
    }
  }
}
