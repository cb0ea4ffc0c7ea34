#include <algorithm>
#include <string_view>
#include <variant>
#include <vector>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "capture/case.hpp"

// Operations on whole blocks, on metadata on the device, and on tensors without a cache.

namespace clattn::detail {
namespace {

/// Returns the ids of all pairs.
std::vector<std::int64_t> add_mapping(const NewCase& made, std::span<const BlockPair> mapping) {
  std::vector<std::int64_t> ids;
  for (const BlockPair& pair : mapping) {
    ids.push_back(pair.source);
    ids.push_back(pair.destination);
  }
  made.add_values("block_mapping", ids, {std::ssize(mapping), 2});
  return ids;
}

}  // namespace

AddResults capture_copy_blocks(cl_command_queue handle, AnyCache cache,
                               std::span<const BlockPair> mapping) {
  const bool latent = std::holds_alternative<const MLACache*>(cache);
  NewCase made(handle, latent ? "copy_blocks_mla" : "copy_blocks");
  const std::vector<std::int64_t> ids = add_mapping(made, mapping);
  CaseCache kept = case_cache(cache);
  std::vector<std::int32_t> pages(ids.begin(), ids.end());
  add_cache(made, kept, pages);
  add_storage_keys(made.keys, kept);
  return commit_cache(made, std::move(kept), std::move(pages));
}

AddResults capture_move_tokens(cl_command_queue handle, AnyCache cache, const TokenMoves& moves) {
  const auto* const rows = std::get_if<const MLACache*>(&cache);
  NewCase made(handle, rows != nullptr ? "move_tokens_mla" : "move_tokens");
  made.add_values("src_slots", moves.src_slots);
  made.add_values("dst_slots", moves.dst_slots);
  made.add_values("starts", moves.starts);
  const std::int32_t block_size =
      rows != nullptr ? (*rows)->block_size : std::get<const KVCache*>(cache)->block_size;
  std::vector<std::int32_t> pages;
  for (const auto& slots : {moves.src_slots, moves.dst_slots})
    for (const std::int64_t slot : slots)
      pages.push_back(static_cast<std::int32_t>(slot / block_size));
  std::ranges::sort(pages);
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  CaseCache kept = case_cache(cache);
  add_cache(made, kept, pages);
  add_storage_keys(made.keys, kept);
  return commit_cache(made, std::move(kept), std::move(pages));
}

AddResults capture_gather(cl_command_queue handle, const MLACache& cache, TensorRef destination,
                          DType dtype, const MLAGather& gather) {
  NewCase made(handle, "gather_and_maybe_dequant_cache");
  const auto num_reqs = std::ssize(gather.cu_seq_lens) - 1;
  // Entries past a request's keys may hold anything and are never read: they stay 0.
  std::vector<std::int32_t> table(gather.block_table.size(), 0), used;
  for (std::int64_t r = 0; r < num_reqs; ++r) {
    const std::int32_t start = gather.seq_starts.empty() ? 0 : gather.seq_starts[to_size(r)];
    const std::int32_t length = gather.cu_seq_lens[to_size(r) + 1] - gather.cu_seq_lens[to_size(r)];
    const std::int64_t first = r * gather.block_table_stride + start / cache.block_size;
    for (std::int64_t c = first; c < first + ceil_div(length, cache.block_size); ++c)
      used.push_back(table[to_size(c)] = gather.block_table[to_size(c)]);
  }
  made.add_values("cu_seq_lens", gather.cu_seq_lens);
  made.add_values("block_table", table, {num_reqs, gather.block_table_stride});
  if (!gather.seq_starts.empty()) made.add_values("seq_starts", gather.seq_starts);
  const CaseCache kept = case_cache(&cache);
  add_cache(made, kept, used);
  made.keys.text("dtype", to_string(dtype)).add("kv_lora_rank", cache.kv_lora_rank);
  add_cache_keys(made, kept);
  const std::vector<std::int64_t> shape = {gather.cu_seq_lens.back(),
                                           std::int64_t{cache.kv_lora_rank} + cache.rope_dim};
  return made.commit([=](const CaseResults& results, const Queue& queue) {
    results.add("dst", read_tensor(queue, destination, dtype, shape));
  });
}

void capture_calc_kv_scales(const CapturedScales& call) {
  const AttentionConfig& config = call.config;
  NewCase made(call.queue, "calc_kv_scales");
  const std::int64_t rows = call.num_keys, heads = config.num_kv_heads;
  const std::int64_t k_width = config.use_mla ? config.output_head_size() : config.head_size;
  const std::int64_t v_width = config.use_mla ? config.rope_dim : config.output_head_size();
  made.add_tensor("key", call.key, config.dtype, {rows, heads, k_width});
  made.add_tensor("value", call.value, config.dtype, {rows, heads, v_width});
  made.add_tensor("query", call.query, config.dtype,
                  {call.num_tokens, config.num_heads, config.head_size});
  made.keys.text("dtype", to_string(config.dtype))
      .text("kv_cache_dtype", to_string(config.cache_dtype()))
      .add("use_mla", config.use_mla);
  made.commit();
}

void capture_swap_blocks(const CapturedSwap& call) {
  NewCase made(call.queue, "swap_blocks");
  made.queue.finish();  // earlier calls may still be writing the host's blocks
  const auto [tokens, heads, elements] = call.block_shape;
  npy::NpyArray source = zeros(call.dtype, {call.source_blocks, tokens, heads, elements});
  const std::size_t bytes =
      call.source_blocks == 0 ? 0 : source.data.size() / to_size(call.source_blocks);
  for (const BlockPair& pair : call.mapping) {
    const std::size_t at = call.offset_bytes + to_size(pair.source * call.block_stride);
    const auto to = source.data.begin() + static_cast<std::ptrdiff_t>(to_size(pair.source) * bytes);
    if (call.host != nullptr) {
      std::copy_n(call.host + at, bytes, to);
    } else {
      const std::vector<std::byte> block = read(made.queue, call.device, at, bytes);
      std::ranges::copy(block, to);
    }
  }
  made.add("src_cache", source);
  made.add("dst_cache", zeros(call.dtype, {call.destination_blocks, tokens, heads, elements}));
  add_mapping(made, call.mapping);
  made.keys.text("kv_cache_dtype", to_string(call.dtype)).text("direction", call.direction);
  made.commit();
}

AddResults capture_advance_step(cl_command_queue handle, const AdvanceStep& step) {
  const std::int64_t rows = step.num_seqs, width = step.block_table_stride;
  NewCase made(handle, "advance_step");
  made.add_values("seq_lens", read_as<std::int32_t>(made.queue, step.seq_lens.handle(), 0, rows));
  made.add_values("block_table",
                  read_as<std::int32_t>(made.queue, step.block_tables.handle(), 0, rows * width),
                  {rows, width});
  made.add_values(
      "sampled_token_ids",
      read_as<std::int64_t>(made.queue, step.sampled_token_ids.handle(), 0, step.num_queries));
  made.keys.add("block_size", step.block_size)
      .add("num_queries", step.num_queries)
      .add("num_blocks", std::min<std::int64_t>(step.num_blocks, INT32_MAX));
  return made.commit([=](const CaseResults& results, const Queue& queue) {
    const auto add = [&]<typename T>(std::string_view name, const Buffer& buffer, T) {
      results.add(name, npy::array_of(read_as<T>(queue, buffer.handle(), 0, rows)));
    };
    add("input_tokens", step.input_tokens, std::int64_t{});
    add("input_positions", step.input_positions, std::int64_t{});
    add("seq_lens", step.seq_lens, std::int32_t{});
    add("slot_mapping", step.slot_mapping, std::int64_t{});
  });
}

}  // namespace clattn::detail
