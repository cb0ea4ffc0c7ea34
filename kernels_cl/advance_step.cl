/* Moves a decode batch whose metadata lives on the device one token on, and looks up slots there.

     rows:    row r < num_queries: len = seq_lens[r] + 1; token, position, slot and page count of
              position len - 1; other rows: token 0, position 0, slot -1
     indptr:  indptr[r + 1] = sum of bound[0 ... r], padded behind num_queries with the last
     indices: indices[indptr[r] + c] = table[r, c] for c < bound[r]
     slots:   slot of position p of request b by page lists

   Nothing outside a table, list or cache is read or written: a row that would is noted in `errors`
   and becomes padding that keeps its length.

   macro         unit        legal values
   CLA_WG_SIZE   work-items  >= 1

   Launch: rows, indices: a group a row; indptr: one group; slots: ceil(tokens / CLA_WG_SIZE). */

/* Reasons, in the low two bits of the word; above them the row, so that the lowest row wins. */
#define CLA_ERROR_LENGTH 0
#define CLA_ERROR_TABLE 1
#define CLA_ERROR_BLOCK 2
#define CLA_ERROR_INDICES 3

static inline void cla_note(__global int* errors, uint row, int reason) {
  atomic_max(errors, (int)((0x1fffffffu - row) << 2) | reason);
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_rows(
    __global long* restrict tokens,        /* [num_seqs] */
    __global const long* restrict sampled, /* [num_queries] */
    __global long* restrict positions,     /* [num_seqs] */
    __global int* restrict seq_lens,       /* [num_seqs] */
    __global long* restrict slots,         /* [num_seqs] */
    __global const int* restrict table,    /* [num_seqs, table_stride] */
    long table_stride,                     /* pages */
    int num_queries,                       /* rows */
    int page_size,                         /* tokens */
    long num_blocks,                       /* pages of the cache */
    __global int* errors,                  /* [1] */
    __global int* restrict last_page_len,  /* [num_seqs]; if paged */
    __global int* restrict bound,          /* [num_seqs]; if paged */
    int paged) {                           /* 0 or 1 */
  __local int outside;
  const uint row = (uint)get_group_id(0);
  const uint lane = (uint)get_local_id(0);
  const int real = row < (uint)num_queries;
  const long length = real ? (long)seq_lens[row] + 1 : 0;
  const long pages = length > 0 ? (long)((ulong)(length - 1) / (uint)page_size) + 1 : 0;
  int reason = -1;
  if (real && (length < 1 || length > 0x7fffffff)) reason = CLA_ERROR_LENGTH;
  if (reason < 0 && pages > table_stride) reason = CLA_ERROR_TABLE;
  table += (ulong)row * (ulong)table_stride;
  if (lane == 0) outside = 0;
  barrier(CLK_LOCAL_MEM_FENCE); /* outside cleared -> counted */
  const long checked = reason < 0 ? pages : 0;
  for (long c = lane; c < checked; c += CLA_WG_SIZE) {
    if (table[c] < 0 || table[c] >= num_blocks) atomic_inc(&outside);
  }
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); /* outside, seq_lens: all -> lane 0 */
  if (lane != 0) return;
  if (reason < 0 && outside != 0) reason = CLA_ERROR_BLOCK;
  if (reason >= 0) cla_note(errors, row, reason);
  if (!real || reason >= 0) {
    tokens[row] = 0;
    positions[row] = 0;
    slots[row] = -1;
    if (paged && real) bound[row] = 0;
    return;
  }
  const uint position = (uint)(length - 1);
  const uint in_page = position % (uint)page_size;
  tokens[row] = sampled[row];
  positions[row] = position;
  seq_lens[row] = (int)length;
  slots[row] = (long)table[position / (uint)page_size] * page_size + in_page;
  if (!paged) return;
  last_page_len[row] = (int)in_page + 1;
  bound[row] = (int)pages;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_indptr(
    __global const int* restrict bound, /* [num_queries] */
    __global int* restrict indptr,      /* [num_seqs + 1] */
    int num_queries,                    /* rows */
    int num_seqs) {                     /* rows */
  __local int sums[CLA_WG_SIZE];
  const int lane = (int)get_local_id(0);
  const int share = (num_queries + CLA_WG_SIZE - 1) / CLA_WG_SIZE;
  const int begin = min(lane * share, num_queries);
  const int end = min(begin + share, num_queries);
  int sum = 0;
  for (int row = begin; row < end; ++row) sum += bound[row];
  sums[lane] = sum;
  barrier(CLK_LOCAL_MEM_FENCE); /* sums written -> read */
  int before = 0;
  int total = 0;
  for (int i = 0; i < CLA_WG_SIZE; ++i) {
    if (i < lane) before += sums[i];
    total += sums[i];
  }
  if (lane == 0) indptr[0] = 0;
  for (int row = begin; row < end; ++row) {
    before += bound[row];
    indptr[row + 1] = before;
  }
  for (int row = num_queries + lane; row < num_seqs; row += CLA_WG_SIZE) indptr[row + 1] = total;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_advance_indices(
    __global const int* restrict table,  /* [num_seqs, table_stride] */
    long table_stride,                   /* pages */
    __global const int* restrict indptr, /* [num_seqs + 1] */
    __global int* restrict indices,      /* [num_indices] */
    long num_indices,                    /* that fit */
    __global int* errors) {              /* [1] */
  const uint row = (uint)get_group_id(0);
  const uint lane = (uint)get_local_id(0);
  const int first = indptr[row];
  const int end = indptr[row + 1];
  if (lane == 0 && end > first && end > num_indices) cla_note(errors, row, CLA_ERROR_INDICES);
  table += (ulong)row * (ulong)table_stride;
  for (long at = (long)first + lane; at < end && at < num_indices; at += CLA_WG_SIZE)
    indices[at] = table[at - first];
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
