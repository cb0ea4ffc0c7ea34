#ifndef CLATTN_TESTS_C_API_EXPECT_H
#define CLATTN_TESTS_C_API_EXPECT_H

/* Checks of the C API's tests: each failure is printed and counted. */
#include <clattn/clattn.h>
#include <stdio.h>
#include <string.h>

extern int failures;

static inline void fail(const char* file, int line, const char* what, const char* got) {
  fprintf(stderr, "%s:%d: %s, but: %s\n", file, line, what, got);
  ++failures;
}

static inline void expect_status(const char* file, int line, const char* call, ClattnResult status,
                                 ClattnResult wanted, const char* text) {
  if (status != wanted) {
    fail(file, line, call, clattn_result_name(status));
    if (status != CLATTN_SUCCESS) fail(file, line, call, clattn_last_error());
  } else if (text != NULL && strstr(clattn_last_error(), text) == NULL) {
    fail(file, line, text, clattn_last_error());
  }
}

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) fail(__FILE__, __LINE__, #condition, "it is false"); \
  } while (0)
#define EXPECT_OK(call) expect_status(__FILE__, __LINE__, #call, call, CLATTN_SUCCESS, NULL)
/* The call is refused as an invalid argument, and the error text contains `text`. */
#define EXPECT_INVALID(call, text) \
  expect_status(__FILE__, __LINE__, #call, call, CLATTN_ERROR_INVALID_ARGUMENT, text)
#define EXPECT_UNSUPPORTED(call, text) \
  expect_status(__FILE__, __LINE__, #call, call, CLATTN_ERROR_UNSUPPORTED, text)

/* What the tests share: a layer of 8 heads over 2 KV heads of 64 elements, in f32. */
typedef struct Fixture {
  ClattnContext* context;
  ClattnQueue* queue;
  ClattnBuffer* buffer; /* 8192 bytes */
  ClattnLayer* layer;   /* bound to the cache */
  ClattnCache* cache;   /* 4 pages */
  ClattnStep* step;     /* of two decodes */
} Fixture;

ClattnLayerConfig layer_config(void);
/* Two decodes, of 1 and of 20 tokens. */
ClattnBatchInfo decode_batch(void);

/* A buffer of the device with these bytes. */
static inline ClattnBuffer* buffer_with(const Fixture* fixture, const void* bytes, size_t size) {
  ClattnBuffer* buffer = NULL;
  EXPECT_OK(clattn_buffer_create(fixture->context, size, &buffer));
  EXPECT_OK(clattn_buffer_write(buffer, fixture->queue, 0, bytes, size));
  return buffer;
}

void test_library(void);
void test_devices_and_queues(const Fixture* fixture);
void test_buffers_and_events(const Fixture* fixture);
void test_layers(const Fixture* fixture);
void test_caches(const Fixture* fixture);
void test_steps(const Fixture* fixture);
void test_forward(const Fixture* fixture);
void test_lists(const Fixture* fixture);
void test_device_lists(const Fixture* fixture);
void test_refusals(const Fixture* fixture);
void test_sessions(const Fixture* fixture);
void test_graphs(const Fixture* fixture);
void test_cascades(const Fixture* fixture);
void test_device_memory(const Fixture* fixture);
void test_operations(const Fixture* fixture);
void test_recurrent(const Fixture* fixture);
void test_prepare_qkv(const Fixture* fixture);
void test_latent_caches(const Fixture* fixture);
void test_lengths_on_the_device(const Fixture* fixture);
void test_metadata(void);
void test_block_pool(void);
void test_layers_further(const Fixture* fixture);
void test_specs(const Fixture* fixture);
void test_groups(const Fixture* fixture);
void test_tuning(const Fixture* fixture);
void test_level_cascades(const Fixture* fixture);
void test_attention_functions(const Fixture* fixture);

#endif
