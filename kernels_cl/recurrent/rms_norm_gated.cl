/* Norm of rows, times a gate: with norm(x) = x / sqrt(mean x^2 + eps),

     out = norm(x) weight act(z)    or    norm(x act(z)) weight

   CLA_LANES work-items share a row, CLA_VEC elements in turn; a work-item reads and writes the same
   elements, so the output may be x.

   macro           legal values                        meaning
   CLA_GATE        0, 1, 2                             act: no gate, silu, sigmoid
   CLA_GATE_FIRST  0, 1                                1: the second form
   CLA_LANES       power of two, divides CLA_WG_SIZE   work-items of a row
   CLA_Q_DTYPE     0 f32, 1 f16, 2 bf16                x, z, out
   CLA_KV_DTYPE    the same                            weight
   CLA_VEC         4, 8, 16; divides width             recurrent/vectors.clh
   CLA_WG_SIZE     >= 1                                work-items

   Launch: ceil(num_rows / (CLA_WG_SIZE / CLA_LANES)) groups. */

#include "recurrent/vectors.clh"
#include "shared/recurrent.h"

#define CLA_ROWS (CLA_WG_SIZE / CLA_LANES) /* of a group */

static inline cla_vf cla_gate_of(__global const CLA_Q_T* z) {
#if CLA_GATE == 0
  return (cla_vf)(1.0f);
#else
  const cla_vf x = CLA_Q_LOADV(z);
  return (CLA_GATE == 1 ? x : (cla_vf)(1.0f)) / (1.0f + exp(-x));
#endif
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_rms_norm_gated(
    const ClaGatedNorm call, __global const CLA_Q_T* x, __global const CLA_Q_T* z,
    __global const CLA_KV_T* weight, __global CLA_Q_T* out) {
#if CLA_LANES > 1
  __local float parts[CLA_WG_SIZE];
#endif
  const uint item = (uint)get_local_id(0), lane = item % CLA_LANES;
  const long row = (long)get_group_id(0) * CLA_ROWS + item / CLA_LANES;
  const long token = row / call.rows_per_token;
  const long at = row % call.rows_per_token * call.width;
  const int width = row < call.num_rows ? call.width : 0;
  x += call.x.offset + token * call.x.stride + at;
  z += call.z.offset + token * call.z.stride + at;
  out += call.out.offset + token * call.out.stride + at;
  cla_vf squares = (cla_vf)(0.0f);
  for (int i = (int)lane * CLA_VEC; i < width; i += CLA_LANES * CLA_VEC) {
    cla_vf each = CLA_Q_LOADV(x + i);
#if CLA_GATE_FIRST
    each *= cla_gate_of(z + i);
#endif
    squares = mad(each, each, squares);
  }
  float sum = cla_sumv(squares);
#if CLA_LANES > 1
  parts[item] = sum;
  barrier(CLK_LOCAL_MEM_FENCE);
  sum = 0.0f;
  for (uint i = 0; i < CLA_LANES; ++i) sum += parts[item - lane + i];
#endif
  const float factor = 1.0f / sqrt(sum / (float)call.width + call.eps);
  for (int i = (int)lane * CLA_VEC; i < width; i += CLA_LANES * CLA_VEC) {
    const cla_vf each = CLA_Q_LOADV(x + i) * factor * CLA_STATE_LOADV(weight + i);
    CLA_Q_STOREV(each * cla_gate_of(z + i), out + i);
  }
}
