#pragma once

#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cli/common/attention_call.hpp"
#include "cli/common/device_memory.hpp"

// Calls over caches of another form than K and V pages: latent rows, and x-packed pairs.

namespace clattn::cli {

/// One call over latent rows, tensors as element bits on the host.
struct MLACall {
  MLAConfig config;
  std::int32_t num_splits = 0;
  PlanOptions plan;
  float kv_scale = 1;
  CommonAttentionMetadata batch;                      ///< over arrays of the caller's
  std::span<const std::int32_t> seq_len_bounds = {};  ///< as in AttentionCall
  std::vector<std::byte> query;  // [tokens, num_heads, kv_lora_rank + rope_dim]
  std::vector<std::byte> cache;  // [num_blocks, block_size, kv_lora_rank + rope_dim]
  std::int64_t num_blocks = 0;
};

/// Latent attention is attention of one KV head whose keys and values are the same rows: the layer,
/// the call over rows that a call of such a layer finds in its cache, and the other way round. The
/// batch of the former views the arrays of the latter.
AttentionConfig plain_config(const MLAConfig& config);
MLACall latent_call(const MLAConfig& config, const AttentionCall& call);
AttentionCall attention_call(const MLACall& call);

/// Runs the call `repeat` times over freshly poisoned outputs; times are those of the last. Without
/// tokens nothing is launched. Throws what the library throws.
AttentionOutcome execute(const std::shared_ptr<Context>& context, const MLACall& call,
                         int repeat = 1);

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

/// execute() of a call over an x-packed cache: the given keys and values are stored by
/// reshape_and_cache, then PagedAttention runs. Requests stay in their order.
AttentionOutcome execute_packed(const std::shared_ptr<Context>& context, const AttentionCall& call,
                                int repeat);

}  // namespace clattn::cli
