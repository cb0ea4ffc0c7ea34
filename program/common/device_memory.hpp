#pragma once

#include <algorithm>
#include <clattn/attention.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/context.hpp>
#include <clattn/kv_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace clattn::cli {

/// NaN in f32, f16 and bf16 alike: what memory that must not be used is filled with.
inline constexpr std::uint32_t kPoison = 0x7FC07FC0U;

/// So many bytes of it.
std::vector<std::byte> poisoned(std::size_t size_bytes);

/// Elements of a head's row of values in a cache; of latent rows, which are both, of a whole one.
inline std::int32_t value_width(const AttentionConfig& config) {
  return config.use_mla ? config.head_size : config.output_head_size();
}
inline std::int32_t value_width(const KVCache& cache) {
  return cache.value_size();
}
inline std::int32_t value_width(const PackedKVCache& cache) {
  return cache.head_size;
}

/// The pages that a layer of a configuration keeps its keys and values in.
inline KVCacheSpec spec_of(const AttentionConfig& config) {
  return {.block_size = config.block_size,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size,
          .dtype = config.cache_dtype(),
          .use_mla = config.use_mla,
          .head_size_v = value_width(config) == config.head_size ? 0 : value_width(config),
          .kv_quant_mode = config.cache_format().scales_per_row() ? KVQuantMode::kPerTokenHead
                                                                  : KVQuantMode::kNone};
}

/// A device copy of host elements; an empty range still gets a buffer.
template <typename T>
Buffer upload(const Context& context, const Queue& queue, std::span<const T> values) {
  Buffer buffer = context.allocate(std::max<std::size_t>(values.size_bytes(), 4));
  if (!values.empty()) queue.write(buffer, std::as_bytes(values));
  return buffer;
}

template <typename T>
Buffer upload(const Context& context, const Queue& queue, const std::vector<T>& values) {
  return upload(context, queue, std::span(values));
}

template <typename T>
std::vector<T> download(const Queue& queue, const Buffer& buffer, std::size_t count) {
  std::vector<T> values(count);
  queue.read(buffer, std::as_writable_bytes(std::span(values)));
  return values;
}

/// A device, and a queue that measures what calls on it take.
struct OnDevice {
  std::shared_ptr<Context> context;
  Queue queue = context->create_queue(QueueProfiling::kOn);

  template <typename Values>
  Buffer up(const Values& values) const {
    return upload(*context, queue, values);
  }
  template <typename T>
  std::vector<T> down(const Buffer& buffer, std::size_t count) const {
    return download<T>(queue, buffer, count);
  }
};

/// What a profiled command took; 0 of none.
inline double microseconds(const Event& event) {
  return static_cast<double>(event.duration_ns()) * 1e-3;
}

/// An output buffer that shows when a kernel writes too little or too much: poison inside before
/// each launch, poisoned guard bands on both sides.
class GuardedOutput {
 public:
  static constexpr std::size_t kGuardBytes = 4096;

  /// `front_bytes`: the band before, which calls that take no offset leave no room for.
  GuardedOutput(const Context& context, std::size_t size_bytes,
                std::size_t front_bytes = kGuardBytes);
  /// Poisons everything, so that nothing of an earlier launch can pass for this one's.
  void refill(const Queue& queue) const;
  /// The bytes between the guards. Throws kOpenCL when a guard was overwritten.
  std::vector<std::byte> read(const Queue& queue) const;

  cl_mem handle() const noexcept { return buffer_.handle(); }
  std::size_t offset_bytes() const noexcept { return front_bytes_; }

 private:
  Buffer buffer_;
  std::size_t size_bytes_, front_bytes_;
};

/// A whole cache between its logical order on the host, [num_blocks, block_size, num_kv_heads,
/// head_size] for keys and value_width() for values, and the cache's own order on the device. Each
/// code of 4 bits has a byte of its own here.
struct LogicalCache {
  std::vector<std::byte> key, value;
  /// [num_blocks, block_size, num_kv_heads], of caches with a scale for each token and head.
  std::vector<float> key_scales = {}, value_scales = {};
};

/// Calls visit(logical byte, stored byte) for the first byte of each number of a cache's keys or
/// values, whichever its order; of uint4x2 twice for each stored byte.
template <typename Cache, typename Visit>
void for_each_element(const Cache& cache, bool of_values, Visit visit) {
  const std::size_t element = element_size_bytes(cache.dtype);
  const std::int32_t width = of_values ? value_width(cache) : cache.head_size;
  std::size_t logical = 0;
  for (std::int64_t block = 0; block < cache.num_blocks; ++block) {
    for (std::int64_t token = 0; token < cache.block_size; ++token) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
        for (std::int64_t dim = 0; dim < width; ++dim, logical += element) {
          const std::int64_t at = of_values ? cache.value_at(block, token, head, dim)
                                            : cache.key_at(block, token, head, dim);
          visit(logical, static_cast<std::size_t>(at) * element);
        }
      }
    }
  }
}
/// The same of a cache's rows: visit(logical row, K's scale, V's), elements of its scales.
template <typename Visit>
void for_each_row_scale(const KVCache& cache, Visit visit) {
  if (!cache.row_scales) return;
  const KVCache::RowScales& at = *cache.row_scales;
  std::size_t row = 0;
  for (std::int64_t block = 0; block < cache.num_blocks; ++block) {
    for (std::int64_t token = 0; token < cache.block_size; ++token) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head, ++row) {
        const std::int64_t place =
            block * at.block_stride + token * at.token_stride + head * at.head_stride;
        visit(row, static_cast<std::size_t>(at.k_offset + place),
              static_cast<std::size_t>(at.v_offset + place));
      }
    }
  }
}
void upload_cache(const Queue& queue, const KVCache& cache, const LogicalCache& logical);
LogicalCache download_cache(const Queue& queue, const KVCache& cache);

/// Gives a cache its factors, [2][1 or num_kv_heads]: of K, then of V; none = 1.
template <typename Cache>
void set_scales(const Context& context, const Queue& queue, std::span<const float> scales,
                Cache& cache) {
  if (scales.empty()) return;
  cache.scales = upload(context, queue, scales);
  cache.scales_per_head = scales.size() > 2;
}
/// Gives an int8 cache, which is refused without scales, scales of 1: for bytes whose values do not
/// matter.
void set_unit_scales(const Context& context, const Queue& queue, KVCache& cache);

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
