#include "cli/check_packed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "cli/check_batches.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"
#include "cli/packed_call.hpp"

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
  const auto end = keys.begin() + static_cast<std::ptrdiff_t>(cache_bytes);
  LogicalCache wanted = unpack(config, {{keys.begin(), end}, {keys.begin(), end}});
  for (std::size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < 0) continue;
    const std::size_t at = size_of(slots[t]) * row_bytes;
    std::memcpy(&wanted.key[at], &stored_key[t * row_bytes], row_bytes);
    std::memcpy(&wanted.value[at], &stored_value[t * row_bytes], row_bytes);
  }
  wanted = pack(config, wanted);
  std::copy(wanted.key.begin(), wanted.key.end(), keys.begin());
  std::copy(wanted.value.begin(), wanted.value.end(), values.begin());

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

Verdict compare_packed_attention(const std::shared_ptr<Context>& context,
                                 const AttentionConfig& config, const BatchFamily& family,
                                 std::uint32_t seed) {
  AttentionCall call = make_call(family, config, seed);
  const oracle::AttentionResult truth =
      oracle::attention(oracle_case(call), element_of(config.dtype));
  call.cache = expected_cache(call);  // packed here, so that a wrong write shows in its own line
  call.key.clear();
  call.value.clear();
  call.packed = true;
  const AttentionOutcome outcome = execute_packed(context, call, kCheckRepeats);
  return {compare(config.dtype, outcome.out, outcome.lse, truth), outcome.launches};
}

const std::vector<BatchFamily>& packed_batches() {
  static const std::vector<BatchFamily> batches = {
      {"paged_attention_v1", {{1, 1}, {1, 17}, {1, 130}, {1, 16}}, 1},
      {"paged_attention_v2", {{1, 300}, {1, 9}, {1, 64}}, 3, true, true},
  };
  return batches;
}

namespace {

void check_types(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                 std::uint32_t seed, CheckReport& report) {
  CheckLine line{.what = "x-packed cache", .types = types_of(config.dtype, config.cache_dtype())};
  line.run("write", [&] { return compare_packed_write(*context, config); });
  for (const BatchFamily& family : packed_batches()) {
    line.run(std::string(family.name),
             [&] { return compare_packed_attention(context, config, family, seed += 10); });
  }
  report.add(line);
}

}  // namespace

void plan_packed(const std::shared_ptr<Context>& context, CheckReport& report, CheckPlan& plan) {
  std::uint32_t seed = 6000;
  for (const auto& [dtype, cache_dtype] : kCacheTypes) {
    seed += 100;
    const std::string types = types_of(dtype, cache_dtype);
    if (!plan.takes("x-packed cache", types, is_representative(dtype, cache_dtype))) continue;
    AttentionConfig config;
    config.num_heads = 8;
    config.num_kv_heads = 2;
    config.head_size = 64;
    config.dtype = dtype;
    config.kv_cache_dtype = cache_dtype;
    plan.add({"x-packed cache, " + types, [=] { make_paged_attention(*context, config); },
              [=, &report] { check_types(context, config, seed, report); }});
  }
}

}  // namespace clattn::cli
