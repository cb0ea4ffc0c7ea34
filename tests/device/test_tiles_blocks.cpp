// Blocks of caches in tiles (layout tiles): what writes store there, how they come there and back,
// and who refuses them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <cstring>
#include <string>
#include <vector>

#include "device/attention_host.hpp"
#include "device/cache_blocks.hpp"
#include "kernels/attention_kernels.hpp"
#include "kernels/cache_write.hpp"

namespace {

using attention_test::place_in_tiles;
using block_test::backend_named;
using block_test::Bytes;
using cache_ops_test::all_contexts;
using cache_ops_test::random_bytes;
using clattn::BlockPair;
using clattn::DType;
using clattn::ErrorCode;
using clattn::KernelFamily;
using clattn::KVCache;
using clattn::KVCacheLayout;
using clattn::KVCacheSpec;
using test::error_text;

/// Where a plain loop puts a token's element of K or V: (block, K or V, head, token and dim).
std::size_t place_of(const KVCacheSpec& spec, bool value, std::int64_t slot, std::int64_t head,
                     std::int64_t dim) {
  const std::int64_t run = std::int64_t{spec.block_size} * spec.head_size;
  const std::int64_t plane = slot / spec.block_size * 2 + (value ? 1 : 0);
  return static_cast<std::size_t>((plane * spec.num_kv_heads + head) * run +
                                  place_in_tiles(slot % spec.block_size, dim, spec.head_size));
}

// The kernel of every GPU, on whatever device runs it.
TEST(TileBlocks, AWriteStoresEveryTokenInItsPlace) {
  const std::vector<std::int64_t> slots = {7, -1, 33, 0, 96, 18, 95, 64};  // 96 slots in all
  for (const auto& context : all_contexts()) {
    for (const std::int32_t head_size : {64, 128, 256}) {
      const KVCacheSpec spec{
          .block_size = 48, .num_kv_heads = 3, .head_size = head_size, .dtype = DType::kBF16};
      const clattn::Queue queue = context->create_queue();
      const std::size_t row = std::size_t{3} * static_cast<std::size_t>(head_size);
      const Bytes key = random_bytes(slots.size() * row * 2, 1);
      const Bytes value = random_bytes(slots.size() * row * 2, 2);
      const clattn::Buffer k = cache_ops_test::upload(*context, queue, key);
      const clattn::Buffer v = cache_ops_test::upload(*context, queue, value);
      const clattn::Buffer mapping = cache_ops_test::upload(*context, queue, slots);
      Bytes want(2 * spec.page_size_bytes(), 0x5A);
      const clattn::Buffer memory = cache_ops_test::upload(*context, queue, want);
      const KVCache cache = clattn::reshape_kv_cache(memory, spec, backend_named("FLASHINFER"),
                                                     KVCacheLayout::kTiles);
      clattn::detail::KernelShape shape{3, 3, head_size, 48, DType::kBF16, DType::kBF16, {}};
      shape.tiles = true;
      const auto kernel = clattn::detail::build_first_fitting(
          context->runtime(), shape, KernelFamily::kGpu, clattn::detail::Role::kCacheWrite);
      clattn::detail::enqueue_cache_write(
          kernel, shape, queue, {.buffer = k.handle()}, {.buffer = v.handle()}, cache,
          {mapping.handle(), 0, static_cast<std::int64_t>(slots.size())}, nullptr);
      for (std::size_t t = 0; t < slots.size(); ++t) {
        if (slots[t] < 0 || slots[t] >= 96) continue;
        for (std::size_t i = 0; i < row; ++i) {
          const auto head = static_cast<std::int64_t>(i) / head_size;
          const auto dim = static_cast<std::int64_t>(i) % head_size;
          for (const bool values : {false, true}) {
            std::memcpy(&want[2 * place_of(spec, values, slots[t], head, dim)],
                        &(values ? value : key)[2 * (t * row + i)], 2);
          }
        }
      }
      EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, memory) == want) << head_size;
      EXPECT_EQ(static_cast<std::size_t>(cache.key_at(1, 17, 2, 63)),
                place_of(spec, false, 48 + 17, 2, 63));
      EXPECT_EQ(static_cast<std::size_t>(cache.value_at(1, 47, 1, 8)),
                place_of(spec, true, 48 + 47, 1, 8));
    }
  }
}

/// The byte of an element; tiles by their own formula.
std::size_t byte_of(const KVCache& c, bool value, std::int64_t block, std::int64_t t,
                    std::int64_t h, std::int64_t d) {
  const std::int64_t at =
      (value ? c.v_offset : c.k_offset) + block * c.block_stride + h * c.head_stride;
  const std::int64_t in_head = c.tiles ? place_in_tiles(t, d, c.head_size) : t * c.token_stride + d;
  return static_cast<std::size_t>(at + in_head) * clattn::element_size_bytes(c.dtype);
}

void move_blocks(const KVCache& from, const Bytes& source, const KVCache& to, Bytes& destination,
                 const std::vector<BlockPair>& mapping) {
  for (const BlockPair& pair : mapping) {
    for (const bool value : {false, true}) {
      for (std::int64_t t = 0; t < from.block_size; ++t) {
        for (std::int64_t h = 0; h < from.num_kv_heads; ++h) {
          for (std::int64_t d = 0; d < from.head_size; ++d) {
            std::memcpy(&destination[byte_of(to, value, pair.destination, t, h, d)],
                        &source[byte_of(from, value, pair.source, t, h, d)],
                        clattn::element_size_bytes(from.dtype));
          }
        }
      }
    }
  }
}

struct Order {
  std::string backend;
  KVCacheLayout layout;
  std::size_t padding = 0;
};

/// Converts blocks from one order to another and looks at every byte.
void expect_conversion(const clattn::Context& context, const KVCacheSpec& spec, const Order& from,
                       const Order& to) {
  const clattn::Queue queue = context.create_queue();
  const auto cache_of = [&](const Order& order, std::size_t blocks, Bytes& image,
                            std::uint32_t seed) {
    KVCacheSpec padded = spec;
    if (order.padding > 0) padded.page_size_padded = spec.page_size_bytes() + order.padding;
    image = random_bytes(blocks * padded.page_size_bytes(), seed);
    return clattn::reshape_kv_cache(cache_ops_test::upload(context, queue, image), padded,
                                    backend_named(order.backend), order.layout);
  };
  Bytes source, want;
  const KVCache a = cache_of(from, 4, source, 1);
  const KVCache b = cache_of(to, 6, want, 2);
  const std::vector<BlockPair> mapping = {{3, 5}, {0, 0}, {1, 4}};
  clattn::Event event;
  clattn::convert_blocks(context, queue, a, b, mapping, &event);
  event.wait();
  move_blocks(a, source, b, want, mapping);
  EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, b.buffer) == want)
      << from.backend << to_string(from.layout) << " " << to.backend << to_string(to.layout);
}

TEST(TileBlocks, BlocksAreConvertedBothWays) {
  const Order tiles{"FLASHINFER", KVCacheLayout::kTiles};
  const Order others[] = {{"FLASHINFER", KVCacheLayout::kNHD},
                          {"FLASHINFER", KVCacheLayout::kHND, 96},
                          {"XFORMERS", KVCacheLayout::kNHD},
                          {"FLASHINFER", KVCacheLayout::kTiles, 64}};
  for (const auto& context : all_contexts()) {
    for (const std::int32_t head_size : {64, 128, 256}) {
      const KVCacheSpec spec{.block_size = 32, .num_kv_heads = 3, .head_size = head_size};
      for (const Order& other : others) {
        expect_conversion(*context, spec, tiles, other);
        expect_conversion(*context, spec, other, tiles);
      }
    }
  }
}

TEST(TileBlocks, BlocksOfOtherTypesAreConverted) {
  const Order nhd{"FLASHINFER", KVCacheLayout::kNHD}, hnd{"FLASHINFER", KVCacheLayout::kHND};
  for (const auto& context : all_contexts()) {
    for (const DType dtype : {DType::kF32, DType::kFp8E4M3}) {
      expect_conversion(*context,
                        {.block_size = 5, .num_kv_heads = 2, .head_size = 24, .dtype = dtype}, nhd,
                        hnd);
    }
  }
}

TEST(TileBlocks, WholeBlocksAreCopiedAndSwapped) {
  const KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    Bytes image = random_bytes(5 * spec.page_size_bytes(), 3);
    const KVCache cache =
        clattn::reshape_kv_cache(cache_ops_test::upload(*context, queue, image), spec,
                                 backend_named("FLASHINFER"), KVCacheLayout::kTiles);
    const std::vector<BlockPair> copies = {{3, 0}, {1, 4}}, swaps = {{0, 1}, {4, 0}, {2, 2}};
    clattn::copy_blocks(*context, queue, std::span(&cache, 1), copies);
    move_blocks(cache, Bytes(image), cache, image, copies);
    EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, cache.buffer) == image);
    Bytes host(3 * spec.page_size_bytes(), 0x5A), want = host;
    clattn::Event event;
    clattn::swap_blocks(*context, queue, cache, std::as_writable_bytes(std::span(host)), swaps,
                        &event);
    event.wait();
    KVCache like = cache;
    like.num_blocks = 3;
    move_blocks(cache, image, like, want, swaps);
    EXPECT_TRUE(host == want);
    const KVCache other = clattn::reshape_kv_cache(
        context->allocate(image.size()), spec, backend_named("FLASHINFER"), KVCacheLayout::kHND);
    EXPECT_EQ(error_text([&] { clattn::swap_blocks(*context, queue, cache, other, swaps); }),
              "swap_blocks: tiles 1 and 0, legal: equal types, shapes and orders of a block");
  }
}

TEST(TileBlocks, ConversionsOfNonsenseAreRefused) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  const auto cache_of = [&](const KVCacheSpec& s, KVCacheLayout layout) {
    return clattn::reshape_kv_cache(context.allocate(3 * s.page_size_bytes()), s,
                                    backend_named("FLASHINFER"), layout);
  };
  const KVCache tiles = cache_of(spec, KVCacheLayout::kTiles);
  const KVCache hnd = cache_of(spec, KVCacheLayout::kHND);
  const auto refusal = [&](const KVCache& from, const KVCache& to,
                           const std::vector<BlockPair>& mapping,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    return error_text([&] { clattn::convert_blocks(context, queue, from, to, mapping); }, code);
  };
  EXPECT_EQ(refusal(tiles, tiles, {{0, 1}}),
            "convert_blocks: source and destination share memory, legal: buffers apart");
  EXPECT_EQ(refusal(tiles, hnd, {{0, 3}}),
            "block_mapping: pair 0: destination block 3, legal: 0 … 2");
  EXPECT_EQ(refusal(cache_of(spec, KVCacheLayout::kHDN), tiles, {{0, 1}}, ErrorCode::kUnsupported),
            "convert_blocks: key_dim_stride is 16, supported: 1 (NHD, HND and tiles)");
  KVCacheSpec wide = spec;
  wide.head_size = 128;
  EXPECT_EQ(refusal(tiles, cache_of(wide, KVCacheLayout::kHND), {{0, 1}}),
            "convert_blocks: from 16 tokens x 2 heads x 64 of f16 to 16 x 2 x 128 of f16, legal: "
            "equal shapes and types");
  KVCache latent = hnd;
  latent.v_offset = latent.k_offset;
  EXPECT_EQ(refusal(tiles, latent, {{0, 1}}),
            "convert_blocks: from a cache of keys and values to one of latent rows, legal: both of "
            "one form");
  clattn::Event event;
  clattn::convert_blocks(context, queue, tiles, hnd, {}, &event);
  EXPECT_FALSE(event);
}

TEST(TileBlocks, CachesThatSayNonsenseAreRefused) {
  const auto& context = *all_contexts().at(0);
  const auto refusal = [&](KVCacheSpec spec) {
    return error_text([&] {
      (void)clattn::reshape_kv_cache(context.allocate(spec.page_size_bytes()), spec,
                                     backend_named("FLASHINFER"), KVCacheLayout::kTiles);
    });
  };
  const KVCacheSpec good{.block_size = 16, .num_kv_heads = 2, .head_size = 64};
  KVCacheSpec spec = good;
  spec.head_size = 80;
  EXPECT_EQ(refusal(spec), "kv_cache: head_size is 80, legal in tiles: 64, 128, 256");
  spec = good;
  spec.block_size = 24;
  EXPECT_EQ(refusal(spec),
            "kv_cache: block_size is 24, legal in tiles: multiples of 16 up to 67108864");
  spec = good;
  spec.dtype = DType::kInt8;
  EXPECT_EQ(refusal(spec), "kv_cache: dtype is int8, legal in tiles: f16, bf16");
  KVCache gaps = clattn::reshape_kv_cache(context.allocate(good.page_size_bytes()), good,
                                          backend_named("FLASHINFER"), KVCacheLayout::kTiles);
  const auto copy = [&](const KVCache& cache) {
    const clattn::Queue queue = context.create_queue();
    const BlockPair pair{0, 0};
    return error_text(
        [&] { clattn::copy_blocks(context, queue, std::span(&cache, 1), std::span(&pair, 1)); });
  };
  KVCache large = gaps;
  large.block_size = (1 << 26) + 16;
  EXPECT_EQ(copy(large),
            "kv_cache: block_size is 67108880, legal in tiles: multiples of 16 up to 67108864");
  gaps.token_stride = 72;
  EXPECT_EQ(copy(gaps), "kv_cache: token_stride is 72, legal in tiles: 64 (head_size)");
}

}  // namespace
