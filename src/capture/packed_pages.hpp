#pragma once

#include <clattn/context.hpp>
#include <cstdint>

namespace clattn::detail {

/// What kernels, checks and captures know of an x-packed cache: the fields of
/// compat/packed_cache.hpp's PackedKVCache.
struct PackedPages {
  cl_mem key = nullptr, value = nullptr;
  DType dtype = DType::kF16;
  std::int64_t num_blocks = 0;
  std::int32_t block_size = 0, num_kv_heads = 0, head_size = 0;
  Buffer scales = {};
  bool scales_per_head = false;
  std::int64_t key_offset = 0, value_offset = 0;

  /// The element of `key` that holds (block, token, head, dim).
  std::int64_t key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                      std::int64_t dim) const {
    const auto x = static_cast<std::int64_t>(16 / element_size_bytes(dtype));
    const std::int64_t vectors = (block * num_kv_heads + head) * (head_size / x) + dim / x;
    return key_offset + (vectors * block_size + token) * x + dim % x;
  }
  /// And of `value`.
  std::int64_t value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                        std::int64_t dim) const {
    return value_offset + ((block * num_kv_heads + head) * head_size + dim) * block_size + token;
  }
};

}  // namespace clattn::detail
