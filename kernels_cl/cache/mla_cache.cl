/* The cache of latent attention, [page, PAGE token, rank + rope_dim] contiguous: filled and read.

     concat: cache[slot(token)] = kv_c[token] followed by k_pe[token]
     gather: out[token] = cache[the token's slot by its request's block table]

   Values are converted between the tensors' type and the cache's, rounded to nearest even; the
   8-bit types hold type(x / scale). One group serves one token, a work-item eight elements a turn.

   macro           unit        legal values
   CLA_Q_DTYPE     -           0 f32, 1 f16, 2 bf16: kv_c, k_pe and out
   CLA_KV_DTYPE    -           0 f32, 1 f16, 2 bf16, 3 fp8 e4m3, 4 fp8 e5m2, 5 int8: the cache
   CLA_WG_SIZE     work-items  >= 1

   Launch: num_tokens groups. */
#include "core/storage.clh"

static inline float cla_scale_of(__global const float* scale, int scaled) {
  return scaled ? scale[0] : 1.0f;
}

static inline ClaF8 cla_stored(ClaF8 x, float scale) {
#if CLA_KV_DTYPE >= 3
  x = cla_divide8(x, scale);
#endif
  return x;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_concat_and_cache_mla(
    __global const CLA_Q_T* restrict kv_c, /* [tokens, rank], tokens by stride */
    long kv_c_offset,                      /* elements */
    long kv_c_stride,                      /* elements */
    __global const CLA_Q_T* restrict k_pe, /* [tokens, rope_dim], tokens by stride */
    long k_pe_offset,                      /* elements */
    long k_pe_stride,                      /* elements */
    __global CLA_KV_T* cache,              /* [slots, rank + rope_dim] */
    __global const float* restrict scale,  /* [1]; if scaled */
    int scaled,                            /* 0 or 1 */
    int rank,                              /* elements, a multiple of 8 */
    int rope_dim,                          /* elements, a multiple of 8 */
    __global const long* restrict slots,   /* [tokens] at slots_at */
    long slots_at,                         /* longs */
    long num_slots) {                      /* of the cache */
  const long token = (long)get_group_id(0);
  const long slot = slots[slots_at + token];
  if (slot < 0 || slot >= num_slots) return;
  const uint width = (uint)rank + (uint)rope_dim;
  const float factor = cla_scale_of(scale, scaled);
  kv_c += kv_c_offset + token * kv_c_stride;
  k_pe += k_pe_offset + token * k_pe_stride;
  cache += (ulong)slot * width;
  for (uint dim = (uint)get_local_id(0) * 8; dim < width; dim += CLA_WG_SIZE * 8) {
    __global const CLA_Q_T* from = dim < (uint)rank ? kv_c + dim : k_pe + (dim - (uint)rank);
    const ClaF8 x = cla_stored(CLA_Q_LOAD8(from), factor);
    CLA_KV_STORE4(x.lo, cache + dim);
    CLA_KV_STORE4(x.hi, cache + dim + 4);
  }
}

/* The last request whose first token is not behind `token`: the one that owns it. */
static inline int cla_request_of(__global const int* starts, int num_reqs, int token) {
  int low = 0;
  int high = num_reqs; /* starts[low] <= token < starts[high] */
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (starts[middle] <= token)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_gather_mla(
    __global const CLA_KV_T* restrict cache, /* [slots, width] */
    __global const float* restrict scale,    /* [1]; if scaled */
    int scaled,                              /* 0 or 1 */
    int width,                               /* rank + rope_dim, a multiple of 8 */
    int page_size,                           /* tokens */
    __global CLA_Q_T* restrict out,          /* [tokens, width], tokens by stride */
    long out_offset,                         /* elements */
    long out_stride,                         /* elements */
    __global const int* restrict meta,       /* cu_seq_lens [num_reqs + 1], first page [num_reqs],
                                                block table [num_reqs, table_stride] */
    int num_reqs,                            /* requests */
    long table_stride) {                     /* pages */
  const int token = (int)get_group_id(0);
  const int request = cla_request_of(meta, num_reqs, token);
  const uint place = (uint)(token - meta[request]);
  const long column = (long)meta[num_reqs + 1 + request] + place / (uint)page_size;
  const int page =
      meta[2 * (ulong)num_reqs + 1 + (ulong)request * (ulong)table_stride + (ulong)column];
  const ulong slot = (ulong)page * (uint)page_size + place % (uint)page_size;
  const float factor = cla_scale_of(scale, scaled);
  cache += slot * (uint)width;
  out += out_offset + (long)token * out_stride;
  for (uint dim = (uint)get_local_id(0) * 8; dim < (uint)width; dim += CLA_WG_SIZE * 8) {
    const ClaF8 x = cla_scale8(CLA_KV_LOAD8(cache + dim), factor);
    CLA_Q_STORE4(x.lo, out + dim);
    CLA_Q_STORE4(x.hi, out + dim + 4);
  }
}
