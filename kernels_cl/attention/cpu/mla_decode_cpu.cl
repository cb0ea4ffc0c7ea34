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
// Macros: core/vec.clh and core/latent.clh. Here BLOCK_KV is a multiple of 2 VEC. Private memory is
// (BLOCK_ROWS (KEY_DIM + HEAD_DIM) + 2 BLOCK_KV KEY_DIM) floats: 688 KiB at 512 + 64, BLOCK_ROWS
// 128, BLOCK_KV 32. Of it one row block and the tile, 180 KiB, are in use at a time.

#include "attention/cpu/row_blocks.clh"

// column[pair of key vectors][d][2]: a tile's keys, row[key][KEY_VECS], as columns.
CLA_INLINE void cla_turn_rows(const cla_vf* row, cla_vf* column) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv)
#pragma unroll 1
    for (int d = 0; d < CLA_KEY_VECS; ++d) {
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) a[i] = row[(kv * CLA_VEC + i) * CLA_KEY_VECS + d];
      cla_transpose(a);
      cla_vf* to = column + (kv / 2 * CLA_KEY_DIM + d * CLA_VEC) * 2 + kv % 2;
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) to[i * 2] = a[i];
    }
}

CLA_KERNEL clattn_mla_decode_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;

  ClaRows rows;
  while (cla_take_rows(&call, meta, counters, &opt, &rows)) {
    const float scale = call.scale_log2e * cla_key_unit(&rows);
    const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on

    cla_vf query[CLA_MAX_ROWS * CLA_KEY_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_rows(&rows, &state, padded_rows, query, o, q + call.q_offset, call.q_token_stride,
                   scale);

    cla_vf row[CLA_BLOCK_KV * CLA_KEY_VECS], column[CLA_BLOCK_KV * CLA_KEY_VECS];
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from the tile on
    for (int at = rows.item.kv_begin; at < end; at += CLA_BLOCK_KV) {
      cla_kv_rows(&rows, at, end, offsets);
      cla_load_rows(k_cache, offsets, row);
      cla_turn_rows(row, column);
      first = cla_meet_tile(&rows, first, padded_rows, at, query, column, row, &state, o);
    }

    for (int r = 0; r < rows.rows; ++r) cla_finish_row(&rows, &state, r, o + r * CLA_NUM_VECS, &to);
  }
  cla_leave_queue(counters);
}
