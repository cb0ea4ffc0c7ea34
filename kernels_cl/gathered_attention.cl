/* What stands around two matrix products where a library of them computes attention: of one request
   at a time,

     gather     K and V [num_kv_heads, num_keys, HEAD_DIM] from the request's pages or rows
     pack       Q [num_kv_heads, tokens, GROUP, HEAD_DIM] from the query tensor
     (product)  scores = scale log2(e) Q K^T, [num_kv_heads, tokens, GROUP, num_keys]
     weigh      scores become weights: options, softmax, sink; the LSE
     (product)  sums = weights V, as Q
     unpack     output from sums

   All of it is f32 in one buffer. A product takes in every key of the request: a row gives those
   that it does not see the weight -0. An inf or a NaN among their values spoils its sum even so;
   unpack makes such sums anew, from the keys that the row sees.

   macro          unit        legal values
   CLA_HEAD_DIM   elements    8 ... 512, steps of 8
   CLA_GROUP      heads       query heads per KV head
   CLA_PAGE_SIZE  tokens      0: no pages
   CLA_Q_DTYPE    -           0 f32, 1 f16, 2 bf16
   CLA_KV_DTYPE   -           0 ... 5, see lib/storage.clh
   CLA_WG_SIZE    work-items  >= 1
   CLA_WINDOW ... -           lib/options.clh

   Launch: weigh with a group for each row of scores, the others with any number of groups. */
#define CLA_HEADS_PER_ITEM 1
#define CLA_HEAD_CHUNKS 1
#define CLA_BLOCK_ROWS 1
#define CLA_BLOCK_KV 1
#include "lib/attention.clh"

#define CLA_UNITS (CLA_HEAD_DIM / 8) /* of eight elements, in a head */

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_gather(
    __global float* work,              /* the buffer */
    long k_at,                         /* elements before K */
    long v_at,                         /* elements before V */
    __global const int* restrict meta, /* block tables */
    long pages_at,                     /* ints before the request's; no pages: its first row */
    int num_keys,                      /* of the request */
    int num_kv_heads,                  /* heads */
    __global const CLA_KV_T* restrict k_cache, /* [page, token, kv head, HEAD_DIM] by strides */
    long k_offset,                             /* elements */
    __global const CLA_KV_T* restrict v_cache, /* as k_cache */
    long v_offset,                             /* elements */
    long block_stride,                         /* elements */
    long token_stride,                         /* elements */
    long head_stride CLA_QUANT_PARAMS) {       /* elements */
  const ulong count = (ulong)num_kv_heads * (uint)num_keys * CLA_UNITS;
  ClaWorkItem request;
  request.pages_at = (int)pages_at;
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const uint dim = (uint)(unit % CLA_UNITS) * 8;
    const uint key = (uint)(unit / CLA_UNITS % (uint)num_keys);
    const uint head = (uint)(unit / CLA_UNITS / (uint)num_keys);
    const int page = cla_page_of(meta + pages_at, key);
    const long at = cla_key_row(&request, page, key, block_stride, token_stride) +
                    (long)head * head_stride + dim;
    ClaF8 k = CLA_KV_LOAD8(k_cache + k_offset + at);
    ClaF8 v = CLA_KV_LOAD8(v_cache + v_offset + at);
#if CLA_KV_QUANT
    const ClaOptions opt = {CLA_QUANT_VALUES.always_zero = 0};
    k = cla_scale8(k, cla_k_scale(&opt, head));
    v = cla_scale8(v, cla_v_scale(&opt, head, (uint)num_kv_heads));
#endif
    cla_store4_f32(k.lo, work + k_at + unit * 8);
    cla_store4_f32(k.hi, work + k_at + unit * 8 + 4);
    cla_store4_f32(v.lo, work + v_at + unit * 8);
    cla_store4_f32(v.hi, work + v_at + unit * 8 + 4);
  }
}

/* Unit `unit` of the packed rows in a tensor of tokens. */
static inline long cla_unpacked(ulong unit, uint num_tokens, long token_stride) {
  const uint dim = (uint)(unit % CLA_UNITS) * 8;
  const ulong row = unit / CLA_UNITS;
  const uint token = (uint)(row / CLA_GROUP % num_tokens);
  const uint head = (uint)(row / CLA_GROUP / num_tokens) * CLA_GROUP + (uint)(row % CLA_GROUP);
  return (long)token * token_stride + (long)head * CLA_HEAD_DIM + dim;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_pack(
    __global float* work,               /* the buffer */
    long q_at,                          /* elements before Q */
    __global const CLA_Q_T* restrict q, /* [tokens, num_heads, HEAD_DIM] */
    long q_offset,                      /* elements before the first token */
    long q_token_stride,                /* elements */
    int num_tokens,                     /* tokens */
    int num_kv_heads) {                 /* heads */
  const ulong count = (ulong)num_kv_heads * CLA_GROUP * (uint)num_tokens * CLA_UNITS;
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const ClaF8 x =
        CLA_Q_LOAD8(q + q_offset + cla_unpacked(unit, (uint)num_tokens, q_token_stride));
    cla_store4_f32(x.lo, work + q_at + unit * 8);
    cla_store4_f32(x.hi, work + q_at + unit * 8 + 4);
  }
}

static inline int cla_finite8(ClaF8 x) {
  return all(isfinite(x.lo)) && all(isfinite(x.hi));
}

/* The sum over the keys that a row sees of eight dims of their values. */
static inline ClaF8 cla_seen_sum(__global const float* weights, __global const float* values,
                                 int num_keys) {
  ClaF8 sum = cla_zero8();
  for (int key = 0; key < num_keys; ++key) {
    const float weight = weights[key];
    if (as_uint(weight) == as_uint(CLA_UNSEEN_WEIGHT)) continue;
    const ClaF8 v = cla_load8_f32(values + (long)key * CLA_HEAD_DIM);
    sum.lo = mad((float4)(weight), v.lo, sum.lo);
    sum.hi = mad((float4)(weight), v.hi, sum.hi);
  }
  return sum;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_unpack(
    __global const float* restrict work, /* the buffer */
    long sums_at,                        /* elements before the sums; unused without keys */
    long weights_at,                     /* elements before the weights */
    long v_at,                           /* elements before V */
    int num_keys,                        /* of the request */
    __global CLA_Q_T* restrict out,      /* [tokens, num_heads, HEAD_DIM] */
    long out_offset,                     /* elements before the first token */
    long out_token_stride,               /* elements */
    int num_tokens,                      /* tokens */
    int num_kv_heads) {                  /* heads */
  const ulong count = (ulong)num_kv_heads * CLA_GROUP * (uint)num_tokens * CLA_UNITS;
  for (ulong unit = get_global_id(0); unit < count; unit += get_global_size(0)) {
    const uint dim = (uint)(unit % CLA_UNITS) * 8;
    const ulong row = unit / CLA_UNITS;
    const ulong head = row / CLA_GROUP / (uint)num_tokens;
    ClaF8 x = cla_zero8();
    if (num_keys > 0) x = cla_load8_f32(work + sums_at + unit * 8);
    if (!cla_finite8(x)) {
      x = cla_seen_sum(work + weights_at + row * (uint)num_keys,
                       work + v_at + head * (uint)num_keys * CLA_HEAD_DIM + dim, num_keys);
    }
    const long at = out_offset + cla_unpacked(unit, (uint)num_tokens, out_token_stride);
    CLA_Q_STORE4(x.lo, out + at);
    CLA_Q_STORE4(x.hi, out + at + 4);
  }
}

/* What all work-items of the group have: the largest of their `own`, or the sum. */
static inline float cla_largest(float own, __local float* parts) {
  barrier(CLK_LOCAL_MEM_FENCE); /* parts read -> overwritten */
  parts[get_local_id(0)] = own;
  barrier(CLK_LOCAL_MEM_FENCE); /* parts written -> read */
  float all = parts[0];
  for (uint i = 1; i < CLA_WG_SIZE; ++i) all = fmax(all, parts[i]);
  return all;
}
static inline float cla_total(float own, __local float* parts) {
  barrier(CLK_LOCAL_MEM_FENCE); /* parts read -> overwritten */
  parts[get_local_id(0)] = own;
  barrier(CLK_LOCAL_MEM_FENCE); /* parts written -> read */
  float all = parts[0];
  for (uint i = 1; i < CLA_WG_SIZE; ++i) all += parts[i];
  return all;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_weigh(
    __global float* work,              /* the buffer */
    long scores_at,                    /* elements before the scores */
    int num_keys,                      /* of the request */
    int num_tokens,                    /* of the scores */
    int first_row,                     /* of the batch: the first token's */
    int first_position,                /* its place in the request */
    int num_kv_heads,                  /* heads */
    int causal,                        /* 0 or 1 */
    __global float* restrict lse,      /* [tokens, num_heads], natural log; if write_lse */
    int write_lse CLA_OPTION_PARAMS) { /* 0 or 1 */
  __local float parts[CLA_WG_SIZE];
  const ClaOptions opt = CLA_OPTION_VALUES;
  const uint group = (uint)get_group_id(0);
  const uint num_heads = (uint)num_kv_heads * CLA_GROUP;
  const uint token = group / CLA_GROUP % (uint)num_tokens;
  ClaTask task;
  task.kv_head = group / CLA_GROUP / (uint)num_tokens;
  task.first_head = task.kv_head * CLA_GROUP + group % CLA_GROUP;
  task.num_heads = 1;
  task.item.q_row = first_row + (int)token;
  task.item.q_count = 1;
  task.item.q_pos = first_position + (int)token;
  task.item.kv_begin = 0;
  task.item.kv_end = num_keys;
  task.item.pages_at = 0;
  task.item.partial_row = -1;
  const ClaRow row = cla_row(&opt, &task, 0, causal);
  __global float* scores = work + scores_at + (long)group * num_keys;

  ClaDenominator all;
  float own = CLA_NEG_BIG;
  for (int key = (int)get_local_id(0); key < num_keys; key += CLA_WG_SIZE)
    if (cla_sees(&row, key)) own = fmax(own, cla_logit(&opt, &row, scores[key], key));
  all.max_log2 = cla_largest(own, parts);
  own = 0.0f;
  for (int key = (int)get_local_id(0); key < num_keys; key += CLA_WG_SIZE) {
    const float weight = cla_sees(&row, key)
                             ? exp2(cla_logit(&opt, &row, scores[key], key) - all.max_log2)
                             : CLA_UNSEEN_WEIGHT;
    scores[key] = weight;
    own += weight;
  }
  all.sum = cla_total(own, parts);
  const float rescale = cla_join_sink(&opt, num_heads, task.first_head, &all);
  const float factor = rescale * cla_inverse_sum(all.sum);
  for (int key = (int)get_local_id(0); key < num_keys; key += CLA_WG_SIZE) scores[key] *= factor;
  if (write_lse && get_local_id(0) == 0) {
    lse[(ulong)task.item.q_row * num_heads + task.first_head] =
        cla_natural_lse(cla_lse2(all.max_log2, all.sum));
  }
}
