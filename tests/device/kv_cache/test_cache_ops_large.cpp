#include <clattn/cache_ops.hpp>
#include <cmath>

#include "device/cache_blocks.hpp"

// Calls of cache operations so large that CPUs store past their caches: what is stored stays the
// same, whether rows fill whole cache lines or not.
namespace test_cache_ops_large {

using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::random_bytes;
using cache_ops_test::upload;
using clattn::DType;
using clattn::KVCache;
using clattn::KVCacheLayout;

constexpr std::int32_t kBlock = 16;
constexpr std::int32_t kHeads = 8;
constexpr std::int64_t kTokens = 560;
constexpr std::uint8_t kOld = 0x5a;

struct LargeWrite {
  DType dtype = DType::kF16;
  std::int32_t head_size = 128;
  KVCacheLayout layout = KVCacheLayout::kNHD;
  std::int64_t shift = 0;  // elements before the cache
  bool scales = false;     // a factor per KV head, of keys and of values
};

/// Token i's slot: pages from the last to the first one; some tokens have none.
std::int64_t slot_of(std::int64_t token) {
  const std::int64_t page = kTokens / kBlock - 1 - token / kBlock;
  return token % 23 == 5 ? -1 : page * kBlock + token % kBlock;
}

/// Powers of two: quotients by them are exact.
float scale_of(const LargeWrite& write, bool keys, std::int32_t head) {
  return write.scales ? std::ldexp(1.0F, head % 5 - (keys ? 1 : 3)) : 1;
}

/// What the cache holds of f16 rows in one of its planes.
void store(const LargeWrite& write, const KVCache& cache, bool keys,
           const std::vector<std::uint16_t>& rows, std::vector<std::uint8_t>& image) {
  const std::size_t size = clattn::element_size_bytes(write.dtype);
  std::size_t from = 0;
  for (std::int64_t token = 0; token < kTokens; ++token) {
    const std::int64_t slot = slot_of(token);
    for (std::int32_t head = 0; head < kHeads; ++head) {
      for (std::int32_t dim = 0; dim < write.head_size; ++dim, ++from) {
        if (slot < 0) continue;
        const std::int64_t at = keys ? cache.key_at(slot / kBlock, slot % kBlock, head, dim)
                                     : cache.value_at(slot / kBlock, slot % kBlock, head, dim);
        const double x =
            oracle::decode(oracle::Element::kF16, rows[from]) / scale_of(write, keys, head);
        const std::uint32_t bits =
            write.dtype == DType::kF16 ? rows[from] : oracle::encode(element(write.dtype), x);
        std::memcpy(&image.at(static_cast<std::size_t>(at) * size), &bits, size);
      }
    }
  }
}

/// Halves of finite numbers.
std::vector<std::uint16_t> random_rows(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> rows(count);
  for (std::uint16_t& half : rows) half = static_cast<std::uint16_t>(random() & 0xbfffU);
  return rows;
}

void expect_stored(const clattn::Context& context, const LargeWrite& write) {
  const clattn::Queue queue = context.create_queue();
  const auto count = static_cast<std::size_t>(kTokens * kHeads * write.head_size);
  const std::vector<std::uint16_t> key = random_rows(count, 1), value = random_rows(count, 2);
  std::vector<std::int64_t> slots;
  for (std::int64_t token = 0; token < kTokens; ++token) slots.push_back(slot_of(token));
  const std::size_t size = clattn::element_size_bytes(write.dtype);
  const auto elements = 2 * count + static_cast<std::size_t>(write.shift);
  std::vector<std::uint8_t> want(elements * size, kOld);
  const clattn::KVCacheSpec spec{.block_size = kBlock,
                                 .num_kv_heads = kHeads,
                                 .head_size = write.head_size,
                                 .dtype = write.dtype};
  KVCache cache = clattn::reshape_kv_cache(context.allocate(2 * count * size), spec,
                                           *clattn::list_attn_backends()[0], write.layout);
  cache.buffer = upload(context, queue, want);
  cache.k_offset += write.shift;
  cache.v_offset += write.shift;
  if (write.scales || write.dtype == DType::kInt8) {  // which has to be told
    std::vector<float> scales;
    for (const bool keys : {true, false}) {
      for (std::int32_t head = 0; head < kHeads; ++head)
        scales.push_back(scale_of(write, keys, head));
    }
    cache.scales = upload(context, queue, scales);
    cache.scales_per_head = true;
  }
  store(write, cache, true, key, want);
  store(write, cache, false, value, want);
  const clattn::Buffer k = upload(context, queue, key), v = upload(context, queue, value);
  const clattn::Buffer slot_mapping = upload(context, queue, slots);
  clattn::reshape_and_cache_flash(context, queue, {.buffer = k.handle()}, {.buffer = v.handle()},
                                  DType::kF16, cache, slot_mapping.handle(), 0, kTokens);
  EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want)
      << clattn::to_string(write.dtype) << ", heads of " << write.head_size << ", layout "
      << clattn::to_string(write.layout) << ", behind " << write.shift << " elements";
}

// A6.1, A6.2: 560 tokens of 8 heads of 128 elements are 1.1 MiB in an 8-bit cache.
TEST(LargeCacheOps, WritesStoreEveryTokenInItsPlace) {
  for (const auto& context : all_contexts()) {
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kFp8E4M3, DType::kInt8}) {
      for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
        expect_stored(*context, {.dtype = dtype, .layout = layout});
      }
      expect_stored(*context, {.dtype = dtype, .shift = 8});  // rows begin within a line
      expect_stored(*context, {.dtype = dtype, .head_size = 72});
      if (clattn::element_size_bytes(dtype) == 1)
        expect_stored(*context, {.dtype = dtype, .scales = true});
    }
  }
}

// A6.5: 2 x 20 blocks of 32 KiB, and of rows that no line divides.
TEST(LargeCacheOps, CopiesKeepEveryByte) {
  for (const auto& context : all_contexts()) {
    for (const std::int32_t head_size : {128, 72}) {
      for (const std::int64_t shift : {0, 8}) {
        const clattn::Queue queue = context->create_queue();
        const clattn::KVCacheSpec spec{
            .block_size = kBlock, .num_kv_heads = kHeads, .head_size = head_size};
        const auto image = random_bytes(40 * spec.page_size_bytes() + 16, 3);
        KVCache cache =
            clattn::reshape_kv_cache(context->allocate(40 * spec.page_size_bytes()), spec,
                                     *clattn::list_attn_backends()[0], KVCacheLayout::kNHD);
        cache.buffer = upload(*context, queue, image);
        cache.k_offset += shift;
        cache.v_offset += shift;
        std::vector<clattn::BlockPair> mapping;
        for (std::int64_t i = 0; i < 20; ++i) mapping.push_back({39 - i, i});
        clattn::copy_blocks(*context, queue, std::span(&cache, 1), mapping);
        auto want = image;
        block_test::apply(cache, image, cache, want, mapping);
        EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want)
            << "heads of " << head_size << " behind " << shift << " elements";
      }
    }
  }
}

}  // namespace test_cache_ops_large
