/* Where the scales of tokens and heads lie, in f32 elements; passed by value like ClaCall
   (shared/call.h). K's of (page, token, KV head) at k_at + page * block_stride + token *
   token_stride + head * head_stride, V's the same from v_at. */
#ifndef CLATTN_SHARED_ROW_SCALES_H
#define CLATTN_SHARED_ROW_SCALES_H

#ifdef __cplusplus
typedef cl_long ClaRowPlace;
#elif CLA_ROW_SCALES
typedef long ClaRowPlace;
#endif

#if defined(__cplusplus) || CLA_ROW_SCALES
typedef struct ClaRowScales {
  ClaRowPlace k_at;
  ClaRowPlace v_at;
  ClaRowPlace block_stride;
  ClaRowPlace token_stride;
  ClaRowPlace head_stride;
} ClaRowScales;
#endif

#endif
