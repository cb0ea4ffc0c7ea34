/* The library, devices, contexts, queues, buffers and events. */
#include "expect.h"

void test_library(void) {
  EXPECT(clattn_abi_version() == CLATTN_ABI_VERSION);
  EXPECT(strcmp(clattn_version(), EXPECTED_VERSION) == 0);
  EXPECT(strcmp(clattn_result_name(CLATTN_ERROR_OPENCL), "CLATTN_ERROR_OPENCL") == 0);
  EXPECT(strcmp(clattn_result_name((ClattnResult)5), "CLATTN_ERROR_OUT_OF_BLOCKS") == 0);
  EXPECT(strcmp(clattn_result_name((ClattnResult)77), "unknown status") == 0);

  /* The text stays until the next failure. */
  EXPECT_INVALID(clattn_device_count(NULL), "count is null");
  EXPECT_OK(clattn_set_log(0, NULL, NULL));
  EXPECT(strstr(clattn_last_error(), "count is null") != NULL);
  EXPECT(clattn_last_cl_error() == CL_SUCCESS);
}

/* Counts what is said about layers of that head size. */
static void count_messages(void* user, int32_t level, const char* message) {
  if (level == 1 && strstr(message, "heads of 32") != NULL) ++*(int*)user;
}

static void test_log(const Fixture* fixture) {
  int messages = 0;
  ClattnLayer* layer = NULL;
  ClattnLayerConfig config = layer_config();
  EXPECT_INVALID(clattn_set_log(-1, NULL, NULL), "level is -1, legal: 0 to 3");
  EXPECT_INVALID(clattn_set_log(4, NULL, NULL), "level is 4, legal: 0 to 3");
  EXPECT_OK(clattn_set_log(1, count_messages, &messages));
  config.head_size = 32; /* a shape that was not chosen for before */
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT(messages > 0);
  EXPECT_OK(clattn_set_log(0, NULL, NULL));
  clattn_layer_destroy(layer);
}

static void test_devices(const Fixture* fixture) {
  size_t count = 0;
  ClattnDeviceId device = {.struct_size = sizeof device}, small = {.struct_size = sizeof small - 1};
  ClattnContextInfo info = {.struct_size = sizeof info};
  EXPECT_OK(clattn_device_count(&count));
  EXPECT(count > 0);
  EXPECT_OK(clattn_device_at(0, &device));
  EXPECT(device.struct_size == sizeof device && device.platform != NULL && device.device != NULL);
  EXPECT_INVALID(clattn_device_at(count, &device), "legal: <");
  EXPECT_INVALID(clattn_device_at(0, NULL), "device is null");
  EXPECT_INVALID(clattn_device_at(0, &small), "device: struct_size is");

  EXPECT_OK(clattn_context_info(fixture->context, &info));
  EXPECT(info.context != NULL && info.device != NULL && info.compute_units > 0);
  EXPECT(info.name[0] != '\0' && info.vendor != NULL && info.driver_version[0] != '\0');
  EXPECT(strcmp(info.kind, "cpu") == 0 || strcmp(info.kind, "gpu") == 0);
  EXPECT(info.global_mem_bytes >= info.max_alloc_bytes && info.max_alloc_bytes > 0);
  EXPECT_INVALID(clattn_context_info(NULL, &info), "context is null");
  EXPECT_INVALID(clattn_context_info(fixture->context, NULL), "info is null");
}

static void test_contexts(const Fixture* fixture) {
  ClattnContextInfo info = {.struct_size = sizeof info},
                    adopted_info = {.struct_size = sizeof adopted_info};
  ClattnContext* adopted = fixture->context;
  EXPECT_OK(clattn_context_info(fixture->context, &info));
  EXPECT_INVALID(clattn_context_create("no such device", &adopted), "no such device");
  EXPECT(adopted == NULL);
  EXPECT_INVALID(clattn_context_create(NULL, NULL), "context is null");
  EXPECT_INVALID(clattn_context_adopt(NULL, info.device, &adopted), "handle is null");
  EXPECT_INVALID(clattn_context_adopt(info.context, NULL, &adopted), "device is null");
  EXPECT_INVALID(clattn_context_adopt(info.context, info.device, NULL), "context is null");
  EXPECT_OK(clattn_context_adopt(info.context, info.device, &adopted));
  EXPECT_OK(clattn_context_info(adopted, &adopted_info));
  EXPECT(adopted_info.context == info.context);
  clattn_context_destroy(adopted);
  clattn_context_destroy(NULL);
}

static void test_queues(const Fixture* fixture) {
  ClattnQueue *queue = NULL, *adopted = NULL;
  cl_command_queue handle = NULL, adopted_handle = NULL;
  EXPECT_OK(clattn_queue_create(fixture->context, 0, &queue));
  EXPECT_OK(clattn_queue_handle(queue, &handle));
  EXPECT_OK(clattn_queue_adopt(handle, &adopted));
  EXPECT_OK(clattn_queue_handle(adopted, &adopted_handle));
  EXPECT(handle != NULL && handle == adopted_handle);
  EXPECT_OK(clattn_queue_flush(adopted));
  clattn_queue_destroy(queue);
  EXPECT_OK(clattn_queue_finish(adopted));
  EXPECT_INVALID(clattn_queue_create(NULL, 0, &queue), "context is null");
  EXPECT(queue == NULL);
  EXPECT_INVALID(clattn_queue_create(fixture->context, 0, NULL), "queue is null");
  EXPECT_INVALID(clattn_queue_adopt(NULL, &queue), "handle is null");
  EXPECT_INVALID(clattn_queue_adopt(handle, NULL), "queue is null");
  EXPECT_INVALID(clattn_queue_handle(NULL, &handle), "queue is null");
  EXPECT_INVALID(clattn_queue_handle(adopted, NULL), "handle is null");
  EXPECT_INVALID(clattn_queue_flush(NULL), "queue is null");
  EXPECT_INVALID(clattn_queue_finish(NULL), "queue is null");
  clattn_queue_destroy(adopted);
  clattn_queue_destroy(NULL);
}

void test_devices_and_queues(const Fixture* fixture) {
  test_log(fixture);
  test_devices(fixture);
  test_contexts(fixture);
  test_queues(fixture);
}

static void test_buffers(const Fixture* fixture) {
  const ClattnQueue* queue = fixture->queue;
  const char sent[] = "0123456789abcdef";
  char received[sizeof sent] = {0};
  size_t size = 0;
  cl_mem handle = NULL;
  ClattnBuffer *buffer = NULL, *adopted = NULL;
  EXPECT_OK(clattn_buffer_create(fixture->context, 64, &buffer));
  EXPECT_OK(clattn_buffer_write(buffer, queue, 8, sent, sizeof sent));
  EXPECT_OK(clattn_buffer_handle(buffer, &handle));
  EXPECT_OK(clattn_buffer_adopt(handle, &adopted));
  clattn_buffer_destroy(buffer);
  EXPECT_OK(clattn_buffer_size(adopted, &size));
  EXPECT(size == 64);
  EXPECT_OK(clattn_buffer_read(adopted, queue, 8, received, sizeof received));
  EXPECT(memcmp(sent, received, sizeof sent) == 0);
  EXPECT_OK(clattn_buffer_write(adopted, queue, 64, NULL, 0));
  EXPECT_OK(clattn_buffer_read(adopted, queue, 64, NULL, 0));

  EXPECT_INVALID(clattn_buffer_create(NULL, 64, &buffer), "context is null");
  EXPECT_INVALID(clattn_buffer_create(fixture->context, 64, NULL), "buffer is null");
  EXPECT(clattn_buffer_create(fixture->context, (size_t)1 << 60, &buffer) != CLATTN_SUCCESS);
  EXPECT(buffer == NULL && strstr(clattn_last_error(), "1152921504606846976") != NULL);
  EXPECT_INVALID(clattn_buffer_adopt(NULL, &buffer), "handle is null");
  EXPECT_INVALID(clattn_buffer_adopt(handle, NULL), "buffer is null");
  EXPECT_INVALID(clattn_buffer_handle(NULL, &handle), "buffer is null");
  EXPECT_INVALID(clattn_buffer_handle(adopted, NULL), "handle is null");
  EXPECT_INVALID(clattn_buffer_size(NULL, &size), "buffer is null");
  EXPECT_INVALID(clattn_buffer_size(adopted, NULL), "size_bytes is null");
  EXPECT_INVALID(clattn_buffer_write(NULL, queue, 0, sent, 1), "buffer is null");
  EXPECT_INVALID(clattn_buffer_write(adopted, NULL, 0, sent, 1), "queue is null");
  EXPECT_INVALID(clattn_buffer_write(adopted, queue, 0, NULL, 1), "source is null");
  EXPECT_INVALID(clattn_buffer_write(adopted, queue, 60, sent, 8), "a buffer of 64 bytes");
  EXPECT_INVALID(clattn_buffer_read(NULL, queue, 0, received, 1), "buffer is null");
  EXPECT_INVALID(clattn_buffer_read(adopted, NULL, 0, received, 1), "queue is null");
  EXPECT_INVALID(clattn_buffer_read(adopted, queue, 0, NULL, 1), "destination is null");
  EXPECT_INVALID(clattn_buffer_read(adopted, queue, 65, received, 1), "a buffer of 64 bytes");
  clattn_buffer_destroy(adopted);
  clattn_buffer_destroy(NULL);
}

static void test_events(void) {
  ClattnEvent* event = NULL;
  cl_event handle = (cl_event)&event;
  uint64_t duration_ns = 1;
  EXPECT_OK(clattn_event_create(&event));
  EXPECT_OK(clattn_event_wait(event));
  EXPECT_OK(clattn_event_handle(event, &handle));
  EXPECT(handle == NULL);
  EXPECT_OK(clattn_event_duration_ns(event, &duration_ns));
  EXPECT(duration_ns == 0);
  EXPECT_INVALID(clattn_event_create(NULL), "event is null");
  EXPECT_INVALID(clattn_event_wait(NULL), "event is null");
  EXPECT_INVALID(clattn_event_handle(NULL, &handle), "event is null");
  EXPECT_INVALID(clattn_event_handle(event, NULL), "handle is null");
  EXPECT_INVALID(clattn_event_duration_ns(NULL, &duration_ns), "event is null");
  EXPECT_INVALID(clattn_event_duration_ns(event, NULL), "duration_ns is null");
  clattn_event_destroy(event);
  clattn_event_destroy(NULL);
}

void test_buffers_and_events(const Fixture* fixture) {
  test_buffers(fixture);
  test_events();
}
