/* Latent decode (MLA) on a GPU: many heads against one latent row a key, in f32 arithmetic.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], c[p, :]>) c[p, 0 ... HEAD_DIM)
                 p: the keys that row r sees; c[p, :] has KEY_DIM = HEAD_DIM + ROPE_DIM elements

   One work-group serves BLOCK_ROWS rows (query token, head) of a work item. A team of 32 lanes owns
   ROWS_EACH rows: member m keeps, for each of them, the query and the accumulator of the quads
   (four dims) m, m + 32, ... in registers, so that neither moves while the keys pass by:

     for each tile of BLOCK_KV keys
       the tile: registers -> local memory, as f32           (read from the cache once)
       the next tile: cache -> registers                     (in flight during all that follows)
       s[row][key] = <q, c> over the lane's quads            then summed over the 32 lanes
       online softmax, the same in all lanes of a team
       acc[row] += p * c over the lane's quads of HEAD_DIM   (the same local tile)

   A float4 read from local memory does 4 ROWS_EACH multiply-adds. A row does KEY_DIM + HEAD_DIM
   multiply-adds a key; at 512 + 64 in 16 bits and 16 rows that is 30 operations a byte of cache
   read. Groups of rows that share an item's keys stand next to each other in launch order, so that
   the second one finds them in the last cache.

   Registers at 512 + 64 and ROWS_EACH 4: 80 for q, 64 for acc, 16 for s; half of it at ROWS_EACH 2.
   Local memory at 512 + 64, BLOCK_KV 4: 10 KiB for the tile, 9 KiB for the sums at WG_SIZE 128 and
   ROWS_EACH 4.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    16 ... 512, steps of 16
   CLA_ROPE_DIM         elements    0 ... 64, steps of 8
   CLA_PAGE_SIZE        tokens      >= 1
   CLA_BLOCK_ROWS       rows        WG_SIZE / 32 times 1, 2 or 4
   CLA_BLOCK_KV         keys        2, 4 or 8
   CLA_WG_SIZE          work-items  multiples of 32 */
#define CLA_TEAM 32
#define CLA_TEAM_KEYS 0
#define CLA_ROWS_EACH (CLA_BLOCK_ROWS * CLA_TEAM / CLA_WG_SIZE)
#define CLA_LANE_ROWS CLA_ROWS_EACH
#define CLA_ROW_SCORES CLA_BLOCK_KV
#define CLA_KEY_QUADS ((CLA_KEY_DIM / 4 + CLA_TEAM - 1) / CLA_TEAM) /* of a lane */
#define CLA_ACC_QUADS ((CLA_HEAD_DIM / 4 + CLA_TEAM - 1) / CLA_TEAM)

#include "core/latent.clh"
#include "tile/scalar.clh"

#include "attention/results.clh"
#include "attention/softmax.clh"

#if CLA_WG_SIZE % CLA_TEAM != 0 || CLA_ROWS_EACH * CLA_TEAMS != CLA_BLOCK_ROWS || \
    CLA_TEAM % CLA_SCORES != 0
#error "mla_decode_gpu.cl: CLA_BLOCK_ROWS, CLA_BLOCK_KV and CLA_WG_SIZE do not tile"
#endif

#define CLA_ROW_QUADS (CLA_KEY_QUADS * CLA_TEAM) /* of a key in the tile: zeros behind KEY_DIM */
#define CLA_UNITS (CLA_KEY_DIM / 8)              /* loads of eight elements a key */
#define CLA_LOADS ((CLA_BLOCK_KV * CLA_UNITS + CLA_WG_SIZE - 1) / CLA_WG_SIZE) /* a work-item's */

/* Load i of a work-item: which key of a tile, which unit of it. */
CLA_MAP(cla_mla_gpu_load_key, i, CLA_GROUP_DEALT(i) / CLA_UNITS)
CLA_MAP(cla_load_unit, i, CLA_GROUP_DEALT(i) % CLA_UNITS)

/* Pages of the work-item's loads in the tile at `first`; the key before `end` stands for later
   ones. */
static inline void cla_mla_gpu_find_pages(int* page, __global const int* pages, int first,
                                          int end) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i)
    page[i] = pages[(uint)min(first + (int)cla_mla_gpu_load_key(i), end - 1) / CLA_PAGE_SIZE];
}

/* The own loads of that tile; keys from `end` on are not read and stay 0. */
static inline void cla_mla_gpu_load_tile(ClaKvRaw* raw, __global const CLA_KV_T* cache,
                                         const int* page, int first, int end) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i) {
    const uint key = cla_mla_gpu_load_key(i);
    const int position = first + (int)key;
    raw[i] = cla_kv_raw_zero();
    if (key < CLA_BLOCK_KV && position < end) {
      const long row = (long)page[i] * CLA_PAGE_SIZE + (long)((uint)position % CLA_PAGE_SIZE);
      raw[i] = cla_kv_raw_load(cache + row * CLA_KEY_DIM + 8 * (long)cla_load_unit(i));
    }
  }
}

/* tile[BLOCK_KV][ROW_QUADS] */
static inline void cla_store_tile(__local float4* tile, const ClaKvRaw* raw) {
#pragma unroll
  for (uint i = 0; i < CLA_LOADS; ++i) {
    const uint key = cla_mla_gpu_load_key(i);
    if (key < CLA_BLOCK_KV) {
      const ClaF8 x = cla_kv_expand(raw[i]);
      __local float4* to = tile + key * CLA_ROW_QUADS + 2 * cla_load_unit(i);
      to[0] = x.lo;
      to[1] = x.hi;
    }
  }
}

/* The own quads of a row of the query, scaled: q[KEY_QUADS], 0 where there is nothing. */
static inline void cla_read_row(float4* q, const ClaTask* task, uint row,
                                __global const CLA_Q_T* query, long token_stride, float scale) {
  __global const CLA_Q_T* from = query + cla_row_at(task, row, 0, token_stride, CLA_KEY_DIM);
#pragma unroll
  for (uint i = 0; i < CLA_KEY_QUADS; ++i) {
    const uint quad = CLA_DEALT(cla_member(), i);
    q[i] = (float4)(0.0f);
    if (cla_row_exists(task, row) && quad < CLA_KEY_DIM / 4) {
      const ClaF8 x = CLA_Q_LOAD8(from + quad / 2 * 8);
      q[i] = (quad % 2 == 0 ? x.lo : x.hi) * scale;
    }
  }
}

/* acc[ROWS_EACH][ACC_QUADS] += p * c over the lane's quads. all_seen: else keys that a row does not
   see are left out, since they may hold inf or NaN; a constant at every call. */
static inline void cla_mla_gpu_add_values(float4* acc, const float* p, __local const float4* tile,
                                          int all_seen) {
#pragma unroll
  for (uint key = 0; key < CLA_BLOCK_KV; ++key) {
#pragma unroll
    for (uint i = 0; i < CLA_ACC_QUADS; ++i) {
      const float4 value = tile[key * CLA_ROW_QUADS + CLA_DEALT(cla_member(), i)];
#pragma unroll
      for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
        const float own = p[CLA_SCORE(r, key)];
        float4* to = acc + r * CLA_ACC_QUADS + i;
        if (all_seen || cla_is_seen(own)) *to = mad((float4)(own), value, *to);
      }
    }
  }
}

/* scores[ROWS_EACH][BLOCK_KV] = <q, k> over the lane's quads. */
static inline void cla_mla_gpu_score_tile(float* scores, const float4* query,
                                          __local const float4* tile) {
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) scores[i] = 0.0f;
#pragma unroll
  for (uint key = 0; key < CLA_BLOCK_KV; ++key) {
#pragma unroll
    for (uint i = 0; i < CLA_KEY_QUADS; ++i) {
      const float4 k = tile[key * CLA_ROW_QUADS + CLA_DEALT(cla_member(), i)];
#pragma unroll
      for (uint r = 0; r < CLA_ROWS_EACH; ++r)
        scores[CLA_SCORE(r, key)] =
            cla_dot4(query[r * CLA_KEY_QUADS + i], k, scores[CLA_SCORE(r, key)]);
    }
  }
}

CLA_KERNEL clattn_mla_decode_gpu(CLA_PARAMS) {
  __local float4 tile[CLA_BLOCK_KV * CLA_ROW_QUADS];
  __local float scratch[CLA_SUM_FLOATS];

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint first_row = cla_team() * CLA_ROWS_EACH;
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;

  for (uint i = (uint)get_local_id(0); i < CLA_BLOCK_KV * CLA_ROW_QUADS; i += CLA_WG_SIZE)
    tile[i] = (float4)(0.0f);
  float4 query[CLA_ROWS_EACH * CLA_KEY_QUADS];
  float4 acc[CLA_ROWS_EACH * CLA_ACC_QUADS];
  ClaRow rows[CLA_ROWS_EACH];
  ClaRowState state[CLA_ROWS_EACH];
#pragma unroll
  for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
    cla_read_row(query + r * CLA_KEY_QUADS, &task, first_row + r, q + call.q_offset,
                 call.q_token_stride, cla_query_scale(&opt, &task, call.scale_log2e));
    rows[r] = cla_row(&opt, &task, first_row + r, call.causal);
    state[r] = cla_no_keys();
  }
#pragma unroll
  for (uint i = 0; i < CLA_ROWS_EACH * CLA_ACC_QUADS; ++i) acc[i] = (float4)(0.0f);

  int page[CLA_LOADS]; /* of the tile behind the one in raw */
  ClaKvRaw raw[CLA_LOADS];
  if (keys.begin < keys.end) {
    cla_mla_gpu_find_pages(page, pages, keys.begin, keys.end);
    cla_mla_gpu_load_tile(raw, k_cache, page, keys.begin, keys.end);
    cla_mla_gpu_find_pages(page, pages, keys.begin + CLA_BLOCK_KV, keys.end);
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* tile's zeros written -> overwritten */

  for (int first = keys.begin; first < keys.end; first += CLA_BLOCK_KV) {
    cla_store_tile(tile, raw);
    barrier(CLK_LOCAL_MEM_FENCE); /* tile written -> read */
    cla_mla_gpu_load_tile(raw, k_cache, page, first + CLA_BLOCK_KV, keys.end);
    cla_mla_gpu_find_pages(page, pages, first + 2 * CLA_BLOCK_KV, keys.end);

    float scores[CLA_SCORES]; /* [ROWS_EACH][BLOCK_KV] */
    const int masked = first < common.begin || first + CLA_BLOCK_KV > common.end;
    cla_mla_gpu_score_tile(scores, query, tile);
    cla_sum_over_team(scores, scratch);
    /* All tiles as masked ones: fewer registers than two ways. */
#pragma unroll
    for (uint r = 0; r < CLA_ROWS_EACH; ++r) {
      float factor;
      cla_rows_to_probabilities(scores + r * CLA_BLOCK_KV, &factor, &state[r], &rows[r], &opt, 1.0f,
                                first, 1, 0);
      cla_rescale_rows(acc + r * CLA_ACC_QUADS, &factor);
    }
    if (masked) {
      cla_mla_gpu_add_values(acc, scores, tile, 0);
    } else {
      cla_mla_gpu_add_values(acc, scores, tile, 1);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* tile read -> overwritten */
  }

  const ClaResults results = CLA_RESULTS;
#pragma unroll
  for (uint r = 0; r < CLA_ROWS_EACH; ++r)
    cla_store_row(&opt, &task, &results, first_row + r, state[r], acc + r * CLA_ACC_QUADS,
                  CLA_ACC_QUADS, 4 * cla_member(), 4 * CLA_TEAM);
}
