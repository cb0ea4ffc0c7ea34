/* Everything that a write of a step's keys and values takes besides memory, passed by value like
   ClaCall (shared/call.h); drivers that damage structs are refused. Wide members come first,
   without padding. Elements are those of the tensor that a member belongs to. */
#ifndef CLATTN_SHARED_WRITE_CALL_H
#define CLATTN_SHARED_WRITE_CALL_H

#include "shared/call.h"

typedef struct ClaWriteCall {
  CLA_LONG key_offset; /* of the first token */
  CLA_LONG key_token_stride;
  CLA_LONG value_offset;
  CLA_LONG value_token_stride;
  CLA_LONG k_offset; /* of page 0 */
  CLA_LONG v_offset;
  CLA_LONG block_stride; /* from page to page; x-packed caches have none of these three strides */
  CLA_LONG token_stride; /* from token to token of a page */
  CLA_LONG head_stride;  /* from KV head to KV head */
  CLA_LONG slots_at;     /* longs */
  CLA_LONG num_slots;    /* pages * PAGE_SIZE; slots outside 0 ... num_slots - 1 are padding */
  int num_tokens;
  int num_kv_heads;
  int scale_stride; /* of kv_scales from KV head to KV head; -1: there are none */
  int unused;
} ClaWriteCall;

#endif
