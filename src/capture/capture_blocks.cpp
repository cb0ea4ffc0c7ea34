#include <algorithm>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/checked.hpp"
#include "capture/capture.hpp"
#include "capture/case_cache.hpp"
#include "capture/case_writer.hpp"

// Operations on whole blocks, on metadata on the device, and on tensors without a cache.

namespace clattn::detail {
namespace {

using npy::make_array;

void add_mapping(const CaseWriter& writer, std::span<const BlockPair> mapping) {
  std::vector<std::int64_t> ids;
  for (const BlockPair& pair : mapping) {
    ids.push_back(pair.source);
    ids.push_back(pair.destination);
  }
  writer.add("block_mapping",
             make_array("<i8", {std::ssize(mapping), 2}, std::span<const std::int64_t>(ids)));
}

/// The blocks of one side of a swap, all zero: the caller fills in those that are read.
npy::NpyArray blocks_of(const CapturedSwap& call, std::int64_t num_blocks) {
  const auto [tokens, heads, elements] = call.block_shape;
  const auto bytes = to_size(tokens * heads * elements) * element_size_bytes(call.dtype);
  return {std::string(npy::descr_of(call.dtype)),
          {num_blocks, tokens, heads, elements},
          std::vector<std::byte>(checked_mul(to_size(num_blocks), bytes, "captured blocks"))};
}

}  // namespace

AddResults capture_copy_blocks(cl_command_queue handle, AnyCache cache,
                               std::span<const BlockPair> mapping) {
  const Queue queue = Queue::adopt(handle);
  const bool latent = std::holds_alternative<const MLACache*>(cache);
  const std::string_view op = latent ? "copy_blocks_mla" : "copy_blocks";
  CaseWriter writer(environment().capture_dir, op);
  std::vector<std::int32_t> pages;
  for (const BlockPair& pair : mapping) {
    pages.push_back(static_cast<std::int32_t>(pair.source));
    pages.push_back(static_cast<std::int32_t>(pair.destination));
  }
  add_mapping(writer, mapping);
  return std::visit(
      [&](const auto* each) -> AddResults {
        add_cache(writer, queue, *each, pages);
        CaseKeys keys(op);
        add_storage_keys(keys, *each);
        return [place = writer.commit(keys.json()), queue, each, pages = std::move(pages)] {
          queue.finish();
          add_cache(CaseResults(place), queue, *each, pages);
        };
      },
      cache);
}

AddResults capture_gather(cl_command_queue handle, const MLACache& cache, TensorRef destination,
                          DType dtype, const MLAGather& gather) {
  const Queue queue = Queue::adopt(handle);
  CaseWriter writer(environment().capture_dir, "gather_and_maybe_dequant_cache");
  const auto add_indices = [&](std::string_view name, std::span<const std::int32_t> values) {
    writer.add(name, make_array("<i4", {std::ssize(values)}, values));
  };
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
  add_indices("cu_seq_lens", gather.cu_seq_lens);
  writer.add("block_table", make_array("<i4", {num_reqs, gather.block_table_stride},
                                       std::span<const std::int32_t>(table)));
  if (!gather.seq_starts.empty()) add_indices("seq_starts", gather.seq_starts);
  add_cache(writer, queue, cache, used);
  CaseKeys keys("gather_and_maybe_dequant_cache");
  keys.text("dtype", to_string(dtype)).add("kv_lora_rank", cache.kv_lora_rank);
  add_cache_keys(keys, queue, cache);
  const std::vector<std::int64_t> shape = {gather.cu_seq_lens.back(),
                                           std::int64_t{cache.kv_lora_rank} + cache.rope_dim};
  return [place = writer.commit(keys.json()), queue, destination, dtype, shape] {
    queue.finish();
    CaseResults(place).add("dst", read_tensor(queue, destination, dtype, shape));
  };
}

void capture_calc_kv_scales(const CapturedScales& call) {
  const AttentionConfig& config = call.config;
  const Queue queue = Queue::adopt(call.queue);
  CaseWriter writer(environment().capture_dir, "calc_kv_scales");
  const std::int64_t rows = call.num_keys, heads = config.num_kv_heads;
  const std::int64_t k_width = config.use_mla ? config.output_head_size() : config.head_size;
  const std::int64_t v_width = config.use_mla ? config.rope_dim : config.head_size;
  writer.add("key", read_tensor(queue, call.key, config.dtype, {rows, heads, k_width}));
  writer.add("value", read_tensor(queue, call.value, config.dtype, {rows, heads, v_width}));
  writer.add("query", read_tensor(queue, call.query, config.dtype,
                                  {call.num_tokens, config.num_heads, config.head_size}));
  CaseKeys keys("calc_kv_scales");
  keys.text("dtype", to_string(config.dtype))
      .text("kv_cache_dtype", to_string(config.cache_dtype()))
      .add("use_mla", config.use_mla);
  writer.commit(keys.json());
}

void capture_swap_blocks(const CapturedSwap& call) {
  const Queue queue = Queue::adopt(call.queue);
  queue.finish();  // earlier calls may still be writing the host's blocks
  npy::NpyArray source = blocks_of(call, call.source_blocks);
  const std::size_t bytes =
      call.source_blocks == 0 ? 0 : source.data.size() / to_size(call.source_blocks);
  for (const BlockPair& pair : call.mapping) {
    const std::size_t at = call.offset_bytes + to_size(pair.source * call.block_stride);
    const auto to = source.data.begin() + static_cast<std::ptrdiff_t>(to_size(pair.source) * bytes);
    if (call.host != nullptr) {
      std::copy_n(call.host + at, bytes, to);
    } else {
      const std::vector<std::byte> block = read(queue, call.device, at, bytes);
      std::ranges::copy(block, to);
    }
  }
  CaseWriter writer(environment().capture_dir, "swap_blocks");
  writer.add("src_cache", source);
  writer.add("dst_cache", blocks_of(call, call.destination_blocks));
  add_mapping(writer, call.mapping);
  CaseKeys keys("swap_blocks");
  keys.text("kv_cache_dtype", to_string(call.dtype)).text("direction", call.direction);
  writer.commit(keys.json());
}

AddResults capture_advance_step(cl_command_queue handle, const AdvanceStep& step) {
  const Queue queue = Queue::adopt(handle);
  const std::int64_t rows = step.num_seqs, width = step.block_table_stride;
  CaseWriter writer(environment().capture_dir, "advance_step");
  writer.add("seq_lens",
             {"<i4", {rows}, read(queue, step.seq_lens.handle(), 0, to_size(rows) * 4)});
  writer.add("block_table",
             {"<i4",
              {rows, width},
              read(queue, step.block_tables.handle(), 0, to_size(rows * width) * 4)});
  writer.add("sampled_token_ids",
             {"<i8",
              {step.num_queries},
              read(queue, step.sampled_token_ids.handle(), 0, to_size(step.num_queries) * 8)});
  CaseKeys keys("advance_step");
  keys.add("block_size", step.block_size)
      .add("num_queries", step.num_queries)
      .add("num_blocks", std::min<std::int64_t>(step.num_blocks, INT32_MAX));
  return [place = writer.commit(keys.json()), queue, step, rows] {
    queue.finish();
    const CaseResults results(place);
    const auto add = [&](std::string_view name, const Buffer& buffer, std::string_view descr,
                         std::size_t element_bytes) {
      results.add(name, {std::string(descr),
                         {rows},
                         read(queue, buffer.handle(), 0, to_size(rows) * element_bytes)});
    };
    add("input_tokens", step.input_tokens, "<i8", 8);
    add("input_positions", step.input_positions, "<i8", 8);
    add("seq_lens", step.seq_lens, "<i4", 4);
    add("slot_mapping", step.slot_mapping, "<i8", 8);
  };
}

}  // namespace clattn::detail
