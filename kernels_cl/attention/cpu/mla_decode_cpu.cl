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

#include "attention/cpu/queue.clh"
#include "attention/cpu/row_blocks.clh"

#define CLA_ROW_VECS (CLA_KEY_DIM / CLA_VEC)  // vectors of a cache row

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

// o[r] = o[r] * factor[r] + p[r] * rows of the tile's keys. HEAD_DIM is an even number of vectors
// or, at VEC 16, may leave one: it then takes the vector behind it along, which is rotary or the
// next row's, and drops the sum.
CLA_INLINE void cla_values(const cla_vf* p, const float* factor, const cla_vf* row,
                           const ClaSeen* seen, cla_vf* o) {
#pragma unroll 1
  for (int d = 0; d < CLA_NUM_VECS; d += 2) {
    cla_vf sum[CLA_ROW_BLOCK * 2];
#pragma unroll
    for (int i = 0; i < CLA_ROW_BLOCK * 2; ++i) sum[i] = (cla_vf)(0.0f);
    cla_multiply((const float*)p, CLA_BLOCK_KV, row + d, CLA_ROW_VECS, 0, seen->full_end, 2, 0,
                 sum);
    cla_multiply((const float*)p, CLA_BLOCK_KV, row + d, CLA_ROW_VECS, seen->full_end, seen->end, 2,
                 1, sum);
#pragma unroll
    for (int r = 0; r < CLA_ROW_BLOCK; ++r) {
      cla_vf* to = o + r * CLA_NUM_VECS + d;
      to[0] = fma(to[0], (cla_vf)(factor[r]), sum[r * 2]);
      if (d + 1 < CLA_NUM_VECS) to[1] = fma(to[1], (cla_vf)(factor[r]), sum[r * 2 + 1]);
    }
  }
}

// ROW_BLOCK rows from `first` against one tile.
CLA_INLINE void cla_row_block(const ClaRows* rows, int first, int tile_at, const cla_vf* q,
                              const cla_vf* row, const cla_vf* column, ClaState* state, cla_vf* o) {
  cla_vf s[CLA_ROW_BLOCK * CLA_TILE_VECS];
  float factor[CLA_ROW_BLOCK];
  const ClaSeen seen = cla_seen(state, first, tile_at);
  cla_scores(q, column, 0, seen.end, s);
#pragma unroll 1
  for (int r = 0; r < CLA_ROW_BLOCK; ++r)
    factor[r] = cla_softmax(rows, state, first + r, tile_at, s + r * CLA_TILE_VECS);
  cla_values(s, factor, row, &seen, o);
}

CLA_KERNEL clattn_mla_decode_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaOutputs to = {out + call.out_offset, call.out_token_stride, lse,
                         CLA_PARTIAL_OUT,       CLA_PARTIAL_LSE2,      call.write_lse};
  const uint tasks = CLA_TASKS(call.num_entries, call.num_kv_heads);

  for (uint task = cla_take_task(counters); task < tasks; task = cla_take_task(counters)) {
    const ClaRows rows =
        cla_rows(meta, call.entries_at, task, call.num_kv_heads, call.causal, &opt);
    if (rows.rows == 0) break;  // the padding of a recorded step, as all that follows
    const float scale = call.scale_log2e * cla_key_unit(&rows);
    const int end = cla_row_end(&rows, rows.rows - 1);  // no row sees a key from here on

    cla_vf query[CLA_MAX_ROWS * CLA_ROW_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaState state;
    const int padded_rows = CLA_ROUND_UP(rows.rows, CLA_ROW_BLOCK);
    cla_begin_rows(&rows, &state, padded_rows, query, CLA_ROW_VECS, o, q + call.q_offset,
                   call.q_token_stride, scale);

    cla_vf row[CLA_BLOCK_KV * CLA_ROW_VECS + 1], column[CLA_BLOCK_KV * CLA_ROW_VECS];
    row[CLA_BLOCK_KV * CLA_ROW_VECS] = (cla_vf)(0.0f);  // behind the last row: see cla_values
    long offsets[CLA_BLOCK_KV];
    int first = 0;  // rows before it see no key from here on
    for (int at = rows.item.kv_begin; at < end; at += CLA_BLOCK_KV) {
      cla_kv_rows(&rows, meta + call.pages_at, at, CLA_BLOCK_KV, end,
                  (long)CLA_PAGE_SIZE * CLA_KEY_DIM, CLA_KEY_DIM, 0, offsets);
      cla_read_rows(k_cache, offsets, row);
      cla_turn_rows(row, column);
      while (state.end[first + CLA_ROW_BLOCK - 1] <= at) first += CLA_ROW_BLOCK;
      for (int r = first; r < padded_rows; r += CLA_ROW_BLOCK)
        cla_row_block(&rows, r, at, query + r * CLA_ROW_VECS, row, column, &state,
                      o + r * CLA_NUM_VECS);
    }

    for (int r = 0; r < rows.rows; ++r) cla_finish_row(&rows, &state, r, o + r * CLA_NUM_VECS, &to);
  }
  cla_leave_queue(counters);
}
