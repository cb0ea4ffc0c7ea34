/* Operations on caches and attention results. */
#include <math.h>

#include "expect.h"

enum { kHead = 8, kPageFloats = 2 * 16 * 2 * 64, kPages = 4 };

/* Tokens with the results 1 and 3 over a prefix and a suffix of one and three equal keys. */
static void test_merge(const Fixture* fixture) {
  float ones[2 * kHead], threes[2 * kHead], out[2 * kHead], lse[2];
  const float lse_one[] = {0, 0}, lse_three[] = {logf(3), logf(3)}, scale = 0.5F;
  unsigned char fp8[2 * kHead];
  for (int i = 0; i < 2 * kHead; ++i) ones[i] = 1, threes[i] = 3;
  ClattnBuffer* const prefix = buffer_with(fixture, ones, sizeof ones);
  ClattnBuffer* const suffix = buffer_with(fixture, threes, sizeof threes);
  ClattnBuffer* const merged = buffer_with(fixture, out, sizeof out);
  ClattnBuffer* const prefix_lse = buffer_with(fixture, lse_one, sizeof lse_one);
  ClattnBuffer* const suffix_lse = buffer_with(fixture, lse_three, sizeof lse_three);
  ClattnBuffer* const merged_lse = buffer_with(fixture, lse, sizeof lse);
  ClattnBuffer* const output_scale = buffer_with(fixture, &scale, sizeof scale);
  ClattnMerge merge = {.struct_size = sizeof merge};
  merge.num_heads = 1;
  merge.head_size = kHead;
  merge.num_tokens = 2;
  merge.tokens_without_prefix = 1;
  merge.dtype = "f32";
  merge.merged.output.buffer = merged;
  merge.merged.lse = merged_lse;
  merge.prefix.output.buffer = prefix;
  merge.prefix.lse = prefix_lse;
  merge.suffix.output.buffer = suffix;
  merge.suffix.lse = suffix_lse;
  EXPECT_OK(clattn_merge_attn_states(fixture->context, fixture->queue, &merge));
  EXPECT_OK(clattn_buffer_read(merged, fixture->queue, 0, out, sizeof out));
  EXPECT_OK(clattn_buffer_read(merged_lse, fixture->queue, 0, lse, sizeof lse));
  EXPECT(fabsf(out[0] - 2.5F) < 1e-6F && out[kHead] == 3); /* the second has no prefix */
  EXPECT(fabsf(lse[0] - logf(4)) < 1e-6F && fabsf(lse[1] - logf(3)) < 1e-6F);

  const float log2s[] = {log2f(3), log2f(3)};
  EXPECT_OK(clattn_buffer_write(suffix_lse, fixture->queue, 0, log2s, sizeof log2s));
  merge.lse_base2 = 1;
  merge.tokens_without_prefix = 0;
  merge.output_dtype = "fp8_e4m3";
  merge.output_scale = output_scale;
  EXPECT_OK(clattn_event_create(&merge.event));
  EXPECT_OK(clattn_merge_attn_states(fixture->context, fixture->queue, &merge));
  EXPECT_OK(clattn_event_wait(merge.event));
  EXPECT_OK(clattn_buffer_read(merged, fixture->queue, 0, fp8, sizeof fp8));
  EXPECT_OK(clattn_buffer_read(merged_lse, fixture->queue, 0, lse, sizeof lse));
  EXPECT(fp8[0] == 0x4A && fp8[2 * kHead - 1] == 0x4A); /* 2.5 / 0.5 */
  EXPECT(fabsf(lse[1] - 2) < 1e-6F);

  EXPECT_INVALID(clattn_merge_attn_states(NULL, fixture->queue, &merge), "context is null");
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, NULL, &merge), "queue is null");
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, NULL), "merge is null");
  merge.tokens_without_prefix = 3;
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge),
                 "tokens_without_prefix is 3, legal: 0 to num_tokens, 2");
  merge.tokens_without_prefix = -1;
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge),
                 "tokens_without_prefix is -1");
  merge.tokens_without_prefix = 0;
  merge.output_dtype = "f64";
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge), "f64");
  merge.output_dtype = NULL;
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge), "scale");
  merge.output_scale = NULL;
  merge.head_size = 7;
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge), "head_size");
  merge.head_size = kHead;
  merge.prefix.output.buffer = NULL;
  EXPECT_INVALID(clattn_merge_attn_states(fixture->context, fixture->queue, &merge), "prefix");
  clattn_event_destroy(merge.event);
  clattn_buffer_destroy(prefix);
  clattn_buffer_destroy(suffix);
  clattn_buffer_destroy(merged);
  clattn_buffer_destroy(prefix_lse);
  clattn_buffer_destroy(suffix_lse);
  clattn_buffer_destroy(merged_lse);
  clattn_buffer_destroy(output_scale);
}

/* Appends position 17 of a request whose second page is block 3, then swaps that block. */
static void test_append_and_swap(const Fixture* fixture) {
  static const float zeros[kPages * kPageFloats];
  const int32_t request = 0, position = 17, indptr[] = {0, 2}, indices[] = {1, 3};
  const int64_t out_pair[] = {3, 0}, in_pair[] = {0, 2}, wrong[] = {4, 0};
  float row[128], stored[128];
  void* host = NULL;
  ClattnHostMemory* pinned = NULL;
  ClattnCache* cache = NULL;
  ClattnCacheInfo info = {.struct_size = sizeof info};
  ClattnBuffer* const memory = buffer_with(fixture, zeros, sizeof zeros);
  EXPECT_OK(clattn_cache_adopt(fixture->layer, memory, "NHD", &cache));
  EXPECT_OK(clattn_cache_info(cache, &info));
  for (int i = 0; i < 128; ++i) row[i] = (float)i;
  ClattnCacheAppend append = {.struct_size = sizeof append};
  append.num_reqs = 1;
  append.dtype = "f32";
  append.key.buffer = append.value.buffer = buffer_with(fixture, row, sizeof row);
  append.batch_indices = buffer_with(fixture, &request, sizeof request);
  append.positions = buffer_with(fixture, &position, sizeof position);
  append.indices = buffer_with(fixture, indices, sizeof indices);
  append.indptr = buffer_with(fixture, indptr, sizeof indptr);
  append.num_tokens = 1;
  EXPECT_OK(clattn_append_paged_kv_cache(fixture->context, fixture->queue, cache, &append));
  EXPECT_INVALID(clattn_append_paged_kv_cache(NULL, fixture->queue, cache, &append),
                 "context is null");
  EXPECT_INVALID(clattn_append_paged_kv_cache(fixture->context, NULL, cache, &append),
                 "queue is null");
  EXPECT_INVALID(clattn_append_paged_kv_cache(fixture->context, fixture->queue, NULL, &append),
                 "cache is null");
  EXPECT_INVALID(clattn_append_paged_kv_cache(fixture->context, fixture->queue, cache, NULL),
                 "append is null");
  append.num_tokens = 2;
  EXPECT_INVALID(clattn_append_paged_kv_cache(fixture->context, fixture->queue, cache, &append),
                 "batch_indices");

  ClattnSwapSpace device = {.struct_size = sizeof device, .cache = cache};
  ClattnSwapSpace image = {.struct_size = sizeof image, .host_bytes = kPageFloats * 4};
  ClattnSwapSpace both = device, neither = {.struct_size = sizeof neither};
  EXPECT_OK(clattn_pinned_memory_create(fixture->context, image.host_bytes, &pinned, &host));
  image.host = both.host = host;
  EXPECT_OK(
      clattn_swap_blocks(fixture->context, fixture->queue, &device, &image, out_pair, 1, NULL));
  EXPECT_OK(
      clattn_swap_blocks(fixture->context, fixture->queue, &image, &device, in_pair, 1, NULL));
  const int64_t slot = info.v_offset + 2 * info.block_stride + info.token_stride;
  EXPECT_OK(clattn_buffer_read(memory, fixture->queue, 4 * (size_t)slot, stored, sizeof stored));
  EXPECT(memcmp(row, stored, sizeof row) == 0);
  EXPECT_INVALID(clattn_swap_blocks(NULL, fixture->queue, &device, &image, out_pair, 1, NULL),
                 "context is null");
  EXPECT_INVALID(clattn_swap_blocks(fixture->context, NULL, &device, &image, out_pair, 1, NULL),
                 "queue is null");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, NULL, &image, out_pair, 1, NULL),
      "source is null");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &device, NULL, out_pair, 1, NULL),
      "destination is null");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &device, &image, NULL, 1, NULL),
      "pairs is null");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &device, &image, wrong, 1, NULL), "4");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &image, &image, in_pair, 1, NULL),
      "Invalid device combination");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &both, &image, out_pair, 1, NULL),
      "source: cache and host are both null or both set");
  EXPECT_INVALID(
      clattn_swap_blocks(fixture->context, fixture->queue, &device, &neither, out_pair, 1, NULL),
      "destination: cache and host are both null or both set");
  clattn_host_memory_destroy(pinned);
  clattn_cache_destroy(cache);
  clattn_buffer_destroy(memory);
  clattn_buffer_destroy((ClattnBuffer*)append.key.buffer);
  clattn_buffer_destroy((ClattnBuffer*)append.batch_indices);
  clattn_buffer_destroy((ClattnBuffer*)append.positions);
  clattn_buffer_destroy((ClattnBuffer*)append.indices);
  clattn_buffer_destroy((ClattnBuffer*)append.indptr);
}

void test_operations(const Fixture* fixture) {
  test_merge(fixture);
  test_append_and_swap(fixture);
}

/* Rows of slots 16 and 17 go to 48 and 49, by lists of the host, and 49 to 48, by lists of the
   device. */
static void test_moves(const Fixture* fixture, const ClattnCache* cache) {
  const int64_t src[] = {16, 17}, dst[] = {48, 49}, behind[] = {64};
  const int32_t starts[] = {0, 2}, one[] = {0, 1}, none[] = {0, -1}, sums[] = {0, 1}, table[] = {3};
  float row[40];
  const ClattnContext* context = fixture->context;
  const ClattnQueue* queue = fixture->queue;
  EXPECT_OK(clattn_move_tokens(context, queue, &cache, 1, src, dst, starts, 1, NULL));
  ClattnBuffer* const from = buffer_with(fixture, &dst[1], sizeof dst[1]);
  ClattnBuffer* const to = buffer_with(fixture, dst, sizeof dst[0]);
  ClattnBuffer* const begins = buffer_with(fixture, one, sizeof one);
  EXPECT_OK(clattn_move_tokens_by_device(context, queue, &cache, 1, from, to, begins, 1, NULL));
  ClattnGather gather = {.struct_size = sizeof gather, .num_reqs = 1, .dtype = "f32"};
  gather.cu_seq_lens = sums;
  gather.block_table = table;
  gather.block_table_stride = 1;
  gather.destination.buffer = fixture->buffer;
  EXPECT_OK(clattn_gather_and_maybe_dequant_cache(context, queue, cache, &gather));
  EXPECT_OK(clattn_buffer_read(fixture->buffer, queue, 0, row, sizeof row));
  EXPECT(row[0] == 32 && row[39] == 115);
  EXPECT_INVALID(clattn_move_tokens(context, queue, &cache, 1, behind, dst, one, 1, NULL),
                 "move_tokens: src_slots[0] is 64, legal: 0 … 63");
  EXPECT_INVALID(clattn_move_tokens(context, queue, &cache, 1, NULL, dst, one, 1, NULL),
                 "src_slots is null");
  EXPECT_INVALID(clattn_move_tokens(context, queue, &cache, 1, src, dst, none, 1, NULL),
                 "starts[1] is -1, legal: >= 0");
  EXPECT_INVALID(clattn_move_tokens_by_device(context, queue, &cache, 1, from, to, begins, 2, NULL),
                 "starts holds 2 elements, legal: at least 3");
  EXPECT_INVALID(clattn_move_tokens_by_device(context, queue, &cache, 1, NULL, to, begins, 1, NULL),
                 "src_slots");
  clattn_buffer_destroy(from);
  clattn_buffer_destroy(to);
  clattn_buffer_destroy(begins);
}

/* Rows of 32 + 8 elements go in by slot and by position, are copied, swapped and gathered. */
static void use_latent_cache(const Fixture* fixture, const ClattnCache* cache) {
  float latents[2 * 32], rotary[2 * 8], rows[3 * 40];
  const int64_t slots[] = {16, 17}, copied[] = {1, 2};
  const int32_t requests[] = {0, 0}, positions[] = {2, 3}, indptr[] = {0, 1}, page = 1;
  const int32_t sums[] = {0, 3}, table[] = {2}, starts[] = {1};
  for (int i = 0; i < 2 * 32; ++i) latents[i] = (float)i;
  for (int i = 0; i < 2 * 8; ++i) rotary[i] = (float)(100 + i);
  ClattnCacheWrite write = {.struct_size = sizeof write, .dtype = "f32", .num_tokens = 2};
  write.key.buffer = buffer_with(fixture, latents, sizeof latents);
  write.value.buffer = buffer_with(fixture, rotary, sizeof rotary);
  write.slot_mapping = buffer_with(fixture, slots, sizeof slots);
  EXPECT_OK(clattn_reshape_and_cache(fixture->context, fixture->queue, cache, &write));
  ClattnCacheAppend append = {.struct_size = sizeof append, .dtype = "f32", .num_tokens = 2};
  append.num_reqs = 1;
  append.key = write.key;
  append.value = write.value;
  append.batch_indices = buffer_with(fixture, requests, sizeof requests);
  append.positions = buffer_with(fixture, positions, sizeof positions);
  append.indices = buffer_with(fixture, &page, sizeof page);
  append.indptr = buffer_with(fixture, indptr, sizeof indptr);
  EXPECT_OK(clattn_append_paged_kv_cache(fixture->context, fixture->queue, cache, &append));
  EXPECT_OK(clattn_copy_blocks(fixture->context, fixture->queue, &cache, 1, copied, 1, NULL));
  test_moves(fixture, cache);

  ClattnGather gather = {.struct_size = sizeof gather, .num_reqs = 1, .dtype = "f32"};
  gather.cu_seq_lens = sums;
  gather.block_table = table;
  gather.block_table_stride = 1;
  gather.destination.buffer = fixture->buffer;
  EXPECT_OK(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, cache, &gather));
  EXPECT_OK(clattn_buffer_read(fixture->buffer, fixture->queue, 0, rows, sizeof rows));
  EXPECT(rows[1] == 1 && rows[32] == 100 && rows[40] == 32 && rows[40 + 39] == 115);
  EXPECT(rows[2 * 40 + 1] == 1 && rows[2 * 40 + 32] == 100); /* appended */
  EXPECT_INVALID(clattn_gather_and_maybe_dequant_cache(NULL, fixture->queue, cache, &gather),
                 "context is null");
  EXPECT_INVALID(clattn_gather_and_maybe_dequant_cache(fixture->context, NULL, cache, &gather),
                 "queue is null");
  EXPECT_INVALID(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, NULL, &gather),
      "cache is null");
  EXPECT_INVALID(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, cache, NULL),
      "gather is null");
  EXPECT_INVALID(clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue,
                                                       fixture->cache, &gather),
                 "cache: it holds keys and values");
  gather.seq_starts = starts;
  EXPECT_INVALID(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, cache, &gather),
      "seq_starts");
  gather.seq_starts = NULL;
  gather.cu_seq_lens = NULL;
  EXPECT_INVALID(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, cache, &gather),
      "cu_seq_lens is null");
  gather.num_reqs = -1;
  EXPECT_INVALID(
      clattn_gather_and_maybe_dequant_cache(fixture->context, fixture->queue, cache, &gather),
      "num_reqs is -1");
  clattn_buffer_destroy((ClattnBuffer*)write.key.buffer);
  clattn_buffer_destroy((ClattnBuffer*)write.value.buffer);
  clattn_buffer_destroy((ClattnBuffer*)write.slot_mapping);
  clattn_buffer_destroy((ClattnBuffer*)append.batch_indices);
  clattn_buffer_destroy((ClattnBuffer*)append.positions);
  clattn_buffer_destroy((ClattnBuffer*)append.indices);
  clattn_buffer_destroy((ClattnBuffer*)append.indptr);
}

void test_latent_caches(const Fixture* fixture) {
  ClattnLayerConfig config = {.struct_size = sizeof config, .num_heads = 2, .head_size = 40};
  ClattnLayer* layer = NULL;
  ClattnCache* cache = NULL;
  float row[40] = {0}, image[16 * 40];
  const int64_t pair[] = {2, 0}, mixed_pair[] = {0, 1};
  config.use_mla = 1;
  config.rope_dim = 8;
  config.dtype = "f32";
  EXPECT_OK(clattn_layer_create(fixture->context, NULL, &config, &layer));
  EXPECT_OK(clattn_cache_create(layer, fixture->queue, 4, NULL, &cache));
  use_latent_cache(fixture, cache);
  ClattnSwapSpace device = {.struct_size = sizeof device, .cache = cache};
  ClattnSwapSpace host = {.struct_size = sizeof host, .host = image, .host_bytes = sizeof image};
  EXPECT_OK(clattn_swap_blocks(fixture->context, fixture->queue, &device, &host, pair, 1, NULL));
  EXPECT_OK(clattn_queue_finish(fixture->queue));
  EXPECT_OK(clattn_buffer_read(fixture->buffer, fixture->queue, 0, row, sizeof row));
  EXPECT(memcmp(image, row, sizeof row) == 0);
  const ClattnCache* const mixed[] = {cache, fixture->cache};
  EXPECT_INVALID(
      clattn_copy_blocks(fixture->context, fixture->queue, mixed, 2, mixed_pair, 1, NULL),
      "caches: some have latent rows");
  clattn_cache_destroy(cache);
  clattn_layer_destroy(layer);
}
