#include "cli/check_packed.hpp"

#include <clattn/clattn.hpp>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "cli/check_batches.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

constexpr std::int64_t kNumBlocks = 3;

std::size_t size_of(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

std::vector<std::byte> poisoned(std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (std::size_t i = 0; i < size_bytes; ++i) {
    bytes[i] = static_cast<std::byte>(kPoison >> (8 * (i % 4)) & 0xFF);
  }
  return bytes;
}

/// The packed order, element by element: keys [block, head, d / x, token, d % x], values [block,
/// head, d, token].
void pack_row(const AttentionConfig& config, std::int64_t slot, const std::byte* key_row,
              const std::byte* value_row, std::vector<std::byte>& keys,
              std::vector<std::byte>& values) {
  const std::size_t element = element_size_bytes(config.cache_dtype());
  const std::size_t x = 16 / element;
  const std::size_t heads = size_of(config.num_kv_heads), head_size = size_of(config.head_size);
  const std::size_t block_size = size_of(config.block_size);
  const std::size_t block = size_of(slot) / block_size, token = size_of(slot) % block_size;
  for (std::size_t i = 0; i < heads * head_size; ++i) {
    const std::size_t plane = block * heads + i / head_size, d = i % head_size;
    const std::size_t key_at = ((plane * (head_size / x) + d / x) * block_size + token) * x + d % x;
    const std::size_t value_at = (plane * head_size + d) * block_size + token;
    std::memcpy(&keys[key_at * element], key_row + i * element, element);
    std::memcpy(&values[value_at * element], value_row + i * element, element);
  }
}

}  // namespace

Deviation compare_packed_write(const Context& context, const AttentionConfig& config,
                               double& latency_us) {
  const std::int64_t block_size = config.block_size;
  const std::vector<std::int64_t> slots = {
      2 * block_size + 1, kPadSlotId, 0, block_size - 1, 5, kNumBlocks * block_size - 1};
  const DType type = config.cache_dtype();
  const std::size_t row = size_of(config.num_kv_heads) * size_of(config.head_size);
  const std::size_t row_bytes = row * element_size_bytes(type);
  const std::vector<std::byte> key = random_elements(config.dtype, slots.size() * row, 91);
  const std::vector<std::byte> value = random_elements(config.dtype, slots.size() * row, 92);
  const std::vector<std::byte> stored_key = convert_elements(config.dtype, type, key);
  const std::vector<std::byte> stored_value = convert_elements(config.dtype, type, value);

  const std::size_t cache_bytes = size_of(kNumBlocks * block_size) * row_bytes;
  std::vector<std::byte> keys = poisoned(cache_bytes + GuardedOutput::kGuardBytes), values = keys;
  const Queue queue = context.create_queue(QueueProfiling::kOn);
  const Buffer key_cache = upload(context, queue, std::span<const std::byte>(keys));
  const Buffer value_cache = upload(context, queue, std::span<const std::byte>(values));
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    pack_row(config, slots[t], &stored_key[t * row_bytes], &stored_value[t * row_bytes], keys,
             values);
  }

  const Buffer key_rows = upload(context, queue, std::span<const std::byte>(key));
  const Buffer value_rows = upload(context, queue, std::span<const std::byte>(value));
  const Buffer mapping = upload(context, queue, std::span<const std::int64_t>(slots));
  const PackedKVCache cache{.key = key_cache.handle(),
                            .value = value_cache.handle(),
                            .dtype = type,
                            .num_blocks = kNumBlocks,
                            .block_size = config.block_size,
                            .num_kv_heads = config.num_kv_heads,
                            .head_size = config.head_size,
                            .scales = {},
                            .scales_per_head = false};
  Event event;
  reshape_and_cache(context, queue, {.buffer = key_rows.handle()}, {.buffer = value_rows.handle()},
                    config.dtype, cache, mapping.handle(), 0,
                    static_cast<std::int64_t>(slots.size()), &event);
  event.wait();
  latency_us = static_cast<double>(event.duration_ns()) * 1e-3;

  std::vector<std::byte> got(keys.size());
  queue.read(key_cache, got);
  Deviation deviation = compare_bytes(got, keys);
  queue.read(value_cache, got);
  deviation.merge(compare_bytes(got, values));
  return deviation;
}

}  // namespace clattn::cli
