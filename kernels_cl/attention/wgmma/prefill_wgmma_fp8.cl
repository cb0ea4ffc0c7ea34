/* Paged attention for many rows per key range by warpgroup products of e4m3 (tile/sm90_fp8.clh):
   queries and probabilities are rounded to it, keys and values are multiplied as they are stored.
   Same meaning and schedule as prefill_wgmma.cl, but that a tile's values are summed apart, and its
   keys multiplied again where a maximum is needed after all (wgmma/tiles_fp8.clh).

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   Bytes and operations of a tile, per work-group: 32 KiB of K and V from global memory, 4.2 M
   multiply-adds, 16 384 exponentials.

   macro                unit        legal values, beside those of core/task.clh; no ALiBi, no mask
   CLA_HEAD_DIM         elements    128
   CLA_Q_DTYPE          -           1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           3 e4m3: k_cache, v_cache
   CLA_BLOCK_ROWS       rows        128
   CLA_BLOCK_KV         keys        128
   CLA_WG_SIZE          work-items  384
   CLA_BOXES            -           0; 1 if PAGE_SIZE is a multiple of 16: keys come by tensor maps

   Local memory: 208 KiB. Launch: as prefill_wgmma.cl. K and V rows start on 8-byte boundaries. */
#define CLA_QUERY_UNIT(row, unit) \
  ((row) / 64 * 64 * CLA_QUERY_ROW_UNITS + cla_swizzled((row) % 64, unit, 64))
#define CLA_QUERY_UNITS (CLA_BLOCK_ROWS * CLA_QUERY_ROW_UNITS)
#define CLA_KEY_TILE_UNITS CLA_TILE_UNITS
#define CLA_TILE_UNITS (CLA_BLOCK_KV * CLA_HEAD_DIM / 16)
#define CLA_STAGES 3
#define CLA_RAW_STAGES 3
#define CLA_QUERY_STAGES 2
#define CLA_CONSUMERS 2
#define CLA_COPIERS 4
/* A row keeps its base, and its maximum is not computed, while no probability has reached 448.
   Bases are higher than the range needs, so that maxima can grow by as much. */
#define CLA_KEEPS_BASES 1
#define CLA_KEEPS(sum, probabilities) (!cla_steps_at_end(probabilities, CLA_KEY_STEPS))
#define CLA_BASE_SLACK 4.0f

#include "tile/unit.clh"

#include "attention/wgmma/producer_fp8.clh"
#include "attention/wgmma/tiles_fp8.clh"

#if CLA_BOXES && (CLA_PAGE_SIZE == 0 || CLA_PAGE_SIZE % 16 != 0)
#error "prefill_wgmma_fp8.cl: boxes are of pages of a multiple of 16 tokens"
#endif
#if CLA_BLOCK_ROWS != 128 || CLA_WG_SIZE != 3 * CLA_WARPGROUP
#error "prefill_wgmma_fp8.cl: CLA_BLOCK_ROWS must be 128, CLA_WG_SIZE 384"
#endif

CLA_KERNEL clattn_prefill_wgmma_fp8(CLA_PARAMS) {
  __local uint4 q_tiles[CLA_QUERY_STAGES * CLA_QUERY_UNITS] __attribute__((aligned(1024)));
  __local uint4 k_tiles[CLA_STAGES * (CLA_KEY_TILE_UNITS + CLA_TILE_UNITS)]
      __attribute__((aligned(1024)));
  __local uint4 raw[CLA_RAW_UNITS] __attribute__((aligned(1024))); /* swizzled by boxes */
  __local ClaTask tasks[CLA_QUERY_STAGES];
  __local ClaLeftOut left_out[CLA_QUERY_STAGES];
  __local float marks[CLA_LANES];
  __local int maps[CLA_BOXES ? 2 * CLA_MAP_INTS : 1]
      __attribute__((aligned(128))); /* of keys, of values */
  __local ulong full_q[CLA_QUERY_STAGES], empty_q[CLA_QUERY_STAGES];
  __local ulong full_k[2 * CLA_STAGES], empty_k[2 * CLA_STAGES]; /* those of values follow */
  __local ulong maps_made[1], full_raw[CLA_RAW_BARRIERS];

  const ClaShared at = {
      {q_tiles, full_q, empty_q},
      {k_tiles, full_k, empty_k},
      {k_tiles + CLA_STAGES * CLA_KEY_TILE_UNITS, full_k + CLA_STAGES, empty_k + CLA_STAGES},
      tasks,
      left_out,
      maps_made,
      0};
  const ClaOptions opt = CLA_OPTION_VALUES;
  __global int* const tensor_maps = workspace + call.tensor_maps_at; /* by the launch for itself */
  const ClaThread self = cla_thread();
  const uint num_tasks = (uint)call.num_entries * (uint)call.num_kv_heads * CLA_HEAD_CHUNKS;

  if (get_local_id(0) == 0) {
    cla_init_barriers(&at, CLA_ARRIVALS_OF_KEYS, CLA_ARRIVALS_OF_VALUES);
    cla_init_raw(full_raw);
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* barriers initialised -> used */
  if (self.group == CLA_CONSUMERS) {
    CLA_KEEP_REGISTERS(40);
    cla_produce_fp8(call, &opt, &at, raw, full_raw, meta, tensor_maps, q, k_cache, v_cache,
                    num_tasks, &self);
    return;
  }
  cla_make_maps(&at, &call, maps, tensor_maps, k_cache, v_cache, &self);
  CLA_TAKE_REGISTERS(232);
  const ClaRowResults results = CLA_ROW_RESULTS;
  const ClaValuesAt values = {CLA_VALUES, meta + call.pages_at, CLA_VALUE_STRIDES(call)};
  cla_consume(&call, &opt, &at, &results, &values, marks, num_tasks,
              cla_q_scale(&opt, (uint)call.num_kv_heads), &self);
}
