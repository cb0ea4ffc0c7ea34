#include "capture/capture_cache_ops.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <variant>
#include <vector>

#include "base/checked.hpp"
#include "capture/case_cache.hpp"
#include "capture/case_writer.hpp"
#include "capture/read.hpp"

namespace clattn::detail {
namespace {

using npy::make_array;
using npy::NpyArray;

void add_mapping(const CaseWriter& writer, std::span<const BlockPair> mapping) {
  std::vector<std::int64_t> ids;
  for (const BlockPair& pair : mapping) {
    ids.push_back(pair.source);
    ids.push_back(pair.destination);
  }
  writer.add("block_mapping",
             make_array("<i8", {std::ssize(mapping), 2}, std::span<const std::int64_t>(ids)));
}

/// The blocks of one side of a swap, zeros but for those that are read.
NpyArray blocks_of(const CapturedSwap& call, std::int64_t num_blocks) {
  const auto [tokens, heads, elements] = call.block_shape;
  const auto bytes = size_of(tokens * heads * elements) * element_size_bytes(call.dtype);
  return {std::string(npy::descr_of(call.dtype)),
          {num_blocks, tokens, heads, elements},
          std::vector<std::byte>(checked_mul(size_of(num_blocks), bytes, "captured blocks"))};
}

}  // namespace

void capture_copy_blocks(cl_command_queue handle, CapturedCache cache,
                         std::span<const BlockPair> mapping) {
  const Queue queue = Queue::adopt(handle);
  CaseWriter writer(environment().capture_dir, "copy_blocks");
  std::vector<std::int32_t> pages;
  for (const BlockPair& pair : mapping) {
    pages.push_back(static_cast<std::int32_t>(pair.source));
    pages.push_back(static_cast<std::int32_t>(pair.destination));
  }
  add_mapping(writer, mapping);
  std::visit(
      [&](const auto* each) {
        add_cache(writer, queue, *each, pages);
        writer.commit(fmt::format("{{\n  \"op\": \"copy_blocks\"{}\n}}\n", storage_keys(*each)));
      },
      cache);
}

void capture_swap_blocks(const CapturedSwap& call) {
  const Queue queue = Queue::adopt(call.queue);
  queue.finish();  // what calls before it bring to the host is there then
  NpyArray source = blocks_of(call, call.source_blocks);
  const std::size_t bytes =
      call.source_blocks == 0 ? 0 : source.data.size() / size_of(call.source_blocks);
  for (const BlockPair& pair : call.mapping) {
    const std::size_t at = call.offset_bytes + size_of(pair.source * call.block_stride);
    const auto to = source.data.begin() + static_cast<std::ptrdiff_t>(size_of(pair.source) * bytes);
    if (call.host != nullptr) {
      std::copy_n(call.host + at, bytes, to);
    } else {
      const std::vector<std::byte> block = read(queue, call.device, at, bytes);
      std::copy(block.begin(), block.end(), to);
    }
  }
  CaseWriter writer(environment().capture_dir, "swap_blocks");
  writer.add("src_cache", source);
  writer.add("dst_cache", blocks_of(call, call.destination_blocks));
  add_mapping(writer, call.mapping);
  writer.commit(
      fmt::format("{{\n  \"op\": \"swap_blocks\",\n  \"kv_cache_dtype\": \"{}\",\n"
                  "  \"direction\": \"{}\"\n}}\n",
                  to_string(call.dtype), call.direction));
}

void capture_advance_step(cl_command_queue handle, const AdvanceStep& step) {
  const Queue queue = Queue::adopt(handle);
  const std::int64_t rows = step.num_seqs, width = step.block_table_stride;
  CaseWriter writer(environment().capture_dir, "advance_step");
  writer.add("seq_lens",
             {"<i4", {rows}, read(queue, step.seq_lens.handle(), 0, size_of(rows) * 4)});
  writer.add("block_table",
             {"<i4",
              {rows, width},
              read(queue, step.block_tables.handle(), 0, size_of(rows * width) * 4)});
  writer.add("sampled_token_ids",
             {"<i8",
              {step.num_queries},
              read(queue, step.sampled_token_ids.handle(), 0, size_of(step.num_queries) * 8)});
  writer.commit(fmt::format(
      "{{\n  \"op\": \"advance_step\",\n  \"block_size\": {},\n  \"num_queries\": {},\n"
      "  \"num_blocks\": {}\n}}\n",
      step.block_size, step.num_queries, std::min<std::int64_t>(step.num_blocks, INT32_MAX)));
}

}  // namespace clattn::detail
