/* Moves a decode batch whose metadata lives on the device one token on, and looks up slots there.

     rows:    row r < num_queries: len = seq_lens[r] + 1; token, position and slot of len - 1;
              other rows: token 0, position 0, slot -1
     bounds:  bound[r] = pages of len, 0 for rows that `rows` would refuse
     indptr:  indptr[r + 1] = sum of bound[0 ... r], padded behind num_queries with the last; rows
              whose pages end past num_indices, and all behind them, get bound 0
     pages:   as rows for rows of bound > 0, others are padding;
              indices[indptr[r] + c] = table[r, c] for c < bound[r]
     slots:   slot of position p of request b by page lists

   Nothing outside a table, list or cache is read or written: a row that would is noted in `errors`
   and becomes padding that keeps its length.

   macro         unit        legal values
   CLA_WG_SIZE   work-items  >= 1

   Launch: rows, bounds, pages: a group a row; indptr: one group; slots: ceil(tokens / CLA_WG_SIZE).
 */

#include "core/device_errors.clh"

/* Pages of the row's length with its new token; 0, and noted, if that or its table is no good.
   Called by the whole group; lane 0 gets the answer. `table`: the row's. */
static inline int cla_advanced_pages(__global const int* seq_lens, __global const int* table,
                                     long table_stride, uint page_size, long num_blocks,
                                     __global int* errors, __local int* outside) {
  const uint row = (uint)get_group_id(0);
  const uint lane = (uint)get_local_id(0);
  const long length = (long)seq_lens[row] + 1;
  const long pages = length > 0 ? (long)((ulong)(length - 1) / page_size) + 1 : 0;
  int reason = -1;
  if (length < 1 || length > 0x7fffffff) reason = CLA_ERROR_LENGTH;
  if (reason < 0 && pages > table_stride) reason = CLA_ERROR_TABLE;
  if (lane == 0) *outside = 0;
  barrier(CLK_LOCAL_MEM_FENCE); /* outside cleared -> counted */
  const long checked = reason < 0 ? pages : 0;
  for (long c = lane; c < checked; c += CLA_WG_SIZE) {
    if (table[c] < 0 || table[c] >= num_blocks) atomic_inc(outside);
  }
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); /* outside, seq_lens: all -> lane 0 */
  if (reason < 0 && *outside != 0) reason = CLA_ERROR_BLOCK;
  if (lane == 0 && reason >= 0) cla_note(errors, row, reason);
  return reason < 0 ? (int)pages : 0;
}

/* What a row of the next step's input consists of. */
typedef struct ClaAdvanceRows {
  __global long* tokens;        /* [num_seqs] */
  __global const long* sampled; /* [num_queries] */
  __global long* positions;     /* [num_seqs] */
  __global int* seq_lens;       /* [num_seqs] */
  __global long* slots;         /* [num_seqs] */
} ClaAdvanceRows;

/* Its parameters; table: [num_seqs, table_stride]. */
#define CLA_ROWS_PARAMS                                                   \
  __global long *restrict tokens, __global const long *restrict sampled,  \
      __global long *restrict positions, __global int *restrict seq_lens, \
      __global long *restrict slots, __global const int *restrict table,  \
      long table_stride /* pages */, int page_size /* tokens */, int num_queries /* rows */
#define CLA_ROWS \
  { tokens, sampled, positions, seq_lens, slots }

/* Row `row`: padding, unless it advances. Returns how many tokens its last page then has. */
static inline int cla_advance_write_row(const ClaAdvanceRows* rows, uint row, int advances,
                                        __global const int* table, uint page_size) {
  if (!advances) {
    rows->tokens[row] = 0;
    rows->positions[row] = 0;
    rows->slots[row] = -1;
    return 0;
  }
  const uint position = (uint)rows->seq_lens[row];
  const uint in_page = position % page_size;
  rows->tokens[row] = rows->sampled[row];
  rows->positions[row] = position;
  rows->seq_lens[row] = (int)(position + 1);
  rows->slots[row] = (long)table[position / page_size] * (long)page_size + in_page;
  return (int)in_page + 1;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_rows(
    CLA_ROWS_PARAMS, long num_blocks, /* pages of the cache */
    __global int* errors) {           /* [1] */
  __local int outside;
  const uint row = (uint)get_group_id(0);
  const ClaAdvanceRows rows = CLA_ROWS;
  table += (ulong)row * (ulong)table_stride;
  int pages = 0;
  if (row < (uint)num_queries) { /* the same for the whole group */
    pages = cla_advanced_pages(seq_lens, table, table_stride, (uint)page_size, num_blocks, errors,
                               &outside);
  }
  if (get_local_id(0) == 0) cla_advance_write_row(&rows, row, pages > 0, table, (uint)page_size);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_bounds(
    __global const int* restrict seq_lens, /* [num_queries] */
    __global const int* restrict table,    /* [num_queries, table_stride] */
    long table_stride,                     /* pages */
    int page_size,                         /* tokens */
    long num_blocks,                       /* pages of the cache */
    __global int* errors,                  /* [1] */
    __global int* restrict bound) {        /* [num_queries] */
  __local int outside;
  const uint row = (uint)get_group_id(0);
  const int pages = cla_advanced_pages(seq_lens, table + (ulong)row * (ulong)table_stride,
                                       table_stride, (uint)page_size, num_blocks, errors, &outside);
  if (get_local_id(0) == 0) bound[row] = pages;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_indptr(
    __global int* restrict bound,  /* [num_queries] */
    __global int* restrict indptr, /* [num_seqs + 1] */
    int num_queries,               /* rows */
    int num_seqs,                  /* rows */
    long num_indices,              /* that fit */
    __global int* errors) {        /* [1] */
  __local int sums[CLA_WG_SIZE];
  __local int last; /* the largest sum that fits */
  const int lane = (int)get_local_id(0);
  const int share = (num_queries + CLA_WG_SIZE - 1) / CLA_WG_SIZE;
  const int begin = min(lane * share, num_queries);
  const int end = min(begin + share, num_queries);
  int sum = 0;
  for (int row = begin; row < end; ++row) sum += bound[row];
  sums[lane] = sum;
  if (lane == 0) last = 0;
  barrier(CLK_LOCAL_MEM_FENCE); /* sums, last written -> read */
  int before = 0;
  for (int i = 0; i < lane; ++i) before += sums[i];
  int fits = 0;
  for (int row = begin, at = before; row < end; ++row) {
    at += bound[row];
    if (at <= num_indices) fits = at;
  }
  atomic_max(&last, fits);
  barrier(CLK_LOCAL_MEM_FENCE); /* last raised -> read */
  if (lane == 0) indptr[0] = 0;
  for (int row = begin; row < end; ++row) {
    before += bound[row];
    if (before > num_indices && bound[row] > 0) {
      cla_note(errors, (uint)row, CLA_ERROR_INDICES);
      bound[row] = 0;
    }
    indptr[row + 1] = min(before, last);
  }
  for (int row = num_queries + lane; row < num_seqs; row += CLA_WG_SIZE) indptr[row + 1] = last;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_pages(
    CLA_ROWS_PARAMS, __global const int* restrict bound, /* [num_queries] */
    __global const int* restrict indptr,                 /* [num_seqs + 1] */
    __global int* restrict indices,                      /* pages */
    __global int* restrict last_page_len) {              /* [num_seqs] */
  const uint row = (uint)get_group_id(0);
  const ClaAdvanceRows rows = CLA_ROWS;
  const int pages = row < (uint)num_queries ? bound[row] : 0;
  table += (ulong)row * (ulong)table_stride;
  for (int c = (int)get_local_id(0); c < pages; c += CLA_WG_SIZE)
    indices[(long)indptr[row] + c] = table[c];
  if (get_local_id(0) != 0) return;
  const int page_len = cla_advance_write_row(&rows, row, pages > 0, table, (uint)page_size);
  if (pages > 0) last_page_len[row] = page_len;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_page_slots(
    __global const int* restrict batch_indices, /* [num_tokens], negative = no slot */
    __global const int* restrict positions,     /* [num_tokens] */
    __global const int* restrict indices,       /* [num_indices] */
    long num_indices,                           /* pages */
    __global const int* restrict indptr,        /* [num_reqs + 1] */
    int num_reqs,                               /* requests */
    int page_size,                              /* tokens */
    long num_blocks,                            /* pages of the cache */
    __global long* restrict slots,              /* [num_tokens] */
    long num_tokens) {                          /* tokens */
  const long token = (long)get_global_id(0);
  if (token >= num_tokens) return;
  const int request = batch_indices[token];
  const int position = positions[token];
  long slot = -1;
  if (request >= 0 && request < num_reqs && position >= 0) {
    const long at = (long)indptr[request] + (uint)position / (uint)page_size;
    if (at >= 0 && at < indptr[request + 1] && at < num_indices) {
      const long block = indices[at];
      if (block >= 0 && block < num_blocks)
        slot = block * page_size + (uint)position % (uint)page_size;
    }
  }
  slots[token] = slot;
}
