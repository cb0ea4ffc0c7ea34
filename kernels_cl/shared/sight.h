/* Which keys the rows of a request see where more than their positions says it. The host's planner
   and the kernels that take a step's lengths or lists from the device share this arithmetic. Plain
   C: C++ and OpenCL C include it. */
#ifndef CLATTN_SHARED_SIGHT_H
#define CLATTN_SHARED_SIGHT_H

#include "shared/work_item.h"

#ifdef __cplusplus
#define CLA_INT64 long long
#else
#define CLA_INT64 long
#endif

/* Which keys a query may see. */
typedef struct ClaSight {
  int page_size;      /* tokens: ranges begin on page boundaries */
  int causal;         /* 1: a token sees no later one */
  int window_left;    /* tokens that a query reaches back; -1 = all */
  int window_right;   /* and ahead */
  int chunk;          /* tokens of an aligned chunk that it is confined to; 0 = none */
  int chunk_lookback; /* chunks before that one that it sees, too */
  int span_rule;      /* CLA_SPAN_*: what of a span the window hides */
} ClaSight;

#define CLA_SPAN_WHOLE 0
#define CLA_SPAN_CLIP_LEFT 1
#define CLA_SPAN_CLIP_BOTH 2

#define CLA_BOTH_WAYS 0
#define CLA_CAUSAL 1
#define CLA_CANVAS 2

/* The keys that any query of a tile sees: from a page boundary on, and how many. */
typedef struct ClaTileKeys {
  int first;
  int count;
} ClaTileKeys;

/* What a batch says of one request. */
typedef struct ClaRequestRows {
  int query_len;
  int seq_len;
  int direction;  /* CLA_BOTH_WAYS, CLA_CAUSAL or CLA_CANVAS */
  int first_key;  /* position of the first one */
  int kept_end;   /* keys from first_key to here are kept; 0: none */
  int tree_nodes; /* the newest tokens, which are a tree; 0: they are a chain */
} ClaRequestRows;

/* The span that holds a position; none if begin == end. */
typedef struct ClaSpan {
  int begin;
  int end;
} ClaSpan;

/* A request of a step whose lists or lengths only the device knows (attention/list_rows.cl). */
typedef struct ClaListedRequest {
  ClaRequestRows widest; /* what its rows see at most; the lengths are the host's bounds */
  int direction;         /* what the device knows by now of these: */
  int tree_nodes;
} ClaListedRequest;

/* What one listed row, or the ClaListedItem in front of an item's rows, is made of there. */
typedef struct ClaRowSource {
  int request;  /* in the batch; -1: padding of a recorded step */
  int token;    /* of the request: the row's, or the item's first one */
  int count;    /* query tokens of the item; 0: it is a row */
  int gaps_at;  /* ints of the metadata: where its ClaGapRow may be; 0: it never has one */
  ClaSpan span; /* that holds the row's position; only where the host has the lengths */
} ClaRowSource;

static inline CLA_INT64 cla_min64(CLA_INT64 a, CLA_INT64 b) {
  return a < b ? a : b;
}
static inline CLA_INT64 cla_max64(CLA_INT64 a, CLA_INT64 b) {
  return a > b ? a : b;
}

/* Where the chunk of a position begins. Queries that outnumber their keys stand before position 0,
   in chunks of their own. */
static inline CLA_INT64 cla_chunk_begin(CLA_INT64 position, int chunk) {
  return position - (position % chunk + chunk) % chunk;
}

/* The first key that the query at a position sees by its chunk and by a window that is measured
   from another position. May be negative. */
static inline CLA_INT64 cla_window_begin(const ClaSight* sight, CLA_INT64 from,
                                         CLA_INT64 position) {
  const CLA_INT64 begin = sight->window_left < 0 ? 0 : from - sight->window_left;
  if (sight->chunk == 0) return begin;
  return cla_max64(begin, cla_chunk_begin(position, sight->chunk) -
                              (CLA_INT64)sight->chunk_lookback * sight->chunk);
}

static inline int cla_tree_begin(const ClaRequestRows* request) {
  return request->seq_len - request->tree_nodes;
}

/* What a row of a request without a tree sees. */
static inline ClaListedRow cla_row_of_chain(const ClaSight* sight, const ClaRequestRows* request,
                                            ClaSpan span, int position) {
  const CLA_INT64 p = position, first_new = (CLA_INT64)request->seq_len - request->query_len;
  const int causal = request->direction == CLA_CAUSAL;
  CLA_INT64 begin = cla_window_begin(sight, request->direction == CLA_CANVAS ? first_new : p, p);
  CLA_INT64 end = request->seq_len;
  ClaListedRow row;
  if (causal) {
    end = p + 1;
  } else if (request->direction == CLA_BOTH_WAYS && sight->window_right >= 0) {
    end = p + sight->window_right + 1;
  }
  if (causal && span.begin < span.end && sight->span_rule != CLA_SPAN_WHOLE) {
    const int clipped = sight->span_rule == CLA_SPAN_CLIP_BOTH && sight->window_right >= 0;
    end = cla_max64(end, clipped ? cla_min64(span.end, p + sight->window_right + 1) : span.end);
  }
  if (sight->chunk > 0) end = cla_min64(end, cla_chunk_begin(p, sight->chunk) + sight->chunk);
  if (span.begin < span.end && sight->span_rule == CLA_SPAN_WHOLE) {
    begin = cla_min64(begin, span.begin);
    end = cla_max64(end, span.end);
  }
  begin = cla_max64(begin, cla_max64(request->first_key, 0));
  end = cla_max64(cla_min64(end, request->seq_len), begin);
  row.begin = (int)begin;
  row.end = (int)end;
  row.position = position;
  row.gaps_at = 0;
  return row;
}

/* What the row at a position sees behind the kept keys: from their first one on where no gap lies
   between. `depth`: of the row's node, if the request has a tree. Neither end decreases from one
   position to the next, trees apart. */
static inline ClaListedRow cla_seen_by_row(const ClaSight* sight, const ClaRequestRows* request,
                                           ClaSpan span, int depth, int position) {
  ClaListedRow row;
  if (request->tree_nodes == 0) {
    row = cla_row_of_chain(sight, request, span, position);
  } else {
    const int tree_begin = cla_tree_begin(request);
    row.position = tree_begin + depth;
    row.begin = (int)cla_min64(cla_max64(cla_window_begin(sight, row.position, row.position),
                                         cla_max64(request->first_key, 0)),
                               tree_begin);
    row.end = position + 1;
    row.gaps_at = 0;
  }
  if (row.begin <= request->kept_end) row.begin = request->first_key;
  return row;
}

/* The ends of the rows of a tile of `count` query tokens from a position on, behind the kept keys.
   `first`, `last`: the spans of the first and the last one. Nodes of a tree are at any depth that
   their numbers allow. */
static inline ClaListedItem cla_item_behind_gap(const ClaSight* sight,
                                                const ClaRequestRows* request, ClaSpan first,
                                                ClaSpan last, int position, int count) {
  const int end = position + count - 1;
  const int deepest = end - cla_tree_begin(request);
  const ClaListedRow from = cla_seen_by_row(sight, request, first, 0, position);
  const ClaListedRow to = cla_seen_by_row(sight, request, last, deepest, end);
  ClaListedItem item;
  item.begin = from.begin;
  item.end = to.end;
  item.common_begin = to.begin;
  item.common_end = request->tree_nodes > 0 ? cla_tree_begin(request) : from.end;
  return item;
}

/* All keys between the ends of a tile, from a page boundary on. */
static inline ClaTileKeys cla_keys_between(int begin, int end, int page_size) {
  ClaTileKeys keys = {0, 0};
  if (begin >= end) return keys;
  keys.first = begin - begin % page_size;
  keys.count = end - keys.first;
  return keys;
}

/* Keys of such a tile, kept ones and the gap behind them included. */
static inline ClaTileKeys cla_listed_tile_keys(const ClaSight* sight, const ClaRequestRows* request,
                                               ClaSpan first, ClaSpan last, int position,
                                               int count) {
  const ClaListedItem item = cla_item_behind_gap(sight, request, first, last, position, count);
  return cla_keys_between(request->kept_end > 0 ? request->first_key : item.begin, item.end,
                          sight->page_size);
}

#endif
