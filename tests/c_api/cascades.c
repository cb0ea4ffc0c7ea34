/* Cascades: the same results as by clattn_layer_forward(). */
#include <math.h>

#include "model.h"

/* The largest difference of two results of two tokens. */
static float differ(const float* a, const float* b) {
  float worst = 0;
  for (int i = 0; i < 2 * (kRowFloats + 8); ++i) worst = fmaxf(worst, fabsf(a[i] - b[i]));
  return worst;
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
  EXPECT(differ(plain, cascaded) < 1e-5F);
  refuse_cascade_calls(fixture, &model, cascade, layer);
  clattn_cascade_destroy(cascade);
  clattn_cascade_layer_destroy(layer);
  destroy_model(model);
}

static void refuse_level_calls(const Fixture* fixture, const Model* model,
                               ClattnLevelCascade* cascade, const ClattnCascadeLayer* layer,
                               ClattnCascadeLevel level) {
  const ClattnQueue* const queue = fixture->queue;
  ClattnLevelCascade* none = NULL;
  ClattnTensors tensors = model->tensors;
  EXPECT_INVALID(clattn_level_cascade_create(NULL, 2, NULL, &none), "layer is null");
  EXPECT_INVALID(clattn_level_cascade_create(model->layer, 2, NULL, NULL), "cascade is null");
  EXPECT_INVALID(clattn_level_cascade_create(model->layer, 0, NULL, &none), "num_levels");
  EXPECT_INVALID(clattn_level_cascade_run(NULL, queue, layer, &tensors), "cascade is null");
  EXPECT_INVALID(clattn_level_cascade_run(cascade, NULL, layer, &tensors), "queue is null");
  EXPECT_INVALID(clattn_level_cascade_run(cascade, queue, NULL, &tensors), "cascade_layer is null");
  EXPECT_INVALID(clattn_level_cascade_run(cascade, queue, layer, NULL), "tensors is null");
  tensors.num_rows = 3;
  EXPECT_INVALID(clattn_level_cascade_run(cascade, queue, layer, &tensors),
                 "tensors: num_rows is set");
  EXPECT_INVALID(clattn_level_cascade_plan(NULL, queue, &level, 1), "cascade is null");
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, NULL, &level, 1), "queue is null");
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, NULL, 1), "levels is null");
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, &level, 1), "level");
  level.paged_kv_last_page_len = NULL;
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, &level, 1),
                 "levels: paged_kv_last_page_len is null");
  level.paged_kv_indices = NULL;
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, &level, 1),
                 "levels: paged_kv_indices is null");
  level.paged_kv_indptr = NULL;
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, &level, 1),
                 "levels: paged_kv_indptr is null");
  level.num_seqs = -1;
  EXPECT_INVALID(clattn_level_cascade_plan(cascade, queue, &level, 1), "num_seqs is -1");
  clattn_level_cascade_destroy(NULL);
}

static void test_heuristic(const Model* model) {
  const int32_t lens[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  int32_t use = -1;
  ClattnCascadeQuery query = {.struct_size = sizeof query, .query_lens = lens, .num_reqs = 8};
  ClattnStepOptions options = {.struct_size = sizeof options, .disable_cascade_attn = 1};
  ClattnStep* step = NULL;
  query.common_prefix_len = 4096;
  query.num_query_heads = query.num_kv_heads = 8;
  query.num_sms = 4;
  EXPECT_OK(clattn_use_cascade_attention(&query, &use));
  EXPECT(use == 1);
  EXPECT_OK(clattn_step_use_cascade(model->step, &query, &use));
  EXPECT(use == 1);
  EXPECT_OK(clattn_step_create(model->layer, &options, &step));
  EXPECT_OK(clattn_step_use_cascade(step, &query, &use));
  EXPECT(use == 0);
  clattn_step_destroy(step);
  EXPECT_INVALID(clattn_use_cascade_attention(NULL, &use), "query is null");
  EXPECT_INVALID(clattn_use_cascade_attention(&query, NULL), "use is null");
  EXPECT_INVALID(clattn_step_use_cascade(NULL, &query, &use), "step is null");
  EXPECT_INVALID(clattn_step_use_cascade(model->step, NULL, &use), "query is null");
  EXPECT_INVALID(clattn_step_use_cascade(model->step, &query, NULL), "use is null");
  query.use_alibi = 1;
  EXPECT_OK(clattn_use_cascade_attention(&query, &use));
  EXPECT(use == 0);
  query.query_lens = NULL;
  EXPECT_INVALID(clattn_use_cascade_attention(&query, &use), "query_lens is null");
}

/* The shared page as a level of one sequence, then each request's own page. */
void test_level_cascades(const Fixture* fixture) {
  Model model = make_model(fixture);
  const int32_t all[] = {0, 2}, each[] = {0, 1, 2}, one_page[] = {0, 1};
  const int32_t shared = 2, full = 16, own[] = {1, 3}, last[] = {4, 16};
  const ClattnCascadeLevel levels[] = {{all, one_page, &shared, &full, 1, 0},
                                       {each, each, own, last, 2, 1}};
  ClattnLevelCascade* cascade = NULL;
  ClattnCascadeLayer* layer = NULL;
  ClattnBatchInfo batch = shared_batch();
  float plain[2 * (kRowFloats + 8)], cascaded[2 * (kRowFloats + 8)];
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  batch.common_prefix_len = 0;
  attend_eagerly(fixture, &model, &batch, plain, 2); /* stores keys and values */
  EXPECT_OK(clattn_cascade_layer_create(model.layer, &layer));
  EXPECT_OK(clattn_level_cascade_create(model.layer, 2, NULL, &cascade));
  EXPECT_OK(clattn_level_cascade_plan(cascade, fixture->queue, levels, 2));
  EXPECT_OK(clattn_level_cascade_run(cascade, fixture->queue, layer, &model.tensors));
  take(fixture, &model, cascaded, 2);
  EXPECT(differ(plain, cascaded) < 1e-5F);
  refuse_level_calls(fixture, &model, cascade, layer, levels[0]);
  test_heuristic(&model);
  clattn_level_cascade_destroy(cascade);
  clattn_cascade_layer_destroy(layer);
  destroy_model(model);
}
