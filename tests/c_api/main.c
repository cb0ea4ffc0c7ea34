/* The C API, called from C99: what each function does, and what it refuses, with which text. */
#include "expect.h"

int failures;

ClattnLayerConfig layer_config(void) {
  ClattnLayerConfig config = {.struct_size = sizeof config};
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.dtype = "f32";
  return config;
}

ClattnBatchInfo decode_batch(void) {
  static const int32_t starts[] = {0, 1, 2}, seq_lens[] = {1, 20}, pages[] = {3, 0, 1, 0};
  ClattnBatchInfo batch = {.struct_size = sizeof batch};
  batch.num_reqs = 2;
  batch.query_start_loc = starts;
  batch.seq_lens = seq_lens;
  batch.block_table = pages;
  batch.block_table_stride = 2;
  return batch;
}

int main(void) {
  Fixture fixture;
  const ClattnLayerConfig config = layer_config();
  const ClattnBatchInfo batch = decode_batch();
  EXPECT_OK(clattn_context_create(NULL, &fixture.context));
  EXPECT_OK(clattn_queue_create(fixture.context, 1, &fixture.queue));
  EXPECT_OK(clattn_buffer_create(fixture.context, 8192, &fixture.buffer));
  EXPECT_OK(clattn_layer_create(fixture.context, NULL, &config, &fixture.layer));
  if (failures != 0) return 1;
  EXPECT_OK(clattn_cache_create(fixture.layer, fixture.queue, 4, NULL, &fixture.cache));
  EXPECT_OK(clattn_layer_bind_cache(fixture.layer, fixture.cache));
  EXPECT_OK(clattn_step_create(fixture.layer, NULL, &fixture.step));
  EXPECT_OK(clattn_step_build(fixture.step, fixture.queue, &batch));

  test_library();
  test_devices_and_queues(&fixture);
  test_buffers_and_events(&fixture);
  test_layers(&fixture);
  test_caches(&fixture);
  test_steps(&fixture);
  test_forward(&fixture);
  test_lists(&fixture);
  test_device_lists(&fixture);
  test_refusals(&fixture);
  test_sessions(&fixture);
  test_graphs(&fixture);
  test_cascades(&fixture);
  test_device_memory(&fixture);
  test_operations(&fixture);
  test_recurrent(&fixture);
  test_prepare_qkv(&fixture);
  test_latent_caches(&fixture);
  test_lengths_on_the_device(&fixture);
  test_metadata();
  test_block_pool();
  test_layers_further(&fixture);
  test_specs(&fixture);
  test_groups(&fixture);
  test_tuning(&fixture);
  test_attention_functions(&fixture);
  test_level_cascades(&fixture);

  /* Handles keep alive what they need: the order does not matter. */
  clattn_context_destroy(fixture.context);
  clattn_cache_destroy(fixture.cache);
  clattn_layer_destroy(fixture.layer);
  EXPECT_OK(clattn_step_build(fixture.step, fixture.queue, &batch));
  EXPECT_OK(clattn_queue_finish(fixture.queue));
  clattn_step_destroy(fixture.step);
  clattn_buffer_destroy(fixture.buffer);
  clattn_queue_destroy(fixture.queue);
  if (failures == 0) puts("c_api: all passed");
  return failures == 0 ? 0 : 1;
}
