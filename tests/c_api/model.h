#ifndef CLATTN_TESTS_C_API_MODEL_H
#define CLATTN_TESTS_C_API_MODEL_H

/* A layer whose results are compared: eager steps, recorded ones and cascades. */
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

static inline ClattnBuffer* random_buffer(const Fixture* fixture, size_t count) {
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

static inline Model make_model_of(const Fixture* fixture, ClattnLayerConfig config) {
  Model model = {0};
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

static inline Model make_model(const Fixture* fixture) {
  return make_model_of(fixture, layer_config());
}

static inline void destroy_model(Model model) {
  clattn_step_destroy(model.step);
  clattn_cache_destroy(model.cache);
  clattn_layer_destroy(model.layer);
  clattn_buffer_destroy(model.memory);
  clattn_buffer_destroy(model.input);
  clattn_buffer_destroy(model.output);
  clattn_buffer_destroy(model.lse);
}

/* The rows and LSE of the last step, whose buffers are then overwritten. */
static inline void take(const Fixture* fixture, const Model* model, float* rows, size_t count) {
  static const float gone[kTokens * kRowFloats];
  const size_t row_bytes = kRowFloats * sizeof *rows, lse_bytes = count * 8 * sizeof *rows;
  EXPECT_OK(clattn_buffer_read(model->output, fixture->queue, 0, rows, count * row_bytes));
  EXPECT_OK(
      clattn_buffer_read(model->lse, fixture->queue, 0, rows + count * kRowFloats, lse_bytes));
  EXPECT_OK(clattn_buffer_write(model->output, fixture->queue, 0, gone, sizeof gone));
  EXPECT_OK(clattn_buffer_write(model->lse, fixture->queue, 0, gone, lse_bytes));
}

static inline void attend_eagerly(const Fixture* fixture, const Model* model,
                                  const ClattnBatchInfo* batch, float* rows, size_t count) {
  EXPECT_OK(clattn_step_build(model->step, fixture->queue, batch));
  EXPECT_OK(clattn_layer_forward(model->layer, fixture->queue, &model->tensors, model->step));
  take(fixture, model, rows, count);
}

#endif
