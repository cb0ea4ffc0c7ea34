/* What the gated delta rule needs of a chunk of tokens that does not depend on the state, for all
   chunks of all requests at once: delta_rule_mma.cl then goes from chunk to chunk. With D_ij the
   decay from token j to token i,

     L_ij = beta_i D_ij k_i k_j, j < i     M_ij = D_ij q_i k_j, j <= i     A = (I + L)^-1 diag(beta)

   A group makes them for a chunk and a value head. A is the solution whose right side is
   diag(beta), found as that of any right side: blocks of the diagonal are inverted in f32, by T,
   then

     U_I = T_I (U_I - sum_J<I L_IJ U_J)

   with operands of two parts, L, T and U alike, since the triangle enlarges errors. Where keys are
   normalised, no element of A is larger than its beta of up to 2, since the update by a token
   lengthens no row of a state; in two parts they are right to 2^-16 of themselves.

   Why A, and not L and T or what flash-linear-attention leaves, W = A E K: with L and T each block
   of a chunk waits for the one before; W would need two parts as well, 16 KiB of a chunk for A's 3,
   and as many products as P and A take together.

   Multiply-adds of a token and value head with K = 128 and chunks of 32, blocks above diagonals
   left out: 48 K = 6 k for L and M; those of A, whose right side is 0 up to its own block, are few.
   Bytes of a chunk and a head: 16 Ki read, 3 Ki of A, 1.5 Ki of M and 0.5 Ki of factors written.

   macro        legal values                     meaning
   CLA_CHUNK    multiple of CLA_BLOCK            tokens; WG_SIZE divides 2 CHUNK, or is a multiple
   CLA_WG_SIZE  multiple of LANES
   CLA_K_DIM    multiple of TILE_DEPTH and of B_TILES * TILE_COLUMNS

   Launch: num_chunks * call.num_heads groups, num_chunks from made_chunks() of
   src/recurrent/rule_tiles.cpp. Local memory: pair_bytes() there, at most. */

#include "tile/unit.clh"

#include "core/call.clh"
#include "recurrent/chunk_tiles.clh"

#if CLA_CHUNK % CLA_BLOCK != 0 || CLA_STAGE_ROWS * CLA_ROW_SHARERS % CLA_WG_SIZE != 0 || \
    CLA_K_DIM % CLA_TILE_DEPTH != 0 || CLA_K_DIM % (CLA_B_TILES * CLA_TILE_COLUMNS) != 0
#error "delta_rule_pairs.cl: CLA_CHUNK, CLA_WG_SIZE and CLA_K_DIM do not tile"
#endif

#define CLA_L_UNITS (CLA_BLOCKS > 1 ? CLA_MATRIX_TILE : 0)
#define CLA_T_UNITS CLA_COLUMN_UNITS(CLA_BLOCK_STEPS, CLA_CHUNK)
/* Of keys and queries, then of A. */
#define CLA_ROOM_UNITS (2 * (CLA_KEY_TILE > CLA_MATRIX_TILE ? CLA_KEY_TILE : CLA_MATRIX_TILE))

/* Solves U from its right side, which is 0 before block `from`, one block of tokens after the
   other. Each solved block is subtracted from all later ones at once, since those products do not
   wait for each other. */
static inline void cla_solve_blocks(float* u, const ClaRuleTiles* chunk, uint from, uint lane) {
#pragma unroll
  for (uint i = 0; i < CLA_BLOCKS; ++i) {
    if (i < from) continue;
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

/* A's transpose: rows are tokens j of its right side, TILE_ROWS of them by each warp. */
static inline void cla_put_inverse(const ClaRuleTiles* chunk, uint warp, uint lane) {
  CLA_FORGET(lane);
  for (uint first = warp * CLA_TILE_ROWS; first < CLA_CHUNK; first += CLA_WARPS * CLA_TILE_ROWS) {
    const uint block = first / CLA_BLOCK;
    float u[CLA_U_SIZE];
#pragma unroll
    for (uint i = 0; i < CLA_U_SIZE; ++i) {
      const uint j = first + cla_register_row(i, lane);
      u[i] = cla_register_column(i, lane) == j ? chunk->beta[j] : 0.0f;
    }
    cla_solve_blocks(u, chunk, block, lane);
#pragma unroll
    for (uint i = 0; i < CLA_U_SIZE; ++i) {
      if (i / CLA_BLOCK_SIZE < block) continue;
      cla_put_parts(chunk->a, CLA_CHUNK_STEPS, cla_register_column(i, lane),
                    first + cla_register_row(i, lane), u[i]);
    }
  }
}

/* A and M to memory. */
static inline void cla_leave_matrices(const ClaRuleTiles* chunk, __global uint4* made) {
  for (uint own = (uint)get_local_id(0); own < CLA_MATRIX_UNITS; own += CLA_WG_SIZE) {
    const ClaUnitAt at = cla_unit_of_matrix(own);
    if (cla_above_diagonal(at)) continue;
    const uint unit = CLA_COLUMN_UNIT(CLA_CHUNK_STEPS, at.row, at.unit);
    made[own] = chunk->a[0][unit];
    made[CLA_MATRIX_UNITS + own] = chunk->a[1][unit];
    made[2 * CLA_MATRIX_UNITS + own] = chunk->m[unit];
  }
}

/* The request that has a chunk, or -1. Work-items look at some requests each. */
static inline int cla_owner_of(const ClaDeltaRule* call, long number, __local int* owner,
                               __global const int* starts) {
  if (get_local_id(0) == 0) *owner = -1;
  barrier(CLK_LOCAL_MEM_FENCE); /* set -> found */
  starts += call->lists.starts_at;
  for (int r = (int)get_local_id(0); r < call->lists.num_reqs; r += CLA_WG_SIZE) {
    const long first = max((long)starts[r], 0l);
    const long tokens = min((long)starts[r + 1], call->lists.num_tokens) - first;
    const long before = number - cla_first_chunk(call, (uint)r, first);
    if (tokens >= call->min_tokens && before >= 0 && before * CLA_CHUNK < tokens) *owner = r;
  }
  barrier(CLK_LOCAL_MEM_FENCE); /* found -> read */
  return *owner;
}

CLA_KERNEL clattn_delta_rule_pairs(const ClaDeltaRule call, CLA_LISTS,
                                   __global const CLA_Q_T* query, __global const CLA_Q_T* key,
                                   __global const cla_gate_t* decay,
                                   __global const cla_gate_t* beta, __global const float* a_log,
                                   __global const float* dt_bias, __global uint4* made) {
  __local uint4 room[CLA_ROOM_UNITS];
#if CLA_KEYS_TWICE
  __local uint4 k_rows[CLA_CHUNK * CLA_ROW_UNITS(CLA_KEY_STEPS)];
#else
  __local uint4* const k_rows = room;
#endif
  __local uint4 matrices[2 * CLA_L_UNITS + 2 * CLA_T_UNITS + CLA_MATRIX_TILE];
  __local uint4 *const l = matrices, *const t = l + 2 * CLA_L_UNITS, *const m = t + 2 * CLA_T_UNITS;
  __local float4 own_l[CLA_CHUNK * CLA_BLOCK / 4];
  __local float of_pairs[CLA_CHUNK * CLA_BLOCK], sums[CLA_STAGE_ROWS * CLA_ROW_SHARERS];
  __local float of_tokens[6][CLA_CHUNK];
  __local int owner[1];
  const ClaRuleTiles chunk = {{k_rows, room, room + CLA_KEY_TILE, room},
                              {l, l + CLA_L_UNITS},
                              {t, t + CLA_T_UNITS},
                              {room, room + CLA_MATRIX_TILE},
                              m,
                              own_l,
                              of_pairs,
                              sums,
                              of_tokens[0],
                              of_tokens[1],
                              of_tokens[2],
                              of_tokens[3],
                              of_tokens[4],
                              of_tokens[5]};
  const uint warp = cla_warp(), lane = cla_lane();
  const long place = (long)get_group_id(0);
  const int number = call.first_head + (int)(place % call.num_heads);
  const long slot = place / call.num_heads;
  const int of = cla_owner_of(&call, slot, owner, starts);
  if (of < 0) return;
  const ClaRecurrentRequest request =
      cla_request(&call.lists, (uint)of, call.lists.columns, 1, CLA_LISTS_GIVEN);
  if (request.drafts || request.skip) return;
  const long before = (slot - cla_first_chunk(&call, (uint)of, request.first)) * CLA_CHUNK;
  const long first = request.first + before;
  const int count = request.tokens - (int)before;
  const long key_head = (long)(number / call.heads_per_key) * CLA_K_DIM;
  const ClaRuleHead head = {query + call.query.offset + key_head, key + call.key.offset + key_head,
                            call.query.stride, call.key.stride};
  const ClaGateTensors gates = {decay, beta, a_log, dt_bias};
  made += place * CLA_MADE_UNITS;

  ClaKeyStage stage;
  cla_start_key_stage(&stage, &head, first, count);
  cla_store_gates(&chunk, &call, &gates, number, first, count);
  cla_store_sums(&chunk, &stage);
  cla_store_key_stage(&chunk.keys, &stage, 0);
  barrier(CLK_LOCAL_MEM_FENCE); /* squares, gates, keys and queries written -> read */
  cla_store_norms(&chunk);
  cla_decay_blocks(&chunk);
  barrier(CLK_LOCAL_MEM_FENCE); /* norms and decays of blocks written -> read */
  cla_decay_ends(&chunk, (__global float*)(made + CLA_FACTORS_AT));
  cla_pair_blocks(&chunk, warp, lane);
  barrier(CLK_LOCAL_MEM_FENCE); /* L and M written -> read; keys and queries read -> overwritten */
  cla_invert_blocks(&chunk, warp, lane);
  barrier(CLK_LOCAL_MEM_FENCE); /* T written -> read */
  cla_put_inverse(&chunk, warp, lane);
  barrier(CLK_LOCAL_MEM_FENCE); /* A written -> read */
  cla_leave_matrices(&chunk, made);
}
