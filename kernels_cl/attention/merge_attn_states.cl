/* Joins attention over a prefix of the keys with attention over the rest.

     out = (w_p P + w_s S) / (w_p + w_s)    w_x = B^(lse_x - m), m = max(lse_p, lse_s), B = e or 2
     lse = m + log_B(w_p + w_s)

   An LSE of +inf counts as -inf; the output of a side of LSE -inf adds nothing, even where keys
   of logit -inf made it NaN: nothing tells that from memory never written. If both are, out = 0 and
   lse = -inf. An LSE that is NaN makes both NaN. Tokens from with_context on have no prefix:
   output and LSE are the suffix's as they are, infinities and NaN too. One group serves one token:
   its work-items share the outputs in pieces of eight elements, then the LSEs by heads. The barrier
   between lets results replace an input in place.

   macro          unit        legal values
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16: prefix and suffix
   CLA_KV_DTYPE   -           CLA_Q_DTYPE, 3 fp8 e4m3, 4 fp8 e5m2 or 5 int8: out; 8-bit types hold
                              type(out / scale)
   CLA_LSE_LOG2   -           0: B = e; 1: B = 2
   CLA_WG_SIZE    work-items  >= 1

   Launch: num_tokens groups. */
#if !defined(CLA_LSE_LOG2)
#error "merge_attn_states.cl needs CLA_LSE_LOG2"
#endif
#include "core/raw.clh"
#include "core/state.clh"

#define CLA_MERGE_UNITS 2 /* of a work-item in flight together */

typedef struct ClaWeights {
  float prefix; /* both 0 where no key was seen */
  float suffix;
  float lse;
} ClaWeights;

#define CLA_LSE_UNIT (CLA_LSE_LOG2 ? 1.0f : CLA_LN_2) /* of base 2 */

/* Weights that sum to 1; the suffix's alone where there is no prefix. */
static inline ClaWeights cla_weigh(float prefix, float suffix, int alone) {
  const ClaWeights whole = {0.0f, 1.0f, suffix};
  if (alone) return whole;
  ClaWeights w = {0.0f, 0.0f, -INFINITY};
  prefix = prefix == INFINITY ? -INFINITY : prefix;
  suffix = suffix == INFINITY ? -INFINITY : suffix;
  if (prefix == -INFINITY && suffix == -INFINITY) return w;
  const float largest = fmax(prefix, suffix);
  ClaRowState all = {(prefix - largest) * (1.0f / CLA_LSE_UNIT), 1.0f};
  const ClaRowState other = {(suffix - largest) * (1.0f / CLA_LSE_UNIT), 1.0f};
  w.prefix = cla_raise_base(&all, other.base);
  w.suffix = cla_add_state(&all, other);
  const float share = 1.0f / all.sum;
  w.lse = largest + log2(all.sum) * CLA_LSE_UNIT;
  w.prefix *= share;
  w.suffix *= share;
  return w;
}

/* One token's side. */
typedef struct ClaSide {
  __global const CLA_Q_T* values;
  __global const float* lse;
  long lse_head_stride;
} ClaSide;

static inline float cla_lse_of(const ClaSide* side, uint head) {
  return side->lse[(long)head * side->lse_head_stride];
}

/* Eight elements of the output. */
static inline ClaF8 cla_merged(ClaWeights w, ClaRaw prefix, ClaRaw suffix, float scale) {
  ClaF8 sum = cla_zero8();
  if (w.prefix != 0.0f) sum = cla_scale8(cla_raw_expand(prefix), w.prefix);
  if (w.suffix != 0.0f) sum = cla_mad8(w.suffix, cla_raw_expand(suffix), sum);
  if (w.suffix == 1.0f && w.prefix == 0.0f) sum = cla_raw_expand(suffix); /* -0 stays -0 */
#if CLA_KV_DTYPE >= 3
  sum = cla_divide8(sum, scale);
#endif
  return sum;
}

#if CLA_WG_SIZE > 1
/* Every CLA_WG_SIZE-th unit from `first` on, CLA_MERGE_UNITS in all: the last is on its way before
   the first is merged. */
static inline void cla_merge_units(const ClaSide* prefix, const ClaSide* suffix, int alone,
                                   uint first, uint units, uint head_units, float scale,
                                   __global CLA_KV_T* out) {
  ClaRaw p[CLA_MERGE_UNITS];
  ClaRaw s[CLA_MERGE_UNITS];
  float p_lse[CLA_MERGE_UNITS];
  float s_lse[CLA_MERGE_UNITS];
#pragma unroll
  for (uint i = 0; i < CLA_MERGE_UNITS; ++i) {
    const uint unit = min(first + i * CLA_WG_SIZE, units - 1);
    s_lse[i] = cla_lse_of(suffix, unit / head_units);
    s[i] = cla_raw_load(suffix->values + (ulong)unit * 8);
    p_lse[i] = -INFINITY;
    p[i] = s[i];
    if (!alone) {
      p_lse[i] = cla_lse_of(prefix, unit / head_units);
      p[i] = cla_raw_load(prefix->values + (ulong)unit * 8);
    }
  }
#pragma unroll
  for (uint i = 0; i < CLA_MERGE_UNITS; ++i) {
    const ClaF8 sum = cla_merged(cla_weigh(p_lse[i], s_lse[i], alone), p[i], s[i], scale);
    const uint unit = first + i * CLA_WG_SIZE;
    if (unit < units) cla_kv_store8(sum, out + (ulong)unit * 8);
  }
}
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_merge_attn_states(
    __global CLA_KV_T* out,           /* [tokens, num_heads, head_size], tokens by stride */
    long out_offset,                  /* elements, as all offsets and strides */
    long out_stride,                  /* from token to token */
    __global float* lse,              /* [tokens, num_heads] by strides; if write_lse */
    long lse_offset,                  /* */
    long lse_token_stride,            /* */
    long lse_head_stride,             /* */
    __global const CLA_Q_T* prefix,   /* as out, of its own type */
    long prefix_offset,               /* */
    long prefix_stride,               /* */
    __global const float* prefix_lse, /* as lse */
    long prefix_lse_offset,           /* */
    long prefix_lse_token_stride,     /* */
    long prefix_lse_head_stride,      /* */
    __global const CLA_Q_T* suffix,   /* as out */
    long suffix_offset,               /* */
    long suffix_stride,               /* */
    __global const float* suffix_lse, /* as lse */
    long suffix_lse_offset,           /* */
    long suffix_lse_token_stride,     /* */
    long suffix_lse_head_stride,      /* */
    int num_heads,                    /* heads */
    int head_size,                    /* elements, a multiple of 8 */
    long with_context,                /* tokens */
    int write_lse,                    /* 0 or 1 */
    __global const float* scale,      /* [1]; if scaled */
    int scaled) {                     /* 0 or 1; 8-bit types only */
  const long token = (long)get_group_id(0);
  const uint lane = (uint)get_local_id(0);
  const uint head_units = (uint)head_size / 8;
  const int alone = token >= with_context;
  const float factor = scaled ? scale[0] : 1.0f;
  prefix_lse += prefix_lse_offset + token * prefix_lse_token_stride;
  suffix_lse += suffix_lse_offset + token * suffix_lse_token_stride;
  prefix += prefix_offset + token * prefix_stride;
  suffix += suffix_offset + token * suffix_stride;
  out += out_offset + token * out_stride;

  const ClaSide before = {prefix, prefix_lse, prefix_lse_head_stride};
  const ClaSide after = {suffix, suffix_lse, suffix_lse_head_stride};
  const uint units = (uint)num_heads * head_units;
#if CLA_WG_SIZE > 1
  const int aligned =
      ((ulong)prefix | (ulong)suffix) % CLA_RAW_ALIGN == 0 && (ulong)out % CLA_KV_ALIGN == 0;
  if (aligned) {
    for (uint first = lane; first < units; first += CLA_MERGE_UNITS * CLA_WG_SIZE)
      cla_merge_units(&before, &after, alone, first, units, head_units, factor, out);
  }
#else
  const int aligned = 0;
#endif
  const uint unaligned = aligned ? 0 : units;
  for (uint unit = lane; unit < unaligned; unit += CLA_WG_SIZE) {
    const uint head = unit / head_units;
    const ulong at = (ulong)unit * 8;
    const ClaWeights w =
        cla_weigh(alone ? -INFINITY : cla_lse_of(&before, head), cla_lse_of(&after, head), alone);
    const ClaRaw s = cla_raw_load_any(suffix + at);
    const ClaRaw p = alone ? s : cla_raw_load_any(prefix + at);
    cla_kv_store8_any(cla_merged(w, p, s, factor), out + at);
  }
  barrier(CLK_GLOBAL_MEM_FENCE); /* LSEs read above -> replaced below */
  if (!write_lse) return;
  for (uint head = lane; head < (uint)num_heads; head += CLA_WG_SIZE) {
    lse[lse_offset + token * lse_token_stride + (long)head * lse_head_stride] =
        cla_weigh(alone ? -INFINITY : cla_lse_of(&before, head), cla_lse_of(&after, head), alone)
            .lse;
  }
}
