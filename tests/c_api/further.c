/* More about layers and steps. */
#include <math.h>

#include "expect.h"

/* An int8 layer whose scales the application takes before the first batch. */
static void test_scales(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnBuffer *scales = NULL, *rows = NULL;
  float prob_scale = 0, values[8 * 64], k_v_q[3];
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  ClattnKVScales loaded = {.struct_size = sizeof loaded, .k_scale = 0.5F, .fnuz = 1};
  EXPECT_OK(clattn_layer_scales(fixture->layer, &scales, &prob_scale));
  EXPECT(scales == NULL && prob_scale == 1);
  EXPECT_INVALID(clattn_layer_scales(NULL, &scales, &prob_scale), "layer is null");
  EXPECT_INVALID(clattn_layer_scales(fixture->layer, NULL, &prob_scale), "scales is null");
  EXPECT_INVALID(clattn_layer_scales(fixture->layer, &scales, NULL), "prob_scale is null");

  config.kv_cache_dtype = "int8";
  config.calculate_kv_scales = 1;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  for (int i = 0; i < 8 * 64; ++i) values[i] = 100;
  rows = buffer_with(fixture, values, sizeof values);
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = rows;
  EXPECT_OK(clattn_layer_calc_kv_scales(layer, fixture->queue, &tensors, 1, 0));
  EXPECT_OK(clattn_layer_scales(layer, &scales, &prob_scale));
  EXPECT_OK(clattn_buffer_read(scales, fixture->queue, 0, k_v_q, sizeof k_v_q));
  /* 100 / 200 would make K's 100 overflow int8. */
  EXPECT(fabsf(k_v_q[0] - 100.0F / 127) < 1e-6F && k_v_q[1] == 1 && k_v_q[2] == 0.5F);
  EXPECT_INVALID(clattn_layer_calc_kv_scales(NULL, fixture->queue, &tensors, 1, 0),
                 "layer is null");
  EXPECT_INVALID(clattn_layer_calc_kv_scales(layer, NULL, &tensors, 1, 0), "queue is null");
  EXPECT_INVALID(clattn_layer_calc_kv_scales(layer, fixture->queue, NULL, 1, 0), "tensors is null");
  clattn_buffer_destroy(scales);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);

  config.kv_cache_dtype = "fp8_e4m3";
  config.calculate_kv_scales = 0;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_layer_load_kv_scales(layer, &loaded));
  EXPECT_OK(clattn_layer_scales(layer, &scales, &prob_scale));
  EXPECT_OK(clattn_buffer_read(scales, fixture->queue, 0, k_v_q, sizeof k_v_q));
  EXPECT(k_v_q[0] == 1 && k_v_q[1] == 1); /* doubled, as bytes of e4m3fnuz */
  clattn_buffer_destroy(scales);
  clattn_buffer_destroy(rows);
  clattn_layer_destroy(layer);
}

/* A layer over another one's cache takes none of its own, and has no spec. */
static void test_sharing_layer(const Fixture* fixture) {
  ClattnModel* model = NULL;
  ClattnLayer *target = NULL, *sharing = NULL;
  ClattnKVCacheSpec spec = {.struct_size = sizeof spec};
  ClattnLayerConfig config = layer_config();
  EXPECT_OK(clattn_model_create(&model));
  config.name = "layers.0";
  EXPECT_OK(clattn_layer_create(fixture->context, model, &config, &target));
  config.name = "layers.1";
  config.kv_sharing_target_layer_name = "layers.0";
  EXPECT_OK(clattn_layer_create(fixture->context, model, &config, &sharing));
  EXPECT_OK(clattn_layer_check_cache(target, fixture->cache));
  EXPECT_INVALID(clattn_layer_check_cache(sharing, fixture->cache), "layers.0");
  EXPECT_INVALID(clattn_layer_kv_cache_spec(sharing, &spec),
                 "layer: it shares the cache of another layer");
  clattn_layer_destroy(sharing);
  clattn_layer_destroy(target);
  clattn_model_destroy(model);
}

static void test_caches_of_layers(const Fixture* fixture) {
  ClattnLayer* layer = NULL;
  ClattnCache *cache = NULL, *other = NULL;
  ClattnCacheInfo info = {.struct_size = sizeof info}, bound = {.struct_size = sizeof bound};
  ClattnLayerConfig config = layer_config();
  int32_t index = -1;
  EXPECT_OK(clattn_layer_cache(fixture->layer, &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT_OK(clattn_cache_info(fixture->cache, &bound));
  EXPECT(info.buffer == bound.buffer && info.page_size_bytes == bound.page_size_bytes);
  clattn_cache_destroy(cache);
  config.head_size = 32;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_INVALID(clattn_layer_cache(layer, &cache), "layer: it has no cache");
  EXPECT_INVALID(clattn_layer_cache(NULL, &cache), "layer is null");
  EXPECT_INVALID(clattn_layer_cache(fixture->layer, NULL), "cache is null");
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 1, NULL, &other));
  EXPECT_OK(clattn_layer_check_cache(layer, other));
  EXPECT_INVALID(clattn_layer_check_cache(NULL, other), "layer is null");
  EXPECT_INVALID(clattn_layer_check_cache(layer, NULL), "cache is null");
  clattn_cache_destroy(other);
  clattn_layer_destroy(layer);

  EXPECT_OK(clattn_extract_layer_index("model.layers.3.self_attn.attn", &index));
  EXPECT(index == 3);
  EXPECT_INVALID(clattn_extract_layer_index("attn", &index), "attn");
  EXPECT_INVALID(clattn_extract_layer_index(NULL, &index), "layer_name is null");
  EXPECT_INVALID(clattn_extract_layer_index("layers.3", NULL), "index is null");
}

/* Two decodes that see their own token alone by a mask; the result goes out in fp8, too. */
static void test_mask_and_fp8(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnStep* step = NULL;
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  uint8_t mask[2 * 20] = {1}, fp8[2 * 8 * 64] = {0};
  float values[2 * 8 * 64];
  const float scale = 0.5F;
  const ClattnBatchInfo batch = decode_batch();
  mask[20 + 19] = 1;
  for (int i = 0; i < 2 * 8 * 64; ++i) values[i] = 1;
  config.custom_mask = config.output_fp8 = 1;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_OK(clattn_step_create(layer, NULL, &step));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  ClattnBuffer* const rows = buffer_with(fixture, values, sizeof values);
  ClattnBuffer* const output = buffer_with(fixture, values, sizeof values);
  ClattnBuffer* const masked = buffer_with(fixture, mask, sizeof mask);
  ClattnBuffer* const bytes = buffer_with(fixture, fp8, sizeof fp8);
  ClattnBuffer* const scales = buffer_with(fixture, &scale, sizeof scale);
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = rows;
  tensors.output.buffer = output;
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, &tensors, step), "custom_mask");
  tensors.custom_mask = masked;
  tensors.custom_mask_stride = 20;
  EXPECT_INVALID(clattn_layer_forward(layer, fixture->queue, &tensors, step), "output_fp8");
  tensors.output_fp8 = bytes;
  tensors.output_scale = scales;
  EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
  EXPECT_OK(clattn_buffer_read(output, fixture->queue, 0, values, sizeof values));
  EXPECT_OK(clattn_buffer_read(bytes, fixture->queue, 0, fp8, sizeof fp8));
  EXPECT(values[0] == 1 && values[2 * 8 * 64 - 1] == 1); /* 20 keys, 19 of them hidden */
  EXPECT(fp8[0] == 0x40 && fp8[2 * 8 * 64 - 1] == 0x40); /* 1 / 0.5 */
  clattn_buffer_destroy(rows);
  clattn_buffer_destroy(output);
  clattn_buffer_destroy(masked);
  clattn_buffer_destroy(bytes);
  clattn_buffer_destroy(scales);
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
}

/* A second group takes the plan of the first over, with pages of its own. */
static void test_block_tables(const Fixture* fixture) {
  ClattnStep *step = NULL, *empty = NULL;
  ClattnBuffer* slots = NULL;
  const int32_t pages[] = {1, 0, 0, 2};
  int64_t stored[2];
  size_t offset_bytes = 0;
  const ClattnBatchInfo batch = decode_batch();
  ClattnGroupPages group = {.block_table = pages, .block_table_stride = 2};
  EXPECT_OK(clattn_step_create(fixture->layer, NULL, &step));
  EXPECT_OK(clattn_step_create(fixture->layer, NULL, &empty));
  EXPECT_OK(clattn_step_build(fixture->step, fixture->queue, &batch));
  EXPECT_OK(clattn_step_update_block_table(step, fixture->queue, fixture->step, 2, &group));
  EXPECT_OK(clattn_step_slot_mapping(step, &slots, &offset_bytes));
  EXPECT_OK(clattn_buffer_read(slots, fixture->queue, offset_bytes, stored, sizeof stored));
  EXPECT(stored[0] == 16 && stored[1] == 2 * 16 + 3); /* tokens 0 and 19 */
  clattn_buffer_destroy(slots);
  EXPECT_INVALID(clattn_step_slot_mapping(NULL, &slots, &offset_bytes), "step is null");
  EXPECT_INVALID(clattn_step_slot_mapping(empty, &slots, &offset_bytes), "it has no batch");
  EXPECT_INVALID(clattn_step_slot_mapping(step, NULL, &offset_bytes), "slots is null");
  EXPECT_INVALID(clattn_step_slot_mapping(step, &slots, NULL), "offset_bytes is null");
  EXPECT_INVALID(clattn_step_update_block_table(NULL, fixture->queue, fixture->step, 2, &group),
                 "step is null");
  EXPECT_INVALID(clattn_step_update_block_table(step, NULL, fixture->step, 2, &group),
                 "queue is null");
  EXPECT_INVALID(clattn_step_update_block_table(step, fixture->queue, NULL, 2, &group),
                 "planned is null");
  EXPECT_INVALID(clattn_step_update_block_table(step, fixture->queue, empty, 2, &group),
                 "it has no batch");
  EXPECT_INVALID(clattn_step_update_block_table(step, fixture->queue, fixture->step, 2, NULL),
                 "pages is null");
  EXPECT_INVALID(clattn_step_update_block_table(step, fixture->queue, fixture->step, -1, &group),
                 "num_reqs is -1");
  group.block_table_stride = -1;
  EXPECT_INVALID(clattn_step_update_block_table(step, fixture->queue, fixture->step, 2, &group),
                 "block_table_stride is -1");
  clattn_step_destroy(empty);
  clattn_step_destroy(step);
}

static void test_plans(const Fixture* fixture) {
  ClattnStepOptions options = {.struct_size = sizeof options};
  ClattnWorkspace* workspace = NULL;
  ClattnStep* step = NULL;
  ClattnBatchInfo batch = decode_batch();
  ClattnStepInfo info = {.struct_size = sizeof info};
  const int32_t computed[] = {0, 19}, wrong[] = {0, 18};
  uint64_t bytes = 1;
  char text[512];
  options.num_splits = 2;
  EXPECT_OK(clattn_workspace_create(&workspace));
  options.workspace = workspace;
  EXPECT_OK(clattn_step_create(fixture->layer, &options, &step));
  EXPECT_OK(clattn_step_workspace_bytes(step, &batch, &bytes));
  EXPECT(bytes > 0); /* 20 keys of 8 heads in two splits */
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_step_planned_launches(step, text, sizeof text, NULL));
  EXPECT(strstr(text, "decode") != NULL && strstr(text, "2 splits of 1 tiles") != NULL);
  EXPECT_OK(clattn_step_set_workspace(step, workspace));
  batch.num_computed_tokens = computed;
  batch.fast_build = 1;
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  batch.num_computed_tokens = wrong;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "num_computed_tokens");
  batch = decode_batch();
  batch.num_actual_tokens = 9; /* rows behind the requests' 2 tokens: padding */
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_step_info(step, &info));
  EXPECT(info.num_actual_tokens == 2 && info.num_decode_tokens == 2);
  batch.num_actual_tokens = 1;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "num_actual_tokens");
  batch = decode_batch();
  EXPECT_INVALID(clattn_step_planned_launches(step, text, sizeof text, NULL), "it has no batch");
  EXPECT_INVALID(clattn_step_planned_launches(NULL, text, sizeof text, NULL), "step is null");
  EXPECT_INVALID(clattn_step_workspace_bytes(NULL, &batch, &bytes), "step is null");
  EXPECT_INVALID(clattn_step_workspace_bytes(step, NULL, &bytes), "batch is null");
  EXPECT_INVALID(clattn_step_workspace_bytes(step, &batch, NULL), "size_bytes is null");
  EXPECT_INVALID(clattn_step_set_workspace(NULL, workspace), "step is null");
  EXPECT_INVALID(clattn_step_set_workspace(step, NULL), "workspace is null");
  EXPECT_INVALID(clattn_workspace_create(NULL), "workspace is null");
  clattn_workspace_destroy(workspace);
  clattn_workspace_destroy(NULL);
  clattn_step_destroy(step);
}

void test_layers_further(const Fixture* fixture) {
  test_scales(fixture);
  test_caches_of_layers(fixture);
  test_sharing_layer(fixture);
  test_mask_and_fp8(fixture);
  test_block_tables(fixture);
  test_plans(fixture);
}
