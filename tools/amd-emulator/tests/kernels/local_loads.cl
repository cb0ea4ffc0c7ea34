// CDNA 3 and 4: global memory straight to local memory, at M0 + the instruction's offset + what a
// lane loads times the lane. By assembly, as clang 19's scheduler crashes on
// __builtin_amdgcn_global_load_lds (-mllvm -disable-post-ra avoids it).
#define LOAD(TEXT, M0, ...) \
  __asm__ volatile("s_mov_b32 m0, %0\n s_nop 0\n " TEXT : : "s"(M0), __VA_ARGS__ : "memory")
#define WAIT() __asm__ volatile("s_waitcnt vmcnt(0)" : : : "memory")
#define WAVE __attribute__((reqd_work_group_size(64, 1, 1))) __kernel void

WAVE to_local(__global const uint* a, __global uint* d) {
  __local uint tile[320];
  const uint lane = get_local_id(0), at = (uint)(size_t)tile, bytes = lane * 4;
  for (int n = 0; n < 5; ++n) tile[lane + 64 * n] = 5555;
  barrier(CLK_LOCAL_MEM_FENCE);
  LOAD("global_load_lds_dword %1, off", at, "v"(a + lane * 3));
  LOAD("global_load_lds_dword %1, %2 offset:256", at, "v"(bytes), "s"(a));
  LOAD("global_load_lds_ushort %1, off", at + 512, "v"(a + lane));
  LOAD("global_load_lds_sbyte %1, off", at + 768, "v"(a + lane));
  if (lane % 3 == 0)  // lanes that exec leaves out write nothing
    LOAD("global_load_lds_ubyte %1, off", at + 1024, "v"(a + lane));
  WAIT();
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int n = 0; n < 5; ++n) d[lane * 5 + n] = tile[lane + 64 * n];
}

#ifdef __gfx950__
typedef short short4_t __attribute__((ext_vector_type(4)));
typedef uint uint2_t __attribute__((ext_vector_type(2)));
// Wide loads to local memory, loads that transpose, lane swaps, v_bitop3.
WAVE gfx950(__global const uint* a, __global uint* d) {
  __local uint tile[1024];
  __local short rows[256];
  const uint lane = get_local_id(0), at = (uint)(size_t)tile;
  for (int n = 0; n < 16; ++n) tile[lane + 64 * n] = 5555;
  for (int n = 0; n < 4; ++n) rows[lane + 64 * n] = (short)(lane + 64 * n);
  barrier(CLK_LOCAL_MEM_FENCE);
  LOAD("global_load_lds_dwordx4 %1, off", at, "v"(a + lane * 4));
  LOAD("global_load_lds_dwordx3 %1, off offset:16", at + 1024 - 16, "v"(a + lane * 3));
  WAIT();
  barrier(CLK_LOCAL_MEM_FENCE);
  d[lane] = tile[255 - lane], d[64 + lane] = tile[256 + 4 + lane];
  const uint2_t s32 = __builtin_amdgcn_permlane32_swap(lane, lane + 100, false, false);
  const uint2_t s16 = __builtin_amdgcn_permlane16_swap(lane, lane + 100, false, false);
  d[128 + lane] = s32[0] << 16 | s32[1], d[192 + lane] = s16[0] << 16 | s16[1];
  // 16 lanes read 4 rows of 16 elements; each gets a column.
  const short4_t column =
      __builtin_amdgcn_ds_read_tr16_b64_v4i16((__local short4_t*)(rows + lane * 4));
  for (int e = 0; e < 4; ++e) d[256 + lane * 4 + e] = (uint)column[e];
  d[512 + lane] = (lane & 0xf0f) ^ (a[lane] | ~a[lane + 1]);  // v_bitop3
}
#endif
