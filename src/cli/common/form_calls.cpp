#include "cli/common/form_calls.hpp"

#include <cstring>

#include "cli/common/error.hpp"

namespace clattn::cli {
namespace {

/// A cache of one order in the other.
LogicalCache reordered(const AttentionConfig& config, const LogicalCache& from, bool packs) {
  const std::size_t element = element_size_bytes(config.cache_dtype());
  throw_invalid_if(to_size(config.head_size) % (16 / element) != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   config.head_size, to_string(config.cache_dtype()), 16 / element);
  LogicalCache to = from;
  const auto move = [&](std::size_t logical, std::size_t packed,
                        std::vector<std::byte> LogicalCache::*kv) {
    std::memcpy(&(to.*kv)[packs ? packed : logical], &(from.*kv)[packs ? logical : packed],
                element);
  };
  const std::size_t page_bytes = to_size(config.block_size) * to_size(config.num_kv_heads) *
                                 to_size(config.head_size) * element;
  const auto blocks = static_cast<std::int64_t>(from.key.size() / page_bytes);
  for_each_element(packed_shape(config, blocks),
                   [&](std::size_t logical, std::size_t key, std::size_t value) {
                     move(logical, key, &LogicalCache::key);
                     move(logical, value, &LogicalCache::value);
                   });
  return to;
}

}  // namespace

PackedKVCache packed_shape(const AttentionConfig& config, std::int64_t num_blocks) {
  return {.dtype = config.cache_dtype(),
          .num_blocks = num_blocks,
          .block_size = config.block_size,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size};
}

LogicalCache pack(const AttentionConfig& config, const LogicalCache& logical) {
  return reordered(config, logical, true);
}

LogicalCache unpack(const AttentionConfig& config, const LogicalCache& packed) {
  return reordered(config, packed, false);
}

PackedMemory::PackedMemory(const Context& context, const Queue& queue,
                           const AttentionConfig& config, std::int64_t num_blocks,
                           const LogicalCache& logical, std::span<const float> scales) {
  const LogicalCache packed = pack(config, logical);
  key = upload(context, queue, packed.key);
  value = upload(context, queue, packed.value);
  cache = packed_shape(config, num_blocks);
  cache.key = key.handle();
  cache.value = value.handle();
  set_scales(context, queue, scales, cache);
}

LogicalCache PackedMemory::download(const Queue& queue, const AttentionConfig& config,
                                    std::size_t size_bytes) const {
  return unpack(config, {cli::download<std::byte>(queue, key, size_bytes),
                         cli::download<std::byte>(queue, value, size_bytes)});
}

}  // namespace clattn::cli
