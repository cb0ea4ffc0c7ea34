/* Stores the keys and values of new tokens in the paged cache, on CPUs. What is stored is what
   clattn_reshape_and_cache_flash of reshape_and_cache.cl stores, which says more.

   One group a token: all heads' keys, then all values, VEC elements at a time.

   Macros: core/vec.clh, and CLA_KV_DTYPE >= 3 of core/options.clh.
   Launch: num_tokens groups. */

#include "cache/cpu_cells.clh"
#include "core/write_call.clh"

#if CLA_PAGE_SIZE < 1
#error "CLA_PAGE_SIZE must be at least 1"
#endif

/* One head's row of `width` elements. past: past the caches, whole lines then; both are constants
   at every call. */
static inline __attribute__((always_inline)) void cla_put_row(__global const CLA_Q_T* from,
                                                              int width, float scale, int past,
                                                              __global CLA_KV_T* to) {
  const int vecs = past ? CLA_LINE_VECS : 1; /* stored together */
#pragma unroll
  for (int d = 0; d < width / CLA_VEC; d += vecs) {
    cla_cells cells[CLA_LINE_VECS] __attribute__((aligned(CLA_LINE_BYTES)));
#pragma unroll
    for (int i = 0; i < vecs; ++i) cells[i] = cla_cells_at(from + (d + i) * CLA_VEC, scale);
    if (past)
      CLA_STREAM(*(const ulong8*)cells, (__global ulong8*)(to + CLA_KV_ROOM(d * CLA_VEC)));
    else
      CLA_CAT(vstore, CLA_CELLS)(cells[0], 0, to + CLA_KV_ROOM(d * CLA_VEC));
  }
}

#if CLA_KV_DTYPE == 6
/* The largest lane. */
static inline float cla_most_of_lanes(cla_vu v) {
  uint lanes[CLA_VEC], most = 0;
  CLA_CAT(vstore, CLA_VEC)(v, 0, lanes);
  for (int i = 0; i < CLA_VEC; ++i) most = max(most, lanes[i]);
  return as_float(most);
}
/* The scale and zero of a row of `width` elements. Finite magnitudes order like their bits; those
   of the other sign are 2^31 or more. */
static inline float cla_scale_of_vectors(__global const CLA_Q_T* from, int width) {
  cla_vu above = (cla_vu)(0u), below = (cla_vu)(0u);
  for (int d = 0; d < width; d += CLA_VEC) {
    const cla_vu bits = CLA_CAT(as_uint, CLA_VEC)(cla_load_q(from + d));
    const cla_vu turned = bits ^ 0x80000000u;
    const cla_vu up = bits < 0x7f800000u ? bits : (cla_vu)(0u);
    const cla_vu down = turned < 0x7f800000u ? turned : (cla_vu)(0u);
    above = up > above ? up : above;
    below = down > below ? down : below;
  }
  return cla_found_range(cla_most_of_lanes(above), cla_most_of_lanes(below));
}
#elif CLA_ROW_SCALES
/* The scale of a row of `width` elements. */
static inline float cla_scale_of_vectors(__global const CLA_Q_T* from, int width) {
  cla_vu largest = (cla_vu)(0u); /* magnitudes order like their bits */
  for (int d = 0; d < width; d += CLA_VEC) {
    const cla_vu size = CLA_CAT(as_uint, CLA_VEC)(cla_load_q(from + d)) & 0x7fffffffu;
    const cla_vu finite = size < 0x7f800000u ? size : (cla_vu)(0u);
    largest = finite > largest ? finite : largest;
  }
  uint lanes[CLA_VEC], most = 0;
  CLA_CAT(vstore, CLA_VEC)(largest, 0, lanes);
  for (int i = 0; i < CLA_VEC; ++i) most = max(most, lanes[i]);
  return cla_found_scale(as_float(most));
}
#endif

/* Where one token's keys or values lie, head 0. */
typedef struct ClaPlane {
  __global const CLA_Q_T* from;
  __global CLA_KV_T* to;
#if CLA_ROW_SCALES
  __global float* scales;
  long scale_stride; /* elements, from head to head */
#endif
  long head_stride; /* of the cache, elements */
  int num_kv_heads;
} ClaPlane;

/* Elements of a head's keys or values. */
static inline int cla_row_width(int of_keys) {
  return of_keys ? CLA_HEAD_DIM : CLA_VALUE_DIM;
}

/* All heads. of_keys and past are constants at every call. */
static inline __attribute__((always_inline)) void cla_put_plane(const ClaPlane* plane,
                                                                const ClaOptions* opt, int of_keys,
                                                                int past) {
#pragma unroll 1
  for (int h = 0; h < plane->num_kv_heads; ++h) {
#if CLA_ROW_SCALES
    const int width = cla_row_width(of_keys);
    const float scale = cla_scale_of_vectors(plane->from + (long)h * width, width);
    plane->scales[h * plane->scale_stride] = scale;
#else
    const float scale =
        of_keys ? cla_k_scale(opt, (uint)h) : cla_v_scale(opt, (uint)h, (uint)plane->num_kv_heads);
#endif
    cla_put_row(plane->from + (long)h * cla_row_width(of_keys), cla_row_width(of_keys), scale, past,
                plane->to + h * plane->head_stride);
  }
}

/* Whether a call's stores to a plane go past the caches: it is large, and every row fills whole
   lines. */
static inline int cla_streams(const ClaPlane* plane, int of_keys, int num_tokens) {
  const ulong row = (ulong)CLA_KV_ROOM(cla_row_width(of_keys)) * CLA_KV_BYTES;
  const ulong bytes = (ulong)num_tokens * (uint)plane->num_kv_heads * row * 2;
  const ulong ends = (ulong)plane->to | (ulong)plane->head_stride * CLA_KV_BYTES | row;
  return bytes >= CLA_STREAM_BYTES && ends % CLA_LINE_BYTES == 0;
}

static inline void cla_put_rows(const ClaPlane* plane, const ClaOptions* opt, int of_keys,
                                int num_tokens) {
  if (cla_streams(plane, of_keys, num_tokens))
    cla_put_plane(plane, opt, of_keys, 1);
  else
    cla_put_plane(plane, opt, of_keys, 0);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void
clattn_reshape_and_cache_flash_cpu(CLA_WRITE_PARAMS) {
  const ClaOptions opt = CLA_WRITE_OPTIONS;
  const long token = (long)get_group_id(0);
  const long slot = slots[call.slots_at + token];
  if (slot < 0 || slot >= call.num_slots) return;
  const long slot_at = (long)((ulong)slot / CLA_PAGE_SIZE) * call.block_stride +
                       (long)((ulong)slot % CLA_PAGE_SIZE) * call.token_stride;
#if CLA_ROW_SCALES
  __global float* k_scales = kv_scales + cla_slot_scale_at(&row_scales, slot, 0);
  const ClaPlane keys = {key + call.key_offset + token * call.key_token_stride,
                         CLA_WRITE_KEYS + slot_at,
                         k_scales,
                         row_scales.head_stride,
                         call.head_stride,
                         call.num_kv_heads};
  const ClaPlane values = {value + call.value_offset + token * call.value_token_stride,
                           CLA_WRITE_VALUES + slot_at,
                           k_scales - row_scales.k_at + row_scales.v_at,
                           row_scales.head_stride,
                           call.head_stride,
                           call.num_kv_heads};
#else
  const ClaPlane keys = {key + call.key_offset + token * call.key_token_stride,
                         CLA_WRITE_KEYS + slot_at, call.head_stride, call.num_kv_heads};
  const ClaPlane values = {value + call.value_offset + token * call.value_token_stride,
                           CLA_WRITE_VALUES + slot_at, call.head_stride, call.num_kv_heads};
#endif
  cla_put_rows(&keys, &opt, 1, call.num_tokens);
  cla_put_rows(&values, &opt, 0, call.num_tokens);
}
