#include <clattn/block_pool.hpp>
#include <clattn/compat/page.hpp>
#include <clattn/reorder.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnBlockPool : Holds<BlockPool, "pool"> {};
CLATTN_DESTROYS(clattn_block_pool_destroy, ClattnBlockPool)

namespace {

void give_split(const ExtendSplit& found, ClattnBatchSplit* split) {
  fill(split, "split",
       {.struct_size = 0,
        .num_decodes = found.num_decodes,
        .num_extends = found.num_extends,
        .num_prefills = found.num_prefills,
        .num_decode_tokens = found.num_decode_tokens,
        .num_extend_tokens = found.num_extend_tokens,
        .num_prefill_tokens = found.num_prefill_tokens,
        .reserved = 0});
}

/// Pairs of numbers to an array of the application, which takes as many as it has to.
template <typename Pairs>
void give_pairs(const Pairs& pairs, std::int32_t* array, const char* name, std::size_t* count,
                const char* count_name) {
  std::vector<std::int32_t> flat;
  for (const auto& [first, second] : pairs) flat.insert(flat.end(), {first, second});
  std::size_t& number = deref(count, count_name);
  copy_to(flat, array, name);
  number = pairs.size();
}

}  // namespace

ClattnResult clattn_split_decodes_and_prefills(const ClattnBatchInfo* batch,
                                               const ClattnSplitOptions* options,
                                               ClattnBatchSplit* split) {
  return guarded([&] {
    const CommonAttentionMetadata of = plain_batch_of(batch);
    BatchSplit found;
    if (options == nullptr) {
      found = split_decodes_and_prefills(of);
    } else {
      const ClattnSplitOptions& given = read(options, "options");
      SplitOptions how{.require_uniform = given.require_uniform != 0,
                       .treat_short_extends_as_decodes = given.short_extends_are_prefills == 0};
      take(given.decode_threshold, how.decode_threshold);
      if (given.is_prefilling != nullptr) {
        how.is_prefilling = {given.is_prefilling, static_cast<std::size_t>(of.num_reqs)};
      }
      found = split_decodes_and_prefills(of, how);
    }
    give_split({.num_decodes = found.num_decodes,
                .num_prefills = found.num_prefills,
                .num_decode_tokens = found.num_decode_tokens,
                .num_prefill_tokens = found.num_prefill_tokens},
               split);
  });
}

ClattnResult clattn_split_decodes_prefills_and_extends(const ClattnBatchInfo* batch,
                                                       int32_t decode_threshold,
                                                       ClattnBatchSplit* split) {
  return guarded([&] {
    give_split(split_decodes_prefills_and_extends(plain_batch_of(batch), decode_threshold), split);
  });
}

ClattnResult clattn_reorder_batch(const ClattnReorder* reorder, int32_t* moved) {
  return guarded([&] {
    const ClattnReorder& given = read(reorder, "reorder");
    int32_t& any = deref(moved, "moved");
    const std::size_t rows = given.num_reqs;
    const auto scheduled =
        elements(given.num_scheduled_tokens, rows, "reorder: num_scheduled_tokens");
    const auto order = elements(given.order, rows, "reorder: order");
    const bool wanted = given.swaps != nullptr || given.num_swaps != nullptr;
    std::int32_t threshold = 1;
    take(given.decode_threshold, threshold);
    if (given.num_computed_tokens == nullptr && given.num_prompt_tokens == nullptr) {
      detail::throw_invalid_if(wanted, "reorder: swaps without num_computed_tokens, legal: null");
      any = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold, order) ? 1 : 0;
      return;
    }
    const RequestProgress progress{
        scheduled, elements(given.num_computed_tokens, rows, "reorder: num_computed_tokens"),
        elements(given.num_prompt_tokens, rows, "reorder: num_prompt_tokens")};
    std::vector<RowSwap> swaps;
    if (wanted) {
      deref(given.num_swaps, "reorder: num_swaps");
      elements(given.swaps, rows, "reorder: swaps");
    }
    any = reorder_batch_to_split_decodes_and_prefills(progress, threshold, order,
                                                      wanted ? &swaps : nullptr);
    if (wanted)
      give_pairs(swaps, given.swaps, "reorder: swaps", given.num_swaps, "reorder: num_swaps");
  });
}

ClattnResult clattn_reorder_batch_threshold(int32_t num_speculative_tokens,
                                            int32_t parallel_drafting, int32_t* decode_threshold) {
  return give(decode_threshold, "decode_threshold", [&] {
    return reorder_batch_threshold(num_speculative_tokens, parallel_drafting != 0
                                                               ? Drafting::kParallel
                                                               : Drafting::kSequential);
  });
}

ClattnResult clattn_split_prefill_chunks(const int32_t* seq_lens, size_t num_reqs,
                                         int64_t workspace_size, int32_t request_offset,
                                         int32_t* ranges, size_t* num_ranges) {
  return guarded([&] {
    const auto chunks = split_prefill_chunks(elements(seq_lens, num_reqs, "seq_lens"),
                                             workspace_size, request_offset);
    give_pairs(chunks, ranges, "ranges", num_ranges, "num_ranges");
  });
}

ClattnResult clattn_validate_batch(const ClattnBatchInfo* batch, int32_t block_size,
                                   int64_t num_blocks) {
  return guarded([&] {
    detail::throw_invalid_if(num_blocks < 0, "num_blocks is {}, legal: >= 0", num_blocks);
    validate_batch(plain_batch_of(batch), block_size, num_blocks == 0 ? -1 : num_blocks);
  });
}

ClattnResult clattn_compute_slot_mapping(const ClattnBatchInfo* batch, int32_t block_size,
                                         int64_t* slots, size_t num_slots) {
  return guarded([&] {
    compute_slot_mapping(plain_batch_of(batch), block_size, elements(slots, num_slots, "slots"));
  });
}

ClattnResult clattn_pad_slot_mapping(int64_t* slots, size_t num_slots, int32_t num_actual_tokens) {
  return guarded([&] { pad_slot_mapping(elements(slots, num_slots, "slots"), num_actual_tokens); });
}

ClattnResult clattn_map_to_kernel_blocks(const int32_t* block_table, size_t num_entries,
                                         int32_t block_size, int32_t kernel_block_size,
                                         int32_t* kernel_block_table) {
  return guarded([&] {
    detail::throw_invalid_if(
        kernel_block_size < 1 || block_size < 1 || block_size % kernel_block_size != 0,
        "kernel_block_size is {}, legal: a divisor of block_size, {}", kernel_block_size,
        block_size);
    const auto parts = static_cast<std::size_t>(block_size / kernel_block_size);
    map_to_kernel_blocks(elements(block_table, num_entries, "block_table"), block_size,
                         kernel_block_size,
                         elements(kernel_block_table, num_entries * parts, "kernel_block_table"));
  });
}

ClattnResult clattn_build_paged_kv_metadata(const ClattnBatchInfo* batch, int32_t block_size,
                                            int32_t* indptr, int32_t* last_page_len,
                                            int32_t* indices, size_t capacity,
                                            size_t* num_indices) {
  return guarded([&] {
    const PagedKVMetadata lists = build_paged_kv_metadata(plain_batch_of(batch), block_size);
    if (num_indices != nullptr) *num_indices = lists.indices.size();
    copy_to(lists.indptr, indptr, "indptr");
    copy_to(lists.last_page_len, last_page_len, "last_page_len");
    copy_or_count(lists.indices, indices, capacity, "indices");
  });
}

ClattnResult clattn_block_pool_create(int32_t num_blocks, int32_t block_size,
                                      ClattnBlockPool** pool) {
  return make_handle(pool, [&] { return BlockPool(num_blocks, block_size); });
}

ClattnResult clattn_block_pool_info(const ClattnBlockPool* pool, ClattnBlockPoolInfo* info) {
  return guarded([&] {
    const BlockPool& of = held(pool);
    fill(info, "info",
         {.struct_size = 0,
          .num_blocks = of.num_blocks(),
          .block_size = of.block_size(),
          .num_free = of.num_free(),
          .num_used = of.num_used(),
          .peak_used = of.peak_used()});
  });
}

ClattnResult clattn_block_pool_block(const ClattnBlockPool* pool, int32_t block,
                                     int32_t* reference_count, uint64_t* content) {
  return guarded([&] {
    const BlockPool& of = held(pool);
    const std::int32_t references = of.reference_count(block);
    if (reference_count != nullptr) *reference_count = references;
    if (content != nullptr) *content = of.content_of(block);
  });
}

ClattnResult clattn_block_pool_allocate(ClattnBlockPool* pool, int32_t count, int32_t* blocks) {
  return guarded([&] {
    BlockPool& of = held(pool);
    if (count > 0) deref(blocks, "blocks");
    std::ranges::copy(of.allocate(count), blocks);
  });
}

ClattnResult clattn_block_pool_find_prefix(const ClattnBlockPool* pool, const int32_t* token_ids,
                                           size_t num_tokens, uint64_t cache_salt, int32_t* blocks,
                                           size_t* num_blocks) {
  return guarded([&] {
    const BlockPool& of = held(pool);
    const auto tokens = elements(token_ids, num_tokens, "token_ids");
    const auto room =
        elements(blocks, num_tokens / static_cast<std::size_t>(of.block_size()), "blocks");
    std::size_t& count = deref(num_blocks, "num_blocks");
    const auto found = of.find_prefix(tokens, cache_salt);
    std::ranges::copy(found, room.begin());
    count = found.size();
  });
}

ClattnResult clattn_block_pool_share(ClattnBlockPool* pool, const int32_t* blocks,
                                     size_t num_blocks) {
  return guarded([&] { held(pool).share(elements(blocks, num_blocks, "blocks")); });
}

ClattnResult clattn_block_pool_publish(ClattnBlockPool* pool, const int32_t* token_ids,
                                       size_t num_tokens, const int32_t* blocks, size_t num_blocks,
                                       uint64_t cache_salt) {
  return guarded([&] {
    held(pool).publish(elements(token_ids, num_tokens, "token_ids"),
                       elements(blocks, num_blocks, "blocks"), cache_salt);
  });
}

ClattnResult clattn_block_pool_release(ClattnBlockPool* pool, const int32_t* blocks,
                                       size_t num_blocks) {
  return guarded([&] { held(pool).release(elements(blocks, num_blocks, "blocks")); });
}
