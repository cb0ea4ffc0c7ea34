/* Copies blocks from one cache to another whose blocks lie in another order: for every pair,
   to[destination] = from[source], K and V.

   One group serves one token of K or V of one pair; its work-items take the token's units of eight
   elements, [kv head, HEAD_DIM / 8], in turns. No barriers.

   macro              unit        legal values
   CLA_HEAD_DIM       elements    a multiple of 8; in tiles (lib/tiles.clh) of 64
   CLA_ELEMENT_BYTES  bytes       1, 2, 4
   CLA_WG_SIZE        work-items  >= 1

   Launch: num_pairs * 2 * block_size groups. */
#include "lib/tiles.clh"

#if CLA_ELEMENT_BYTES == 1
typedef uchar ClaElement;
#elif CLA_ELEMENT_BYTES == 2
typedef ushort ClaElement;
#elif CLA_ELEMENT_BYTES == 4
typedef uint ClaElement;
#else
#error "CLA_ELEMENT_BYTES must be 1, 2 or 4"
#endif

/* Where a cache's elements lie, as meta holds it. */
enum { ClaPlaceK, ClaPlaceV, ClaPlaceBlock, ClaPlaceToken, ClaPlaceHead, ClaPlaceTiles, ClaPlaces };

/* The element where a unit of a token starts. */
static inline long cla_unit_place(__global const long* places, uint value, long block, uint token,
                                  uint unit) {
  const uint head = unit / (CLA_HEAD_DIM / 8);
  const uint in_head = unit % (CLA_HEAD_DIM / 8);
  const long at = places[value ? ClaPlaceV : ClaPlaceK] + block * places[ClaPlaceBlock] +
                  (long)head * places[ClaPlaceHead];
  if (places[ClaPlaceTiles])
    return at + (long)cla_tiled_row(token) + (long)cla_tiled_unit(token, in_head);
  return at + (long)token * places[ClaPlaceToken] + (long)in_head * 8;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_convert_blocks(
    __global const ClaElement* restrict from, __global ClaElement* restrict to,
    __global const long* restrict meta, /* [2][Places]: from, to; then [num_pairs][2] blocks */
    int block_size,                     /* tokens */
    int num_kv_heads) {                 /* heads */
  const uint group = (uint)get_group_id(0);
  const uint token = group % (uint)block_size;
  const uint value = group / (uint)block_size % 2;
  __global const long* blocks = meta + 2 * ClaPlaces + 2 * (ulong)(group / (uint)block_size / 2);
  const uint num_units = (uint)num_kv_heads * (CLA_HEAD_DIM / 8);
  for (uint unit = (uint)get_local_id(0); unit < num_units; unit += CLA_WG_SIZE)
    vstore8(vload8(0, from + cla_unit_place(meta, value, blocks[0], token, unit)), 0,
            to + cla_unit_place(meta + ClaPlaces, value, blocks[1], token, unit));
}
