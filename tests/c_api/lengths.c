/* Lengths of a step that the device knows alone. */
#include <math.h>

#include "expect.h"

/* Keys of ones in request 1's last place, 8 or 18 zeros before: the bound is 20 tokens. */
static void test_update(const Fixture* fixture) {
  float ones[2 * 8 * 64], lse[2 * 8];
  const int32_t lens[] = {1, 9}, too_long[] = {1, 21};
  const ClattnBatchInfo batch = decode_batch();
  ClattnStepOptions options = {.struct_size = sizeof options, .device_seq_lens = 1};
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnStep* step = NULL;
  ClattnDeviceErrors* errors = NULL;
  const ClattnLayerConfig config = layer_config();
  for (int i = 0; i < 2 * 8 * 64; ++i) ones[i] = 1;
  ClattnBuffer* const rows = buffer_with(fixture, ones, sizeof ones);
  ClattnBuffer* const output = buffer_with(fixture, ones, sizeof ones);
  ClattnBuffer* const lse_buffer = buffer_with(fixture, lse, sizeof lse);
  ClattnBuffer* const seq_lens = buffer_with(fixture, lens, sizeof lens);
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_OK(clattn_step_create(layer, &options, &step));
  EXPECT_OK(clattn_step_warm_up(step, fixture->queue));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_device_errors_create(fixture->context, fixture->queue, &errors));
  EXPECT_OK(clattn_update_seq_lens(fixture->queue, step, seq_lens, NULL, errors, NULL));
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = rows;
  tensors.output.buffer = output;
  tensors.lse = lse_buffer;
  EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
  EXPECT_OK(clattn_buffer_read(lse_buffer, fixture->queue, 0, lse, sizeof lse));
  EXPECT(fabs(lse[0] - 8) < 1e-5 && fabs(lse[15] - log(exp(8) + 8)) < 1e-5);
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue));

  EXPECT_OK(clattn_buffer_write(seq_lens, fixture->queue, 0, too_long, sizeof too_long));
  EXPECT_OK(clattn_update_seq_lens(fixture->queue, step, seq_lens, NULL, errors, NULL));
  EXPECT_INVALID(clattn_device_errors_check(errors, fixture->queue), "1");
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue)); /* told once */
  EXPECT_INVALID(clattn_update_seq_lens(NULL, step, seq_lens, NULL, errors, NULL), "queue is null");
  EXPECT_INVALID(clattn_update_seq_lens(fixture->queue, NULL, seq_lens, NULL, errors, NULL),
                 "step is null");
  EXPECT_INVALID(clattn_update_seq_lens(fixture->queue, step, NULL, NULL, errors, NULL),
                 "seq_lens is null");
  EXPECT_INVALID(clattn_update_seq_lens(fixture->queue, step, seq_lens, NULL, NULL, NULL),
                 "errors is null");
  EXPECT_INVALID(clattn_update_seq_lens(fixture->queue, step, seq_lens, seq_lens, errors, NULL),
                 "slot_mapping");
  EXPECT_INVALID(
      clattn_update_seq_lens(fixture->queue, fixture->step, seq_lens, NULL, errors, NULL),
      "device_seq_lens");
  EXPECT_INVALID(clattn_step_warm_up(NULL, fixture->queue), "step is null");
  EXPECT_INVALID(clattn_step_warm_up(step, NULL), "queue is null");
  EXPECT_INVALID(clattn_device_errors_create(NULL, fixture->queue, &errors), "context is null");
  EXPECT_INVALID(clattn_device_errors_create(fixture->context, NULL, &errors), "queue is null");
  EXPECT_INVALID(clattn_device_errors_create(fixture->context, fixture->queue, NULL),
                 "errors is null");
  EXPECT_INVALID(clattn_device_errors_check(NULL, fixture->queue), "errors is null");
  clattn_device_errors_destroy(NULL);
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  clattn_buffer_destroy(rows);
  clattn_buffer_destroy(output);
  clattn_buffer_destroy(lse_buffer);
  clattn_buffer_destroy(seq_lens);
}

/* Row 0 is request 1's, of 9 tokens; request 0 has none, and nothing is written to row 1. */
static void test_update_queries(const Fixture* fixture) {
  float ones[2 * 8 * 64], lse[2 * 8];
  const int32_t starts[] = {0, 0, 1}, lens[] = {1, 9}, wrong[] = {0, 2, 2};
  const ClattnBatchInfo batch = decode_batch();
  ClattnStepOptions options = {.struct_size = sizeof options, .device_query_lens = 1};
  ClattnTensors tensors = {.struct_size = sizeof tensors};
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  ClattnStep* step = NULL;
  ClattnDeviceErrors* errors = NULL;
  const ClattnLayerConfig config = layer_config();
  for (int i = 0; i < 2 * 8 * 64; ++i) ones[i] = 1;
  for (int i = 0; i < 2 * 8; ++i) lse[i] = -7;
  ClattnBuffer* const rows = buffer_with(fixture, ones, sizeof ones);
  ClattnBuffer* const output = buffer_with(fixture, ones, sizeof ones);
  ClattnBuffer* const lse_buffer = buffer_with(fixture, lse, sizeof lse);
  ClattnBuffer* const query_start_loc = buffer_with(fixture, starts, sizeof starts);
  ClattnBuffer* const seq_lens = buffer_with(fixture, lens, sizeof lens);
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  EXPECT_OK(clattn_layer_bind_cache(layer, cache));
  EXPECT_INVALID(clattn_step_create(layer, &options, &step),
                 "device_query_lens: true, legal without");
  options.device_seq_lens = 1;
  EXPECT_OK(clattn_step_create(layer, &options, &step));
  EXPECT_OK(clattn_step_warm_up(step, fixture->queue));
  EXPECT_OK(clattn_step_build(step, fixture->queue, &batch));
  EXPECT_OK(clattn_device_errors_create(fixture->context, fixture->queue, &errors));
  EXPECT_OK(clattn_update_query_lens(fixture->queue, step, query_start_loc, seq_lens, NULL, errors,
                                     NULL));
  tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = rows;
  tensors.output.buffer = output;
  tensors.lse = lse_buffer;
  EXPECT_OK(clattn_layer_forward(layer, fixture->queue, &tensors, step));
  EXPECT_OK(clattn_buffer_read(lse_buffer, fixture->queue, 0, lse, sizeof lse));
  EXPECT(fabs(lse[0] - log(exp(8) + 8)) < 1e-5 && lse[8] == -7 && lse[15] == -7);
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue));

  EXPECT_OK(clattn_buffer_write(query_start_loc, fixture->queue, 0, wrong, sizeof wrong));
  EXPECT_OK(clattn_update_query_lens(fixture->queue, step, query_start_loc, seq_lens, NULL, errors,
                                     NULL));
  EXPECT_INVALID(clattn_device_errors_check(errors, fixture->queue),
                 "update_query_lens: request 0");
  EXPECT_INVALID(
      clattn_update_query_lens(NULL, step, query_start_loc, seq_lens, NULL, errors, NULL),
      "queue is null");
  EXPECT_INVALID(
      clattn_update_query_lens(fixture->queue, NULL, query_start_loc, seq_lens, NULL, errors, NULL),
      "step is null");
  EXPECT_INVALID(clattn_update_query_lens(fixture->queue, step, NULL, seq_lens, NULL, errors, NULL),
                 "query_start_loc is null");
  EXPECT_INVALID(
      clattn_update_query_lens(fixture->queue, step, query_start_loc, NULL, NULL, errors, NULL),
      "seq_lens is null");
  EXPECT_INVALID(
      clattn_update_query_lens(fixture->queue, step, query_start_loc, seq_lens, NULL, NULL, NULL),
      "errors is null");
  EXPECT_INVALID(clattn_update_query_lens(fixture->queue, fixture->step, query_start_loc, seq_lens,
                                          NULL, errors, NULL),
                 "device_query_lens");
  clattn_device_errors_destroy(errors);
  clattn_step_destroy(step);
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
  clattn_buffer_destroy(rows);
  clattn_buffer_destroy(output);
  clattn_buffer_destroy(lse_buffer);
  clattn_buffer_destroy(query_start_loc);
  clattn_buffer_destroy(seq_lens);
}

/* Two rows, one of them padding; the token goes to position 3 of block 2. */
static void test_advance(const Fixture* fixture) {
  const int64_t zeros[2] = {9, 9}, sampled = 7;
  int64_t tokens[2], positions[2], slots[2];
  int32_t lens[] = {3, 5}, last[2], indptr[3];
  const int32_t table[] = {2, 0}, pages[4] = {0};
  ClattnDeviceErrors* errors = NULL;
  ClattnBuffer* const input_tokens = buffer_with(fixture, zeros, sizeof zeros);
  ClattnBuffer* const input_positions = buffer_with(fixture, zeros, sizeof zeros);
  ClattnBuffer* const slot_mapping = buffer_with(fixture, zeros, sizeof zeros);
  ClattnBuffer* const seq_lens = buffer_with(fixture, lens, sizeof lens);
  ClattnBuffer* const paged_kv_indices = buffer_with(fixture, pages, sizeof pages);
  ClattnBuffer* const paged_kv_indptr = buffer_with(fixture, pages, sizeof pages);
  ClattnBuffer* const last_page_len = buffer_with(fixture, pages, sizeof pages);
  ClattnBuffer* const bound = buffer_with(fixture, pages, sizeof pages);
  ClattnAdvanceStep advance = {.struct_size = sizeof advance, .num_seqs = 2, .num_queries = 1};
  advance.num_blocks = 4;
  advance.input_tokens = input_tokens;
  advance.sampled_token_ids = buffer_with(fixture, &sampled, sizeof sampled);
  advance.input_positions = input_positions;
  advance.seq_lens = seq_lens;
  advance.slot_mapping = slot_mapping;
  advance.block_tables = buffer_with(fixture, table, sizeof table);
  advance.block_table_stride = 1;
  EXPECT_OK(clattn_device_errors_create(fixture->context, fixture->queue, &errors));
  EXPECT_OK(clattn_advance_step(fixture->context, fixture->queue, &advance, errors, NULL));
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue));
  EXPECT_OK(clattn_buffer_read(input_tokens, fixture->queue, 0, tokens, sizeof tokens));
  EXPECT_OK(clattn_buffer_read(input_positions, fixture->queue, 0, positions, sizeof positions));
  EXPECT_OK(clattn_buffer_read(slot_mapping, fixture->queue, 0, slots, sizeof slots));
  EXPECT_OK(clattn_buffer_read(seq_lens, fixture->queue, 0, lens, sizeof lens));
  EXPECT(tokens[0] == 7 && positions[0] == 3 && slots[0] == 2 * 16 + 3 && lens[0] == 4);
  EXPECT(tokens[1] == 0 && positions[1] == 0 && slots[1] == -1);

  advance.paged_kv_indices = paged_kv_indices;
  EXPECT_INVALID(clattn_advance_step(fixture->context, fixture->queue, &advance, errors, NULL),
                 "advance: 1 of four buffers of page lists, legal: all or none");
  advance.paged_kv_indptr = paged_kv_indptr;
  advance.paged_kv_last_page_len = last_page_len;
  advance.block_table_bound = bound;
  EXPECT_OK(clattn_advance_step(fixture->context, fixture->queue, &advance, errors, NULL));
  EXPECT_OK(clattn_buffer_read(last_page_len, fixture->queue, 0, last, sizeof last));
  EXPECT_OK(clattn_buffer_read(paged_kv_indptr, fixture->queue, 0, indptr, sizeof indptr));
  EXPECT(last[0] == 5 && indptr[0] == 0 && indptr[1] == 1);

  advance.num_blocks = 2; /* the table names block 2 */
  EXPECT_OK(clattn_advance_step(fixture->context, fixture->queue, &advance, errors, NULL));
  EXPECT_INVALID(clattn_device_errors_check(errors, fixture->queue), "0");
  EXPECT_INVALID(clattn_advance_step(NULL, fixture->queue, &advance, errors, NULL),
                 "context is null");
  EXPECT_INVALID(clattn_advance_step(fixture->context, NULL, &advance, errors, NULL),
                 "queue is null");
  EXPECT_INVALID(clattn_advance_step(fixture->context, fixture->queue, NULL, errors, NULL),
                 "advance is null");
  EXPECT_INVALID(clattn_advance_step(fixture->context, fixture->queue, &advance, NULL, NULL),
                 "errors is null");
  advance.num_queries = 3;
  EXPECT_INVALID(clattn_advance_step(fixture->context, fixture->queue, &advance, errors, NULL),
                 "num_queries");
  EXPECT_INVALID(clattn_device_errors_check(errors, NULL), "queue is null");
  clattn_device_errors_destroy(errors);
  clattn_buffer_destroy(input_tokens);
  clattn_buffer_destroy(input_positions);
  clattn_buffer_destroy(slot_mapping);
  clattn_buffer_destroy(seq_lens);
  clattn_buffer_destroy(paged_kv_indices);
  clattn_buffer_destroy(paged_kv_indptr);
  clattn_buffer_destroy(last_page_len);
  clattn_buffer_destroy(bound);
  clattn_buffer_destroy((ClattnBuffer*)advance.sampled_token_ids);
  clattn_buffer_destroy((ClattnBuffer*)advance.block_tables);
}

void test_lengths_on_the_device(const Fixture* fixture) {
  test_update(fixture);
  test_update_queries(fixture);
  test_advance(fixture);
}
