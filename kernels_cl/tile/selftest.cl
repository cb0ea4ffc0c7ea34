// Asks a device what it really does, whatever it reports. Each kernel is built alone, under its
// value of CLA_SELFTEST; a build that fails is the answer "no".
//
//   CLA_SELFTEST     1 = static local memory, 2 = inline PTX and its warp, 3 = sub-groups,
//                    4 = warpgroup products behind marks (src/opencl/program/program.hpp),
//                    5 = PTX's conversion of e4m3, 6 = x86's products of bf16 pairs,
//                    7 = accuracy of native_exp2, 8 = built-ins of a processor's compiler,
//                    9 = loops of many steps, 10 = a struct by value,
//                    11 = sub-groups of CLA_SUB_GROUP that run in step,
//                    12 = x86's prefetch as assembly
//   CLA_WG_SIZE      work-items of a group, a power of two
//   CLA_LOCAL_BYTES  size of the local array, a multiple of 4 * CLA_WG_SIZE (CLA_SELFTEST 1 only)
#if !defined(CLA_SELFTEST) || !defined(CLA_WG_SIZE) || !defined(CLA_LOCAL_BYTES)
#error "a macro of the table above is missing"
#endif

#if CLA_SELFTEST == 11
#define CLA_PTX 2
#elif CLA_SELFTEST == 12
#define CLA_X86_PREFETCH 1
#endif

#if CLA_SELFTEST == 6
#include "tile/cpu/avx512_bf16.clh"
#elif CLA_SELFTEST == 10
#include "shared/call.h"
#elif CLA_SELFTEST == 11
#include "tile/lanes.clh"
#elif CLA_SELFTEST == 12
#include "core/native.clh"
#endif

// What a kernel answers: seed + lane in result[CLA_WG_SIZE] where all is well, if it says no other.
#define CLA_SELFTEST_KERNEL(name)                                              \
  __kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void name( \
      __global uint* restrict result, uint seed)

#if CLA_SELFTEST == 1

#define CLA_CELLS (CLA_LOCAL_BYTES / 4u)

// Fills the array, then every item reads the cells that its mirror image wrote and counts the right
// ones: result[groups, CLA_WG_SIZE] is CLA_CELLS / CLA_WG_SIZE when all is well.
CLA_SELFTEST_KERNEL(clattn_selftest_local) {
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
  result[get_global_id(0)] = count;
}

#elif CLA_SELFTEST == 2

// A butterfly sum over the warp, in PTX. result[3, CLA_WG_SIZE]: lanes of the item's warp, its
// number, sum of its seed + lane.
CLA_SELFTEST_KERNEL(clattn_selftest_wave) {
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

// As with 2, of the item's sub-group.
CLA_SELFTEST_KERNEL(clattn_selftest_wave) {
  const uint lane = (uint)get_local_id(0);
  const uint sum = sub_group_reduce_add(seed + lane);
  result[lane] = get_max_sub_group_size();
  result[CLA_WG_SIZE + lane] = get_sub_group_id();
  result[2u * CLA_WG_SIZE + lane] = sum;
}

#elif CLA_SELFTEST == 4

// D = A B, 64 x 8, by one warpgroup: A[r][c] is 1 where c = r mod 16, B[c][n] = 8 c + n + seed mod
// 64, so that D[r][n] = B[r mod 16][n]. Rows of local memory are 16 elements in core matrices of 8
// rows x 16 bytes, those of columns 8 ... 15 behind all of columns 0 ... 7.
CLA_SELFTEST_KERNEL(clattn_selftest_products) {
  __local ushort a[64 * 16] __attribute__((aligned(128)));
  __local ushort b[8 * 16] __attribute__((aligned(128)));
  const uint lane = (uint)get_local_id(0);
  for (uint i = lane; i < 64 * 16; i += CLA_WG_SIZE) {
    const uint row = i % 512 / 8;
    const uint column = i / 512 * 8 + i % 8;
    vstore_half(column == row % 16 ? 1.0f : 0.0f, i, (__local half*)a);
  }
  for (uint i = lane; i < 8 * 16; i += CLA_WG_SIZE) {
    const uint n = i % 64 / 8;
    const uint row = i / 64 * 8 + i % 8;
    vstore_half((float)(8 * row + n + seed % 64), i, (__local half*)b);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  barrier(CLK_LOCAL_MEM_FENCE);  // a and b written -> read
  const ulong a_at = (uint)(ulong)a >> 4 | (ulong)64 << 16 | (ulong)8 << 32;
  const ulong b_at = (uint)(ulong)b >> 4 | (ulong)8 << 16 | (ulong)8 << 32;
  float d0 = 0.0f, d1 = 0.0f, d2 = 0.0f, d3 = 0.0f;
  asm volatile("//@sm_90a wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "//@sm_90a wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, "
      "1, 0, 0;"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "l"(a_at), "l"(b_at));
  asm volatile("//@sm_90a wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("//@sm_90a wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3));
  const uint row = lane % 128 / 32 * 16 + lane % 32 / 4;
  const float first = (float)(8 * (row % 16) + lane % 4 * 2 + seed % 64);
  const float below = (float)(8 * ((row + 8) % 16) + lane % 4 * 2 + seed % 64);
  const int right = d0 == first && d1 == first + 1.0f && d2 == below && d3 == below + 1.0f;
  result[lane] = right ? seed + lane : 0;
}

#elif CLA_SELFTEST == 5

// Converts a pair of e4m3: the item's number as its bits, and 1.
CLA_SELFTEST_KERNEL(clattn_selftest_fp8) {
  const uint lane = (uint)get_local_id(0);
  const uint bits = lane % 64u;
  const int exponent = (int)(bits / 8u);
  uint pair;
  asm volatile("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n cvt.rn.f16x2.e4m3x2 %0, lo;}"
               : "=r"(pair)
               : "r"(0x3800u | bits));
  const float fraction = (float)(exponent == 0 ? bits : 8u + bits % 8u);
  const float value = ldexp(fraction, max(exponent, 1) - 10);
  const float2 got = vload_half2(0, (const __private half*)&pair);
  result[lane] = got.x == value && got.y == 1.0f ? seed + lane : 0u;
}

#elif CLA_SELFTEST == 6

#if !defined(__SPIR64__) && \
    (!defined(__x86_64__) || !defined(__AVX512F__) || !defined(__AVX512BW__))
#error "these registers are not for this compiler"
#endif

// Runs an instruction with eax and ecx of `registers`, and returns eax, ebx, ecx and edx. Compilers
// that target SPIR know no constraint for these, so the assembly saves and restores them itself, on
// the stack below the red zone.
#define CLA_BY_NAME(name, instruction)                                                  \
  uint4 name(uint4 registers) {                                                         \
    __asm__ volatile(                                                                   \
        "leaq -128(%%rsp), %%rsp\npushq %%rax\npushq %%rbx\npushq %%rcx\npushq %%rdx\n" \
        "pushq %%rsi\npushq %0\npopq %%rsi\nmovl (%%rsi), %%eax\nmovl 8(%%rsi), "       \
        "%%ecx\n" instruction                                                           \
        "\nmovl %%eax, (%%rsi)\nmovl %%ebx, 4(%%rsi)\nmovl %%ecx, 8(%%rsi)\n"           \
        "movl %%edx, 12(%%rsi)\npopq %%rsi\npopq %%rdx\npopq %%rcx\npopq %%rbx\n"       \
        "popq %%rax\nleaq 128(%%rsp), %%rsp" ::"r"((ulong)(size_t)&registers)           \
        : "memory");                                                                    \
    return registers;                                                                   \
  }
CLA_BY_NAME(cla_cpuid, "cpuid")
CLA_BY_NAME(cla_rdtsc, "lfence\nrdtsc")

// The processor may be newer or older than the one that the compiler aims at.
int cla_has_products(void) {
  const uint4 first = cla_cpuid((uint4)(7, 0, 0, 0));
  if (first.s0 < 1u) return 0;
  const uint4 second = cla_cpuid((uint4)(7, 0, 1, 0));
  return (first.s2 >> 1 & second.s0 >> 5 & 1u) != 0u;  // AVX512_VBMI, AVX512_BF16
}

ulong cla_cycles(void) {
  const uint4 registers = cla_rdtsc((uint4)(0u));
  return (ulong)registers.s3 << 32 | registers.s0;
}

// The cycles of 256 times 8 independent instructions that add a * b to sum[8].
#define CLA_SUM(i) "+" CLA_IN_VECTOR(sum[i])
#define CLA_TIMED(name, type, instruction)                                                       \
  ulong name(float16* sum, type a, type b) {                                                     \
    const ulong start = cla_cycles();                                                            \
    for (int i = 0; i < 256; ++i)                                                                \
      __asm__ volatile(instruction " %9, %8, %0\n" instruction " %9, %8, %1\n" instruction       \
                                   " %9, %8, %2\n" instruction " %9, %8, %3\n" instruction       \
                                   " %9, %8, %4\n" instruction " %9, %8, %5\n" instruction       \
                                   " %9, %8, %6\n" instruction " %9, %8, %7"                     \
                       : CLA_SUM(0), CLA_SUM(1), CLA_SUM(2), CLA_SUM(3), CLA_SUM(4), CLA_SUM(5), \
                         CLA_SUM(6), CLA_SUM(7)                                                  \
                       : "v"(a), "v"(b));                                                        \
    return cla_cycles() - start;                                                                 \
  }
CLA_TIMED(cla_time_products, uint16, "vdpbf16ps")
CLA_TIMED(cla_time_multiply_adds, float16, "vfmadd231ps")

// Products of pairs pay where they take less than one and a half times a multiply-add of half as
// many elements. Some processors take four times as long.
CLA_SELFTEST_KERNEL(clattn_selftest_bf16) {
  const uint lane = (uint)get_local_id(0);
  result[lane] = 0;
  if (!cla_has_products()) return;
  float16 products[8], sums[8];
  for (int i = 0; i < 8; ++i) products[i] = sums[i] = (float16)(0.0f);
  ulong best = ULONG_MAX, fma_best = ULONG_MAX;
  for (int i = 0; i < 32; ++i) {
    best = min(best, cla_time_products(products, (uint16)(0x3f804000), (uint16)(0x40403f80)));
    fma_best = min(fma_best, cla_time_multiply_adds(sums, (float16)(1.0f), (float16)(5.0f)));
  }
  const uint pair = 0x40403f80u;
  int right = 2 * best <= 3 * fma_best &&
              all(cla_dot_with((float16)(0.0f), (uint16)(0x3f804000), &pair) == 5.0f);
  for (int i = 0; i < 8; ++i) {  // 1 * 3 + 2 * 1, and 1 * 5
    right = right && all(products[i] == 32 * 256 * 5.0f) && all(sums[i] == 32 * 256 * 5.0f);
  }
  uchar bytes[128] __attribute__((aligned(64)));
  for (uint i = 0; i < 128; ++i) bytes[i] = (uchar)(i ^ seed);
  uint16 found = (uint16)(0x85c7037f);
  __asm__("vpermi2b %2, %1, %0"
          : "+" CLA_IN_VECTOR(found)
          : "v"(vload16(0, (const uint*)bytes)), "v"(vload16(1, (const uint*)bytes)));
  right = right && all(found == (0x0547037fu ^ (seed & 0xffu) * 0x01010101u));
  result[lane] = right ? seed + lane : 0u;
}

#elif CLA_SELFTEST == 7

// 2^x from 0 down in steps of 1 / 512, and of what lies below every logit. result[groups *
// CLA_WG_SIZE]: bits of the powers.
CLA_SELFTEST_KERNEL(clattn_selftest_exp2) {
  const uint i = (uint)get_global_id(0);
  const int last = i + 1u == (uint)get_global_size(0);
  result[i] = as_uint(native_exp2(last ? -1e30f : (float)i * (-1.0f / 512.0f)));
}

#elif CLA_SELFTEST == 8

// Clang has these built-ins, and OpenCL C has not. Compilers that aim at SPIR accept them, too, but
// make calls of them that nobody knows, and some end the process; so they are shown to compilers
// that aim at a processor alone.
#if !defined(__x86_64__) && !defined(__i386__) && !defined(__aarch64__) && !defined(__arm__) && \
    !defined(__powerpc64__) && !defined(__riscv)
#error "these built-ins are not for this compiler"
#endif

CLA_SELFTEST_KERNEL(clattn_selftest_builtins) {
  const uint lane = (uint)get_local_id(0);
  __builtin_prefetch((const void*)(size_t)(result + lane), 0, 2);
  int right = 1;
#if defined(__F16C__) || defined(__ARM_FP16_FORMAT_IEEE)
  typedef __fp16 half_vector __attribute__((ext_vector_type(8)));
  const float8 numbers = convert_float8((int8)(0, 1, 2, 3, -4, 5, -6, 7) * (int)(seed % 256u));
  const half_vector halves = __builtin_convertvector(numbers, half_vector);
  ushort bits[8];
  vstore_half8_rte(numbers, 0, (half*)bits);
  right = all(vload8(0, bits) == __builtin_astype(halves, ushort8)) &&
          all(__builtin_convertvector(halves, float8) == numbers);
#endif
  __builtin_nontemporal_store(right ? seed + lane : 0u, result + lane);
}

#elif CLA_SELFTEST == 12

CLA_SELFTEST_KERNEL(clattn_selftest_prefetch) {
  const uint lane = (uint)get_local_id(0);
  CLA_FETCH(result + lane);
  result[lane] = seed + lane;
}

#elif CLA_SELFTEST == 9

// Some drivers end all loops of a work-item once it has made 65,535 steps in total (llvmpipe). 2^20
// steps of a linear congruence, against the same squared 20 times.
CLA_SELFTEST_KERNEL(clattn_selftest_loops) {
  const uint lane = (uint)get_local_id(0);
  uint factor = 1664525u, summand = 1013904223u;
  uint value = seed;
  for (uint i = 0; i < 1u << 20; ++i) value = value * factor + summand;
  for (uint i = 0; i < 20; ++i) {
    summand *= factor + 1u;
    factor *= factor;
  }
  result[lane] = value == seed * factor + summand ? seed + lane : 0u;
}

#elif CLA_SELFTEST == 10

// Word i of the struct is seed + i.
#define CLA_IS_LONG(member, i) \
  (call.member == (long)((ulong)(seed + 2 * i + 1) << 32 | (ulong)(seed + 2 * i)))
#define CLA_IS_INT(member, i) (call.member == (int)(seed + 20 + i))
#define CLA_IS_FLOAT(member, i) (as_uint(call.member) == seed + 20 + i)

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_selftest_struct(
    __global uint* restrict result, uint seed, const ClaCall call) {
  const int longs = CLA_IS_LONG(q_offset, 0) & CLA_IS_LONG(q_token_stride, 1) &
                    CLA_IS_LONG(out_offset, 2) & CLA_IS_LONG(out_token_stride, 3) &
                    CLA_IS_LONG(k_offset, 4) & CLA_IS_LONG(v_offset, 5) &
                    CLA_IS_LONG(block_stride, 6) & CLA_IS_LONG(token_stride, 7) &
                    CLA_IS_LONG(head_stride, 8) & CLA_IS_LONG(mask_stride, 9);
  const int ints =
      CLA_IS_INT(entries_at, 0) & CLA_IS_INT(num_entries, 1) & CLA_IS_INT(pages_at, 2) &
      CLA_IS_INT(counters_at, 3) & CLA_IS_INT(tensor_maps_at, 4) & CLA_IS_INT(partial_lse2_at, 5) &
      CLA_IS_INT(partial_out_at, 6) & CLA_IS_INT(num_kv_heads, 7) & CLA_IS_INT(causal, 8) &
      CLA_IS_INT(write_lse, 9) & CLA_IS_INT(window_left, 10) & CLA_IS_INT(window_right, 11) &
      CLA_IS_INT(chunk, 12) & CLA_IS_INT(scale_stride, 13) & CLA_IS_INT(merge_counts_at, 16) &
      CLA_IS_INT(most_splits, 17);
  const int floats = CLA_IS_FLOAT(scale_log2e, 14) & CLA_IS_FLOAT(soft_cap_log2e, 15);
  const uint lane = (uint)get_local_id(0);
  const int right = sizeof(ClaCall) == 38 * sizeof(uint) && longs && ints && floats;
  result[lane] = right ? seed + lane : 0u;
}

#elif CLA_SELFTEST == 11

// The functions of tile/lanes.clh by sub-groups of CLA_SUB_GROUP, which leave a loop at different
// times, as warps do that share the keys of a task. PoCL makes a barrier of the whole group of each
// function and gives some sub-groups the steps of others.
__kernel __attribute__((intel_reqd_sub_group_size(CLA_SUB_GROUP)))
__attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void
clattn_selftest_lanes(__global uint* restrict result, uint seed) {
  __local uint ends[CLA_WG_SIZE];
  const uint lid = (uint)get_local_id(0);
  const uint lane = lid % CLA_SUB_GROUP;
  const uint warp = lid / CLA_SUB_GROUP;
  const uint warps = CLA_WG_SIZE / CLA_SUB_GROUP;
  ends[lid] = 5 * lid + warps + 1;
  barrier(CLK_LOCAL_MEM_FENCE);  // ends written -> read
  int right = get_max_sub_group_size() == CLA_SUB_GROUP && get_sub_group_local_id() == lane;
  for (uint task = 0; task < 3; ++task) {
    const uint end = ends[task];
    uint steps = 0;
    for (uint i = warp; i < end; i += warps) {
      const uint own = seed + i * CLA_WG_SIZE + lid;
      const ulong wide = (ulong)own << 32 | lid;
      right &= cla_shuffle_word(own, i % CLA_SUB_GROUP) == own - lane + (lane ^ i % CLA_SUB_GROUP);
      right &= cla_shuffle_from(own, (lane + i) % CLA_SUB_GROUP) ==
               own - lane + (lane + i) % CLA_SUB_GROUP;
      right &= cla_shuffle_from_long((long)wide, 7) ==
               (long)((ulong)(own - lane + 7) << 32 | (lid - lane + 7));
      right &= cla_shuffle_slot(as_float(own), 8, 3) == as_float(own - lane % 8 + 3);
      right &= cla_any_lane(lane == i % CLA_SUB_GROUP) && !cla_any_lane(lane >= CLA_SUB_GROUP);
      ++steps;
    }
    right &= steps == (end - warp + warps - 1) / warps;
    barrier(CLK_LOCAL_MEM_FENCE);  // the next task begins for all
  }
  result[lid] = right ? seed + lid : 0u;
}

#else
#error "CLA_SELFTEST is 1 ... 11"
#endif
