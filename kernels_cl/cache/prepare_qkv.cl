/* What precedes attention over the rows of a fused projection, in one pass: RMSNorm of each head of
   queries and keys, rotary embedding, and the write of keys and values into the paged cache.

     n = x / sqrt(mean x^2 + eps) * (w + beta)     over HEAD_DIM elements; rounded if asked
     o1 = n1 cos - n2 sin,  o2 = n2 cos + n1 sin   of each pair; elements outside of pairs: o = n
     cache[slot] = o as the cache holds it         from o as it is rounded to the tensors' type

   Each of the three may be absent, and the others then give the same bits: sums have one order, and
   what is left to the compiler nowhere decides between a product that is rounded and a fused one.

   A group takes one token and rows_of_group of its heads, queries, keys and values in this order,
   CLA_HEADS a round; CLA_LANES work-items share a head. Per round, between barriers: load heads
   into local memory and sum squares; norm; rotate pairs there; store. Every element is read before
   its head is written, so outputs may be the inputs themselves.

   Bytes: each query and key is read once and written once, a value is read once, each stored
   element written once more; of the table a group reads one row.

   macro            legal values                        meaning
   CLA_HEAD_DIM     8 ... 512, steps of 8               elements of a head
   CLA_Q_DTYPE      0 f32, 1 f16, 2 bf16                queries, keys, values, outputs
   CLA_KV_DTYPE     0 ... 5 (core/types.clh)            the cache; CLA_Q_DTYPE if there is none
   CLA_WG_SIZE      >= 1                                work-items
   CLA_LANES        1 ... CLA_HEAD_DIM / 8, at most     work-items of a head
                    CLA_WG_SIZE
   CLA_ALIGNED      0, 1                                1: rows and pages begin at multiples of 8
                                                        elements, in memory aligned to 16 bytes

   Launch: num_tokens * groups_of_token groups. Local memory: CLA_HEADS heads, a row of the table
   and a sum per work-item, f32. */

#include "cache/cells.clh"
#include "core/device_errors.clh"
#include "core/options.clh"
#include "shared/prepare_qkv.h"

#if !defined(CLA_HEAD_DIM) || !defined(CLA_WG_SIZE) || !defined(CLA_LANES) || !defined(CLA_ALIGNED)
#error "prepare_qkv.cl needs CLA_HEAD_DIM, CLA_WG_SIZE, CLA_LANES and CLA_ALIGNED"
#endif

#define CLA_UNITS (CLA_HEAD_DIM / 8)        /* of eight elements, of a head */
#define CLA_HEADS (CLA_WG_SIZE / CLA_LANES) /* of a round */

/* Element `at` of weights or of the table, whose type is known at run time alone: each is read once
   a group or head, and kernels are fewer. */
static inline float cla_number(__global const uchar* from, int dtype, long at) {
  if (dtype == 0) return ((__global const float*)from)[at];
  if (dtype == 1) return vload_half((size_t)at, (__global const half*)from);
  return as_float((uint)((__global const ushort*)from)[at] << 16);
}

static inline ClaRaw cla_load_raw(__global const CLA_Q_T* from) {
#if CLA_ALIGNED
  return cla_raw_load(from);
#else
  return cla_raw_load_any(from);
#endif
}
static inline ClaRaw cla_raw_of(ClaF8 x) {
#if CLA_Q_DTYPE == 0
  return x;
#else
  return (uint4)(as_uint2(cla_pack4(x.lo)), as_uint2(cla_pack4(x.hi)));
#endif
}
static inline void cla_store_raw(ClaRaw raw, __global CLA_Q_T* to) {
#if CLA_Q_DTYPE == 0 && CLA_ALIGNED
  ((__global float4*)to)[0] = raw.lo;
  ((__global float4*)to)[1] = raw.hi;
#elif CLA_Q_DTYPE == 0
  vstore4(raw.lo, 0, to);
  vstore4(raw.hi, 1, to);
#elif CLA_ALIGNED
  *(__global uint4*)to = raw;
#else
  vstore8(as_ushort8(raw), 0, to);
#endif
}
/* Eight elements to the cache: what a further format of caches has to provide. */
static inline void cla_store_cells(ClaRaw raw, float scale, __global CLA_KV_T* to) {
#if CLA_ALIGNED
  cla_put8(cla_cells(raw, scale), to);
#else
  cla_put8_any(cla_cells(raw, scale), to);
#endif
}
static inline ClaF8 cla_local8(__local const float* from) {
  ClaF8 x;
  x.lo = vload4(0, from);
  x.hi = vload4(1, from);
  return x;
}
static inline void cla_set_local8(ClaF8 x, __local float* to) {
  vstore4(x.lo, 0, to);
  vstore4(x.hi, 1, to);
}

static inline long cla_position(const ClaPrepareQKV* call, __global const int* positions,
                                long token, int row) {
  const long at = call->positions_at + row * call->positions_stride + token;
  return call->wide_positions ? ((__global const long*)positions)[at] : positions[at];
}
/* Which of the token's positions an angle turns by. */
static inline int cla_section_of(const ClaPrepareQKV* call, int angle) {
  if (call->sections == CLA_SECTIONS_IN_TURN) {
    if (angle % 3 == 1) return angle < 3 * call->section_height ? 1 : 0;
    return angle % 3 == 2 ? (angle < 3 * call->section_width ? 2 : 0) : 0;
  }
  if (angle < call->section_time) return 0;
  return angle < call->section_time + call->section_height ? 1 : 2;
}

/* Whether the table has all positions of the token. */
static inline int cla_known(const ClaPrepareQKV* call, const long* position) {
  int known = 1;
  for (int row = 0; row < 3; ++row)
    known &= (ulong)position[row] < (ulong)call->max_position ? 1 : 0;
  return known;
}

/* The token's cosines, then its sines, to local memory; NaN where the table has none. */
static inline void cla_load_turns(const ClaPrepareQKV* call, __global const uchar* table,
                                  const long* position, int known, __local float* turns) {
  const int half_dim = call->rotary_dim / 2;
  for (int i = (int)get_local_id(0); i < call->rotary_dim; i += CLA_WG_SIZE) {
    const int angle = i < half_dim ? i : i - half_dim;
    const long row = position[call->sections != 0 ? cla_section_of(call, angle) : 0];
    turns[i] = known ? cla_number(table, call->table_dtype, row * call->rotary_dim + i) : NAN;
  }
}

/* The tensors of the call. */
typedef struct ClaPreparedRows {
  __global const CLA_Q_T* query;
  __global const CLA_Q_T* key;
  __global const CLA_Q_T* value;
  __global CLA_Q_T* query_out;
  __global CLA_Q_T* key_out;
  __global CLA_Q_T* gate_out;
  __global CLA_KV_T* cache;
} ClaPreparedRows;

/* What a work-item has of a round: lane `lane` of a head of a tensor. */
typedef struct ClaPreparedHead {
  __global const CLA_Q_T* from; /* the head's first element */
  __local float* x;             /* the head in local memory */
  long token;
  int lane;
  int active; /* 0: it has nothing */
  int kind;   /* 0 query, 1 key, 2 value */
  int head;   /* of its kind */
} ClaPreparedHead;

static inline ClaPreparedHead cla_head_of(const ClaPrepareQKV* call, const ClaPreparedRows* of,
                                          long token, int row) {
  const int past_queries = row - call->num_heads, past_keys = past_queries - call->num_kv_heads;
  ClaPreparedHead own;
  own.token = token;
  if (past_queries < 0) {
    own.kind = 0;
    own.head = row;
    own.from = of->query + call->query.offset + token * call->query.stride +
               (long)row * (CLA_HEAD_DIM << call->has_gate);
  } else if (past_keys < 0) {
    own.kind = 1;
    own.head = past_queries;
    own.from =
        of->key + call->key.offset + token * call->key.stride + (long)past_queries * CLA_HEAD_DIM;
  } else {
    own.kind = 2;
    own.head = past_keys;
    own.from = of->value + call->value.offset + token * call->value.stride +
               (long)past_keys * CLA_HEAD_DIM;
  }
  return own;
}

/* Brings a head to local memory; the lane's part of its sum of squares. */
static inline float cla_load_head(const ClaPreparedHead* own) {
  float squares = 0.0f;
  for (int i = own->lane; i < CLA_UNITS; i += CLA_LANES) {
    const ClaF8 each = cla_raw_expand(cla_load_raw(own->from + i * 8));
    squares = cla_dot8(each, each, squares);
    cla_set_local8(each, own->x + i * 8);
  }
  return squares;
}

/* Norms a head in local memory. */
static inline void cla_norm_head(const ClaPrepareQKV* call, const ClaPreparedHead* own,
                                 float squares, __global const uchar* weight, int has_weight) {
  const float mean = fma(squares, 1.0f / CLA_HEAD_DIM, call->eps);
  const float factor = mean == 0.0f ? 0.0f : 1.0f / sqrt(mean);
  for (int i = own->lane; i < CLA_UNITS; i += CLA_LANES) {
    ClaF8 n = cla_scale8(cla_local8(own->x + i * 8), factor);
    if (has_weight) {
      float weights[8];
      for (int j = 0; j < 8; ++j)
        weights[j] = cla_number(weight, call->weight_dtype, i * 8 + j) + call->weight_beta;
      n.lo *= vload4(0, weights);
      n.hi *= vload4(1, weights);
    }
    if (call->norm == CLA_NORM_ROUNDED) n = cla_raw_expand(cla_raw_of(n));
    cla_set_local8(n, own->x + i * 8);
  }
}

/* Rotates the pairs of a head in local memory. */
static inline void cla_rotate_head(const ClaPrepareQKV* call, const ClaPreparedHead* own,
                                   __local const float* turns) {
  const int half_dim = call->rotary_dim / 2;
  const int step = call->interleaved ? 2 : 1, distance = call->interleaved ? 1 : half_dim;
  for (int i = own->lane; i < half_dim; i += CLA_LANES) {
    const float cosine = turns[i], sine = turns[half_dim + i];
    __local float* const pair = own->x + call->rotary_at + i * step;
    const float first = pair[0], second = pair[distance];
    pair[0] = fma(-sine, second, cosine * first);
    pair[distance] = fma(sine, first, cosine * second);
  }
}

/* Where dim 0 of a key or value is stored; null: nowhere. */
static inline __global CLA_KV_T* cla_cells_of(const ClaPrepareQKV* call, const ClaPreparedHead* own,
                                              __global CLA_KV_T* cache, long slot) {
  if (own->kind == 0) return 0;
  if (slot < 0) return 0;
  return cache + (own->kind == 1 ? call->k_offset : call->v_offset) +
         (long)((ulong)slot / (uint)call->block_size) * call->block_stride +
         (long)((ulong)slot % (uint)call->block_size) * call->token_stride +
         (long)own->head * call->head_stride;
}
/* Where dim 0 of a query or key is written; null: nowhere. */
static inline __global CLA_Q_T* cla_output_of(const ClaPrepareQKV* call, const ClaPreparedHead* own,
                                              const ClaPreparedRows* of) {
  const long at = (long)own->head * CLA_HEAD_DIM;
  if (own->kind == 0)
    return of->query_out + call->query_out.offset + own->token * call->query_out.stride + at;
  if (own->kind == 1 ? call->has_key_out : 0)
    return of->key_out + call->key_out.offset + own->token * call->key_out.stride + at;
  return 0;
}

/* Stores a head, values as they are. */
static inline void cla_store_head(const ClaPrepareQKV* call, const ClaPreparedHead* own,
                                  const ClaPreparedRows* of, long slot, float scale) {
  __global CLA_KV_T* const cells = cla_cells_of(call, own, of->cache, slot);
  __global CLA_Q_T* const out = cla_output_of(call, own, of);
  for (int i = own->lane; i < CLA_UNITS; i += CLA_LANES) {
    const ClaRaw raw =
        own->kind == 2 ? cla_load_raw(own->from + i * 8) : cla_raw_of(cla_local8(own->x + i * 8));
    if (out != 0) cla_store_raw(raw, out + i * 8);
    if (cells != 0) cla_store_cells(raw, scale, cells + i * 8);
  }
  if (own->kind == 0 ? call->has_gate : 0) {
    __global CLA_Q_T* const gate = of->gate_out + call->gate_out.offset +
                                   own->token * call->gate_out.stride +
                                   (long)own->head * CLA_HEAD_DIM;
    for (int i = own->lane; i < CLA_UNITS; i += CLA_LANES)
      cla_store_raw(cla_load_raw(own->from + CLA_HEAD_DIM + i * 8), gate + i * 8);
  }
}

/* The token's slot, negative if it stores nothing, as one does whose position the table lacks. */
static inline long cla_begin_token(const ClaPrepareQKV* call, __global const uchar* table,
                                   __global const int* positions, __global int* errors,
                                   __global const long* slots, long token, __local float* turns) {
  long slot = token < call->slot_tokens ? slots[call->slots_at + token] : -1;
  slot = slot < call->cache_slots ? slot : -1;
  if (call->rotary_dim == 0) return slot;
  long position[3];
  for (int row = 0; row < 3; ++row)
    position[row] = cla_position(call, positions, token, call->sections != 0 ? row : 0);
  const int known = cla_known(call, position);
  cla_load_turns(call, table, position, known, turns);
  if (known) return slot;
  if (call->has_errors ? get_local_id(0) == 0 : 0)
    cla_note(errors, (uint)token, CLA_ERROR_POSITION);
  return -1;
}

/* query, query_out:  [tokens, num_heads, HEAD_DIM], rows by stride; with a gate query is
                      [tokens, num_heads, 2, HEAD_DIM]
   key, value,
   key_out:           [tokens, num_kv_heads, HEAD_DIM]
   gate_out:          as query_out
   q_weight,
   k_weight:          [HEAD_DIM] of weight_dtype
   table:             [max_position, rotary_dim] of table_dtype: cosines, then sines
   positions:         int or long [1 or 3, tokens], rows by stride
   errors:            [1], if has_errors
   cache:             [page, token, KV head, HEAD_DIM] by strides
   slots:             [slot_tokens] at slots_at */
__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_prepare_qkv(
    const ClaPrepareQKV call, __global const CLA_Q_T* query, __global const CLA_Q_T* key,
    __global const CLA_Q_T* value, __global CLA_Q_T* query_out, __global CLA_Q_T* key_out,
    __global CLA_Q_T* gate_out, __global const uchar* q_weight, __global const uchar* k_weight,
    __global const uchar* table, __global const int* positions, __global int* errors,
    __global CLA_KV_T* cache, __global const long* slots CLA_QUANT_PARAMS) {
  __local float heads[CLA_HEADS * CLA_HEAD_DIM];
  __local float turns[CLA_HEAD_DIM];
  __local float parts[CLA_WG_SIZE];
  const ClaOptions opt = {.chunk = 0, CLA_QUANT_VALUES};
  const ClaPreparedRows of = {query, key, value, query_out, key_out, gate_out, cache};
  const int item = (int)get_local_id(0), place = item / CLA_LANES;
  const uint group = (uint)get_group_id(0), groups = (uint)call.groups_of_token;
  const long token = (long)(group / groups);
  const long slot = cla_begin_token(&call, table, positions, errors, slots, token, turns);
  const int begin = (int)(group % groups) * call.rows_of_group;
  const int end = min(begin + call.rows_of_group, call.num_rows);
  for (int first = begin; first < end; first += CLA_HEADS) {
    ClaPreparedHead own = cla_head_of(&call, &of, token, min(first + place, end - 1));
    own.lane = item % CLA_LANES;
    own.active = place < CLA_HEADS ? first + place < end : 0;
    own.x = heads + min(place, CLA_HEADS - 1) * CLA_HEAD_DIM;
    const int computed = own.active ? own.kind < 2 : 0;
    parts[item] = computed ? cla_load_head(&own) : 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE); /* heads, turns and parts are there */
    if (computed ? call.norm : 0) {
      float squares = 0.0f;
      for (int i = 0; i < CLA_LANES; ++i) squares += parts[item - own.lane + i];
      cla_norm_head(&call, &own, squares, own.kind == 0 ? q_weight : k_weight,
                    own.kind == 0 ? call.has_q_weight : call.has_k_weight);
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* heads are normed */
    if (computed) cla_rotate_head(&call, &own, turns);
    barrier(CLK_LOCAL_MEM_FENCE); /* heads are rotated */
    if (own.active)
      cla_store_head(&call, &own, &of, slot,
                     own.kind == 2 ? cla_v_scale(&opt, (uint)own.head, (uint)call.num_kv_heads)
                                   : cla_k_scale(&opt, own.kind == 1 ? (uint)own.head : 0));
    barrier(CLK_LOCAL_MEM_FENCE); /* heads are stored: the next round may overwrite them */
  }
}
