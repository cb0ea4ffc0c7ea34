/* Steps, and the attention of a layer over one. */
#include <math.h>

#include "expect.h"

static void test_step_handles(const Fixture* fixture) {
  ClattnStep* step = NULL;
  ClattnStepOptions options = {.struct_size = sizeof options};
  ClattnStepInfo info = {.struct_size = sizeof info};
  const ClattnBatchInfo batch = decode_batch();
  options.num_blocks = 3; /* the batch names block 3 */
  options.decode_threshold = 1;
  options.deterministic = 1;
  EXPECT_OK(clattn_step_create(fixture->layer, &options, &step));
  EXPECT_INVALID(clattn_step_info(step, &info), "step: it has no batch");
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "block_table");
  EXPECT_INVALID(clattn_step_info(step, &info), "step: it has no batch");
  clattn_step_destroy(step);
  options.side_by_side = -2;
  EXPECT_INVALID(clattn_step_create(fixture->layer, &options, &step),
                 "options: side_by_side is -2, legal: -1, 0, 1");
  options.side_by_side = 2;
  EXPECT_INVALID(clattn_step_create(fixture->layer, &options, &step), "side_by_side is 2");
  options.side_by_side = 0;
  options.max_num_reqs = -1;
  EXPECT_INVALID(clattn_step_create(fixture->layer, &options, &step), "max_num_reqs");
  EXPECT_INVALID(clattn_step_create(NULL, NULL, &step), "layer is null");
  EXPECT_INVALID(clattn_step_create(fixture->layer, NULL, NULL), "step is null");
  clattn_step_destroy(NULL);

  EXPECT_OK(clattn_step_info(fixture->step, &info));
  EXPECT(info.num_actual_tokens == 2 && info.num_decodes == 2 && info.num_prefills == 0);
  EXPECT(info.num_decode_tokens == 2 && info.num_prefill_tokens == 0);
  EXPECT(info.max_query_len == 1 && info.max_seq_len == 20);
  EXPECT_INVALID(clattn_step_info(NULL, &info), "step is null");
  EXPECT_INVALID(clattn_step_info(fixture->step, NULL), "info is null");
}

/* A batch is kept until another one is checked. */
static void test_former_batch(const Fixture* fixture) {
  ClattnStepInfo info = {.struct_size = sizeof info};
  ClattnBatchInfo small = {.struct_size = 4}, batch = decode_batch();
  EXPECT_INVALID(clattn_step_build(fixture->step, NULL, &batch), "queue is null");
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, NULL), "batch is null");
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, &small), "struct_size is 4");
  batch.num_reqs = -1;
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, &batch), "num_reqs is -1");
  EXPECT_OK(clattn_step_info(fixture->step, &info));
  EXPECT(info.num_actual_tokens == 2);
  batch = decode_batch();
  batch.common_prefix_len = 7;
  EXPECT_INVALID(clattn_step_build(fixture->step, fixture->queue, &batch), "common_prefix_len");
  EXPECT_INVALID(clattn_step_info(fixture->step, &info), "step: it has no batch");
}

static void test_batches(const Fixture* fixture) {
  ClattnStep* step = fixture->step;
  const int32_t long_lens[] = {1, 40};
  const int64_t slots[] = {48, 20};
  ClattnBatchInfo batch = decode_batch();
  EXPECT_INVALID(clattn_step_build(NULL, fixture->queue, &batch), "step is null");
  EXPECT_INVALID(clattn_step_build(step, NULL, &batch), "queue is null");
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, NULL), "batch is null");
  batch.num_reqs = -1;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "num_reqs is -1");
  batch = decode_batch();
  batch.block_table_stride = (int64_t)1 << 40;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "block_table_stride is");
  batch = decode_batch();
  batch.query_start_loc = NULL;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "query_start_loc is null");
  batch = decode_batch();
  batch.seq_lens = NULL;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "seq_lens is null");
  batch = decode_batch();
  batch.block_table = NULL;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "block_table");
  batch = decode_batch();
  batch.seq_lens = long_lens;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "seq_len");
  batch = decode_batch();
  batch.slot_mapping = slots;
  batch.num_slots = 1;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "slot_mapping");
  batch.num_slots = -1;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "slot_mapping: -1 elements");
  batch.num_slots = 2;
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  batch = decode_batch();
  batch.common_prefix_len = 7;
  EXPECT_INVALID(clattn_step_build(step, fixture->queue, &batch), "common_prefix_len");
  batch = decode_batch();
  batch.causal = -1;
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  batch = decode_batch();
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
}

void test_steps(const Fixture* fixture) {
  test_step_handles(fixture);
  test_former_batch(fixture);
  test_batches(fixture);
}

/* Two requests attend to a zeroed cache and a token of ones each: the sum of exponents is known. */
void test_forward(const Fixture* fixture) {
  float values[2 * 8 * 64], lse[2 * 8];
  uint64_t duration_ns = 0;
  ClattnBuffer *ones = NULL, *output = NULL, *lse_buffer = NULL;
  ClattnStep* empty = NULL;
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  for (int i = 0; i < 2 * 8 * 64; ++i) values[i] = 1;
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof values, &ones));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof values, &output));
  EXPECT_OK(clattn_buffer_create(fixture->context, sizeof lse, &lse_buffer));
  EXPECT_OK(clattn_buffer_write(ones, fixture->queue, 0, values, sizeof values));
  EXPECT_OK(clattn_event_create(&tensors.event));
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = ones;
  tensors.output.buffer = output;
  tensors.lse = lse_buffer;
  EXPECT_OK(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, fixture->step));
  EXPECT_OK(clattn_event_duration_ns(tensors.event, &duration_ns));
  EXPECT(duration_ns > 0);
  EXPECT_OK(clattn_buffer_read(output, fixture->queue, 0, values, sizeof values));
  EXPECT_OK(clattn_buffer_read(lse_buffer, fixture->queue, 0, lse, sizeof lse));
  EXPECT(fabs(values[0] - 1) < 1e-6);
  EXPECT(fabs(values[2 * 8 * 64 - 1] - exp(8) / (exp(8) + 19)) < 1e-5);
  EXPECT(fabs(lse[0] - 8) < 1e-5 && fabs(lse[15] - log(exp(8) + 19)) < 1e-5);

  EXPECT_INVALID(clattn_layer_forward(NULL, fixture->queue, &tensors, fixture->step),
                 "layer is null");
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, NULL, &tensors, fixture->step),
                 "queue is null");
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, fixture->queue, NULL, fixture->step),
                 "tensors is null");
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, NULL),
                 "num_rows is 0, legal without attn_metadata");
  tensors.num_rows = 1;
  EXPECT_OK(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, NULL));
  EXPECT_OK(clattn_buffer_read(output, fixture->queue, 0, values, sizeof values));
  EXPECT(values[0] == 0 && values[8 * 64 - 1] == 0 && values[8 * 64] != 0);
  tensors.num_rows = 0;
  EXPECT_OK(clattn_step_create(fixture->layer, NULL, &empty));
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, empty),
                 "step: it has no batch");
  clattn_step_destroy(empty);
  tensors.query.buffer = NULL;
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, fixture->step),
                 "query");
  tensors.query.buffer = ones;
  tensors.output.offset = -1;
  EXPECT_INVALID(clattn_layer_forward(fixture->layer, fixture->queue, &tensors, fixture->step),
                 "output");
  clattn_event_destroy(tensors.event);
  clattn_buffer_destroy(lse_buffer);
  clattn_buffer_destroy(output);
  clattn_buffer_destroy(ones);
}
