// Prefill on a CPU: many query rows against paged keys, limited by arithmetic.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Loop order: tile of BLOCK_KV keys > pack K^T and V as f32 > block of ROW_BLOCK rows > scores,
// softmax, values. Packing pays each page lookup, conversion and transpose once for all rows of the
// item. attention/cpu/row_blocks.clh says how rows meet keys.
//
// Macros: core/vec.clh and core/options.clh, which says what may be added to the logits. Here
// BLOCK_KV is a multiple of 2 VEC. Private memory is about 2 (BLOCK_ROWS + BLOCK_KV) HEAD_DIM
// floats: 320 KiB at BLOCK_ROWS 256, BLOCK_KV 64, HEAD_DIM 128.

#include "attention/cpu/queue.clh"
#include "attention/cpu/row_blocks.clh"

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

CLA_KERNEL clattn_prefill_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaOutputs to = {out + call.out_offset, call.out_token_stride, lse,
                         CLA_PARTIAL_OUT,       CLA_PARTIAL_LSE2,      call.write_lse};
  __global const int* pages = meta + call.pages_at;
  const uint tasks = CLA_TASKS(call.num_entries, call.num_kv_heads);

  for (uint task = cla_take_task(counters); task < tasks; task = cla_take_task(counters)) {
    const ClaRows rows =
        cla_rows(meta, call.entries_at, task, call.num_kv_heads, call.causal, &opt);
    if (rows.rows == 0) break;  // the padding of a recorded step, as all that follows
    const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on
    const float scale = call.scale_log2e * cla_key_unit(&rows);

    cla_vf query[CLA_MAX_ROWS * CLA_NUM_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_rows(&rows, &state, padded_rows, query, CLA_NUM_VECS, o, q + call.q_offset,
                   call.q_token_stride, scale);

    cla_vf k_t[CLA_BLOCK_KV * CLA_NUM_VECS], v[CLA_BLOCK_KV * CLA_NUM_VECS];
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from here on
    for (int at = cla_tiles_begin(&rows, call.key_dim_stride); at < end; at += CLA_BLOCK_KV) {
      if (CLA_MAY_BY_DIM && call.key_dim_stride != 1) {
        cla_key_vectors(&rows, pages, at, CLA_TILE_VECS, end, call.block_stride, call.head_stride,
                        offsets);
        cla_pack_columns(k_cache + call.k_offset, offsets, call.key_dim_stride, k_t);
      }
      cla_kv_rows(&rows, pages, at, CLA_BLOCK_KV, end, call.block_stride, call.token_stride,
                  call.head_stride, offsets);
      if (!CLA_MAY_BY_DIM || call.key_dim_stride == 1)
        cla_pack_rows(k_cache + call.k_offset, offsets, k_t);
      cla_pack_values(CLA_VALUES, offsets, v);
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
