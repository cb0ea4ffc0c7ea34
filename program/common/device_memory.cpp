#include "program/common/device_memory.hpp"

#include <array>
#include <cstring>

#include "program/common/error.hpp"

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
  const PackedKVCache shape = packed_shape(config, blocks);
  for (const auto plane : {&LogicalCache::key, &LogicalCache::value})
    for_each_element(shape, plane == &LogicalCache::value,
                     [&](std::size_t logical, std::size_t at) { move(logical, at, plane); });
  return to;
}

/// Bits in front of a number in the element that holds it. Rows have whole elements.
std::size_t shift_of(DType dtype, std::size_t logical) {
  return codes_per_element(dtype) > 1 ? 4 * (logical % 2) : 0;
}

/// Copies a number to an element of 0, in which another one may stand by now, and back.
void put_number(DType dtype, const std::byte* number, std::size_t logical, std::byte* stored) {
  if (codes_per_element(dtype) == 1)
    std::memcpy(stored, number, element_size_bytes(dtype));
  else
    *stored |= *number << shift_of(dtype, logical);
}
void take_number(DType dtype, const std::byte* stored, std::size_t logical, std::byte* number) {
  if (codes_per_element(dtype) == 1)
    std::memcpy(number, stored, element_size_bytes(dtype));
  else
    *number = *stored >> shift_of(dtype, logical) & std::byte{15};
}

}  // namespace

std::vector<std::byte> poisoned(std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (std::size_t i = 0; i < size_bytes; ++i)
    bytes[i] = static_cast<std::byte>(kPoison >> (8 * (i % 4)) & 0xFF);
  return bytes;
}

GuardedOutput::GuardedOutput(const Context& context, std::size_t size_bytes,
                             std::size_t front_bytes)
    : buffer_(context.allocate((size_bytes + 3) / 4 * 4 + front_bytes + kGuardBytes)),
      size_bytes_(size_bytes),
      front_bytes_(front_bytes) {}

void GuardedOutput::refill(const Queue& queue) const {
  queue.fill(buffer_, kPoison, 0, buffer_.size_bytes());
}

std::vector<std::byte> GuardedOutput::read(const Queue& queue) const {
  std::vector<std::byte> all(buffer_.size_bytes());
  queue.read(buffer_, all);
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(front_bytes_);
  const auto end = begin + static_cast<std::ptrdiff_t>(size_bytes_);
  const std::vector<std::byte> poison = poisoned(all.size());
  if (!std::equal(all.begin(), begin, poison.begin()) ||
      !std::equal(end, all.end(), poison.begin() + (end - all.begin()))) {
    throw Error(ErrorCode::kOpenCL, "a kernel wrote outside its output");
  }
  return {begin, end};
}

void upload_cache(const Queue& queue, const KVCache& cache, const LogicalCache& logical) {
  std::vector<std::byte> stored(cache.buffer.size_bytes());
  for_each_element(cache, false, [&](std::size_t from, std::size_t to) {
    put_number(cache.dtype, &logical.key[from], from, &stored[to]);
  });
  for_each_element(cache, true, [&](std::size_t from, std::size_t to) {
    put_number(cache.dtype, &logical.value[from], from, &stored[to]);
  });
  for_each_row_scale(cache, [&](std::size_t row, std::size_t key, std::size_t value) {
    std::memcpy(&stored[key * sizeof(float)], &logical.key_scales[row], sizeof(float));
    std::memcpy(&stored[value * sizeof(float)], &logical.value_scales[row], sizeof(float));
  });
  if (!stored.empty()) queue.write(cache.buffer, stored);
}

LogicalCache download_cache(const Queue& queue, const KVCache& cache) {
  std::vector<std::byte> stored(cache.buffer.size_bytes());
  if (!stored.empty()) queue.read(cache.buffer, stored);
  const std::size_t size = element_size_bytes(cache.dtype);
  const std::size_t rows =
      to_size(cache.num_blocks) * to_size(cache.block_size) * to_size(cache.num_kv_heads);
  LogicalCache logical{std::vector<std::byte>(rows * to_size(cache.head_size) * size),
                       std::vector<std::byte>(rows * to_size(cache.value_size()) * size)};
  for_each_element(cache, false, [&](std::size_t to, std::size_t from) {
    take_number(cache.dtype, &stored[from], to, &logical.key[to]);
  });
  for_each_element(cache, true, [&](std::size_t to, std::size_t from) {
    take_number(cache.dtype, &stored[from], to, &logical.value[to]);
  });
  if (cache.row_scales) {
    logical.key_scales.resize(rows);
    logical.value_scales.resize(rows);
  }
  for_each_row_scale(cache, [&](std::size_t row, std::size_t key, std::size_t value) {
    std::memcpy(&logical.key_scales[row], &stored[key * sizeof(float)], sizeof(float));
    std::memcpy(&logical.value_scales[row], &stored[value * sizeof(float)], sizeof(float));
  });
  return logical;
}

void set_unit_scales(const Context& context, const Queue& queue, KVCache& cache) {
  if (cache.dtype == DType::kInt8 && !cache.row_scales)
    set_scales(context, queue, std::array{1.0F, 1.0F}, cache);
}

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
