/* Makes the work items of a step where only the device knows the requests' query tokens and lengths
   (see cut_tiles.cl). The host planned for the most query tokens of each request; here each tile
   becomes what is left of it:

     rows    = starts[r] ... starts[r + 1] - 1 of the query tensor
     q_count = those of them that are in the tile; a tile without any keeps its items, without keys,
               which write partial rows that nobody merges
     slot[t] = of the request whose rows hold t: the page of position length - (starts[r + 1] - t),
               times page_size, plus the place in it; -1 if there is none

   A request whose rows are not among those that it may have, or whose length is below its query
   tokens or above its bound, is noted in `errors`; nothing is written for it, and its slots are -1.

   macro         unit        legal values
   CLA_WG_SIZE   work-items  >= 1

   Launch: ceil(n / CLA_WG_SIZE) groups, n the most of num_splits, num_slots, num_requests + 1. */
#include "core/device_errors.clh"
#include "shared/cut.h"

#if !defined(CLA_WG_SIZE)
#error "cut_queries.cl needs CLA_WG_SIZE"
#endif

typedef struct ClaRequest {
  int first_row;
  int query_len; /* 0 if it is left out */
  int fault;     /* why it is left out: CLA_ERROR_*; 0: it is not */
} ClaRequest;

static inline ClaRequest cla_cut_request_of(ClaQueryBounds bounds, int begin, int end, int length) {
  ClaRequest request = {begin, 0, 0};
  if (begin == end && bounds.fewest == 0) return request;
  if (begin < bounds.begin || end > bounds.end || end - begin < bounds.fewest ||
      end - begin > bounds.most || begin >= end) {
    request.fault = CLA_ERROR_QUERIES;
  } else if (length < end - begin || length > bounds.bound) {
    request.fault = CLA_ERROR_TOKENS;
  } else {
    request.query_len = end - begin;
  }
  return request;
}

/* The last request that begins at row `row` or before it. */
static inline int cla_request_at(__global const int* starts, int num_requests, int row) {
  int first = 0, end = num_requests;
  while (end - first > 1) {
    const int middle = first + (end - first) / 2;
    if (starts[middle] <= row) {
      first = middle;
    } else {
      end = middle;
    }
  }
  return first;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_cut_queries(
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
    __global const int* restrict seq_lens, /* [num_requests] */
    __global const long* restrict given,   /* [num_slots]: slots, or null */
    __global const int* restrict starts,   /* [num_requests + 1]: the requests' first rows */
    int bounds_at,                         /* ints of meta: ClaQueryBounds [num_requests] */
    int starts_at,                         /* ints of it: the rows that were taken */
    int num_requests,                      /* padding included */
    int num_slots,                         /* padding included */
    __global int* restrict errors) {       /* [1] */
  const int number = (int)get_global_id(0);
  __global const ClaQueryBounds* all_bounds = (__global const ClaQueryBounds*)(meta + bounds_at);
  if (number <= num_requests) meta[starts_at + number] = starts[number];
  if (number < num_requests) {
    const int length = seq_lens[number];
    const ClaRequest own =
        cla_cut_request_of(all_bounds[number], starts[number], starts[number + 1], length);
    if (own.fault != 0) cla_note(errors, (uint)number, own.fault);
    meta[lens_at + number] = own.fault != 0 ? 0 : length;
  }
  if (number < num_slots) {
    const int at = cla_request_at(starts, num_requests, number);
    const ClaQueryBounds bounds = all_bounds[at];
    const ClaRequest own = cla_cut_request_of(bounds, starts[at], starts[at + 1], seq_lens[at]);
    long slot = -1;
    if (own.query_len > 0 && number >= own.first_row && number < starts[at + 1]) {
      const int position = seq_lens[at] - (starts[at + 1] - number);
      __global const int* pages = meta + list_at + bounds.pages_at;
      slot = given != 0 ? given[number]
                        : (long)pages[position / page_size] * page_size + position % page_size;
    }
    ((__global long*)meta)[number] = slot;
  }
  if (number >= num_splits) return;
  const ClaSplit planned = ((__global const ClaSplit*)(meta + splits_at))[number];
  if (planned.q_count == 0) return; /* padding of a recorded step */
  const ClaSight sight = {page_size, causal,         window_left, window_right,
                          chunk,     chunk_lookback, span_rule};
  ClaRequestRows widest = {0, 0, 0, 0, 0, 0};
  if (planned.listed != 0)
    widest = ((__global const ClaListedRequest*)(meta + requests_at))[planned.request].widest;
  const int at = planned.request, length = seq_lens[at];
  const ClaRequest own = cla_cut_request_of(all_bounds[at], starts[at], starts[at + 1], length);
  const ClaSplit split = cla_narrow_tile(&planned, own.first_row, own.query_len);
  const ClaCut cut = cla_cut_tile(&split, &sight, widest, length);
  *(__global ClaWorkItem*)(meta + split.item_at) =
      cla_item_of(&split, cut.q_pos, cut.keys, page_size, cut.num_splits);
  if (split.split != 0 || split.merge_at < 0) return;
  for (int token = 0; token < planned.q_count; ++token)
    ((__global ClaMergeItem*)(meta + split.merge_at))[token] =
        cla_merge_of(&split, token, cut.num_splits);
}
