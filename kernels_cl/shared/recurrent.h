/* What the kernels of recurrent layers take by value (kernels_cl/recurrent/). Offsets and strides
   in elements. Plain C: C++ and OpenCL C include it. */
#ifndef CLATTN_SHARED_RECURRENT_H
#define CLATTN_SHARED_RECURRENT_H

#include "shared/rows.h"

/* The lists of a step: where each begins in its buffer, and what numbers they may hold. */
typedef struct ClaRecurrentLists {
  CLA_LONG starts_at;
  CLA_LONG indices_at;
  CLA_LONG initial_at;  /* negative: all requests have an initial state */
  CLA_LONG accepted_at; /* negative: no request has drafts */
  CLA_LONG num_blocks;  /* indices outside 0 ... num_blocks - 1 name no page */
  CLA_LONG num_tokens;  /* rows of the tensors */
  int num_reqs;
  int columns;
  int null_block; /* names no page either; negative: there is none */
  int reserved;
} ClaRecurrentLists;

typedef struct ClaDeltaRule {
  ClaRecurrentLists lists;
  ClaRows query;
  ClaRows key;
  ClaRows value;
  ClaRows out;
  ClaRows decay; /* g, a or dt */
  ClaRows beta;  /* beta or b */
  ClaRows z;
  CLA_LONG state_offset;
  CLA_LONG state_stride; /* from page to page */
  float scale;
  float lower_bound;
  float dt_min, dt_max;
  int num_v_heads;
  int heads_per_key;         /* value heads of a key head */
  int min_tokens;            /* requests with fewer or more tokens are left to another launch, */
  int max_tokens;            /* which also takes those with drafts if this is the one of chunks */
  int first_head, num_heads; /* value heads of a launch on matrix units */
} ClaDeltaRule;

typedef struct ClaCausalConv {
  ClaRecurrentLists lists;
  ClaRows x;
  ClaRows out;
  ClaRows in_gate;  /* multiplies x */
  ClaRows out_gate; /* multiplies the result */
  CLA_LONG state_offset;
  CLA_LONG state_stride; /* from page to page */
  int channels;
  int state_rows;
  int channel_groups; /* groups that share the channels of some tokens */
  int reserved;
} ClaCausalConv;

typedef struct ClaGatedNorm {
  ClaRows x;
  ClaRows z;
  ClaRows out;
  CLA_LONG num_rows; /* tokens * rows_per_token */
  float eps;
  int rows_per_token;
  int width;
  int reserved;
} ClaGatedNorm;

/* Copies of states from page to page. Units of the copy. */
typedef struct ClaStateCopy {
  ClaRecurrentLists lists;
  CLA_LONG targets_at; /* as in lists */
  CLA_LONG conv_offset;
  CLA_LONG conv_stride;
  CLA_LONG state_offset;
  CLA_LONG state_stride;
  CLA_LONG row_units;   /* of a row of the convolution's state */
  CLA_LONG state_units; /* of the other state */
  int conv_rows;
  int num_splits; /* groups that share a request */
} ClaStateCopy;

#endif
