/* How the keys of a tile of query tokens are cut into the ranges of its splits. The host's planner
   and the kernel that takes lengths from the device (attention/cut_tiles.cl) share this arithmetic,
   so that both make the same items of the same length. Plain C: C++ and OpenCL C include it. */
#ifndef CLATTN_SHARED_CUT_H
#define CLATTN_SHARED_CUT_H

#include "shared/sight.h"

/* Where the query tokens of a request may stand, and how many it may have, if the device decides
   (attention/cut_queries.cl). */
typedef struct ClaQueryBounds {
  int begin; /* rows of the batch's query tensor between which its own lie */
  int end;
  int fewest; /* query tokens */
  int most;
  int bound;    /* tokens that the request has at most */
  int pages_at; /* see ClaWorkItem */
} ClaQueryBounds;

/* One split of a tile, as far as it is known without the length of the request. */
typedef struct ClaSplit {
  int request;     /* in the batch */
  int query_len;   /* query tokens of the request */
  int bound;       /* tokens that the request has at most */
  int behind;      /* query tokens of the request from the tile's first one on */
  int q_row;       /* of the first query token in the batch's query tensor */
  int q_count;     /* query tokens of the tile; 0: padding of a recorded step */
  int pages_at;    /* see ClaWorkItem */
  int first_row;   /* partial row of the tile's first split */
  int fixed_pages; /* of every split but the last; 0: as nearly equal as pages allow */
  int min_pages;   /* of a split, if nearly equal */
  int most_splits; /* of the tile, if nearly equal */
  int split;       /* the number of this one */
  int item_at;     /* ints of the metadata: its ClaWorkItem */
  int merge_at;    /* and its tile's ClaMergeItem[q_count]; -1: none, or the kernel merges */
  int listed;      /* number of the tile's first listed row in the metadata; 0: it has none */
} ClaSplit;

/* Both ends of what a query sees rise with its position, so the first query has the first key and
   the last one the last. 64 bits: windows may be of any width. */
static inline ClaTileKeys cla_tile_keys(const ClaSight* sight, int q_pos, int q_count,
                                        int seq_len) {
  const CLA_INT64 first = q_pos;
  const CLA_INT64 last = first + q_count - 1;
  CLA_INT64 begin = 0;
  CLA_INT64 end = seq_len;
  ClaTileKeys keys = {0, 0};
  if (sight->causal && last + 1 < end) end = last + 1;
  if (sight->window_left >= 0 && first - sight->window_left > begin)
    begin = first - sight->window_left;
  if (sight->window_right >= 0 && last + sight->window_right + 1 < end)
    end = last + sight->window_right + 1;
  if (sight->chunk > 0) {
    const CLA_INT64 chunk_begin =
        first - first % sight->chunk - (CLA_INT64)sight->chunk_lookback * sight->chunk;
    const CLA_INT64 chunk_end = last - last % sight->chunk + sight->chunk;
    if (chunk_begin > begin) begin = chunk_begin;
    if (chunk_end < end) end = chunk_end;
  }
  if (begin >= end) return keys;                    /* no query of the tile sees a key */
  if (begin > 0) begin -= begin % sight->page_size; /* most tiles begin at 0: no division */
  keys.first = (int)begin;
  keys.count = (int)(end - begin);
  return keys;
}

static inline int cla_pages_of(int keys, int page_size) {
  return keys / page_size + (keys % page_size != 0);
}

/* Splits of a tile whose keys lie in `pages` pages, >= 1. */
static inline int cla_num_splits(const ClaSplit* tile, int pages) {
  const int fixed = tile->fixed_pages > 0;
  const int splits = fixed ? cla_pages_of(pages, tile->fixed_pages) : pages / tile->min_pages;
  if (splits < 1) return 1;
  return fixed || splits < tile->most_splits ? splits : tile->most_splits;
}

/* The first key of split `index`, for index == num_splits the end of the last. */
static inline int cla_split_begin(const ClaSplit* tile, ClaTileKeys keys, int page_size,
                                  int num_splits, int index) {
  CLA_INT64 page = (CLA_INT64)tile->fixed_pages * index;
  if (index == 0) return keys.first; /* spares the divisions where there is one split */
  if (index == num_splits) return keys.first + keys.count;
  if (tile->fixed_pages == 0)
    page = (CLA_INT64)cla_pages_of(keys.count, page_size) * index / num_splits;
  return (int)(keys.first + page * page_size);
}

/* What remains of a tile that was planned for `planned->query_len` tokens of a request that has
   `query_len`, the first one in row `first_row`. In a tile without tokens `behind` is below 1; its
   rows stay what they were, since its item reads them. */
static inline ClaSplit cla_narrow_tile(const ClaSplit* planned, int first_row, int query_len) {
  ClaSplit tile = *planned;
  const int before = planned->query_len - planned->behind; /* of the request's, the tile's first */
  tile.query_len = query_len;
  tile.behind = query_len - before;
  if (tile.behind < 1) return tile;
  tile.q_row = first_row + before;
  if (tile.behind < tile.q_count) tile.q_count = tile.behind;
  return tile;
}

/* What the items of a tile follow from. */
typedef struct ClaCut {
  int q_pos;
  int num_splits; /* 0: the tile has no tokens */
  ClaTileKeys keys;
} ClaCut;

/* For a request of `length` tokens; 0: one that is left out, which sees no key. `widest`: what rows
   of the request see at most, if the tile's are listed; its lengths are not looked at. */
static inline ClaCut cla_cut_tile(const ClaSplit* tile, const ClaSight* sight,
                                  ClaRequestRows widest, int length) {
  ClaCut cut = {0, 0, {0, 0}};
  if (tile->behind < 1) return cut;
  if (length > 0) cut.q_pos = length - tile->behind;
  if (tile->listed == 0) {
    cut.keys = cla_tile_keys(sight, cut.q_pos, tile->q_count, length);
  } else {
    const ClaSpan none = {0, 0};
    widest.query_len = tile->query_len;
    widest.seq_len = length;
    if (widest.tree_nodes > length) widest.tree_nodes = length;
    if (length > 0)
      cut.keys = cla_listed_tile_keys(sight, &widest, none, none, cut.q_pos, tile->q_count);
    cut.q_pos = CLA_LISTED + tile->listed;
  }
  cut.num_splits = cla_num_splits(tile, cla_pages_of(cut.keys.count, sight->page_size));
  return cut;
}

/* The item of a split. One that is not needed, because the tile has fewer, gets no keys and a
   partial row that nobody merges. */
static inline ClaWorkItem cla_item_of(const ClaSplit* split, int q_pos, ClaTileKeys keys,
                                      int page_size, int num_splits) {
  const int used = split->split < num_splits;
  const int partial = num_splits > 1 || !used;
  ClaWorkItem item;
  item.q_row = split->q_row;
  item.q_count = split->q_count;
  item.q_pos = q_pos;
  item.kv_begin = used ? cla_split_begin(split, keys, page_size, num_splits, split->split) : 0;
  item.kv_end = used ? cla_split_begin(split, keys, page_size, num_splits, split->split + 1) : 0;
  item.pages_at = split->pages_at;
  item.partial_row = partial ? split->first_row + split->split * split->q_count : -1;
  item.split = (unsigned short)split->split;
  item.num_splits =
      (unsigned short)(used && num_splits > 1 && split->merge_at < 0 ? num_splits : 0);
  return item;
}

/* What merges the splits of the tile's query token `token`; num_splits is 0 if it is not split. In
   a tile that was narrowed, tokens that it lost are not. */
static inline ClaMergeItem cla_merge_of(const ClaSplit* tile, int token, int num_splits) {
  ClaMergeItem merge;
  merge.out_row = tile->q_row + token;
  merge.partial_row = tile->first_row + token;
  merge.num_splits = num_splits > 1 && token < tile->q_count ? num_splits : 0;
  merge.split_stride = tile->q_count;
  return merge;
}

#endif
