#pragma once

#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cli/attention_call.hpp"

namespace clattn::cli {

/// One call over latent rows, tensors as element bits on the host.
struct MLACall {
  MLAConfig config;
  std::int32_t num_splits = 0;
  PlanOptions plan;
  float kv_scale = 1;
  CommonAttentionMetadata batch;  ///< over arrays of the caller's
  std::vector<std::byte> query;   // [tokens, num_heads, kv_lora_rank + rope_dim]
  std::vector<std::byte> cache;   // [num_blocks, block_size, kv_lora_rank + rope_dim]
  std::int64_t num_blocks = 0;
};

struct MLAOutcome {
  std::vector<std::byte> out;  // [tokens, num_heads, kv_lora_rank] in config.dtype
  std::vector<float> lse;      // [tokens, num_heads]
  std::vector<LaunchReport> launches;
  bool rounds_weights = false;  ///< KernelInfo::rounds_weights of one of them
};

/// Runs the call `repeat` times over freshly poisoned outputs; times are those of the last. Without
/// tokens nothing is launched. Throws what the library throws.
MLAOutcome execute(const std::shared_ptr<Context>& context, const MLACall& call, int repeat = 1);

}  // namespace clattn::cli
