/* Gated delta rule and its relatives, token by token. Of a value head's state S [V_DIM, K_DIM], for
   each token

     S = S decay;  d = beta (v - S k), additive: d = v;  S = S + d k^T;  o = scale S q

   Rows of S do not depend on each other: a group has CLA_ROWS of them, in registers, from a
   request's first token to its last. CLA_LANES neighbours share a row, CLA_VEC elements in turn,
   and each of them has CLA_LANE_ROWS rows. Sums over lanes go through local memory, all lanes add
   the same numbers in the same order: which rows a group has, and what else is in the batch,
   changes no bit. In groups of 1 a work-item has whole rows.

   macro          legal values                                 meaning
   CLA_LANES      divides CLA_WG_SIZE and CLA_K_DIM / CLA_VEC  lanes of a row
   CLA_LANE_ROWS  >= 1                                         rows of a lane
   CLA_WG_SIZE    >= 1                                         work-items
   CLA_VEC        4, 8, 16                                     recurrent/vectors.clh
   and those of recurrent/gates.clh

   Launch: num_reqs * num_v_heads * ceil(V_DIM / CLA_ROWS) groups. */

#include "recurrent/gates.clh"

#if CLA_WG_SIZE % CLA_LANES != 0 || CLA_K_DIM % (CLA_LANES * CLA_VEC) != 0
#error "CLA_LANES must divide CLA_WG_SIZE and CLA_K_DIM / CLA_VEC"
#endif

#define CLA_VECS (CLA_K_DIM / CLA_LANES / CLA_VEC) /* of a row in a lane */
#define CLA_ROW_STEP (CLA_WG_SIZE / CLA_LANES)     /* from a lane's row to its next one */
#define CLA_ROWS (CLA_ROW_STEP * CLA_LANE_ROWS)
#define CLA_SUMS (CLA_LANE_ROWS + 2) /* that lanes add at once */
#if CLA_LANES > 1
#define CLA_PARTS (CLA_SUMS * CLA_WG_SIZE)
#else
#define CLA_PARTS 1 /* not used */
#endif

#if CLA_LANES % 4 == 0
/* The sum of the lanes' numbers, which lie side by side. */
static inline float cla_sum_parts(__local const float* parts) {
  __local const float4* const fours = (__local const float4*)parts;
  float4 sum = fours[0];
#pragma unroll
  for (uint i = 1; i < CLA_LANES / 4; ++i) sum += fours[i];
  return (sum.x + sum.y) + (sum.z + sum.w);
}
#else
static inline float cla_sum_parts(__local const float* parts) {
  float sum = parts[0];
#pragma unroll
  for (uint lane = 1; lane < CLA_LANES; ++lane) sum += parts[lane];
  return sum;
}
#endif

/* Makes of each number its sum over the lanes of a row. */
static inline void cla_sum_lanes(float* sums, uint count, __local float* parts) {
#if CLA_LANES > 1
  const uint item = (uint)get_local_id(0), first = item / CLA_LANES * CLA_LANES;
#pragma unroll
  for (uint i = 0; i < count; ++i) parts[i * CLA_WG_SIZE + item] = sums[i];
  barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
  for (uint i = 0; i < count; ++i) sums[i] = cla_sum_parts(parts + i * CLA_WG_SIZE + first);
#endif
}

/* Vector i of the lane. */
static inline uint cla_dim(uint lane, uint i) {
  return (i * CLA_LANES + lane) * CLA_VEC;
}

typedef struct ClaKeys {
  cla_vf q[CLA_VECS];
  cla_vf k[CLA_VECS];
} ClaKeys;

static inline void cla_delta_load_keys(ClaKeys* keys, __global const CLA_Q_T* q,
                                       __global const CLA_Q_T* k, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_VECS; ++i) {
    keys->q[i] = CLA_Q_LOADV(q + cla_dim(lane, i));
    keys->k[i] = CLA_Q_LOADV(k + cla_dim(lane, i));
  }
}

static inline float cla_dotv(const cla_vf* x, const cla_vf* y) {
  cla_vf sum = x[0] * y[0];
#pragma unroll
  for (uint i = 1; i < CLA_VECS; ++i) sum = mad(x[i], y[i], sum);
  return cla_sumv(sum);
}

static inline void cla_decay_row(cla_vf* row, float decay, const cla_vf* channels) {
#pragma unroll
  for (uint i = 0; i < CLA_VECS; ++i) {
#if CLA_BY_CHANNEL
    row[i] *= channels[i];
#else
    row[i] *= decay;
#endif
  }
}

static inline uint cla_delta_row(uint first, uint r) {
  return min(first + r * CLA_ROW_STEP, (uint)CLA_V_DIM - 1);
}

/* Zeros without a page to load from. */
static inline void cla_load_rows(cla_vf (*s)[CLA_VECS], __global const CLA_KV_T* from, int loads,
                                 uint row, uint lane) {
#pragma unroll
  for (uint r = 0; r < CLA_LANE_ROWS; ++r) {
#pragma unroll
    for (uint i = 0; i < CLA_VECS; ++i) {
      s[r][i] = (cla_vf)(0.0f);
      if (loads)
        s[r][i] = CLA_STATE_LOADV(from + cla_delta_row(row, r) * CLA_K_DIM + cla_dim(lane, i));
    }
  }
}

static inline void cla_delta_store_rows(__global CLA_KV_T* to, cla_vf (*s)[CLA_VECS], uint row,
                                        uint lane) {
  for (uint r = 0; r < CLA_LANE_ROWS && row + r * CLA_ROW_STEP < CLA_V_DIM; ++r) {
#pragma unroll
    for (uint i = 0; i < CLA_VECS; ++i)
      CLA_STATE_STOREV(s[r][i], to + (row + r * CLA_ROW_STEP) * CLA_K_DIM + cla_dim(lane, i));
  }
}

/* A token, and what its head has of the tensors there. */
typedef struct ClaToken {
  ClaGate gate;
  __global const CLA_Q_T* query;
  __global const CLA_Q_T* key;
  __global const CLA_Q_T* value;
} ClaToken;

/* Takes the rows one token further; `sums` become its results. */
static inline void cla_step(cla_vf (*s)[CLA_VECS], const ClaToken* token, const cla_vf* channels,
                            float scale, uint row, uint lane, float* sums, __local float* predicted,
                            __local float* results) {
  ClaKeys keys;
  cla_delta_load_keys(&keys, token->query, token->key, lane);
#pragma unroll
  for (uint r = 0; r < CLA_LANE_ROWS; ++r) {
    cla_decay_row(s[r], token->gate.decay, channels);
    sums[r] = CLA_RULE == 0 ? cla_dotv(s[r], keys.k) : 0.0f;
  }
  float k_factor = 1.0f;
#if CLA_L2_NORM
  sums[CLA_LANE_ROWS] = cla_dotv(keys.k, keys.k);
  sums[CLA_LANE_ROWS + 1] = cla_dotv(keys.q, keys.q);
#endif
#if CLA_L2_NORM || CLA_RULE == 0
  cla_sum_lanes(sums, CLA_L2_NORM ? CLA_SUMS : CLA_LANE_ROWS, predicted);
#endif
#if CLA_L2_NORM
  k_factor = cla_norm_factor(sums[CLA_LANE_ROWS]);
  scale *= cla_norm_factor(sums[CLA_LANE_ROWS + 1]);
#endif
#pragma unroll
  for (uint r = 0; r < CLA_LANE_ROWS; ++r) {
    const float v = token->gate.step * CLA_Q_LOAD1(token->value + cla_delta_row(row, r));
    const float d = CLA_RULE == 0 ? token->gate.beta * (v - sums[r] * k_factor) : v;
#pragma unroll
    for (uint i = 0; i < CLA_VECS; ++i) s[r][i] = mad((cla_vf)(d * k_factor), keys.k[i], s[r][i]);
    sums[r] = cla_dotv(s[r], keys.q);
  }
  cla_sum_lanes(sums, CLA_LANE_ROWS, results);
#if CLA_LANES > 1 && !CLA_L2_NORM && CLA_RULE != 0
  barrier(CLK_LOCAL_MEM_FENCE); /* results read -> written for the next token */
#endif
  for (uint r = 0; r < CLA_LANE_ROWS; ++r) sums[r] *= scale;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_delta_rule_loop(
    CLA_RULE_PARAMS) {
  /* Used in turns, so that each sum needs only one barrier. */
  __local float predicted[CLA_PARTS] __attribute__((aligned(16)));
  __local float results[CLA_PARTS] __attribute__((aligned(16)));
  const uint splits = (CLA_V_DIM + CLA_ROWS - 1) / CLA_ROWS, group = (uint)get_group_id(0);
  const int head = (int)(group / splits % (uint)call.num_v_heads);
  const ClaRecurrentRequest request = cla_request(
      &call.lists, group / splits / (uint)call.num_v_heads, call.lists.columns, 1, CLA_LISTS_GIVEN);
  if (!request.drafts && (request.tokens < call.min_tokens || request.tokens > call.max_tokens))
    return;
  const uint lane = (uint)get_local_id(0) % CLA_LANES;
  const uint row = group % splits * CLA_ROWS + (uint)get_local_id(0) / CLA_LANES;
  const long key_head = (long)(head / call.heads_per_key) * CLA_K_DIM;
  const long value_head = (long)head * CLA_V_DIM;
  const ClaGateTensors gates = {decay, beta, a_log, dt_bias};
  states += call.state_offset + value_head * CLA_K_DIM;
  cla_vf s[CLA_LANE_ROWS][CLA_VECS];
  cla_load_rows(s, states + max(request.page, 0l) * call.state_stride,
                request.initial && !request.skip, row, lane);
  for (int t = 0; t < request.tokens; ++t) {
    const long token = request.first + t;
    const ClaResult to = cla_recurrent_result_at(&call, out, value, d, z, token, head);
    float sums[CLA_SUMS];
    for (uint r = 0; r < CLA_SUMS; ++r) sums[r] = 0.0f;
    if (!request.skip) {
      const ClaToken of = {cla_gate(&call, &gates, token, head),
                           query + call.query.offset + token * call.query.stride + key_head,
                           key + call.key.offset + token * call.key.stride + key_head, to.value};
      cla_vf channels[CLA_VECS];
#if CLA_BY_CHANNEL
      for (uint i = 0; i < CLA_VECS; ++i)
        channels[i] = cla_channel_decays(&call, &gates, token, head, cla_dim(lane, i));
#endif
      cla_step(s, &of, channels, call.scale, row, lane, sums, predicted, results);
    }
    for (uint r = 0; r < CLA_LANE_ROWS && lane == 0; ++r) {
      const uint at = row + r * CLA_ROW_STEP;
      if (at < CLA_V_DIM) cla_put_result(&to, at, sums[r], request.skip);
    }
    if (request.skip || !(request.drafts || t == request.tokens - 1)) continue;
    const long page = cla_page(&call.lists, request.columns, request.drafts ? t : 0);
    if (page >= 0) cla_delta_store_rows(states + page * call.state_stride, s, row, lane);
  }
}
