/* What a batch says of its requests beyond lengths: directions, spans, first keys, kept keys and
   trees. */
#include <math.h>
#include <string.h>

#include "model.h"

enum { kFloats = kTokens * (kRowFloats + 8), kHeadsAKey = 4 };

static const int32_t starts[] = {0, kTokens}, seq_lens[] = {kTokens}, page[] = {2};
static const int32_t one_span[] = {0, 1}, all[] = {0, kTokens}, last[] = {kTokens - 1};
static const uint8_t both_ways[] = {0}, causal[] = {1};

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

/* A span of all tokens is what looking both ways is. */
static void test_directions_and_spans(const Fixture* fixture, const Model* model) {
  float plain[kFloats], wanted[kFloats], got[kFloats];
  ClattnBatchInfo batch = prompt_batch();
  attend_eagerly(fixture, model, &batch, plain, kTokens);
  batch.causal = -1;
  attend_eagerly(fixture, model, &batch, wanted, kTokens);
  EXPECT(fabsf(plain[0] - wanted[0]) > 1e-3F);
  batch.causal = 0;
  batch.direction = both_ways;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  expect_near(got, wanted);
  batch.direction = causal;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  expect_near(got, plain);
  batch.direction = NULL;
  batch.span_start_loc = one_span;
  batch.spans = all;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  expect_near(got, wanted);
}

/* The last key alone: its value in the last row, nothing in the others. */
static void test_first_keys(const Fixture* fixture, const Model* model) {
  float input[kTokens * kRowFloats], got[kFloats];
  ClattnBatchInfo batch = prompt_batch();
  batch.first_keys = last;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  EXPECT_OK(clattn_buffer_read(model->input, fixture->queue, 0, input, sizeof input));
  for (int i = 0; i < kRowFloats; ++i) {
    const int key_head = i / 64 / kHeadsAKey;
    EXPECT(got[i] == 0 && got[2 * kRowFloats + i] == 0);
    EXPECT(fabsf(got[3 * kRowFloats + i] - input[(3 * 2 + key_head) * 64 + i % 64]) < 1e-6F);
  }
}

/* A window of one key beside all that are kept is what no window is; layers without a window see
   all keys anyway. */
static void test_keep_keys(const Fixture* fixture, const Model* plain, const Model* windowed) {
  float wanted[kFloats], got[kFloats], input[kTokens * kRowFloats];
  ClattnBatchInfo batch = prompt_batch();
  EXPECT_OK(clattn_buffer_read(plain->input, fixture->queue, 0, input, sizeof input));
  EXPECT_OK(clattn_buffer_write(windowed->input, fixture->queue, 0, input, sizeof input));
  attend_eagerly(fixture, plain, &batch, wanted, kTokens);
  attend_eagerly(fixture, windowed, &batch, got, kTokens);
  EXPECT(fabsf(got[2 * kRowFloats] - wanted[2 * kRowFloats]) > 1e-3F);
  batch.keep_keys = seq_lens;
  attend_eagerly(fixture, windowed, &batch, got, kTokens);
  expect_near(got, wanted);
  attend_eagerly(fixture, plain, &batch, got, kTokens);
  EXPECT(memcmp(got, wanted, sizeof got) == 0);
}

/* A chain is no tree. Of two roots, neither sees the other. */
static void test_trees(const Fixture* fixture, const Model* model) {
  static const int32_t nodes[] = {0, kTokens}, chain[] = {-1, 0, 1, 2}, roots[] = {-1, -1, -1, -1};
  float plain[kFloats], got[kFloats], input[kTokens * kRowFloats];
  ClattnBatchInfo batch = prompt_batch();
  attend_eagerly(fixture, model, &batch, plain, kTokens);
  batch.tree_start_loc = nodes;
  batch.tree_parents = chain;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  EXPECT(memcmp(got, plain, sizeof got) == 0);
  batch.tree_parents = roots;
  attend_eagerly(fixture, model, &batch, got, kTokens);
  EXPECT_OK(clattn_buffer_read(model->input, fixture->queue, 0, input, sizeof input));
  for (int i = 0; i < kTokens * kRowFloats; ++i) { /* each sees its own value alone */
    const int token = i / kRowFloats, key_head = i % kRowFloats / 64 / kHeadsAKey;
    EXPECT(fabsf(got[i] - input[(token * 2 + key_head) * 64 + i % 64]) < 1e-6F);
  }
}

/* Latent rows behind the first key: the last token sees itself alone. */
static void test_first_keys_of_latent_rows(const Fixture* fixture) {
  enum { kRank = 48, kRope = 16 };
  ClattnLayerConfig config = layer_config();
  config.use_mla = 1;
  config.num_kv_heads = 1;
  config.head_size = kRank + kRope;
  config.rope_dim = kRope;
  config.use_first_keys = config.use_trees = 1;
  const Model model = make_model_of(fixture, config);
  float got[kFloats], input[kTokens * kRowFloats];
  ClattnBatchInfo batch = prompt_batch();
  batch.first_keys = last;
  EXPECT_OK(clattn_layer_bind_cache(model.layer, model.cache));
  EXPECT_OK(clattn_buffer_read(model.input, fixture->queue, 0, input, sizeof input));
  attend_eagerly(fixture, &model, &batch, got, kTokens);
  for (int i = 0; i < 8 * kRank; ++i) {
    EXPECT(got[2 * 8 * kRank + i] == 0); /* sees nothing */
    EXPECT(fabsf(got[3 * 8 * kRank + i] - input[3 * kRank + i % kRank]) < 1e-6F);
  }
  destroy_model(model);
}

static void test_refusals_of_lists(const Fixture* fixture, ClattnStep* step) {
  static const int32_t falling[] = {0, -1}, two[] = {0, 2}, mixed[] = {2, 4, 1, 3}, behind[] = {5};
  static const uint8_t none[] = {3};
  ClattnBatchInfo batch = prompt_batch();
  batch.direction = none;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "request 0: direction is 3, legal: 0 (both ways), 1 (causal), 2 (canvas)");
  batch.direction = both_ways;
  batch.causal = 1;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "causal is true, legal with a direction for each request: none");
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, &batch), "direction");
  batch = prompt_batch();
  batch.spans = mixed;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "batch: span_start_loc is null, legal with spans: 2 elements");
  batch.span_start_loc = falling;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "batch: span_start_loc[1] is -1, legal: >= 0");
  batch.span_start_loc = two;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "request 0: spans[1] is 1 … 3, legal: from 4 on, ascending, disjoint");
  batch.spans = NULL;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "batch: spans is null");
  batch = prompt_batch();
  batch.tree_parents = falling;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "batch: tree_start_loc is null, legal with tree_parents: 2 elements");
  batch.tree_start_loc = two;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "request 0: its tree has 2 nodes, legal: 4 … 4");
  batch.tree_start_loc = all;
  batch.tree_parents = mixed;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "request 0: the parent of node 0 is 2, legal: -1 … -1");
  batch = prompt_batch();
  batch.first_keys = behind;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch),
                 "request 0: first_keys is 5, legal: 0 … 4 (seq_lens)");
  batch.first_keys = last;
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, &batch),
                 "first_keys holds 1 elements, legal without use_first_keys: none");
}

void test_lists(const Fixture* fixture) {
  const ClattnBatchInfo decodes = decode_batch();
  ClattnLayerConfig config = layer_config();
  config.use_spans = config.use_directions = config.use_first_keys = 1;
  config.use_trees = 1;
  const Model model = make_model_of(fixture, config);
  test_directions_and_spans(fixture, &model);
  test_first_keys(fixture, &model);
  test_trees(fixture, &model);
  test_refusals_of_lists(fixture, model.step);
  test_first_keys_of_latent_rows(fixture);
  config.sliding_window = 1;
  config.use_keep_keys = 1;
  const Model windowed = make_model_of(fixture, config);
  test_keep_keys(fixture, &model, &windowed);
  ClattnBatchInfo batch = prompt_batch();
  static const int32_t behind[] = {5};
  batch.keep_keys = behind;
  EXPECT_INVALID(clattn_step_build(windowed.step, fixture->queue, &batch),
                 "request 0: keep_keys is 5, legal: 0 … 4 (seq_lens)");
  destroy_model(windowed);
  destroy_model(model);
  EXPECT_OK(clattn_step_build(fixture->step, fixture->queue, &decodes));
}
