/* Where the rows of a tensor lie. Plain C: C++ and OpenCL C include it. */
#ifndef CLATTN_SHARED_ROWS_H
#define CLATTN_SHARED_ROWS_H

#include "shared/call.h"

/* Row t begins at element offset + t * stride. */
typedef struct ClaRows {
  CLA_LONG offset;
  CLA_LONG stride;
} ClaRows;

#endif
