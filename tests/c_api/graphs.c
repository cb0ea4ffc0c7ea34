/* Recorded steps, and cascades: the same results as by clattn_layer_forward(). */
#include <clattn/clattn_graph.h>
#include <math.h>

#include "expect.h"

enum { kTokens = 4, kRowFloats = 8 * 64, kPageFloats = 2 * 16 * 2 * 64, kPages = 4 };

/* A layer over a cache of random numbers, and the tensors of up to 4 tokens. */
typedef struct Model {
  ClattnLayer* layer;
  ClattnCache* cache;
  ClattnStep* step;
  ClattnBuffer *memory, *input, *output, *lse;
  ClattnTensors tensors;
} Model;

static ClattnBuffer* random_buffer(const Fixture* fixture, size_t count) {
  static float values[kPages * kPageFloats];
  static uint32_t random = 1;
  ClattnBuffer* buffer = NULL;
  for (size_t i = 0; i < count; ++i) {
    random = random * 1664525u + 1013904223u;
    values[i] = (float)(random >> 8) / 8388608.0F - 1;
  }
  EXPECT_OK(clattn_buffer_create(fixture->context, count * sizeof(float), &buffer));
  EXPECT_OK(clattn_buffer_write(buffer, fixture->queue, 0, values, count * sizeof(float)));
  return buffer;
}

static Model make_model(const Fixture* fixture) {
  Model model = {0};
  const ClattnLayerConfig config = layer_config();
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &model.layer));
  model.memory = random_buffer(fixture, kPages * kPageFloats);
  model.input = random_buffer(fixture, kTokens * kRowFloats);
  model.output = random_buffer(fixture, kTokens * kRowFloats);
  model.lse = random_buffer(fixture, kTokens * 8);
  EXPECT_OK(clattn_cache_adopt(model.layer, model.memory, NULL, &model.cache));
  EXPECT_OK(clattn_step_create(model.layer, NULL, &model.step));
  model.tensors.struct_size = sizeof model.tensors;
  model.tensors.query.buffer = model.tensors.key.buffer = model.input;
  model.tensors.value.buffer = model.input;
  model.tensors.output.buffer = model.output;
  model.tensors.lse = model.lse;
  return model;
}

static void destroy_model(Model model) {
  clattn_step_destroy(model.step);
  clattn_cache_destroy(model.cache);
  clattn_layer_destroy(model.layer);
  clattn_buffer_destroy(model.memory);
  clattn_buffer_destroy(model.input);
  clattn_buffer_destroy(model.output);
  clattn_buffer_destroy(model.lse);
}

/* The rows and LSE of the last step, whose buffers are then overwritten. */
static void take(const Fixture* fixture, const Model* model, float* rows, size_t count) {
  static const float gone[kTokens * kRowFloats];
  const size_t row_bytes = kRowFloats * sizeof *rows, lse_bytes = count * 8 * sizeof *rows;
  EXPECT_OK(clattn_buffer_read(model->output, fixture->queue, 0, rows, count * row_bytes));
  EXPECT_OK(
      clattn_buffer_read(model->lse, fixture->queue, 0, rows + count * kRowFloats, lse_bytes));
  EXPECT_OK(clattn_buffer_write(model->output, fixture->queue, 0, gone, sizeof gone));
  EXPECT_OK(clattn_buffer_write(model->lse, fixture->queue, 0, gone, lse_bytes));
}

static void attend_eagerly(const Fixture* fixture, const Model* model, const ClattnBatchInfo* batch,
                           float* rows, size_t count) {
  EXPECT_OK(clattn_step_build(model->step, fixture->queue, batch));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, model->step));
  take(fixture, model, rows, count);
}

static ClattnGraph* record(const Fixture* fixture, const Model* model, ClattnGraphState* state) {
  const ClattnStep* step = NULL;
  ClattnGraphCapture* capture = NULL;
  ClattnGraph *graph = NULL, *second = NULL;
  ClattnGraphInfo info = {.struct_size = sizeof info};
  EXPECT_OK(clattn_graph_state_begin_capture(state, 2));
  EXPECT_OK(clattn_graph_state_capture_step(state, fixture->queue, 2, &step));
  EXPECT_OK(clattn_graph_capture_create(fixture->queue, "launch_list", &capture));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  EXPECT_OK(clattn_graph_capture_end(capture, &graph));
  EXPECT_INVALID(clattn_graph_capture_end(capture, &second), "ended already");
  EXPECT_INVALID(clattn_graph_state_begin_capture(state, 2), "captur");
  EXPECT_OK(clattn_graph_state_end_capture(state));
  EXPECT_OK(clattn_graph_info(graph, &info));
  EXPECT(info.num_launches >= 2 && info.uses_command_buffer == 0 && second == NULL);
  clattn_graph_capture_destroy(capture);
  return graph;
}

static void test_replay(const Fixture* fixture, const Model* model, ClattnGraphState* state,
                        const ClattnGraph* graph) {
  const int32_t starts[] = {0, 3, 4}, lens[][2] = {{1, 20}, {2, 32}, {18, 5}};
  float eager[2 * (kRowFloats + 8)], replayed[2 * (kRowFloats + 8)];
  float mixed[4 * (kRowFloats + 8)], by_state[4 * (kRowFloats + 8)];
  const ClattnStep* step = NULL;
  ClattnEvent* event = NULL;
  cl_event handle = NULL;
  int32_t size = -1;
  ClattnBatchInfo batch = decode_batch();
  EXPECT_OK(clattn_event_create(&event));
  for (int i = 0; i < 3; ++i) {
    batch.seq_lens = lens[i];
    /* First, because it has to store the keys and values that the eager step stores again. */
    EXPECT_OK(clattn_graph_state_begin_step(state, fixture->queue, &batch, &step, &size));
    EXPECT(size == 2 && step != NULL);
    EXPECT_OK(clattn_graph_replay(graph, fixture->queue, event));
    take(fixture, model, replayed, 2);
    attend_eagerly(fixture, model, &batch, eager, 2);
    EXPECT(memcmp(eager, replayed, sizeof eager) == 0);
  }
  EXPECT_OK(clattn_event_handle(event, &handle));
  EXPECT(handle != NULL);
  clattn_event_destroy(event);

  batch.query_start_loc = starts; /* too many tokens to be recorded */
  EXPECT_OK(clattn_graph_state_begin_step(state, fixture->queue, &batch, &step, &size));
  EXPECT(size == 0);
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  take(fixture, model, by_state, 4);
  attend_eagerly(fixture, model, &batch, mixed, 4);
  EXPECT(memcmp(mixed, by_state, sizeof mixed) == 0);
}

static void refuse_graph_calls(const Fixture* fixture, const Model* model, ClattnGraphState* state,
                               const ClattnGraph* graph) {
  ClattnGraphState* none = NULL;
  ClattnGraphCapture* capture = NULL;
  ClattnGraph* made = NULL;
  const ClattnStep* step = NULL;
  int32_t size = 0;
  ClattnGraphInfo info = {.struct_size = sizeof info};
  const ClattnBatchInfo batch = decode_batch();
  const ClattnQueue* queue = fixture->queue;
  EXPECT_INVALID(clattn_graph_capture_create(NULL, NULL, &capture), "queue is null");
  EXPECT_INVALID(clattn_graph_capture_create(queue, NULL, NULL), "capture is null");
  EXPECT_INVALID(clattn_graph_capture_create(queue, "fast", &capture), "mode is fast, legal: auto");
  EXPECT_INVALID(clattn_graph_capture_end(NULL, &made), "capture is null");
  EXPECT_INVALID(clattn_graph_capture_end(capture, NULL), "graph is null");
  EXPECT_INVALID(clattn_graph_replay(NULL, queue, NULL), "graph is null");
  EXPECT_INVALID(clattn_graph_replay(graph, NULL, NULL), "queue is null");
  EXPECT_INVALID(clattn_graph_info(NULL, &info), "graph is null");
  EXPECT_INVALID(clattn_graph_info(graph, NULL), "info is null");
  EXPECT_INVALID(clattn_graph_state_create(NULL, NULL, &none), "layer is null");
  EXPECT_INVALID(clattn_graph_state_create(model->layer, NULL, NULL), "state is null");
  EXPECT_INVALID(clattn_graph_state_begin_capture(NULL, 2), "state is null");
  EXPECT_INVALID(clattn_graph_state_end_capture(NULL), "state is null");
  EXPECT_INVALID(clattn_graph_state_end_capture(state), "state: it is not capturing");
  EXPECT_INVALID(clattn_graph_state_capture_step(NULL, queue, 2, &step), "state is null");
  EXPECT_INVALID(clattn_graph_state_capture_step(state, NULL, 2, &step), "queue is null");
  EXPECT_INVALID(clattn_graph_state_capture_step(state, queue, 2, NULL), "step is null");
  EXPECT_INVALID(clattn_graph_state_capture_step(state, queue, 2, &step), "captur");
  EXPECT_INVALID(clattn_graph_state_begin_step(NULL, queue, &batch, &step, &size), "state is null");
  EXPECT_INVALID(clattn_graph_state_begin_step(state, NULL, &batch, &step, &size), "queue is null");
  EXPECT_INVALID(clattn_graph_state_begin_step(state, queue, NULL, &step, &size), "batch is null");
  EXPECT_INVALID(clattn_graph_state_begin_step(state, queue, &batch, NULL, &size), "step is null");
  EXPECT_INVALID(clattn_graph_state_begin_step(state, queue, &batch, &step, NULL),
                 "graph_batch_size is null");
  clattn_graph_state_destroy(NULL);
  clattn_graph_capture_destroy(NULL);
  clattn_graph_destroy(NULL);
}

void test_graphs(const Fixture* fixture) {
  Model model = make_model(fixture);
  ClattnGraphState* state = NULL;
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  EXPECT_OK(clattn_graph_state_create(model.layer, NULL, &state));
  ClattnGraph* graph = record(fixture, &model, state);
  test_replay(fixture, &model, state, graph);
  refuse_graph_calls(fixture, &model, state, graph);
  clattn_graph_state_destroy(state);
  clattn_graph_destroy(graph);
  destroy_model(model);
}

/* A layer over another one's cache stores nothing, as its clattn_layer_forward() stores nothing. */
static void test_store_of_a_shared_cache(const Fixture* fixture, const Model* model) {
  static float before[kPages * kPageFloats], after[kPages * kPageFloats];
  ClattnModel* registry = NULL;
  ClattnLayer *target = NULL, *sharing = NULL;
  ClattnEvent* event = NULL;
  cl_event handle = NULL;
  ClattnLayerConfig config = layer_config();
  ClattnTensors tensors = model->tensors;
  const ClattnBatchInfo batch = decode_batch();
  EXPECT_OK(clattn_model_create(&registry));
  config.name = "layers.0.attn";
  EXPECT_OK(clattn_layer_create(fixture->context, registry, &config, &target));
  config.name = "layers.1.attn";
  config.kv_sharing_target_layer_name = "layers.0.attn";
  EXPECT_OK(clattn_layer_create(fixture->context, registry, &config, &sharing));
  EXPECT_OK(clattn_layer_bind_cache(target, model->cache));
  EXPECT_OK(clattn_step_build(model->step, fixture->queue, &batch));
  EXPECT_OK(clattn_event_create(&event));
  tensors.event = event;

  EXPECT_OK(clattn_buffer_read(model->memory, fixture->queue, 0, before, sizeof before));
  EXPECT_OK(clattn_layer_store(sharing, fixture->queue, &tensors, model->step));
  EXPECT_OK(clattn_buffer_read(model->memory, fixture->queue, 0, after, sizeof after));
  EXPECT(memcmp(before, after, sizeof before) == 0);
  EXPECT_OK(clattn_event_handle(event, &handle));
  EXPECT(handle == NULL);
  EXPECT_OK(clattn_layer_store(target, fixture->queue, &tensors, model->step));
  EXPECT_OK(clattn_buffer_read(model->memory, fixture->queue, 0, after, sizeof after));
  EXPECT(memcmp(before, after, sizeof before) != 0);
  EXPECT_OK(clattn_event_handle(event, &handle));
  EXPECT(handle != NULL);
  EXPECT_OK(clattn_layer_store(sharing, fixture->queue, &tensors, model->step));
  EXPECT_OK(clattn_event_handle(event, &handle));
  EXPECT(handle == NULL); /* the earlier store's is gone */

  clattn_event_destroy(event);
  clattn_layer_destroy(sharing);
  clattn_layer_destroy(target);
  clattn_model_destroy(registry);
}

/* Two decodes of which both begin with page 2. */
static ClattnBatchInfo shared_batch(void) {
  static const int32_t lens[] = {20, 32}, pages[] = {2, 1, 2, 3};
  ClattnBatchInfo batch = decode_batch();
  batch.seq_lens = lens;
  batch.block_table = pages;
  batch.common_prefix_len = 16;
  return batch;
}

static void refuse_cascade_calls(const Fixture* fixture, const Model* model, ClattnCascade* cascade,
                                 const ClattnCascadeLayer* layer) {
  ClattnCascade* none = NULL;
  ClattnCascadeLayer* no_layer = NULL;
  const ClattnStep* step = NULL;
  const ClattnQueue* queue = fixture->queue;
  ClattnBatchInfo batch = shared_batch();
  const ClattnTensors* tensors = &model->tensors;
  EXPECT_INVALID(clattn_cascade_create(NULL, NULL, &none), "layer is null");
  EXPECT_INVALID(clattn_cascade_create(model->layer, NULL, NULL), "cascade is null");
  EXPECT_INVALID(clattn_cascade_layer_create(NULL, &no_layer), "layer is null");
  EXPECT_INVALID(clattn_cascade_layer_create(model->layer, NULL), "cascade_layer is null");
  EXPECT_INVALID(clattn_cascade_build(NULL, queue, &batch, &step), "cascade is null");
  EXPECT_INVALID(clattn_cascade_build(cascade, NULL, &batch, &step), "queue is null");
  EXPECT_INVALID(clattn_cascade_build(cascade, queue, NULL, &step), "batch is null");
  EXPECT_INVALID(clattn_cascade_build(cascade, queue, &batch, NULL), "step is null");
  EXPECT_INVALID(clattn_layer_store(NULL, queue, tensors, step), "layer is null");
  EXPECT_INVALID(clattn_layer_store(model->layer, NULL, tensors, step), "queue is null");
  EXPECT_INVALID(clattn_layer_store(model->layer, queue, NULL, step), "tensors is null");
  EXPECT_INVALID(clattn_layer_store(model->layer, queue, tensors, NULL), "step is null");
  EXPECT_INVALID(clattn_cascade_forward(NULL, queue, layer, tensors), "cascade is null");
  EXPECT_INVALID(clattn_cascade_forward(cascade, NULL, layer, tensors), "queue is null");
  EXPECT_INVALID(clattn_cascade_forward(cascade, queue, NULL, tensors), "cascade_layer is null");
  EXPECT_INVALID(clattn_cascade_forward(cascade, queue, layer, NULL), "tensors is null");
  batch.common_prefix_len = 0;
  EXPECT_INVALID(clattn_cascade_build(cascade, queue, &batch, &step), "common_prefix_len is 0");
  EXPECT_INVALID(clattn_cascade_forward(cascade, queue, layer, tensors), "levels are planned");
  clattn_cascade_destroy(NULL);
  clattn_cascade_layer_destroy(NULL);
}

void test_cascades(const Fixture* fixture) {
  Model model = make_model(fixture);
  ClattnCascade* cascade = NULL;
  ClattnCascadeLayer* layer = NULL;
  const ClattnStep* step = NULL;
  ClattnStepInfo info = {.struct_size = sizeof info};
  ClattnBatchInfo batch = shared_batch();
  float plain[2 * (kRowFloats + 8)], cascaded[2 * (kRowFloats + 8)];
  test_store_of_a_shared_cache(fixture, &model);
  EXPECT_OK(clattn_cascade_create(model.layer, NULL, &cascade));
  EXPECT_OK(clattn_cascade_layer_create(model.layer, &layer));
  EXPECT_OK(clattn_cascade_build(cascade, fixture->queue, &batch, &step));
  EXPECT_INVALID(clattn_layer_store(model.layer, fixture->queue, &model.tensors, step),
                 "layer: it has no cache");
  EXPECT_INVALID(clattn_cascade_forward(cascade, fixture->queue, layer, &model.tensors),
                 "layer: it has no cache");
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  EXPECT_OK(clattn_step_info(step, &info));
  EXPECT(info.num_actual_tokens == 2);
  EXPECT_OK(clattn_layer_store(model.layer, fixture->queue, &model.tensors, step));
  EXPECT_OK(clattn_cascade_forward(cascade, fixture->queue, layer, &model.tensors));
  take(fixture, &model, cascaded, 2);
  batch.common_prefix_len = 0;
  attend_eagerly(fixture, &model, &batch, plain, 2);
  for (int i = 0; i < 2 * (kRowFloats + 8); ++i) EXPECT(fabs(plain[i] - cascaded[i]) < 1e-5);
  refuse_cascade_calls(fixture, &model, cascade, layer);
  clattn_cascade_destroy(cascade);
  clattn_cascade_layer_destroy(layer);
  destroy_model(model);
}
