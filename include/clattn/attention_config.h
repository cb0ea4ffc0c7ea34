#ifndef CLATTN_ATTENTION_CONFIG_H
#define CLATTN_ATTENTION_CONFIG_H

/* The types in C of the fields of attention_config.inc. Each takes 8 bytes, so that no struct that
   ends in them ends in padding. 0 and NULL are the default of a field. */

#include <stdint.h>

/** In ClattnLayerConfig the number 0, for fields whose default is another one (block_size). */
#define CLATTN_ZERO INT64_MIN

#define CLATTN_C_Count int64_t              /**< a number of things */
#define CLATTN_C_Flag int64_t               /**< other than 0: yes */
#define CLATTN_C_Float double               /**< a number */
#define CLATTN_C_OptionalFloat double       /**< 0 = "auto" */
#define CLATTN_C_PerHead const float*       /**< [num_heads] or NULL */
#define CLATTN_C_Type const char*           /**< as clattn::to_string(DType) */
#define CLATTN_C_OptionalFormat const char* /**< as clattn::to_string(CacheFormat), or "auto" */
#define CLATTN_C_Attends const char*        /**< as clattn::to_string(AttentionType) */
#define CLATTN_C_Family const char*         /**< as clattn::to_string(KernelFamily) */
#define CLATTN_C_Rule const char*           /**< as clattn::to_string(SpanRule) */

#endif
