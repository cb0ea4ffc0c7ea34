#pragma once

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <span>
#include <vector>

/// Steps whose directions and trees only the device knows.
namespace attention_test {

/// The batch of a host that knows how many nodes trees may have, a few more than they have, and
/// what the device says.
struct DeviceListBatch {
  clattn::CommonAttentionMetadata batch;
  std::vector<std::uint8_t> direction;
  std::vector<std::int32_t> bounds, sizes;
  std::vector<std::uint32_t> bits;
  std::int64_t stride = 0;

  explicit DeviceListBatch(const clattn::CommonAttentionMetadata& exact) : batch(exact) {
    for (const clattn::Direction each : exact.direction)
      direction.push_back(static_cast<std::uint8_t>(each));
    batch.direction = {};
    if (exact.tree_start_loc.empty()) return;
    bounds = {0};
    for (std::size_t r = 0; r + 1 < exact.tree_start_loc.size(); ++r) {
      const std::int32_t nodes = exact.tree_start_loc[r + 1] - exact.tree_start_loc[r];
      const std::int32_t queries = queries_of(r);
      const std::int32_t most = std::min(exact.seq_lens[r], clattn::kMaxTreeNodes);
      const bool may_have_one = nodes > 0 || (queries > 0 && queries < 9);
      bounds.push_back(bounds.back() +
                       (may_have_one ? std::min(std::max(nodes, queries) + 3, most) : 0));
      sizes.push_back(nodes);
      stride = std::max<std::int64_t>(stride, (bounds[r + 1] - bounds[r] + 31) / 32);
    }
    stride += 1;  // of garbage
    bits.assign(static_cast<std::size_t>(exact.query_start_loc.back() * stride), 0xA5A5A5A5U);
    for (std::size_t r = 0; r < sizes.size(); ++r) put_bits(r);
    batch.tree_start_loc = bounds;
    batch.tree_parents = {};
  }

  /// Puts what the device says into a step's metadata.
  void give(const clattn::Context& context, const clattn::Queue& queue,
            const clattn::AttentionMetadata& metadata) const {
    const auto upload = [&]<typename T>(const std::vector<T>& values) {
      if (values.empty()) return clattn::Buffer{};
      clattn::Buffer buffer = context.allocate(values.size() * sizeof(T));
      queue.write(buffer, std::as_bytes(std::span(values)));
      return buffer;
    };
    clattn::DeviceErrors errors(context, queue);
    clattn::update_lists(queue, metadata,
                         {.direction = upload(direction),
                          .tree_sizes = upload(sizes),
                          .tree_bits = sizes.empty() ? clattn::Buffer{} : upload(bits_or_one()),
                          .tree_bits_stride = stride},
                         errors);
    errors.check(queue);
  }

 private:
  std::int32_t queries_of(std::size_t r) const {
    return batch.query_start_loc[r + 1] - batch.query_start_loc[r];
  }
  void put_bits(std::size_t r) {
    const auto parents = batch.tree_parents.subspan(
        static_cast<std::size_t>(batch.tree_start_loc[r]), static_cast<std::size_t>(sizes[r]));
    for (std::int32_t i = 0; sizes[r] > 0 && i < queries_of(r); ++i) {
      const auto row = static_cast<std::size_t>((batch.query_start_loc[r] + i) * stride);
      const auto words = static_cast<std::size_t>((sizes[r] + 31) / 32);
      std::fill_n(&bits[row], words, 0U);
      std::int32_t node = sizes[r] - queries_of(r) + i;
      for (; node >= 0; node = parents[static_cast<std::size_t>(node)])
        bits[row + static_cast<std::size_t>(node / 32)] |= 1U << (node % 32);
    }
  }
  std::vector<std::uint32_t> bits_or_one() const {
    return bits.empty() ? std::vector<std::uint32_t>(1) : bits;
  }
};

}  // namespace attention_test
