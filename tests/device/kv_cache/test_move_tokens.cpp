// move_tokens: bytes in, bytes out, for every order of a cache in memory.
#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>

#include "device/cache_blocks.hpp"

namespace test_move_tokens {

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
using clattn::DType;
using clattn::KVCache;
using Slots = std::vector<std::int64_t>;
using Starts = std::vector<std::int32_t>;

/// Byte 0 of a token's row of one head.
std::size_t place(const KVCache& cache, std::int64_t offset, std::int64_t slot, std::int64_t head) {
  const std::int64_t element = offset + slot / cache.block_size * cache.block_stride +
                               slot % cache.block_size * cache.token_stride +
                               head * cache.head_stride;
  return static_cast<std::size_t>(element) * clattn::element_size_bytes(cache.dtype);
}

/// Moves of one token after the other, as the caller means them.
void apply(const KVCache& cache, const Slots& src, const Slots& dst, Bytes& image) {
  const std::size_t row =
      static_cast<std::size_t>(cache.head_size) * clattn::element_size_bytes(cache.dtype);
  for (std::size_t i = 0; i < src.size(); ++i) {
    for (const std::int64_t offset : {cache.k_offset, cache.v_offset}) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
        const Bytes::iterator at = image.begin();
        const auto from = static_cast<std::ptrdiff_t>(place(cache, offset, src[i], head));
        std::copy_n(at + from, row,
                    at + static_cast<std::ptrdiff_t>(place(cache, offset, dst[i], head)));
      }
    }
  }
}

// Accepted paths of two requests: each token goes where an earlier one may have stood.
const Slots kSrc = {5, 9, 10, 41, 47, 33};
const Slots kDst = {4, 5, 9, 40, 41, 47};
const Starts kStarts = {0, 3, 3, 6};

void expect_moved(const clattn::Context& context, const Shape& shape, const Order& order,
                  std::size_t num_layers) {
  const clattn::Queue queue = context.create_queue();
  const clattn::Buffer src = upload(context, queue, kSrc), dst = upload(context, queue, kDst);
  const clattn::Buffer starts = upload(context, queue, kStarts);
  for (const bool on_device : {false, true}) {
    std::vector<Layer> layers;
    std::vector<KVCache> caches;
    for (std::size_t i = 0; i < num_layers; ++i) {
      layers.emplace_back(context, queue, shape, order, static_cast<std::uint32_t>(i));
      caches.push_back(layers.back().cache);
    }
    clattn::Event event;
    if (on_device) {
      clattn::move_tokens(context, queue, caches, clattn::DeviceTokenMoves{src, dst, starts, 3},
                          &event);
    } else {
      clattn::move_tokens(context, queue, caches, clattn::TokenMoves{kSrc, kDst, kStarts}, &event);
    }
    EXPECT_TRUE(event);
    for (const Layer& layer : layers) {
      Bytes want = layer.image;
      apply(layer.cache, kSrc, kDst, want);
      EXPECT_TRUE(download<std::uint8_t>(queue, layer.cache.buffer) == want)
          << order.backend << " " << clattn::to_string(shape.dtype) << " of " << num_layers;
    }
  }
}

TEST(MoveTokens, EveryLayerInEveryOrder) {
  for (const auto& context : all_contexts()) {
    for (const Order& order : kOrders) {
      Shape shape;
      shape.block_size = 16;
      for (const std::size_t layers : {1U, 8U, 19U})  // more than a launch takes
        expect_moved(*context, shape, order, layers);
      shape.dtype = DType::kInt8;  // rows of 8 bytes: narrower units
      expect_moved(*context, shape, order, 2);
      shape.padding = 24;
      expect_moved(*context, shape, order, 2);
      shape = {.num_blocks = 4, .block_size = 64, .num_kv_heads = 8, .head_size = 128};
      expect_moved(*context, shape, order, 1);
    }
  }
}

// K and V of a head beside each other: [blocks, tokens, heads, 2, dims].
TEST(MoveTokens, HeadsWithGaps) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Bytes image = random_bytes(std::size_t{4 * 16 * 3 * 2 * 8 * 2}, 6);
    KVCache cache;
    cache.buffer = upload(*context, queue, image);
    cache.num_blocks = 4;
    cache.block_size = 16;
    cache.num_kv_heads = 3;
    cache.head_size = 8;
    cache.v_offset = 8;
    cache.head_stride = 16;
    cache.token_stride = 48;
    cache.block_stride = 16 * 48;
    clattn::move_tokens(*context, queue, std::span(&cache, 1),
                        clattn::TokenMoves{kSrc, kDst, kStarts});
    Bytes want = image;
    apply(cache, kSrc, kDst, want);
    EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want);
    const KVCache twice[] = {cache, cache};
    EXPECT_EQ(
        error_text([&] {
          clattn::move_tokens(*context, queue, twice, clattn::TokenMoves{kSrc, kDst, kStarts});
        }),
        "move_tokens: two caches lie in the same memory, legal: each named once");
  }
}

TEST(MoveTokens, LatentRows) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    constexpr std::ptrdiff_t kRow = 40 * 2;
    const Bytes image = random_bytes(std::size_t{60} * kRow, 1);
    clattn::MLACache cache;
    cache.buffer = upload(*context, queue, image);
    cache.num_blocks = 15;
    cache.block_size = 4;
    cache.kv_lora_rank = 32;
    cache.rope_dim = 8;
    clattn::move_tokens_mla(*context, queue, std::span(&cache, 1),
                            clattn::TokenMoves{kSrc, kDst, kStarts});
    Bytes want = image;
    for (std::size_t i = 0; i < kSrc.size(); ++i)
      std::copy_n(want.begin() + kSrc[i] * kRow, kRow, want.begin() + kDst[i] * kRow);
    EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want);
  }
}

// What only the device knows cannot be refused: it moves nothing, and nothing else is touched.
TEST(MoveTokens, ListsOnTheDeviceMayNameNothing) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Layer layer(*context, queue, Shape{}, kOrders[0], 3);
    const KVCache& cache = layer.cache;
    const std::int64_t slots = cache.num_blocks * cache.block_size;
    const Slots src = {1, -1, slots, 2, 3}, dst = {0, 2, 1, -1, slots};
    const clattn::Buffer from = upload(*context, queue, src), to = upload(*context, queue, dst);
    const clattn::Buffer starts = upload(*context, queue, Starts{-7, 5, 1000});
    clattn::move_tokens(*context, queue, std::span(&cache, 1),
                        clattn::DeviceTokenMoves{from, to, starts, 2});
    Bytes want = layer.image;
    apply(cache, {1}, {0}, want);
    EXPECT_TRUE(download<std::uint8_t>(queue, cache.buffer) == want);
  }
}

TEST(MoveTokens, RefusesWhatIsNoMove) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const Layer layer(context, queue, Shape{}, kOrders[0], 3);
  const std::int64_t slots = layer.cache.num_blocks * layer.cache.block_size;
  const auto refused = [&](const Slots& src, const Slots& dst, const Starts& starts) {
    return error_text([&] {
      clattn::move_tokens(context, queue, std::span(&layer.cache, 1),
                          clattn::TokenMoves{src, dst, starts});
    });
  };
  EXPECT_EQ(refused({1}, {1, 2}, {0, 1}),
            "move_tokens: src_slots and dst_slots hold 1 and 2 elements, legal: as many");
  EXPECT_EQ(refused({1}, {0}, {}),
            "move_tokens: starts begins with nothing, legal: 0 (num_requests + 1 elements)");
  EXPECT_EQ(refused({1}, {0}, {0, 2}), "move_tokens: starts[1] is 2, legal: 0 … 1 (pairs)");
  EXPECT_EQ(refused({1}, {0}, {0, 0}), "move_tokens: starts ends with 0, legal: 1 (pairs)");
  EXPECT_EQ(refused({slots}, {0}, {0, 1}),
            fmt::format("move_tokens: src_slots[0] is {}, legal: 0 … {} (the caches' slots)", slots,
                        slots - 1));
  EXPECT_EQ(
      refused({1}, {-1}, {0, 1}),
      fmt::format("move_tokens: dst_slots[0] is -1, legal: 0 … {} (the caches' slots)", slots - 1));
  EXPECT_EQ(refused({1, 3}, {0, 0}, {0, 1, 2}),
            "move_tokens: slot 0 is moved to by request 0 and used by request 1, legal: one "
            "request");
  EXPECT_EQ(refused({1, 3}, {3, 0}, {0, 1, 2}),
            "move_tokens: slot 3 is moved to by request 0 and used by request 1, legal: one "
            "request");
  EXPECT_TRUE(download<std::uint8_t>(queue, layer.cache.buffer) == layer.image);
}

}  // namespace test_move_tokens
