#ifndef CLATTN_TESTS_SNIPPETS_PRELUDE_H
#define CLATTN_TESTS_SNIPPETS_PRELUDE_H

/* What fragments of C in the documents may use (tests/snippets.sh). */
#include <clattn/clattn.h>
#include <stdio.h>

extern ClattnContext* context;
extern ClattnQueue* queue;
extern ClattnLayer* layer;
extern ClattnCache* cache;
extern ClattnStep* step;
extern ClattnSession* session;
extern ClattnBatchInfo batch;
extern ClattnTensors tensors;
extern int64_t num_blocks;
extern const int32_t* prompt;
extern size_t prompt_length;
extern int32_t sampled;

#endif
