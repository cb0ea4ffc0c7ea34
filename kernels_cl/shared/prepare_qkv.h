/* What kernels_cl/cache/prepare_qkv.cl takes by value. Offsets and strides in elements of the
   tensor that a member belongs to. Plain C: C++ and OpenCL C include it. */
#ifndef CLATTN_SHARED_PREPARE_QKV_H
#define CLATTN_SHARED_PREPARE_QKV_H

#include "shared/rows.h"

/* ClaPrepareQKV::norm, with the rounding of normed elements to the tensors' type or without. */
#define CLA_NORM_ROUNDED 1
#define CLA_NORM_EXACT 2
/* ClaPrepareQKV::sections: which of three positions an angle is of. */
#define CLA_SECTIONS_IN_TURN 1   /* height, width, height, width ... after the first of three */
#define CLA_SECTIONS_IN_BLOCKS 2 /* time, then height, then width */

typedef struct ClaPrepareQKV {
  ClaRows query; /* with a gate each head's query is followed by its gate */
  ClaRows key;
  ClaRows value;
  ClaRows query_out;
  ClaRows key_out;
  ClaRows gate_out;
  CLA_LONG positions_at; /* of the first of three rows where there are sections */
  CLA_LONG positions_stride;
  CLA_LONG max_position; /* rows of the table */
  CLA_LONG k_offset;     /* of page 0 */
  CLA_LONG v_offset;
  CLA_LONG block_stride; /* from page to page */
  CLA_LONG token_stride; /* from token to token of a page */
  CLA_LONG head_stride;  /* from KV head to KV head */
  CLA_LONG slots_at;
  CLA_LONG cache_slots; /* pages * block_size; other slots are padding */
  int slot_tokens;      /* tokens behind these have no slot; 0: nothing is stored */
  int block_size;
  int num_heads;       /* of queries; 0: there are none */
  int num_kv_heads;    /* of keys; 0: there are none */
  int num_rows;        /* heads that a token's groups serve: queries, keys and, if stored, values */
  int rows_of_group;   /* a group's share of them */
  int groups_of_token; /* groups that share a token */
  int has_key_out;
  int has_gate;
  int norm;           /* 0 none, else CLA_NORM_ */
  int weight_dtype;   /* core/types.clh */
  int has_q_weight;   /* 0: the weight is 1 */
  int has_k_weight;   /* the same */
  float weight_beta;  /* is added to weights */
  float eps;          /* of the norm */
  int rotary_dim;     /* 0: nothing is rotated */
  int rotary_at;      /* first rotated element of a head */
  int interleaved;    /* pairs are elements (2i, 2i + 1), else (i, i + rotary_dim / 2) */
  int table_dtype;    /* core/types.clh */
  int wide_positions; /* int64, else int32 */
  int sections;       /* 0: one position a token, else CLA_SECTIONS_ */
  int section_time;   /* angles of each position */
  int section_height;
  int section_width;
  int has_errors;
  int scale_stride; /* core/options.clh */
} ClaPrepareQKV;

#endif
