#pragma once

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <span>
#include <vector>

/// Steps whose lengths only the device knows.
namespace attention_test {

/// The batch of a host that has bounds, so many tokens above each length, with block tables that
/// name a page of nobody behind the request's own.
struct BoundedBatch {
  std::vector<std::int32_t> bounds, table;
  clattn::CommonAttentionMetadata batch;

  BoundedBatch(const clattn::CommonAttentionMetadata& exact, std::int32_t block_size,
               std::int32_t above)
      : bounds(exact.seq_lens.begin(), exact.seq_lens.end()), batch(exact) {
    std::int32_t unowned = 0;
    while (std::ranges::count(exact.block_table, unowned) > 0) ++unowned;
    batch.block_table_stride += above / block_size + 1;
    for (std::size_t r = 0; r < bounds.size(); ++r) {
      const std::size_t row = r * static_cast<std::size_t>(exact.block_table_stride);
      for (std::int64_t p = 0; p < batch.block_table_stride; ++p) {
        const bool own = p * block_size < bounds[r];
        table.push_back(own ? exact.block_table[row + static_cast<std::size_t>(p)] : unowned);
      }
    }
    for (std::int32_t& bound : bounds) bound += above;
    batch.seq_lens = bounds;
    batch.block_table = table;
  }
};

/// Puts lengths that the device must accept into a step's metadata.
inline void give_lengths(const clattn::Context& context, const clattn::Queue& queue,
                         const clattn::AttentionMetadata& metadata,
                         std::span<const std::int32_t> seq_lens) {
  const clattn::Buffer lens = context.allocate(std::max<std::size_t>(seq_lens.size_bytes(), 4));
  queue.write(lens, std::as_bytes(seq_lens));
  clattn::DeviceErrors errors(context, queue);
  clattn::update_seq_lens(queue, metadata, {lens}, errors);
  errors.check(queue);
}

}  // namespace attention_test
