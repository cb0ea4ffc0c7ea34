/* Specs and groups of KV caches. */
#include <math.h>

#include "expect.h"

static void test_layouts(void) {
  const char* layout = "none";
  EXPECT_OK(clattn_set_kv_cache_layout("LBHNC"));
  EXPECT_OK(clattn_get_kv_cache_layout(&layout));
  EXPECT(strcmp(layout, "HND") == 0);
  EXPECT_INVALID(clattn_set_kv_cache_layout("DNH"), "DNH");
  EXPECT_OK(clattn_set_kv_cache_layout(NULL));
  EXPECT_INVALID(clattn_get_kv_cache_layout(NULL), "layout is null");
}

static void test_arithmetic(const Fixture* fixture) {
  ClattnKVCacheSpec full = {.struct_size = sizeof full, .num_kv_heads = 2, .head_size = 64};
  ClattnKVCacheSpec window = full, merged = {.struct_size = sizeof merged};
  const ClattnKVCacheSpec *both[] = {&full, &window}, *missing[] = {NULL};
  uint64_t bytes = 0;
  window.sliding_window = 32;
  EXPECT_OK(clattn_kv_cache_spec_page_size_bytes(&full, &bytes));
  EXPECT(bytes == 2 * 16 * 2 * 64 * 2);
  EXPECT_OK(clattn_kv_cache_spec_max_memory_usage_bytes(&full, 33, 8, 0, &bytes));
  EXPECT(bytes == 3 * 2 * 16 * 2 * 64 * 2);
  EXPECT_OK(clattn_kv_cache_spec_merge(both, 2, &merged));
  EXPECT(merged.sliding_window == 32 && merged.block_size == 16 && merged.head_size == 64);
  EXPECT(strcmp(merged.kind, "full") == 0 && strcmp(merged.dtype, "f16") == 0);
  EXPECT_INVALID(clattn_kv_cache_spec_page_size_bytes(NULL, &bytes), "spec is null");
  EXPECT_INVALID(clattn_kv_cache_spec_page_size_bytes(&full, NULL), "size_bytes is null");
  EXPECT_INVALID(clattn_kv_cache_spec_max_memory_usage_bytes(NULL, 33, 8, 0, &bytes),
                 "spec is null");
  EXPECT_INVALID(clattn_kv_cache_spec_max_memory_usage_bytes(&full, 33, 8, 0, NULL),
                 "size_bytes is null");
  EXPECT_INVALID(clattn_kv_cache_spec_max_memory_usage_bytes(&full, -1, 8, 0, &bytes),
                 "max_model_len");
  EXPECT_INVALID(clattn_kv_cache_spec_merge(NULL, 2, &merged), "specs is null");
  EXPECT_INVALID(clattn_kv_cache_spec_merge(missing, 1, &merged), "specs: an element is null");
  EXPECT_INVALID(clattn_kv_cache_spec_merge(both, 0, &merged), "");
  EXPECT_INVALID(clattn_kv_cache_spec_merge(both, 2, NULL), "merged is null");
  window.head_size = 32;
  EXPECT_INVALID(clattn_kv_cache_spec_merge(both, 2, &merged), "");
  window.kind = "windowed";
  EXPECT_INVALID(clattn_kv_cache_spec_page_size_bytes(&window, &bytes),
                 "kind: 'windowed' is not one of full, sliding_window");
  window.kind = "full_attention";
  EXPECT_OK(clattn_kv_cache_spec_page_size_bytes(&window, &bytes));
  window.kind = "sliding_window";
  window.num_speculative_blocks = 1;
  EXPECT_INVALID(clattn_kv_cache_spec_page_size_bytes(&window, &bytes),
                 "num_speculative_blocks is 1, legal: 0");

  EXPECT_OK(clattn_layer_kv_cache_spec(fixture->layer, &merged));
  EXPECT(merged.num_kv_heads == 2 && strcmp(merged.dtype, "f32") == 0);
  EXPECT_INVALID(clattn_layer_kv_cache_spec(NULL, &merged), "layer is null");
  EXPECT_INVALID(clattn_layer_kv_cache_spec(fixture->layer, NULL), "spec is null");
}

/* Pages of two layers and of a state become equally large. */
static void test_states(const Fixture* fixture) {
  const int64_t shape[] = {3, 5}, no_shape[] = {0};
  ClattnStateTensor states[] = {{.shape = shape, .num_dims = 2}, {.dtype = "f16", .shape = shape}};
  ClattnKVCacheSpec small = {.struct_size = sizeof small}, large = small, mamba = small;
  ClattnKVCacheSpec *specs[] = {&small, &large, &mamba}, *missing[] = {NULL};
  ClattnStateView view = {.struct_size = sizeof view};
  ClattnBuffer* buffer = NULL;
  states[1].num_dims = 1;
  large.num_kv_heads = 2;
  mamba.kind = "mamba";
  mamba.states = states;
  mamba.num_states = 2;
  EXPECT_OK(clattn_unify_kv_cache_spec_page_size(specs, 3));
  EXPECT(small.block_size == 32 && large.block_size == 16);
  EXPECT(mamba.page_size_padded == 2 * 16 * 2 * 128 * 2);
  EXPECT_INVALID(clattn_unify_kv_cache_spec_page_size(NULL, 1), "specs is null");
  EXPECT_INVALID(clattn_unify_kv_cache_spec_page_size(missing, 1), "specs: an element is null");

  EXPECT_OK(clattn_buffer_create(fixture->context, 3 * mamba.page_size_padded, &buffer));
  EXPECT_OK(clattn_view_state_pages(buffer, &mamba, 1, &view));
  EXPECT(view.num_blocks == 3 && view.offset == 2 * 15);
  EXPECT(view.block_stride == (int64_t)mamba.page_size_padded / 2 && view.buffer != NULL);
  EXPECT_INVALID(clattn_view_state_pages(NULL, &mamba, 0, &view), "buffer is null");
  EXPECT_INVALID(clattn_view_state_pages(buffer, NULL, 0, &view), "spec is null");
  EXPECT_INVALID(clattn_view_state_pages(buffer, &mamba, 2, &view), "index is 2, legal: < 2");
  EXPECT_INVALID(clattn_view_state_pages(buffer, &mamba, 0, NULL), "view is null");
  states[0].shape = no_shape;
  EXPECT_INVALID(clattn_view_state_pages(buffer, &mamba, 0, &view), "shape");
  states[0].shape = NULL;
  EXPECT_INVALID(clattn_view_state_pages(buffer, &mamba, 0, &view), "shape is null");
  mamba.states = NULL;
  EXPECT_INVALID(clattn_view_state_pages(buffer, &mamba, 0, &view), "states is null");
  clattn_buffer_destroy(buffer);
}

/* A padded page is a view of the layer's cache in a larger page. */
static void test_view(const Fixture* fixture) {
  ClattnKVCacheSpec spec = {.struct_size = sizeof spec};
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnBuffer* buffer = NULL;
  ClattnCache* cache = NULL;
  EXPECT_OK(clattn_layer_kv_cache_spec(fixture->layer, &spec));
  spec.page_size_padded = 2 * 16 * 2 * 64 * 4 + 256;
  EXPECT_OK(clattn_buffer_create(fixture->context, 2 * spec.page_size_padded, &buffer));
  EXPECT_OK(clattn_cache_view(fixture->layer, buffer, &spec, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT(info.num_blocks == 2 && info.page_size_bytes == spec.page_size_padded);
  EXPECT(info.block_stride == (int64_t)spec.page_size_padded / 4);
  clattn_cache_destroy(cache);
  EXPECT_INVALID(clattn_cache_view(NULL, buffer, &spec, NULL, &cache), "layer is null");
  EXPECT_INVALID(clattn_cache_view(fixture->layer, NULL, &spec, NULL, &cache), "buffer is null");
  EXPECT_INVALID(clattn_cache_view(fixture->layer, buffer, NULL, NULL, &cache), "spec is null");
  EXPECT_INVALID(clattn_cache_view(fixture->layer, buffer, &spec, "X", &cache), "X");
  EXPECT_INVALID(clattn_cache_view(fixture->layer, buffer, &spec, NULL, NULL), "cache is null");
  clattn_buffer_destroy(buffer);
}

void test_specs(const Fixture* fixture) {
  test_layouts();
  test_arithmetic(fixture);
  test_states(fixture);
  test_view(fixture);
}

enum { kPageBytes = 2 * 16 * 2 * 64 * 4 };

/* The specs of single layers must keep the tokens that their group's spec says. */
static void refuse_layer_specs(const Fixture* fixture, const ClattnModel* model,
                               ClattnKVCacheConfig config) {
  ClattnKVCacheSpec large = *config.groups[0].spec;
  const ClattnKVCacheSpec *one[] = {&large}, *none[] = {NULL};
  ClattnCacheGroup group = config.groups[0];
  ClattnGroups* groups = NULL;
  config.groups = &group;
  config.num_groups = 1;
  group.layer_specs = none; /* its group's */
  EXPECT_OK(clattn_groups_create(fixture->context, model, &config, NULL, &groups));
  clattn_groups_destroy(groups);
  large.head_size = 128;
  group.layer_specs = one;
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, &config, NULL, &groups),
                 "keeps 16 tokens x 2 heads x 64 of f32, legal: its group's 16 x 2 x 128");
  large.block_size = 32;
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, &config, NULL, &groups),
                 "layer 'layers.0' has block_size 32, legal: spec's 16");
}

static void refuse_group_calls(const Fixture* fixture, const ClattnModel* model,
                               ClattnKVCacheConfig config, ClattnGroups* groups) {
  const ClattnQueue* const queue = fixture->queue;
  const ClattnStep* step = NULL;
  ClattnGroups* none = NULL;
  ClattnStateView view = {.struct_size = sizeof view};
  ClattnBatchInfo batch = decode_batch();
  const ClattnGroupPages pages[] = {{.block_table_stride = -1}};
  EXPECT_INVALID(clattn_groups_create(NULL, model, &config, NULL, &none), "context is null");
  EXPECT_INVALID(clattn_groups_create(fixture->context, NULL, &config, NULL, &none),
                 "model is null");
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, NULL, NULL, &none),
                 "config is null");
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, &config, NULL, NULL),
                 "groups is null");
  config.tensors = NULL;
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, &config, NULL, &none),
                 "config: tensors is null");
  config.num_tensors = 0;
  refuse_layer_specs(fixture, model, config);
  config.groups = NULL;
  EXPECT_INVALID(clattn_groups_create(fixture->context, model, &config, NULL, &none),
                 "config: groups is null");
  EXPECT_INVALID(clattn_groups_init_kv_cache(NULL, queue, NULL), "groups is null");
  EXPECT_INVALID(clattn_groups_init_kv_cache(groups, NULL, NULL), "queue is null");
  EXPECT_INVALID(clattn_groups_init_kv_cache(groups, queue, "X"), "X");
  EXPECT_INVALID(clattn_groups_state(NULL, "state", 0, &view), "groups is null");
  EXPECT_INVALID(clattn_groups_state(groups, NULL, 0, &view), "layer_name is null");
  EXPECT_INVALID(clattn_groups_state(groups, "layers.0", 0, &view), "layers.0 has no state");
  EXPECT_INVALID(clattn_groups_state(groups, "state", 1, &view), "index is 1, legal: < 1");
  EXPECT_INVALID(clattn_groups_state(groups, "state", 0, NULL), "view is null");
  EXPECT_INVALID(clattn_groups_build(NULL, queue, &batch, NULL, 0), "groups is null");
  EXPECT_INVALID(clattn_groups_build(groups, NULL, &batch, NULL, 0), "queue is null");
  EXPECT_INVALID(clattn_groups_build(groups, queue, NULL, NULL, 0), "batch is null");
  EXPECT_INVALID(clattn_groups_build(groups, queue, &batch, NULL, 2), "pages is null");
  EXPECT_INVALID(clattn_groups_build(groups, queue, &batch, pages, 1), "block_table_stride is -1");
  EXPECT_INVALID(clattn_groups_build(groups, queue, &batch, NULL, 0), "pages");
  EXPECT_INVALID(clattn_groups_step(NULL, "layers.0", &step), "groups is null");
  EXPECT_INVALID(clattn_groups_step(groups, NULL, &step), "layer_name is null");
  EXPECT_INVALID(clattn_groups_step(groups, "layers.9", &step), "layers.9 has no step");
  EXPECT_INVALID(clattn_groups_step(groups, "layers.0", NULL), "step is null");
  batch.fast_build = 1;
  EXPECT_INVALID(clattn_groups_build(groups, queue, &batch, NULL, 0), "fast_build 1");
  clattn_groups_destroy(NULL);
}

/* A layer of all keys and one of a window of 8, in groups of their own, and a state. */
void test_groups(const Fixture* fixture) {
  const int64_t shape[] = {4};
  const ClattnStateTensor state = {.shape = shape, .num_dims = 1};
  const char* const names[] = {"layers.0", "layers.1", "state"};
  ClattnLayer* layers[2] = {NULL, NULL};
  ClattnKVCacheSpec specs[3] = {{0}, {0}, {0}};
  ClattnCacheTensor tensors[3] = {{0}, {0}, {0}};
  ClattnCacheGroup groups_of[3] = {{0}, {0}, {0}};
  const ClattnKVCacheSpec* each_spec[3] = {NULL, NULL, NULL};
  ClattnKVCacheConfig config = {.struct_size = sizeof config};
  ClattnModel* model = NULL;
  ClattnGroups* groups = NULL;
  const int32_t pages[] = {3, 0, 1, 0};
  const ClattnGroupPages each[] = {{.block_table = pages, .block_table_stride = 2},
                                   {.block_table = pages, .block_table_stride = 2},
                                   {0}};
  ClattnStateView view = {.struct_size = sizeof view};
  ClattnTensors call = {.struct_size = sizeof call};
  const ClattnBatchInfo batch = decode_batch();
  float values[2 * 8 * 64], lse[2 * 8];
  EXPECT_OK(clattn_model_create(&model));
  for (int i = 0; i < 3; ++i) {
    specs[i].struct_size = sizeof specs[i];
    tensors[i] = (ClattnCacheTensor){4 * kPageBytes, &names[i], 1};
    each_spec[i] = &specs[i];
    groups_of[i] = (ClattnCacheGroup){&names[i], 1, &specs[i], i == 0 ? NULL : &each_spec[i]};
    if (i == 2) break;
    ClattnLayerConfig layer = layer_config();
    layer.name = names[i];
    layer.sliding_window = 8 * i;
    EXPECT_OK(clattn_layer_create(fixture->context, model, &layer, &layers[i]));
    EXPECT_OK(clattn_layer_kv_cache_spec(layers[i], &specs[i]));
  }
  EXPECT(strcmp(specs[1].kind, "sliding_window") == 0 && specs[1].sliding_window == 8);
  specs[2].kind = "mamba";
  specs[2].states = &state;
  specs[2].num_states = 1;
  specs[2].page_size_padded = kPageBytes;
  config.num_blocks = 4;
  config.tensors = tensors;
  config.groups = groups_of;
  config.num_tensors = config.num_groups = 3;
  EXPECT_OK(clattn_groups_create(fixture->context, model, &config, NULL, &groups));
  EXPECT_OK(clattn_groups_init_kv_cache(groups, fixture->queue, "NHD"));
  EXPECT_OK(clattn_groups_state(groups, "state", 0, &view));
  EXPECT(view.num_blocks == 4 && view.block_stride == kPageBytes / 4);
  EXPECT_OK(clattn_groups_build(groups, fixture->queue, &batch, each, 3));

  for (int i = 0; i < 2 * 8 * 64; ++i) values[i] = 1;
  call.query.buffer = call.key.buffer = call.value.buffer =
      buffer_with(fixture, values, sizeof values);
  call.output.buffer = buffer_with(fixture, values, sizeof values);
  call.lse = buffer_with(fixture, lse, sizeof lse);
  for (int i = 0; i < 2; ++i) {
    const ClattnStep* step = NULL;
    EXPECT_OK(clattn_groups_step(groups, names[i], &step));
    EXPECT_OK(clattn_layer_forward(layers[i], fixture->queue, &call, step));
    EXPECT_OK(clattn_buffer_read(call.lse, fixture->queue, 0, lse, sizeof lse));
    EXPECT(fabs(lse[15] - log(exp(8) + (i == 0 ? 19 : 7))) < 1e-5);
  }
  refuse_group_calls(fixture, model, config, groups);
  clattn_groups_destroy(groups);
  clattn_layer_destroy(layers[0]);
  clattn_layer_destroy(layers[1]);
  clattn_model_destroy(model);
  clattn_buffer_destroy((ClattnBuffer*)call.query.buffer);
  clattn_buffer_destroy((ClattnBuffer*)call.output.buffer);
  clattn_buffer_destroy((ClattnBuffer*)call.lse);
}
