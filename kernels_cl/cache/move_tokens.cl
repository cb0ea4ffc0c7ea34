/* Moves tokens inside planes, the pairs of a request one after the other: for every plane, request
   r and pair i of starts[r] ... starts[r + 1] - 1, slot dst_slots[i] = slot src_slots[i]. A pair
   may read what an earlier pair of its request has written, without a barrier, because a work-item
   moves the same units of every token.

   macro           unit        legal values
   CLA_COPY_BYTES  bytes       16, 4 or 1: the unit of all counts, strides and offsets
   CLA_WG_SIZE     work-items  >= 1

   Launch: num_planes * num_requests * num_splits groups. */

#include "cache/planes.clh"

static inline __global ClaUnit* cla_slot(__global ClaUnit* plane, const ClaTokenMoves* moves,
                                         long slot) {
  return plane + slot / moves->block_size * moves->block_stride +
         slot % moves->block_size * moves->token_stride;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_move_tokens(
    CLA_PLANES, const ClaTokenMoves moves,
    __global const long* restrict src_slots, /* [num_pairs] */
    __global const long* restrict dst_slots, /* [num_pairs] */
    __global const int* restrict starts) {   /* [num_requests + 1] */
  const uint group = (uint)get_group_id(0);
  const uint split = group % (uint)moves.num_splits;
  const uint request = group / (uint)moves.num_splits % (uint)moves.num_requests;
  const uint index = group / (uint)moves.num_splits / (uint)moves.num_requests;
  __global ClaUnit* const plane = CLA_PLANE(index) + moves.offsets[index];
  const int end = min(starts[request + 1], moves.num_pairs);
  for (int pair = max(starts[request], 0); pair < end; ++pair) {
    const long src = src_slots[pair], dst = dst_slots[pair];
    if (min(src, dst) < 0 || max(src, dst) >= moves.num_slots || src == dst) continue;
    __global const ClaUnit* const from = cla_slot(plane, &moves, src);
    __global ClaUnit* const to = cla_slot(plane, &moves, dst);
    for (uint unit = split * CLA_WG_SIZE + (uint)get_local_id(0); unit < (uint)moves.num_units;
         unit += (uint)moves.num_splits * CLA_WG_SIZE) {
      const long at =
          (long)(unit / (uint)moves.row_units) * moves.head_stride + unit % (uint)moves.row_units;
      to[at] = from[at];
    }
  }
}
