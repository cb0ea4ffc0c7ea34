// Prefill on a CPU: many query rows against paged keys, limited by arithmetic.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Loop order: tile of BLOCK_KV keys > pack K^T and V as f32 > block of ROW_BLOCK rows > scores,
// softmax, values. Packing pays each page lookup, conversion and transpose once for all rows of the
// item. Scores and values are products of ROW_BLOCK rows with two vectors of columns, whose sums
// fill the register file. Row blocks that see no key of a tile skip it; only those of which a row
// does not see all of it are masked.
//
// Macros: lib/vec.clh and lib/options.clh, which says what may be added to the logits. Here
// BLOCK_KV is a multiple of 2 VEC. Private memory is about 2 (BLOCK_ROWS + BLOCK_KV) HEAD_DIM
// floats: 320 KiB at BLOCK_ROWS 256, BLOCK_KV 64, HEAD_DIM 128.

#include "lib/cpu_rows.clh"

#if CLA_BLOCK_KV % (2 * CLA_VEC) != 0
#error "prefill_cpu: CLA_BLOCK_KV must be a multiple of 2 CLA_VEC"
#endif

#define CLA_ROW_BLOCK (CLA_VEC == 16 ? 8 : 4)  // rows computed together: 2 ROW_BLOCK sums
#define CLA_MAX_ROWS CLA_ROUND_UP(CLA_BLOCK_ROWS, 8)
#define CLA_KEY_VECS (CLA_BLOCK_KV / CLA_VEC)  // vectors of a row's scores in a tile

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
#if CLA_WINDOW
  int begin[CLA_MAX_ROWS];  // position that they begin at
#endif
} ClaState;

// The keys of a tile that a block of rows sees: none outside begin .. end, while every row sees all
// of full_begin .. full_end.
typedef struct ClaSeen {
  int begin, full_begin, full_end, end;
} ClaSeen;

CLA_INLINE ClaSeen cla_seen(const ClaState* state, int first, int tile_at) {
  const int last = first + CLA_ROW_BLOCK - 1;
  ClaSeen seen;  // neither end ever falls from row to row
  seen.begin = seen.full_begin = 0;
  seen.end = min(CLA_BLOCK_KV, state->end[last] - tile_at);
#if CLA_WINDOW
  seen.begin = clamp(state->begin[first] - tile_at, 0, seen.end);
  seen.full_begin = clamp(state->begin[last] - tile_at, 0, seen.end);
#endif
#if CLA_MASK
  seen.full_begin = seen.full_end = seen.end;
#else
  seen.full_end = clamp(state->end[first] - tile_at, seen.full_begin, seen.end);
#endif
  return seen;
}

// k_t[pair of key vectors][d][2]: keys of the tile as columns. Transposes VEC keys by VEC dims at a
// time.
CLA_INLINE void cla_pack_keys(__global const CLA_KV_T* cache, const long* offsets, cla_vf* k_t) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_KEY_VECS; ++kv)
#pragma unroll 1
    for (int d = 0; d < CLA_NUM_VECS; ++d) {
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i)
        a[i] = cla_load_kv(cache + offsets[kv * CLA_VEC + i] + d * CLA_VEC);
      cla_transpose(a);
      cla_vf* to = k_t + (kv / 2 * CLA_HEAD_DIM + d * CLA_VEC) * 2 + kv % 2;
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) to[i * 2] = a[i];
    }
}

// v[key][NUM_VECS].
CLA_INLINE void cla_pack_values(__global const CLA_KV_T* cache, const long* offsets, cla_vf* v) {
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; ++key)
#pragma unroll 2
    for (int d = 0; d < CLA_NUM_VECS; ++d)
      v[key * CLA_NUM_VECS + d] = cla_load_kv(cache + offsets[key] + d * CLA_VEC);
}

// sum[r][i] += sum over x in begin .. end of left[r][x] * right[x][i]: ROW_BLOCK rows, n vectors of
// columns. masked: a row leaves out x where left is -0, since right may hold inf or NaN there. n
// and masked are constants at every call.
CLA_INLINE void cla_multiply(const float* left, int left_stride, const cla_vf* right,
                             int right_stride, int begin, int end, int n, int masked, cla_vf* sum) {
#pragma unroll 2
  for (int x = begin; x < end; ++x) {
    cla_vf column[2];
#pragma unroll
    for (int i = 0; i < n; ++i) column[i] = right[x * right_stride + i];
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      const float factor = left[r * left_stride + x];
      if (masked && as_int(factor) < 0) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) sum[r * n + i] = fma((cla_vf)(factor), column[i], sum[r * n + i]);
    }
  }
}

// s[r][KEY_VECS]: the block's rows times the keys begin .. end of the tile; what lies around them
// may be left as it is.
CLA_INLINE void cla_scores(const cla_vf* q, const cla_vf* k_t, int begin, int end, cla_vf* s) {
#pragma unroll 1
  for (int pair = begin / (2 * CLA_VEC); pair * 2 * CLA_VEC < end; ++pair) {
    cla_vf sum[CLA_ROW_BLOCK * 2];
#pragma unroll
    for (int i = 0; i < CLA_ROW_BLOCK * 2; ++i) sum[i] = (cla_vf)(0.0f);
    cla_multiply((const float*)q, CLA_HEAD_DIM, k_t + pair * CLA_HEAD_DIM * 2, 2, 0, CLA_HEAD_DIM,
                 2, 0, sum);
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      s[r * CLA_KEY_VECS + pair * 2] = sum[r * 2];
      s[r * CLA_KEY_VECS + pair * 2 + 1] = sum[r * 2 + 1];
    }
  }
}

// o[r][d .. d + n) = o * factor[r] + p[r] * V over the tile's keys; n is a constant at every call.
CLA_INLINE void cla_values(const cla_vf* p, const float* factor, const cla_vf* v,
                           const ClaSeen* seen, int d, int n, cla_vf* o) {
  cla_vf sum[CLA_ROW_BLOCK * 2];
#pragma unroll
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) sum[r * n + i] = o[r * CLA_NUM_VECS + d + i] * factor[r];
  cla_multiply((const float*)p, CLA_BLOCK_KV, v + d, CLA_NUM_VECS, seen->begin, seen->full_begin, n,
               1, sum);
  cla_multiply((const float*)p, CLA_BLOCK_KV, v + d, CLA_NUM_VECS, seen->full_begin, seen->full_end,
               n, 0, sum);
  cla_multiply((const float*)p, CLA_BLOCK_KV, v + d, CLA_NUM_VECS, seen->full_end, seen->end, n, 1,
               sum);
#pragma unroll
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) o[r * CLA_NUM_VECS + d + i] = sum[r * n + i];
}

CLA_INLINE float cla_max_lane(cla_vf x) {
#if CLA_VEC == 16
  const float8 a = x.lo > x.hi ? x.lo : x.hi;
  const float4 b = a.lo > a.hi ? a.lo : a.hi;
#elif CLA_VEC == 8
  const float4 b = x.lo > x.hi ? x.lo : x.hi;
#else
  const float4 b = x;
#endif
  const float2 c = b.lo > b.hi ? b.lo : b.hi;
  return c.x > c.y ? c.x : c.y;
}

// What a mask says of VEC keys, of which the row sees `left`: beyond them it may have ended.
CLA_INLINE cla_vi cla_read_mask(__global const uchar* mask, int left) {
  if (left >= CLA_VEC) return CLA_CAT(convert_int, CLA_VEC)(CLA_CAT(vload, CLA_VEC)(0, mask)) != 0;
  uchar allowed[CLA_VEC];
  for (int i = 0; i < CLA_VEC; ++i) allowed[i] = i < left ? mask[i] : (uchar)0;
  return CLA_CAT(convert_int, CLA_VEC)(CLA_CAT(vload, CLA_VEC)(0, allowed)) != 0;
}

// Which lanes' keys row r sees, the first one being at position `at`.
CLA_INLINE cla_vi cla_lanes_seen(const ClaRows* rows, const ClaState* state, int r, int at) {
  cla_vi seen = state->end[r] - at > CLA_LANES;
#if CLA_WINDOW
  seen &= state->begin[r] - at <= CLA_LANES;
#endif
#if CLA_MASK
  seen &= cla_read_mask(cla_row_mask(rows, r) + at, state->end[r] - at);
#endif
  return seen;
}

// Whether row r does not see all of a tile.
CLA_INLINE int cla_row_masked(const ClaState* state, int r, int tile_at) {
#if CLA_MASK
  return 1;
#elif CLA_WINDOW
  return state->end[r] - tile_at < CLA_BLOCK_KV || state->begin[r] > tile_at;
#else
  return state->end[r] - tile_at < CLA_BLOCK_KV;
#endif
}

// Turns one row's scores into probabilities relative to its largest logit so far; what was summed
// before counts factor. Keys that the row does not see get the weight -0, whatever their scores.
CLA_INLINE float cla_softmax(const ClaRows* rows, ClaState* state, int r, int tile_at, cla_vf* s) {
  const int masked = cla_row_masked(state, r, tile_at);
  const cla_vf slope = (cla_vf)(cla_row_slope(rows, r));
  const int ahead = tile_at - cla_row_position(rows, r);
  cla_vf largest = (cla_vf)(CLA_NEG_BIG);
#pragma unroll
  for (int i = 0; i < CLA_KEY_VECS; ++i) {
    s[i] = cla_adjust_scores(rows->opt, s[i], slope, ahead + i * CLA_VEC + CLA_LANES);
    if (masked)
      s[i] = cla_lanes_seen(rows, state, r, tile_at + i * CLA_VEC) ? s[i] : (cla_vf)(CLA_NEG_BIG);
    largest = cla_max(largest, s[i]);
  }
  const float before = state->m[r];
  const float here = cla_max_lane(largest);
  const float m = here > before ? here : before;
  const cla_vf factor = cla_exp2((cla_vf)(before - m));
  cla_vf l = state->l[r] * factor;
#pragma unroll
  for (int i = 0; i < CLA_KEY_VECS; ++i) {
    cla_vf p = cla_exp2(s[i] - m);
    if (masked) p = s[i] == CLA_NEG_BIG ? (cla_vf)(-0.0f) : p;
    s[i] = p;
    l += p;
  }
  state->m[r] = m;
  state->l[r] = l;
  return factor.s0;
}

// ROW_BLOCK rows from `first` against one packed tile.
CLA_INLINE void cla_row_block(const ClaRows* rows, int first, int tile_at, const cla_vf* q,
                              const cla_vf* k_t, const cla_vf* v, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_ROW_BLOCK * CLA_KEY_VECS];
  float factor[CLA_ROW_BLOCK];
  const ClaSeen seen = cla_seen(state, first, tile_at);
  cla_scores(q, k_t, seen.begin, seen.end, s);
#pragma unroll 1
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
    factor[r] = cla_softmax(rows, state, first + r, tile_at, s + r * CLA_KEY_VECS);
  const int rest = CLA_NUM_VECS % 2;
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS - rest; d += 2) cla_values(s, factor, v, &seen, d, 2, o);
  if (rest != 0) cla_values(s, factor, v, &seen, CLA_NUM_VECS - 1, 1, o);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_prefill_cpu(
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
    int write_lse                           // 1: lse is wanted
        CLA_OPTION_PARAMS) {                // lib/options.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  if (get_group_id(0) >= (size_t)num_items * (size_t)num_kv_heads * CLA_HEAD_CHUNKS) return;
  const ClaRows rows = cla_rows(meta, items_at, num_kv_heads, causal, &opt);
  const ClaOutputs to = {out + out_offset, out_token_stride, lse,
                         partial_out,      partial_lse2,     write_lse};
  __global const int* pages = meta + pages_at;
  const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on
  const float scale = scale_log2e * cla_key_unit(&rows);

  cla_vf query[CLA_MAX_ROWS * CLA_NUM_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
  ClaState state;
  const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
  for (int r = 0; r < padded_rows; ++r) {
    state.m[r] = CLA_NEG_BIG;
    state.l[r] = (cla_vf)(0.0f);
    state.end[r] = cla_row_end(&rows, r);
#if CLA_WINDOW
    state.begin[r] = cla_row_begin(&rows, r);
#endif
    cla_read_query(&rows, r, q + q_offset, q_token_stride, scale, query + r * CLA_NUM_VECS);
    for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] = (cla_vf)(0.0f);
  }

  cla_vf k_t[CLA_BLOCK_KV * CLA_NUM_VECS], v[CLA_BLOCK_KV * CLA_NUM_VECS];
  long offsets[CLA_BLOCK_KV];
  int first = 0;  // rows before it see no key from here on
  for (int at = cla_row_begin(&rows, 0); at < end; at += CLA_BLOCK_KV) {
    cla_kv_rows(&rows, pages, at, CLA_BLOCK_KV, end, block_stride, token_stride, head_stride,
                offsets);
    cla_pack_keys(k_cache + k_offset, offsets, k_t);
    cla_pack_values(v_cache + v_offset, offsets, v);
    while (state.end[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
    for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK) {
#if CLA_WINDOW
      if (state.begin[r] >= at + CLA_BLOCK_KV) break;  // nor do later rows see a key of the tile
#endif
      cla_row_block(&rows, r, at, query + r * CLA_NUM_VECS, k_t, v, &state, o + r * CLA_NUM_VECS);
    }
  }

  for (int r = 0; r < rows.rows; ++r) {
    float l[CLA_VEC], sum = 0.0f;
    CLA_CAT(vstore, CLA_VEC)(state.l[r], 0, l);
    for (int i = 0; i < CLA_VEC; ++i) sum += l[i];
    cla_write_row(&rows, r, o + r * CLA_NUM_VECS, state.m[r], sum, &to);
  }
}
