// Kernels that do what the emulator must not let pass.
__kernel void global_memory(__global int* a, long at) {
  a[at] = 1;
}
__kernel void local_memory(__global int* a, long at, __local int* tile) {
  tile[at] = a[0];
  a[0] = tile[at];
}
__kernel void private_memory(__global int* a, long at) {
  volatile int table[16];
  for (int n = 0; n < 16; ++n) table[n] = a[n];
  a[0] = table[at];
}
__kernel void unaligned_atomic(__global int* a, long at) {
  atomic_add((__global int*)((__global char*)a + at), 1);
}
__kernel void unknown(__global int* a, long at) {
  int r;
  __asm__ volatile("v_sad_u8 %0, %1, %1, %1" : "=v"(r) : "v"((int)at));
  a[0] = r;
}
__kernel void rounding(__global int* a, long at) {
  __asm__ volatile("s_setreg_imm32_b32 hwreg(1, 0, 2), 1");  // MODE
  a[0] = (int)at;
}
// Clamp of an integer that is neither a sum nor a difference.
__kernel void clamped(__global int* a, long at) {
  int r;
  __asm__ volatile("v_mad_u32_u24 %0, %1, %1, %1 clamp" : "=v"(r) : "v"((int)at));
  a[0] = r;
}
