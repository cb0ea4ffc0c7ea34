#pragma once

#include <clattn/clattn.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cli/common/attention_call.hpp"
#include "cli/common/device_memory.hpp"

// X-packed caches.

namespace clattn::cli {

/// An x-packed cache of a layer, without memory.
PackedKVCache packed_shape(const AttentionConfig& config, std::int64_t num_blocks);

/// A logical cache in the x-packed order of `config`'s cache, and back.
LogicalCache pack(const AttentionConfig& config, const LogicalCache& logical);
LogicalCache unpack(const AttentionConfig& config, const LogicalCache& packed);

/// An x-packed cache on the device, with the memory that it views.
struct PackedMemory {
  Buffer key, value;
  PackedKVCache cache;

  /// `scales`: [2][1 or num_kv_heads], none = 1.
  PackedMemory(const Context& context, const Queue& queue, const AttentionConfig& config,
               std::int64_t num_blocks, const LogicalCache& logical, std::span<const float> scales);
  /// What it holds, in logical order.
  LogicalCache download(const Queue& queue, const AttentionConfig& config,
                        std::size_t size_bytes) const;
};

}  // namespace clattn::cli
