/* Host arithmetic: order, split, slots, page lists, masks, blocks. */
#include "expect.h"

/* A decode, an extend of 3 over 10 tokens, a prefill of 2. */
static ClattnBatchInfo mixed_batch(void) {
  static const int32_t starts[] = {0, 1, 4, 6}, lens[] = {20, 10, 2};
  static const int32_t pages[] = {3, 0, 1, 0, 2, 0};
  ClattnBatchInfo batch = {.struct_size = sizeof batch, .num_reqs = 3};
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.block_table = pages;
  batch.block_table_stride = 2;
  return batch;
}

static void test_split(void) {
  ClattnBatchInfo batch = mixed_batch();
  ClattnBatchSplit split = {.struct_size = sizeof split};
  ClattnSplitOptions options = {.struct_size = sizeof options, .decode_threshold = 3};
  const uint8_t prefilling[] = {0, 1, 1};
  EXPECT_OK(clattn_split_decodes_and_prefills(&batch, NULL, &split));
  EXPECT(split.num_decodes == 1 && split.num_decode_tokens == 1);
  EXPECT(split.num_prefills == 2 && split.num_prefill_tokens == 5);
  EXPECT_OK(clattn_split_decodes_and_prefills(&batch, &options, &split));
  EXPECT(split.num_decodes == 3 && split.num_prefill_tokens == 0);
  options.short_extends_are_prefills = 1;
  EXPECT_INVALID(clattn_split_decodes_and_prefills(&batch, &options, &split), "is_prefilling");
  options.is_prefilling = prefilling;
  EXPECT_OK(clattn_split_decodes_and_prefills(&batch, &options, &split));
  EXPECT(split.num_decodes == 1 && split.num_prefills == 2);
  options.short_extends_are_prefills = 0;
  options.is_prefilling = NULL;
  options.require_uniform = 1;
  EXPECT_OK(clattn_split_decodes_and_prefills(&batch, &options, &split));
  EXPECT(split.num_decodes == 1 && split.num_prefill_tokens == 5);
  EXPECT_INVALID(clattn_split_decodes_and_prefills(NULL, NULL, &split), "batch is null");
  EXPECT_INVALID(clattn_split_decodes_and_prefills(&batch, NULL, NULL), "split is null");
  options.struct_size = 4;
  EXPECT_INVALID(clattn_split_decodes_and_prefills(&batch, &options, &split),
                 "options: struct_size is 4");

  EXPECT_OK(clattn_split_decodes_prefills_and_extends(&batch, 1, &split));
  EXPECT(split.num_decodes == 1 && split.num_extends == 1 && split.num_extend_tokens == 3);
  EXPECT(split.num_prefills == 1 && split.num_prefill_tokens == 2);
  EXPECT_INVALID(clattn_split_decodes_prefills_and_extends(NULL, 1, &split), "batch is null");
  EXPECT_INVALID(clattn_split_decodes_prefills_and_extends(&batch, 1, NULL), "split is null");
  batch.fast_build = 1;
  EXPECT_INVALID(clattn_split_decodes_prefills_and_extends(&batch, 1, &split), "fast_build 1");
}

static void test_reorder(void) {
  const int32_t scheduled[] = {5, 1, 4, 1}, computed[] = {0, 9, 8, 3}, prompt[] = {5, 9, 12, 9};
  int32_t order[4], swaps[8], moved = -1, threshold = 0, ranges[8];
  size_t num_swaps = 99, num_ranges = 99;
  ClattnReorder reorder = {.struct_size = sizeof reorder, .num_reqs = 4};
  reorder.num_scheduled_tokens = scheduled;
  reorder.order = order;
  EXPECT_OK(clattn_reorder_batch(&reorder, &moved));
  EXPECT(moved == 1 && scheduled[order[0]] == 1 && scheduled[order[1]] == 1);
  reorder.num_computed_tokens = computed;
  reorder.num_prompt_tokens = prompt;
  EXPECT_OK(clattn_reorder_batch(&reorder, &moved)); /* a decode, short and long extend, prefill */
  EXPECT(moved == 1 && order[0] == 1 && order[1] == 3 && order[2] == 2 && order[3] == 0);
  reorder.swaps = swaps;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "num_swaps is null");
  reorder.num_swaps = &num_swaps;
  EXPECT_OK(clattn_reorder_batch(&reorder, &moved));
  int32_t rows[] = {0, 1, 2, 3};
  for (size_t i = 0; i < num_swaps && i < 4; ++i) {
    const int32_t row = rows[swaps[2 * i]];
    rows[swaps[2 * i]] = rows[swaps[2 * i + 1]];
    rows[swaps[2 * i + 1]] = row;
  }
  EXPECT(num_swaps == 2 && memcmp(rows, order, sizeof rows) == 0);
  reorder.swaps = NULL;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "swaps is null");
  reorder.num_prompt_tokens = NULL;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "num_prompt_tokens is null");
  reorder.num_computed_tokens = NULL;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "swaps without num_computed_tokens");
  reorder.num_swaps = NULL;
  reorder.order = NULL;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "order is null");
  reorder.num_scheduled_tokens = NULL;
  EXPECT_INVALID(clattn_reorder_batch(&reorder, &moved), "num_scheduled_tokens is null");
  EXPECT_INVALID(clattn_reorder_batch(NULL, &moved), "reorder is null");
  EXPECT_INVALID(clattn_reorder_batch(&reorder, NULL), "moved is null");

  EXPECT_OK(clattn_reorder_batch_threshold(3, 0, &threshold));
  EXPECT(threshold == 4);
  EXPECT_OK(clattn_reorder_batch_threshold(3, 1, &threshold));
  EXPECT(threshold == 7);
  EXPECT_INVALID(clattn_reorder_batch_threshold(3, 1, NULL), "decode_threshold is null");
  EXPECT_INVALID(clattn_reorder_batch_threshold(-1, 0, &threshold), "num_speculative_tokens");

  EXPECT_OK(clattn_split_prefill_chunks(scheduled, 4, 6, 10, ranges, &num_ranges));
  EXPECT(num_ranges == 2 && ranges[0] == 10 && ranges[1] == 12);
  EXPECT(ranges[2] == 12 && ranges[3] == 14);
  EXPECT_INVALID(clattn_split_prefill_chunks(scheduled, 4, 4, 0, ranges, &num_ranges), "5");
  EXPECT_INVALID(clattn_split_prefill_chunks(NULL, 4, 6, 0, ranges, &num_ranges),
                 "seq_lens is null");
  EXPECT_INVALID(clattn_split_prefill_chunks(scheduled, 4, 6, 0, NULL, &num_ranges),
                 "ranges is null");
  EXPECT_INVALID(clattn_split_prefill_chunks(scheduled, 4, 6, 0, ranges, NULL),
                 "num_ranges is null");
}

static void test_slots(void) {
  ClattnBatchInfo batch = mixed_batch();
  int64_t slots[8];
  const int32_t large[] = {2, -1};
  int32_t small[4], indptr[4], last[3], indices[4];
  size_t count = 0;
  EXPECT_OK(clattn_validate_batch(&batch, 16, 4));
  EXPECT_OK(clattn_validate_batch(&batch, 16, 0));
  EXPECT_INVALID(clattn_validate_batch(&batch, 16, 3), "block_table");
  EXPECT_INVALID(clattn_validate_batch(&batch, 0, 4), "block_size");
  EXPECT_INVALID(clattn_validate_batch(&batch, 16, -1), "num_blocks is -1");
  EXPECT_INVALID(clattn_validate_batch(NULL, 16, 4), "batch is null");

  EXPECT_OK(clattn_compute_slot_mapping(&batch, 16, slots, 8));
  EXPECT(slots[0] == 0 * 16 + 3 && slots[1] == 1 * 16 + 7 && slots[3] == 1 * 16 + 9);
  EXPECT(slots[4] == 2 * 16 && slots[5] == 2 * 16 + 1 && slots[6] == -1 && slots[7] == -1);
  EXPECT_INVALID(clattn_compute_slot_mapping(&batch, 16, slots, 5), "5");
  EXPECT_INVALID(clattn_compute_slot_mapping(&batch, 16, NULL, 8), "slots is null");
  EXPECT_INVALID(clattn_compute_slot_mapping(NULL, 16, slots, 8), "batch is null");
  EXPECT_OK(clattn_pad_slot_mapping(slots, 8, 2));
  EXPECT(slots[1] == 23 && slots[2] == -1 && slots[7] == -1);
  EXPECT_INVALID(clattn_pad_slot_mapping(slots, 8, 9), "9");
  EXPECT_INVALID(clattn_pad_slot_mapping(NULL, 8, 2), "slots is null");

  EXPECT_OK(clattn_map_to_kernel_blocks(large, 2, 32, 16, small));
  EXPECT(small[0] == 4 && small[1] == 5 && small[2] == -1 && small[3] == -1);
  EXPECT_INVALID(clattn_map_to_kernel_blocks(large, 2, 32, 12, small), "kernel_block_size is 12");
  EXPECT_INVALID(clattn_map_to_kernel_blocks(large, 2, 32, 0, small), "kernel_block_size is 0");
  EXPECT_INVALID(clattn_map_to_kernel_blocks(NULL, 2, 32, 16, small), "block_table is null");
  EXPECT_INVALID(clattn_map_to_kernel_blocks(large, 2, 32, 16, NULL), "kernel_block_table is null");

  EXPECT_OK(clattn_build_paged_kv_metadata(&batch, 16, indptr, last, NULL, 0, &count));
  EXPECT(count == 4 && indptr[1] == 2 && indptr[3] == 4 && last[0] == 4 && last[2] == 2);
  EXPECT_OK(clattn_build_paged_kv_metadata(&batch, 16, indptr, last, indices, 4, NULL));
  EXPECT(indices[0] == 3 && indices[1] == 0 && indices[2] == 1 && indices[3] == 2);
  EXPECT_INVALID(clattn_build_paged_kv_metadata(&batch, 16, indptr, last, indices, 3, NULL),
                 "indices: 3 elements, legal: >= 4");
  EXPECT_INVALID(clattn_build_paged_kv_metadata(&batch, 16, indptr, last, NULL, 4, NULL),
                 "indices is null");
  EXPECT_INVALID(clattn_build_paged_kv_metadata(&batch, 16, NULL, last, indices, 4, NULL),
                 "indptr is null");
  EXPECT_INVALID(clattn_build_paged_kv_metadata(&batch, 16, indptr, NULL, indices, 4, NULL),
                 "last_page_len is null");
  EXPECT_INVALID(clattn_build_paged_kv_metadata(NULL, 16, indptr, last, indices, 4, NULL),
                 "batch is null");
}

void test_metadata(void) {
  test_split();
  test_reorder();
  test_slots();
}

static void refuse_pool_calls(ClattnBlockPool* pool) {
  const int32_t tokens[4] = {1, 2, 3, 4}, foreign = 9;
  int32_t blocks[8];
  size_t count = 0;
  ClattnBlockPool* none = NULL;
  ClattnBlockPoolInfo info = {.struct_size = sizeof info};
  EXPECT_INVALID(clattn_block_pool_create(0, 4, &none), "num_blocks");
  EXPECT_INVALID(clattn_block_pool_create(1, 0, &none), "block_size");
  EXPECT_INVALID(clattn_block_pool_create(1, 4, NULL), "pool is null");
  EXPECT_INVALID(clattn_block_pool_info(NULL, &info), "pool is null");
  EXPECT_INVALID(clattn_block_pool_info(pool, NULL), "info is null");
  EXPECT_INVALID(clattn_block_pool_block(NULL, 0, NULL, NULL), "pool is null");
  EXPECT_INVALID(clattn_block_pool_block(pool, 9, NULL, NULL), "9");
  EXPECT_INVALID(clattn_block_pool_allocate(NULL, 1, blocks), "pool is null");
  EXPECT_INVALID(clattn_block_pool_allocate(pool, 1, NULL), "blocks is null");
  EXPECT_INVALID(clattn_block_pool_allocate(pool, -1, blocks), "-1");
  EXPECT_INVALID(clattn_block_pool_find_prefix(NULL, tokens, 4, 0, blocks, &count), "pool is null");
  EXPECT_INVALID(clattn_block_pool_find_prefix(pool, NULL, 4, 0, blocks, &count),
                 "token_ids is null");
  EXPECT_INVALID(clattn_block_pool_find_prefix(pool, tokens, 4, 0, NULL, &count), "blocks is null");
  EXPECT_INVALID(clattn_block_pool_find_prefix(pool, tokens, 4, 0, blocks, NULL),
                 "num_blocks is null");
  EXPECT_INVALID(clattn_block_pool_share(NULL, blocks, 0), "pool is null");
  EXPECT_INVALID(clattn_block_pool_share(pool, NULL, 1), "blocks is null");
  EXPECT_INVALID(clattn_block_pool_share(pool, &foreign, 1), "9");
  EXPECT_INVALID(clattn_block_pool_publish(NULL, tokens, 4, blocks, 1, 0), "pool is null");
  EXPECT_INVALID(clattn_block_pool_publish(pool, NULL, 4, blocks, 1, 0), "token_ids is null");
  EXPECT_INVALID(clattn_block_pool_publish(pool, tokens, 4, NULL, 1, 0), "blocks is null");
  EXPECT_INVALID(clattn_block_pool_release(NULL, blocks, 0), "pool is null");
  EXPECT_INVALID(clattn_block_pool_release(pool, NULL, 1), "blocks is null");
  EXPECT_INVALID(clattn_block_pool_release(pool, &foreign, 1), "9");
  clattn_block_pool_destroy(NULL);
}

void test_block_pool(void) {
  const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  int32_t blocks[3], found[2], references = 0;
  uint64_t content = 0;
  size_t count = 0;
  ClattnBlockPool* pool = NULL;
  ClattnBlockPoolInfo info = {.struct_size = sizeof info};
  EXPECT_OK(clattn_block_pool_create(4, 4, &pool));
  EXPECT_OK(clattn_block_pool_allocate(pool, 3, blocks));
  EXPECT(clattn_block_pool_allocate(pool, 2, found) == CLATTN_ERROR_OUT_OF_BLOCKS);
  EXPECT_OK(clattn_block_pool_publish(pool, tokens, 9, blocks, 3, 5));
  EXPECT_OK(clattn_block_pool_find_prefix(pool, tokens, 9, 0, found, &count));
  EXPECT(count == 0); /* of another salt */
  EXPECT_OK(clattn_block_pool_find_prefix(pool, tokens, 9, 5, found, &count));
  EXPECT(count == 2 && found[0] == blocks[0] && found[1] == blocks[1]);
  EXPECT_OK(clattn_block_pool_share(pool, found, 2));
  EXPECT_OK(clattn_block_pool_block(pool, blocks[0], &references, &content));
  EXPECT(references == 2 && content > 0);
  EXPECT_OK(clattn_block_pool_block(pool, blocks[2], &references, &content));
  EXPECT(references == 1 && content == 0);
  EXPECT_OK(clattn_block_pool_release(pool, blocks, 3));
  EXPECT_OK(clattn_block_pool_info(pool, &info));
  EXPECT(info.num_blocks == 4 && info.block_size == 4 && info.num_free == 2);
  EXPECT(info.num_used == 2 && info.peak_used == 3);
  refuse_pool_calls(pool);
  clattn_block_pool_destroy(pool);
}
