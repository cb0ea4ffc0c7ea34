/* Scales of a quantised cache from a layer's first tensors, without the host:

     amax[which] = max |x[token, i]|        one launch a tensor, which = 0 key, 1 value, 2 query
     scales[which] = amax[which] / constants[which]

   Largest magnitudes are kept as the bits of non-negative floats, which order like unsigned
   integers, so that groups can join theirs by atomic_max; the caller zeroes them. Elements that are
   not finite are passed over: one of them would make every scaled value 0 or NaN. A tensor of
   zeros leaves the scale 1.

   The unit of work is eight elements; a token's row is row_units of them.

   macro         unit        legal values
   CLA_Q_DTYPE   -           0 f32, 1 f16, 2 bf16: the tensors
   CLA_WG_SIZE   work-items  1 (CPU) or a power of two */
#if !defined(CLA_WG_SIZE) || !defined(CLA_Q_DTYPE)
#error "kv_scales.cl needs CLA_WG_SIZE and CLA_Q_DTYPE"
#endif
#define CLA_KV_DTYPE CLA_Q_DTYPE
#include "core/storage.clh"

/* max(largest, |x|) over the finite elements of x */
static inline float4 cla_grow(float4 largest, float4 x) {
  const float4 magnitude = fabs(x);
  return select(largest, fmax(largest, magnitude), isless(magnitude, (float4)(INFINITY)));
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_kv_scales_amax(
    __global const CLA_Q_T* restrict x, /* [tokens, row_units * 8], rows contiguous */
    long offset,                        /* elements */
    long token_stride,                  /* elements */
    int num_tokens,                     /* tokens */
    int row_units,                      /* units of 8 elements */
    __global volatile uint* amax,       /* [3] */
    int which) {
#if CLA_WG_SIZE > 1
  __local float partial[CLA_WG_SIZE];
#endif
  const uint units = (uint)row_units;
  const ulong count = (ulong)num_tokens * units;
  float4 largest = (float4)(0.0f);
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const ulong token = unit / units;
    const ulong at = (ulong)offset + token * (ulong)token_stride + unit % units * 8;
    const ClaF8 cells = CLA_Q_LOAD8(x + at);
    largest = cla_grow(cla_grow(largest, cells.lo), cells.hi);
  }
  float value = fmax(fmax(largest.x, largest.y), fmax(largest.z, largest.w));
#if CLA_WG_SIZE > 1
  const uint lane = (uint)get_local_id(0);
  partial[lane] = value;
  barrier(CLK_LOCAL_MEM_FENCE); /* partial written -> read */
  for (uint step = CLA_WG_SIZE / 2; step > 0; step /= 2) {
    if (lane < step) partial[lane] = fmax(partial[lane], partial[lane + step]);
    barrier(CLK_LOCAL_MEM_FENCE); /* this step's sums -> the next's */
  }
  value = partial[0];
  if (lane != 0) return;
#endif
  atomic_max(amax + which, as_uint(value));
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void clattn_kv_scales_finish(
    __global const uint* restrict amax, /* [3] */
    float k_constant, float v_constant, float q_constant,
    __global float* restrict scales) { /* [3]: K and V as the cache holds them, then Q */
  const float constants[3] = {k_constant, v_constant, q_constant};
  for (uint i = 0; i < 3; ++i) {
    const float scale = as_float(amax[i]) / constants[i];
    scales[i] = scale > 0.0f ? scale : 1.0f;
  }
}
