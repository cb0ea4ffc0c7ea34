/* Layers, and the caches that they attend to. */
#include <stdlib.h>

#include "expect.h"

static void test_explain(const Fixture* fixture) {
  char small[8] = "xxxxxxx";
  size_t size = 0;
  EXPECT_OK(clattn_layer_explain(fixture->layer, NULL, 0, &size));
  EXPECT(size > 100);
  char* text = malloc(size);
  EXPECT_OK(clattn_layer_explain(fixture->layer, text, size, NULL));
  EXPECT(strlen(text) == size - 1 && strstr(text, "decode") != NULL);
  EXPECT_OK(clattn_layer_explain(fixture->layer, small, sizeof small, &size));
  EXPECT(strlen(small) == 7 && strncmp(small, text, 7) == 0 && size == strlen(text) + 1);
  free(text);
  EXPECT_INVALID(clattn_layer_explain(NULL, small, sizeof small, NULL), "layer is null");
  EXPECT_INVALID(clattn_layer_explain(fixture->layer, NULL, 8, NULL), "a capacity of 8");
}

/* Of a struct from a later version, what this one does not know must be zero. */
static void test_struct_sizes(const Fixture* fixture) {
  struct {
    ClattnLayerConfig config;
    int64_t later;
  } grown = {.config = layer_config()};
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  grown.config.struct_size = sizeof grown;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &grown.config, &layer));
  clattn_layer_destroy(layer);
  grown.later = 1;
  EXPECT_UNSUPPORTED(clattn_layer_create(fixture->context, NULL, &grown.config, &layer),
                     "config: fields past byte");
  config.struct_size = 0;
  EXPECT_INVALID(clattn_layer_create(fixture->context, NULL, &config, &layer),
                 "config: struct_size is 0, legal: >=");
}

/* Cross attention without pages has a block_size of 0, which is not its default. */
static void test_zero(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  config.attn_type = "encoder_decoder";
  config.head_size_v = config.head_size / 2;
  config.block_size = CLATTN_ZERO;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  clattn_layer_destroy(layer);
  config.block_size = 0;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer)); /* pages of 16 */
  clattn_layer_destroy(layer);
  config.block_size = CLATTN_ZERO + 1;
  EXPECT_INVALID(clattn_layer_create(fixture->context, NULL, &config, &layer), "block_size is -9");
  config = layer_config();
  config.window_left = CLATTN_ZERO;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  clattn_layer_destroy(layer);
  config.sliding_window = 4;
  EXPECT_UNSUPPORTED(clattn_layer_create(fixture->context, NULL, &config, &layer),
                     "window_left is 0, supported with a sliding_window");
}

/* Values may have fewer elements than keys. */
static void test_value_size(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnCache* cache = NULL;
  config.head_size_v = config.head_size / 2;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 2, NULL, &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  EXPECT(info.head_size_v == config.head_size / 2 && info.v_offset == config.head_size);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  config.attn_type = "encoder_only";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  clattn_layer_destroy(layer);
  config.head_size_v = config.head_size + 8;
  EXPECT_UNSUPPORTED(clattn_layer_create(fixture->context, NULL, &config, &layer), "head_size_v");
}

/* Over caches of other types, and on devices without such products, the option changes nothing. */
static void test_fp8_products(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  config.fp8_products = 1;
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  clattn_layer_destroy(layer);
}

/* A configuration in which one field is wrong. */
static void refuse(const Fixture* fixture, ClattnLayerConfig config, const char* text) {
  ClattnLayer* layer = fixture->layer;
  EXPECT_INVALID(clattn_layer_create(fixture->context, NULL, &config, &layer), text);
  EXPECT(layer == NULL);
}

static void test_configs(const Fixture* fixture) {
  ClattnLayerConfig config = layer_config();
  ClattnLayer* layer = NULL;
  EXPECT_INVALID(clattn_layer_create(NULL, NULL, &config, &layer), "context is null");
  EXPECT_INVALID(clattn_layer_create(fixture->context, NULL, NULL, &layer), "config is null");
  EXPECT_INVALID(clattn_layer_create(fixture->context, NULL, &config, NULL), "layer is null");
  config.dtype = "f33";
  refuse(fixture, config, "f33");
  config = layer_config();
  config.kv_cache_dtype = "int9";
  refuse(fixture, config, "int9");
  config = layer_config();
  config.attn_type = "decoders";
  refuse(fixture, config, "decoders");
  config = layer_config();
  config.kernel_family = "tpu";
  refuse(fixture, config, "tpu");
  config = layer_config();
  config.backend = "NONE_SUCH";
  refuse(fixture, config, "NONE_SUCH");
  config = layer_config();
  config.num_kv_heads = 3;
  refuse(fixture, config, "num_heads (8) is not divisible by num_kv_heads (3)");
  config = layer_config();
  config.head_size = 7;
  EXPECT_UNSUPPORTED(clattn_layer_create(fixture->context, NULL, &config, &layer), "head_size");
}

static void test_models(const Fixture* fixture) {
  ClattnModel* model = NULL;
  ClattnLayer *first = NULL, *second = NULL;
  ClattnLayerConfig config = layer_config();
  EXPECT_INVALID(clattn_model_create(NULL), "model is null");
  EXPECT_OK(clattn_model_create(&model));
  config.name = "layers.0.attn";
  EXPECT_OK(clattn_layer_create(fixture->context, model, &config, &first));
  EXPECT_INVALID(clattn_layer_create(fixture->context, model, &config, &second),
                 "Duplicate layer name: layers.0.attn");
  config.name = "layers.1.attn";
  config.kv_sharing_target_layer_name = "layers.0.attn";
  EXPECT_OK(clattn_layer_create(fixture->context, model, &config, &second));
  EXPECT_INVALID(clattn_layer_bind_cache(second, fixture->cache), "layers.1.attn");
  EXPECT_OK(clattn_layer_bind_cache(first, fixture->cache));
  clattn_model_destroy(model); /* its layers keep it alive */
  clattn_layer_destroy(second);
  clattn_layer_destroy(first);
  clattn_layer_destroy(NULL);
  clattn_model_destroy(NULL);
}

static void test_scales(const Fixture* fixture) {
  ClattnLayer* layer = NULL;
  ClattnLayerConfig config = layer_config();
  ClattnKVScales scales = {.struct_size = sizeof scales, .k_scale = 0.5F, .v_scale = 0.25F};
  config.kv_cache_dtype = "int8";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_layer_load_kv_scales(layer, &scales));
  EXPECT_INVALID(clattn_layer_load_kv_scales(NULL, &scales), "layer is null");
  EXPECT_INVALID(clattn_layer_load_kv_scales(layer, NULL), "scales is null");
  scales.k_scale /= 0.0F;
  EXPECT_INVALID(clattn_layer_load_kv_scales(layer, &scales), "k_scale");
  clattn_layer_destroy(layer);
}

static void count_layers(void* user, size_t done, size_t total) {
  if (total == 2) *(size_t*)user = *(size_t*)user * 10 + done;
}

static void test_warm_up(const Fixture* fixture) {
  ClattnLayer* layers[] = {fixture->layer, fixture->layer};
  ClattnLayer* none[] = {fixture->layer, NULL};
  size_t progress = 0;
  EXPECT_OK(clattn_warm_up(layers, 2, fixture->queue, count_layers, &progress));
  EXPECT(progress == 12);
  EXPECT_OK(clattn_warm_up(layers, 1, fixture->queue, NULL, NULL));
  EXPECT_OK(clattn_warm_up(NULL, 0, fixture->queue, NULL, NULL));
  EXPECT_INVALID(clattn_warm_up(NULL, 1, fixture->queue, NULL, NULL), "layers is null");
  EXPECT_INVALID(clattn_warm_up(none, 2, fixture->queue, count_layers, &progress),
                 "layers: an element is null");
  EXPECT(progress == 12);
  EXPECT_INVALID(clattn_warm_up(layers, 1, NULL, NULL, NULL), "queue is null");
}

void test_layers(const Fixture* fixture) {
  test_explain(fixture);
  test_struct_sizes(fixture);
  test_zero(fixture);
  test_value_size(fixture);
  test_fp8_products(fixture);
  test_configs(fixture);
  test_models(fixture);
  test_scales(fixture);
  test_warm_up(fixture);
}
