#include <fmt/format.h>
#include <clattn/cache_ops.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/mla.hpp>

#include <algorithm>

#include "device/cache_blocks.hpp"
#include "opencl/runtime.hpp"

// copy_blocks: bytes in, bytes out, for every order of a cache in memory.
namespace test_cache_ops_blocks {

using block_test::apply;
using block_test::Bytes;
using block_test::kOrders;
using block_test::Layer;
using block_test::Order;
using block_test::Shape;
using cache_ops_test::all_contexts;
using cache_ops_test::download;
using cache_ops_test::error_text;
using cache_ops_test::random_bytes;
using cache_ops_test::upload;
using clattn::BlockPair;
using clattn::DType;
using clattn::KVCache;

void expect_copied(const clattn::Context& context, const Shape& shape, const Order& order,
                   std::size_t num_layers, const std::vector<BlockPair>& mapping) {
  const clattn::Queue queue = context.create_queue();
  std::vector<Layer> layers;
  std::vector<KVCache> caches;
  for (std::size_t i = 0; i < num_layers; ++i) {
    layers.emplace_back(context, queue, shape, order, static_cast<std::uint32_t>(i));
    caches.push_back(layers.back().cache);
  }
  clattn::Event event;
  clattn::copy_blocks(context, queue, caches, mapping, &event);
  EXPECT_TRUE(event);
  for (const Layer& layer : layers) {
    Bytes want = layer.image;
    apply(layer.cache, layer.image, layer.cache, want, mapping);
    EXPECT_TRUE(download<std::uint8_t>(queue, layer.cache.buffer) == want)
        << order.backend << " " << clattn::to_string(shape.dtype) << " of " << num_layers;
  }
}

// A6.5, A9.2: K and V of every layer, whichever of the two dimensions comes first.
TEST(CopyBlocks, CopiesKeysAndValuesOfEveryLayerInEveryOrder) {
  const std::vector<BlockPair> mapping = {{0, 6}, {0, 2}, {3, 1}};
  for (const auto& context : all_contexts()) {
    for (const Order& order : kOrders) {
      Shape shape;
      for (const std::size_t layers : {1U, 8U, 19U}) {  // more than a launch takes
        expect_copied(*context, shape, order, layers, mapping);
      }
      shape.dtype = DType::kInt8;  // rows of 8 bytes: narrower units
      expect_copied(*context, shape, order, 2, mapping);
      shape.padding = 24;  // A7: what lies behind the pages stays
      expect_copied(*context, shape, order, 2, mapping);
      shape = {.num_blocks = 4, .block_size = 64, .num_kv_heads = 8, .head_size = 128};
      expect_copied(*context, shape, order, 1, {{3, 0}});  // several groups a block
    }
  }
}

TEST(CopyBlocks, BlocksWithGapsKeepWhatLiesBetween) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Bytes image = random_bytes(4096, 5);
    KVCache cache;
    cache.buffer = upload(*context, queue, image);
    cache.num_blocks = 3;
    cache.block_size = 2;
    cache.num_kv_heads = 3;
    cache.head_size = 8;
    cache.k_offset = 5;  // odd elements: copied byte by byte
    cache.v_offset = 301;
    cache.block_stride = 600;
    cache.token_stride = 100;
    cache.head_stride = 9;
    clattn::copy_blocks(*context, queue, std::span(&cache, 1), std::vector<BlockPair>{{2, 0}});
    Bytes want = image;
    apply(cache, image, cache, want, {{2, 0}});
    EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want);
  }
}

TEST(CopyBlocks, LatentAndXPackedCachesToo) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Bytes image = random_bytes(5 * 4 * 40 * 2, 1);
    clattn::MLACache latent;
    latent.buffer = upload(*context, queue, image);
    latent.num_blocks = 5;
    latent.block_size = 4;
    latent.kv_lora_rank = 32;
    latent.rope_dim = 8;
    const std::vector<BlockPair> mapping = {{1, 4}, {2, 0}};
    clattn::copy_blocks_mla(*context, queue, std::span(&latent, 1), mapping);
    Bytes want = image;
    constexpr std::ptrdiff_t kBlock = 4 * 40 * 2;
    for (const BlockPair& pair : mapping) {
      std::copy_n(image.begin() + pair.source * kBlock, kBlock,
                  want.begin() + pair.destination * kBlock);
    }
    EXPECT_TRUE(download<std::uint8_t>(queue, latent.buffer) == want);

    const clattn::Buffer key = upload(*context, queue, image);
    const clattn::Buffer value = upload(*context, queue, image);
    clattn::PackedKVCache packed;
    packed.key = key.handle();
    packed.value = value.handle();
    packed.num_blocks = 5;
    packed.block_size = 4;
    packed.num_kv_heads = 5;
    packed.head_size = 8;
    clattn::copy_blocks(*context, queue, std::span(&packed, 1), mapping);
    EXPECT_TRUE(download<std::uint8_t>(queue, key) == want);
    EXPECT_TRUE(download<std::uint8_t>(queue, value) == want);
  }
}

// The form for groups of many work-items, whatever the device's: two planes in units of 16 bytes,
// blocks of two sets of three runs with gaps between them.
TEST(CopyBlocks, GroupsOfManyWorkItemsCopyEveryUnit) {
  constexpr std::size_t kUnit = 16, kBlock = 96, kGroup = 8;
  constexpr cl_int kRow = 11, kInner = 3, kOuter = 2, kSplits = 2;  // more than a group's turn
  constexpr cl_long kInnerStride = 13, kOuterStride = 45;
  const std::vector<BlockPair> mapping = {{4, 0}, {1, 3}, {4, 2}};
  std::vector<cl_long> meta(16);
  meta[1] = 3;  // units before the second plane's blocks
  for (const BlockPair& pair : mapping) meta.insert(meta.end(), {pair.source, pair.destination});
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Bytes images[] = {random_bytes(5 * kBlock * kUnit, 1),
                            random_bytes((5 * kBlock + 3) * kUnit, 2)};
    const clattn::Buffer planes[] = {upload(*context, queue, images[0]),
                                     upload(*context, queue, images[1])};
    const clattn::Buffer device_meta = upload(*context, queue, meta);
    const auto pool = context->runtime().kernel(
        {"cache/copy_blocks.cl", "clattn_copy_blocks",
         fmt::format("-DCLA_WG_SIZE={} -DCLA_COPY_BYTES={} -cl-opt-disable", kGroup, kUnit)});
    clattn::detail::KernelLease lease = pool->acquire();
    for (std::size_t i = 0; i < 16; ++i) lease.arg(planes[i == 1 ? 1 : 0].handle());
    lease.arg(device_meta.handle())
        .arg<cl_int>(static_cast<cl_int>(mapping.size()))
        .arg<cl_int>(kSplits)
        .arg<cl_int>(kRow * kInner * kOuter)
        .arg<cl_long>(kBlock)
        .arg<cl_int>(kRow)
        .arg<cl_int>(kInner)
        .arg<cl_long>(kInnerStride)
        .arg<cl_long>(kOuterStride)
        .enqueue(queue, 2 * mapping.size() * kSplits, kGroup);
    for (std::size_t plane = 0; plane < 2; ++plane) {
      Bytes want = images[plane];
      for (const BlockPair& pair : mapping) {
        for (std::int64_t run = 0; run < kInner * kOuter; ++run) {
          const std::int64_t at = run / kInner * kOuterStride + run % kInner * kInnerStride;
          const auto first = [&](std::int64_t block) {
            return (meta[plane] + block * static_cast<std::int64_t>(kBlock) + at) *
                   static_cast<std::int64_t>(kUnit);
          };
          std::copy_n(images[plane].begin() + first(pair.source), kRow * kUnit,
                      want.begin() + first(pair.destination));
        }
      }
      EXPECT_TRUE(download<std::uint8_t>(queue, planes[plane]) == want) << plane;
    }
  }
}

TEST(CopyBlocks, NothingToDoIsNoError) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  clattn::Event event;
  clattn::copy_blocks(context, queue, std::span<const KVCache>{}, std::vector<BlockPair>{{0, 1}},
                      &event);
  EXPECT_FALSE(event);
  const Layer layer(context, queue, {}, kOrders[0], 1);
  clattn::copy_blocks(context, queue, std::span(&layer.cache, 1), std::vector<BlockPair>{}, &event);
  EXPECT_FALSE(event);
}

TEST(CopyBlocks, NonsenseIsRefusedWithNumbers) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const Layer layer(context, queue, {}, kOrders[0], 1);
  std::vector<KVCache> caches = {layer.cache};
  const auto refuse = [&](const std::vector<BlockPair>& mapping) {
    return error_text([&] { clattn::copy_blocks(context, queue, caches, mapping); });
  };
  EXPECT_EQ(refuse({{0, 1}, {7, 2}}), "block_mapping: pair 1: source block 7, legal: 0 … 6");
  EXPECT_EQ(refuse({{0, -1}}), "block_mapping: pair 0: destination block -1, legal: 0 … 6");
  EXPECT_EQ(refuse({{0, 1}, {2, 3}, {4, 1}}),
            "block_mapping: pair 2: destination block 1 is pair 0's too, legal: once");
  EXPECT_EQ(refuse({{0, 1}, {1, 2}}),
            "block_mapping: block 1 is the source of pair 1 and the destination of pair 0, legal: "
            "one of the two");
  EXPECT_EQ(refuse({{3, 3}}),
            "block_mapping: block 3 is the source of pair 0 and the destination of pair 0, legal: "
            "one of the two");
  caches.push_back(layer.cache);
  caches[1].num_blocks = 6;
  EXPECT_EQ(refuse({{0, 1}}),
            "copy_blocks: layer 1 has 6 blocks of 1 x 1 x 768 bytes (f16), legal: layer 0's 7 "
            "blocks of 1 x 1 x 768 bytes (f16) and the same strides");
  caches[1].num_blocks = 8;
  EXPECT_EQ(refuse({{0, 1}}), "cache: 8 blocks end at byte 11520, legal: the buffer's 10752 bytes");
}

}  // namespace test_cache_ops_blocks
