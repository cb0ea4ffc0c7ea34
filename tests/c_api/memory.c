/* Devices by selector, and more about buffers. */
#include "expect.h"

static void test_selectors(const Fixture* fixture) {
  ClattnDeviceId device = {.struct_size = sizeof device};
  size_t size = 0;
  char text[4];
  EXPECT_OK(clattn_select_device(NULL, &device));
  EXPECT(device.device != NULL);
  EXPECT_INVALID(clattn_select_device("no such device", &device), "no such device");
  EXPECT_INVALID(clattn_select_device(NULL, NULL), "device is null");
  EXPECT_OK(clattn_context_problems(fixture->context, text, 0, &size));
  EXPECT(size >= 1);
  EXPECT_INVALID(clattn_context_problems(NULL, text, sizeof text, &size), "context is null");
  EXPECT_INVALID(clattn_context_problems(fixture->context, NULL, 4, &size), "text is null");
}

static void test_copies(const Fixture* fixture) {
  const ClattnQueue* const queue = fixture->queue;
  ClattnBuffer* const buffer = fixture->buffer;
  const int32_t source[] = {1, 2, 3, 4};
  int32_t read[4] = {0};
  ClattnEvent* event = NULL;
  EXPECT_OK(clattn_event_create(&event));
  EXPECT_OK(clattn_buffer_write_async(buffer, queue, 4, source, sizeof source, NULL));
  EXPECT_OK(clattn_buffer_fill(buffer, queue, 9, 8, 4));
  EXPECT_OK(clattn_buffer_read_async(buffer, queue, 4, read, sizeof read, event));
  EXPECT_OK(clattn_event_wait(event));
  EXPECT(read[0] == 1 && read[1] == 9 && read[2] == 3 && read[3] == 4);
  EXPECT_INVALID(clattn_buffer_write_async(NULL, queue, 0, source, 4, NULL), "buffer is null");
  EXPECT_INVALID(clattn_buffer_write_async(buffer, NULL, 0, source, 4, NULL), "queue is null");
  EXPECT_INVALID(clattn_buffer_write_async(buffer, queue, 0, NULL, 4, NULL), "source is null");
  EXPECT_INVALID(clattn_buffer_write_async(buffer, queue, 8190, source, 4, NULL), "8190");
  EXPECT_INVALID(clattn_buffer_read_async(NULL, queue, 0, read, 4, NULL), "buffer is null");
  EXPECT_INVALID(clattn_buffer_read_async(buffer, NULL, 0, read, 4, NULL), "queue is null");
  EXPECT_INVALID(clattn_buffer_read_async(buffer, queue, 0, NULL, 4, NULL), "destination is null");
  EXPECT_INVALID(clattn_buffer_read_async(buffer, queue, 8190, read, 4, NULL), "8190");
  EXPECT_INVALID(clattn_buffer_fill(NULL, queue, 9, 8, 4), "buffer is null");
  EXPECT_INVALID(clattn_buffer_fill(buffer, NULL, 9, 8, 4), "queue is null");
  EXPECT_INVALID(clattn_buffer_fill(buffer, queue, 9, 8, 3), "3");
  clattn_event_destroy(event);
}

static void test_host_memory(const Fixture* fixture) {
  static int32_t shared[4096 / 4];
  const ClattnQueue* const queue = fixture->queue;
  ClattnBuffer* buffer = NULL;
  ClattnHostMemory* memory = NULL;
  void* bytes = NULL;
  EXPECT_OK(clattn_buffer_share(fixture->context, shared, sizeof shared, &buffer));
  EXPECT_OK(clattn_buffer_fill(buffer, queue, 5, 0, sizeof shared));
  EXPECT_OK(clattn_buffer_map(buffer, queue, NULL, &memory, &bytes));
  EXPECT(((int32_t*)bytes)[7] == 5);
  ((int32_t*)bytes)[7] = 6;
  clattn_host_memory_destroy(memory);
  EXPECT_OK(clattn_buffer_map(buffer, queue, "read", &memory, &bytes));
  EXPECT(((int32_t*)bytes)[7] == 6 && ((int32_t*)bytes)[8] == 5);
  clattn_host_memory_destroy(memory);
  EXPECT_OK(clattn_buffer_map(buffer, queue, "write", &memory, &bytes));
  clattn_host_memory_destroy(memory);
  EXPECT_INVALID(clattn_buffer_map(buffer, queue, "append", &memory, &bytes),
                 "access: 'append' is not one of read, write, read_write");
  EXPECT(memory == NULL);
  EXPECT_INVALID(clattn_buffer_map(NULL, queue, NULL, &memory, &bytes), "buffer is null");
  EXPECT_INVALID(clattn_buffer_map(buffer, NULL, NULL, &memory, &bytes), "queue is null");
  EXPECT_INVALID(clattn_buffer_map(buffer, queue, NULL, NULL, &bytes), "memory is null");
  EXPECT_INVALID(clattn_buffer_map(buffer, queue, NULL, &memory, NULL), "bytes is null");
  clattn_buffer_destroy(buffer);
  EXPECT_INVALID(clattn_buffer_share(NULL, shared, sizeof shared, &buffer), "context is null");
  EXPECT_INVALID(clattn_buffer_share(fixture->context, NULL, 4, &buffer), "memory is null");
  EXPECT_INVALID(clattn_buffer_share(fixture->context, shared, 0, &buffer), "0");
  EXPECT_INVALID(clattn_buffer_share(fixture->context, shared, sizeof shared, NULL),
                 "buffer is null");

  EXPECT_OK(clattn_pinned_memory_create(fixture->context, 64, &memory, &bytes));
  memset(bytes, 1, 64);
  clattn_host_memory_destroy(memory);
  EXPECT_INVALID(clattn_pinned_memory_create(NULL, 64, &memory, &bytes), "context is null");
  EXPECT_INVALID(clattn_pinned_memory_create(fixture->context, 64, NULL, &bytes), "memory is null");
  EXPECT_INVALID(clattn_pinned_memory_create(fixture->context, 64, &memory, NULL), "bytes is null");
  clattn_host_memory_destroy(NULL);
}

void test_device_memory(const Fixture* fixture) {
  test_selectors(fixture);
  test_copies(fixture);
  test_host_memory(fixture);
}
