// What lies beside matrix products in an attention kernel: work across lanes, local memory between
// waves, atomics, private memory. Each writes words that test_lanes.cpp can predict.
__attribute__((reqd_work_group_size(128, 1, 1))) __kernel void lanes(__global uint* out,
                                                                     __global uint* counter,
                                                                     __local uint* shared) {
  const uint id = get_local_id(0), group = get_group_id(0);
  __global uint* mine = out + (group * 128 + id) * 8;
  mine[0] = (uint)__builtin_amdgcn_ds_bpermute((int)((id ^ 5) * 4), (int)(id * 3));
  mine[1] = (uint)__builtin_amdgcn_ds_swizzle((int)id, 0x041f);                        // id ^ 1
  mine[2] = (uint)__builtin_amdgcn_update_dpp(7777, (int)id, 0x111, 0xf, 0xf, false);  // row_shr:1
  mine[3] = (uint)__builtin_amdgcn_readfirstlane((int)id);
  shared[id] = id * id;
  barrier(CLK_LOCAL_MEM_FENCE);
  mine[4] = shared[127 - id];  // from another wave
  atomic_add(counter, id);
  uint table[24];  // private memory, by an index that is not known
  for (uint n = 0; n < 24; ++n) table[n] = n * 10 + id;
  mine[5] = table[(id * 7 + group) % 24];
  mine[6] = as_uint((float)id / 7.0f);
  mine[7] = as_uint(native_exp2((float)id * 0.125f));
}

// An instruction that no lane executes writes nothing, whatever an earlier wave's last mask was.
#if __AMDGCN_WAVEFRONT_SIZE == 64
__attribute__((reqd_work_group_size(64, 1, 1))) __kernel void empty_exec(__global uint* d) {
  uint x = 7, y = 8;
  __asm__ volatile(
      "s_mov_b64 s[20:21], exec\n s_mov_b64 exec, 0\n v_mov_b32 %0, 9\n s_mov_b64 exec, s[20:21]"
      : "+v"(x)
      :
      : "s20", "s21");
  __asm__ volatile(
      "s_mov_b64 s[20:21], exec\n s_mov_b64 exec, 21\n v_mov_b32 %0, 9\n s_mov_b64 exec, s[20:21]"
      : "+v"(y)
      :
      : "s20", "s21");
  d[get_global_id(0)] = x * 100 + y;
}
#endif
