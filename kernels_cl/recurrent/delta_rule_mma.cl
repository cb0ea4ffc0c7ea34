/* The gated delta rule, a chunk of tokens at once, on a unit of the contract (tile/CONTRACT.md):
   the equations of delta_rule_chunk.cl with products of 16-bit elements and sums in f32.

     P = S K^T,  O = S Q^T                        S of the chunk's start
     U = beta (V - E P), solved block by block    U_I = T_I (U_I - sum_J<I L_IJ U_J)
     o = scale (E O + M U),  S = E_last S + (D U)^T K

   A group has CLA_ROWS rows of a head's state, TILE_ROWS of them in each warp, as C in registers
   from a request's first token to its last. P, O and U are C of the same rows, with tokens as
   columns, so what one product gives is the A of the next, no row leaves its warp, and local memory
   holds only what all rows share (recurrent/chunk_tiles.clh). All groups of a head make that anew.

   S and U are rounded to elements where they are multiplied with keys, queries and M, which is
   rounded, too. The triangle is solved with operands of two parts, L, T and U alike, since it
   enlarges errors: those that remain are at most 2^-8 of the roundings above.

   Multiply-adds of a token and value head with K = V = 128, chunks of 64 and 64 rows, blocks above
   diagonals left out: 3 K V = 49 k for P, O and S, 40 V = 5 k for M U, (72 + 48) V = 15 k for the
   two steps of U, 80 K = 10 k for L and M of each of the two groups, so 90 k in all, or 77 k with
   chunks of 32. Local memory is at most tile_bytes() of src/recurrent/rule_tiles.cpp.

   macro        legal values                     meaning
   CLA_CHUNK    multiple of CLA_BLOCK            tokens; WG_SIZE divides 2 CHUNK, or is a multiple
   CLA_ROWS     TILE_ROWS * WG_SIZE / LANES      rows of a group; divides V_DIM
   CLA_WG_SIZE  multiple of LANES
   CLA_K_DIM    multiple of TILE_DEPTH and of B_TILES * TILE_COLUMNS
   CLA_RULE, CLA_BY_CHANNEL, CLA_SKIP and CLA_HAS_Z are 0; rows of query and key are aligned to 16
   bytes.

   Launch: num_reqs * num_v_heads * (V_DIM / CLA_ROWS) groups. */

#include "tile/unit.clh"

#include "core/call.clh"
#include "recurrent/chunk_tiles.clh"

#if CLA_RULE || CLA_BY_CHANNEL || CLA_SKIP || CLA_HAS_Z || CLA_Q_DTYPE != 2
#error "delta_rule_mma.cl takes the delta rule with a decay for each head, in bf16 alone"
#endif
#if CLA_ROWS != CLA_TILE_ROWS * CLA_WARPS || CLA_V_DIM % CLA_ROWS != 0 ||                \
    CLA_CHUNK % CLA_BLOCK != 0 || CLA_STAGE_ROWS * CLA_ROW_SHARERS % CLA_WG_SIZE != 0 || \
    CLA_K_DIM % CLA_TILE_DEPTH != 0 || CLA_K_DIM % (CLA_B_TILES * CLA_TILE_COLUMNS) != 0
#error "delta_rule_mma.cl: CLA_CHUNK, CLA_ROWS, CLA_WG_SIZE and CLA_K_DIM do not tile"
#endif
#ifndef CLA_A_OF_COLUMNS /* an A made of C, for what cla_load_b_columns() loads */
#define CLA_A_OF_COLUMNS cla_a_of_c
#endif

#define CLA_S_SIZE (CLA_KEY_TILES * CLA_C_SIZE)
#define CLA_U_SIZE (CLA_CHUNK_TILES * CLA_C_SIZE)
#define CLA_STEP_SIZE (CLA_TILE_DEPTH * CLA_C_SIZE / CLA_TILE_COLUMNS) /* registers of an A */
#define CLA_BLOCK_SIZE (CLA_BLOCK_TILES * CLA_C_SIZE)

#define CLA_M_UNITS CLA_COLUMN_UNITS(CLA_CHUNK_STEPS, CLA_CHUNK)
#define CLA_L_UNITS (CLA_BLOCKS > 1 ? CLA_M_UNITS : 0)
#define CLA_T_UNITS CLA_COLUMN_UNITS(CLA_BLOCK_STEPS, CLA_CHUNK)

/* c[num_tiles] += A B; B's columns are the tile's rows from `row` on, from unit `unit` on. */
static inline void cla_multiply_columns(float* c, uint num_tiles, ClaA a, __local const uint4* tile,
                                        uint steps, uint row, uint unit, uint lane) {
#pragma unroll
  for (uint n = 0; n < num_tiles; n += CLA_B_TILES) {
    ClaB b[CLA_B_TILES];
    cla_load_b_columns(b, tile + CLA_COLUMN_UNIT(steps, row + n * CLA_TILE_COLUMNS, unit),
                       CLA_ROW_UNITS(steps), lane);
#pragma unroll
    for (uint i = 0; i < CLA_B_TILES; ++i) cla_mma(c + (n + i) * CLA_C_SIZE, a, b[i]);
  }
  CLA_KEEP_ORDER();
}

/* The same with both operands in two parts. */
static inline void cla_multiply_parts(float* c, uint num_tiles, const float* a,
                                      __local uint4* const* tiles, uint steps, uint row, uint unit,
                                      uint lane) {
  float high[CLA_STEP_SIZE], low[CLA_STEP_SIZE];
#pragma unroll
  for (uint i = 0; i < CLA_STEP_SIZE; ++i) {
    high[i] = cla_round_element(a[i]);
    low[i] = a[i] - high[i];
  }
  const ClaA a_high = CLA_A_OF_COLUMNS(high);
  cla_multiply_columns(c, num_tiles, a_high, tiles[1], steps, row, unit, lane);
  cla_multiply_columns(c, num_tiles, CLA_A_OF_COLUMNS(low), tiles[0], steps, row, unit, lane);
  cla_multiply_columns(c, num_tiles, a_high, tiles[0], steps, row, unit, lane);
}

/* u = S K^T, o = S Q^T */
static inline void cla_apply_state(float* u, float* o, const float* s, const ClaRuleTiles* chunk,
                                   uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) u[i] = o[i] = 0.0f;
#pragma unroll
  for (uint step = 0; step < CLA_KEY_STEPS; ++step) {
    const ClaA a = CLA_A_OF_COLUMNS(s + step * CLA_STEP_SIZE);
    cla_multiply_columns(u, CLA_CHUNK_TILES, a, chunk->k_columns, CLA_KEY_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
    cla_multiply_columns(o, CLA_CHUNK_TILES, a, chunk->q_columns, CLA_KEY_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
  }
}

/* Solves U from its right side, one block of tokens after the other. Each solved block is
   subtracted from all later ones at once, since those products do not wait for each other. */
static inline void cla_solve_blocks(float* u, const ClaRuleTiles* chunk, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_BLOCKS; ++i) {
    float* own = u + i * CLA_BLOCK_SIZE;
    float solved[CLA_BLOCK_SIZE];
#pragma unroll
    for (uint x = 0; x < CLA_BLOCK_SIZE; ++x) solved[x] = 0.0f;
#pragma unroll
    for (uint step = 0; step < CLA_BLOCK_STEPS; ++step)
      cla_multiply_parts(solved, CLA_BLOCK_TILES, own + step * CLA_STEP_SIZE, chunk->t,
                         CLA_BLOCK_STEPS, i * CLA_BLOCK, step * CLA_STEP_UNITS, lane);
#pragma unroll
    for (uint x = 0; x < CLA_BLOCK_SIZE; ++x) own[x] = solved[x];
#pragma unroll
    for (uint step = 0; step < (i + 1 < CLA_BLOCKS ? CLA_BLOCK_STEPS : 0); ++step)
      cla_multiply_parts(own + CLA_BLOCK_SIZE, CLA_CHUNK_TILES - (i + 1) * CLA_BLOCK_TILES,
                         own + step * CLA_STEP_SIZE, chunk->l, CLA_CHUNK_STEPS, (i + 1) * CLA_BLOCK,
                         i * CLA_BLOCK_UNITS + step * CLA_STEP_UNITS, lane);
  }
}

/* o += M U */
static inline void cla_add_pairs(float* o, const float* u, const ClaRuleTiles* chunk, uint lane) {
#pragma unroll
  for (uint step = 0; step < CLA_CHUNK_STEPS; ++step) {
    const uint block = step / CLA_BLOCK_STEPS;
    cla_multiply_columns(o + block * CLA_BLOCK_SIZE, CLA_CHUNK_TILES - block * CLA_BLOCK_TILES,
                         CLA_A_OF_COLUMNS(u + step * CLA_STEP_SIZE), chunk->m, CLA_CHUNK_STEPS,
                         block * CLA_BLOCK, step * CLA_STEP_UNITS, lane);
  }
}

/* S at the chunk's end. */
static inline void cla_advance_tiles(float* s, const float* u, const ClaRuleTiles* chunk,
                                     uint lane) {
  const float all = chunk->all[0];
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i) s[i] *= all;
#pragma unroll
  for (uint step = 0; step < CLA_CHUNK_STEPS; ++step) {
    float decayed[CLA_STEP_SIZE];
#pragma unroll
    for (uint i = 0; i < CLA_STEP_SIZE; ++i)
      decayed[i] = u[step * CLA_STEP_SIZE + i] *
                   chunk->end_k[cla_register_column(step * CLA_STEP_SIZE + i, lane)];
    const ClaA a = cla_a_of_c(decayed);
#if CLA_KEYS_TRANSPOSED
    cla_multiply_columns(s, CLA_KEY_TILES, a, chunk->k_values, CLA_CHUNK_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
#else
    const uint stride = CLA_ROW_UNITS(CLA_KEY_STEPS);
#pragma unroll
    for (uint n = 0; n < CLA_KEY_TILES; n += CLA_B_TILES) {
      ClaB b[CLA_B_TILES];
      cla_load_b_rows(b, chunk->k_rows + step * CLA_TILE_DEPTH * stride + n * CLA_TILE_COLUMNS / 8,
                      stride, lane);
#pragma unroll
      for (uint i = 0; i < CLA_B_TILES; ++i) cla_mma(s + (n + i) * CLA_C_SIZE, a, b[i]);
    }
#endif
  }
}

/* The tensors at a warp's first row and a chunk's first token. */
typedef struct ClaWarpValues {
  __global const CLA_Q_T* value;
  __global CLA_Q_T* out;
  long value_stride, out_stride;
  float scale;
} ClaWarpValues;

/* Takes the warp's rows over a chunk of `count` tokens; the stage gets the keys of the next one. */
static inline void cla_take_tiles(float* s, const ClaRuleTiles* chunk, const ClaWarpValues* at,
                                  ClaKeyStage* stage, const ClaRuleHead* head, long next, int left,
                                  int count, uint lane) {
  CLA_FORGET(lane); /* else addresses of tokens stay in registers from chunk to chunk */
  CLA_Q_T values[CLA_U_SIZE];
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i)
    values[i] = at->value[min((int)cla_register_column(i, lane), count - 1) * at->value_stride +
                          cla_register_row(i, lane)];
  float u[CLA_U_SIZE], o[CLA_U_SIZE];
  CLA_FORGET(lane);
  cla_apply_state(u, o, s, chunk, lane);
  CLA_FORGET(lane);
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) {
    const uint t = cla_register_column(i, lane);
    const float v = (int)t < count ? cla_mma_expand((uint)values[i]).x : 0.0f;
    u[i] = chunk->beta[t] * (v - chunk->start_k[t] * u[i]);
    o[i] *= chunk->start_q[t];
  }
  cla_solve_blocks(u, chunk, lane);
  cla_add_pairs(o, u, chunk, lane);
  CLA_FORGET(lane);
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) {
    const int t = (int)cla_register_column(i, lane);
    if (t < count)
      CLA_Q_SET1(at->scale * o[i], at->out + t * at->out_stride + cla_register_row(i, lane));
  }
  CLA_FORGET(lane);
  cla_start_key_stage(stage, head, next, left); /* in flight meanwhile */
  cla_advance_tiles(s, u, chunk, lane);
}

/* Zeros for the rows of a request without a page. */
static inline void cla_skip_rows(__global CLA_Q_T* out, long stride, int tokens) {
  for (uint i = (uint)get_local_id(0); i < CLA_ROWS * (uint)tokens; i += CLA_WG_SIZE)
    CLA_Q_SET1(0.0f, out + i / CLA_ROWS * stride + i % CLA_ROWS);
}

CLA_KERNEL clattn_delta_rule_mma(CLA_RULE_PARAMS) {
  __local uint4 k_columns[CLA_COLUMN_UNITS(CLA_KEY_STEPS, CLA_CHUNK)];
  __local uint4 q_columns[CLA_COLUMN_UNITS(CLA_KEY_STEPS, CLA_CHUNK)];
#if CLA_KEYS_TWICE
  __local uint4 k_rows[CLA_CHUNK * CLA_ROW_UNITS(CLA_KEY_STEPS)];
#else
  __local uint4* const k_rows = k_columns;
#endif
#if CLA_KEYS_TRANSPOSED
  __local uint4 k_values[CLA_COLUMN_UNITS(CLA_CHUNK_STEPS, CLA_K_DIM)];
#else
  __local uint4* const k_values = k_columns; /* not used */
#endif
  __local uint4 matrices[2 * CLA_L_UNITS + 2 * CLA_T_UNITS + CLA_M_UNITS];
  __local uint4 *const l = matrices, *const t = l + 2 * CLA_L_UNITS, *const m = t + 2 * CLA_T_UNITS;
  __local float4 own_l[CLA_CHUNK * CLA_BLOCK / 4];
  __local float of_pairs[CLA_CHUNK * CLA_BLOCK], sums[CLA_STAGE_ROWS * CLA_ROW_SHARERS];
  __local float of_tokens[9][CLA_CHUNK], all[1];
  const ClaRuleTiles chunk = {k_rows,
                              k_columns,
                              q_columns,
                              k_values,
                              {l, l + CLA_L_UNITS},
                              {t, t + CLA_T_UNITS},
                              m,
                              own_l,
                              of_pairs,
                              sums,
                              of_tokens[0],
                              of_tokens[1],
                              of_tokens[2],
                              of_tokens[3],
                              of_tokens[4],
                              of_tokens[5],
                              of_tokens[6],
                              of_tokens[7],
                              of_tokens[8],
                              all};
  const uint splits = CLA_V_DIM / CLA_ROWS, group = (uint)get_group_id(0);
  const uint warp = cla_warp(), lane = cla_lane();
  const int number = (int)(group / splits % (uint)call.num_v_heads);
  const ClaRecurrentRequest request = cla_request(
      &call.lists, group / splits / (uint)call.num_v_heads, call.lists.columns, 1, CLA_LISTS_GIVEN);
  if (request.drafts || request.tokens < call.min_tokens || request.tokens > call.max_tokens)
    return;
  const long row = (long)number * CLA_V_DIM + group % splits * CLA_ROWS;
  out += call.out.offset + request.first * call.out.stride + row;
  if (request.skip) {
    cla_skip_rows(out, call.out.stride, request.tokens);
    return;
  }
  const uint own_row = warp * CLA_TILE_ROWS;
  const long key_head = (long)(number / call.heads_per_key) * CLA_K_DIM;
  const ClaRuleHead head = {&call,
                            {decay, beta, a_log, dt_bias},
                            query + call.query.offset + key_head,
                            key + call.key.offset + key_head,
                            number};
  ClaWarpValues at = {value + call.value.offset + request.first * call.value.stride + row + own_row,
                      out + own_row, call.value.stride, call.out.stride, call.scale};
  states += call.state_offset + request.page * call.state_stride + (row + own_row) * CLA_K_DIM;

  ClaKeyStage stage;
  cla_start_key_stage(&stage, &head, request.first, request.tokens);
  float s[CLA_S_SIZE];
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i) {
    s[i] = 0.0f;
    if (request.initial)
      s[i] = CLA_STATE_LOAD1(states + cla_register_row(i, lane) * CLA_K_DIM +
                             cla_register_column(i, lane));
  }
  for (int first = 0; first < request.tokens; first += CLA_CHUNK) {
    const int left = request.tokens - first;
    barrier(CLK_LOCAL_MEM_FENCE); /* the last chunk's tiles read -> overwritten */
    cla_store_sums(&chunk, &stage, &head, left);
    barrier(CLK_LOCAL_MEM_FENCE); /* squares and gates written -> read */
    cla_store_key_stage(&chunk, &stage);
    cla_decay_blocks(&chunk);
    barrier(CLK_LOCAL_MEM_FENCE); /* keys, queries and decays of blocks written -> read */
    cla_decay_ends(&chunk);
    cla_pair_blocks(&chunk, warp, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* L and M written -> read */
    cla_invert_blocks(&chunk, warp, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* T written -> read */
    cla_take_tiles(s, &chunk, &at, &stage, &head, request.first + first + CLA_CHUNK,
                   left - CLA_CHUNK, min(left, CLA_CHUNK), lane);
    at.value += CLA_CHUNK * at.value_stride;
    at.out += CLA_CHUNK * at.out_stride;
  }
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i)
    CLA_STATE_SET1(s[i],
                   states + cla_register_row(i, lane) * CLA_K_DIM + cla_register_column(i, lane));
}
