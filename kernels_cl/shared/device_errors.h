/* What kernels note about metadata that only the device knows: one word, raised by atomic_max. Its
   low bits are the reason, above them stands the row, so that the lowest row wins. Plain C: C++ and
   OpenCL C include it. */
#ifndef CLATTN_SHARED_DEVICE_ERRORS_H
#define CLATTN_SHARED_DEVICE_ERRORS_H

#define CLA_ERROR_BITS 4
#define CLA_ERROR_ROWS 0x7ffffff /* rows that the word can name: fewer */

/* Of advance_step: */
#define CLA_ERROR_LENGTH 0  /* no token follows this seq_len */
#define CLA_ERROR_TABLE 1   /* its block table is too short */
#define CLA_ERROR_BLOCK 2   /* which names a block outside the cache */
#define CLA_ERROR_INDICES 3 /* the page lists are full */
/* Of update_seq_lens: */
#define CLA_ERROR_SHORT 4 /* the seq_len is less than the request's query tokens */
#define CLA_ERROR_LONG 5  /* or more than its bound */
/* Of update_query_lens: */
#define CLA_ERROR_QUERIES 6 /* the request's rows are not among those that it may have */
#define CLA_ERROR_TOKENS 7  /* the seq_len is less than its query tokens, or more than its bound */
/* Of update_lists: */
#define CLA_ERROR_DIRECTION 8    /* the request's direction is none */
#define CLA_ERROR_TREE 9         /* its tree has a size that it may not have */
#define CLA_ERROR_BITS_OF_ROW 10 /* the bits of a row are not those of its node */
/* Of prepare_qkv: */
#define CLA_ERROR_POSITION 11 /* the token's position is outside the table */
#define CLA_ERROR_REASONS 12

#endif
