/* Paged attention for many rows per key range on NVIDIA's compute capability 9.0: warpgroup
   products that run beside the softmax. Same meaning and options as prefill_mma.cl.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   A work-group stays for many tasks (a work item for one KV head; cla_next_task), so that loading
   for the next one runs beside the end of the last: BLOCK_ROWS rows against tiles of BLOCK_KV keys.
   Its last warpgroup only copies queries, keys and values; each of the others owns 64 rows and all
   their dims:

     for each tile of keys up to the last one that any row sees
       S = Q K^T, in turns with the others
       O = O + P V of the tile before (begun before S is awaited)
       P = 2^(S - base)
       if a lane's sum of P is too large: base follows max, P anew, O = O * 2^(old base - base)

   The tile before may be the last one of the task before: its rows leave once O is done, beside
   the softmax of the new task's first tile. Masks are looked at in tiles that some row does not see
   wholly; infinite and NaN values there, which such a row must not meet, are left out of products,
   and added to the rows that see them once these are done. With CLA_BOXES 16 keys of a head are one
   copy by a tensor map (tile/sm90_tensor_map.clh), else many small ones; those of 8 bits are
   converted on their way (wgmma/conversion.clh), and scales of tokens and heads come beside them
   (attention/row_scales.clh). Full barriers end when copies have
   arrived, or were converted, empty ones when the last warp has multiplied. A warpgroup whose rows
   do not exist in a task multiplies nothing for it.

   Bytes and operations of a tile with 128 rows, 128 keys and 128 dims, per work-group: 64 KiB of K
   and V (32 of 8 bits) from global memory, 4.2 M multiply-adds, 16 384 exponentials.

   macro                unit        legal values, beside those of core/task.clh
   CLA_HEAD_DIM         elements    64, 128, 256, 192 (see VALUE_DIM); with 192 rows 64; else, with
                                    PADDED_DIM, less than that
   CLA_PADDED_DIM       elements    undefined, or 64, 128, 256: room of a row in local memory, of
                                    which products take no more than HEAD_DIM and a few zeros
                                    behind it; CLA_KV_DTYPE = CLA_Q_DTYPE
   CLA_VALUE_DIM        elements    HEAD_DIM; 128 with HEAD_DIM 192 and no pages (core/dims.clh)
   CLA_Q_DTYPE          -           1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           CLA_Q_DTYPE; with up to 128 rows also 3 e4m3, 4 e5m2,
                                    5 int8: k_cache, v_cache
   CLA_BLOCK_ROWS       rows        64, 128, 192
   CLA_BLOCK_KV         keys        64, 128
   CLA_WG_SIZE          work-items  2 * BLOCK_ROWS + 128
   CLA_BOXES            -           0; 1 if PAGE_SIZE is a multiple of 16: keys come by tensor maps

   Local memory: (2 * BLOCK_ROWS + 2 * STAGES * BLOCK_KV) * HEAD_DIM * 2 B and 1 KiB of barriers and
   marks, 192 KiB with 128 rows, 128 keys and 128 dims; heads of 256 keep one tile of queries, as
   do those of 192 with tiles of 128 keys: 208 KiB with values of 128.
   Caches of 8 bits: 2 * BLOCK_KV * HEAD_DIM B more, with scales of tokens and heads 2 * STAGES *
   BLOCK_KV * 4 B, and one tile of queries with 128 keys and 128 dims. Launch: up to num_items *
   num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on 16-byte boundaries,
   those of 8 bits on 8. */
#define CLA_QUERY_UNIT(row, unit) \
  ((row) / 64 * 64 * CLA_QUERY_ROW_UNITS + cla_swizzled((row) % 64, unit, 64))
#define CLA_TILE_UNIT CLA_KV_PLACE
#define CLA_QUERY_UNITS (CLA_BLOCK_ROWS * CLA_QUERY_ROW_UNITS)
#define CLA_KEY_TILE_UNITS (CLA_BLOCK_KV * CLA_QUERY_ROW_UNITS)
#define CLA_TILE_UNITS (CLA_BLOCK_KV * CLA_DIM_UNITS)
/* The smallest tile is multiplied in less time than it takes to come. */
#define CLA_STAGES (CLA_TILE_UNITS <= 512 ? 4 : 2)
/* Two of 128 rows leave no room for scales beside tiles of 128 keys and 128 dims of 8 bits. */
#define CLA_QUERY_STAGES \
  (CLA_PADDED_DIM == 256 || CLA_KEY_TILE_UNITS > (CLA_ROW_SCALES ? 1024 : 2048) ? 1 : 2)
#define CLA_CONSUMERS (CLA_BLOCK_ROWS / 64)
#define CLA_COPIERS (CLA_BOXES ? 2 : 4)
/* Needs registers that three do not have for tiles of 128 keys, nor two that weigh probabilities: a
   prompt of 4096 tokens then took three times as long. */
#define CLA_KEEPS_BASES ((CLA_CONSUMERS <= 2 || CLA_BLOCK_KV <= 64) && !CLA_ROW_SCALES)
/* A row keeps its base, and its maximum is not computed, while no lane's sum of a tile's
   probabilities exceeds, with f16, its largest number; bases are then higher than the range needs,
   so that maxima can grow by as much. With bf16 their number: beyond it one is above 1, so that the
   base moves and later tiles keep the new one. */
#define CLA_KEEPS(sum, probabilities) \
  (!((sum) > (CLA_Q_DTYPE == 1 ? 65504.0f : (float)CLA_ROW_SCORES)))
#if CLA_Q_DTYPE == 1 && CLA_BLOCK_ROWS <= 128
#define CLA_BASE_SLACK 6.0f
#endif
/* Registers of a work-item after setmaxnreg. All together may not exceed those of the launch, 168
   for each of 384 work-items; with more it hangs. */
#if CLA_BLOCK_ROWS > 128
#define CLA_PRODUCER_REGISTERS 32
#define CLA_CONSUMER_REGISTERS 160
#elif CLA_KV_DTYPE >= 3
#define CLA_PRODUCER_REGISTERS 88 /* for a piece, all of whose units are loaded at once */
#define CLA_CONSUMER_REGISTERS 208
#else
#define CLA_PRODUCER_REGISTERS 40
#define CLA_CONSUMER_REGISTERS 232
#endif

#include "tile/unit.clh"

#include "attention/wgmma/left_out.clh"
#include "attention/wgmma/producer.clh"
#include "attention/wgmma/tiles.clh"

#if CLA_BOXES && (CLA_PAGE_SIZE == 0 || CLA_PAGE_SIZE % 16 != 0 || CLA_KV_QUANT)
#error "prefill_wgmma.cl: boxes are of unconverted pages of a multiple of 16 tokens"
#endif
#if CLA_BLOCK_ROWS % 64 != 0 || CLA_BLOCK_ROWS > (CLA_KV_QUANT ? 128 : 192) || \
    CLA_WG_SIZE != CLA_WARPGROUP * (CLA_CONSUMERS + 1)
#error "prefill_wgmma.cl: CLA_BLOCK_ROWS and CLA_WG_SIZE do not tile"
#endif
#if (CLA_BLOCK_KV != 64 && CLA_BLOCK_KV != 128) ||                                       \
    (CLA_DIM_UNITS != 64 / 8 && CLA_DIM_UNITS != 128 / 8 && CLA_DIM_UNITS != 256 / 8) || \
    (CLA_VALUES_APART ? CLA_HEAD_DIM % 64 != 0 : CLA_PADDED_DIM != 8 * CLA_DIM_UNITS) || \
    (CLA_IS_PADDED && CLA_KV_QUANT)
#error "prefill_wgmma.cl: CLA_BLOCK_KV, CLA_HEAD_DIM or CLA_VALUE_DIM is not supported"
#endif

CLA_KERNEL clattn_prefill_wgmma(CLA_PARAMS) {
  __local uint4 q_tiles[CLA_QUERY_STAGES * CLA_QUERY_UNITS] __attribute__((aligned(1024)));
  __local uint4 k_tiles[CLA_STAGES * (CLA_KEY_TILE_UNITS + CLA_TILE_UNITS)]
      __attribute__((aligned(1024)));
  __local uint4 raw[CLA_CONVERTS ? CLA_RAW_UNITS : 1];
  __local float scales[CLA_ROW_SCALES ? 2 * CLA_STAGES * CLA_BLOCK_KV : 1];
  __local ClaTask tasks[CLA_QUERY_STAGES];
  __local ClaLeftOut left_out[CLA_QUERY_STAGES];
  __local float marks[CLA_LANES];
  __local int maps[CLA_BOXES ? 2 * CLA_MAP_INTS : 1]
      __attribute__((aligned(128))); /* of keys, of values */
  __local ulong full_q[CLA_QUERY_STAGES], empty_q[CLA_QUERY_STAGES];
  __local ulong full_k[2 * CLA_STAGES], empty_k[2 * CLA_STAGES]; /* those of values follow */
  __local ulong maps_made[1];

  const ClaShared at = {
      {q_tiles, full_q, empty_q},
      {k_tiles, full_k, empty_k},
      {k_tiles + CLA_STAGES * CLA_KEY_TILE_UNITS, full_k + CLA_STAGES, empty_k + CLA_STAGES},
      tasks,
      left_out,
      maps_made,
      scales};
  const ClaOptions opt = CLA_OPTION_VALUES;
  __global int* const tensor_maps = workspace + call.tensor_maps_at; /* by the launch for itself */
  const ClaThread self = cla_thread();
  const uint num_tasks = (uint)call.num_entries * (uint)call.num_kv_heads * CLA_HEAD_CHUNKS;

  if (get_local_id(0) == 0) cla_init_barriers(&at, CLA_ARRIVALS_OF_TILE, CLA_ARRIVALS_OF_TILE);
  barrier(CLK_LOCAL_MEM_FENCE); /* barriers initialised -> used */
  if (self.group == CLA_CONSUMERS) {
    CLA_KEEP_REGISTERS(CLA_PRODUCER_REGISTERS);
    cla_produce(call, &opt, &at, raw, meta, tensor_maps, q, k_cache, v_cache, num_tasks, &self);
    return;
  }
  cla_make_maps(&at, &call, maps, tensor_maps, k_cache, v_cache, &self);
  CLA_TAKE_REGISTERS(CLA_CONSUMER_REGISTERS);
  const ClaRowResults results = CLA_ROW_RESULTS;
  const ClaValuesAt values = {CLA_VALUES, meta + call.pages_at, CLA_VALUE_STRIDES(call)};
  cla_consume(&call, &opt, &at, &results, &values, marks, num_tasks, 1.0f, &self);
}
