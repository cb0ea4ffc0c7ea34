// Prefill on a CPU: many query rows against paged keys, limited by arithmetic.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Loop order: tile of BLOCK_KV keys > pack K^T and V as f32 > block of ROW_BLOCK rows > scores,
// softmax, values. Packing pays each page lookup, conversion and transpose once for all rows of the
// item. lib/row_blocks.clh says how rows meet keys.
//
// Macros: lib/vec.clh and lib/options.clh, which says what may be added to the logits. Here
// BLOCK_KV is a multiple of 2 VEC. Private memory is about 2 (BLOCK_ROWS + BLOCK_KV) HEAD_DIM
// floats: 320 KiB at BLOCK_ROWS 256, BLOCK_KV 64, HEAD_DIM 128.

#include "lib/cpu_queue.clh"
#include "lib/row_blocks.clh"

// k_t[pair of key vectors][d][2]: keys of the tile as columns. Transposes VEC keys by VEC dims at a
// time.
CLA_INLINE void cla_pack_rows(__global const CLA_KV_T* cache, const long* offsets, cla_vf* k_t) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv)
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

// The same of keys that lie by dim: as columns already. offsets[TILE_VECS].
CLA_INLINE void cla_pack_columns(__global const CLA_KV_T* cache, const long* offsets,
                                 long key_dim_stride, cla_vf* k_t) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv) {
    __global const CLA_KV_T* from = cache + offsets[kv];
    cla_vf* to = k_t + kv / 2 * CLA_HEAD_DIM * 2 + kv % 2;
#pragma unroll 4
    for (int d = 0; d < CLA_HEAD_DIM; ++d) to[d * 2] = cla_load_kv(from + d * key_dim_stride);
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

// ROW_BLOCK rows from `first` against one packed tile.
CLA_INLINE void cla_row_block(const ClaRows* rows, int first, int tile_at, const cla_vf* q,
                              const cla_vf* k_t, const cla_vf* v, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_ROW_BLOCK * CLA_TILE_VECS];
  float factor[CLA_ROW_BLOCK];
  const ClaSeen seen = cla_seen(state, first, tile_at);
  cla_scores(q, k_t, seen.begin, seen.end, s);
#pragma unroll 1
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
    factor[r] = cla_softmax(rows, state, first + r, tile_at, s + r * CLA_TILE_VECS);
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
    long key_dim_stride,                        // other than 1: K by dim, lib/cpu_rows.clh
    __global CLA_Q_T* restrict out,             // [tokens, num_heads, HEAD_DIM]
    long out_offset,                            // elements before token 0
    long out_token_stride,                      // elements
    __global float* restrict lse,           // [tokens, num_heads] natural log; only if write_lse
    __global float* restrict partial_out,   // [partial rows, num_heads, HEAD_DIM]
    __global float* restrict partial_lse2,  // [partial rows, num_heads] log2
    int num_kv_heads,                       // num_heads / GROUP
    float scale_log2e,                      // softmax scale * log2(e)
    int causal,                             // 1: a token sees no later one
    int write_lse,                          // 1: lse is wanted
    __global int* restrict counters         // lib/cpu_queue.clh
        CLA_OPTION_PARAMS) {                // lib/options.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaOutputs to = {out + out_offset, out_token_stride, lse,
                         partial_out,      partial_lse2,     write_lse};
  __global const int* pages = meta + pages_at;
  const uint tasks = CLA_TASKS(num_items, num_kv_heads);

  for (uint task = cla_take_task(counters); task < tasks; task = cla_take_task(counters)) {
    const ClaRows rows = cla_rows(meta, items_at, task, num_kv_heads, causal, &opt);
    if (rows.rows == 0) break;  // the padding of a recorded step, as all that follows
    const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on
    const float scale = scale_log2e * cla_key_unit(&rows);

    cla_vf query[CLA_MAX_ROWS * CLA_NUM_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    for (int r = 0; r < padded_rows; ++r) {
      cla_begin_row(&rows, &state, r);
      cla_read_query(&rows, r, q + q_offset, q_token_stride, scale, query + r * CLA_NUM_VECS);
      for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] = (cla_vf)(0.0f);
    }

    cla_vf k_t[CLA_BLOCK_KV * CLA_NUM_VECS], v[CLA_BLOCK_KV * CLA_NUM_VECS];
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from here on
    for (int at = cla_tiles_begin(&rows, key_dim_stride); at < end; at += CLA_BLOCK_KV) {
      if (CLA_MAY_BY_DIM && key_dim_stride != 1) {
        cla_key_vectors(&rows, pages, at, CLA_TILE_VECS, end, block_stride, head_stride, offsets);
        cla_pack_columns(k_cache + k_offset, offsets, key_dim_stride, k_t);
      }
      cla_kv_rows(&rows, pages, at, CLA_BLOCK_KV, end, block_stride, token_stride, head_stride,
                  offsets);
      if (!CLA_MAY_BY_DIM || key_dim_stride == 1) cla_pack_rows(k_cache + k_offset, offsets, k_t);
      cla_pack_values(v_cache + v_offset, offsets, v);
      while (state.end[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
      for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK) {
#if CLA_WINDOW
        if (state.begin[r] >= at + CLA_BLOCK_KV) break;  // nor do later rows see a key of the tile
#endif
        cla_row_block(&rows, r, at, query + r * CLA_NUM_VECS, k_t, v, &state, o + r * CLA_NUM_VECS);
      }
    }

    for (int r = 0; r < rows.rows; ++r) cla_finish_row(&rows, &state, r, o + r * CLA_NUM_VECS, &to);
  }
  cla_leave_queue(counters);
}
