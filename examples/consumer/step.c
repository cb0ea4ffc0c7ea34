/* One decode step by the C API, in C99: two requests over a paged cache of 4 pages. Prints the bits
   of the output, a hexadecimal number for each element; step.cpp prints the same. */
#include <clattn/clattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 2, kHeads = 8, kKVHeads = 2, kHeadSize = 64 };
enum { kQueryElements = kTokens * kHeads * kHeadSize };
enum { kKeyElements = kTokens * kKVHeads * kHeadSize };

static void check(ClattnResult status) {
  if (status == CLATTN_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", clattn_result_name(status), clattn_last_error());
  exit(1);
}

/* A device buffer of numbers in [-0.5, 0.5), of which each has a seed of its own. */
static ClattnBuffer* upload(const ClattnContext* context, const ClattnQueue* queue, uint32_t seed,
                            size_t count) {
  float values[kQueryElements];
  ClattnBuffer* buffer;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t random = (seed + (uint32_t)i) * 2654435761u;
    values[i] = (float)(random >> 8) / 16777216.0f - 0.5f;
  }
  check(clattn_buffer_create(context, count * sizeof(float), &buffer));
  check(clattn_buffer_write(buffer, queue, 0, values, count * sizeof(float)));
  return buffer;
}

int main(void) {
  ClattnContext* context;
  ClattnQueue* queue;
  ClattnLayer* layer;
  ClattnCache* cache;
  ClattnStep* step;
  /* Once. */
  ClattnLayerConfig config = {.struct_size = sizeof config, .num_heads = kHeads};
  config.num_kv_heads = kKVHeads;
  config.head_size = kHeadSize;
  config.dtype = "f32";
  check(clattn_context_create(NULL, &context));
  check(clattn_queue_create(context, 0, &queue));
  check(clattn_layer_create(context, NULL, &config, &layer));
  check(clattn_cache_create(layer, queue, 4, NULL, &cache));
  check(clattn_layer_bind_cache(layer, cache));
  check(clattn_step_create(layer, NULL, &step));

  /* Every step. */
  const int32_t starts[] = {0, 1, 2}, seq_lens[] = {1, 20}, pages[] = {3, 0, 1, 0};
  ClattnBatchInfo batch = {.struct_size = sizeof batch, .num_reqs = 2};
  batch.query_start_loc = starts;
  batch.seq_lens = seq_lens;
  batch.block_table = pages;
  batch.block_table_stride = 2;
  check(clattn_step_build(step, queue, &batch));

  /* Every layer. */
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  ClattnBuffer* query = upload(context, queue, 0, kQueryElements);
  ClattnBuffer* key = upload(context, queue, 10000, kKeyElements);
  ClattnBuffer* value = upload(context, queue, 20000, kKeyElements);
  ClattnBuffer* output = upload(context, queue, 30000, kQueryElements);
  tensors.query.buffer = query;
  tensors.key.buffer = key;
  tensors.value.buffer = value;
  tensors.output.buffer = output;
  check(clattn_layer_forward(layer, queue, &tensors, step));

  uint32_t bits[kQueryElements];
  check(clattn_buffer_read(output, queue, 0, bits, sizeof bits));
  for (size_t i = 0; i < kQueryElements; ++i) printf("%08lx\n", (unsigned long)bits[i]);

  clattn_buffer_destroy(query);
  clattn_buffer_destroy(key);
  clattn_buffer_destroy(value);
  clattn_buffer_destroy(output);
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  clattn_queue_destroy(queue);
  clattn_context_destroy(context);
  return 0;
}
