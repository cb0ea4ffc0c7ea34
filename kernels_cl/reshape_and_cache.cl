/* Stores the keys and values of new tokens in the paged cache.

     cache[slot / PAGE_SIZE, slot % PAGE_SIZE, head, :] = key[token, head, :]
     slot = slots[slots_at + token]

   Values are converted from the input's type to the cache's: equal types are copied bit by bit,
   others are rounded to nearest even (f16 overflow becomes inf, NaN stays NaN). The 8-bit types
   store type(x / scale), saturating, with one scale per tensor or per KV head. A slot below 0 or
   not below num_slots stores nothing. If two tokens name one slot, either may win.

   The unit of work is eight elements of one head of one token; units of a token are
   [kv head, HEAD_DIM / 8].
     CLA_WG_SIZE == 1 (CPU): one group a token, a loop over its units.
     CLA_WG_SIZE > 1 (GPU):  one work-item a unit.

   macro           unit        legal values
   CLA_HEAD_DIM    elements    8 ... 256, steps of 8
   CLA_Q_DTYPE     -           0 f32, 1 f16, 2 bf16: key and value
   CLA_KV_DTYPE    -           0 f32, 1 f16, 2 bf16, 3 fp8 e4m3, 4 fp8 e5m2, 5 int8: the cache
   CLA_PAGE_SIZE   tokens      >= 1
   CLA_WG_SIZE     work-items  >= 1
   CLA_CACHE_X     elements    of a packed key cache's innermost dimension: 4, 8 or 16

   Launch: CLA_WG_SIZE == 1: num_tokens groups; else ceil(num_tokens * num_kv_heads * CLA_HEAD_DIM /
   8 / CLA_WG_SIZE). */
#if !defined(CLA_PAGE_SIZE) || !defined(CLA_CACHE_X)
#error "reshape_and_cache.cl needs CLA_PAGE_SIZE and CLA_CACHE_X"
#endif
#include "lib/common.clh"
#include "lib/options.clh"
#include "lib/storage.clh"

#if CLA_CACHE_X != 4 && CLA_CACHE_X != 8 && CLA_CACHE_X != 16
#error "CLA_CACHE_X must be 4, 8 or 16"
#endif

/* What one work-item does: units [first, first + count) of the token, whose slot is negative if
   nothing is to be stored. */
typedef struct ClaUnits {
  int token;
  uint first;
  uint count;
  long slot;
} ClaUnits;

static inline ClaUnits cla_units(__global const long* slots, int num_tokens, long num_slots,
                                 int num_kv_heads) {
  const uint per_token = (uint)num_kv_heads * (CLA_HEAD_DIM / 8);
  const ulong index = (ulong)get_global_id(0);
#if CLA_WG_SIZE == 1
  const ulong token = index;
  const uint first = 0;
  const uint count = per_token;
#else
  const ulong token = index / per_token;
  const uint first = (uint)(index % per_token);
  const uint count = 1;
#endif
  ClaUnits units;
  units.token = (int)token;
  units.first = first;
  units.count = count;
  units.slot = -1;
  if (token < (ulong)num_tokens && slots[token] < num_slots) units.slot = slots[token];
  return units;
}

/* Eight elements as the cache holds them. */
#if CLA_Q_DTYPE == CLA_KV_DTYPE && CLA_Q_DTYPE != 0
typedef ushort8 ClaCells;

/* CPUs move a vector from and to any address. To GPUs vload and vstore promise no more than an
   element's alignment, and theirs take them apart. */
static inline int cla_moves_whole(__global const CLA_Q_T* p) {
  return CLA_WG_SIZE > 1 && ((ulong)p & 15) == 0;
}
static inline ClaCells cla_fetch(__global const CLA_Q_T* from) {
  return cla_moves_whole(from) ? *(__global const ushort8*)from : vload8(0, from);
}
static inline void cla_put8(ClaCells cells, __global CLA_KV_T* to) {
  if (cla_moves_whole(to)) {
    *(__global ushort8*)to = cells;
  } else {
    vstore8(cells, 0, to);
  }
}
static inline void cla_put4(ClaCells cells, uint half_index, __global CLA_KV_T* to) {
  vstore4(half_index == 0 ? cells.lo : cells.hi, 0, to);
}
static inline void cla_put_column(ClaCells cells, __global CLA_KV_T* to, ulong stride) {
  to[0] = cells.s0;
  to[stride] = cells.s1;
  to[2 * stride] = cells.s2;
  to[3 * stride] = cells.s3;
  to[4 * stride] = cells.s4;
  to[5 * stride] = cells.s5;
  to[6 * stride] = cells.s6;
  to[7 * stride] = cells.s7;
}
#else
typedef ClaF8 ClaCells;

static inline ClaCells cla_fetch(__global const CLA_Q_T* from) {
  return CLA_Q_LOAD8(from);
}
static inline void cla_put4(ClaCells cells, uint half_index, __global CLA_KV_T* to) {
  CLA_KV_STORE4(half_index == 0 ? cells.lo : cells.hi, to);
}
static inline void cla_put8(ClaCells cells, __global CLA_KV_T* to) {
  cla_put4(cells, 0, to);
  cla_put4(cells, 1, to + 4);
}
static inline void cla_put_column(ClaCells cells, __global CLA_KV_T* to, ulong stride) {
  CLA_KV_STORE1(cells.lo.x, to);
  CLA_KV_STORE1(cells.lo.y, to + stride);
  CLA_KV_STORE1(cells.lo.z, to + 2 * stride);
  CLA_KV_STORE1(cells.lo.w, to + 3 * stride);
  CLA_KV_STORE1(cells.hi.x, to + 4 * stride);
  CLA_KV_STORE1(cells.hi.y, to + 5 * stride);
  CLA_KV_STORE1(cells.hi.z, to + 6 * stride);
  CLA_KV_STORE1(cells.hi.w, to + 7 * stride);
}
#endif

/* A key's and a value's elements as they are to be stored. */
static inline ClaCells cla_k_cells(const ClaOptions* opt, uint head, ClaCells x) {
#if CLA_KV_QUANT
  x = cla_divide8(x, cla_k_scale(opt, head));
#endif
  return x;
}
static inline ClaCells cla_v_cells(const ClaOptions* opt, uint head, uint num_kv_heads,
                                   ClaCells x) {
#if CLA_KV_QUANT
  x = cla_divide8(x, cla_v_scale(opt, head, num_kv_heads));
#endif
  return x;
}

/* Where unit `unit` of a token starts in key or value. */
static inline long cla_unit_at(const ClaUnits* units, uint unit, long offset, long token_stride) {
  return offset + (long)units->token * token_stride + (long)unit * 8;
}

/* Caches whose heads are contiguous dims, by strides: NHD, HND, interleaved or separate K and V.
   CPUs have reshape_and_cache_cpu.cl. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void
clattn_reshape_and_cache_flash(
    __global const CLA_Q_T* restrict key,   /* [tokens, num_kv_heads, HEAD_DIM], rows contiguous */
    long key_offset,                        /* elements */
    long key_token_stride,                  /* elements */
    __global const CLA_Q_T* restrict value, /* as key */
    long value_offset,                      /* elements */
    long value_token_stride,                /* elements */
    __global CLA_KV_T* k_cache,             /* [page, token, kv head, HEAD_DIM] by strides */
    long k_offset,                          /* elements */
    __global CLA_KV_T* v_cache,             /* as k_cache */
    long v_offset,                          /* elements */
    long block_stride,                      /* elements */
    long token_stride,                      /* elements */
    long head_stride,                       /* elements */
    __global const long* restrict slots,    /* [num_tokens] at slots_at */
    long slots_at,                          /* longs */
    int num_tokens,                         /* tokens */
    long num_slots,                         /* pages * PAGE_SIZE */
    int num_kv_heads                        /* heads */
        CLA_OPTION_PARAMS) {
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaUnits units = cla_units(slots + slots_at, num_tokens, num_slots, num_kv_heads);
  if (units.slot < 0) return;
  const long page = (long)((ulong)units.slot / CLA_PAGE_SIZE);
  const long in_page = (long)((ulong)units.slot % CLA_PAGE_SIZE);
  const long slot_at = page * block_stride + in_page * token_stride;
  for (uint unit = units.first; unit < units.first + units.count; ++unit) {
    const uint head = unit / (CLA_HEAD_DIM / 8);
    const uint dim = unit % (CLA_HEAD_DIM / 8) * 8;
    const long to = slot_at + (long)head * head_stride + dim;
    const ClaCells k = cla_k_cells(
        &opt, head, cla_fetch(key + cla_unit_at(&units, unit, key_offset, key_token_stride)));
    const ClaCells v =
        cla_v_cells(&opt, head, (uint)num_kv_heads,
                    cla_fetch(value + cla_unit_at(&units, unit, value_offset, value_token_stride)));
    cla_put8(k, k_cache + k_offset + to);
    cla_put8(v, v_cache + v_offset + to);
  }
}

/* The x-packed caches: keys [page, kv head, HEAD_DIM / X, PAGE_SIZE, X], values [page, kv head,
   HEAD_DIM, PAGE_SIZE]. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_reshape_and_cache(
    __global const CLA_Q_T* restrict key,   /* [tokens, num_kv_heads, HEAD_DIM], rows contiguous */
    long key_offset,                        /* elements */
    long key_token_stride,                  /* elements */
    __global const CLA_Q_T* restrict value, /* as key */
    long value_offset,                      /* elements */
    long value_token_stride,                /* elements */
    __global CLA_KV_T* k_cache,             /* packed keys */
    long k_offset,                          /* elements */
    __global CLA_KV_T* v_cache,             /* packed values */
    long v_offset,                          /* elements */
    __global const long* restrict slots,    /* [num_tokens] at slots_at */
    long slots_at,                          /* longs */
    int num_tokens,                         /* tokens */
    long num_slots,                         /* pages * PAGE_SIZE */
    int num_kv_heads                        /* heads */
        CLA_OPTION_PARAMS) {
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaUnits units = cla_units(slots + slots_at, num_tokens, num_slots, num_kv_heads);
  if (units.slot < 0) return;
  const ulong page = (ulong)units.slot / CLA_PAGE_SIZE;
  const ulong in_page = (ulong)units.slot % CLA_PAGE_SIZE;
  k_cache += k_offset;
  v_cache += v_offset;
  for (uint unit = units.first; unit < units.first + units.count; ++unit) {
    const uint head = unit / (CLA_HEAD_DIM / 8);
    const ulong page_head = page * (uint)num_kv_heads + head;
    const uint dim = unit % (CLA_HEAD_DIM / 8) * 8;
    const ClaCells k = cla_k_cells(
        &opt, head, cla_fetch(key + cla_unit_at(&units, unit, key_offset, key_token_stride)));
    const ClaCells v =
        cla_v_cells(&opt, head, (uint)num_kv_heads,
                    cla_fetch(value + cla_unit_at(&units, unit, value_offset, value_token_stride)));
    for (uint i = 0; i < 2; ++i) {
      const ulong packed_row =
          page_head * (CLA_HEAD_DIM / CLA_CACHE_X) + (dim + 4 * i) / CLA_CACHE_X;
      cla_put4(k, i,
               k_cache + (packed_row * CLA_PAGE_SIZE + in_page) * CLA_CACHE_X +
                   (dim + 4 * i) % CLA_CACHE_X);
    }
    cla_put_column(v, v_cache + (page_head * CLA_HEAD_DIM + dim) * CLA_PAGE_SIZE + in_page,
                   CLA_PAGE_SIZE);
  }
}
