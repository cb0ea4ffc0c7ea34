#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "device/attention_case.hpp"

namespace {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KVCacheLayout;

oracle::Element element(DType dtype) {
  return static_cast<oracle::Element>(static_cast<int>(dtype));  // same order: f32, f16, bf16
}

clattn::KVCacheConfig one_layer(std::size_t size_bytes) {
  clattn::KVCacheConfig config;
  config.tensors = {{size_bytes, {"layer.0"}}};
  config.groups = {{{"layer.0"}, {}}};
  return config;
}

std::string error_text(const std::function<void()>& call,
                       clattn::ErrorCode code = clattn::ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const clattn::Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "no error";
}

TEST(KVCache, AllocationIsZeroedAndShared) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    clattn::KVCacheConfig config;
    config.tensors = {{4096, {"a", "b"}}, {8192, {"c"}}};
    config.groups = {{{"a", "c"}, {}}, {{"b"}, {}}};
    auto caches = clattn::allocate_kv_cache(*context, queue, config);
    ASSERT_EQ(caches.size(), 3U);
    EXPECT_EQ(caches["a"].handle(), caches["b"].handle());
    EXPECT_NE(caches["a"].handle(), caches["c"].handle());
    std::vector<std::byte> bytes(8192, std::byte{0xFF});
    queue.read(caches["c"], bytes);
    for (const std::byte value : bytes) ASSERT_EQ(value, std::byte{0});
  }
}

TEST(KVCache, WrongConfigurationsAreRefusedWithNames) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const auto refuse = [&](const clattn::KVCacheConfig& config) {
    return error_text([&] { (void)clattn::allocate_kv_cache(context, queue, config); });
  };
  clattn::KVCacheConfig config = one_layer(4096);
  config.tensors.clear();
  EXPECT_EQ(refuse(config),
            "KVCacheConfig: some layers are not correctly initialized: 'layer.0' has no tensor");
  config = one_layer(4096);
  config.tensors.push_back({4096, {"layer.0"}});
  EXPECT_EQ(refuse(config), "KVCacheConfig: layer 'layer.0' is given two tensors");
  config = one_layer(4096);
  config.tensors.push_back({4096, {"ghost"}});
  EXPECT_EQ(refuse(config), "KVCacheConfig: tensor for layer 'ghost', which is in no group");
  EXPECT_EQ(refuse(one_layer(0)), "KVCacheConfig: the tensor of layer 'layer.0' has 0 bytes");
}

TEST(KVCache, TooLargeIsRefusedWithTheNumbers) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const auto& device = context->capabilities();
    const std::size_t size = device.max_alloc_bytes + 4;
    EXPECT_EQ(error_text([&] { (void)clattn::allocate_kv_cache(*context, queue, one_layer(size)); },
                         clattn::ErrorCode::kUnsupported),
              fmt::format("KVCacheConfig: the tensor of layer 'layer.0' needs {} bytes, but '{}' "
                          "allows {} bytes in one allocation",
                          size, device.name, device.max_alloc_bytes));
  }
}

/// Random keys and values in [tokens, heads, dims], as stored bits.
struct Rows {
  std::vector<double> values;
  std::vector<std::byte> bytes;

  Rows(std::size_t count, DType dtype, std::uint32_t seed)
      : values(count), bytes(count * clattn::element_size_bytes(dtype)) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, 3.0);
    const std::size_t width = clattn::element_size_bytes(dtype);
    for (std::size_t i = 0; i < count; ++i) {
      // Now and then values that only rounding, overflow and NaN rules get right.
      double value = normal(random);
      if (i % 37 == 5) value = 1e6;
      if (i % 41 == 7) value = 1.0 + 1.0 / 2048;
      if (i % 43 == 11) value = 1e-7;
      const std::uint32_t bits = oracle::encode(element(dtype), value);
      values[i] = oracle::decode(element(dtype), bits);
      std::memcpy(bytes.data() + i * width, &bits, width);
    }
  }
};

TEST(ReshapeAndCache, PackedCacheHoldsEveryTokenInItsPlace) {
  constexpr std::int32_t kHeads = 3;
  constexpr std::int32_t kBlock = 5;
  constexpr std::int64_t kBlocks = 4;
  const std::vector<std::int64_t> slots = {7, -1, 19, 0, 20, 12};  // 20 lies past the cache
  for (const auto& context : all_contexts()) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const DType cache_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        for (const std::int32_t dims : {8, 64, 72}) {
          const clattn::Queue queue = context->create_queue();
          const std::size_t row = static_cast<std::size_t>(kHeads * dims);
          const Rows key(slots.size() * row, dtype, 1);
          const Rows value(slots.size() * row, dtype, 2);
          const std::size_t width = clattn::element_size_bytes(cache_dtype);
          const std::size_t elems = static_cast<std::size_t>(kBlocks * kBlock) * row;
          std::vector<std::byte> pattern(elems * width, std::byte{0x5A});
          const clattn::Buffer k = context->allocate(key.bytes.size());
          const clattn::Buffer v = context->allocate(value.bytes.size());
          const clattn::Buffer s = context->allocate(slots.size() * 8);
          const clattn::Buffer kc = context->allocate(pattern.size());
          const clattn::Buffer vc = context->allocate(pattern.size());
          queue.write(k, key.bytes);
          queue.write(v, value.bytes);
          queue.write(s, std::as_bytes(std::span(slots)));
          queue.write(kc, pattern);
          queue.write(vc, pattern);
          clattn::reshape_and_cache(
              *context, queue, {k.handle()}, {v.handle()}, dtype,
              {kc.handle(), vc.handle(), cache_dtype, kBlocks, kBlock, kHeads, dims}, s.handle(), 0,
              static_cast<std::int64_t>(slots.size()));
          std::vector<std::byte> got_k(pattern.size());
          std::vector<std::byte> got_v(pattern.size());
          queue.read(kc, got_k);
          queue.read(vc, got_v);
          std::vector<std::byte> want_k = pattern;
          std::vector<std::byte> want_v = pattern;
          const std::int64_t x = 16 / static_cast<std::int64_t>(width);
          for (std::size_t t = 0; t < slots.size(); ++t) {
            if (slots[t] < 0 || slots[t] >= kBlocks * kBlock) continue;
            const std::int64_t block = slots[t] / kBlock;
            const std::int64_t offset = slots[t] % kBlock;
            for (std::int64_t h = 0; h < kHeads; ++h) {
              for (std::int64_t d = 0; d < dims; ++d) {
                const std::size_t from = t * row + static_cast<std::size_t>(h * dims + d);
                const std::int64_t k_at =
                    (((block * kHeads + h) * (dims / x) + d / x) * kBlock + offset) * x + d % x;
                const std::int64_t v_at = ((block * kHeads + h) * dims + d) * kBlock + offset;
                const std::uint32_t k_bits = oracle::encode(element(cache_dtype), key.values[from]);
                const std::uint32_t v_bits =
                    oracle::encode(element(cache_dtype), value.values[from]);
                std::memcpy(want_k.data() + static_cast<std::size_t>(k_at) * width, &k_bits, width);
                std::memcpy(want_v.data() + static_cast<std::size_t>(v_at) * width, &v_bits, width);
              }
            }
          }
          EXPECT_TRUE(got_k == want_k) << clattn::to_string(dtype) << " to "
                                       << clattn::to_string(cache_dtype) << " dims " << dims;
          EXPECT_TRUE(got_v == want_v);
        }
      }
    }
  }
}

}  // namespace
