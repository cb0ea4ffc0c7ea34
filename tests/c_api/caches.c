/* KV caches and the operations on them. */
#include "expect.h"

enum { kPageBytes = 2 * 16 * 2 * 64 * 4, kPages = 4 };

static void test_cache_handles(const Fixture* fixture) {
  ClattnCache* cache = NULL;
  ClattnCacheInfo info = {.struct_size = sizeof info},
                  adopted_info = {.struct_size = sizeof adopted_info};
  ClattnBuffer *memory = NULL, *odd = NULL;
  ClattnLayer* layer = fixture->layer;
  EXPECT_OK(clattn_cache_info(fixture->cache, &info));
  EXPECT(info.num_blocks == kPages && info.block_size == 16 && info.num_kv_heads == 2);
  EXPECT(info.head_size == 64 && strcmp(info.dtype, "f32") == 0 && info.buffer != NULL);
  EXPECT(info.page_size_bytes == kPageBytes);
  EXPECT(info.shape[0] * info.shape[1] * info.shape[2] * info.shape[3] * info.shape[4] ==
         kPages * kPageBytes / 4);

  EXPECT_OK(clattn_buffer_create(fixture->context, kPages * kPageBytes, &memory));
  EXPECT_OK(clattn_cache_adopt(layer, memory, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &adopted_info));
  EXPECT(adopted_info.num_blocks == kPages && adopted_info.token_stride == 2 * 64);
  EXPECT_INVALID(clattn_cache_info(NULL, &info), "cache is null");
  EXPECT_INVALID(clattn_cache_info(cache, NULL), "info is null");
  clattn_cache_destroy(cache);

  EXPECT_INVALID(clattn_cache_adopt(NULL, memory, NULL, &cache), "layer is null");
  EXPECT_INVALID(clattn_cache_adopt(layer, NULL, NULL, &cache), "buffer is null");
  EXPECT_INVALID(clattn_cache_adopt(layer, memory, "NHDX", &cache), "NHDX");
  EXPECT_INVALID(clattn_cache_adopt(layer, memory, NULL, NULL), "cache is null");
  EXPECT_OK(clattn_buffer_create(fixture->context, kPageBytes + 8, &odd));
  EXPECT_INVALID(clattn_cache_adopt(layer, odd, NULL, &cache), "page");
  clattn_buffer_destroy(odd);
  clattn_buffer_destroy(memory);

  EXPECT_INVALID(clattn_cache_create(NULL, fixture->queue, 1, NULL, &cache), "layer is null");
  EXPECT_INVALID(clattn_cache_create(layer, NULL, 1, NULL, &cache), "queue is null");
  EXPECT_INVALID(clattn_cache_create(layer, fixture->queue, 0, NULL, &cache), "num_blocks is 0");
  EXPECT_INVALID(clattn_cache_create(layer, fixture->queue, 1, "DNH", &cache), "DNH");
  EXPECT_INVALID(clattn_cache_create(layer, fixture->queue, 1, NULL, NULL), "cache is null");
  EXPECT_INVALID(clattn_layer_bind_cache(NULL, fixture->cache), "layer is null");
  EXPECT_INVALID(clattn_layer_bind_cache(layer, NULL), "cache is null");
  clattn_cache_destroy(NULL);
}

/* Of strides that are legal in `memory`; some others are refused by the call that uses them. */
static void expect_strides_refused(const Fixture* fixture, ClattnLayer* layer,
                                   const ClattnBuffer* memory, ClattnCacheStrides at,
                                   const ClattnTensors* tensors, const ClattnStep* step) {
  ClattnCache* cache = NULL;
  EXPECT_INVALID(clattn_cache_adopt_strided(NULL, memory, &at, &cache), "layer is null");
  EXPECT_INVALID(clattn_cache_adopt_strided(layer, NULL, &at, &cache), "buffer is null");
  EXPECT_INVALID(clattn_cache_adopt_strided(layer, memory, NULL, &cache), "strides is null");
  EXPECT_INVALID(clattn_cache_adopt_strided(layer, memory, &at, NULL), "cache is null");
  at.v_offset = -8;
  EXPECT_INVALID(clattn_cache_adopt_strided(layer, memory, &at, &cache), "an offset is -8");
  at.v_offset = 8;
  at.num_blocks = 100;
  EXPECT_OK(clattn_cache_adopt_strided(layer, memory, &at, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, tensors, step), "its last element");
  clattn_cache_destroy(cache);
  at.num_blocks = kPages;
  at.v_offset = 4;
  EXPECT_OK(clattn_cache_adopt_strided(layer, memory, &at, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, tensors, step),
                 "is 4, legal: multiples of 8");
  clattn_cache_destroy(cache);
}

/* Pages of 16 tokens x 2 heads of 64, V in front of K, heads outside tokens, gaps between pages:
   the bits of an ordinary cache with the same keys and values. */
static void test_strided_cache(const Fixture* fixture) {
  static float ordinary[kPages * kPageBytes / 4], strided[3 * kPages * kPageBytes / 4];
  ClattnCacheStrides at = {.struct_size = sizeof at,
                           .num_blocks = kPages,
                           .k_offset = kPages * kPageBytes / 2,
                           .v_offset = 8,
                           .block_stride = 2 * 16 * 64 + 64,
                           .token_stride = 64,
                           .head_stride = 16 * 64};
  ClattnCacheInfo info = {.struct_size = sizeof info};
  const ClattnBatchInfo batch = decode_batch();
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* caches[2] = {NULL, NULL};
  ClattnBuffer *memory[2], *query, *output;
  ClattnStep* step = NULL;
  float results[2][2 * 8 * 64];
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  for (int i = 0; i < kPages * kPageBytes / 4; ++i) ordinary[i] = (float)(i * 37 % 101) / 50 - 1;
  memory[0] = buffer_with(fixture, ordinary, sizeof ordinary);
  EXPECT_OK(clattn_cache_adopt(layer, memory[0], "NHD", &caches[0]));
  EXPECT_OK(clattn_cache_info(caches[0], &info));
  for (int i = 0; i < kPages * 16 * 2 * 64; ++i) {
    const int64_t block = i / 2048, token = i / 128 % 16, head = i / 64 % 2, dim = i % 64;
    const int64_t from =
        block * info.block_stride + token * info.token_stride + head * info.head_stride + dim;
    const int64_t to =
        block * at.block_stride + token * at.token_stride + head * at.head_stride + dim;
    strided[at.k_offset + to] = ordinary[info.k_offset + from];
    strided[at.v_offset + to] = ordinary[info.v_offset + from];
  }
  memory[1] = buffer_with(fixture, strided, sizeof strided);
  EXPECT_OK(clattn_cache_adopt_strided(layer, memory[1], &at, &caches[1]));
  EXPECT_OK(clattn_cache_info(caches[1], &info));
  EXPECT(info.v_offset == 8 && info.head_stride == 16 * 64 && info.shape[1] == kPages);
  EXPECT(info.strides[0] == 8 - at.k_offset && info.strides[3] == 16 * 64);

  query = buffer_with(fixture, ordinary, sizeof results[0]);
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof results[0], &output));
  tensors.query.buffer = query;
  tensors.output.buffer = output;
  EXPECT_OK(clattn_step_create(layer, NULL, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  for (int i = 0; i < 2; ++i) {
    EXPECT_OK(clattn_layer_bind_cache(layer, caches[i]));
    EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
    EXPECT_OK(clattn_buffer_read(output, fixture->queue, 0, results[i], sizeof results[i]));
  }
  EXPECT(memcmp(results[0], results[1], sizeof results[0]) == 0);
  EXPECT(results[0][0] != 0);

  expect_strides_refused(fixture, layer, memory[1], at, &tensors, step);
  clattn_step_destroy(step);
  clattn_layer_destroy(layer);
  for (int i = 0; i < 2; ++i) {
    clattn_cache_destroy(caches[i]);
    clattn_buffer_destroy(memory[i]);
  }
  clattn_buffer_destroy(query);
  clattn_buffer_destroy(output);
}

/* Writes one token to block 1 and copies the block to block 3. */
static void test_write_and_copy(const Fixture* fixture) {
  ClattnCache* cache = NULL;
  ClattnBuffer *memory = NULL, *slots = NULL;
  const ClattnCache *caches[1], *none[] = {NULL};
  const int64_t slot = 16 + 5, pairs[] = {1, 3}, wrong[] = {1, 4};
  float row[128], stored[128];
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnCacheWrite write = {.struct_size = sizeof write};
  for (int i = 0; i < 128; ++i) row[i] = (float)i;
  EXPECT_OK(clattn_buffer_create(fixture->context, kPages * kPageBytes, &memory));
  EXPECT_OK(clattn_cache_adopt(fixture->layer, memory, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof slot, &slots));
  EXPECT_OK(clattn_buffer_write(slots, fixture->queue, 0, &slot, sizeof slot));
  EXPECT_OK(clattn_buffer_write(fixture->buffer, fixture->queue, 0, row, sizeof row));
  write.dtype = "f32";
  write.key.buffer = fixture->buffer;
  write.value.buffer = fixture->buffer;
  write.slot_mapping = slots;
  write.num_tokens = 1;
  EXPECT_OK(clattn_event_create(&write.event));
  EXPECT_OK(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write));
  caches[0] = cache;
  EXPECT_OK(clattn_copy_blocks(fixture->context, fixture->queue, caches, 1, pairs, 1, NULL));
  EXPECT_OK(clattn_event_wait(write.event));
  EXPECT_OK(clattn_buffer_read(
      memory, fixture->queue,
      4 * (size_t)(info.v_offset + 3 * info.block_stride + 5 * info.token_stride), stored,
      sizeof stored));
  EXPECT(memcmp(row, stored, sizeof row) == 0);

  EXPECT_INVALID(clattn_reshape_and_cache(NULL, fixture->queue, cache, &write), "context is null");
  EXPECT_INVALID(clattn_reshape_and_cache(fixture->context, NULL, cache, &write), "queue is null");
  EXPECT_INVALID(clattn_reshape_and_cache(fixture->context, fixture->queue, NULL, &write),
                 "cache is null");
  EXPECT_INVALID(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, NULL),
                 "write is null");
  write.num_tokens = 1000;
  EXPECT_INVALID(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write), "1000");
  clattn_event_destroy(write.event);
  EXPECT_OK(clattn_copy_blocks(fixture->context, fixture->queue, NULL, 0, NULL, 0, NULL));
  EXPECT_INVALID(clattn_copy_blocks(NULL, fixture->queue, caches, 1, pairs, 1, NULL),
                 "context is null");
  EXPECT_INVALID(clattn_copy_blocks(fixture->context, NULL, caches, 1, pairs, 1, NULL),
                 "queue is null");
  EXPECT_INVALID(clattn_copy_blocks(fixture->context, fixture->queue, NULL, 1, pairs, 1, NULL),
                 "caches is null");
  EXPECT_INVALID(clattn_copy_blocks(fixture->context, fixture->queue, none, 1, pairs, 1, NULL),
                 "caches: an element is null");
  EXPECT_INVALID(clattn_copy_blocks(fixture->context, fixture->queue, caches, 1, NULL, 1, NULL),
                 "pairs is null");
  EXPECT_INVALID(clattn_copy_blocks(fixture->context, fixture->queue, caches, 1, wrong, 1, NULL),
                 "4");
  clattn_buffer_destroy(slots);
  clattn_buffer_destroy(memory);
  clattn_cache_destroy(cache);
}

/* int8 caches are refused without scales. */
static void test_scales_of_cache(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnStep* step = NULL;
  const ClattnBatchInfo batch = decode_batch();
  const float ones[] = {1, 1};
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = fixture->buffer;
  EXPECT_OK(clattn_buffer_create(fixture->context, 4096, (ClattnBuffer**)&tensors.output.buffer));
  config.kv_cache_dtype = "int8";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_OK(clattn_step_create(layer, NULL, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, &tensors, step), "int8");
  EXPECT_OK(clattn_buffer_write(fixture->buffer, fixture->queue, 0, ones, sizeof ones));
  EXPECT_OK(clattn_cache_set_scales(cache, fixture->buffer, 0));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
  EXPECT_OK(clattn_queue_finish(fixture->queue));
  EXPECT_OK(clattn_cache_set_scales(cache, NULL, 0));
  EXPECT_INVALID(clattn_cache_set_scales(fixture->cache, fixture->buffer, 0),
                 "scales: given, legal for a cache of f32: NULL");
  EXPECT_OK(clattn_cache_set_scales(fixture->cache, NULL, 0));
  EXPECT_INVALID(clattn_cache_set_scales(NULL, fixture->buffer, 0), "cache is null");
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  clattn_buffer_destroy((ClattnBuffer*)tensors.output.buffer);
}

/* Pages of 4 bits: two codes an element, and a scale and a zero for each token and head. */
static void test_cache_of_four_bits(const Fixture* fixture) {
  enum { kHead = 64, kTokens = 16, kHeads = 2 };
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnCacheWrite write = {.struct_size = sizeof write};
  ClattnBuffer *memory = NULL, *slots = NULL;
  const int64_t slot = 0;
  float row[kHeads * kHead];
  unsigned char bytes[2] = {0, 0};
  for (int i = 0; i < kHeads * kHead; ++i) row[i] = (float)(i % 16 - 2); /* scale 1, zero 2 */
  config.kv_cache_dtype = "int4_per_token_head";
  EXPECT_UNSUPPORTED(clattn_layer_create(fixture->context, NULL, &config, &layer),
                     "no kernel rotates queries");
  config.kv_cache_dtype = "uint4_per_token_head";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 1, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT(strcmp(info.dtype, "uint4x2") == 0 && info.shape[4] == kHead / 2);
  EXPECT(info.page_size_bytes == kTokens * kHeads * (kHead + 8));
  clattn_cache_destroy(cache);
  EXPECT_OK(clattn_buffer_create(fixture->context, info.page_size_bytes, &memory));
  EXPECT_OK(clattn_cache_adopt(layer, memory, "NHD", &cache));
  EXPECT_INVALID(clattn_cache_set_scales(cache, fixture->buffer, 0),
                 "scales: given, legal for a cache of uint4_per_token_head: none");
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof slot, &slots));
  EXPECT_OK(clattn_buffer_write(slots, fixture->queue, 0, &slot, sizeof slot));
  EXPECT_OK(clattn_buffer_write(fixture->buffer, fixture->queue, 0, row, sizeof row));
  write.dtype = "f32";
  write.key.buffer = write.value.buffer = fixture->buffer;
  write.slot_mapping = slots;
  write.num_tokens = 1;
  EXPECT_OK(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write));
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue, (size_t)info.v_offset, bytes, 2));
  EXPECT(bytes[0] == 0x10 && bytes[1] == 0x32);
  clattn_cache_destroy(cache);
  clattn_buffer_destroy(slots);
  clattn_buffer_destroy(memory);
  clattn_layer_destroy(layer);
}

/* A factor for queries follows those of K and V: checked where products are not of 8 bits, too. */
static void test_scale_of_queries(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnStep* step = NULL;
  ClattnBuffer *output = NULL, *two = NULL, *three = NULL;
  const ClattnBatchInfo batch = decode_batch();
  const float scales[] = {0.5F, 0.25F, 0.125F};
  float row[128], results[2];
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  for (int i = 0; i < 128; ++i) row[i] = 3;
  EXPECT_OK(clattn_buffer_write(fixture->buffer, fixture->queue, 0, row, sizeof row));
  EXPECT_OK(clattn_buffer_create(fixture->context, 4096, &output));
  EXPECT_OK(clattn_buffer_create(fixture->context, 2 * sizeof(float), &two));
  EXPECT_OK(clattn_buffer_create(fixture->context, 3 * sizeof(float), &three));
  EXPECT_OK(clattn_buffer_write(two, fixture->queue, 0, scales, 2 * sizeof(float)));
  EXPECT_OK(clattn_buffer_write(three, fixture->queue, 0, scales, 3 * sizeof(float)));
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = fixture->buffer;
  tensors.output.buffer = output;
  config.kv_cache_dtype = "fp8_e4m3";
  config.fp8_products = 1;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_step_create(layer, NULL, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));

  EXPECT_OK(clattn_cache_set_scales_with_query(cache, two, 0));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_INVALID(
      clattn_layer_forward(layer, fixture->queue, &tensors, step),
      "kv_cache: scales hold 8 bytes, legal: at least 12 (f32 [2][1] and one of queries)");
  EXPECT_OK(clattn_cache_set_scales_with_query(cache, three, 1));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, &tensors, step),
                 "legal: at least 20 (f32 [2][2] and one of queries)");
  for (int query = 0; query < 2; ++query) { /* a decode: the same result */
    EXPECT_OK(query ? clattn_cache_set_scales_with_query(cache, three, 0)
                    : clattn_cache_set_scales(cache, two, 0));
    EXPECT_OK(clattn_layer_bind_cache(layer, cache));
    EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
    EXPECT_OK(clattn_buffer_read(output, fixture->queue, 0, &results[query], sizeof(float)));
  }
  EXPECT(results[0] == 3 && results[1] == 3);
  EXPECT_OK(clattn_cache_set_scales_with_query(cache, NULL, 0));
  EXPECT_INVALID(clattn_cache_set_scales_with_query(NULL, three, 0), "cache is null");
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  clattn_buffer_destroy(three);
  clattn_buffer_destroy(two);
  clattn_buffer_destroy(output);
}

/* What is written and copied without a step is stored by the scales of the cache's layer. */
static void test_scales_of_layer(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnBuffer *memory = NULL, *slots = NULL;
  ClattnKVScales scales = {.struct_size = sizeof scales, .k_scale = 0.5F, .v_scale = 0.25F};
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnCacheWrite write = {.struct_size = sizeof write};
  const int64_t slot = 16, pairs[] = {1, 2};
  const ClattnCache* caches[1];
  float row[128];
  signed char key = 0, value = 0, copied = 0;
  for (int i = 0; i < 128; ++i) row[i] = 3;
  config.kv_cache_dtype = "int8";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_buffer_create(fixture->context, kPages * kPageBytes / 4, &memory));
  EXPECT_OK(clattn_cache_adopt(layer, memory, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof slot, &slots));
  EXPECT_OK(clattn_buffer_write(slots, fixture->queue, 0, &slot, sizeof slot));
  EXPECT_OK(clattn_buffer_write(fixture->buffer, fixture->queue, 0, row, sizeof row));
  write.dtype = "f32";
  write.key.buffer = write.value.buffer = fixture->buffer;
  write.slot_mapping = slots;
  write.num_tokens = 1;
  EXPECT_INVALID(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write),
                 "kv_cache: no scales");
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_OK(clattn_layer_load_kv_scales(layer, &scales)); /* after it was bound, too */
  EXPECT_OK(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write));
  caches[0] = cache;
  EXPECT_OK(clattn_copy_blocks(fixture->context, fixture->queue, caches, 1, pairs, 1, NULL));
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue, (size_t)(info.k_offset + info.block_stride),
                               &key, 1));
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue, (size_t)(info.v_offset + info.block_stride),
                               &value, 1));
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue,
                               (size_t)(info.v_offset + 2 * info.block_stride), &copied, 1));
  EXPECT(key == 6 && value == 12 && copied == 12);
  clattn_layer_destroy(layer); /* its scales stay */
  EXPECT_OK(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write));
  EXPECT_OK(clattn_queue_finish(fixture->queue));
  clattn_cache_destroy(cache);
  clattn_buffer_destroy(slots);
  clattn_buffer_destroy(memory);
}

void test_caches(const Fixture* fixture) {
  test_cache_handles(fixture);
  test_strided_cache(fixture);
  test_write_and_copy(fixture);
  test_scales_of_cache(fixture);
  test_scale_of_queries(fixture);
  test_cache_of_four_bits(fixture);
  test_scales_of_layer(fixture);
}
