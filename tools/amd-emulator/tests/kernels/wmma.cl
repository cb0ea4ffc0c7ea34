// One wave of 32 multiplies a 16x16 tile with the matrix instructions of RDNA 3 (gfx11) or RDNA 4
// (gfx12). Which lane holds what: README.md. The data lie in memory as A[row][k], B[k][column],
// D[row][column].
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half half8_t __attribute__((ext_vector_type(8)));
typedef half half16_t __attribute__((ext_vector_type(16)));
typedef short short8_t __attribute__((ext_vector_type(8)));
typedef short short16_t __attribute__((ext_vector_type(16)));
typedef float float8_t __attribute__((ext_vector_type(8)));
typedef int int2_t __attribute__((ext_vector_type(2)));
typedef int int4_t __attribute__((ext_vector_type(4)));
typedef int int8_t __attribute__((ext_vector_type(8)));
#define WAVE __attribute__((reqd_work_group_size(32, 1, 1))) __kernel void

#ifdef __gfx1100__
#define HALVES half16_t
#define SHORTS short16_t
#define BYTES int4_t
#define PER_LANE 16
#define FIRST_K(lane) 0 /* lanes 16 to 31 repeat lanes 0 to 15 */
#define ROW(lane, r) (2 * (r) + (lane) / 16)
#define BUILTIN(NAME) __builtin_amdgcn_wmma_##NAME##_w32
#else
#define HALVES half8_t
#define SHORTS short8_t
#define BYTES int2_t
#define PER_LANE 8
#define FIRST_K(lane) (8 * ((lane) / 16))
#define ROW(lane, r) (8 * ((lane) / 16) + (r))
#define BUILTIN(NAME) __builtin_amdgcn_wmma_##NAME##_w32_gfx12
#endif

#define PRODUCT(NAME, T, OPERAND, R, RS, CALL)                                    \
  WAVE NAME(__global const T* a, __global const T* b, __global R* d, int steps) { \
    const int lane = get_local_id(0);                                             \
    RS sum = (RS)(0);                                                             \
    for (int step = 0; step < steps; ++step) {                                    \
      T xs[PER_LANE], ys[PER_LANE];                                               \
      for (int e = 0; e < PER_LANE; ++e) {                                        \
        const int k = step * 16 + FIRST_K(lane) + e;                              \
        xs[e] = a[lane % 16 * steps * 16 + k];                                    \
        ys[e] = b[k * 16 + lane % 16];                                            \
      }                                                                           \
      const OPERAND x = *(OPERAND*)xs, y = *(OPERAND*)ys;                         \
      sum = CALL;                                                                 \
    }                                                                             \
    for (int r = 0; r < 8; ++r) d[ROW(lane, r) * 16 + lane % 16] = sum[r];        \
  }
PRODUCT(f16_16x16x16, half, HALVES, float, float8_t, BUILTIN(f32_16x16x16_f16)(x, y, sum))
PRODUCT(bf16_16x16x16, short, SHORTS, float, float8_t, BUILTIN(f32_16x16x16_bf16)(x, y, sum))
PRODUCT(i8_16x16x16, char, BYTES, int, int8_t,
        BUILTIN(i32_16x16x16_iu8)(true, x, true, y, sum, false))
#ifdef __gfx1100__
// Lanes 16 to 31 do not repeat the others.
WAVE unrepeated(__global float* d) {
  const int lane = get_local_id(0);
  const half16_t x = (half16_t)(half)lane;
  const float8_t sum = BUILTIN(f32_16x16x16_f16)(x, x, (float8_t)(0.0f));
  d[lane] = sum[0];
}
#else
PRODUCT(fp8_fp8_16x16x16, uchar, BYTES, float, float8_t, BUILTIN(f32_16x16x16_fp8_fp8)(x, y, sum))
PRODUCT(bf8_bf8_16x16x16, uchar, BYTES, float, float8_t, BUILTIN(f32_16x16x16_bf8_bf8)(x, y, sum))
#endif
