/* Directions and trees that only the device knows. */
#include <math.h>
#include <string.h>

#include "model.h"

enum { kFloats = kTokens * (kRowFloats + 8) };

static const int32_t starts[] = {0, kTokens}, seq_lens[] = {kTokens}, page[] = {2};
static const int32_t most_nodes[] = {0, kTokens}, roots[] = {-1, -1, 0, 1};

/* A prompt of kTokens. */
static ClattnBatchInfo prompt_batch(void) {
  ClattnBatchInfo batch = {.struct_size = sizeof batch, .num_reqs = 1};
  batch.query_start_loc = starts;
  batch.seq_lens = seq_lens;
  batch.block_table = page;
  batch.block_table_stride = 1;
  return batch;
}

static void expect_near(const float* got, const float* wanted) {
  for (int i = 0; i < kFloats; ++i) EXPECT(fabsf(got[i] - wanted[i]) < 1e-5F);
}

/* The rows of a step of `model` with what the device says. */
static void attend(const Fixture* fixture, const Model* model, ClattnStep* step,
                   const ClattnDeviceLists* lists, ClattnDeviceErrors* errors, float* rows) {
  EXPECT_OK(clattn_update_lists(fixture->queue, step, lists, errors, NULL));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  take(fixture, model, rows, kTokens);
}

static void test_directions(const Fixture* fixture, const Model* model,
                            ClattnDeviceErrors* errors) {
  static const uint8_t values[] = {0, 1, 3};
  float plain[kFloats], both_ways[kFloats], got[kFloats];
  ClattnStepOptions options = {.struct_size = sizeof options, .device_directions = 1};
  ClattnDeviceLists lists = {.struct_size = sizeof lists};
  ClattnStep* step = NULL;
  ClattnBatchInfo batch = prompt_batch();
  attend_eagerly(fixture, model, &batch, plain, kTokens);
  batch.causal = -1;
  attend_eagerly(fixture, model, &batch, both_ways, kTokens);
  batch = prompt_batch();
  EXPECT_OK(clattn_step_create(model->layer, &options, &step));
  EXPECT_OK(clattn_step_warm_up(step, fixture->queue));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  take(fixture, model, got, kTokens);
  expect_near(got, plain); /* nothing is known yet */
  for (int value = 0; value < 3; ++value) {
    ClattnBuffer* const direction = buffer_with(fixture, &values[value], 1);
    lists.direction = direction;
    attend(fixture, model, step, &lists, errors, got);
    if (value < 2) expect_near(got, value == 1 ? plain : both_ways);
    if (value == 2)
      EXPECT_INVALID(clattn_device_errors_check(errors, fixture->queue),
                     "update_lists: request 0 was left out: its direction is none of");
    clattn_buffer_destroy(direction);
  }
  lists.direction = NULL;
  EXPECT_INVALID(clattn_update_lists(fixture->queue, step, &lists, errors, NULL),
                 "update_lists: direction is missing, legal with device_directions: a buffer");
  static const uint8_t causal[] = {1};
  batch.direction = causal;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "direction holds 1 elements, legal with device_directions: none");
  clattn_step_destroy(step);
}

static void test_trees(const Fixture* fixture, const Model* model, ClattnDeviceErrors* errors) {
  static const int32_t size[] = {kTokens};
  static const uint32_t bits[] = {1, 2, 1 | 4, 2 | 8}; /* of `roots` */
  float plain[kFloats], tree[kFloats], got[kFloats];
  ClattnStepOptions options = {.struct_size = sizeof options, .device_trees = 1};
  ClattnDeviceLists lists = {.struct_size = sizeof lists, .tree_bits_stride = 1};
  ClattnStep* step = NULL;
  ClattnBuffer* const sizes = buffer_with(fixture, size, sizeof size);
  ClattnBuffer* const tree_bits = buffer_with(fixture, bits, sizeof bits);
  ClattnBatchInfo batch = prompt_batch();
  attend_eagerly(fixture, model, &batch, plain, kTokens);
  batch.tree_start_loc = most_nodes;
  batch.tree_parents = roots;
  attend_eagerly(fixture, model, &batch, tree, kTokens);
  EXPECT(fabsf(plain[kRowFloats] - tree[kRowFloats]) > 1e-3F);
  batch.tree_parents = NULL;
  EXPECT_OK(clattn_step_create(model->layer, &options, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step));
  take(fixture, model, got, kTokens);
  expect_near(got, plain);
  lists.tree_sizes = sizes;
  lists.tree_bits = tree_bits;
  attend(fixture, model, step, &lists, errors, got);
  expect_near(got, tree);
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue));
  EXPECT_INVALID(clattn_update_lists(NULL, step, &lists, errors, NULL), "queue is null");
  EXPECT_INVALID(clattn_update_lists(fixture->queue, NULL, &lists, errors, NULL), "step is null");
  EXPECT_INVALID(clattn_update_lists(fixture->queue, step, NULL, errors, NULL), "lists is null");
  EXPECT_INVALID(clattn_update_lists(fixture->queue, step, &lists, NULL, NULL), "errors is null");
  EXPECT_INVALID(clattn_update_lists(fixture->queue, fixture->step, &lists, errors, NULL),
                 "legal: metadata of a builder with device_directions or device_trees");
  lists.tree_bits_stride = 0;
  EXPECT_INVALID(clattn_update_lists(fixture->queue, step, &lists, errors, NULL),
                 "update_lists: tree_bits_stride is 0, legal: 1");
  clattn_step_destroy(step);
  clattn_buffer_destroy(sizes);
  clattn_buffer_destroy(tree_bits);
}

/* Without a cache a layer attends to the call's own keys, by what the host knows. */
static void test_unbound(const Fixture* fixture, const Model* model) {
  const ClattnStepOptions options = {.struct_size = sizeof options, .device_directions = 1};
  const ClattnBatchInfo batch = prompt_batch();
  ClattnStep* step = NULL;
  EXPECT_OK(clattn_step_create(model->layer, &options, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_INVALID(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, step),
                 "no kv_cache is bound, legal with device_directions or device_trees: a bound one");
  clattn_step_destroy(step);
}

void test_device_lists(const Fixture* fixture) {
  const ClattnBatchInfo decodes = decode_batch();
  ClattnLayerConfig config = layer_config();
  ClattnDeviceErrors* errors = NULL;
  config.use_directions = config.use_trees = 1;
  const Model model = make_model_of(fixture, config);
  EXPECT_OK(clattn_device_errors_create(fixture->context, fixture->queue, &errors));
  test_unbound(fixture, &model);
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  test_directions(fixture, &model, errors);
  test_trees(fixture, &model, errors);
  clattn_device_errors_destroy(errors);
  destroy_model(model);
  EXPECT_OK(clattn_step_build(fixture->step, fixture->queue, &decodes));
}
