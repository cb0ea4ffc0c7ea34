#pragma once

#include <clattn/attention_config.hpp>
#include <clattn/types.hpp>
#include <cstdint>

namespace clattn::cli {

/// The recurrent layers of a hybrid model: gated delta nets, each behind a convolution.
struct DeltaNet {
  std::int32_t num_k_heads = 0, num_v_heads = 0;  ///< 0 = the model has no such layers
  std::int32_t head_k_dim = 128, head_v_dim = 128;
  std::int32_t conv_width = 4;
  std::int32_t full_attention_interval = 4;  ///< of so many layers the last attends
  DType state_dtype = DType::kF32;
  bool in_chunks = true;  ///< prompts by chunk_gated_delta_rule, else token by token
  KernelFamily kernel_family = KernelFamily::kAuto;  ///< of the chunks

  bool exists() const { return num_k_heads > 0; }
  std::int64_t keys() const { return std::int64_t{num_k_heads} * head_k_dim; }
  std::int64_t values() const { return std::int64_t{num_v_heads} * head_v_dim; }
  /// Of the convolution: queries, keys and values beside each other.
  std::int64_t channels() const { return 2 * keys() + values(); }
  std::int64_t state_elements() const { return values() * head_k_dim; }
};

}  // namespace clattn::cli
