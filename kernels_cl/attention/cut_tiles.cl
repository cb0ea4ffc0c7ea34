/* Makes the work items of a step whose lengths only the device knows. The host planned from an
   upper bound of every length and left a ClaSplit for each item (shared/cut.h); here each becomes
   its item by the length of its request. The first split of a tile also makes the tile's merges and
   the slots of its query tokens:

     keys    = those that some query token of the tile sees, q_pos = length - behind
     splits  = as the plan's rule cuts that many pages; the tile's other items get no keys
     slot[t] = page of q_pos + t, times page_size, plus the place in it

   A length below the request's query tokens or above its bound is noted in `errors`; such a request
   attends to nothing, and its slots are -1. The same holds for a row that advance_step left out; it
   has already noted the error.

   macro         unit        legal values
   CLA_WG_SIZE   work-items  >= 1

   Launch: ceil(num_splits / CLA_WG_SIZE) groups. */
#include "core/device_errors.clh"
#include "shared/cut.h"

#if !defined(CLA_WG_SIZE)
#error "cut_tiles.cl needs CLA_WG_SIZE"
#endif

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_cut_tiles(
    __global int* restrict meta,           /* the step's metadata, slots first */
    int splits_at,                         /* ints of it: ClaSplit [num_splits] */
    int num_splits,                        /* padding included */
    int lens_at,                           /* ints of it: the lengths that were taken */
    int list_at,                           /* ints of it: page ids */
    int requests_at,                       /* ints of it: ClaListedRequest, of listed rows */
    int page_size,                         /* tokens; this and the next six: ClaSight */
    int causal,                            /* 1: a token sees no later one */
    int window_left,                       /* tokens, -1 = all */
    int window_right,                      /* tokens, -1 = all */
    int chunk,                             /* tokens, 0 = none */
    int chunk_lookback,                    /* chunks */
    int span_rule,                         /* CLA_SPAN_* */
    __global const int* restrict seq_lens, /* [requests] */
    __global const long* restrict given,   /* [query tokens]: slots, or null */
    int advanced,                          /* 1: requests without a given slot are left out */
    __global int* restrict errors) {       /* [1] */
  const int number = (int)get_global_id(0);
  if (number >= num_splits) return;
  const ClaSplit split = ((__global const ClaSplit*)(meta + splits_at))[number];
  if (split.q_count == 0) return; /* padding of a recorded step */
  const ClaSight sight = {page_size, causal,         window_left, window_right,
                          chunk,     chunk_lookback, span_rule};
  ClaRequestRows widest = {0, 0, 0, 0, 0, 0};
  if (split.listed != 0)
    widest = ((__global const ClaListedRequest*)(meta + requests_at))[split.request].widest;
  int length = seq_lens[split.request];
  if (advanced && given[split.q_row] < 0) {
    length = 0;
  } else if (length < split.query_len || length > split.bound) {
    const int reason = length > split.bound ? CLA_ERROR_LONG : CLA_ERROR_SHORT;
    cla_note(errors, (uint)split.request, reason);
    length = 0;
  }
  const ClaCut cut = cla_cut_tile(&split, &sight, widest, length);
  *(__global ClaWorkItem*)(meta + split.item_at) =
      cla_item_of(&split, cut.q_pos, cut.keys, page_size, cut.num_splits);
  if (split.split != 0) return;
  if (split.behind == split.query_len) meta[lens_at + split.request] = length;
  __global const int* pages = meta + list_at + split.pages_at;
  __global long* slots = (__global long*)meta + split.q_row;
  for (int token = 0; token < split.q_count; ++token) {
    const int position = length - split.behind + token;
    long slot = -1;
    if (length > 0) {
      slot = given != 0 ? given[split.q_row + token]
                        : (long)pages[position / page_size] * page_size + position % page_size;
    }
    slots[token] = slot;
    if (split.merge_at >= 0)
      ((__global ClaMergeItem*)(meta + split.merge_at))[token] =
          cla_merge_of(&split, token, cut.num_splits);
  }
}
