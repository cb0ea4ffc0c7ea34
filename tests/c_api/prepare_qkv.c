/* Norm, rotary embedding and write of queries, keys and values. */
#include <math.h>

#include "expect.h"

void test_prepare_qkv(const Fixture* fixture) {
  /* One head of 8; of the first pair (0, 4), at position 1, cosine 0 and sine 1. */
  const float rows[16] = {3, 3, 3, 3, -3, -3, -3, -3, 1, 2, 3, 4, 5, 6, 7, 8};
  const float table[2][8] = {{1, 1, 1, 1}, {0, 1, 1, 1, 1}};
  const int32_t positions[2] = {1, 5};
  float results[8];
  ClattnBuffer* const x = buffer_with(fixture, rows, sizeof rows);
  ClattnBuffer* const turns = buffer_with(fixture, table, sizeof table);
  ClattnBuffer* const at = buffer_with(fixture, positions, sizeof positions);
  ClattnDeviceErrors* errors = NULL;
  EXPECT_OK(clattn_device_errors_create(fixture->context, fixture->queue, &errors));
  ClattnPrepareQKV call = {.struct_size = sizeof call, .head_size = 8, .num_tokens = 1};
  call.dtype = "f32";
  call.query.buffer = call.query_out.buffer = x;
  call.norm = 1;
  call.cos_sin_cache = turns;
  call.positions = at;
  call.position_bits = 32;
  call.errors = errors;
  EXPECT_OK(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, &call));
  EXPECT_OK(clattn_buffer_read(x, fixture->queue, 0, results, sizeof results));
  EXPECT(fabsf(results[0] - 1) < 1e-6F && fabsf(results[4] - 1) < 1e-6F);
  EXPECT(fabsf(results[1] - 1) < 1e-6F && fabsf(results[5] + 1) < 1e-6F);
  EXPECT_OK(clattn_device_errors_check(errors, fixture->queue));
  call.num_tokens = 2;
  EXPECT_OK(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, &call));
  EXPECT_INVALID(clattn_device_errors_check(errors, fixture->queue), "prepare_qkv: token 1");

  EXPECT_INVALID(clattn_prepare_qkv(NULL, fixture->queue, NULL, &call), "context is null");
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, NULL, NULL, &call), "queue is null");
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, NULL), "call is null");
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, fixture->queue, fixture->cache, &call),
                 "value: no buffer, needed with a cache");
  call.num_padding_tokens = 3;
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, &call),
                 "num_padding_tokens is 3, legal: 0 to 2");
  call.num_padding_tokens = 0;
  call.cos_sin_cache = NULL;
  call.rotary_dim = 8;
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, &call),
                 "cos_sin_cache is null");
  call.norm = 0;
  call.eps = 1;
  EXPECT_INVALID(clattn_prepare_qkv(fixture->context, fixture->queue, NULL, &call), "norm is 0");
  clattn_device_errors_destroy(errors);
  clattn_buffer_destroy(x);
  clattn_buffer_destroy(turns);
  clattn_buffer_destroy(at);
}
