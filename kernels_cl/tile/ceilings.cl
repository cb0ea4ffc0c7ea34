/* The ceilings of a device: streaming read, read of pages in random order, copy, f32 multiply-add.

   read:  sums[g] = sum of a contiguous range of `vectors_per_group` vectors; lanes stride through
   it together, so that a group of one work-item reads in order and a wide group reads coalesced.
   page_read:  the same over the pages of 4096 bytes that `order` names, four at a time.
   copy:  the ranges of all groups go, one behind the other, to what follows them; on CPUs past the
   caches, as the library's own copies do.
   fma:   CLA_CHAINS independent chains  x = x * a + b  in each work-item, `steps` long.

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
  ClaVector sum[4] = {(ClaVector)(0.0f), (ClaVector)(0.0f), (ClaVector)(0.0f), (ClaVector)(0.0f)};
  for (int i = lane; i < vectors_per_group; i += 4 * CLA_WG_SIZE) {
#pragma unroll
    for (int u = 0; u < 4; ++u) sum[u] += range[i + u * CLA_WG_SIZE];
  }
  sums[group * CLA_WG_SIZE + (size_t)lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
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
  ClaVector sum[4] = {(ClaVector)(0.0f), (ClaVector)(0.0f), (ClaVector)(0.0f), (ClaVector)(0.0f)};
  for (int p = 0; p < pages_per_group; p += 4) {
    for (int i = lane; i < CLA_PAGE_VECTORS; i += CLA_WG_SIZE) {
#pragma unroll
      for (int u = 0; u < 4; ++u) sum[u] += data[pages[p + u] * (long)CLA_PAGE_VECTORS + i];
    }
  }
  sums[group * CLA_WG_SIZE + (size_t)lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_copy(
    __global ClaVector* data,  // [2, groups, vectors_per_group]: from, to
    int vectors_per_group)     // a multiple of 4 * CLA_WG_SIZE
{
  const size_t begin = get_group_id(0) * (size_t)vectors_per_group + get_local_id(0);
  __global const ClaVector* restrict from = data + begin;
  __global ClaVector* restrict to = data + get_num_groups(0) * (size_t)vectors_per_group + begin;
  for (int i = 0; i < vectors_per_group; i += 4 * CLA_WG_SIZE) {
    ClaVector v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = from[i + u * CLA_WG_SIZE];
#pragma unroll
    for (int u = 0; u < 4; ++u) CLA_PUT(v[u], to + i + u * CLA_WG_SIZE);
  }
}

/* Enough independent chains to hide the latency of a multiply-add on known CPUs and GPUs, and few
   enough not to spill. */
#define CLA_CHAINS 12

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_ceiling_fma(
    int steps, float a, float b,
    __global ClaVector* restrict results)  // [groups, CLA_WG_SIZE]
{
  ClaVector x[CLA_CHAINS];
#pragma unroll
  for (int c = 0; c < CLA_CHAINS; ++c) x[c] = (ClaVector)((float)get_global_id(0) + (float)c);
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int c = 0; c < CLA_CHAINS; ++c) x[c] = fma(x[c], (ClaVector)(a), (ClaVector)(b));
  }
#pragma unroll
  for (int c = 1; c < CLA_CHAINS; ++c) x[0] += x[c];
  results[get_global_id(0)] = x[0];
}
