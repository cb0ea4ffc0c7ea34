/* The ceilings of a device: streaming read, read of pages in random order, copy, f32 multiply-add.

   read:  sums[g] = sum of a contiguous range of `vectors_per_group` vectors; lanes stride through
   it together, so that a group of one work-item reads in order and a wide group reads coalesced.
   page_read:  the same over the pages of 4096 bytes that `order` names, four at a time.
   copy:  the ranges of all groups go, one behind the other, to what follows them; on CPUs past the
   caches, as the library's own copies do.
   fma:   twelve independent chains  x = x * a + b  in each work-item, `steps` long.

   macro        | unit       | legal values
   CLA_WG_SIZE  | work-items | 1 (CPU) or a power of two
   CLA_VEC      | floats     | 1, 4, 8, 16: the width of a vector variable */
#if !defined(CLA_WG_SIZE) || !defined(CLA_VEC)
#error "CLA_WG_SIZE and CLA_VEC must be defined"
#endif

#include "core/stream.clh"

#if CLA_WG_SIZE == 1
#define CLA_PUT(x, p) CLA_STREAM(x, p)
#else
#define CLA_PUT(x, p) (*(p) = (x))
#endif

#if CLA_VEC == 16
typedef float16 ClaVector;
#elif CLA_VEC == 8
typedef float8 ClaVector;
#elif CLA_VEC == 4
typedef float4 ClaVector;
#else
typedef float ClaVector;
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_read(
    __global const ClaVector* restrict data,  // [groups, vectors_per_group]
    int vectors_per_group,                    // a multiple of 4 * CLA_WG_SIZE
    __global ClaVector* restrict sums)        // [groups, CLA_WG_SIZE]
{
  const size_t group = get_group_id(0);
  const int lane = (int)get_local_id(0);
  __global const ClaVector* range = data + group * (size_t)vectors_per_group;
  ClaVector sum0 = (ClaVector)(0.0f);
  ClaVector sum1 = (ClaVector)(0.0f);
  ClaVector sum2 = (ClaVector)(0.0f);
  ClaVector sum3 = (ClaVector)(0.0f);
  for (int i = lane; i < vectors_per_group; i += 4 * CLA_WG_SIZE) {
    sum0 += range[i];
    sum1 += range[i + CLA_WG_SIZE];
    sum2 += range[i + 2 * CLA_WG_SIZE];
    sum3 += range[i + 3 * CLA_WG_SIZE];
  }
  sums[group * CLA_WG_SIZE + (size_t)lane] = (sum0 + sum1) + (sum2 + sum3);
}

#define CLA_PAGE_VECTORS (4096 / 4 / CLA_VEC)

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_page_read(
    __global const ClaVector* restrict data,  // [pages, CLA_PAGE_VECTORS]
    __global const int* restrict order,       // [groups, pages_per_group]: which pages
    int pages_per_group,                      // a multiple of 4
    __global ClaVector* restrict sums)        // [groups, CLA_WG_SIZE]
{
  const size_t group = get_group_id(0);
  const int lane = (int)get_local_id(0);
  __global const int* pages = order + group * (size_t)pages_per_group;
  ClaVector sum0 = (ClaVector)(0.0f);
  ClaVector sum1 = (ClaVector)(0.0f);
  ClaVector sum2 = (ClaVector)(0.0f);
  ClaVector sum3 = (ClaVector)(0.0f);
  for (int p = 0; p < pages_per_group; p += 4) {
    __global const ClaVector* page0 = data + (size_t)pages[p] * CLA_PAGE_VECTORS;
    __global const ClaVector* page1 = data + (size_t)pages[p + 1] * CLA_PAGE_VECTORS;
    __global const ClaVector* page2 = data + (size_t)pages[p + 2] * CLA_PAGE_VECTORS;
    __global const ClaVector* page3 = data + (size_t)pages[p + 3] * CLA_PAGE_VECTORS;
    for (int i = lane; i < CLA_PAGE_VECTORS; i += CLA_WG_SIZE) {
      sum0 += page0[i];
      sum1 += page1[i];
      sum2 += page2[i];
      sum3 += page3[i];
    }
  }
  sums[group * CLA_WG_SIZE + (size_t)lane] = (sum0 + sum1) + (sum2 + sum3);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_copy(
    __global ClaVector* data,  // [2, groups, vectors_per_group]: from, to
    int vectors_per_group)     // a multiple of 4 * CLA_WG_SIZE
{
  const size_t begin = get_group_id(0) * (size_t)vectors_per_group + get_local_id(0);
  __global const ClaVector* restrict from = data + begin;
  __global ClaVector* restrict to = data + get_num_groups(0) * (size_t)vectors_per_group + begin;
  for (int i = 0; i < vectors_per_group; i += 4 * CLA_WG_SIZE) {
    const ClaVector v0 = from[i];
    const ClaVector v1 = from[i + CLA_WG_SIZE];
    const ClaVector v2 = from[i + 2 * CLA_WG_SIZE];
    const ClaVector v3 = from[i + 3 * CLA_WG_SIZE];
    CLA_PUT(v0, to + i);
    CLA_PUT(v1, to + i + CLA_WG_SIZE);
    CLA_PUT(v2, to + i + 2 * CLA_WG_SIZE);
    CLA_PUT(v3, to + i + 3 * CLA_WG_SIZE);
  }
}

/* Twelve chains: enough to cover the latency of a multiply-add on the CPUs and GPUs known, and few
 * enough registers. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_fma(
    int steps, float a, float b,
    __global ClaVector* restrict results)  // [groups, CLA_WG_SIZE]
{
  const ClaVector start = (ClaVector)((float)get_global_id(0));
  const ClaVector factor = (ClaVector)(a);
  const ClaVector addend = (ClaVector)(b);
  ClaVector x0 = start, x1 = start + 1.0f, x2 = start + 2.0f, x3 = start + 3.0f;
  ClaVector x4 = start + 4.0f, x5 = start + 5.0f, x6 = start + 6.0f, x7 = start + 7.0f;
  ClaVector x8 = start + 8.0f, x9 = start + 9.0f, x10 = start + 10.0f, x11 = start + 11.0f;
  for (int i = 0; i < steps; ++i) {
    x0 = fma(x0, factor, addend);
    x1 = fma(x1, factor, addend);
    x2 = fma(x2, factor, addend);
    x3 = fma(x3, factor, addend);
    x4 = fma(x4, factor, addend);
    x5 = fma(x5, factor, addend);
    x6 = fma(x6, factor, addend);
    x7 = fma(x7, factor, addend);
    x8 = fma(x8, factor, addend);
    x9 = fma(x9, factor, addend);
    x10 = fma(x10, factor, addend);
    x11 = fma(x11, factor, addend);
  }
  results[get_global_id(0)] =
      ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)) + ((x8 + x9) + (x10 + x11));
}
