/* Causal convolution of each channel by itself, over the tokens of a batch:

     y_t = act(bias + sum_j w[j] x_{t - W + 1 + j})

   What came before a request's first token are rows of its page, oldest first: rows 0 ... W - 2, of
   a request with drafts those from its accepted tokens - 1 on. Afterwards the page holds the last
   W - 1 inputs; of a request with drafts all of the window and the tokens but the oldest, so that
   the next step can choose where its window begins. With gates it is y_t = out_gate_t conv(in_gate
   x)_t, and inputs are products rounded to their type, as the page holds them.

   A group has CLA_TOKENS tokens and some channels, CLA_VEC neighbours a work-item. The groups of a
   request's first tokens alone read and write its page, after they have read all that it takes.
   How the tokens of a batch are cut follows from starts alone: request r has the pieces from
   starts[r] / CLA_TOKENS + r on, at least as many as it needs.

   macro           legal values                 meaning
   CLA_WIDTH       2 ... 8                      W
   CLA_TOKENS      >= 1                         tokens of a group
   CLA_SILU        0, 1                         act: none, x sigmoid(x)
   CLA_HAS_BIAS    0, 1                         else bias is 0
   CLA_CONV_GATES  0, 1                         whether there are gates
   CLA_Q_DTYPE     0 f32, 1 f16, 2 bf16         x, gates, out, states
   CLA_KV_DTYPE    the same                     weight, bias
   CLA_VEC         4, 8, 16; divides channels   recurrent/vectors.clh
   CLA_WG_SIZE     >= 1                         work-items

   Launch: (num_tokens / CLA_TOKENS + num_reqs) * channel_groups groups. */

#include "recurrent/lists.clh"
#include "recurrent/vectors.clh"

#define CLA_BEFORE (CLA_WIDTH - 1)
#define CLA_AHEAD 4 /* tokens that a work-item loads at once */

/* The request whose pieces piece is one of. */
static inline uint cla_conv_request_of(const ClaRecurrentLists* lists, __global const int* starts,
                                       uint piece) {
  uint low = 0, high = (uint)lists->num_reqs;
  while (high - low > 1) {
    const uint middle = (low + high) / 2;
    const uint first = (uint)max(starts[lists->starts_at + middle], 0) / CLA_TOKENS + middle;
    if (first <= piece) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/* A channel's filter. */
typedef struct ClaFilter {
  cla_vf weight[CLA_WIDTH];
  cla_vf bias;
} ClaFilter;

static inline ClaFilter cla_filter(__global const CLA_KV_T* weight, __global const CLA_KV_T* bias,
                                   int channel) {
  ClaFilter filter;
  float rows[CLA_VEC * CLA_WIDTH], columns[CLA_WIDTH][CLA_VEC];
#pragma unroll
  for (uint i = 0; i < CLA_WIDTH; ++i) {
    const cla_vf some = CLA_STATE_LOADV(weight + (long)channel * CLA_WIDTH + i * CLA_VEC);
    CLA_CAT(vstore, CLA_VEC)(some, i, rows);
  }
#pragma unroll
  for (uint c = 0; c < CLA_VEC; ++c) {
#pragma unroll
    for (uint j = 0; j < CLA_WIDTH; ++j) columns[j][c] = rows[c * CLA_WIDTH + j];
  }
  for (uint j = 0; j < CLA_WIDTH; ++j) filter.weight[j] = CLA_CAT(vload, CLA_VEC)(0, columns[j]);
  filter.bias = (cla_vf)(0.0f);
#if CLA_HAS_BIAS
  filter.bias = CLA_STATE_LOADV(bias + channel);
#endif
  return filter;
}

/* As memory of the type holds it. */
static inline cla_vf cla_as_stored(cla_vf x) {
#if CLA_Q_DTYPE == 1
  ushort bits[CLA_VEC];
  CLA_CAT(CLA_CAT(vstore_half, CLA_VEC), _rte)(x, 0, (__private half*)bits);
  return CLA_CAT(vload_half, CLA_VEC)(0, (const __private half*)bits);
#elif CLA_Q_DTYPE == 2
  return CLA_CAT(as_float, CLA_VEC)(CLA_CAT(convert_uint, CLA_VEC)(cla_bf16_of(x)) << 16);
#else
  return x;
#endif
}

typedef struct ClaInputs {
  __global const CLA_Q_T* x; /* of the work-item's channels, token 0 */
  __global const CLA_Q_T* gate;
  long stride, gate_stride;
} ClaInputs;

static inline cla_vf cla_input(const ClaInputs* from, long token) {
  cla_vf x = CLA_Q_LOADV(from->x + token * from->stride);
#if CLA_CONV_GATES
  x = cla_as_stored(x * CLA_Q_LOADV(from->gate + token * from->gate_stride));
#endif
  return x;
}

/* The page of a request, whose window is in `before`. */
static inline void cla_keep(const ClaRecurrentRequest* request, const ClaInputs* from,
                            const cla_vf* before, __global CLA_Q_T* page, int channels) {
  const int total = CLA_BEFORE + request->tokens;
  const int kept = request->drafts ? total - 1 : CLA_BEFORE;
  for (int j = 0; j < kept; ++j) {
    const int at = total - kept + j; /* of the window, then the tokens */
    cla_vf x = before[0];
#pragma unroll
    for (int i = 1; i < CLA_BEFORE; ++i) x = at == i ? before[i] : x;
    if (at >= CLA_BEFORE) x = cla_input(from, request->first + at - CLA_BEFORE);
    CLA_Q_STOREV(x, page + (long)j * channels);
  }
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_causal_conv1d(
    const ClaCausalConv call, CLA_LISTS, __global const CLA_Q_T* x,
    __global const CLA_KV_T* weight,  /* [channels, W] */
    __global const CLA_KV_T* bias,    /* [channels] */
    __global const CLA_Q_T* in_gate,  /* as x */
    __global const CLA_Q_T* out_gate, /* as x */
    __global CLA_Q_T* states,         /* pages of [state_rows, channels] */
    __global CLA_Q_T* out) {          /* as x */
  const uint groups = (uint)call.channel_groups, piece = (uint)get_group_id(0) / groups;
  const uint number = cla_conv_request_of(&call.lists, starts, piece);
  const ClaRecurrentRequest request =
      cla_request(&call.lists, number, call.state_rows - CLA_BEFORE + 1, 0, CLA_LISTS_GIVEN);
  const int part =
      (int)piece - (int)((uint)max(starts[call.lists.starts_at + number], 0) / CLA_TOKENS + number);
  const int begin = part * CLA_TOKENS, end = min(begin + CLA_TOKENS, request.tokens);
  const int step = (int)(groups * CLA_WG_SIZE * CLA_VEC);
  if (begin >= end) return;
  for (int channel =
           (int)((uint)get_group_id(0) % groups * CLA_WG_SIZE + (uint)get_local_id(0)) * CLA_VEC;
       channel < call.channels; channel += step) {
    __global CLA_Q_T* const to = out + call.out.offset + channel;
    if (request.skip) {
      for (int t = begin; t < end; ++t)
        CLA_Q_STOREV((cla_vf)(0.0f), to + (request.first + t) * call.out.stride);
      continue;
    }
    const ClaFilter filter = cla_filter(weight, bias, channel);
    const ClaInputs from = {x + call.x.offset + channel, in_gate + call.in_gate.offset + channel,
                            call.x.stride, call.in_gate.stride};
    __global CLA_Q_T* const page =
        states + call.state_offset + request.page * call.state_stride + channel;
    cla_vf seen[CLA_WIDTH]; /* the last one is the token's own */
    for (int j = 0; j < CLA_BEFORE; ++j) {
      const int at = begin - CLA_BEFORE + j;
      seen[j] = (cla_vf)(0.0f);
      if (at >= 0) {
        seen[j] = cla_input(&from, request.first + at);
      } else if (request.initial) {
        seen[j] = CLA_Q_LOADV(page + (long)(request.window + CLA_BEFORE + at) * call.channels);
      }
    }
    cla_vf before[CLA_BEFORE];
    for (int j = 0; j < CLA_BEFORE; ++j) before[j] = seen[j];
    for (int t = begin; t < end; t += CLA_AHEAD) {
      cla_vf inputs[CLA_AHEAD]; /* in flight together */
#pragma unroll
      for (int a = 0; a < CLA_AHEAD; ++a)
        inputs[a] = cla_input(&from, request.first + min(t + a, end - 1));
#pragma unroll
      for (int a = 0; a < CLA_AHEAD; ++a) {
        if (t + a >= end) continue;
        const long token = request.first + t + a;
        seen[CLA_BEFORE] = inputs[a];
        cla_vf sum = filter.bias;
#pragma unroll
        for (int j = 0; j < CLA_WIDTH; ++j) sum = mad(filter.weight[j], seen[j], sum);
#if CLA_SILU
        sum = sum / (1.0f + exp(-sum));
#endif
#if CLA_CONV_GATES
        sum *=
            CLA_Q_LOADV(out_gate + call.out_gate.offset + token * call.out_gate.stride + channel);
#endif
        CLA_Q_STOREV(sum, to + token * call.out.stride);
#pragma unroll
        for (int j = 0; j < CLA_BEFORE; ++j) seen[j] = seen[j + 1];
      }
    }
    if (begin == 0) cla_keep(&request, &from, before, page, call.channels);
  }
}
