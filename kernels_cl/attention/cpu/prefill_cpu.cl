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

CLA_KERNEL clattn_prefill_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;

  ClaRows rows;
  while (cla_take_rows(&call, meta, counters, &opt, &rows)) {
    const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on
    const float scale = call.scale_log2e * cla_key_unit(&rows);

    cla_vf query[CLA_MAX_ROWS * CLA_NUM_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_rows(&rows, &state, padded_rows, query, o, q + call.q_offset, call.q_token_stride,
                   scale);

    cla_vf k_t[CLA_BLOCK_KV * CLA_NUM_VECS], v[CLA_BLOCK_KV * CLA_NUM_VECS];
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from the tile on
    for (int at = cla_tiles_begin(&rows); at < end; at += CLA_BLOCK_KV) {
      cla_kv_rows(&rows, at, end, offsets);
      if (cla_by_dim(&call)) {
        long vectors[CLA_TILE_VECS];
        cla_key_vectors(&rows, at, end, vectors);
        cla_pack_columns(k_cache + call.k_offset, vectors, call.key_dim_stride, k_t);
      } else {
        cla_pack_rows(k_cache + call.k_offset, offsets, k_t);
      }
      cla_load_rows(CLA_VALUES, offsets, v);
      first = cla_meet_tile(&rows, first, padded_rows, at, query, k_t, v, &state, o);
    }

    for (int r = 0; r < rows.rows; ++r) cla_finish_row(&rows, &state, r, o + r * CLA_NUM_VECS, &to);
  }
  cla_leave_queue(counters);
}
