/* Copies states of requests to pages targets[r]: of a convolution's state the rows from the
   window's first on to rows 0 ... of the target, of the other state the page of the window's
   column. A work-item moves the same units of all rows, first row first, so a page may be its own
   target.

   macro           unit        legal values
   CLA_COPY_BYTES  bytes       16, 4 or 1: the unit of strides, offsets and sizes
   CLA_WG_SIZE     work-items  >= 1

   Launch: num_reqs * num_splits groups. */

#include "recurrent/lists.clh"

#if CLA_COPY_BYTES == 16
typedef uint4 ClaUnit;
#elif CLA_COPY_BYTES == 4
typedef uint ClaUnit;
#elif CLA_COPY_BYTES == 1
typedef uchar ClaUnit;
#else
#error "CLA_COPY_BYTES must be 16, 4 or 1"
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_mamba_copy_blocks(
    const ClaStateCopy call, CLA_LISTS, __global const int* targets, __global ClaUnit* conv,
    __global ClaUnit* states) {
  const uint splits = (uint)call.num_splits, number = (uint)get_group_id(0) / splits;
  const long first = (long)((uint)get_group_id(0) % splits * CLA_WG_SIZE + (uint)get_local_id(0));
  const long step = (long)splits * CLA_WG_SIZE;
  const long target = targets[call.targets_at + (long)number];
  if (target < 0 || target >= call.lists.num_blocks) return;
  __global const int* const columns =
      indices + call.lists.indices_at + (long)number * call.lists.columns;
  const int taken =
      call.lists.accepted_at < 0 ? 1 : accepted[call.lists.accepted_at + (long)number];
  const int window = taken < 0 ? 0 : taken - 1;
  if (window < 0) return;
  const long begin = cla_page(&call.lists, columns, 0);
  if (begin >= 0 && window < call.conv_rows) {
    __global const ClaUnit* const from = conv + call.conv_offset + begin * call.conv_stride;
    __global ClaUnit* const to = conv + call.conv_offset + target * call.conv_stride;
    for (long unit = first; unit < call.row_units; unit += step) {
      for (long row = 0; row + window < call.conv_rows; ++row)
        to[row * call.row_units + unit] = from[(row + window) * call.row_units + unit];
    }
  }
  if (window >= call.lists.columns) return;
  const long page = cla_page(&call.lists, columns, window);
  if (page < 0 || page == target) return;
  __global const ClaUnit* const from = states + call.state_offset + page * call.state_stride;
  __global ClaUnit* const to = states + call.state_offset + target * call.state_stride;
  for (long unit = first; unit < call.state_units; unit += step) to[unit] = from[unit];
}
