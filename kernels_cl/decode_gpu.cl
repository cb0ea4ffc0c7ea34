/* Paged attention for few rows per key range: decode and short queries, on a GPU.

     out[r, :] = sum_p softmax_p(scale * <q[r, :], k[p, :]>) v[p, :]     p: the keys that row r sees

   One work-group serves one work item for one KV head: BLOCK_ROWS rows share every key read. CLA_LPK lanes hold a row's
   head dims, eight each, and form a slot; WG_SIZE / CLA_LPK slots walk the key range side by side, BLOCK_KV keys at a step:

     for each step of the group            (same count for all slots: barriers and shuffles stay uniform)
       load V of this step                 (in flight during the dots)
       s[row][key] = <q, k> over own dims  (q from local memory)
       load K of the next step             (in flight during everything that follows)
       s = sum of s over the slot's lanes  (the only exchange between lanes)
       online softmax per slot, acc += p * V

   and one tree merge of the slots through local memory ends the item.

   Loads in flight per lane: 2 * BLOCK_KV of 16 bytes with a 16-bit cache (16 KiB a group of 128 at BLOCK_KV 4).
   Registers by ptxas for sm_90, f16, head size 128, CLA_REDUCE 1, BLOCK_KV 4: REGISTER_TABLE

   macro                unit        legal values
   CLA_HEAD_DIM         elements    8 ... 256, steps of 8
   CLA_GROUP            heads       query heads per KV head, >= 1
   CLA_HEADS_PER_ITEM   heads       1 ... CLA_BLOCK_ROWS
   CLA_HEAD_CHUNKS      chunks      ceil(CLA_GROUP / CLA_HEADS_PER_ITEM)
   CLA_Q_DTYPE          -           0 f32, 1 f16, 2 bf16: q and out
   CLA_KV_DTYPE         -           0 f32, 1 f16, 2 bf16: k_cache and v_cache
   CLA_PAGE_SIZE        tokens      >= 1; multiples of CLA_BLOCK_KV need fewer look-ups
   CLA_BLOCK_ROWS       rows        1, 2, 4, 8
   CLA_BLOCK_KV         keys        per slot and step: 1, 2, 4, 8
   CLA_WG_SIZE          work-items  power of two, 32 ... 256
   CLA_REDUCE           -           0 local memory, 1 shuffles by inline PTX (32 lanes run in step)

   Launch: num_items * num_kv_heads * CLA_HEAD_CHUNKS groups of CLA_WG_SIZE. K and V rows start on 16-byte boundaries. */
#if !defined(CLA_REDUCE)
#error "decode_gpu.cl needs CLA_REDUCE"
#endif
#include "lib/common.clh"
#include "lib/storage.clh"
#include "lib/attention.clh"

#if CLA_BLOCK_ROWS != 1 && CLA_BLOCK_ROWS != 2 && CLA_BLOCK_ROWS != 4 && CLA_BLOCK_ROWS != 8
#error "CLA_BLOCK_ROWS must be 1, 2, 4 or 8"
#endif
#if CLA_BLOCK_KV != 1 && CLA_BLOCK_KV != 2 && CLA_BLOCK_KV != 4 && CLA_BLOCK_KV != 8
#error "CLA_BLOCK_KV must be 1, 2, 4 or 8"
#endif
#if CLA_WG_SIZE != 32 && CLA_WG_SIZE != 64 && CLA_WG_SIZE != 128 && CLA_WG_SIZE != 256
#error "CLA_WG_SIZE must be 32, 64, 128 or 256"
#endif

/* Lanes per key: HEAD_DIM / 8 rounded up to a power of two; the lanes past the last dim hold zeros. */
#if CLA_HEAD_DIM <= 8
#define CLA_LPK 1
#elif CLA_HEAD_DIM <= 16
#define CLA_LPK 2
#elif CLA_HEAD_DIM <= 32
#define CLA_LPK 4
#elif CLA_HEAD_DIM <= 64
#define CLA_LPK 8
#elif CLA_HEAD_DIM <= 128
#define CLA_LPK 16
#else
#define CLA_LPK 32
#endif

#define CLA_SLOTS (CLA_WG_SIZE / CLA_LPK)
#define CLA_STEP_KEYS (CLA_SLOTS * CLA_BLOCK_KV)
#define CLA_SCORES (CLA_BLOCK_ROWS * CLA_BLOCK_KV)
#define CLA_OWN_SCORES ((CLA_SCORES + CLA_LPK - 1) / CLA_LPK) /* that a lane holds when summing by shuffles */

/* A slot's keys start at a multiple of BLOCK_KV, so with such pages they share one. */
#if CLA_PAGE_SIZE % CLA_BLOCK_KV == 0
#define CLA_PAGES_PER_STEP 1
#else
#define CLA_PAGES_PER_STEP CLA_BLOCK_KV
#endif

/* Local memory for the exchange, in floats: the larger of what the reduction and the merge of the slots need. */
#define CLA_PARTIAL_STRIDE (CLA_WG_SIZE + 1) /* odd: lanes that read a column meet different banks */
#define CLA_REDUCE_FLOATS (CLA_SCORES * (CLA_PARTIAL_STRIDE + CLA_SLOTS))
#define CLA_MERGE_FLOATS (CLA_BLOCK_ROWS * (CLA_WG_SIZE / 2) * 10)
#if CLA_REDUCE == 0 && CLA_LPK > 1 && CLA_REDUCE_FLOATS > CLA_MERGE_FLOATS
#define CLA_SCRATCH_FLOATS CLA_REDUCE_FLOATS
#else
#define CLA_SCRATCH_FLOATS CLA_MERGE_FLOATS
#endif

#if CLA_REDUCE == 1 && CLA_KV_DTYPE == 1
/* The two f16 of a word, without the round trip through private memory that vload_half asks of the compiler. */
static inline float2 cla_expand_f16x2(uint bits) {
  float2 x;
  asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(bits));
  return x;
}

static inline ClaF8 cla_expand(ClaKvRaw raw) {
  ClaF8 x;
  x.lo = (float4)(cla_expand_f16x2(raw.bits.x), cla_expand_f16x2(raw.bits.y));
  x.hi = (float4)(cla_expand_f16x2(raw.bits.z), cla_expand_f16x2(raw.bits.w));
  return x;
}
#else
static inline ClaF8 cla_expand(ClaKvRaw raw) { return cla_kv_expand(raw); }
#endif

#if CLA_LPK == 1
/* One lane holds all dims. */
static inline void cla_sum_over_slot(float* scores, __local float* scratch) {}
#elif CLA_REDUCE == 0
/* Replaces each score by its sum over the slot's lanes. scratch: partial sums [SCORES][PARTIAL_STRIDE], sums [SLOTS][SCORES].
   Called again only after a step's second barrier, when every lane is past its reads of the partial sums; the sums are
   rewritten only after the next first barrier, when every lane is past its reads of them. */
static inline void cla_sum_over_slot(float* scores, __local float* scratch) {
  const uint lid = (uint)get_local_id(0);
  const uint slot = lid / CLA_LPK;
  __local float* sums = scratch + CLA_SCORES * CLA_PARTIAL_STRIDE;
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) scratch[i * CLA_PARTIAL_STRIDE + lid] = scores[i];
  barrier(CLK_LOCAL_MEM_FENCE); /* partial sums written -> read */
  for (uint i = lid % CLA_LPK; i < CLA_SCORES; i += CLA_LPK) {
    float sum = 0.0f;
    for (uint lane = 0; lane < CLA_LPK; ++lane) sum += scratch[i * CLA_PARTIAL_STRIDE + slot * CLA_LPK + lane];
    sums[slot * CLA_SCORES + i] = sum;
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* sums written -> read */
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) scores[i] = sums[slot * CLA_SCORES + i];
}
#else
static inline float cla_shuffle_xor(float value, uint mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(mask));
  return result;
}

/* The value that lane `lane` of the own slot holds. */
static inline float cla_shuffle_slot(float value, uint lane) {
  float result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
               : "=f"(result)
               : "f"(value), "r"(lane), "r"(((32u - CLA_LPK) << 8) | 0x1fu));
  return result;
}

/* One exchange of the halving: each lane gives away the half of its sums that its partner keeps. With a single sum left,
   partners share it. */
static inline void cla_halve(float* scores, uint lane, uint mask) {
  const uint kept = CLA_SCORES * mask / CLA_LPK;
  const int upper = (lane & mask) != 0;
  if (mask >= CLA_LPK) return; /* a larger slot's step */
  if (kept == 0) scores[0] += cla_shuffle_xor(scores[0], mask);
#pragma unroll
  for (uint i = 0; i < CLA_SCORES / 2; ++i) { /* not i < kept: compilers unroll before they know it */
    if (i < kept) {
      const float low = scores[i];
      const float high = scores[i + kept];
      scores[i] = (upper ? high : low) + cla_shuffle_xor(upper ? low : high, mask);
    }
  }
}

/* Replaces each score by its sum over the slot's lanes: SCORES values over LPK lanes cost about 2 * SCORES shuffles, not
   SCORES * log2(LPK). After the halving lane i holds the sums from SCORES * i / LPK on, and gives them to all. */
static inline void cla_sum_over_slot(float* scores, __local float* scratch) {
  const uint lane = (uint)get_local_id(0) % CLA_LPK;
  float own[CLA_OWN_SCORES];
  cla_halve(scores, lane, 16);
  cla_halve(scores, lane, 8);
  cla_halve(scores, lane, 4);
  cla_halve(scores, lane, 2);
  cla_halve(scores, lane, 1);
#pragma unroll
  for (uint i = 0; i < CLA_OWN_SCORES; ++i) own[i] = scores[i];
#pragma unroll
  for (uint i = 0; i < CLA_SCORES; ++i) {
    scores[i] = cla_shuffle_slot(own[i % CLA_OWN_SCORES], i * CLA_LPK / CLA_SCORES);
  }
}
#endif

/* Physical pages of the BLOCK_KV keys from `first` on. Keys outside [begin, last] stand for the nearest one inside: what
   they load is valid and never used, and every lane runs the same straight code. */
static inline void cla_find_pages(int* page, __global const int* pages, int first, int begin, int last) {
#pragma unroll
  for (int i = 0; i < CLA_PAGES_PER_STEP; ++i) page[i] = pages[(uint)clamp(first + i, begin, last) / CLA_PAGE_SIZE];
}

/* Elements from the start of the cache to the rows of those keys. */
static inline void cla_find_rows(long* row, const int* page, int first, int begin, int last, long block_stride,
                                 long token_stride) {
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    const long token = (long)((uint)clamp(first + i, begin, last) % CLA_PAGE_SIZE);
    row[i] = (long)page[i % CLA_PAGES_PER_STEP] * block_stride + token * token_stride;
  }
}

static inline void cla_load_rows(ClaKvRaw* raw, __global const CLA_KV_T* cache, const long* row) {
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) raw[i] = cla_kv_raw_load(cache + row[i]);
}

/* A slot's softmax over the keys it has met, for one row: acc = sum 2^(s - max) v, sum = sum 2^(s - max). */
typedef struct ClaState {
  float max;
  float sum;
  ClaF8 acc;
} ClaState;

/* Takes in BLOCK_KV keys of one row. `scores` are base-2 logits on entry and weights on return; keys outside
   [begin, end) get the weight 0 by selection. */
static inline void cla_weigh(ClaState* state, float* scores, int first, int begin, int end) {
  float new_max = state->max;
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    scores[i] = cla_in_range(first + i, begin, end) ? scores[i] : CLA_NEG_BIG;
    new_max = fmax(new_max, scores[i]);
  }
  if (new_max > state->max) { /* rare after the first steps */
    const float factor = native_exp2(state->max - new_max);
    state->acc = cla_scale8(state->acc, factor);
    state->sum *= factor;
    state->max = new_max;
  }
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    const float weight = native_exp2(scores[i] - new_max);
    scores[i] = cla_in_range(first + i, begin, end) ? weight : 0.0f;
    state->sum += scores[i];
  }
}

/* Joins another slot's softmax over other keys. Empty ones join without harm: their sums are 0 and their max is finite. */
static inline void cla_join(ClaState* state, float max_log2, float sum, ClaF8 acc) {
  const float new_max = fmax(state->max, max_log2);
  const float own = native_exp2(state->max - new_max);
  const float other = native_exp2(max_log2 - new_max);
  state->acc = cla_mad8(other, acc, cla_scale8(state->acc, own));
  state->sum = state->sum * own + sum * other;
  state->max = new_max;
}

/* Halves the number of slots until slot 0 holds the group's result. scratch: acc [2 * ROWS][WG / 2] float4, then max and
   sum [2 * ROWS][WG / 2]. */
static inline void cla_join_slots(ClaState* state, __local float* scratch) {
  const uint lid = (uint)get_local_id(0);
  __local float4* accs = (__local float4*)scratch;
  __local float* sums = scratch + CLA_BLOCK_ROWS * (CLA_WG_SIZE / 2) * 8;
  for (uint lanes = CLA_WG_SIZE / 2; lanes >= CLA_LPK; lanes /= 2) { /* lanes of the slots that stay */
    barrier(CLK_LOCAL_MEM_FENCE);                                      /* earlier use of scratch done -> written */
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      const uint at = row * CLA_WG_SIZE + lid - lanes;
      if (lid >= lanes && lid < 2 * lanes) {
        accs[at] = state[row].acc.lo;
        accs[at + CLA_WG_SIZE / 2] = state[row].acc.hi;
        sums[at] = state[row].max;
        sums[at + CLA_WG_SIZE / 2] = state[row].sum;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE); /* upper slots written -> read by the lower */
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      const uint at = row * CLA_WG_SIZE + lid;
      if (lid < lanes) {
        ClaF8 acc;
        acc.lo = accs[at];
        acc.hi = accs[at + CLA_WG_SIZE / 2];
        cla_join(&state[row], sums[at], sums[at + CLA_WG_SIZE / 2], acc);
      }
    }
  }
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_decode_gpu(
    __global const int* restrict meta,            /* the step's metadata: items at items_at, page ids at pages_at */
    int items_at,                                 /* ints, a multiple of 8 */
    int num_items,                                /* the launch says it too */
    int pages_at,                                 /* ints */
    __global const CLA_Q_T* restrict q,           /* [tokens, num_heads, HEAD_DIM] */
    long q_offset,                                /* elements */
    long q_token_stride,                          /* elements */
    __global const CLA_KV_T* restrict k_cache,    /* [page, token, kv head, HEAD_DIM] by the strides below */
    long k_offset,                                /* elements, a multiple of 8 */
    __global const CLA_KV_T* restrict v_cache,    /* as k_cache */
    long v_offset,                                /* elements, a multiple of 8 */
    long block_stride,                            /* elements, a multiple of 8 */
    long token_stride,                            /* elements, a multiple of 8 */
    long head_stride,                             /* elements, a multiple of 8 */
    __global CLA_Q_T* restrict out,               /* [tokens, num_heads, HEAD_DIM] */
    long out_offset,                              /* elements */
    long out_token_stride,                        /* elements */
    __global float* restrict lse,                 /* [tokens, num_heads], natural log; used if write_lse */
    __global float* restrict partial_out,         /* [partial rows, num_heads, HEAD_DIM] */
    __global float* restrict partial_lse2,        /* [partial rows, num_heads], log2 */
    int num_kv_heads,                             /* heads */
    float scale_log2e,                            /* softmax scale * log2(e) */
    int causal,                                   /* 0 or 1 */
    int write_lse) {                              /* 0 or 1 */
  __local float4 q_tile[CLA_BLOCK_ROWS * CLA_LPK * 2]; /* scaled queries, zeros past the last dim and row */
  __local float4 scratch[(CLA_SCRATCH_FLOATS + 3) / 4];

  const uint lid = (uint)get_local_id(0);
  const uint lane = lid % CLA_LPK;
  const uint slot = lid / CLA_LPK;
  const ClaTask task = cla_task(meta, items_at, (uint)num_kv_heads);
  const int has_dims = lane * 8 < CLA_HEAD_DIM;

  for (uint i = lid; i < CLA_BLOCK_ROWS * CLA_LPK; i += CLA_WG_SIZE) {
    const uint row = i / CLA_LPK;
    const uint dim = i % CLA_LPK * 8;
    ClaF8 x = cla_zero8();
    if (cla_row_exists(&task, row) && dim < CLA_HEAD_DIM) {
      x = cla_scale8(CLA_Q_LOAD8(q + cla_query_at(&task, row, q_offset, q_token_stride) + dim), scale_log2e);
    }
    q_tile[2 * i] = x.lo;
    q_tile[2 * i + 1] = x.hi;
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* q_tile written -> read */

  ClaState state[CLA_BLOCK_ROWS];
#pragma unroll
  for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
    state[row].max = CLA_NEG_BIG;
    state[row].sum = 0.0f;
    state[row].acc = cla_zero8();
  }

  const int begin = task.item.kv_begin;
  const int last = task.item.kv_end - 1;
  const int aligned_begin = begin - begin % CLA_BLOCK_KV;
  __global const int* pages = meta + pages_at + task.item.pages_at;
  const long head_at = (long)task.kv_head * head_stride + lane * 8;
  __global const CLA_KV_T* k_lane = k_cache + k_offset + head_at;
  __global const CLA_KV_T* v_lane = v_cache + v_offset + head_at;

  int first = aligned_begin + (int)slot * CLA_BLOCK_KV; /* the slot's first key of the step */
  int page[CLA_PAGES_PER_STEP];                         /* of the step after the rows in `at` */
  long at[CLA_BLOCK_KV];
  ClaKvRaw k_raw[CLA_BLOCK_KV];
  ClaKvRaw v_raw[CLA_BLOCK_KV];
#pragma unroll
  for (int i = 0; i < CLA_BLOCK_KV; ++i) {
    k_raw[i] = cla_kv_raw_zero();
    v_raw[i] = cla_kv_raw_zero();
    at[i] = 0;
  }
  if (begin <= last) {
    cla_find_pages(page, pages, first, begin, last);
    cla_find_rows(at, page, first, begin, last, block_stride, token_stride);
    cla_find_pages(page, pages, first + CLA_STEP_KEYS, begin, last);
    if (has_dims) cla_load_rows(k_raw, k_lane, at);
  }

  for (int step = aligned_begin; step <= last; step += CLA_STEP_KEYS) {
    if (has_dims) cla_load_rows(v_raw, v_lane, at);

    float scores[CLA_SCORES]; /* [BLOCK_ROWS][BLOCK_KV] */
    ClaF8 k[CLA_BLOCK_KV];
#pragma unroll
    for (int i = 0; i < CLA_BLOCK_KV; ++i) k[i] = cla_expand(k_raw[i]);
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      ClaF8 x;
      x.lo = q_tile[(row * CLA_LPK + lane) * 2];
      x.hi = q_tile[(row * CLA_LPK + lane) * 2 + 1];
#pragma unroll
      for (int i = 0; i < CLA_BLOCK_KV; ++i) scores[row * CLA_BLOCK_KV + i] = cla_dot8(x, k[i], 0.0f);
    }

    /* The next step's K; behind the last one, the range's last key again. */
    cla_find_rows(at, page, first + CLA_STEP_KEYS, begin, last, block_stride, token_stride);
    cla_find_pages(page, pages, first + 2 * CLA_STEP_KEYS, begin, last);
    if (has_dims) cla_load_rows(k_raw, k_lane, at);

    cla_sum_over_slot(scores, (__local float*)scratch);
#pragma unroll
    for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
      cla_weigh(&state[row], scores + row * CLA_BLOCK_KV, first, begin, cla_row_kv_end(&task.item, row, causal));
    }
#pragma unroll
    for (int i = 0; i < CLA_BLOCK_KV; ++i) {
      const ClaF8 v = cla_expand(v_raw[i]);
#pragma unroll
      for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
        const float weight = scores[row * CLA_BLOCK_KV + i];
        /* Weight 0 skips the key: V may hold inf or NaN where this row must not look. */
        if (weight != 0.0f) state[row].acc = cla_mad8(weight, v, state[row].acc);
      }
    }
    first += CLA_STEP_KEYS;
  }

  cla_join_slots(state, (__local float*)scratch);

#pragma unroll
  for (uint row = 0; row < CLA_BLOCK_ROWS; ++row) {
    if (slot == 0 && has_dims && cla_row_exists(&task, row)) {
      const ClaF8 result = cla_scale8(state[row].acc, cla_inverse_sum(state[row].sum));
      const float lse2 = cla_lse2(state[row].max, state[row].sum);
      const ulong result_row = cla_result_row(&task, row, (uint)num_kv_heads);
      if (task.item.partial_row >= 0) {
        __global float* to = partial_out + result_row * CLA_HEAD_DIM + lane * 8;
        cla_store4_f32(result.lo, to);
        cla_store4_f32(result.hi, to + 4);
        if (lane == 0) partial_lse2[result_row] = lse2;
      } else {
        __global CLA_Q_T* to = out + cla_query_at(&task, row, out_offset, out_token_stride) + lane * 8;
        CLA_Q_STORE4(result.lo, to);
        CLA_Q_STORE4(result.hi, to + 4);
        if (lane == 0 && write_lse) lse[result_row] = cla_natural_lse(lse2);
      }
    }
  }
}
