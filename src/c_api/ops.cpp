#include <clattn/cache_ops.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

CLATTN_DESTROYS(clattn_device_errors_destroy, ClattnDeviceErrors)

namespace {

/// A cache of latent rows, in the form of its operations.
MLACache latent_of(const ClattnCache& cache) {
  detail::throw_invalid_if(cache.rope_dim == 0,
                           "cache: it holds keys and values, legal: that of a layer with use_mla");
  return make_mla_cache(cache.in_use(), cache.rope_dim);
}

std::vector<BlockPair> mapping_of(const int64_t* pairs, std::size_t num_pairs) {
  elements(pairs, num_pairs, "pairs");
  std::vector<BlockPair> mapping;
  mapping.reserve(num_pairs);
  for (std::size_t i = 0; i < num_pairs; ++i) mapping.push_back({pairs[2 * i], pairs[2 * i + 1]});
  return mapping;
}

SwapSpace space_of(const ClattnSwapSpace* space, const char* name) {
  const ClattnSwapSpace& given = read(space, name);
  detail::throw_invalid_if((given.cache == nullptr) == (given.host == nullptr),
                           "{}: cache and host are both null or both set, legal: one of them",
                           name);
  if (given.host != nullptr)
    return std::span(static_cast<std::byte*>(given.host), given.host_bytes);
  if (given.cache->rope_dim != 0) return latent_of(*given.cache);
  return given.cache->in_use();
}

OutputWithLse state_of(const ClattnAttnState& given) {
  return {tensor_of(given.output),
          {memory_of(given.lse), given.lse_offset, given.lse_token_stride, given.lse_head_stride}};
}

}  // namespace

ClattnResult clattn_reshape_and_cache(const ClattnContext* context, const ClattnQueue* queue,
                                      const ClattnCache* cache, const ClattnCacheWrite* write) {
  return guarded([&] {
    const ClattnCache& to = deref(cache, "cache");
    const ClattnCacheWrite& given = read(write, "write");
    const auto store = [&](auto operation, const auto& of) {
      operation(*held(context), held(queue), tensor_of(given.key), tensor_of(given.value),
                dtype_of(given.dtype), of, memory_of(given.slot_mapping), given.slot_offset_bytes,
                given.num_tokens, event_of(given.event));
    };
    if (to.rope_dim != 0) return store(concat_and_cache_mla, latent_of(to));
    store(reshape_and_cache_flash, to.in_use());
  });
}

ClattnResult clattn_append_paged_kv_cache(const ClattnContext* context, const ClattnQueue* queue,
                                          const ClattnCache* cache,
                                          const ClattnCacheAppend* append) {
  return guarded([&] {
    const ClattnCache& to = deref(cache, "cache");
    const ClattnCacheAppend& given = read(append, "append");
    const auto store = [&](auto operation, const auto& of) {
      operation(*held(context), held(queue), tensor_of(given.key), tensor_of(given.value),
                dtype_of(given.dtype), of, buffer_of(given.batch_indices),
                buffer_of(given.positions), given.num_tokens,
                {buffer_of(given.indices), buffer_of(given.indptr), given.num_reqs},
                event_of(given.event));
    };
    if (to.rope_dim != 0) return store(append_paged_mla_kv_cache, latent_of(to));
    store(append_paged_kv_cache, to.in_use());
  });
}

namespace {

/// Calls of_heads(caches) or of_rows(caches), as the caches are.
template <typename OfHeads, typename OfRows>
void with_caches(const ClattnCache* const* caches, size_t num_caches, const OfHeads& of_heads,
                 const OfRows& of_rows) {
  std::vector<KVCache> heads;
  std::vector<MLACache> rows;
  for (const ClattnCache* const cache : elements(caches, num_caches, "caches")) {
    const ClattnCache& each = deref(cache, "caches: an element");
    if (each.rope_dim != 0) {
      rows.push_back(latent_of(each));
    } else {
      heads.push_back(each.in_use());
    }
  }
  detail::throw_invalid_if(!heads.empty() && !rows.empty(),
                           "caches: some have latent rows and others not, legal: all alike");
  if (!rows.empty()) return of_rows(rows);
  of_heads(heads);
}

/// move_tokens() by the lists of either kind.
template <typename Moves>
void move_in(const ClattnContext* context, const ClattnQueue* queue,
             const ClattnCache* const* caches, size_t num_caches, const Moves& moves,
             ClattnEvent* event) {
  const Context& in = *held(context);
  const Queue& on = held(queue);
  with_caches(
      caches, num_caches,
      [&](const auto& heads) { move_tokens(in, on, heads, moves, event_of(event)); },
      [&](const auto& rows) { move_tokens_mla(in, on, rows, moves, event_of(event)); });
}

}  // namespace

ClattnResult clattn_copy_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                const ClattnCache* const* caches, size_t num_caches,
                                const int64_t* pairs, size_t num_pairs, ClattnEvent* event) {
  return guarded([&] {
    const Context& in = *held(context);
    const Queue& on = held(queue);
    const auto mapping = mapping_of(pairs, num_pairs);
    with_caches(
        caches, num_caches,
        [&](const auto& heads) { copy_blocks(in, on, heads, mapping, event_of(event)); },
        [&](const auto& rows) { copy_blocks_mla(in, on, rows, mapping, event_of(event)); });
  });
}

ClattnResult clattn_move_tokens(const ClattnContext* context, const ClattnQueue* queue,
                                const ClattnCache* const* caches, size_t num_caches,
                                const int64_t* src_slots, const int64_t* dst_slots,
                                const int32_t* starts, size_t num_requests, ClattnEvent* event) {
  return guarded([&] {
    TokenMoves moves;
    detail::throw_invalid_if(num_requests > INT32_MAX, "num_requests is {}, legal: at most {}",
                             num_requests, INT32_MAX);
    moves.starts = elements(starts, num_requests + 1, "starts");
    const std::int32_t pairs = moves.starts.back();
    detail::throw_invalid_if(pairs < 0, "starts[{}] is {}, legal: >= 0", num_requests, pairs);
    moves.src_slots = elements(src_slots, static_cast<std::size_t>(pairs), "src_slots");
    moves.dst_slots = elements(dst_slots, static_cast<std::size_t>(pairs), "dst_slots");
    move_in(context, queue, caches, num_caches, moves, event);
  });
}

ClattnResult clattn_move_tokens_by_device(const ClattnContext* context, const ClattnQueue* queue,
                                          const ClattnCache* const* caches, size_t num_caches,
                                          const ClattnBuffer* src_slots,
                                          const ClattnBuffer* dst_slots, const ClattnBuffer* starts,
                                          int32_t num_requests, ClattnEvent* event) {
  return guarded([&] {
    const DeviceTokenMoves moves{buffer_of(src_slots), buffer_of(dst_slots), buffer_of(starts),
                                 num_requests};
    move_in(context, queue, caches, num_caches, moves, event);
  });
}

ClattnResult clattn_swap_blocks(const ClattnContext* context, const ClattnQueue* queue,
                                const ClattnSwapSpace* source, const ClattnSwapSpace* destination,
                                const int64_t* pairs, size_t num_pairs, ClattnEvent* event) {
  return guarded([&] {
    swap_blocks(*held(context), held(queue), space_of(source, "source"),
                space_of(destination, "destination"), mapping_of(pairs, num_pairs),
                event_of(event));
  });
}

ClattnResult clattn_gather_and_maybe_dequant_cache(const ClattnContext* context,
                                                   const ClattnQueue* queue,
                                                   const ClattnCache* cache,
                                                   const ClattnGather* gather) {
  return guarded([&] {
    const MLACache from = latent_of(deref(cache, "cache"));
    const ClattnGather& given = read(gather, "gather");
    const GroupPages pages =
        pages_of({given.block_table, given.block_table_stride, nullptr, 0}, given.num_reqs);
    const auto rows = static_cast<std::size_t>(given.num_reqs);
    MLAGather which{elements(given.cu_seq_lens, rows + 1, "gather: cu_seq_lens"),
                    pages.block_table,
                    pages.block_table_stride,
                    {}};
    if (given.seq_starts != nullptr) which.seq_starts = {given.seq_starts, rows};
    gather_and_maybe_dequant_cache(*held(context), held(queue), from, tensor_of(given.destination),
                                   dtype_of(given.dtype), which, event_of(given.event));
  });
}

ClattnResult clattn_merge_attn_states(const ClattnContext* context, const ClattnQueue* queue,
                                      const ClattnMerge* merge) {
  return guarded([&] {
    const ClattnMerge& given = read(merge, "merge");
    const std::int64_t alone = given.tokens_without_prefix;
    detail::throw_invalid_if(alone < 0 || alone > given.num_tokens,
                             "merge: tokens_without_prefix is {}, legal: 0 to num_tokens, {}",
                             alone, given.num_tokens);
    MergeAttnStates config{.num_tokens = given.num_tokens,
                           .num_heads = given.num_heads,
                           .head_size = given.head_size,
                           .dtype = dtype_of(given.dtype),
                           .lse_base = given.lse_base2 != 0 ? LseBase::k2 : LseBase::kE,
                           .output_scale = buffer_of(given.output_scale)};
    if (alone != 0) config.prefill_tokens_with_context = given.num_tokens - alone;
    if (given.output_dtype != nullptr) config.output_dtype = parse_dtype(given.output_dtype);
    merge_attn_states(*held(context), held(queue), config, state_of(given.merged),
                      state_of(given.prefix), state_of(given.suffix), event_of(given.event));
  });
}

ClattnResult clattn_device_errors_create(const ClattnContext* context, const ClattnQueue* queue,
                                         ClattnDeviceErrors** errors) {
  return make_handle(errors, [&] { return DeviceErrors(*held(context), held(queue)); });
}

ClattnResult clattn_device_errors_check(ClattnDeviceErrors* errors, const ClattnQueue* queue) {
  return guarded([&] { held(errors).check(held(queue)); });
}

ClattnResult clattn_update_seq_lens(const ClattnQueue* queue, const ClattnStep* step,
                                    const ClattnBuffer* seq_lens, const ClattnBuffer* slot_mapping,
                                    ClattnDeviceErrors* errors, ClattnEvent* event) {
  return guarded([&] {
    update_seq_lens(held(queue), metadata_of(step),
                    {held(seq_lens, "seq_lens"), buffer_of(slot_mapping)}, held(errors),
                    event_of(event));
  });
}

ClattnResult clattn_update_query_lens(const ClattnQueue* queue, const ClattnStep* step,
                                      const ClattnBuffer* query_start_loc,
                                      const ClattnBuffer* seq_lens,
                                      const ClattnBuffer* slot_mapping, ClattnDeviceErrors* errors,
                                      ClattnEvent* event) {
  return guarded([&] {
    update_query_lens(held(queue), metadata_of(step),
                      {held(query_start_loc, "query_start_loc"), held(seq_lens, "seq_lens"),
                       buffer_of(slot_mapping)},
                      held(errors), event_of(event));
  });
}

ClattnResult clattn_update_lists(const ClattnQueue* queue, const ClattnStep* step,
                                 const ClattnDeviceLists* lists, ClattnDeviceErrors* errors,
                                 ClattnEvent* event) {
  return guarded([&] {
    const Queue& on = held(queue);
    const AttentionMetadata& metadata = metadata_of(step);
    const ClattnDeviceLists& given = read(lists, "lists");
    update_lists(on, metadata,
                 {.direction = buffer_of(given.direction),
                  .tree_sizes = buffer_of(given.tree_sizes),
                  .tree_bits = buffer_of(given.tree_bits),
                  .tree_bits_stride = given.tree_bits_stride},
                 held(errors), event_of(event));
  });
}

ClattnResult clattn_advance_step(const ClattnContext* context, const ClattnQueue* queue,
                                 const ClattnAdvanceStep* advance, ClattnDeviceErrors* errors,
                                 ClattnEvent* event) {
  return guarded([&] {
    const Context& in = *held(context);
    const Queue& on = held(queue);
    const ClattnAdvanceStep& given = read(advance, "advance");
    DeviceErrors& to = held(errors);
    AdvanceStep batch{.num_seqs = given.num_seqs,
                      .num_queries = given.num_queries,
                      .num_blocks = given.num_blocks,
                      .input_tokens = buffer_of(given.input_tokens),
                      .sampled_token_ids = buffer_of(given.sampled_token_ids),
                      .input_positions = buffer_of(given.input_positions),
                      .seq_lens = buffer_of(given.seq_lens),
                      .slot_mapping = buffer_of(given.slot_mapping),
                      .block_tables = buffer_of(given.block_tables),
                      .block_table_stride = given.block_table_stride,
                      .metadata = given.step == nullptr ? nullptr : &metadata_of(given.step)};
    take(given.block_size, batch.block_size);
    const AdvanceStepPages pages{
        buffer_of(given.paged_kv_indices), buffer_of(given.paged_kv_indptr),
        buffer_of(given.paged_kv_last_page_len), buffer_of(given.block_table_bound)};
    const int lists = int{bool{pages.paged_kv_indices}} + int{bool{pages.paged_kv_indptr}} +
                      int{bool{pages.paged_kv_last_page_len}} + int{bool{pages.block_table_bound}};
    detail::throw_invalid_if(lists != 0 && lists != 4,
                             "advance: {} of four buffers of page lists, legal: all or none",
                             lists);
    if (lists == 0) return advance_step_flashattn(in, on, batch, to, event_of(event));
    advance_step_flashinfer(in, on, batch, pages, to, event_of(event));
  });
}
