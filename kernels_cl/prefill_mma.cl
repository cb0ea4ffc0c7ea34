/* Paged attention for many rows per key range on the tensor cores of NVIDIA GPUs: products of
   16-bit elements, sums and softmax in f32. Probabilities are rounded to the queries' type before
   they meet V, as the matrix units want it.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows against tiles of BLOCK_KV
   keys. A warp owns FRAGMENTS x 16 rows and all their dims; rows never leave their warp, so that
   the softmax needs shuffles only.

     for each tile of keys up to the last one that any row sees
       start to copy K and V of the next tile     (in flight during all that follows)
       S = Q K^T
       P = 2^(S - max), O = O * 2^(old max - max) + P V

   A lane holds two rows of each fragment, 2 columns in 8 (lib/mma.clh).

   Bytes and operations of a tile with 128 rows, 64 keys and 128 dims, per work-group: 32 KiB of K
   and V from global memory, 4.2 M multiply-adds, 160 KiB read from local memory by 4 warps of 32
   rows (8 warps of 16 rows would read 288 KiB and be bound by it), 8192 exponentials.

   macro                unit        legal values
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8
   CLA_GROUP            heads       query heads per KV head, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           CLA_Q_DTYPE, or 3 e4m3, 4 e5m2, 5 int8: k_cache, v_cache
   CLA_PAGE_SIZE        tokens      0: no pages
   CLA_BLOCK_ROWS       rows        a multiple of 16 * WG_SIZE / 32
   CLA_BLOCK_KV         keys        a multiple of 16
   CLA_WG_SIZE          work-items  a multiple of 32
   CLA_WINDOW ...       -           what a layer may add: lib/options.clh

   Local memory: (BLOCK_ROWS + 4 * BLOCK_KV) * STRIDE * 16 B, 103 KiB with 128 rows, 64 keys and
   128 dims.
   Launch: num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on
   16-byte boundaries, those of 8-bit types on 8-byte ones. */
#include "lib/mma_tiles.clh"

#define CLA_WARPS (CLA_WG_SIZE / 32)
#define CLA_FRAGMENTS (CLA_BLOCK_ROWS / (16 * CLA_WARPS))
#define CLA_KEY_COLUMNS (CLA_BLOCK_KV / 8) /* of 8 keys */
#define CLA_OWN_KEYS ((CLA_BLOCK_KV + CLA_WG_SIZE - 1) / CLA_WG_SIZE)
#if CLA_BLOCK_ROWS % (16 * CLA_WARPS) != 0 || CLA_WG_SIZE % 32 != 0 || CLA_BLOCK_KV % 16 != 0
#error "prefill_mma.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

/* scores[FRAGMENTS][KEY_COLUMNS][4] = Q K^T for the warp's rows. */
static inline void cla_multiply_qk(float* scores, __local const uint4* q_rows,
                                   __local const uint4* k_tile, uint lane) {
  q_rows += lane % 16 * CLA_STRIDE + lane / 16;
  k_tile += (lane / 16 * 8 + lane % 8) * CLA_STRIDE + lane / 8 % 2;
#pragma unroll
  for (uint i = 0; i < CLA_FRAGMENTS * CLA_KEY_COLUMNS * 4; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint step = 0; step < CLA_QK_STEPS; ++step) {
    uint4 a[CLA_FRAGMENTS];
#pragma unroll
    for (uint m = 0; m < CLA_FRAGMENTS; ++m)
      a[m] = cla_load_tiles(q_rows + 16 * m * CLA_STRIDE + 2 * step);
#pragma unroll
    for (uint n = 0; n < CLA_KEY_COLUMNS; n += 2) {
      const uint4 b = cla_load_tiles(k_tile + 8 * n * CLA_STRIDE + 2 * step);
#pragma unroll
      for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
        cla_mma(scores + (m * CLA_KEY_COLUMNS + n) * 4, a[m], b.xy);
        cla_mma(scores + (m * CLA_KEY_COLUMNS + n + 1) * 4, a[m], b.zw);
      }
    }
  }
}

/* sums[FRAGMENTS][DIM_COLUMNS][4] += P V, P as left in `scores` by the softmax. */
static inline void cla_multiply_pv(float* sums, const float* scores, __local const uint4* v_tile,
                                   uint lane) {
  v_tile += lane % 16 * CLA_STRIDE + lane / 16;
#pragma unroll
  for (uint step = 0; step < CLA_BLOCK_KV / 16; ++step) {
    uint4 a[CLA_FRAGMENTS];
#pragma unroll
    for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
      const float* p = scores + (m * CLA_KEY_COLUMNS + 2 * step) * 4;
      a[m] = (uint4)(cla_mma_pair(p[0], p[1]), cla_mma_pair(p[2], p[3]), cla_mma_pair(p[4], p[5]),
                     cla_mma_pair(p[6], p[7]));
    }
#pragma unroll
    for (uint n = 0; n < CLA_DIM_COLUMNS; n += 2) {
      const uint4 b = cla_load_tiles_transposed(v_tile + 16 * step * CLA_STRIDE + n);
#pragma unroll
      for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
        cla_mma(sums + (m * CLA_DIM_COLUMNS + n) * 4, a[m], b.xy);
        if (n + 1 < CLA_DIM_COLUMNS) cla_mma(sums + (m * CLA_DIM_COLUMNS + n + 1) * 4, a[m], b.zw);
      }
    }
  }
}

/* Two rows of a fragment in a lane: h = 0 is row g, h = 1 row g + 8. */
typedef struct ClaRowState {
  float max; /* of the logits so far, base 2 */
  float sum; /* of the own weights */
} ClaRowState;

/* Turns the products of one fragment into weights, and rescales its sums to the new maxima.
   `masked`: some row does not see some key of the tile. */
static inline void cla_softmax(float* scores, float* sums, ClaRowState* state, const ClaRow* rows,
                               const ClaOptions* opt, float scale, int first_key, int masked) {
#pragma unroll
  for (uint h = 0; h < 2; ++h) {
    float highest = CLA_NEG_BIG;
#pragma unroll
    for (uint i = 0; i < 2 * CLA_KEY_COLUMNS; ++i) {
      const int key = first_key + (int)(8 * (i / 2) + i % 2);
      float* score = scores + i / 2 * 4 + 2 * h + i % 2;
      const int seen = !masked || cla_sees(rows + h, key);
      *score = seen ? cla_logit(opt, rows + h, *score * scale, key) : -INFINITY;
      highest = fmax(highest, *score);
    }
    const float new_max = fmax(state[h].max, cla_row_max(highest));
    const float factor = native_exp2(state[h].max - new_max);
    float sum = 0.0f;
#pragma unroll
    for (uint i = 0; i < 2 * CLA_KEY_COLUMNS; ++i) {
      float* score = scores + i / 2 * 4 + 2 * h + i % 2;
      *score = native_exp2(*score - new_max);
      sum += *score;
    }
    state[h].max = new_max;
    state[h].sum = state[h].sum * factor + sum;
    if (factor != 1.0f) {
#pragma unroll
      for (uint i = 0; i < 2 * CLA_DIM_COLUMNS; ++i) sums[i / 2 * 4 + 2 * h + i % 2] *= factor;
    }
  }
}

/* A matrix product lets an infinite or NaN value touch every row, also those that do not see its
   key. Where that may be, such values are taken out of the tile, and added to the sums of the rows
   that see them. All work-items call it together. */
static inline void cla_extract_overflows(__local uint4* v_tile, __local int* found, float* sums,
                                         const ClaRow* rows, int tile, uint lane) {
  const uint lid = (uint)get_local_id(0);
  __local uint* words = (__local uint*)v_tile;
  int any = 0;
  for (uint i = lid; i < CLA_BLOCK_KV * CLA_DIM_COLUMNS * 4; i += CLA_WG_SIZE)
    any |= cla_pair_overflows(
        words[i / (CLA_DIM_COLUMNS * 4) * (CLA_STRIDE * 4) + i % (CLA_DIM_COLUMNS * 4)]);
  if (any) *found = 1;
  barrier(CLK_LOCAL_MEM_FENCE); /* found written -> read */
  if (!*found) return;          /* the same for all */
  for (int key = 0; key < CLA_BLOCK_KV; ++key) {
    __local const uint* own = words + (uint)key * (CLA_STRIDE * 4) + lane % 4;
#pragma unroll
    for (uint n = 0; n < CLA_DIM_COLUMNS; ++n) {
      const uint pair = own[4 * n];
      if (!cla_pair_overflows(pair)) continue;
      const float2 v = cla_mma_expand(pair);
#pragma unroll
      for (uint r = 0; r < 2 * CLA_FRAGMENTS; ++r) {
        float* sum = sums + (r / 2 * CLA_DIM_COLUMNS + n) * 4 + r % 2 * 2;
        if (cla_sees(rows + r, tile + key)) {
          if (!isfinite(v.x)) sum[0] += v.x;
          if (!isfinite(v.y)) sum[1] += v.y;
        }
      }
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* values read -> overwritten */
  for (uint i = lid; i < CLA_BLOCK_KV * CLA_DIM_COLUMNS * 4; i += CLA_WG_SIZE) {
    __local uint* word =
        words + i / (CLA_DIM_COLUMNS * 4) * (CLA_STRIDE * 4) + i % (CLA_DIM_COLUMNS * 4);
    const float2 v = cla_mma_expand(*word);
    *word &= (isfinite(v.x) ? 0xffffu : 0u) | (isfinite(v.y) ? 0xffff0000u : 0u);
  }
  if (lid == 0) *found = 0;
  barrier(CLK_LOCAL_MEM_FENCE); /* values overwritten -> read */
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_prefill_mma(
    __global const int* restrict meta,         /* items at items_at, page ids at pages_at */
    int items_at,                              /* ints, a multiple of 8 */
    int num_items,                             /* the launch says it too */
    int pages_at,                              /* ints */
    __global const CLA_Q_T* restrict q,        /* [tokens, num_heads, HEAD_DIM] */
    long q_offset,                             /* elements */
    long q_token_stride,                       /* elements */
    __global const CLA_KV_T* restrict k_cache, /* [page, token, kv head, HEAD_DIM] by strides */
    long k_offset,                             /* elements, a multiple of 8 */
    __global const CLA_KV_T* restrict v_cache, /* as k_cache */
    long v_offset,                             /* elements, a multiple of 8 */
    long block_stride,                         /* elements, a multiple of 8 */
    long token_stride,                         /* elements, a multiple of 8 */
    long head_stride,                          /* elements, a multiple of 8 */
    __global CLA_Q_T* restrict out,            /* [tokens, num_heads, HEAD_DIM] */
    long out_offset,                           /* elements */
    long out_token_stride,                     /* elements */
    __global float* restrict lse,              /* [tokens, num_heads], natural log; if write_lse */
    __global float* restrict partial_out,      /* [partial rows, num_heads, HEAD_DIM] */
    __global float* restrict partial_lse2,     /* [partial rows, num_heads], log2 */
    int num_kv_heads,                          /* heads */
    float scale_log2e,                         /* softmax scale * log2(e) */
    int causal,                                /* 0 or 1 */
    int write_lse                              /* 0 or 1 */
        CLA_OPTION_PARAMS) {                   /* lib/options.clh */
  __local uint4 q_tile[CLA_BLOCK_ROWS * CLA_STRIDE] __attribute__((aligned(128)));
  __local uint4 k_tile[2][CLA_BLOCK_KV * CLA_STRIDE] __attribute__((aligned(128)));
  __local uint4 v_tile[2][CLA_BLOCK_KV * CLA_STRIDE] __attribute__((aligned(128)));
  __local long key_at[2][CLA_BLOCK_KV]; /* element of key i's row in the cache, -1: no row sees it;
                                           of the next tile and of the one behind it */
  __local int overflow;

  (void)num_items;
  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lid = (uint)get_local_id(0);
  const uint lane = lid % 32;
  const uint first_row = lid / 32 * (16 * CLA_FRAGMENTS); /* of the warp */
  const ClaTask task = cla_task(meta, items_at, (uint)num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, causal);
  const float scale = cla_query_scale(&opt, &task, scale_log2e);
  __global const int* pages = meta + pages_at + task.item.pages_at;
  const long head_at = (long)task.kv_head * head_stride;

  ClaRow rows[2 * CLA_FRAGMENTS];
  ClaRowState state[2 * CLA_FRAGMENTS];
  float sums[CLA_FRAGMENTS * CLA_DIM_COLUMNS * 4];
#pragma unroll
  for (uint r = 0; r < 2 * CLA_FRAGMENTS; ++r) {
    rows[r] = cla_row(&opt, &task, first_row + r * 8 + lane / 4, causal);
    state[r].max = CLA_NEG_BIG;
    state[r].sum = 0.0f;
  }
#pragma unroll
  for (uint i = 0; i < CLA_FRAGMENTS * CLA_DIM_COLUMNS * 4; ++i) sums[i] = 0.0f;

  if (lid == 0) overflow = 0;
  cla_start_queries(q_tile, &task, q, q_offset, q_token_stride);
  cla_zero_behind(q_tile, CLA_BLOCK_ROWS);
  cla_zero_behind(k_tile[0], 2 * CLA_BLOCK_KV);
  for (uint i = lid; i < 2 * CLA_BLOCK_KV; i += CLA_WG_SIZE)
    key_at[0][i] = cla_key_at(&task.item, pages, keys.end, keys.begin + (int)i, head_at,
                              block_stride, token_stride);
  barrier(CLK_LOCAL_MEM_FENCE); /* key_at written -> read */
  cla_start_copies(k_tile[0], v_tile[0], k_cache + k_offset, v_cache + v_offset, key_at[0]);

  uint turn = 0;
  for (int tile = keys.begin; tile < keys.end; tile += CLA_BLOCK_KV) {
    __local uint4* k_own = k_tile[turn];
    __local uint4* v_own = v_tile[turn];
    cla_await_copies();
    barrier(CLK_LOCAL_MEM_FENCE); /* K, V and the next key_at written -> read; K, V and key_at of
                                     the last tile read -> overwritten */
    turn ^= 1;
    cla_start_copies(k_tile[turn], v_tile[turn], k_cache + k_offset, v_cache + v_offset,
                     key_at[turn]);
    long later_at[CLA_OWN_KEYS]; /* in flight, too */
#pragma unroll
    for (int i = 0; i < CLA_OWN_KEYS; ++i)
      later_at[i] = cla_key_at(&task.item, pages, keys.end,
                               tile + 2 * CLA_BLOCK_KV + (int)lid + i * CLA_WG_SIZE, head_at,
                               block_stride, token_stride);

    float scores[CLA_FRAGMENTS * CLA_KEY_COLUMNS * 4];
    cla_multiply_qk(scores, q_tile + first_row * CLA_STRIDE, k_own, lane);
    const int masked =
        CLA_MASK || tile < common.begin || tile + CLA_BLOCK_KV > common.end; /* for some row */
    const int first_key = tile + (int)(2 * (lane % 4));
#pragma unroll
    for (uint m = 0; m < CLA_FRAGMENTS; ++m) {
      float* own_scores = scores + m * CLA_KEY_COLUMNS * 4;
      float* own_sums = sums + m * CLA_DIM_COLUMNS * 4;
      if (masked) {
        cla_softmax(own_scores, own_sums, state + 2 * m, rows + 2 * m, &opt, scale, first_key, 1);
      } else {
        cla_softmax(own_scores, own_sums, state + 2 * m, rows + 2 * m, &opt, scale, first_key, 0);
      }
    }
    if (masked) cla_extract_overflows(v_own, &overflow, sums, rows, tile, lane);
    cla_multiply_pv(sums, scores, v_own, lane);
#pragma unroll
    for (uint i = 0; i < CLA_OWN_KEYS; ++i) {
      const uint key = lid + i * CLA_WG_SIZE;
      if (key < CLA_BLOCK_KV) key_at[turn ^ 1][key] = later_at[i];
    }
  }
  cla_await_copies();           /* of a tile past the end: zeros */
  barrier(CLK_LOCAL_MEM_FENCE); /* queries copied, even without a key -> overwritten */

  const int partial = task.item.partial_row >= 0;
#pragma unroll
  for (uint r = 0; r < 2 * CLA_FRAGMENTS; ++r) {
    const uint row = first_row + 8 * r + lane / 4;
    const float sum = cla_row_sum(state[r].sum);
    if (cla_row_exists(&task, row)) {
      const ClaRowEnd end = cla_end_row(&opt, &task, row, (uint)num_kv_heads, state[r].max, sum);
      const ulong result_row = cla_result_row(&task, row, (uint)num_kv_heads);
      const float* own_sums = sums + r / 2 * CLA_DIM_COLUMNS * 4 + r % 2 * 2;
      if (partial) {
        cla_store_partial(own_sums, end.factor, partial_out + result_row * CLA_HEAD_DIM, lane);
      } else {
        cla_stage_result(own_sums, end.factor, q_tile + row * CLA_STRIDE, lane);
        cla_store_fp8(&opt, own_sums, end.factor, result_row * CLA_HEAD_DIM, lane);
      }
      if (lane % 4 == 0 && partial) partial_lse2[result_row] = end.lse2;
      if (lane % 4 == 0 && !partial && write_lse) lse[result_row] = cla_natural_lse(end.lse2);
    }
  }
  if (partial) return;          /* the same for all */
  barrier(CLK_LOCAL_MEM_FENCE); /* results staged -> stored */
  cla_store_staged(q_tile, &task, out, out_offset, out_token_stride);
}
