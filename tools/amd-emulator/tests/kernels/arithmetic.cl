// Arithmetic that compilers seldom ask for.
#if __AMDGCN_WAVEFRONT_SIZE == 64
#define CARRY "vcc"
#define SUM_I16 "v_add_i16"
#define DIFFERENCE_U16 "v_sub_u16"
#else
#define CARRY "vcc_lo"
#define SUM_I16 "v_add_nc_i16"
#define DIFFERENCE_U16 "v_sub_nc_u16"
#endif
#define SET_MODE(FIRST, SIZE, VALUE) \
  __asm__ volatile("s_setreg_imm32_b32 hwreg(1, " #FIRST ", " #SIZE "), " #VALUE)

// Sums and differences that saturate, of 32 bits, of 16 and of two halves; and with a carry.
__kernel void saturating(__global const int* as, __global const int* bs, __global int* out) {
  const size_t n = get_global_id(0);
  __global int* r = out + n * 9;
  const int a = as[n], b = bs[n];
  r[0] = __builtin_elementwise_add_sat(a, b);
  r[1] = __builtin_elementwise_sub_sat(a, b);
  r[2] = (int)__builtin_elementwise_add_sat((uint)a, (uint)b);
  r[3] = (int)__builtin_elementwise_sub_sat((uint)a, (uint)b);
  r[4] = as_int(__builtin_elementwise_add_sat(as_short2(a), as_short2(b)));
  r[5] = as_int(__builtin_elementwise_sub_sat(as_ushort2(a), as_ushort2(b)));
  int sum16, difference16, difference;
  __asm__(SUM_I16 " %0, %1, %2 clamp" : "=v"(sum16) : "v"(a), "v"(b));
  __asm__(DIFFERENCE_U16 " %0, %1, %2 clamp" : "=v"(difference16) : "v"(a), "v"(b));
  __asm__("v_sub_co_u32 %0, " CARRY ", %1, %2 clamp" : "=v"(difference) : "v"(a), "v"(b) : "vcc");
  r[6] = (short)sum16;
  r[7] = (ushort)difference16;
  r[8] = difference;
}

__kernel void fractions(__global const double* a, __global double* out) {
  out[get_global_id(0)] = __builtin_amdgcn_fract(a[get_global_id(0)]);
}

// The first wave has denormals flushed; the second, which runs while it waits, does not.
__attribute__((reqd_work_group_size(128, 1, 1))) __kernel void denormals(__global const float* a,
                                                                         __global float* out) {
  const uint id = get_local_id(0);
  if (__builtin_amdgcn_readfirstlane((int)id) == 0) SET_MODE(4, 2, 0);
  barrier(CLK_LOCAL_MEM_FENCE);
  out[id] = a[id] * 0.5f;
  barrier(CLK_LOCAL_MEM_FENCE);
  SET_MODE(4, 2, 3);
}

#if defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__)
// Too large for 8 bits: as the hardware does by itself, then with FP16_OVFL.
__kernel void small_floats(__global const float* a, __global uint* out) {
  const size_t n = get_global_id(0);
  out[n * 2] = (uint)__builtin_amdgcn_cvt_pk_fp8_f32(a[n], a[n], 0, false) & 0xff;
  out[n * 2] |= ((uint)__builtin_amdgcn_cvt_pk_bf8_f32(a[n], a[n], 0, false) & 0xff) << 8;
  SET_MODE(23, 1, 1);
  uint fp8, bf8;
  __asm__ volatile("v_cvt_pk_fp8_f32 %0, %1, %1" : "=v"(fp8) : "v"(a[n]));
  __asm__ volatile("v_cvt_pk_bf8_f32 %0, %1, %1" : "=v"(bf8) : "v"(a[n]));
  SET_MODE(23, 1, 0);
  out[n * 2 + 1] = (fp8 & 0xff) | (bf8 & 0xff) << 8;
}
#endif
