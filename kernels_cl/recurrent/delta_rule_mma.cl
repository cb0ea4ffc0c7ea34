/* The gated delta rule, a chunk of tokens at once, on a unit of the contract (tile/CONTRACT.md):
   the equations of delta_rule_chunk.cl with products of 16-bit elements and sums in f32.

     P = S K^T,  O = S Q^T                        S of the chunk's start
     U = A (V - E P)                              A = (I + L)^-1 diag(beta)
     o = scale (E O + M U),  S = E_last S + (D U)^T K

   A, M and the decays E and D are made before, for all chunks at once (delta_rule_pairs.cl), since
   only what needs S must go from chunk to chunk. A group has CLA_ROWS rows of a head's state,
   TILE_ROWS of them in each warp, as C in registers from a request's first token to its last. P, O
   and U are C of the same rows, with tokens as columns, so what one product gives is the A of the
   next, no row leaves its warp, and local memory holds only what all rows share. Where the unit
   copies asynchronously, the next chunk arrives in a second stage meanwhile; else in registers.

   S and U are rounded to elements where they are multiplied with keys, queries and M, which is
   rounded, too. A and V - E P have two parts, since the triangle enlarges errors: those that remain
   are at most 2^-8 of the roundings above.

   Multiply-adds of a token and value head with K = V = 128 and chunks of 32, blocks above diagonals
   left out: 3 K V = 49 k for P, O and S, 24 V = 3 k for M U, 3 * 24 V = 9 k for A. So a warp of
   sm80 issues 120 products a chunk, some 960 cycles of its scheduler, 32 for each of P, O and S, 18
   for A and 6 for M; that is what a prompt cannot go below, however many groups it has, and a
   scheduler has one warp of a prompt of 32 heads. Bytes of a chunk that a group loads: 8 Ki of
   keys, as many of queries, 3 Ki of A, 1.5 Ki of M. Chunks of 64 issue 272 products for twice the
   tokens, and take 124 KiB of local memory for two stages, not 50, so that one group resides.

   macro        legal values                     meaning
   CLA_CHUNK    multiple of CLA_BLOCK            tokens, as in delta_rule_pairs.cl; where operands
                                                 are put element by element, WG_SIZE divides
                                                 2 CHUNK or is a multiple
   CLA_ROWS     TILE_ROWS * WG_SIZE / LANES      rows of a group; divides V_DIM
   CLA_WG_SIZE  multiple of LANES
   CLA_K_DIM    multiple of TILE_DEPTH and of B_TILES * TILE_COLUMNS
   CLA_RULE, CLA_BY_CHANNEL, CLA_SKIP and CLA_HAS_Z are 0; rows of query and key are aligned to 16
   bytes.

   Launch: num_reqs * call.num_heads * (V_DIM / CLA_ROWS) groups. Local memory is at most
   chunk_bytes() of src/recurrent/rule_tiles.cpp. */

#include "tile/unit.clh"

#include "core/call.clh"
#include "recurrent/chunk_keys.clh"

#if CLA_ROWS != CLA_TILE_ROWS * CLA_WARPS || CLA_V_DIM % CLA_ROWS != 0 || \
    CLA_CHUNK % CLA_BLOCK != 0 || CLA_K_DIM % CLA_TILE_DEPTH != 0 ||      \
    CLA_K_DIM % (CLA_B_TILES * CLA_TILE_COLUMNS) != 0 ||                  \
    (CLA_KEYS_TRANSPOSED && CLA_STAGE_ROWS * CLA_ROW_SHARERS % CLA_WG_SIZE != 0)
#error "delta_rule_mma.cl: CLA_CHUNK, CLA_ROWS, CLA_WG_SIZE and CLA_K_DIM do not tile"
#endif

#define CLA_S_SIZE (CLA_KEY_TILES * CLA_C_SIZE)
#define CLA_STAGES (CLA_KEYS_TRANSPOSED ? 1 : 2) /* chunks in local memory */
#define CLA_ROWS_TILE (CLA_KEYS_TWICE ? CLA_CHUNK * CLA_ROW_UNITS(CLA_KEY_STEPS) : 0)
#define CLA_VALUES_TILE (CLA_KEYS_TRANSPOSED ? CLA_COLUMN_UNITS(CLA_CHUNK_STEPS, CLA_K_DIM) : 0)
#define CLA_FACTOR_UNITS (CLA_FACTORS * CLA_CHUNK / 4)
#define CLA_STAGE_UNITS \
  (2 * CLA_KEY_TILE + CLA_ROWS_TILE + CLA_VALUES_TILE + 3 * CLA_MATRIX_TILE + CLA_FACTOR_UNITS)

/* A chunk in local memory. */
typedef struct ClaChunkTiles {
  ClaKeyTiles keys;
  __local uint4* a[2]; /* A [CHUNK][CHUNK] in two parts */
  __local uint4* m;    /* M, likewise */
  __local float* factors;
} ClaChunkTiles;

static inline ClaChunkTiles cla_chunk_tiles(__local uint4* room) {
  __local uint4* const queries = room + CLA_KEY_TILE;
  __local uint4* const rows = queries + CLA_KEY_TILE;
  __local uint4* const values = rows + CLA_ROWS_TILE;
  __local uint4* const a = values + CLA_VALUES_TILE;
  const ClaChunkTiles tiles = {{CLA_KEYS_TWICE ? rows : room, room, queries, values},
                               {a, a + CLA_MATRIX_TILE},
                               a + 2 * CLA_MATRIX_TILE,
                               (__local float*)(a + 3 * CLA_MATRIX_TILE)};
  return tiles;
}

/* u = S K^T, o = S Q^T */
static inline void cla_apply_state(float* u, float* o, const float* s, const ClaChunkTiles* chunk,
                                   uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) u[i] = o[i] = 0.0f;
#pragma unroll
  for (uint step = 0; step < CLA_KEY_STEPS; ++step) {
    const ClaA a = CLA_A_OF_COLUMNS(s + step * CLA_STEP_SIZE);
    cla_multiply_columns(u, CLA_CHUNK_TILES, a, chunk->keys.k_columns, CLA_KEY_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
    cla_multiply_columns(o, CLA_CHUNK_TILES, a, chunk->keys.q_columns, CLA_KEY_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
  }
}

/* u = A u. From the last block of tokens to the first: none is needed behind its own turn. */
static inline void cla_apply_inverse(float* u, const ClaChunkTiles* chunk, uint lane) {
#pragma unroll
  for (uint turn = 0; turn < CLA_BLOCKS; ++turn) {
    const uint i = CLA_BLOCKS - 1 - turn;
    float right[CLA_BLOCK_SIZE];
#pragma unroll
    for (uint x = 0; x < CLA_BLOCK_SIZE; ++x) {
      right[x] = u[i * CLA_BLOCK_SIZE + x];
      u[i * CLA_BLOCK_SIZE + x] = 0.0f;
    }
#pragma unroll
    for (uint step = 0; step < CLA_BLOCK_STEPS; ++step)
      cla_multiply_parts(u + i * CLA_BLOCK_SIZE, CLA_CHUNK_TILES - i * CLA_BLOCK_TILES,
                         right + step * CLA_STEP_SIZE, chunk->a, CLA_CHUNK_STEPS, i * CLA_BLOCK,
                         i * CLA_BLOCK_UNITS + step * CLA_STEP_UNITS, lane);
  }
}

/* o += M U */
static inline void cla_add_pairs(float* o, const float* u, const ClaChunkTiles* chunk, uint lane) {
#pragma unroll
  for (uint step = 0; step < CLA_CHUNK_STEPS; ++step) {
    const uint block = step / CLA_BLOCK_STEPS;
    cla_multiply_columns(o + block * CLA_BLOCK_SIZE, CLA_CHUNK_TILES - block * CLA_BLOCK_TILES,
                         CLA_A_OF_COLUMNS(u + step * CLA_STEP_SIZE), chunk->m, CLA_CHUNK_STEPS,
                         block * CLA_BLOCK, step * CLA_STEP_UNITS, lane);
  }
}

/* S at the chunk's end. */
static inline void cla_advance_tiles(float* s, const float* u, const ClaChunkTiles* chunk,
                                     uint lane) {
  const float all = chunk->factors[CLA_ALL * CLA_CHUNK];
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i) s[i] *= all;
#pragma unroll
  for (uint step = 0; step < CLA_CHUNK_STEPS; ++step) {
    float decayed[CLA_STEP_SIZE];
#pragma unroll
    for (uint i = 0; i < CLA_STEP_SIZE; ++i)
      decayed[i] = u[step * CLA_STEP_SIZE + i] *
                   chunk->factors[CLA_END_K * CLA_CHUNK +
                                  cla_register_column(step * CLA_STEP_SIZE + i, lane)];
    const ClaA a = cla_a_of_c(decayed);
#if CLA_KEYS_TRANSPOSED
    cla_multiply_columns(s, CLA_KEY_TILES, a, chunk->keys.k_values, CLA_CHUNK_STEPS, 0,
                         step * CLA_STEP_UNITS, lane);
#else
    const uint stride = CLA_ROW_UNITS(CLA_KEY_STEPS);
#pragma unroll
    for (uint n = 0; n < CLA_KEY_TILES; n += CLA_B_TILES) {
      ClaB b[CLA_B_TILES];
      cla_load_b_rows(
          b, chunk->keys.k_rows + step * CLA_TILE_DEPTH * stride + n * CLA_TILE_COLUMNS / 8, stride,
          lane);
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

/* Values of the warp's rows, of `count` tokens. */
static inline void cla_load_row_values(CLA_Q_T* values, const ClaWarpValues* at, int count,
                                       uint lane) {
  CLA_FORGET(lane); /* else addresses of tokens stay in registers from chunk to chunk */
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i)
    values[i] = at->value[min((int)cla_register_column(i, lane), count - 1) * at->value_stride +
                          cla_register_row(i, lane)];
}

/* Where a chunk comes from. */
typedef struct ClaChunkFrom {
  ClaRuleHead head;
  __global const uint4* made; /* of the head and the request's first chunk, chunks so far apart: */
  long made_stride;
  long first; /* token */
} ClaChunkFrom;

#if CLA_KEYS_TRANSPOSED
/* The unit of local memory that gets unit `own` of what was made. */
static inline uint cla_made_unit(uint own) {
  if (own >= CLA_FACTORS_AT) return 3 * CLA_MATRIX_TILE + own - CLA_FACTORS_AT;
  const ClaUnitAt at = cla_unit_of_matrix(own % CLA_MATRIX_UNITS);
  return own / CLA_MATRIX_UNITS * CLA_MATRIX_TILE +
         CLA_COLUMN_UNIT(CLA_CHUNK_STEPS, at.row, at.unit);
}
static inline int cla_is_made(uint own) {
  return own >= CLA_FACTORS_AT || !cla_above_diagonal(cla_unit_of_matrix(own % CLA_MATRIX_UNITS));
}

#define CLA_MADE_TURNS ((CLA_MADE_UNITS + CLA_WG_SIZE - 1) / CLA_WG_SIZE)

/* What a work-item holds of a chunk on its way. */
typedef struct ClaChunkStage {
  ClaKeyStage keys;
  uint4 made[CLA_MADE_TURNS];
} ClaChunkStage;

/* Starts to load the chunk at token `at` of a request of `tokens`. */
static inline void cla_start_chunk(ClaChunkStage* stage, const ClaChunkFrom* from, int at,
                                   int tokens) {
  cla_start_key_stage(&stage->keys, &from->head, from->first + at, tokens - at);
  __global const uint4* made = from->made + at / CLA_CHUNK * from->made_stride;
#pragma unroll
  for (uint turn = 0; turn < CLA_MADE_TURNS; ++turn) {
    const uint own = (uint)get_local_id(0) + turn * CLA_WG_SIZE;
    stage->made[turn] = (uint4)(0u);
    if (at < tokens && own < CLA_MADE_UNITS && cla_is_made(own)) stage->made[turn] = made[own];
  }
}
static inline void cla_store_chunk(const ClaChunkTiles* tiles, const ClaChunkStage* stage) {
  cla_store_key_stage(&tiles->keys, &stage->keys, 1);
#pragma unroll
  for (uint turn = 0; turn < CLA_MADE_TURNS; ++turn) {
    const uint own = (uint)get_local_id(0) + turn * CLA_WG_SIZE;
    if (own < CLA_MADE_UNITS && cla_is_made(own))
      tiles->a[0][cla_made_unit(own)] = stage->made[turn];
  }
}
#else
#define CLA_TURNS(count) (((count) + CLA_WG_SIZE - 1) / CLA_WG_SIZE)
/* Whether a work-item has a unit in all turns, which the compiler need not find out. */
#define CLA_IN_TURN(own, count) ((count) % CLA_WG_SIZE == 0 || (own) < (count))

/* Starts to copy keys and queries of the tokens from `first` on, `count` of them; zeros behind. */
static inline void cla_copy_chunk_keys(const ClaKeyTiles* tiles, const ClaRuleHead* head,
                                       long first, int count) {
  uint item = (uint)get_local_id(0);
  CLA_FORGET(item); /* else addresses stay in registers from chunk to chunk */
#pragma unroll
  for (uint turn = 0; turn < CLA_TURNS(CLA_CHUNK * CLA_KEY_UNITS); ++turn) {
    const uint own = item + turn * CLA_WG_SIZE;
    if (!CLA_IN_TURN(own, CLA_CHUNK * CLA_KEY_UNITS)) continue;
    const ClaUnitAt at = cla_unit_at(own, CLA_KEY_UNITS);
    const long token = first + min((int)at.row, count - 1);
    const int wanted = (int)at.row < count;
    const uint to = CLA_COLUMN_UNIT(CLA_KEY_STEPS, at.row, at.unit);
    __global const CLA_Q_T* key = head->key + token * head->key_stride + 8 * at.unit;
    cla_copy_async(tiles->k_columns + to, key, wanted);
#if CLA_KEYS_TWICE
    cla_copy_async(tiles->k_rows + at.row * CLA_ROW_UNITS(CLA_KEY_STEPS) + at.unit, key, wanted);
#endif
    cla_copy_async(tiles->q_columns + to, head->query + token * head->query_stride + 8 * at.unit,
                   wanted);
  }
}

/* Starts to copy the chunk at token `at` of a request of `tokens`, more than `at`. */
static inline void cla_start_chunk(const ClaChunkTiles* tiles, const ClaChunkFrom* from, int at,
                                   int tokens) {
  cla_copy_chunk_keys(&tiles->keys, &from->head, from->first + at, tokens - at);
  __global const uint4* made = from->made + at / CLA_CHUNK * from->made_stride;
  uint item = (uint)get_local_id(0);
  CLA_FORGET(item);
#pragma unroll
  for (uint turn = 0; turn < CLA_TURNS(CLA_MATRIX_UNITS); ++turn) {
    const uint own = item + turn * CLA_WG_SIZE;
    const ClaUnitAt unit = cla_unit_of_matrix(own);
    if (!CLA_IN_TURN(own, CLA_MATRIX_UNITS) || cla_above_diagonal(unit)) continue;
    const uint to = CLA_COLUMN_UNIT(CLA_CHUNK_STEPS, unit.row, unit.unit);
    cla_copy_async(tiles->a[0] + to, made + own, 1);
    cla_copy_async(tiles->a[1] + to, made + CLA_MATRIX_UNITS + own, 1);
    cla_copy_async(tiles->m + to, made + 2 * CLA_MATRIX_UNITS + own, 1);
  }
  for (uint own = item; own < CLA_FACTOR_UNITS; own += CLA_WG_SIZE)
    cla_copy_async((__local uint4*)tiles->factors + own, made + CLA_FACTORS_AT + own, 1);
}
#endif

/* U and the results of the warp's rows, of a chunk of `count` tokens. */
static inline void cla_take_tiles(float* u, const float* s, const ClaChunkTiles* chunk,
                                  const ClaWarpValues* at, const CLA_Q_T* values, int count,
                                  uint lane) {
  float o[CLA_U_SIZE];
  cla_apply_state(u, o, s, chunk, lane);
  CLA_FORGET(lane);
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) {
    const uint t = cla_register_column(i, lane);
    const float v = (int)t < count ? cla_mma_expand((uint)values[i]).x : 0.0f;
    u[i] = v - chunk->factors[CLA_START_K * CLA_CHUNK + t] * u[i];
    o[i] *= chunk->factors[CLA_START_Q * CLA_CHUNK + t];
  }
  cla_apply_inverse(u, chunk, lane);
  cla_add_pairs(o, u, chunk, lane);
  CLA_FORGET(lane);
#pragma unroll
  for (uint i = 0; i < CLA_U_SIZE; ++i) {
    const int t = (int)cla_register_column(i, lane);
    if (t < count)
      CLA_Q_SET1(at->scale * o[i], at->out + t * at->out_stride + cla_register_row(i, lane));
  }
  CLA_FORGET(lane);
}

/* Zeros for the rows of a request without a page. */
static inline void cla_skip_rows(__global CLA_Q_T* out, long stride, int tokens) {
  for (uint i = (uint)get_local_id(0); i < CLA_ROWS * (uint)tokens; i += CLA_WG_SIZE)
    CLA_Q_SET1(0.0f, out + i / CLA_ROWS * stride + i % CLA_ROWS);
}

CLA_KERNEL clattn_delta_rule_mma(const ClaDeltaRule call, CLA_LISTS, __global const CLA_Q_T* query,
                                 __global const CLA_Q_T* key, __global const CLA_Q_T* value,
                                 __global CLA_Q_T* out, __global CLA_KV_T* states,
                                 __global const uint4* made) {
  __local uint4 room[CLA_STAGES][CLA_STAGE_UNITS];
  const uint splits = CLA_V_DIM / CLA_ROWS, group = (uint)get_group_id(0);
  const uint warp = cla_warp(), lane = cla_lane();
  const uint of_launch = group / splits % (uint)call.num_heads;
  const int number = call.first_head + (int)of_launch;
  const uint of = group / splits / (uint)call.num_heads;
  const ClaRecurrentRequest request =
      cla_request(&call.lists, of, call.lists.columns, 1, CLA_LISTS_GIVEN);
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
  const long place = cla_first_chunk(&call, of, request.first) * call.num_heads + of_launch;
  const ClaChunkFrom from = {{query + call.query.offset + key_head,
                              key + call.key.offset + key_head, call.query.stride, call.key.stride},
                             made + place * CLA_MADE_UNITS,
                             (long)call.num_heads * CLA_MADE_UNITS,
                             request.first};
  ClaWarpValues at = {value + call.value.offset + request.first * call.value.stride + row + own_row,
                      out + own_row, call.value.stride, call.out.stride, call.scale};
  states += call.state_offset + request.page * call.state_stride + (row + own_row) * CLA_K_DIM;

#if CLA_KEYS_TRANSPOSED
  ClaChunkStage stage;
  cla_start_chunk(&stage, &from, 0, request.tokens);
#else
  const ClaChunkTiles first_chunk = cla_chunk_tiles(room[0]);
  cla_start_chunk(&first_chunk, &from, 0, request.tokens);
#endif
  float s[CLA_S_SIZE];
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i) {
    s[i] = 0.0f;
    if (request.initial)
      s[i] = CLA_STATE_LOAD1(states + cla_register_row(i, lane) * CLA_K_DIM +
                             cla_register_column(i, lane));
  }
  for (int first = 0; first < request.tokens; first += CLA_CHUNK) {
    const int count = min(request.tokens - first, CLA_CHUNK);
    const ClaChunkTiles chunk = cla_chunk_tiles(room[first / CLA_CHUNK % CLA_STAGES]);
    CLA_Q_T values[CLA_U_SIZE];
    float u[CLA_U_SIZE];
#if CLA_KEYS_TRANSPOSED
    cla_load_row_values(values, &at, count, lane);
    barrier(CLK_LOCAL_MEM_FENCE); /* the last chunk read -> overwritten */
    cla_store_chunk(&chunk, &stage);
    barrier(CLK_LOCAL_MEM_FENCE); /* written -> read */
    cla_take_tiles(u, s, &chunk, &at, values, count, lane);
    cla_start_chunk(&stage, &from, first + CLA_CHUNK, request.tokens); /* in flight meanwhile */
    cla_advance_tiles(s, u, &chunk, lane);
#else
    const ClaChunkTiles next = cla_chunk_tiles(room[(first / CLA_CHUNK + 1) % CLA_STAGES]);
    cla_wait_copies();
    barrier(CLK_LOCAL_MEM_FENCE); /* written -> read; the last chunk read -> overwritten */
    if (first + CLA_CHUNK < request.tokens)
      cla_start_chunk(&next, &from, first + CLA_CHUNK, request.tokens); /* in flight meanwhile */
    cla_load_row_values(values, &at, count, lane);
    cla_take_tiles(u, s, &chunk, &at, values, count, lane);
    cla_advance_tiles(s, u, &chunk, lane);
#endif
    at.value += CLA_CHUNK * at.value_stride;
    at.out += CLA_CHUNK * at.out_stride;
  }
#pragma unroll
  for (uint i = 0; i < CLA_S_SIZE; ++i)
    CLA_STATE_SET1(s[i],
                   states + cla_register_row(i, lane) * CLA_K_DIM + cla_register_column(i, lane));
}
