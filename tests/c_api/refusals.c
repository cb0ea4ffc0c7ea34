/* A call that is refused leaves no trace: not in the cache, the scales or the output. */
#include "expect.h"

enum { kRows = 4, kRowFloats = 8 * 64 };

static ClattnBuffer* filled(const Fixture* fixture, float value, size_t count) {
  float values[kRows * kRowFloats];
  ClattnBuffer* buffer = NULL;
  for (size_t i = 0; i < count; ++i) values[i] = value;
  EXPECT_OK(clattn_buffer_create(fixture->context, count * sizeof(float), &buffer));
  EXPECT_OK(clattn_buffer_write(buffer, fixture->queue, 0, values, count * sizeof(float)));
  return buffer;
}

/* A layer over a cache of its own, a step of two decodes and their tensors. */
typedef struct Model {
  ClattnLayer* layer;
  ClattnCache* cache;
  ClattnStep* step;
  ClattnBuffer *ones, *large, *output, *small;
  ClattnTensors tensors; /* keys and values of 1 */
} Model;

static Model make_model(const Fixture* fixture, const char* cache_dtype) {
  Model model = {0};
  ClattnLayerConfig config = layer_config();
  const ClattnBatchInfo batch = decode_batch();
  config.kv_cache_dtype = cache_dtype;
  config.calculate_kv_scales = 1;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &model.layer));
  EXPECT_OK(clattn_cache_create(model.layer, fixture->queue, 4, NULL, &model.cache));
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  EXPECT_OK(clattn_step_create(model.layer, NULL, &model.step));
  EXPECT_OK(clattn_step_build(model.step, fixture->queue, &batch));
  model.ones = filled(fixture, 1, kRows * kRowFloats);
  model.large = filled(fixture, 1000, kRows * kRowFloats);
  model.output = filled(fixture, 9, kRows * kRowFloats);
  model.small = filled(fixture, 0, 8);
  model.tensors.struct_size = sizeof model.tensors;
  model.tensors.query.buffer = model.tensors.key.buffer = model.ones;
  model.tensors.value.buffer = model.ones;
  model.tensors.output.buffer = model.output;
  model.tensors.num_rows = kRows; /* two of padding */
  return model;
}

static void destroy_model(Model model) {
  clattn_step_destroy(model.step);
  clattn_cache_destroy(model.cache);
  clattn_layer_destroy(model.layer);
  clattn_buffer_destroy(model.ones);
  clattn_buffer_destroy(model.large);
  clattn_buffer_destroy(model.output);
  clattn_buffer_destroy(model.small);
}

/* Calls with one illegal tensor each, all with keys and values of 1000. */
static void refuse_all(const Fixture* fixture, const Model* model) {
  ClattnTensors wrong[6];
  const char* const texts[] = {"custom_mask", "query", "lse", "num_rows is 1", "value", "output"};
  for (int i = 0; i < 6; ++i) {
    wrong[i] = model->tensors;
    wrong[i].key.buffer = wrong[i].value.buffer = model->large;
  }
  wrong[0].custom_mask = model->ones;
  wrong[1].query.buffer = model->small;
  wrong[2].lse = model->small; /* 8 of 16 elements */
  wrong[3].num_rows = 1;
  wrong[4].value.buffer = model->small;
  wrong[5].num_rows = kRows + 1; /* more than the buffer has */
  for (int i = 0; i < 6; ++i) {
    EXPECT_INVALID(clattn_layer_forward(model->layer, fixture->queue, &wrong[i], model->step),
                   texts[i]);
  }
}

static void test_nothing_is_stored(const Fixture* fixture) {
  Model model = make_model(fixture, "f32");
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnBuffer* memory = NULL;
  float stored[4 * 2 * 2 * 16 * 64], rows[kRows * kRowFloats];
  int touched = 0;
  refuse_all(fixture, &model);
  EXPECT_OK(clattn_cache_info(model.cache, &info));
  EXPECT_OK(clattn_buffer_adopt(info.buffer, &memory));
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue, 0, stored, sizeof stored));
  EXPECT_OK(clattn_buffer_read(model.output, fixture->queue, 0, rows, sizeof rows));
  for (size_t i = 0; i < sizeof stored / sizeof *stored; ++i) touched += stored[i] != 0;
  for (int i = 0; i < kRows * kRowFloats; ++i) touched += rows[i] != 9;
  EXPECT(touched == 0);
  EXPECT_OK(clattn_layer_forward(model.layer, fixture->queue, &model.tensors, model.step));
  EXPECT_OK(clattn_buffer_read(model.output, fixture->queue, 0, rows, sizeof rows));
  EXPECT(rows[0] == 1 && rows[2 * kRowFloats] == 0);
  clattn_buffer_destroy(memory);
  destroy_model(model);
}

/* The scales are those of the first batch that is attended: 1000 would round 1 to 0. */
static void test_scales_are_not_used_up(const Fixture* fixture) {
  Model model = make_model(fixture, "int8");
  float row[kRowFloats];
  refuse_all(fixture, &model);
  EXPECT_OK(clattn_layer_forward(model.layer, fixture->queue, &model.tensors, model.step));
  EXPECT_OK(clattn_buffer_read(model.output, fixture->queue, 0, row, sizeof row));
  EXPECT(row[0] > 0.99F && row[0] < 1.01F);
  destroy_model(model);
}

void test_refusals(const Fixture* fixture) {
  test_nothing_is_stored(fixture);
  test_scales_are_not_used_up(fixture);
}
