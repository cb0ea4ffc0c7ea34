// Asks a device what it really does, whatever it reports. Each kernel is built alone, under its
// value of CLA_SELFTEST; a build that fails is the answer "no".
//
//   CLA_SELFTEST     1 = static local memory, 2 = inline PTX and its warp, 3 = sub-groups
//   CLA_WG_SIZE      work-items of a group, a power of two
//   CLA_LOCAL_BYTES  size of the local array, a multiple of 4 * CLA_WG_SIZE (CLA_SELFTEST 1 only)
#if !defined(CLA_SELFTEST) || !defined(CLA_WG_SIZE) || !defined(CLA_LOCAL_BYTES)
#error "a macro of the table above is missing"
#endif

#if CLA_SELFTEST == 1

#define CLA_CELLS (CLA_LOCAL_BYTES / 4u)

// Fills the array, then every item reads the cells that its mirror image wrote and counts the right
// ones.
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_selftest_local(
    __global
        uint* restrict right,  // [groups, CLA_WG_SIZE]  CLA_CELLS / CLA_WG_SIZE when all is well
    uint seed) {
  __local uint cells[CLA_CELLS];
  const uint lane = (uint)get_local_id(0);
  const uint salt = seed + (uint)get_group_id(0);
  for (uint i = lane; i < CLA_CELLS; i += CLA_WG_SIZE) cells[i] = i * 2654435761u + salt;
  barrier(CLK_LOCAL_MEM_FENCE);  // cells written -> read
  uint count = 0;
  for (uint i = lane; i < CLA_CELLS; i += CLA_WG_SIZE) {
    const uint mirror = CLA_CELLS - 1u - i;
    count += cells[mirror] == mirror * 2654435761u + salt ? 1u : 0u;
  }
  right[get_global_id(0)] = count;
}

#elif CLA_SELFTEST == 2

// A butterfly sum over the warp, in PTX.
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_selftest_wave(
    __global uint* restrict result,  // [3, CLA_WG_SIZE]  lanes of the item's warp, its number, sum
                                     // of its seed + lane
    uint seed) {
  const uint lane = (uint)get_local_id(0);
  uint width;
  asm volatile("mov.u32 %0, WARP_SZ;" : "=r"(width));
  uint sum = seed + lane;
  for (uint offset = width / 2u; offset > 0u; offset /= 2u) {
    uint other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;"
                 : "=r"(other)
                 : "r"(sum), "r"(offset));
    asm volatile("add.u32 %0, %1, %2;" : "=r"(sum) : "r"(sum), "r"(other));
  }
  result[lane] = width;
  result[CLA_WG_SIZE + lane] = lane / width;
  result[2u * CLA_WG_SIZE + lane] = sum;
}

#elif CLA_SELFTEST == 3

// These names are the compiler's, so they may be undefined.
#ifdef cl_intel_subgroups
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
#endif
#ifdef cl_khr_subgroups
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_selftest_wave(
    __global uint* restrict result,  // [3, CLA_WG_SIZE]  lanes of the item's sub-group, its number,
                                     // sum of its seed + lane
    uint seed) {
  const uint lane = (uint)get_local_id(0);
  const uint sum = sub_group_reduce_add(seed + lane);
  result[lane] = get_max_sub_group_size();
  result[CLA_WG_SIZE + lane] = get_sub_group_id();
  result[2u * CLA_WG_SIZE + lane] = sum;
}

#else
#error "CLA_SELFTEST is 1, 2 or 3"
#endif
