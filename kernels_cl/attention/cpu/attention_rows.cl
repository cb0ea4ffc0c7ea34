/* Attention on a CPU in f32 arithmetic: many query rows against paged keys, or the many heads of
   latent decode (MLA) against one latent row a key.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r

   Loop order: tile of BLOCK_KV keys > pack K^T and V as f32 > block of ROW_BLOCK rows > scores,
   softmax, values. Packing pays each page lookup, conversion and transpose once for all rows of the
   item. Latent rows (core/latent.clh) are read once, as V, and turned into K^T.
   attention/cpu/key_lanes.clh says how rows meet keys.

   Arithmetic is the limit. A latent row does KEY_DIM + HEAD_DIM multiply-adds a key: with R rows an
   item does R (2 - ROPE_DIM / KEY_DIM) of them per element of the cache, read once for all of its
   rows. At 512 + 64 and 16 rows that is 60 operations a byte of a 16-bit cache.

   Macros: core/vec.clh and core/options.clh, which says what may be added to the logits. Here
   BLOCK_KV is a multiple of 2 VEC. Private memory is (BLOCK_ROWS (KEY_DIM + HEAD_DIM) + 2 BLOCK_KV
   KEY_DIM) floats: 320 KiB at BLOCK_ROWS 256, BLOCK_KV 64, HEAD_DIM 128; 688 KiB at 512 + 64,
   BLOCK_ROWS 128, BLOCK_KV 32, of which one row block and the tile, 180 KiB, are in use at a time.
 */

#include "attention/cpu/key_lanes.clh"

/* Puts VEC vectors of keys' dims, a[key], to their columns: those of dims d * VEC ... in
   columns[pair of key vectors][dim][2], kv being the number of the keys' vector. */
static inline void cla_rows_put_columns(cla_vf* a, int kv, int d, cla_vf* columns) {
  cla_vf* to = columns + (kv / 2 * CLA_KEY_DIM + d * CLA_VEC) * 2 + kv % 2;
  cla_vec_transpose(a);
#pragma unroll
  for (int i = 0; i < CLA_VEC; ++i) to[i * 2] = a[i];
}

#if defined(CLA_ROPE_DIM)
/* Keys of a tile as columns, from rows[key][KEY_VECS]. */
static inline void cla_rows_turn(const cla_vf* rows, cla_vf* columns) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv)
#pragma unroll 1
    for (int d = 0; d < CLA_KEY_VECS; ++d) {
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i) a[i] = rows[(kv * CLA_VEC + i) * CLA_KEY_VECS + d];
      cla_rows_put_columns(a, kv, d, columns);
    }
}
#else
/* Keys of a tile as columns, from the cache. */
static inline void cla_rows_pack(__global const CLA_KV_T* cache, const long* offsets, cla_vf* k_t) {
#pragma unroll 1
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv)
#pragma unroll 1
    for (int d = 0; d < CLA_KEY_VECS; ++d) {
      cla_vf a[CLA_VEC];
#pragma unroll
      for (int i = 0; i < CLA_VEC; ++i)
        a[i] = cla_load_kv(cache + offsets[kv * CLA_VEC + i] + CLA_KV_ROOM(d * CLA_VEC));
      cla_rows_put_columns(a, kv, d, k_t);
    }
}
#endif

#if CLA_KV_DTYPE == 6
/* Takes the zeros out of scales, and from codes. */
static inline void cla_rows_take_zeros(float* k_scales, float* v_scales, cla_vf* k_t,
                                       cla_vf* values) {
  float zeros[CLA_BLOCK_KV];
  for (int key = 0; key < CLA_BLOCK_KV; ++key) {
    const float zero = cla_zero_of(v_scales[key]);
    for (int d = 0; d < CLA_NUM_VECS; ++d) values[key * CLA_KEY_VECS + d] -= zero;
    zeros[key] = cla_zero_of(k_scales[key]);
    k_scales[key] = cla_scale_alone(k_scales[key]);
    v_scales[key] = cla_scale_alone(v_scales[key]);
  }
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv) {
    cla_vf* columns = k_t + kv / 2 * CLA_KEY_DIM * 2 + kv % 2;
    const cla_vf zero = CLA_CAT(vload, CLA_VEC)((uint)kv, zeros);
    for (int d = 0; d < CLA_KEY_DIM; ++d) columns[d * 2] -= zero;
  }
}
#endif
#if CLA_ROW_SCALES
/* Codes become numbers. */
static inline void cla_rows_scale_tile(const ClaCpuTask* task, int at, int end, cla_vf* k_t,
                                       cla_vf* values) {
  float k_scales[CLA_BLOCK_KV], v_scales[CLA_BLOCK_KV];
  cla_cpu_row_scales(task, 0, at, end, k_scales, v_scales);
#if CLA_KV_DTYPE == 6
  cla_rows_take_zeros(k_scales, v_scales, k_t, values);
#endif
  for (int kv = 0; kv < CLA_TILE_VECS; ++kv) {
    const cla_vf scales = CLA_CAT(vload, CLA_VEC)((uint)kv, k_scales);
    cla_vf* columns = k_t + kv / 2 * CLA_KEY_DIM * 2 + kv % 2;
    for (int d = 0; d < CLA_KEY_DIM; ++d) columns[d * 2] *= scales;
  }
  for (int key = 0; key < CLA_BLOCK_KV; ++key)
    for (int d = 0; d < CLA_NUM_VECS; ++d) values[key * CLA_KEY_VECS + d] *= v_scales[key];
}
#endif

/* The tile at position `at`: keys as columns, values as rows. */
static inline void cla_rows_load_tile(const ClaCpuTask* task, int at, int end,
                                      __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                                      cla_vf* k_t, cla_vf* values) {
  long offsets[CLA_BLOCK_KV];
  cla_cpu_key_rows(task, at, end, offsets);
#if defined(CLA_ROPE_DIM)
  cla_key_lanes_load(k, offsets, CLA_KEY_VECS, values);
  cla_rows_turn(values, k_t);
#else
  cla_rows_pack(k, offsets, k_t);
#if CLA_VALUES_APART
  cla_cpu_value_rows(task, at, end, offsets);
#endif
  cla_key_lanes_load(v, offsets, CLA_NUM_VECS, values);
#if CLA_ROW_SCALES
  cla_rows_scale_tile(task, at, end, k_t, values);
#endif
#endif
}

CLA_KERNEL clattn_attention_rows(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at; /* attention/cpu/queue.clh */
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;

  ClaCpuTask task;
  while (cla_cpu_take_task(&call, meta, counters, &opt, &task)) {
    const int end = cla_cpu_row_end(&task, task.num_rows - 1); /* no row sees a key from here on */
    const float scale = call.scale_log2e * cla_cpu_key_unit(&task);

    cla_vf query[CLA_MAX_ROWS * CLA_KEY_VECS], o[CLA_MAX_ROWS * CLA_NUM_VECS];
    ClaKeyLanes state;
    const int padded_rows = CLA_ROUND_UP(task.num_rows, CLA_ROW_BLOCK);
    cla_key_lanes_begin(&task, &state, padded_rows, query, o, q + call.q_offset,
                        call.q_token_stride, scale);

    cla_vf k_t[CLA_BLOCK_KV * CLA_KEY_VECS], v[CLA_BLOCK_KV * CLA_KEY_VECS];
    int first = 0; /* rows before it see no key from the tile on */
    for (int at = cla_cpu_row_begin(&task, 0); at < end; at += CLA_BLOCK_KV) {
      cla_rows_load_tile(&task, at, end, k_cache + call.k_offset, CLA_VALUES, k_t, v);
      first = cla_key_lanes_tile(&task, first, padded_rows, at, query, k_t, v, &state, o);
    }

    for (int r = 0; r < task.num_rows; ++r)
      cla_key_lanes_store(&task, &state, r, o + r * CLA_NUM_VECS, &to);
  }
  cla_queue_leave(counters);
}
