/* Recurrent layers. */
#include <math.h>

#include "expect.h"

/* Two requests: one of a token with its state in page 1, a fresh one of two tokens. */
static const int32_t kStarts[] = {0, 1, 3}, kPages[] = {1, 0};
static const uint8_t kInitial[] = {1, 0};

static ClattnRecurrentMetadata* built_metadata(const Fixture* fixture) {
  ClattnRecurrentMetadata* metadata = NULL;
  EXPECT_OK(clattn_recurrent_metadata_create(fixture->context, &metadata));
  ClattnRecurrentBatch batch = {.struct_size = sizeof batch, .num_reqs = 2};
  batch.query_start_loc = kStarts;
  batch.state_indices = kPages;
  batch.has_initial_state = kInitial;
  EXPECT_OK(clattn_recurrent_metadata_build(metadata, fixture->queue, &batch));
  batch.state_indices = NULL;
  EXPECT_INVALID(clattn_recurrent_metadata_build(metadata, fixture->queue, &batch),
                 "batch: state_indices is null");
  batch.num_reqs = -1;
  EXPECT_INVALID(clattn_recurrent_metadata_build(metadata, fixture->queue, &batch),
                 "batch: num_reqs is -1, legal: >= 0");
  batch.num_reqs = 2;
  batch.state_indices = kPages;
  EXPECT_OK(clattn_recurrent_metadata_build(metadata, fixture->queue, &batch));
  return metadata;
}

static ClattnBuffer* filled(const Fixture* fixture, size_t count, float value) {
  float values[2048];
  for (size_t i = 0; i < count; ++i) values[i] = value;
  return buffer_with(fixture, values, count * sizeof(float));
}

static float first_of(const Fixture* fixture, const ClattnBuffer* buffer) {
  float value = 0;
  EXPECT_OK(clattn_buffer_read(buffer, fixture->queue, 0, &value, sizeof value));
  return value;
}

static ClattnStateView view_of(ClattnBuffer* buffer, int64_t page) {
  ClattnStateView view = {.struct_size = sizeof view, .num_blocks = 2, .block_stride = page};
  EXPECT_OK(clattn_buffer_handle(buffer, &view.buffer));
  return view;
}

/* Keys and queries of ones, normalised: 1/4 each of 16. A state of ones predicts 4; the value is 4,
   so that the state stays, and o = scale * 4. */
static void test_rule(const Fixture* fixture, const ClattnRecurrentMetadata* metadata,
                      ClattnBuffer* ones, ClattnBuffer* fours, ClattnBuffer* out) {
  ClattnBuffer* const zeros = filled(fixture, 3, 0);
  ClattnBuffer* const pages = filled(fixture, 512, 1);
  ClattnStateView states = view_of(pages, 256);
  ClattnGatedDeltaRule rule = {.struct_size = sizeof rule, .head_k_dim = 16, .head_v_dim = 16};
  rule.dtype = "f32";
  rule.query.buffer = rule.key.buffer = ones;
  rule.value.buffer = fours;
  rule.out.buffer = out;
  rule.g.buffer = zeros;
  rule.beta.buffer = ones;
  rule.scale = 0.5;
  for (rule.in_chunks = 0; rule.in_chunks < 2; ++rule.in_chunks) {
    EXPECT_OK(clattn_gated_delta_rule(fixture->context, fixture->queue, &rule, &states, metadata));
    EXPECT(fabsf(first_of(fixture, out) - 2) < 1e-4F);
  }
  rule.kernel_family = "gpu_matrixes";
  EXPECT_INVALID(
      clattn_gated_delta_rule(fixture->context, fixture->queue, &rule, &states, metadata),
      "kernel family is 'gpu_matrixes', legal: auto");
  rule.kernel_family = "cpu";
  rule.a.buffer = ones;
  EXPECT_INVALID(
      clattn_gated_delta_rule(fixture->context, fixture->queue, &rule, &states, metadata),
      "each of g and a has a buffer");
  EXPECT_INVALID(clattn_gated_delta_rule(fixture->context, fixture->queue, &rule, NULL, metadata),
                 "states is null");
  EXPECT_INVALID(clattn_gated_delta_rule(fixture->context, fixture->queue, NULL, &states, metadata),
                 "rule is null");
  ClattnLightningAttention lightning = {.struct_size = sizeof lightning, .head_size = 16};
  lightning.dtype = "f32";
  lightning.query.buffer = lightning.key.buffer = lightning.value.buffer = ones;
  lightning.out.buffer = out;
  lightning.log_decay = zeros;
  /* A state of ones becomes one of twos. */
  EXPECT_OK(
      clattn_lightning_attention(fixture->context, fixture->queue, &lightning, &states, metadata));
  EXPECT(fabsf(first_of(fixture, out) - 32) < 1e-3F);
  lightning.log_decay = NULL;
  EXPECT_INVALID(
      clattn_lightning_attention(fixture->context, fixture->queue, &lightning, &states, metadata),
      "lightning_attention: log_decay");
  ClattnSelectiveStateUpdate update = {.struct_size = sizeof update, .head_dim = 16};
  update.state_size = 16;
  update.dtype = "f32";
  update.no_softplus = 1;
  update.x.buffer = update.dt.buffer = update.B.buffer = update.C.buffer = ones;
  update.out.buffer = out;
  update.A = zeros;
  update.D = ones;
  /* Page 1 holds twos, which become threes: y = 48 + 1. */
  EXPECT_OK(
      clattn_selective_state_update(fixture->context, fixture->queue, &update, &states, metadata));
  EXPECT(fabsf(first_of(fixture, out) - 49) < 1e-3F);
  update.dt_min = 2;
  update.dt_max = 1;
  EXPECT_INVALID(
      clattn_selective_state_update(fixture->context, fixture->queue, &update, &states, metadata),
      "dt_min is 2, legal: at most dt_max, 1");
  clattn_buffer_destroy(zeros);
  clattn_buffer_destroy(pages);
}

static void test_convolution(const Fixture* fixture, const ClattnRecurrentMetadata* metadata,
                             ClattnBuffer* ones, ClattnBuffer* fours, ClattnBuffer* out) {
  ClattnBuffer* const pages = filled(fixture, 96, 1);
  ClattnStateView states = view_of(pages, 48);
  ClattnCausalConv1d conv = {.struct_size = sizeof conv, .channels = 16};
  conv.dtype = "f32";
  conv.activation = "none";
  conv.x.buffer = fours;
  conv.out.buffer = out;
  conv.weight = ones;
  EXPECT_OK(clattn_causal_conv1d(fixture->context, fixture->queue, &conv, &states, metadata));
  EXPECT(first_of(fixture, out) == 7); /* three rows of the page, and the token */
  conv.in_gate.buffer = fours;
  EXPECT_INVALID(clattn_causal_conv1d(fixture->context, fixture->queue, &conv, &states, metadata),
                 "conv: only in_gate is given, legal: both gates or none");
  conv.out_gate.buffer = fours;
  EXPECT_OK(clattn_causal_conv1d(fixture->context, fixture->queue, &conv, &states, metadata));
  EXPECT(first_of(fixture, out) == 4 * (1 + 1 + 4 + 16));
  conv.activation = "gelu";
  EXPECT_INVALID(clattn_causal_conv1d(fixture->context, fixture->queue, &conv, &states, metadata),
                 "activation: 'gelu' is not one of none, silu, sigmoid");
  const int32_t targets[] = {-1, 1};
  ClattnBuffer* const to = buffer_with(fixture, targets, sizeof targets);
  ClattnMambaCopy copy = {.struct_size = sizeof copy, .conv_rows = 3, .conv_channels = 16};
  copy.conv_dtype = "f32";
  copy.conv_states = &states;
  copy.targets = to;
  /* Page 0, of a fresh request, holds a 0 in front of two tokens; page 1 becomes its copy. */
  EXPECT_OK(clattn_mamba_copy_blocks(fixture->context, fixture->queue, &copy, metadata));
  float row = 1;
  EXPECT_OK(clattn_buffer_read(pages, fixture->queue, 48 * sizeof row, &row, sizeof row));
  EXPECT(row == 0);
  copy.conv_states = NULL;
  EXPECT_INVALID(clattn_mamba_copy_blocks(fixture->context, fixture->queue, &copy, metadata),
                 "neither conv_states nor states has a buffer");
  clattn_buffer_destroy(to);
  clattn_buffer_destroy(pages);
}

static void test_norm(const Fixture* fixture, ClattnBuffer* ones, ClattnBuffer* fours,
                      ClattnBuffer* out) {
  ClattnRmsNormGated norm = {.struct_size = sizeof norm, .width = 16, .num_tokens = 3};
  norm.dtype = "f32";
  norm.x.buffer = fours;
  norm.out.buffer = out;
  norm.weight = ones;
  EXPECT_OK(clattn_rms_norm_gated(fixture->context, fixture->queue, &norm));
  EXPECT(fabsf(first_of(fixture, out) - 1) < 1e-5F);
  norm.width = 12;
  EXPECT_INVALID(clattn_rms_norm_gated(fixture->context, fixture->queue, &norm),
                 "width is 12, legal: multiples of 8");
}

/* Lists on the device, of which the batch above is made. */
static void test_lists_on_the_device(const Fixture* fixture, ClattnRecurrentMetadata* metadata) {
  ClattnBuffer* const starts = buffer_with(fixture, kStarts, sizeof kStarts);
  ClattnBuffer* const pages = buffer_with(fixture, kPages, sizeof kPages);
  ClattnRecurrentLists lists = {.struct_size = sizeof lists, .num_reqs = 2, .num_tokens = 3};
  lists.query_start_loc = starts;
  lists.state_indices = pages;
  EXPECT_OK(clattn_recurrent_metadata_adopt(metadata, &lists));
  EXPECT_INVALID(clattn_recurrent_metadata_adopt(metadata, NULL), "lists is null");
  EXPECT_INVALID(clattn_recurrent_metadata_adopt(NULL, &lists), "metadata is null");
  clattn_buffer_destroy(starts);
  clattn_buffer_destroy(pages);
}

typedef struct Recurring {
  const Fixture* fixture;
  ClattnQueue* queue;
  ClattnGatedDeltaRule rule;
} Recurring;

static ClattnResult recur(void* user, const ClattnRecurrentStep* step) {
  const Recurring* with = user;
  EXPECT(step->conv_states == NULL && step->states->num_blocks == 3);
  return clattn_gated_delta_rule(with->fixture->context, with->queue, &with->rule, step->states,
                                 step->metadata);
}

/* A hybrid of a layer of attention, which does not run here, and one with a state. Two tokens with
   keys and queries of ones and values of 4: each gives scale * 4. */
static void test_session(const Fixture* fixture, ClattnBuffer* ones, ClattnBuffer* fours,
                         ClattnBuffer* out) {
  static const int64_t shape[] = {1, 16, 16};
  static const int32_t prompt[] = {5, 6};
  const ClattnStateTensor state = {.shape = shape, .num_dims = 3};
  ClattnKVCacheSpec spec = {.struct_size = sizeof spec, .kind = "mamba"};
  const ClattnKVCacheSpec* const recurrent[] = {&spec};
  const ClattnLayerConfig layer = layer_config();
  const ClattnLayerConfig* const layers[] = {&layer};
  ClattnSessionConfig config = {.struct_size = sizeof config, .num_layers = 1, .num_blocks = 2};
  ClattnSessionInfo info = {.struct_size = sizeof info};
  ClattnStepRows rows = {.struct_size = sizeof rows};
  ClattnStepRequest request = {0};
  ClattnSession* session = NULL;
  ClattnBuffer* const zeros = filled(fixture, 2, 0);
  Recurring with = {.fixture = fixture, .rule = {.struct_size = sizeof with.rule}};
  spec.states = &state;
  spec.num_states = 1;
  config.layers = layers;
  config.num_state_slots = 3;
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session),
                 "num_state_slots is 3, legal without recurrent_layers: 0");
  config.recurrent_layers = recurrent;
  config.num_recurrent_layers = 1;
  spec.mamba_cache_mode = "every";
  EXPECT_INVALID(clattn_session_create(fixture->context, &config, &session),
                 "mamba_cache_mode: 'every' is not one of none, align, all");
  spec.mamba_cache_mode = "none";
  EXPECT_OK(clattn_session_create(fixture->context, &config, &session));
  EXPECT_OK(clattn_session_queue(session, &with.queue));
  EXPECT_OK(clattn_session_add(session, prompt, 2, 0, &request.id));
  EXPECT_OK(clattn_session_step(session, &request, 1, &rows));
  EXPECT_OK(clattn_session_info(session, &info));
  EXPECT(info.num_recurrent_layers == 1 && info.num_slots == 3 && info.num_free_slots == 2);
  with.rule.head_k_dim = with.rule.head_v_dim = 16;
  with.rule.scale = 0.5;
  EXPECT_INVALID(clattn_session_recur(session, 0, recur, &with), "query: no buffer");
  with.rule.dtype = "f32";
  with.rule.query.buffer = with.rule.key.buffer = with.rule.beta.buffer = ones;
  with.rule.value.buffer = fours;
  with.rule.out.buffer = out;
  with.rule.g.buffer = zeros;
  EXPECT_OK(clattn_session_recur(session, 0, recur, &with));
  float values[32];
  EXPECT_OK(clattn_buffer_read(out, with.queue, 0, values, sizeof values));
  for (int i = 0; i < 32; ++i) EXPECT(fabsf(values[i] - 2) < 1e-4F);
  EXPECT_INVALID(clattn_session_recur(session, 0, recur, &with), "for the second time");
  EXPECT_INVALID(clattn_session_recur(session, 0, NULL, &with), "run is null");
  EXPECT_INVALID(clattn_session_recur(NULL, 0, recur, &with), "session is null");
  clattn_session_destroy(session);
  clattn_queue_destroy(with.queue);
  clattn_buffer_destroy(zeros);
}

void test_recurrent(const Fixture* fixture) {
  ClattnRecurrentMetadata* const metadata = built_metadata(fixture);
  ClattnBuffer* const ones = filled(fixture, 64, 1);
  ClattnBuffer* const fours = filled(fixture, 64, 4);
  ClattnBuffer* const out = filled(fixture, 64, 0);
  test_rule(fixture, metadata, ones, fours, out);
  test_convolution(fixture, metadata, ones, fours, out);
  test_norm(fixture, ones, fours, out);
  test_session(fixture, ones, fours, out);
  test_lists_on_the_device(fixture, metadata);
  clattn_recurrent_metadata_destroy(metadata);
  clattn_buffer_destroy(ones);
  clattn_buffer_destroy(fours);
  clattn_buffer_destroy(out);
}
