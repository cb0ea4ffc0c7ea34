/* Gated delta rule and its relatives (delta_rule_loop.cl), a chunk of tokens at once. With start
   state S, decays e_i, D_ij = e_{j+1} ... e_i and E_i = e_0 ... e_i, for the tokens i of a chunk

     L_ij = beta_i D_ij k_i k_j  (j < i)        M_ij = scale D_ij q_i k_j  (j <= i)
     (I + L) U = beta (V - E S K)               additive: U = V
     o_i = scale E_i S q_i + sum_j M_ij U_j     S = E_last S + sum_j D_last,j U_j k_j^T

   Decays are products of factors of at most 1, never quotients: nothing overflows, and what
   underflows is nothing. The triangle is solved by forward substitution in f32. Where each channel
   of a key decays by itself, k_j is multiplied by its decays up to token i before it meets k_i and
   q_i, and D and E are part of the keys and queries.

   A group has CLA_ROWS rows of the state, columns of U, transposed in local memory; a work-item
   some tokens of a row, or CLA_ROW_VEC rows, its "rows" below. All groups of a head make L and M
   anew. Padding behind a request's last token has k = q = v = 0, beta = 0 and e = 1.

   macro            legal values                     meaning
   CLA_CHUNK        multiple of CLA_TOKEN_BLOCK      tokens
   CLA_ROWS         multiple of CLA_ROW_VEC          rows of a group; divides V_DIM
   CLA_ROW_VEC      1; CLA_VEC in groups of 1        rows of a work-item, side by side
   CLA_TOKEN_BLOCK  1 ... CLA_CHUNK                  tokens that a work-item sums for at once
   CLA_WG_SIZE      >= 1; multiple of CLA_ROWS or 1  work-items
   and those of recurrent/gates.clh

   Launch: num_reqs * num_v_heads * (V_DIM / CLA_ROWS) groups. */

#include "recurrent/gates.clh"

#if CLA_ROW_VEC == 1
typedef float cla_rf;
#else
typedef cla_vf cla_rf;
#endif

#define CLA_ROW_LANES (CLA_WG_SIZE == 1 ? 1 : CLA_ROWS) /* work-items with rows of their own */
#define CLA_ROW_ITEMS (CLA_ROWS / CLA_ROW_VEC)          /* of a token */
#define CLA_SHARERS (CLA_WG_SIZE / CLA_ROW_LANES)       /* that share rows */
#define CLA_KEY_VECS (CLA_K_DIM / CLA_VEC)
#define CLA_TOKEN_STEP (CLA_SHARERS * CLA_TOKEN_BLOCK) /* between blocks of a work-item */
#define CLA_BLOCKS ((CLA_CHUNK + CLA_TOKEN_STEP - 1) / CLA_TOKEN_STEP)
#if CLA_WG_SIZE == 1
#define CLA_SYNC()
#else
#define CLA_SYNC() barrier(CLK_LOCAL_MEM_FENCE)
#endif

typedef struct ClaChunk {
  __local cla_rf* s;    /* [K_DIM][ROW_ITEMS] */
  __local cla_rf* u;    /* [CHUNK][ROW_ITEMS] */
  __local float* q;     /* [CHUNK][K_DIM], normalised, times scale */
  __local float* k;     /* [CHUNK][K_DIM], normalised */
  __local float* last;  /* by channel: [CHUNK][K_DIM], k decayed to the chunk's end; else k */
  __local float* e;     /* by channel: [CHUNK][K_DIM]; else [CHUNK] */
  __local float* l;     /* [CHUNK][CHUNK], j < i */
  __local float* m;     /* [CHUNK][CHUNK], j <= i */
  __local float* start; /* [CHUNK], E_i, by channel 1 */
  __local float* end;   /* [CHUNK], D_last,j, by channel 1 */
  __local float* beta;  /* [CHUNK] */
  __local float* step;  /* [CHUNK]: what a value is multiplied by */
} ClaChunk;

/* The tensors of a head. */
typedef struct ClaHead {
  const ClaDeltaRule* call;
  ClaGateTensors gates;
  __global const CLA_Q_T* query;
  __global const CLA_Q_T* key;
  int number;
} ClaHead;

static inline float cla_square_sum(__local const float* x, uint t) {
  float sum = 0.0f;
#if CLA_WG_SIZE == 1
  cla_vf sums = (cla_vf)(0.0f);
  for (uint i = 0; i < CLA_K_DIM; i += CLA_VEC) {
    const cla_vf y = CLA_CAT(vload, CLA_VEC)(0, x + i);
    sums = mad(y, y, sums);
  }
  sum = cla_sumv(sums);
#else
  uint at = t; /* neighbours begin in different banks */
  for (uint i = 0; i < CLA_K_DIM; ++i) {
    at = at >= CLA_K_DIM ? 0 : at;
    sum = mad(x[at], x[at], sum);
    ++at;
  }
#endif
  return sum;
}

/* Keys, queries and gates of `count` tokens from `first` on. */
static inline void cla_load_chunk(const ClaChunk* chunk, const ClaHead* head, long first,
                                  uint count) {
  const uint item = (uint)get_local_id(0);
  const ClaDeltaRule* const call = head->call;
  for (uint i = item; i < CLA_CHUNK * CLA_KEY_VECS; i += CLA_WG_SIZE) {
    const uint t = i / CLA_KEY_VECS, dim = i % CLA_KEY_VECS * CLA_VEC;
    const long token = first + min(t, count - 1);
    cla_vf q = CLA_Q_LOADV(head->query + token * call->query.stride + dim);
    cla_vf k = CLA_Q_LOADV(head->key + token * call->key.stride + dim);
#if CLA_BY_CHANNEL
    cla_vf e = cla_channel_decays(call, &head->gates, token, head->number, dim);
    e = t < count ? e : (cla_vf)(1.0f);
    CLA_CAT(vstore, CLA_VEC)(e, 0, chunk->e + t * CLA_K_DIM + dim);
#endif
    q = t < count ? q : (cla_vf)(0.0f); /* not a product: padding may be no number */
    k = t < count ? k : (cla_vf)(0.0f);
    CLA_CAT(vstore, CLA_VEC)(q, 0, chunk->q + t * CLA_K_DIM + dim);
    CLA_CAT(vstore, CLA_VEC)(k, 0, chunk->k + t * CLA_K_DIM + dim);
  }
  for (uint t = item; t < CLA_CHUNK; t += CLA_WG_SIZE) {
    const ClaGate gate = cla_gate(call, &head->gates, first + min(t, count - 1), head->number);
    chunk->beta[t] = t < count ? gate.beta : 0.0f;
    chunk->step[t] = t < count ? gate.step : 0.0f;
#if CLA_BY_CHANNEL == 0
    chunk->e[t] = t < count ? gate.decay : 1.0f;
#endif
  }
  CLA_SYNC();
}

static inline void cla_normalise(const ClaChunk* chunk, float scale) {
  const uint item = (uint)get_local_id(0);
#if CLA_L2_NORM
  for (uint t = item; t < CLA_CHUNK; t += CLA_WG_SIZE) { /* their places are free until later */
    chunk->start[t] = cla_norm_factor(cla_square_sum(chunk->k + t * CLA_K_DIM, t));
    chunk->end[t] = cla_norm_factor(cla_square_sum(chunk->q + t * CLA_K_DIM, t));
  }
  CLA_SYNC();
#endif
  for (uint i = item; i < CLA_CHUNK * CLA_KEY_VECS; i += CLA_WG_SIZE) {
    const uint t = i / CLA_KEY_VECS;
    const float for_k = CLA_L2_NORM ? chunk->start[t] : 1.0f;
    const float for_q = CLA_L2_NORM ? scale * chunk->end[t] : scale;
    const cla_vf k = CLA_CAT(vload, CLA_VEC)(i, chunk->k), q = CLA_CAT(vload, CLA_VEC)(i, chunk->q);
    CLA_CAT(vstore, CLA_VEC)(k * for_k, i, chunk->k);
    CLA_CAT(vstore, CLA_VEC)(q * for_q, i, chunk->q);
  }
  CLA_SYNC();
}

#if CLA_BY_CHANNEL == 0
/* k_i k_j and q_i k_j, then their decays down each column. */
static inline void cla_pairs(const ClaChunk* chunk) {
  const uint item = (uint)get_local_id(0);
  for (uint pair = item; pair < CLA_CHUNK * CLA_CHUNK; pair += CLA_WG_SIZE) {
    const uint i = pair / CLA_CHUNK, j = pair % CLA_CHUNK;
    if (j > i) continue;
    __local const float* const q = chunk->q + i * CLA_K_DIM;
    __local const float* const k = chunk->k + i * CLA_K_DIM;
    __local const float* const other = chunk->k + j * CLA_K_DIM;
    float for_k = 0.0f, for_q = 0.0f;
#if CLA_WG_SIZE == 1
    cla_vf k_sums = (cla_vf)(0.0f), q_sums = (cla_vf)(0.0f);
    for (uint x = 0; x < CLA_KEY_VECS; ++x) {
      const cla_vf y = CLA_CAT(vload, CLA_VEC)(x, other);
      k_sums = mad(CLA_CAT(vload, CLA_VEC)(x, k), y, k_sums);
      q_sums = mad(CLA_CAT(vload, CLA_VEC)(x, q), y, q_sums);
    }
    for_k = cla_sumv(k_sums);
    for_q = cla_sumv(q_sums);
#else
    uint at = j; /* neighbours begin in different banks */
    for (uint x = 0; x < CLA_K_DIM; ++x) {
      at = at >= CLA_K_DIM ? 0 : at;
      for_k = mad(k[at], other[at], for_k);
      for_q = mad(q[at], other[at], for_q);
      ++at;
    }
#endif
    chunk->l[pair] = for_k;
    chunk->m[pair] = for_q;
  }
  CLA_SYNC();
  for (uint j = item; j < CLA_CHUNK; j += CLA_WG_SIZE) {
    float decay = 1.0f, from_start = chunk->e[0];
    for (uint i = j + 1; i < CLA_CHUNK; ++i) {
      decay *= chunk->e[i];
      chunk->l[i * CLA_CHUNK + j] *= chunk->beta[i] * decay;
      chunk->m[i * CLA_CHUNK + j] *= decay;
    }
    for (uint i = 1; i <= j; ++i) from_start *= chunk->e[i];
    chunk->end[j] = decay;
    chunk->start[j] = from_start;
  }
  CLA_SYNC();
}
#else
/* The same where the decays are part of the keys, which are decayed token by token. */
static inline void cla_pairs(const ClaChunk* chunk) {
  const uint item = (uint)get_local_id(0);
  for (uint j = item; j < CLA_CHUNK; j += CLA_WG_SIZE) {
    cla_vf for_k[CLA_CHUNK], for_q[CLA_CHUNK];
    for (uint i = 0; i < CLA_CHUNK; ++i) for_k[i] = for_q[i] = (cla_vf)(0.0f);
    for (uint x = 0; x < CLA_KEY_VECS; ++x) {
      cla_vf key = CLA_CAT(vload, CLA_VEC)(j * CLA_KEY_VECS + x, chunk->k);
      for (uint i = j; i < CLA_CHUNK; ++i) {
        const uint at = i * CLA_KEY_VECS + x;
        if (i > j) key *= CLA_CAT(vload, CLA_VEC)(at, chunk->e);
        for_k[i] = mad(key, CLA_CAT(vload, CLA_VEC)(at, chunk->k), for_k[i]);
        for_q[i] = mad(key, CLA_CAT(vload, CLA_VEC)(at, chunk->q), for_q[i]);
      }
      CLA_CAT(vstore, CLA_VEC)(key, j * CLA_KEY_VECS + x, chunk->last);
    }
    for (uint i = j; i < CLA_CHUNK; ++i) {
      chunk->l[i * CLA_CHUNK + j] = chunk->beta[i] * cla_sumv(for_k[i]);
      chunk->m[i * CLA_CHUNK + j] = cla_sumv(for_q[i]);
    }
    chunk->start[j] = chunk->end[j] = 1.0f;
  }
  CLA_SYNC();
  for (uint x = item; x < CLA_KEY_VECS; x += CLA_WG_SIZE) { /* e becomes E */
    cla_vf all = (cla_vf)(1.0f);
    for (uint i = 0; i < CLA_CHUNK; ++i) {
      const uint at = i * CLA_KEY_VECS + x;
      all *= CLA_CAT(vload, CLA_VEC)(at, chunk->e);
      CLA_CAT(vstore, CLA_VEC)(all, at, chunk->e);
      CLA_CAT(vstore, CLA_VEC)(all * CLA_CAT(vload, CLA_VEC)(at, chunk->k), at, chunk->k);
      CLA_CAT(vstore, CLA_VEC)(all * CLA_CAT(vload, CLA_VEC)(at, chunk->q), at, chunk->q);
    }
  }
  CLA_SYNC();
}
#endif

/* S k and S q of the tokens from t on, for the rows of an item. */
static inline void cla_apply(const ClaChunk* chunk, uint t, uint rows, cla_rf* for_k,
                             cla_rf* for_q) {
#pragma unroll
  for (uint i = 0; i < CLA_TOKEN_BLOCK; ++i) for_k[i] = for_q[i] = (cla_rf)(0.0f);
  for (uint x = 0; x < CLA_K_DIM; x += 4) {
    cla_rf s[4];
#pragma unroll
    for (uint c = 0; c < 4; ++c) s[c] = chunk->s[(x + c) * CLA_ROW_ITEMS + rows];
#pragma unroll
    for (uint i = 0; i < CLA_TOKEN_BLOCK; ++i) {
      const float4 of_q = vload4(0, chunk->q + (t + i) * CLA_K_DIM + x);
      for_q[i] = mad((cla_rf)(of_q.x), s[0], for_q[i]);
      for_q[i] = mad((cla_rf)(of_q.y), s[1], for_q[i]);
      for_q[i] = mad((cla_rf)(of_q.z), s[2], for_q[i]);
      for_q[i] = mad((cla_rf)(of_q.w), s[3], for_q[i]);
#if CLA_RULE == 0
      const float4 of_k = vload4(0, chunk->k + (t + i) * CLA_K_DIM + x);
      for_k[i] = mad((cla_rf)(of_k.x), s[0], for_k[i]);
      for_k[i] = mad((cla_rf)(of_k.y), s[1], for_k[i]);
      for_k[i] = mad((cla_rf)(of_k.z), s[2], for_k[i]);
      for_k[i] = mad((cla_rf)(of_k.w), s[3], for_k[i]);
#endif
    }
  }
}

static inline cla_rf cla_load_values(__global const CLA_Q_T* from) {
#if CLA_ROW_VEC == 1
  return CLA_Q_LOAD1(from);
#else
  return CLA_Q_LOADV(from);
#endif
}

static inline void cla_put_results(const ClaResult* to, uint row, cla_rf results) {
#if CLA_ROW_VEC == 1
  cla_put_result(to, row, results, 0);
#else
#if CLA_SKIP
  results = mad((cla_rf)(to->d), CLA_Q_LOADV(to->value + row), results);
#endif
#if CLA_HAS_Z
  const cla_rf z = CLA_Q_LOADV(to->z + row);
  results *= z / (1.0f + exp(-z));
#endif
  CLA_Q_STOREV(results, to->out + row);
#endif
}

/* U from its right side; every group of rows by one item. */
static inline void cla_solve(const ClaChunk* chunk) {
#if CLA_RULE == 0
  for (uint rows = (uint)get_local_id(0); rows < CLA_ROW_ITEMS; rows += CLA_WG_SIZE) {
    cla_rf u[CLA_CHUNK];
#pragma unroll
    for (uint i = 0; i < CLA_CHUNK; ++i) {
      u[i] = chunk->u[i * CLA_ROW_ITEMS + rows];
#pragma unroll
      for (uint j = 0; j < i; ++j) u[i] -= (cla_rf)(chunk->l[i * CLA_CHUNK + j]) * u[j];
      chunk->u[i * CLA_ROW_ITEMS + rows] = u[i];
    }
  }
  CLA_SYNC();
#endif
}

/* S at the chunk's end, of the elements that the work-item has. */
static inline void cla_advance(const ClaChunk* chunk, uint rows, uint sharer) {
  cla_rf u[CLA_CHUNK];
#pragma unroll
  for (uint j = 0; j < CLA_CHUNK; ++j)
    u[j] = chunk->u[j * CLA_ROW_ITEMS + rows] * (cla_rf)(chunk->end[j]);
  for (uint x = sharer * 4; x < CLA_K_DIM; x += CLA_SHARERS * 4) {
    cla_rf s[4];
#pragma unroll
    for (uint c = 0; c < 4; ++c) {
#if CLA_BY_CHANNEL
      const float decay = chunk->e[(CLA_CHUNK - 1) * CLA_K_DIM + x + c];
#else
      const float decay = chunk->start[CLA_CHUNK - 1];
#endif
      s[c] = chunk->s[(x + c) * CLA_ROW_ITEMS + rows] * (cla_rf)(decay);
    }
#pragma unroll
    for (uint j = 0; j < CLA_CHUNK; ++j) {
      const float4 key = vload4(0, chunk->last + j * CLA_K_DIM + x);
      s[0] = mad((cla_rf)(key.x), u[j], s[0]);
      s[1] = mad((cla_rf)(key.y), u[j], s[1]);
      s[2] = mad((cla_rf)(key.z), u[j], s[2]);
      s[3] = mad((cla_rf)(key.w), u[j], s[3]);
    }
#pragma unroll
    for (uint c = 0; c < 4; ++c) chunk->s[(x + c) * CLA_ROW_ITEMS + rows] = s[c];
  }
}

/* Between a page and local memory, transposed. */
static inline void cla_load_state(const ClaChunk* chunk, __global const CLA_KV_T* from, int loads) {
  __local float* const s = (__local float*)chunk->s;
  for (uint i = (uint)get_local_id(0); i < CLA_ROWS * CLA_K_DIM; i += CLA_WG_SIZE) {
    const uint row = i / CLA_K_DIM, x = i % CLA_K_DIM;
    s[x * CLA_ROWS + row] = loads ? CLA_STATE_LOAD1(from + i) : 0.0f;
  }
}
static inline void cla_store_state(const ClaChunk* chunk, __global CLA_KV_T* to) {
  __local const float* const s = (__local const float*)chunk->s;
  for (uint i = (uint)get_local_id(0); i < CLA_ROWS * CLA_K_DIM; i += CLA_WG_SIZE)
    CLA_STATE_SET1(s[i % CLA_K_DIM * CLA_ROWS + i / CLA_K_DIM], to + i);
}

/* One chunk: results of `count` tokens from `first` on, and the state after them. */
static inline void cla_take_chunk(const ClaChunk* chunk, const ClaHead* head,
                                  __global const CLA_Q_T* value, __global CLA_Q_T* out,
                                  __global const float* d, __global const CLA_Q_T* z, long first,
                                  uint count, uint row) {
  const uint item = (uint)get_local_id(0), sharer = item / CLA_ROW_LANES;
  cla_load_chunk(chunk, head, first, count);
  cla_normalise(chunk, head->call->scale);
  cla_pairs(chunk);
  cla_rf results[CLA_ROW_ITEMS / CLA_ROW_LANES][CLA_BLOCKS][CLA_TOKEN_BLOCK];
#pragma unroll
  for (uint n = 0; n < CLA_ROW_ITEMS / CLA_ROW_LANES; ++n) {
    const uint rows = item % CLA_ROW_LANES + n * CLA_ROW_LANES;
#pragma unroll
    for (uint block = 0; block < CLA_BLOCKS; ++block) {
      const uint t = block * CLA_TOKEN_STEP + sharer * CLA_TOKEN_BLOCK;
      if (t >= CLA_CHUNK) continue;
      cla_rf for_k[CLA_TOKEN_BLOCK], for_q[CLA_TOKEN_BLOCK];
      cla_apply(chunk, t, rows, for_k, for_q);
#pragma unroll
      for (uint i = 0; i < CLA_TOKEN_BLOCK; ++i) {
        const long token = first + min(t + i, count - 1);
        cla_rf v =
            cla_load_values(value + head->call->value.offset + token * head->call->value.stride +
                            (long)head->number * CLA_V_DIM + row + rows * CLA_ROW_VEC);
        v = t + i < count ? v * (cla_rf)(chunk->step[t + i]) : (cla_rf)(0.0f);
        if (CLA_RULE == 0)
          v = (cla_rf)(chunk->beta[t + i]) * (v - (cla_rf)(chunk->start[t + i]) * for_k[i]);
        chunk->u[(t + i) * CLA_ROW_ITEMS + rows] = v;
        results[n][block][i] = (cla_rf)(chunk->start[t + i]) * for_q[i];
      }
    }
  }
  CLA_SYNC();
  cla_solve(chunk);
#pragma unroll
  for (uint n = 0; n < CLA_ROW_ITEMS / CLA_ROW_LANES; ++n) {
    const uint rows = item % CLA_ROW_LANES + n * CLA_ROW_LANES;
#pragma unroll
    for (uint block = 0; block < CLA_BLOCKS; ++block) {
#pragma unroll
      for (uint i = 0; i < CLA_TOKEN_BLOCK; ++i) {
        const uint t = block * CLA_TOKEN_STEP + sharer * CLA_TOKEN_BLOCK + i;
        if (t >= count) continue;
        cla_rf sum = results[n][block][i];
        for (uint j = 0; j <= t; ++j)
          sum = mad((cla_rf)(chunk->m[t * CLA_CHUNK + j]), chunk->u[j * CLA_ROW_ITEMS + rows], sum);
        const ClaResult to =
            cla_recurrent_result_at(head->call, out, value, d, z, first + t, head->number);
        cla_put_results(&to, row + rows * CLA_ROW_VEC, sum);
      }
    }
    cla_advance(chunk, rows, sharer);
  }
  CLA_SYNC();
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_delta_rule_chunk(
    CLA_RULE_PARAMS) {
  __local cla_rf s[CLA_K_DIM * CLA_ROW_ITEMS], u[CLA_CHUNK * CLA_ROW_ITEMS];
  __local float q[CLA_CHUNK * CLA_K_DIM], k[CLA_CHUNK * CLA_K_DIM];
  __local float l[CLA_CHUNK * CLA_CHUNK], m[CLA_CHUNK * CLA_CHUNK];
  __local float from_start[CLA_CHUNK], to_end[CLA_CHUNK], betas[CLA_CHUNK], steps[CLA_CHUNK];
#if CLA_BY_CHANNEL
  __local float e[CLA_CHUNK * CLA_K_DIM], last[CLA_CHUNK * CLA_K_DIM];
#else
  __local float e[CLA_CHUNK];
  __local float* const last = k;
#endif
  const ClaChunk chunk = {s, u, q, k, last, e, l, m, from_start, to_end, betas, steps};
  const uint splits = CLA_V_DIM / CLA_ROWS, group = (uint)get_group_id(0);
  const int number = (int)(group / splits % (uint)call.num_v_heads);
  const ClaRecurrentRequest request = cla_request(
      &call.lists, group / splits / (uint)call.num_v_heads, call.lists.columns, 1, CLA_LISTS_GIVEN);
  if (request.drafts || request.tokens < call.min_tokens || request.tokens > call.max_tokens)
    return;
  const uint row = group % splits * CLA_ROWS;
  if (request.skip) {
    for (uint i = (uint)get_local_id(0); i < CLA_ROWS * (uint)request.tokens; i += CLA_WG_SIZE) {
      const ClaResult to =
          cla_recurrent_result_at(&call, out, value, d, z, request.first + i / CLA_ROWS, number);
      cla_put_result(&to, row + i % CLA_ROWS, 0.0f, 1);
    }
    return;
  }
  const long key_head = (long)(number / call.heads_per_key) * CLA_K_DIM;
  const ClaHead head = {&call,
                        {decay, beta, a_log, dt_bias},
                        query + call.query.offset + key_head,
                        key + call.key.offset + key_head,
                        number};
  states += call.state_offset + request.page * call.state_stride +
            ((long)number * CLA_V_DIM + row) * CLA_K_DIM;
  cla_load_state(&chunk, states, request.initial);
  CLA_SYNC();
  for (int t = 0; t < request.tokens; t += CLA_CHUNK) {
    cla_take_chunk(&chunk, &head, value, out, d, z, request.first + t,
                   (uint)min(CLA_CHUNK, request.tokens - t), row);
  }
  cla_store_state(&chunk, states);
}
