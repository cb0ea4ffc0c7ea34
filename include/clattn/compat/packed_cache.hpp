#pragma once

#include <clattn/opencl.hpp>

// For the x-packed caches of vLLM V0.

#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

namespace CLATTN_API clattn {

/// The x-packed caches of the original paged-attention kernels: keys [num_blocks, num_kv_heads,
/// head_size / x, block_size, x] with x = 16 / element bytes, values [num_blocks, num_kv_heads,
/// head_size, block_size].
struct PackedKVCache {
  cl_mem key = nullptr;           ///< not retained, as value
  cl_mem value = nullptr;         ///< not retained
  DType dtype = DType::kF16;      ///< as stored
  std::int64_t num_blocks = 0;    ///< pages
  std::int32_t block_size = 0;    ///< tokens, a page
  std::int32_t num_kv_heads = 0;  ///< heads of a token
  std::int32_t head_size = 0;     ///< elements
  Buffer scales = {};             ///< as KVCache's
  bool scales_per_head = false;   ///< as KVCache's
  std::int64_t key_offset = 0;    ///< elements before the keys; attention wants multiples of 8
  std::int64_t value_offset = 0;  ///< of the values, as key_offset

  /// The element of `key` that holds (block, token, head, dim).
  std::int64_t key_at(std::int64_t block, std::int64_t token, std::int64_t head,
                      std::int64_t dim) const;
  /// And of `value`.
  std::int64_t value_at(std::int64_t block, std::int64_t token, std::int64_t head,
                        std::int64_t dim) const;
};

/// {2, num_blocks, block_size * num_kv_heads * head_size}: one allocation of all x-packed keys,
/// then all values. vLLM: PagedAttention.get_kv_cache_shape.
std::array<std::int64_t, 3> get_packed_kv_cache_shape(std::int64_t num_blocks,
                                                      std::int32_t block_size,
                                                      std::int32_t num_kv_heads,
                                                      std::int32_t head_size);

/// Views such an allocation of `spec` pages as the pair; `raw` must outlive the view. Throws
/// kInvalidArgument unless the bytes are a multiple of the page size and head_size one of x, and
/// kUnsupported as reshape_kv_cache and for padding. vLLM: PagedAttention.split_kv_cache.
PackedKVCache split_kv_cache(const Buffer& raw, const KVCacheSpec& spec);

/// As reshape_and_cache_flash, into an x-packed cache. head_size must be a multiple of x. vLLM:
/// reshape_and_cache.
void reshape_and_cache(const Context& context, cl_command_queue queue, TensorRef key,
                       TensorRef value, DType dtype, const PackedKVCache& cache,
                       cl_mem slot_mapping, std::size_t slot_offset_bytes, std::int64_t num_tokens,
                       Event* event = nullptr);

/// As copy_blocks() of cache_ops.hpp, for x-packed caches.
void copy_blocks(const Context& context, cl_command_queue queue,
                 std::span<const PackedKVCache> caches, std::span<const BlockPair> mapping,
                 Event* event = nullptr);

/// An x-packed cache, or a host image of one: all keys, then all values.
using PackedSwapSpace = std::variant<PackedKVCache, std::span<std::byte>>;
/// As swap_blocks() of cache_ops.hpp, for x-packed caches.
void swap_packed_blocks(const Context& context, cl_command_queue queue,
                        const PackedSwapSpace& source, const PackedSwapSpace& destination,
                        std::span<const BlockPair> mapping, Event* event = nullptr);

}  // namespace clattn
