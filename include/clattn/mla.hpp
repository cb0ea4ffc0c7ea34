#pragma once

#include <clattn/context.hpp>
#include <clattn/types.hpp>
#include <cstdint>

namespace clattn {

/// The cache of one multi-head latent attention layer: [num_blocks, block_size, kv_lora_rank +
/// rope_dim], contiguous; an entry is a token's latent vector followed by its rotary key part.
struct MLACache {
  Buffer buffer;
  DType dtype = DType::kF16;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 0;    ///< tokens per block, >= 1
  std::int32_t kv_lora_rank = 0;  ///< elements of the latent part
  std::int32_t rope_dim = 0;      ///< elements of the rotary part
  /// Quantized types only: f32 [1] on the device, real = stored * scale. Empty = 1.
  Buffer scale;
};

}  // namespace clattn
