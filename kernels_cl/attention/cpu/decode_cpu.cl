// Decode on a CPU: few query rows against a long range of paged keys, limited by memory.
//
//   out[r, :] = sum_p softmax_p(scale * <q[r, :], K[p, :]>) V[p, :],   begin <= p < end of row r
//
// Loop order: tile of BLOCK_KV keys > KV head > bundle > chunk of 4 rows > scores, softmax, values.
// All rows of a KV head share one pass over K and V. Scores come as vectors whose lane 4 k + r is
// key k against row r: a chunk's softmax state is one vector. A bundle is the chunks that are
// multiplied together, at most BUNDLE: one, except with x86's tiles.
//
// A task takes KV_HEADS heads of a tile one after the other, because memory is read faster in
// longer runs than one head's part of a page: the heads of a page are neighbours in either layout.
// attention/cpu/fetch.clh asks for every cache line ahead of its turn.
//
// CLA_DOT chooses the products: f32 multiply-adds (attention/cpu/values.clh), bf16 pairs
// (attention/cpu/dot.clh) or tiles (attention/cpu/tile_products.clh). The last two take queries and
// keys as they are, and probabilities rounded to bf16.
//
// Macros: core/vec.clh and core/options.clh, which says what may be added to the logits. Here
// BLOCK_KV is a multiple of 16, and 32 with tiles.

#include "attention/cpu/fetch.clh"
#include "attention/cpu/merge.clh"
#include "attention/cpu/rows.clh"
#include "attention/cpu/scores.clh"
#if CLA_DOT == 2
#include "attention/cpu/tile_products.clh"
#elif CLA_DOT
#include "attention/cpu/dot.clh"
#else
#include "attention/cpu/values.clh"
#endif

#define CLA_BUNDLE_ROWS (CLA_BUNDLE * CLA_CHUNK)
#define CLA_BUNDLES (CLA_ROUND_UP(CLA_BLOCK_ROWS, CLA_BUNDLE_ROWS) / CLA_BUNDLE_ROWS)

// Lane 4 k + r stands for key k of a step and row r: a value per row in all its lanes, each lane's
// key, and a vector moved by one key.
#if CLA_VEC == 16
#define CLA_REPEAT_ROWS(v) ((v).s0123012301230123)
#define CLA_LANE_KEYS ((cla_vi)(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
#define CLA_ROTATE_KEYS(x) ((x).s456789abcdef0123)
#elif CLA_VEC == 8
#define CLA_REPEAT_ROWS(v) ((v).s01230123)
#define CLA_LANE_KEYS ((cla_vi)(0, 0, 0, 0, 1, 1, 1, 1))
#define CLA_ROTATE_KEYS(x) ((x).s45670123)
#else
#define CLA_REPEAT_ROWS(v) (v)
#define CLA_LANE_KEYS ((cla_vi)(0))
#define CLA_ROTATE_KEYS(x) (x)
#endif

// What a chunk of rows carries from tile to tile; lane 4 k + r belongs to row r.
typedef struct ClaState {
  cla_vf base;   // largest logit so far (base 2), the same in all lanes of a row
  cla_vf sum;    // of the probabilities: the sum over a row's lanes
  cla_vi end;    // position that the row's keys end before
  int full_end;  // the smallest of them: tiles before it need no mask
#if CLA_WINDOW
  cla_vi begin;    // position that the row's keys begin at
  int full_begin;  // the largest of them
#endif
#if CLA_ALIBI
  cla_vi position;  // of the row's query
  cla_vf slope;     // of its head
#endif
#if CLA_MASK
  __global const uchar* mask[CLA_CHUNK];  // of each row
#endif
#if CLA_GAPS
  __global const ClaGapRow* gap_row[CLA_CHUNK];  // of each row
#endif
} ClaState;

CLA_INLINE void cla_init_state(const ClaRows* rows, int first_row, ClaState* state) {
  int begin[CLA_CHUNK], end[CLA_CHUNK], position[CLA_CHUNK];
  float slope[CLA_CHUNK];
#pragma unroll
  for (int r = 0; r < CLA_CHUNK; ++r) {
    begin[r] = cla_row_begin(rows, first_row + r);
    end[r] = cla_row_end(rows, first_row + r);
    position[r] = cla_row_position(rows, first_row + r);
    slope[r] = cla_row_slope(rows, first_row + r);
#if CLA_MASK
    state->mask[r] = cla_row_mask(rows, first_row + r);
#endif
#if CLA_GAPS
    state->gap_row[r] = cla_row_gaps(rows, first_row + r);
#endif
  }
  state->base = (cla_vf)(CLA_NEG_BIG);
  state->sum = (cla_vf)(0.0f);
  state->end = CLA_REPEAT_ROWS(vload4(0, end));
  state->full_end = end[0];  // neither end ever falls from row to row
#if CLA_WINDOW
  state->begin = CLA_REPEAT_ROWS(vload4(0, begin));
  state->full_begin = begin[CLA_CHUNK - 1];
#endif
#if CLA_GAPS
  state->full_begin = rows->common_begin;
  state->full_end = rows->common_end;
#endif
#if CLA_ALIBI
  state->position = CLA_REPEAT_ROWS(vload4(0, position));
  state->slope = CLA_REPEAT_ROWS(vload4(0, slope));
#endif
}

// Whether some row of the chunk does not see all of a tile.
CLA_INLINE int cla_masked(const ClaState* state, int tile_at) {
#if CLA_MASK
  return 1;
#elif CLA_WINDOW
  return tile_at + CLA_BLOCK_KV > state->full_end || tile_at < state->full_begin;
#else
  return tile_at + CLA_BLOCK_KV > state->full_end;
#endif
}

// allowed[4 key + r]: what row r's mask and gaps say of a key of the tile. `end`: nothing is read
// from that position on.
CLA_INLINE void cla_read_masks(const ClaState* state, int tile_at, int end, uchar* allowed) {
#if CLA_MASK || CLA_GAPS
#pragma unroll 1
  for (int key = 0; key < CLA_BLOCK_KV; ++key)
#pragma unroll
    for (int r = 0; r < CLA_CHUNK; ++r) {
      const int position = min(tile_at + key, end - 1);
      uchar allows = 1;
#if CLA_GAPS
      allows = (uchar)cla_gaps_allow(state->gap_row[r], position);
#endif
#if CLA_MASK
      allows = allows != 0 ? state->mask[r][position] : (uchar)0;
#endif
      allowed[key * CLA_CHUNK + r] = allows;
    }
#endif
}

// Which lanes' rows see the keys of a step that begins at position `at`; `allowed` as read for it.
CLA_INLINE cla_vi cla_seen(const ClaState* state, int at, const uchar* allowed) {
  cla_vi seen = state->end - at > CLA_LANE_KEYS;
#if CLA_WINDOW
  seen &= state->begin - at <= CLA_LANE_KEYS;
#endif
#if CLA_MASK || CLA_GAPS
  seen &= CLA_CAT(convert_int, CLA_VEC)(CLA_CAT(vload, CLA_VEC)(0, allowed)) != 0;
#endif
  return seen;
}

// Makes logits of the scores of a step that begins at position `at`.
CLA_INLINE cla_vf cla_logits(const ClaState* state, const ClaTile* tile, int at, int masked,
                             cla_vf s) {
  if (CLA_DOT) s *= tile->score_unit;
#if CLA_ALIBI && CLA_GAPS
  int ahead[CLA_VEC];
  for (int i = 0; i < CLA_VEC; ++i)
    ahead[i] = cla_key_ahead(masked ? state->gap_row[i % CLA_CHUNK] : 0, at + i / CLA_CHUNK,
                             ((const int*)&state->position)[i]);
  return cla_adjust_scores(tile->opt, s, state->slope, CLA_CAT(vload, CLA_VEC)(0, ahead));
#elif CLA_ALIBI
  return cla_adjust_scores(tile->opt, s, state->slope, at - state->position + CLA_LANE_KEYS);
#else
  return cla_adjust_scores(tile->opt, s, (cla_vf)(0.0f), (cla_vi)(0));
#endif
}

// Turns a tile's scores into probabilities relative to the largest logit so far. If that one grew,
// the sum and the accumulator of the chunk are brought to the new scale; it seldom does after the
// first tiles. In a masked tile, keys that a row does not see get CLA_UNSEEN_PROBABILITY.
CLA_INLINE void cla_softmax(ClaState* state, __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                            const ClaTile* tile, int masked, cla_vf* s, cla_vf* o) {
  uchar allowed[CLA_BLOCK_KV * CLA_CHUNK];
  if (masked) cla_read_masks(state, tile->at, tile->end, allowed);
  cla_vf largest = state->base;
#pragma unroll
  for (int step = 0; step < CLA_STEPS; ++step) {
    const int at = tile->at + step * CLA_STEP_KEYS;
    s[step] = cla_logits(state, tile, at, masked, s[step]);
    if (masked)
      s[step] = cla_seen(state, at, allowed + step * CLA_VEC) ? s[step] : (cla_vf)(CLA_NEG_BIG);
    largest = cla_max(largest, s[step]);
  }
#pragma unroll
  for (int i = CLA_STEP_KEYS; i > 1; --i) largest = cla_max(largest, CLA_ROTATE_KEYS(largest));
  if (cla_any(largest > state->base)) {
    const cla_vf factor = cla_exp2(state->base - largest);
    float f[CLA_VEC];
    CLA_CAT(vstore, CLA_VEC)(factor, 0, f);
    state->base = largest;
    state->sum *= factor;
#pragma unroll 1
    for (int r = 0; r < CLA_CHUNK; ++r)
      for (int d = 0; d < CLA_NUM_VECS; ++d) o[r * CLA_NUM_VECS + d] *= f[r];
  }
#pragma unroll
  for (int step = 0; step < CLA_STEPS; ++step) {
    cla_fetch_in_step(k, v, tile, step);
    cla_vf p = cla_exp2(s[step] - largest);
    if (masked) p = s[step] == CLA_NEG_BIG ? (cla_vf)(CLA_UNSEEN_PROBABILITY) : p;
    s[step] = p;
    state->sum += p;
  }
}

// What a bundle of chunks holds in private memory.
typedef struct ClaBundle {
  cla_vf query[CLA_BUNDLE_ROWS * CLA_NUM_VECS + 1];  // attention/cpu/tile_products.clh
  cla_vf o[CLA_BUNDLE_ROWS * CLA_NUM_VECS];
  ClaState state[CLA_BUNDLE];
  float score_unit;
} ClaBundle;

// One bundle against one tile of keys.
CLA_INLINE void cla_add_tile(ClaBundle* own, __global const CLA_KV_T* k, __global const CLA_KV_T* v,
                             ClaTile* tile, ClaOperands* operands) {
  cla_prepare_scores(own->query, k, v, tile, operands);
#pragma unroll 1
  for (tile->chunk = 0; tile->chunk < tile->chunks; ++tile->chunk) {
    ClaState* state = &own->state[tile->chunk];
    cla_vf* o = own->o + tile->chunk * CLA_CHUNK * CLA_NUM_VECS;
    cla_vf s[CLA_STEPS];
    cla_scores(own->query, k, v, tile, operands, s);
    const int masked = cla_masked(state, tile->at);
    cla_softmax(state, k, v, tile, masked, s, o);
    cla_add_values(s, k, v, tile, operands, masked, o);
  }
  cla_finish_values(k, v, tile, operands, own->o);
}

CLA_INLINE void cla_begin_bundle(const ClaRows* rows, int first_row, int chunks,
                                 __global const CLA_Q_T* q, long q_token_stride, float scale,
                                 ClaBundle* bundle) {
  for (int c = 0; c < chunks; ++c)
    cla_init_state(rows, first_row + c * CLA_CHUNK, &bundle->state[c]);
  bundle->score_unit = CLA_DOT ? scale : 1.0f;  // bf16 queries keep their bits, scores are scaled
  for (int r = 0; r < chunks * CLA_CHUNK; ++r) {
    cla_vf* query = bundle->query + r * CLA_NUM_VECS;
    cla_read_query(rows, first_row + r, q, q_token_stride, CLA_DOT ? 1.0f : scale, query);
  }
  cla_order_queries(bundle->query, (uint)(chunks * CLA_CHUNK));
#pragma unroll 1
  for (int d = 0; d < chunks * CLA_CHUNK * CLA_NUM_VECS; ++d) bundle->o[d] = (cla_vf)(0.0f);
}

CLA_INLINE void cla_finish_chunk(const ClaRows* rows, int first_row, const ClaState* own, cla_vf* o,
                                 const ClaResults* to) {
  float base[CLA_VEC], sum[CLA_VEC];
  CLA_CAT(vstore, CLA_VEC)(own->base, 0, base);
  CLA_CAT(vstore, CLA_VEC)(own->sum, 0, sum);
  for (int r = 0; r < CLA_CHUNK && first_row + r < rows->rows; ++r) {
    ClaRowState state = {base[r], 0.0f};
    for (int i = r; i < CLA_VEC; i += CLA_CHUNK) state.sum += sum[i];
    cla_order_output(o + r * CLA_NUM_VECS);
    cla_write_row(rows, first_row + r, o + r * CLA_NUM_VECS, cla_value_unit(rows), state, to);
  }
}

CLA_KERNEL clattn_decode_cpu(CLA_PARAMS) {
  __global int* counters = workspace + call.counters_at;  // attention/cpu/queue.clh
  const ClaOptions opt = CLA_OPTION_VALUES;
  const ClaResults to = CLA_RESULTS;
  cla_vu codes[CLA_CODE_VECS];
  cla_make_codes(codes);

  ClaRows rows;
  while (cla_take_rows(&call, meta, counters, &opt, &rows)) {
    // As few bundles as hold all rows, each of the same, smallest number of chunks.
    const int bundles = (rows.rows + CLA_BUNDLE_ROWS - 1) / CLA_BUNDLE_ROWS;
    const int bundle_rows = CLA_ROUND_UP((rows.rows + bundles - 1) / bundles, CLA_CHUNK);
    const int chunks = CLA_BUNDLE == 1 ? 1 : bundle_rows / CLA_CHUNK;
    const int begin = cla_row_begin(&rows, 0);          // no row sees a key before it,
    const int end = cla_row_end(&rows, rows.rows - 1);  // none one from here on

    cla_begin_products(chunks * CLA_CHUNK);
    ClaBundle all[CLA_KV_HEADS * CLA_BUNDLES];  // [head][bundle], as many as there are
    for (int h = 0; h < rows.kv_heads; ++h) {
      const ClaRows of_head = cla_rows_of_head(&rows, h);
      const float scale = call.scale_log2e * cla_key_unit(&of_head);
      for (int b = 0; b < bundles; ++b)
        cla_begin_bundle(&of_head, b * chunks * CLA_CHUNK, chunks, q + call.q_offset,
                         call.q_token_stride, scale, &all[h * bundles + b]);
    }

    ClaRing ring;
    if (begin < end) {
#pragma unroll 1
      for (int i = 0; i + 1 < CLA_HELD; ++i)
        cla_enter_tile(&rows, begin + i * CLA_BLOCK_KV, end, &ring);
      cla_fetch_first(&rows, &ring, begin, k_cache + call.k_offset, CLA_VALUES);
    }
    for (int at = begin; at < end; at += CLA_BLOCK_KV) {
      cla_enter_tile(&rows, at + (CLA_HELD - 1) * CLA_BLOCK_KV, end, &ring);
      for (int h = 0; h < rows.kv_heads; ++h) {
        const int place = at / CLA_BLOCK_KV % CLA_HELD;
        ClaTile tile = {&opt,
                        all[h * bundles].score_unit,
                        codes,
                        at,
                        end,
                        h * call.head_stride,
                        ring.first[place],
                        cla_fetched(&rows, &ring, at, h),
                        0,
                        0,
                        chunks,
                        0};
        ClaOperands operands;
        for (int b = 0; b < bundles; ++b) {
          tile.fetch_begin = b * CLA_BLOCK_KV / bundles;
          tile.fetch_end = (b + 1) * CLA_BLOCK_KV / bundles;
          cla_add_tile(&all[h * bundles + b], k_cache + call.k_offset, CLA_VALUES, &tile,
                       &operands);
        }
      }
    }

    for (int h = 0; h < rows.kv_heads; ++h) {
      const ClaRows of_head = cla_rows_of_head(&rows, h);
      for (int c = 0; c < bundles * chunks; ++c) {
        ClaBundle* bundle = &all[h * bundles + c / chunks];
        cla_finish_chunk(&of_head, c * CLA_CHUNK, &bundle->state[c % chunks],
                         bundle->o + c % chunks * CLA_CHUNK * CLA_NUM_VECS, &to);
      }
    }
    cla_merge_if_last(&rows, &to, CLA_ARRIVALS);
  }
  cla_end_products();
  cla_leave_queue(counters);
}
