/* Stores the keys and values of new tokens in the paged cache.

     cache[slot / PAGE_SIZE, slot % PAGE_SIZE, head, :] = key[token, head, :]
     slot = slots[slots_at + token]

   Values are converted from the input's type to the cache's: equal types are copied bit by bit,
   others are rounded to nearest even (f16 overflow becomes inf, NaN stays NaN). The 8-bit types
   store type(x / scale), saturating, with one scale per tensor or per KV head, or with
   CLA_ROW_SCALES one per token and head, which is found here (core/write_call.clh) and stored, of
   codes of 4 bits with a zero: each work-item reads the whole row, of which its neighbours leave
   all but its own unit in the L1 cache. A slot below 0 or not below num_slots stores nothing. If
   two tokens name one slot, either may win.

   The unit of work is eight elements of one head of one token; units of a token are
   [kv head, HEAD_DIM / 8], the last of which have no values where values have fewer.
     CLA_WG_SIZE == 1 (CPU): one group a token, a loop over its units.
     CLA_WG_SIZE > 1 (GPU):  one work-item a unit. Side by side are units of a token; in x-packed
                             caches, whose tokens lie side by side, CLA_SIDE_TOKENS tokens, so that
                             those of one page are stored together, whatever the slots.

   macro           unit        legal values
   CLA_HEAD_DIM    elements    8 ... 512, steps of 8; CLA_VALUE_DIM: core/dims.clh
   CLA_Q_DTYPE     -           0 f32, 1 f16, 2 bf16: key and value
   CLA_KV_DTYPE    -           0 f32, 1 f16, 2 bf16, 3 fp8 e4m3, 4 fp8 e5m2, 5 int8, 6 uint4x2:
                               the cache
   CLA_PAGE_SIZE   tokens      >= 1
   CLA_WG_SIZE     work-items  >= 1
   CLA_ROW_SCALES  -           1: core/write_call.clh; not of packed caches
   CLA_CACHE_X     elements    of a packed key cache's innermost dimension: 4, 8 or 16

   Launch: CLA_WG_SIZE == 1: num_tokens groups; else num_groups() of cache_write.cpp. */
#if !defined(CLA_HEAD_DIM) || !defined(CLA_PAGE_SIZE) || !defined(CLA_CACHE_X)
#error "reshape_and_cache.cl needs CLA_HEAD_DIM, CLA_PAGE_SIZE and CLA_CACHE_X"
#endif
#include "cache/cells.clh"
#include "core/dims.clh"
#include "core/write_call.clh"

#define CLA_SIDE_TOKENS 16 /* kSideTokens of cache_write.cpp */

#if CLA_CACHE_X != 4 && CLA_CACHE_X != 8 && CLA_CACHE_X != 16
#error "CLA_CACHE_X must be 4, 8 or 16"
#endif

/* Where the keys and values of the call lie. */
typedef struct ClaInput {
  __global const CLA_Q_T* key; /* token 0, as value */
  __global const CLA_Q_T* value;
  long key_token_stride; /* elements */
  long value_token_stride;
} ClaInput;

static inline __global const CLA_Q_T* cla_cache_key_at(const ClaInput* in, uint token, uint unit) {
  return in->key + (long)token * in->key_token_stride + (long)unit * 8;
}
static inline __global const CLA_Q_T* cla_cache_value_at(const ClaInput* in, uint token,
                                                         uint unit) {
  const uint head = unit / (CLA_HEAD_DIM / 8), own_unit = unit % (CLA_HEAD_DIM / 8);
  const long in_token = ((long)head * (CLA_VALUE_DIM / 8) + (long)own_unit) * 8;
  return in->value + (long)token * in->value_token_stride + in_token;
}
static inline int cla_has_value(uint unit) {
  return unit % (CLA_HEAD_DIM / 8) < CLA_VALUE_DIM / 8;
}
static inline int cla_input_aligned(const ClaInput* in) {
  const ulong strides = (ulong)(in->key_token_stride | in->value_token_stride) * sizeof(CLA_Q_T);
  return ((ulong)in->key | (ulong)in->value | strides) % CLA_RAW_ALIGN == 0;
}

#if CLA_KV_DTYPE == 6
/* The larger of `most` and of x's finite magnitudes with this sign bit, as bits. */
static inline uint4 cla_most_of_sign(uint4 most, float4 x, uint sign) {
  const uint4 size = as_uint4(x) ^ sign; /* of the other sign: 2^31 or more */
  return max(most, select(size, (uint4)(0u), size >= 0x7f800000u));
}
static inline float cla_most_lane(uint4 most) {
  return as_float(max(max(most.x, most.y), max(most.z, most.w)));
}
/* The scale and zero of a row that starts at `from`. */
static inline float cla_scale_of_row(__global const CLA_Q_T* from) {
  uint4 above = (uint4)(0u), below = (uint4)(0u);
#pragma unroll 2
  for (uint d = 0; d < CLA_HEAD_DIM; d += 8) {
    const ClaF8 x = CLA_Q_LOAD8(from + d);
    above = cla_most_of_sign(cla_most_of_sign(above, x.lo, 0), x.hi, 0);
    below = cla_most_of_sign(cla_most_of_sign(below, x.lo, 0x80000000u), x.hi, 0x80000000u);
  }
  return cla_found_range(cla_most_lane(above), cla_most_lane(below));
}
#elif CLA_ROW_SCALES
/* max(largest, |x|) over the finite elements of x */
static inline float4 cla_larger(float4 largest, float4 x) {
  const float4 magnitude = fabs(x);
  return select(largest, fmax(largest, magnitude), isless(magnitude, (float4)(INFINITY)));
}
/* The scale of a row that starts at `from`. */
static inline float cla_scale_of_row(__global const CLA_Q_T* from) {
  float4 largest = (float4)(0.0f);
#pragma unroll 2
  for (uint d = 0; d < CLA_HEAD_DIM; d += 8) {
    const ClaF8 x = CLA_Q_LOAD8(from + d);
    largest = cla_larger(cla_larger(largest, x.lo), x.hi);
  }
  return cla_found_scale(fmax(fmax(largest.x, largest.y), fmax(largest.z, largest.w)));
}
#endif
#if CLA_ROW_SCALES
/* The scales of the rows of unit `unit`, which its first unit stores. */
static inline float2 cla_store_scales(const ClaInput* in, uint token, uint unit, long slot,
                                      const ClaRowScales* at, __global float* kv_scales) {
  const uint own_unit = unit % (CLA_HEAD_DIM / 8);
  const float2 scales = (float2)(cla_scale_of_row(cla_cache_key_at(in, token, unit - own_unit)),
                                 cla_scale_of_row(cla_cache_value_at(in, token, unit - own_unit)));
  if (own_unit == 0) {
    const long key = cla_slot_scale_at(at, slot, unit / (CLA_HEAD_DIM / 8));
    kv_scales[key] = scales.x;
    kv_scales[key - at->k_at + at->v_at] = scales.y;
  }
  return scales;
}
#endif

/* What scales unit `unit` of keys and of values. */
static inline float2 cla_unit_scales(const ClaOptions* opt, uint unit, uint num_kv_heads) {
  const uint head = unit / (CLA_HEAD_DIM / 8);
  return (float2)(cla_k_scale(opt, head), cla_v_scale(opt, head, num_kv_heads));
}

/* A token's slot; negative if it stores nothing. */
static inline long cla_slot_of(__global const long* slots, uint token, uint num_tokens,
                               long num_slots) {
  const long slot = token < num_tokens ? slots[token] : -1;
  return slot < num_slots ? slot : -1;
}

/* index / count, index % count; mostly of numbers that fit 32 bits. */
static inline uint cla_split_index(ulong index, uint count, uint* rest) {
  if (index >> 32 == 0) {
    *rest = (uint)index % count;
    return (uint)index / count;
  }
  *rest = (uint)(index % count);
  return (uint)(index / count);
}

/* A cache whose heads are contiguous dims. */
typedef struct ClaPlanes {
  __global CLA_KV_T* k;
  __global CLA_KV_T* v;
  long block_stride; /* elements, as the rest */
  long token_stride;
  long head_stride;
} ClaPlanes;

static inline long cla_cache_unit_at(const ClaPlanes* cache, long slot, uint unit) {
  const uint in_page = (uint)((ulong)slot % CLA_PAGE_SIZE);
  const uint head = unit / (CLA_HEAD_DIM / 8);
  const uint own_unit = unit % (CLA_HEAD_DIM / 8);
  const long in_head = (long)in_page * cache->token_stride + (long)CLA_KV_ROOM(own_unit * 8);
  return (long)((ulong)slot / CLA_PAGE_SIZE) * cache->block_stride +
         (long)head * cache->head_stride + in_head;
}
static inline int cla_planes_aligned(const ClaPlanes* cache) {
  const ulong strides = (ulong)(cache->block_stride | cache->token_stride | cache->head_stride);
  return ((ulong)cache->k | (ulong)cache->v | strides * sizeof(CLA_KV_T)) % CLA_KV_ALIGN == 0;
}

/* Caches whose heads are contiguous dims, by strides: NHD, HND, interleaved or separate K and V.
   CPUs have reshape_and_cache_cpu.cl. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void
clattn_reshape_and_cache_flash(CLA_WRITE_PARAMS) {
  const uint num_kv_heads = (uint)call.num_kv_heads;
  uint unit;
  const uint token =
      cla_split_index((ulong)get_global_id(0), num_kv_heads * (CLA_HEAD_DIM / 8), &unit);
  const long slot =
      cla_slot_of(slots + call.slots_at, token, (uint)call.num_tokens, call.num_slots);
  if (slot < 0) return;
  const ClaInput in = {key + call.key_offset, value + call.value_offset, call.key_token_stride,
                       call.value_token_stride};
  const ClaPlanes cache = {CLA_WRITE_KEYS, CLA_WRITE_VALUES, call.block_stride, call.token_stride,
                           call.head_stride};
#if CLA_ROW_SCALES
  const float2 scales = cla_store_scales(&in, token, unit, slot, &row_scales, kv_scales);
#else
  const ClaOptions opt = CLA_WRITE_OPTIONS;
  const float2 scales = cla_unit_scales(&opt, unit, num_kv_heads);
#endif
  const long to = cla_cache_unit_at(&cache, slot, unit);
  __global const CLA_Q_T* const k_from = cla_cache_key_at(&in, token, unit);
  __global const CLA_Q_T* const v_from = cla_cache_value_at(&in, token, unit);
  const int has_value = cla_has_value(unit);
  if (cla_input_aligned(&in) && cla_planes_aligned(&cache)) {
    const ClaRaw k = cla_raw_load(k_from);
    const ClaRaw v = has_value ? cla_raw_load(v_from) : k;
    cla_put8(cla_cells(k, scales.x), cache.k + to);
    if (has_value) cla_put8(cla_cells(v, scales.y), cache.v + to);
  } else {
    cla_put8_any(cla_cells(cla_raw_load_any(k_from), scales.x), cache.k + to);
    if (has_value) cla_put8_any(cla_cells(cla_raw_load_any(v_from), scales.y), cache.v + to);
  }
}

#if CLA_KV_DTYPE != 6
/* An x-packed cache. */
typedef struct ClaPacked {
  __global CLA_KV_T* k;
  __global CLA_KV_T* v;
  uint num_kv_heads;
} ClaPacked;

/* One unit of a token's keys: one address, or two where X is 4. */
static inline __global CLA_KV_T* cla_packed_key(const ClaPacked* cache, ulong slot, uint unit,
                                                uint part) {
  const ulong head = slot / CLA_PAGE_SIZE * cache->num_kv_heads + unit / (CLA_HEAD_DIM / 8);
  const uint dim = unit % (CLA_HEAD_DIM / 8) * 8 + part * 4;
  const ulong row = head * (CLA_HEAD_DIM / CLA_CACHE_X) + dim / CLA_CACHE_X;
  return cache->k + (row * CLA_PAGE_SIZE + slot % CLA_PAGE_SIZE) * CLA_CACHE_X + dim % CLA_CACHE_X;
}
static inline void cla_put_value(const ClaPacked* cache, ulong slot, uint unit, ClaCells cells) {
  const ulong head = slot / CLA_PAGE_SIZE * cache->num_kv_heads + unit / (CLA_HEAD_DIM / 8);
  const ulong row = head * CLA_HEAD_DIM + (ulong)(unit % (CLA_HEAD_DIM / 8)) * 8;
  cla_put_column(cells, cache->v + row * CLA_PAGE_SIZE + slot % CLA_PAGE_SIZE, CLA_PAGE_SIZE);
}

static inline void cla_put_key_any(const ClaPacked* cache, ulong slot, uint unit, ClaCells cells) {
#if CLA_CACHE_X == 4
  CLA_KV_STORE4(cells.lo, cla_packed_key(cache, slot, unit, 0));
  CLA_KV_STORE4(cells.hi, cla_packed_key(cache, slot, unit, 1));
#else
  cla_put8_any(cells, cla_packed_key(cache, slot, unit, 0));
#endif
}
static inline void cla_put_key(const ClaPacked* cache, ulong slot, uint unit, ClaCells cells) {
#if CLA_CACHE_X == 4
  *(__global uint4*)cla_packed_key(cache, slot, unit, 0) = as_uint4(cells.lo);
  *(__global uint4*)cla_packed_key(cache, slot, unit, 1) = as_uint4(cells.hi);
#else
  cla_put8(cells, cla_packed_key(cache, slot, unit, 0));
#endif
}

/* The x-packed caches: keys [page, kv head, HEAD_DIM / X, PAGE_SIZE, X], values [page, kv head,
   HEAD_DIM, PAGE_SIZE]. */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_reshape_and_cache(
    CLA_WRITE_PARAMS) {
  const ClaOptions opt = CLA_WRITE_OPTIONS;
  const ClaInput in = {key + call.key_offset, value + call.value_offset, call.key_token_stride,
                       call.value_token_stride};
  const ClaPacked cache = {CLA_WRITE_KEYS, CLA_WRITE_VALUES, (uint)call.num_kv_heads};
  const uint units = cache.num_kv_heads * (CLA_HEAD_DIM / 8);
#if CLA_WG_SIZE == 1
  const uint token = (uint)get_group_id(0);
  uint unit = 0;
  const uint end = units;
  const int aligned = 0;
#else
  const ulong index = (ulong)get_global_id(0);
  uint unit;
  const uint token = cla_split_index(index / CLA_SIDE_TOKENS, units, &unit) * CLA_SIDE_TOKENS +
                     (uint)index % CLA_SIDE_TOKENS;
  const uint end = unit + 1;
  const int aligned = cla_input_aligned(&in) && (ulong)cache.k % CLA_KV_ALIGN == 0;
#endif
  const long slot =
      cla_slot_of(slots + call.slots_at, token, (uint)call.num_tokens, call.num_slots);
  if (slot < 0) return;
  for (; unit < end; ++unit) {
    const float2 scales = cla_unit_scales(&opt, unit, cache.num_kv_heads);
    __global const CLA_Q_T* const k_from = cla_cache_key_at(&in, token, unit);
    __global const CLA_Q_T* const v_from = cla_cache_value_at(&in, token, unit);
    if (aligned) {
      const ClaRaw k = cla_raw_load(k_from);
      const ClaRaw v = cla_raw_load(v_from);
      cla_put_key(&cache, (ulong)slot, unit, cla_cells(k, scales.x));
      cla_put_value(&cache, (ulong)slot, unit, cla_cells(v, scales.y));
    } else {
      cla_put_key_any(&cache, (ulong)slot, unit, cla_cells(cla_raw_load_any(k_from), scales.x));
      cla_put_value(&cache, (ulong)slot, unit, cla_cells(cla_raw_load_any(v_from), scales.y));
    }
  }
}
#endif
