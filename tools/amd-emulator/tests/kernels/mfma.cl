// One wave multiplies tiles with the matrix instructions of CDNA. Which lane holds what: README.md.
// The data lie in memory as A[row][k], B[k][column], D[row][column].
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half half4_t __attribute__((ext_vector_type(4)));
typedef half half8_t __attribute__((ext_vector_type(8)));
typedef short short4_t __attribute__((ext_vector_type(4)));
typedef __bf16 bf16x8_t __attribute__((ext_vector_type(8)));
typedef float float4_t __attribute__((ext_vector_type(4)));
typedef float float16_t __attribute__((ext_vector_type(16)));
typedef int int4_t __attribute__((ext_vector_type(4)));
typedef double double4_t __attribute__((ext_vector_type(4)));
#define WAVE __attribute__((reqd_work_group_size(64, 1, 1))) __kernel void

// D of 32x32 and of 16x16: the row of result r. That of f64 goes by fours.
#define ROW_32(lane, r) (8 * ((r) / 4) + 4 * ((lane) / 32) + (r) % 4)
#define ROW_16(lane, r) (4 * ((lane) / 16) + (r))
#define ROW_F64(lane, r) (4 * (r) + (lane) / 16)

// SIZE x SIZE results of type R in vectors RS; each lane gives PER_LANE elements of type T as one
// operand of type OPERAND.
#define PRODUCT(NAME, SIZE, ROW, T, OPERAND, PER_LANE, R, RS, BUILTIN)                        \
  WAVE NAME(__global const T* a, __global const T* b, __global R* d, int steps) {             \
    const int lane = get_local_id(0), k_step = 64 / SIZE * PER_LANE;                          \
    RS sum = (RS)(0);                                                                         \
    for (int step = 0; step < steps; ++step) {                                                \
      T x[PER_LANE], y[PER_LANE];                                                             \
      for (int e = 0; e < PER_LANE; ++e) {                                                    \
        const int k = step * k_step + PER_LANE * (lane / SIZE) + e;                           \
        x[e] = a[lane % SIZE * steps * k_step + k];                                           \
        y[e] = b[k * SIZE + lane % SIZE];                                                     \
      }                                                                                       \
      sum = BUILTIN(*(OPERAND*)x, *(OPERAND*)y, sum, 0, 0, 0);                                \
    }                                                                                         \
    for (int r = 0; r < SIZE * SIZE / 64; ++r) d[ROW(lane, r) * SIZE + lane % SIZE] = sum[r]; \
  }
#define PRODUCT_32(NAME, T, OPERAND, PER_LANE, BUILTIN) \
  PRODUCT(NAME, 32, ROW_32, T, OPERAND, PER_LANE, float, float16_t, BUILTIN)
#define PRODUCT_16(NAME, T, OPERAND, PER_LANE, BUILTIN) \
  PRODUCT(NAME, 16, ROW_16, T, OPERAND, PER_LANE, float, float4_t, BUILTIN)

PRODUCT_32(f16_32x32x8, half, half4_t, 4, __builtin_amdgcn_mfma_f32_32x32x8f16)
PRODUCT_16(f16_16x16x16, half, half4_t, 4, __builtin_amdgcn_mfma_f32_16x16x16f16)
PRODUCT_32(bf16_32x32x8, short, short4_t, 4, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k)
PRODUCT_16(bf16_16x16x16, short, short4_t, 4, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
PRODUCT_32(f32_32x32x2, float, float, 1, __builtin_amdgcn_mfma_f32_32x32x2f32)
PRODUCT_16(f32_16x16x4, float, float, 1, __builtin_amdgcn_mfma_f32_16x16x4f32)
PRODUCT(f64_16x16x4, 16, ROW_F64, double, double, 1, double, double4_t,
        __builtin_amdgcn_mfma_f64_16x16x4f64)

// 16 products of 4x4 at once: A[block][row][k], B[block][k][column], D[block][row][column].
WAVE blocks_4x4x4(__global const half* a, __global const half* b, __global float* d) {
  const int lane = get_local_id(0), block = lane / 4, in = lane % 4;
  half4_t x, y;
  for (int e = 0; e < 4; ++e) {
    x[e] = a[block * 16 + in * 4 + e];
    y[e] = b[block * 16 + e * 4 + in];
  }
  const float4_t sum = __builtin_amdgcn_mfma_f32_4x4x4f16(x, y, (float4_t)(0.0f), 0, 0, 0);
  for (int r = 0; r < 4; ++r) d[block * 16 + r * 4 + in] = sum[r];
}
// 4 of f64, in the same order.
WAVE blocks_f64_4x4x4(__global const double* a, __global const double* b, __global double* d) {
  const int lane = get_local_id(0), block = lane / 4 % 4, in = lane % 4, k = lane / 16;
  d[block * 16 + k * 4 + in] = __builtin_amdgcn_mfma_f64_4x4x4f64(
      a[block * 16 + in * 4 + k], b[block * 16 + k * 4 + in], 0.0, 0, 0, 0);
}

#ifdef __gfx90a__
PRODUCT(i8_16x16x16, 16, ROW_16, char, int, 4, int, int4_t, __builtin_amdgcn_mfma_i32_16x16x16i8)
#else
PRODUCT(i8_16x16x32, 16, ROW_16, char, long, 8, int, int4_t, __builtin_amdgcn_mfma_i32_16x16x32_i8)
PRODUCT_32(fp8_fp8_32x32x16, uchar, long, 8, __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8)
PRODUCT_32(fp8_bf8_32x32x16, uchar, long, 8, __builtin_amdgcn_mfma_f32_32x32x16_fp8_bf8)
PRODUCT_32(bf8_fp8_32x32x16, uchar, long, 8, __builtin_amdgcn_mfma_f32_32x32x16_bf8_fp8)
PRODUCT_32(bf8_bf8_32x32x16, uchar, long, 8, __builtin_amdgcn_mfma_f32_32x32x16_bf8_bf8)
PRODUCT_16(fp8_fp8_16x16x32, uchar, long, 8, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8)
PRODUCT_16(fp8_bf8_16x16x32, uchar, long, 8, __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8)
PRODUCT_16(bf8_fp8_16x16x32, uchar, long, 8, __builtin_amdgcn_mfma_f32_16x16x32_bf8_fp8)
PRODUCT_16(bf8_bf8_16x16x32, uchar, long, 8, __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8)
#endif
#ifdef __gfx950__
PRODUCT_32(f16_32x32x16, half, half8_t, 8, __builtin_amdgcn_mfma_f32_32x32x16_f16)
PRODUCT_32(bf16_32x32x16, short, bf16x8_t, 8, __builtin_amdgcn_mfma_f32_32x32x16_bf16)
PRODUCT_16(f16_16x16x32, half, half8_t, 8, __builtin_amdgcn_mfma_f32_16x16x32_f16)
PRODUCT_16(bf16_16x16x32, short, bf16x8_t, 8, __builtin_amdgcn_mfma_f32_16x16x32_bf16)
#endif
