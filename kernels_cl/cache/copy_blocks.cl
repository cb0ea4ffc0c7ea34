/* Copies blocks inside planes: for every plane and pair, plane[destination] = plane[source].

   A plane is one buffer's keys or values of one layer; all planes have one shape:
     block b's elements lie at offset + b * block_stride + o * outer_stride + i * inner_stride + r
     with o < outer_count, i < inner_count, r < row_units.
   One group serves one split of one pair of one plane; no barriers. On CPUs (CLA_WG_SIZE 1) a
   split is a piece of the block without gaps, else every num_splits-th CLA_WG_SIZE units.

   macro           unit        legal values
   CLA_COPY_BYTES  bytes       16, 4 or 1: the unit of all counts, strides and offsets
   CLA_WG_SIZE     work-items  >= 1

   Launch: num_planes * num_pairs * num_splits groups. */
#include "cache/planes.clh"
#if CLA_WG_SIZE == 1
#include "core/stream.clh"
#endif

#define CLA_COPY_UNITS 4 /* of a work-item in flight together */

#if CLA_WG_SIZE == 1

/* `count` units that follow each other; past: past the caches, where the line of `to` begins there.
 */
static inline void cla_copy_units(__global const ClaUnit* from, __global ClaUnit* to, uint count,
                                  int past) {
  uint i = 0;
#if CLA_COPY_BYTES == 16
  if (past && (ulong)to % CLA_LINE_BYTES == 0)
    for (; i + 4 <= count; i += 4)
      CLA_STREAM(vload8(0, (__global const ulong*)(from + i)), (__global ulong8*)(to + i));
  for (; i + 4 <= count; i += 4)
    vstore8(vload8(0, (__global const ulong*)(from + i)), 0, (__global ulong*)(to + i));
#endif
  for (; i < count; ++i) to[i] = from[i];
}
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_copy_blocks(
    CLA_PLANES,
    __global const long* restrict meta, /* [MAX_PLANES] offsets, then [num_pairs][2] blocks */
    int num_pairs,                      /* pairs */
    int num_splits,                     /* groups that share a pair of a plane */
    int block_units,                    /* row_units * inner_count * outer_count */
    long block_stride,                  /* units, as all below */
    int row_units,                      /* of a contiguous run */
    int inner_count,                    /* runs */
    long inner_stride,                  /* between runs */
    long outer_stride) {                /* between sets of runs */
  const uint group = (uint)get_group_id(0);
  const uint split = group % (uint)num_splits;
  const uint pair = group / (uint)num_splits % (uint)num_pairs;
  const uint index = group / (uint)num_splits / (uint)num_pairs;
  __global ClaUnit* const plane = CLA_PLANE(index) + meta[index];
  __global const long* const blocks = meta + CLA_MAX_PLANES + 2 * (ulong)pair;
  __global const ClaUnit* const from = plane + blocks[0] * block_stride;
  __global ClaUnit* const to = plane + blocks[1] * block_stride;
#if CLA_WG_SIZE == 1
  const uint each = (((uint)block_units - 1) / (uint)num_splits / 4 + 1) * 4; /* whole lines */
  const uint end = min((split + 1) * each, (uint)block_units);
  const ulong bytes =
      (ulong)(get_num_groups(0) / (uint)num_splits) * (uint)block_units * CLA_COPY_BYTES;
  for (uint unit = split * each, count; unit < end; unit += count) {
    const uint run = unit / (uint)row_units;
    const uint in_run = unit % (uint)row_units;
    const long at = (long)(run / (uint)inner_count) * outer_stride +
                    (long)(run % (uint)inner_count) * inner_stride + (long)in_run;
    count = min((uint)row_units - in_run, end - unit);
    cla_copy_units(from + at, to + at, count, bytes >= CLA_STREAM_BYTES);
  }
#else
  const uint step = (uint)num_splits * CLA_WG_SIZE;
  for (uint first = split * CLA_WG_SIZE + (uint)get_local_id(0); first < (uint)block_units;
       first += CLA_COPY_UNITS * step) {
    ClaUnit units[CLA_COPY_UNITS];
    long at[CLA_COPY_UNITS];
#pragma unroll
    for (uint i = 0; i < CLA_COPY_UNITS; ++i) {
      const uint unit = min(first + i * step, (uint)block_units - 1);
      const uint run = unit / (uint)row_units;
      at[i] = (long)(run / (uint)inner_count) * outer_stride +
              (long)(run % (uint)inner_count) * inner_stride + (long)(unit % (uint)row_units);
      units[i] = from[at[i]];
    }
#pragma unroll
    for (uint i = 0; i < CLA_COPY_UNITS; ++i) {
      if (first + i * step < (uint)block_units) to[at[i]] = units[i];
    }
  }
#endif
}
