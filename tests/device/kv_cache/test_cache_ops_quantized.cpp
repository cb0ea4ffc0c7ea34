#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "device/attention_case.hpp"

namespace test_cache_ops_quantized {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KVCacheLayout;

constexpr std::int32_t kHeads = 2;
constexpr std::int32_t kDims = 64;
constexpr std::int32_t kBlock = 16;
constexpr std::int64_t kTokens = 65536 / (kHeads * kDims);

/// Every f16 there is, as keys; as values the same in reverse. Token i goes to slot i.
struct EveryHalf {
  std::vector<std::uint16_t> key = std::vector<std::uint16_t>(65536);
  std::vector<std::uint16_t> value;
  std::vector<std::int64_t> slots = std::vector<std::int64_t>(kTokens);
  EveryHalf() {
    std::iota(key.begin(), key.end(), std::uint16_t{0});
    value.assign(key.rbegin(), key.rend());
    std::iota(slots.begin(), slots.end(), 0);
  }
};

struct Scales {
  std::vector<float> factors;  // [2][1 or kHeads]; empty = all 1, which int8 has to be told
  bool per_head = false;
  float of(std::size_t kv, std::size_t head) const {
    if (factors.empty()) return 1.0F;
    return per_head ? factors[kv * kHeads + head] : factors[kv];
  }
};
// 1 / 3 makes every quotient round, 2^-7 keeps ties ties and saturates, 100 reaches subnormals.
const std::vector<Scales> kScales = {
    {}, {{1.0F / 3, 0x1p-7F}, false}, {{100.0F, 0.37F, 0x1p9F, 1e-6F}, true}};

/// The oracle's code of f32 quotient x / scale; NaN has several codes.
void expect_code(DType dtype, std::uint16_t half, float scale, std::uint8_t got) {
  const auto element = static_cast<oracle::Element>(static_cast<int>(dtype));  // same order
  const auto x = static_cast<float>(oracle::decode(oracle::Element::kF16, half));
  const auto quotient = static_cast<double>(x / scale);
  const std::uint32_t want = oracle::encode(element, quotient);
  if (got == want) return;
  EXPECT_TRUE(std::isnan(oracle::decode(element, got)) && std::isnan(oracle::decode(element, want)))
      << clattn::to_string(dtype) << " of " << x << " / " << scale << ": " << int{got}
      << ", expected " << want;
}

/// Element index of (slot, head, dim) of keys and values in a cache's memory.
using Place = std::size_t (*)(std::size_t slot, std::size_t head, std::size_t dim);

void expect_cache(DType dtype, const Scales& scales, std::size_t kv,
                  const std::vector<std::uint16_t>& rows, const std::vector<std::uint8_t>& cache,
                  Place place) {
  for (std::size_t i = 0; i < rows.size() && !testing::Test::HasFailure(); ++i) {
    const std::size_t head = i / kDims % kHeads;
    const std::size_t at = place(i / (kHeads * kDims), head, i % kDims);
    expect_code(dtype, rows[i], scales.of(kv, head), cache[at]);
  }
}

constexpr std::size_t kPlane = std::size_t{kBlock} * kHeads * kDims;
std::size_t nhd(std::size_t slot, std::size_t head, std::size_t dim) {
  return slot / kBlock * 2 * kPlane + (slot % kBlock * kHeads + head) * kDims + dim;
}
std::size_t hnd(std::size_t slot, std::size_t head, std::size_t dim) {
  return slot / kBlock * 2 * kPlane + (head * kBlock + slot % kBlock) * kDims + dim;
}
std::size_t packed_key(std::size_t slot, std::size_t head, std::size_t dim) {
  const std::size_t row = (slot / kBlock * kHeads + head) * (kDims / 16) + dim / 16;
  return (row * kBlock + slot % kBlock) * 16 + dim % 16;
}
std::size_t packed_value(std::size_t slot, std::size_t head, std::size_t dim) {
  return ((slot / kBlock * kHeads + head) * kDims + dim) * kBlock + slot % kBlock;
}

struct Inputs {
  clattn::Queue queue;
  clattn::Buffer key, value, slots;
  Inputs(const clattn::Context& context, const EveryHalf& rows)
      : queue(context.create_queue()),
        key(context.allocate(rows.key.size() * 2)),
        value(context.allocate(rows.value.size() * 2)),
        slots(context.allocate(rows.slots.size() * 8)) {
    queue.write(key, std::as_bytes(std::span(rows.key)));
    queue.write(value, std::as_bytes(std::span(rows.value)));
    queue.write(slots, std::as_bytes(std::span(rows.slots)));
  }
  clattn::Buffer upload(const clattn::Context& context, const Scales& scales) const {
    if (scales.factors.empty()) return {};
    clattn::Buffer buffer = context.allocate(scales.factors.size() * sizeof(float));
    queue.write(buffer, std::as_bytes(std::span(scales.factors)));
    return buffer;
  }
  std::vector<std::uint8_t> read(const clattn::Buffer& buffer) const {
    std::vector<std::uint8_t> bytes(buffer.size_bytes());
    queue.read(buffer, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  }
};

template <typename Run>
void for_each_quantized(const Run& run) {
  for (const auto& context : all_contexts()) {
    for (const DType dtype : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
      for (Scales scales : kScales) {
        if (dtype == DType::kInt8 && scales.factors.empty()) scales.factors = {1, 1};
        run(*context, dtype, scales);
      }
    }
  }
}

// A6.2: type(x / scale), nearest even, saturating, NaN kept; per tensor and per KV head.
TEST(QuantizedCacheWrite, EveryHalfIsStoredAsTheOracleRoundsIt) {
  const EveryHalf rows;
  for_each_quantized([&](const clattn::Context& context, DType dtype, const Scales& scales) {
    const Inputs in(context, rows);
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      const clattn::Buffer memory = context.allocate(2 * rows.key.size());
      clattn::KVCache cache = clattn::reshape_kv_cache(
          memory,
          {.block_size = kBlock, .num_kv_heads = kHeads, .head_size = kDims, .dtype = dtype},
          *clattn::list_attn_backends()[0], layout);
      cache.scales = in.upload(context, scales);
      cache.scales_per_head = scales.per_head;
      clattn::reshape_and_cache_flash(context, in.queue, {.buffer = in.key.handle()},
                                      {.buffer = in.value.handle()}, DType::kF16, cache,
                                      in.slots.handle(), 0, kTokens);
      std::vector<std::uint8_t> got = in.read(memory);
      const Place place = layout == KVCacheLayout::kNHD ? nhd : hnd;
      expect_cache(dtype, scales, 0, rows.key, got, place);
      got.erase(got.begin(), got.begin() + kPlane);  // a block holds keys, then values
      expect_cache(dtype, scales, 1, rows.value, got, place);
    }
  });
}

// A6.3: x = 16 for 8-bit elements.
TEST(QuantizedCacheWrite, EveryHalfIsStoredInXPackedCachesToo) {
  const EveryHalf rows;
  for_each_quantized([&](const clattn::Context& context, DType dtype, const Scales& scales) {
    const Inputs in(context, rows);
    const clattn::Buffer key = context.allocate(rows.key.size());
    const clattn::Buffer value = context.allocate(rows.value.size());
    clattn::PackedKVCache cache;
    cache.key = key.handle();
    cache.value = value.handle();
    cache.dtype = dtype;
    cache.num_blocks = kTokens / kBlock;
    cache.block_size = kBlock;
    cache.num_kv_heads = kHeads;
    cache.head_size = kDims;
    cache.scales = in.upload(context, scales);
    cache.scales_per_head = scales.per_head;
    clattn::reshape_and_cache(context, in.queue, {.buffer = in.key.handle()},
                              {.buffer = in.value.handle()}, DType::kF16, cache, in.slots.handle(),
                              0, kTokens);
    expect_cache(dtype, scales, 0, rows.key, in.read(key), packed_key);
    expect_cache(dtype, scales, 1, rows.value, in.read(value), packed_value);
  });
}

}  // namespace test_cache_ops_quantized
