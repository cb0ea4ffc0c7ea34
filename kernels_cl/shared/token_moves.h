/* What the kernel that moves tokens takes by value (cache/move_tokens.cl). Plain C: C++ and OpenCL
   C include it. */
#ifndef CLATTN_SHARED_TOKEN_MOVES_H
#define CLATTN_SHARED_TOKEN_MOVES_H

#include "shared/call.h"

#define CLA_MAX_PLANES 16 /* of one launch: the keys or the values of a layer each */

/* Where tokens lie, in units of the copy. */
typedef struct ClaTokenMoves {
  CLA_LONG offsets[CLA_MAX_PLANES]; /* of the planes in their buffers */
  CLA_LONG num_slots;               /* slots outside 0 ... num_slots - 1 are passed over */
  CLA_LONG block_stride;
  CLA_LONG token_stride;
  CLA_LONG head_stride;
  int block_size; /* tokens */
  int row_units;  /* of a head */
  int num_units;  /* of a token */
  int num_pairs;  /* that the lists of slots have room for */
  int num_requests;
  int num_splits; /* groups that share a request of a plane */
} ClaTokenMoves;

#endif
