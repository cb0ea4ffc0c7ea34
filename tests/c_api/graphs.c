/* Recorded steps: the same results as by clattn_layer_forward(). */
#include "model.h"

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

/* A size of its own, prepared by name; the slots are where the kernels read them. */
static void test_prepared(const Fixture* fixture, const Model* model, ClattnGraphState* state,
                          const ClattnGraph* graph) {
  const ClattnQueue* const queue = fixture->queue;
  float eager[2 * (kRowFloats + 8)], replayed[2 * (kRowFloats + 8)];
  int64_t slots[2], num_slots = 0;
  int32_t size = -1;
  ClattnBuffer* slot_mapping = NULL;
  ClattnGraphState *clone = NULL, *none = NULL;
  const ClattnStep* step = NULL;
  ClattnBatchInfo batch = decode_batch();
  EXPECT_OK(clattn_graph_state_batch_size_for(state, &batch, &size));
  EXPECT(size == 2);
  EXPECT_INVALID(clattn_graph_state_clone(state, 2, &clone), "captur");
  EXPECT_OK(clattn_graph_state_begin_capture(state, 2));
  EXPECT_OK(clattn_graph_state_clone(state, 2, &clone));
  EXPECT_OK(clattn_graph_state_end_capture(state));
  EXPECT_OK(clattn_graph_state_prepare(clone, queue, 2, &batch, &step));
  EXPECT_OK(clattn_graph_input_buffers(step, &slot_mapping, &num_slots));
  EXPECT(num_slots == 2);
  EXPECT_OK(clattn_buffer_read(slot_mapping, queue, 0, slots, sizeof slots));
  EXPECT(slots[0] == 3 * 16 && slots[1] == 3); /* tokens 0 and 19 */
  EXPECT_OK(clattn_graph_replay(graph, queue, NULL));
  take(fixture, model, replayed, 2);
  attend_eagerly(fixture, model, &batch, eager, 2);
  EXPECT(memcmp(eager, replayed, sizeof eager) == 0);
  EXPECT_INVALID(clattn_graph_input_buffers(model->step, &slot_mapping, &num_slots), "record");
  EXPECT_INVALID(clattn_graph_input_buffers(NULL, &slot_mapping, &num_slots), "step is null");
  EXPECT_INVALID(clattn_graph_input_buffers(step, NULL, &num_slots), "slot_mapping is null");
  clattn_buffer_destroy(slot_mapping);
  EXPECT_INVALID(clattn_graph_input_buffers(step, &slot_mapping, NULL), "num_slots is null");
  EXPECT_INVALID(clattn_graph_state_prepare(NULL, queue, 2, &batch, &step), "state is null");
  EXPECT_INVALID(clattn_graph_state_prepare(state, NULL, 2, &batch, &step), "queue is null");
  EXPECT_INVALID(clattn_graph_state_prepare(state, queue, 2, NULL, &step), "batch is null");
  EXPECT_INVALID(clattn_graph_state_prepare(state, queue, 2, &batch, NULL), "step is null");
  EXPECT_INVALID(clattn_graph_state_prepare(state, queue, 1, &batch, &step), "1");
  EXPECT_INVALID(clattn_graph_state_batch_size_for(NULL, &batch, &size), "state is null");
  EXPECT_INVALID(clattn_graph_state_batch_size_for(state, NULL, &size), "batch is null");
  EXPECT_INVALID(clattn_graph_state_batch_size_for(state, &batch, NULL),
                 "graph_batch_size is null");
  EXPECT_INVALID(clattn_graph_state_clone(NULL, 2, &none), "state is null");
  EXPECT_INVALID(clattn_graph_state_clone(state, 2, NULL), "clone is null");
  batch.common_prefix_len = 16;
  EXPECT_INVALID(clattn_graph_state_begin_step(state, queue, &batch, &step, &size),
                 "batch: common_prefix_len is 16");
  clattn_graph_state_destroy(clone);
}

/* A size of four query tokens: a prompt of three and a decode by one graph. */
static void test_mixed(const Fixture* fixture, const Model* model) {
  const int32_t starts[] = {0, 3, 4}, lens[] = {18, 5};
  float eager[4 * (kRowFloats + 8)], replayed[4 * (kRowFloats + 8)];
  const ClattnStepOptions options = {.struct_size = sizeof options, .graph_mixed = 1};
  ClattnGraphState* state = NULL;
  ClattnGraphCapture* capture = NULL;
  ClattnGraph* graph = NULL;
  const ClattnStep* step = NULL;
  ClattnStep* none = NULL;
  int32_t size = -1;
  ClattnBatchInfo batch = decode_batch();
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  EXPECT_INVALID(clattn_step_create(model->layer, &options, &none), "graph_mixed: true, legal");
  EXPECT_OK(clattn_graph_state_create(model->layer, &options, &state));
  EXPECT_OK(clattn_graph_state_begin_capture(state, 4));
  EXPECT_OK(clattn_graph_state_capture_step(state, fixture->queue, 4, &step));
  EXPECT_OK(clattn_graph_capture_create(fixture->queue, NULL, &capture));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  EXPECT_OK(clattn_graph_capture_end(capture, &graph));
  EXPECT_OK(clattn_graph_state_end_capture(state));
  EXPECT_OK(clattn_graph_state_begin_step(state, fixture->queue, &batch, &step, &size));
  EXPECT(size == 4);
  EXPECT_OK(clattn_graph_replay(graph, fixture->queue, NULL));
  take(fixture, model, replayed, 4);
  attend_eagerly(fixture, model, &batch, eager, 4);
  EXPECT(memcmp(eager, replayed, sizeof eager) == 0);
  clattn_graph_capture_destroy(capture);
  clattn_graph_state_destroy(state);
  clattn_graph_destroy(graph);
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
  EXPECT_INVALID(clattn_graph_capture_create(queue, "fast", &capture),
                 "mode: 'fast' is not one of auto");
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
  test_prepared(fixture, &model, state, graph);
  test_mixed(fixture, &model);
  refuse_graph_calls(fixture, &model, state, graph);
  clattn_graph_state_destroy(state);
  clattn_graph_destroy(graph);
  destroy_model(model);
}
