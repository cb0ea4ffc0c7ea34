#include "cli/check_packed.hpp"

#include <fmt/format.h>

#include <clattn/clattn.hpp>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
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

Verdict compare_packed_write(const Context& context, const AttentionConfig& config) {
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
  std::vector<std::byte> got(keys.size());
  queue.read(key_cache, got);
  Deviation deviation = compare_bytes(got, keys);
  queue.read(value_cache, got);
  deviation.merge(compare_bytes(got, values));
  return {deviation, one_launch("reshape_and_cache (x-packed)", event)};
}

namespace {

/// A logical cache in the packed order.
LogicalCache pack(const AttentionConfig& config, const LogicalCache& logical) {
  LogicalCache packed{std::vector<std::byte>(logical.key.size()),
                      std::vector<std::byte>(logical.value.size())};
  const std::size_t row_bytes = size_of(config.num_kv_heads) * size_of(config.head_size) *
                                element_size_bytes(config.cache_dtype());
  for (std::size_t slot = 0; slot < logical.key.size() / row_bytes; ++slot) {
    pack_row(config, static_cast<std::int64_t>(slot), &logical.key[slot * row_bytes],
             &logical.value[slot * row_bytes], packed.key, packed.value);
  }
  return packed;
}

std::vector<float> floats_of(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

}  // namespace

Verdict compare_packed_attention(const std::shared_ptr<Context>& context,
                                 const AttentionConfig& config, const BatchFamily& family,
                                 std::uint32_t seed) {
  const AttentionCall call = make_call(family, config, seed);
  const LogicalCache packed = pack(config, expected_cache(call));
  const auto attention = make_paged_attention(*context, config);
  const auto builder = make_paged_attention_builder(context, config, options_for(call));
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const Buffer keys = upload(*context, queue, std::span<const std::byte>(packed.key));
  const Buffer values = upload(*context, queue, std::span<const std::byte>(packed.value));
  const Buffer query = upload(*context, queue, std::span<const std::byte>(call.query));
  PackedKVCache cache{.key = keys.handle(),
                      .value = values.handle(),
                      .dtype = config.cache_dtype(),
                      .num_blocks = call.num_blocks,
                      .block_size = config.block_size,
                      .num_kv_heads = config.num_kv_heads,
                      .head_size = config.head_size,
                      .scales = {},
                      .scales_per_head = call.scales.size() > 2};
  if (!call.scales.empty()) {
    cache.scales = upload(*context, queue, std::span<const float>(call.scales));
  }
  const AttentionMetadata& metadata = builder->build(queue, call.batch());
  const GuardedOutput out(*context, call.query.size());
  const GuardedOutput lse(
      *context, size_of(call.num_tokens()) * size_of(config.num_heads) * sizeof(float), 0);
  const TensorRef to{
      .buffer = out.handle(),
      .offset = static_cast<std::int64_t>(out.offset_bytes() / element_size_bytes(config.dtype))};
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < kCheckRepeats; ++i) {
    out.refill(queue);
    lse.refill(queue);
    attention->forward(queue, {.buffer = query.handle()}, cache, metadata, to, lse.handle(),
                       nullptr, &launches);
    queue.finish();
  }
  const oracle::AttentionResult truth =
      oracle::attention(oracle_case(call), element_of(config.dtype));
  return {compare(config.dtype, out.read(queue), floats_of(lse.read(queue)), truth),
          report(launches, attention->kernels())};
}

const std::vector<BatchFamily>& packed_batches() {
  static const std::vector<BatchFamily> batches = {
      {"paged_attention_v1", {{1, 1}, {1, 17}, {1, 130}, {1, 16}}, 1},
      {"paged_attention_v2", {{1, 300}, {1, 9}, {1, 64}}, 3, true, true},
  };
  return batches;
}

void check_packed(const std::shared_ptr<Context>& context, CheckReport& report) {
  std::uint32_t seed = 6000;
  for (const auto& [dtype, cache_dtype] : kCacheTypes) {
    AttentionConfig config;
    config.num_heads = 8;
    config.num_kv_heads = 2;
    config.head_size = 64;
    config.dtype = dtype;
    config.kv_cache_dtype = cache_dtype;
    CheckLine line{.what = "x-packed cache", .types = types_of(dtype, cache_dtype)};
    show_progress(fmt::format("x-packed cache, {}", line.types));
    line.run("write", [&] { return compare_packed_write(*context, config); });
    for (const BatchFamily& family : packed_batches()) {
      line.run(std::string(family.name),
               [&] { return compare_packed_attention(context, config, family, seed += 10); });
    }
    report.add(line);
  }
}

}  // namespace clattn::cli
