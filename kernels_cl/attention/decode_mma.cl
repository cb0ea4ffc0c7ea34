/* Paged attention for few rows per key range, decode and short queries, on a unit of the contract
   for few rows: products of 16-bit elements, sums and softmax in f32. Probabilities are rounded to
   the queries' type before they meet V, as in prefill_mma.cl.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows share every key read. Each
   warp meets BLOCK_KV keys at a step, and all warps of the group other ones, without a barrier:

     for each step of the warp
       S = Q K^T                           load K of the next step (in flight from here on)
       P = 2^(S - max), O *= 2^(old max - max)
       O += P V                            load V of the next step (in flight from here on)

   At the end of an item the warps' results are joined through local memory, JOIN_DIMS dims at a
   time; if the item was split, the last group of the tile merges its splits
   (core/last_arrival.clh).

   With CLA_ROW_SCALES a lane loads the two scales of the key that it looks up, a step ahead like K,
   and lanes exchange them before they multiply S and P (attention/row_scales.clh). The scale of
   codes of 4 bits holds their zero, which lanes subtract when they make numbers of them.

   With CLA_FEW_REGISTERS no step loads for the next one: K is loaded right before its products, V
   before the softmax. CLA_SHARERS warps then share their keys; each has one tile of the rows and
   one unit of V's dims per lane.

   K and V never pass through local memory: lanes load 16 bytes at once, 8 dims of a key, and the
   unit says which (tile/CONTRACT.md, "Few rows"). Below, what sm80 makes of it.

   Registers (ptxas for sm_90, f16, no spills) and bytes of K and V that the two resident groups of
   128 have in flight on a multiprocessor: 16 keys a warp, while it works on them.

     HEAD_DIM 128, BLOCK_ROWS 8:     217 registers    64 KiB
     HEAD_DIM 128, BLOCK_ROWS 16:    255 registers    64 KiB
     HEAD_DIM 64, BLOCK_ROWS 8:      127 registers    (four groups) 64 KiB

   macro                unit        legal values, beside those of core/task.clh, tile/CONTRACT.md
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8
   CLA_BLOCK_ROWS       rows        a multiple of TILE_ROWS
   CLA_BLOCK_KV         keys        TILE_KEYS: of a warp and step
   CLA_WG_SIZE          work-items  a multiple of LANES * SHARERS
   CLA_MERGE_TAIL       -           core/last_arrival.clh

   Local memory: KEY_WARPS * BLOCK_ROWS * (JOIN_DIMS + 6) * 4 B for the joining and BLOCK_ROWS
   * HEAD_DIM * 2 B for the queries, on sm80 19 KiB with 8 rows of 128 dims. */
#include "attention/decode_rows.clh"

CLA_KERNEL clattn_decode_mma(CLA_PARAMS) {
  __local uint4 queries[CLA_QUERY_LOADS * CLA_LANES]; /* units as the lanes want them */
  __local float4 sums_of[CLA_KEY_WARPS * CLA_BLOCK_ROWS * CLA_SUM_STRIDE / 4];
  __local float2 state_of[CLA_KEY_WARPS * CLA_BLOCK_ROWS];
#if CLA_MERGE_TAIL
  __local int last_arrival;
#endif

  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint lane = cla_lane(), warp = cla_warp();
  const uint first_row = cla_warp_row(warp), first_unit = cla_warp_unit(warp);
  const ClaTask task = cla_task(meta, call.entries_at, (uint)call.num_kv_heads);
  const ClaRange keys = cla_item_keys(&opt, &task.item, call.causal);
  const ClaRange common = cla_common_keys(&opt, &task.item, call.causal);
  __global const int* pages = meta + call.pages_at + task.item.pages_at;
  const long head_at = (long)task.kv_head * call.head_stride;
  __global const CLA_KV_T* k_lane = k_cache + call.k_offset + head_at + CLA_UNIT(cla_k_unit(lane));
  __global const CLA_KV_T* v_lane =
      CLA_VALUES + head_at + CLA_UNIT(cla_first_v_unit(first_unit, lane));
  const ClaValues values = {&task.item, pages, v_lane, call.block_stride, call.token_stride};
  int first = keys.begin - keys.begin % CLA_BLOCK_KV + (int)cla_warp_keys(warp) * CLA_BLOCK_KV;
  int page = 0;                  /* of the lane's key in the next step to be loaded */
  float level = CLA_FIRST_LEVEL; /* attention/row_scales.clh */
#if CLA_FEW_REGISTERS
  if (first < keys.end) page = cla_page_of(pages, (uint)cla_own_position(first, keys, lane));
#else
  ClaKvRaw k_raw[CLA_K_LOADS], v_raw[CLA_V_LOADS];
  float2 own_scales = (float2)(1.0f); /* of the lane's key */
  if (first < keys.end) {
    const int own = cla_own_position(first, keys, lane);
    const long at = cla_key_row(&task.item, cla_page_of(pages, (uint)own), (uint)own,
                                call.block_stride, call.token_stride);
    own_scales = cla_own_scales(&opt, &task, cla_page_of(pages, (uint)own), own);
    cla_load_k(k_raw, k_lane, at, lane);
    cla_load_v(v_raw, v_lane, at, first_unit, lane);
    page = cla_page_of(pages, (uint)cla_own_position(first + CLA_STEP_KEYS, keys, lane));
  }
#endif
  const float scale = cla_query_scale(&opt, &task, call.scale_log2e);
  for (uint i = warp; i < CLA_QUERY_LOADS; i += CLA_WARPS)
    queries[i * CLA_LANES + lane] = cla_signed_query(
        cla_load_query(&task, i, q, call.q_offset, call.q_token_stride, lane), scale);
  ClaRow rows[CLA_LANE_ROWS];
  ClaRowState state[CLA_LANE_ROWS];
  float acc[CLA_ACC_SIZE];
  cla_decode_begin_rows(rows, state, acc, &opt, &task, call.causal, first_row, lane);
  barrier(CLK_LOCAL_MEM_FENCE); /* queries written -> read */
  for (; first < keys.end; first += CLA_STEP_KEYS) {
    const int next = first + CLA_STEP_KEYS;
    const int masked = cla_is_masked(common, first);
    float scores[CLA_ROW_TILES * CLA_C_SIZE];
#if CLA_FEW_REGISTERS
    const int own = cla_own_position(first, keys, lane);
    const long at = cla_key_row(&task.item, page, (uint)own, call.block_stride, call.token_stride);
    const float2 scales = cla_own_scales(&opt, &task, page, own);
    cla_multiply_qk(scores, k_lane + at,
                    queries + first_row / CLA_TILE_ROWS * CLA_K_UNITS * CLA_LANES,
                    lane CLA_STORED(scales.x));
    page = cla_page_of(pages, (uint)cla_own_position(next, keys, lane));
    ClaKvRaw v_raw[CLA_V_LOADS];
    cla_load_v(v_raw, v_lane, at, first_unit, lane);
#else
    cla_set_k_zeros(k_raw, own_scales.x, lane);
    cla_multiply_qk(scores, k_raw, queries, lane);
    const float2 scales = own_scales;
    const int own = cla_own_position(next, keys, lane);
    const long at = cla_key_row(&task.item, page, (uint)own, call.block_stride, call.token_stride);
    if (next < keys.end) { /* the same for the warp */
      own_scales = cla_own_scales(&opt, &task, page, own);
      page = cla_page_of(pages, (uint)cla_own_position(next + CLA_STEP_KEYS, keys, lane));
      cla_load_k(k_raw, k_lane, at, lane);
    }
#endif
    cla_scale_keys(scores, scales.x, lane);
    cla_to_probabilities(scores, acc, state, rows, &opt, scale, first, masked, lane);
    cla_scale_values(scores, acc, &level, v_raw, scales.y, lane);
    cla_decode_add_values(acc, scores, v_raw, rows, &values, masked,
                          cla_range(max(first, keys.begin), min(first + CLA_BLOCK_KV, keys.end)),
                          lane);
#if !CLA_FEW_REGISTERS
    if (next < keys.end) cla_load_v(v_raw, v_lane, at, first_unit, lane);
#endif
  }
  cla_leave_level(acc, 1, level);
  const ClaResults results = CLA_RESULTS;
  const uint shared_row = cla_warp_keys(warp) * CLA_BLOCK_ROWS + first_row;
  for (uint dim = 0; dim < CLA_HEAD_DIM; dim += CLA_JOIN_DIMS) {
    if (dim > 0) barrier(CLK_LOCAL_MEM_FENCE); /* results joined -> overwritten */
    cla_share_warp(sums_of + shared_row * CLA_SUM_STRIDE / 4, state_of + shared_row, acc, state,
                   dim, first_unit, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* warps' results written -> joined */
    cla_end_task(&opt, &task, &results, sums_of, state_of, dim);
  }
#if CLA_MERGE_TAIL
  cla_merge_if_last(&opt, &task, &results, CLA_ARRIVALS, &last_arrival);
#endif
}
