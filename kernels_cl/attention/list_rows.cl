/* Lists what the rows of a step see (ClaListedRow) where only the device knows the requests'
   lengths, directions or trees. The host planned for the widest that the rows may see and left a
   ClaRowSource for each listed row and each ClaListedItem; here each becomes what follows from the
   lengths that the metadata holds and from what is given, or was given before:

     position = length - query tokens + the row's number
     row      = cla_seen_by_row() of it (shared/sight.h)
     item     = the ends of its first and last row; of a tree what its rows may have at most
     bits     = of a tree: those given, without the nodes that the window or chunk hides. A path has
                a node for each position, so these are the lowest bits.

   What is given is kept in the metadata. A direction that is none, and a tree that a request cannot
   have, are noted in `errors`; the request's rows see nothing. A row of a tree without the bit of
   its own node, or with bits of later ones, is noted, too; it counts with that bit, without those.

   macro         unit        legal values
   CLA_WG_SIZE   work-items  >= 1

   Launch: ceil(max(num_listed, num_requests) / CLA_WG_SIZE) groups. */
#include "core/device_errors.clh"
#include "shared/sight.h"

#if !defined(CLA_WG_SIZE)
#error "list_rows.cl needs CLA_WG_SIZE"
#endif

/* Why the rows of a request, whose tree may have `most_nodes`, see nothing; -1: nothing is wrong.
 */
static inline int cla_fault_of(ClaRequestRows rows, int most_nodes) {
  if (rows.direction < CLA_BOTH_WAYS || rows.direction > CLA_CANVAS) return CLA_ERROR_DIRECTION;
  if (rows.tree_nodes == 0) return -1;
  if (rows.tree_nodes < rows.query_len || rows.tree_nodes > most_nodes ||
      rows.tree_nodes > rows.seq_len || max(rows.first_key, rows.kept_end) > cla_tree_begin(&rows))
    return CLA_ERROR_TREE;
  return -1;
}

/* Keeps a row's bits, as they are given or were, and returns how many of them are those of other
   nodes. Wrong ones are noted. */
static inline int cla_keep_bits(__global const uint* given, __global uint* kept, int node,
                                int words, __global int* errors, int request) {
  int depth = -1, wrong = 0;
  for (int word = 0; word < words; ++word) {
    const int own = node - 32 * word; /* its place, if it is in this word */
    const uint self = own >= 0 && own < 32 ? 1u << own : 0u;
    const uint below = own >= 32 ? ~0u : own <= 0 ? 0u : self - 1;
    const uint legal = (given[word] & below) | self;
    wrong |= given[word] != legal;
    kept[word] = legal;
    depth += (int)popcount(legal);
  }
  if (wrong) cla_note(errors, (uint)request, CLA_ERROR_BITS_OF_ROW);
  return depth;
}

/* Writes which nodes a row sees: those that were kept, without the `hidden` lowest ones. */
static inline void cla_put_gaps(__global ClaGapRow* gaps, ClaGapRow row, __global const uint* kept,
                                int words, CLA_INT64 hidden) {
  __global uint* bits = (__global uint*)(gaps + 1);
  *gaps = row;
  for (int word = 0; word < row.words; ++word) {
    uint seen = word < words ? kept[word] : 0u;
    for (; hidden > 0 && seen != 0; --hidden) seen &= seen - 1;
    bits[word] = seen;
  }
}

/* The row at a position; `given`: its bits, if the request has a tree, which `kept` is to hold. */
static inline ClaListedRow cla_list_row(const ClaSight* sight, const ClaRequestRows* rows,
                                        const ClaRowSource* source, int position, int most_nodes,
                                        __global int* meta, __global const uint* given,
                                        __global uint* kept, __global int* errors) {
  const int has_tree = rows->tree_nodes > 0, words = (rows->tree_nodes + 31) / 32;
  const int tree_begin = cla_tree_begin(rows);
  int depth = 0;
  ClaListedRow row;
  if (has_tree)
    depth = cla_keep_bits(given, kept, position - tree_begin, words, errors, source->request);
  row = cla_seen_by_row(sight, rows, source->span, depth, position);
  if (has_tree || rows->kept_end > 0) {
    const CLA_INT64 first_seen = cla_window_begin(sight, row.position, row.position);
    const ClaGapRow gaps = {row.begin, rows->kept_end, has_tree ? tree_begin : rows->seq_len,
                            (most_nodes + 31) / 32};
    cla_put_gaps((__global ClaGapRow*)(meta + source->gaps_at), gaps, kept, words,
                 first_seen - tree_begin);
    row.gaps_at = source->gaps_at;
    /* Begins may not fall, and those of nodes may. */
    row.begin = rows->kept_end > 0 ? rows->first_key
                                   : cla_seen_by_row(sight, rows, source->span, 0, position).begin;
  }
  return row;
}

/* What is known of a request by now. */
static inline ClaRequestRows cla_rows_of(__global const int* meta,
                                         __global const ClaListedRequest* requests, int lens_at,
                                         int starts_at, int request,
                                         __global const uchar* direction,
                                         __global const int* tree_sizes) {
  ClaRequestRows rows = requests[request].widest;
  rows.seq_len = meta[lens_at + request];
  rows.query_len = meta[starts_at + request + 1] - meta[starts_at + request];
  rows.direction = direction != 0 ? direction[request] : requests[request].direction;
  rows.tree_nodes = tree_sizes != 0 ? tree_sizes[request] : requests[request].tree_nodes;
  return rows;
}

__kernel __attribute__((reqd_work_group_size(CLA_WG_SIZE, 1, 1))) void clattn_list_rows(
    __global int* restrict meta,              /* the step's metadata */
    int listed_at,                            /* ClaListedRow, counted in rows: the first one */
    int sources_at,                           /* ints of meta: ClaRowSource [num_listed] */
    int num_listed,                           /* padding included */
    int requests_at,                          /* ints of it: ClaListedRequest [num_requests] */
    int lens_at,                              /* ints of it: lengths [num_requests] */
    int starts_at,                            /* ints of it: first rows [num_requests + 1] */
    int num_requests,                         /* padding included */
    int tree_bits_at,                         /* ints of it: uint [query tokens, tree_words] */
    int tree_words,                           /* of a row; 0: no trees */
    int page_size,                            /* tokens; this and the next six: ClaSight */
    int causal,                               /* not looked at: directions say it */
    int window_left,                          /* tokens, -1 = all */
    int window_right,                         /* tokens, -1 = all */
    int chunk,                                /* tokens, 0 = none */
    int chunk_lookback,                       /* chunks */
    int span_rule,                            /* CLA_SPAN_* */
    __global const uchar* restrict direction, /* [num_requests], or null: as before */
    __global const int* restrict tree_sizes,  /* [num_requests], or null: as before */
    __global const uint* restrict tree_bits,  /* [query tokens, bits_stride]; with tree_sizes */
    long bits_stride,                         /* words */
    __global int* restrict errors) {          /* [1] */
  const int number = (int)get_global_id(0);
  const ClaSight sight = {page_size, causal,         window_left, window_right,
                          chunk,     chunk_lookback, span_rule};
  __global ClaListedRequest* requests = (__global ClaListedRequest*)(meta + requests_at);
  __global const ClaRowSource* sources = (__global const ClaRowSource*)(meta + sources_at);
  if (number < num_requests) {
    const ClaRequestRows rows =
        cla_rows_of(meta, requests, lens_at, starts_at, number, direction, tree_sizes);
    const int fault = rows.query_len > 0 && rows.seq_len > 0
                          ? cla_fault_of(rows, requests[number].widest.tree_nodes)
                          : -1;
    if (fault >= 0) cla_note(errors, (uint)number, fault);
    if (direction != 0) requests[number].direction = rows.direction;
    if (tree_sizes != 0) requests[number].tree_nodes = rows.tree_nodes;
  }
  if (number >= num_listed) return;
  const ClaRowSource source = sources[number];
  if (source.request < 0) return; /* padding of a recorded step */
  ClaRequestRows rows =
      cla_rows_of(meta, requests, lens_at, starts_at, source.request, direction, tree_sizes);
  __global ClaListedRow* listed = (__global ClaListedRow*)meta + listed_at + number;
  const int most_nodes = requests[source.request].widest.tree_nodes;
  if (rows.seq_len == 0 || source.token >= rows.query_len || cla_fault_of(rows, most_nodes) >= 0) {
    const ClaListedRow nothing = {0, 0, 0, 0};
    *listed = nothing;
    return;
  }
  if (rows.tree_nodes == 1) rows.tree_nodes = 0; /* sees what a chain would */
  const int position = rows.seq_len - rows.query_len + source.token;
  if (source.count > 0) {
    const int count = min(source.count, rows.query_len - source.token);
    ClaListedItem item = cla_item_behind_gap(&sight, &rows, sources[number + 1].span,
                                             sources[number + count].span, position, count);
    if (rows.kept_end > 0) item.begin = rows.first_key;
    *(__global ClaListedItem*)listed = item;
    return;
  }
  const long row = meta[starts_at + source.request] + source.token; /* of the batch */
  __global uint* kept = (__global uint*)(meta + tree_bits_at) + row * tree_words;
  __global const uint* given = tree_sizes != 0 ? tree_bits + row * bits_stride : kept;
  *listed = cla_list_row(&sight, &rows, &source, position, most_nodes, meta, given, kept, errors);
}
