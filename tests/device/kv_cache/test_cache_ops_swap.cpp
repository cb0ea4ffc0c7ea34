#include <fmt/format.h>
#include <clattn/cache_ops.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/device.hpp>
#include <clattn/mla.hpp>

#include <algorithm>

#include "device/cache_blocks.hpp"

// swap_blocks: bytes in, bytes out, for every order of a cache in memory.
namespace test_cache_ops_swap {

using block_test::apply;
using block_test::backend_named;
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

const std::vector<BlockPair> kSwap = {{5, 1}, {2, 6}, {3, 7}, {4, 8}, {0, 3}};

/// The cache that a host image of `blocks` blocks amounts to.
KVCache like(const KVCache& cache, const Shape& shape, const Order& order, std::int64_t blocks,
             const clattn::Context& context) {
  const clattn::Buffer scratch =
      context.allocate(static_cast<std::size_t>(blocks) * shape.spec().page_size_bytes());
  KVCache result =
      clattn::reshape_kv_cache(scratch, shape.spec(), backend_named(order.backend), order.layout);
  EXPECT_EQ(result.dtype, cache.dtype);
  return result;
}

/// Swaps blocks of an image, which lie as `host` says, back to the layer's cache.
void expect_return(const clattn::Queue& queue, const clattn::Context& context, const Layer& layer,
                   const KVCache& host, Bytes& image) {
  const std::vector<BlockPair> back = {{8, 6}, {0, 0}, {1, 1}};
  clattn::swap_blocks(context, queue, std::as_writable_bytes(std::span(image)), layer.cache, back);
  Bytes device = layer.image;
  apply(host, image, layer.cache, device, back);
  EXPECT_TRUE(download<std::uint8_t>(queue, layer.cache.buffer) == device);
}

// A6.4: device to host and back, K and V, for both orders of the two dimensions (A9.2).
TEST(SwapBlocks, GoesToTheHostAndBack) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    for (const Order& order : kOrders) {
      SCOPED_TRACE(order.backend);
      const Shape shape;
      const Layer layer(*context, queue, shape, order, 3);
      const KVCache host = like(layer.cache, shape, order, 9, *context);
      const Bytes before = random_bytes(host.buffer.size_bytes(), 8);
      clattn::PinnedMemory pinned(*context, before.size());
      std::memcpy(pinned.bytes().data(), before.data(), before.size());
      clattn::Event event;
      clattn::swap_blocks(*context, queue, layer.cache, pinned.bytes(), kSwap, &event);
      event.wait();
      Bytes want = before;
      apply(layer.cache, layer.image, host, want, kSwap);
      EXPECT_EQ(std::memcmp(pinned.bytes().data(), want.data(), want.size()), 0);

      Bytes pageable = random_bytes(before.size(), 9);
      expect_return(queue, *context, layer, host, pageable);
    }
  }
}

// A6.4, A7: pages with padding; the image has none, and holds K and V of a block side by side.
TEST(SwapBlocks, MovesPaddedPages) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    for (const Order& order : kOrders) {
      SCOPED_TRACE(order.backend);
      Shape padded;
      padded.padding = 48;
      const Layer layer(*context, queue, padded, order, 3);
      const Order tight{"FLASHINFER", order.layout};
      const KVCache host = like(layer.cache, {}, tight, 9, *context);
      Bytes image = random_bytes(host.buffer.size_bytes(), 8), want = image;
      clattn::swap_blocks(*context, queue, layer.cache, std::as_writable_bytes(std::span(image)),
                          kSwap);
      queue.finish();
      apply(layer.cache, layer.image, host, want, kSwap);
      EXPECT_TRUE(image == want);
      expect_return(queue, *context, layer, host, image);
    }
  }
}

TEST(SwapBlocks, GoesFromDeviceToDeviceWhateverThePlaceOfKAndV) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    Shape large;
    large.num_blocks = 9;
    for (const Order& order : {kOrders[0], kOrders[2]}) {
      const Layer from(*context, queue, {}, kOrders[0], 3);
      const Layer to(*context, queue, large, order, 4);
      clattn::swap_blocks(*context, queue, from.cache, to.cache, kSwap);
      Bytes want = to.image;
      apply(from.cache, from.image, to.cache, want, kSwap);
      EXPECT_TRUE(download<std::uint8_t>(queue, to.cache.buffer) == want) << order.backend;
    }
  }
}

TEST(SwapBlocks, MovesLatentBlocks) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const Bytes image = random_bytes(5 * 4 * 40, 1);
  clattn::MLACache latent;
  latent.dtype = DType::kInt8;
  latent.buffer = upload(context, queue, image);
  latent.num_blocks = 5;
  latent.block_size = 4;
  latent.kv_lora_rank = 32;
  latent.rope_dim = 8;
  Bytes host(2 * 160);
  clattn::swap_blocks(context, queue, latent, std::as_writable_bytes(std::span(host)),
                      std::vector<BlockPair>{{4, 0}, {1, 1}});
  queue.finish();
  EXPECT_TRUE(std::equal(host.begin(), host.begin() + 160, image.begin() + 640));
  EXPECT_TRUE(std::equal(host.begin() + 160, host.end(), image.begin() + 160));
}

TEST(SwapBlocks, MovesXPackedBlocks) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  constexpr std::ptrdiff_t kBlock = 4 * 5 * 8 * 2;
  const Bytes key_image = random_bytes(5 * kBlock, 1), value_image = random_bytes(5 * kBlock, 2);
  const clattn::Buffer key = upload(context, queue, key_image);
  const clattn::Buffer value = upload(context, queue, value_image);
  clattn::PackedKVCache packed;
  packed.key = key.handle();
  packed.value = value.handle();
  packed.num_blocks = 5;
  packed.block_size = 4;
  packed.num_kv_heads = 5;
  packed.head_size = 8;
  Bytes host = random_bytes(2 * 3 * kBlock, 3), want = host;  // [2][3] blocks
  clattn::swap_packed_blocks(context, queue, packed, std::as_writable_bytes(std::span(host)),
                             std::vector<BlockPair>{{4, 0}, {0, 2}});
  queue.finish();
  for (const BlockPair& pair : {BlockPair{4, 0}, BlockPair{0, 2}}) {
    std::copy_n(key_image.begin() + pair.source * kBlock, kBlock,
                want.begin() + pair.destination * kBlock);
    std::copy_n(value_image.begin() + pair.source * kBlock, kBlock,
                want.begin() + (3 + pair.destination) * kBlock);
  }
  EXPECT_TRUE(host == want);
  clattn::swap_packed_blocks(context, queue, std::as_writable_bytes(std::span(host)), packed,
                             std::vector<BlockPair>{{1, 3}});
  Bytes key_want = key_image, value_want = value_image;
  std::copy_n(host.begin() + kBlock, kBlock, key_want.begin() + 3 * kBlock);
  std::copy_n(host.begin() + 4 * kBlock, kBlock, value_want.begin() + 3 * kBlock);
  EXPECT_TRUE(download<std::uint8_t>(queue, key) == key_want);
  EXPECT_TRUE(download<std::uint8_t>(queue, value) == value_want);
}

/// A part of a buffer as a buffer.
clattn::Buffer sub_buffer(const clattn::Buffer& whole, std::size_t offset, std::size_t size) {
  const cl_buffer_region region{offset, size};
  cl_int status = CL_SUCCESS;
  const cl_mem part =
      clCreateSubBuffer(whole.handle(), 0, CL_BUFFER_CREATE_TYPE_REGION, &region, &status);
  EXPECT_EQ(status, CL_SUCCESS);
  clattn::Buffer buffer = clattn::Buffer::adopt(part);
  clReleaseMemObject(part);
  return buffer;
}

// With one head, NHD and HND are the same bytes.
TEST(SwapBlocks, StridesThatNoBlockUsesMayDiffer) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  Shape shape;
  shape.num_kv_heads = 1;
  const Layer from(context, queue, shape, kOrders[0], 3);
  const Layer to(context, queue, shape, kOrders[1], 4);
  EXPECT_NE(from.cache.head_stride, to.cache.head_stride);
  const std::vector<BlockPair> pairs = {{5, 1}, {0, 3}};
  clattn::swap_blocks(context, queue, from.cache, to.cache, pairs);
  Bytes want = to.image;
  apply(from.cache, from.image, to.cache, want, pairs);
  EXPECT_TRUE(download<std::uint8_t>(queue, to.cache.buffer) == want);
}

// A6.4: what counts is the bytes of the underlying buffer, not ids and not handles.
TEST(SwapBlocks, CachesThatShareMemoryMustNotOverlap) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    const Shape shape{.num_blocks = 16, .block_size = 16, .num_kv_heads = 8, .head_size = 64};
    const std::size_t page = shape.spec().page_size_bytes();  // 32 KiB: aligned everywhere
    const Layer layer(*context, queue, shape, kOrders[0], 1);
    KVCache low = layer.cache, high = layer.cache;  // high's block 0 is low's block 2
    low.num_blocks = 8;
    high.num_blocks = 8;
    high.k_offset += 2 * high.block_stride;
    high.v_offset += 2 * high.block_stride;
    KVCache low_part = low, high_part = low;
    low_part.buffer = sub_buffer(layer.cache.buffer, 0, 8 * page);
    high_part.buffer = sub_buffer(layer.cache.buffer, 2 * page, 8 * page);
    struct Views {
      const KVCache& from;
      const KVCache& to;
    };
    for (const Views& views : {Views{low, high}, Views{low_part, high_part}, Views{low, high_part},
                               Views{low_part, high}}) {
      EXPECT_EQ(error_text([&] {
                  clattn::swap_blocks(*context, queue, views.from, views.to,
                                      std::vector<BlockPair>{{7, 7}, {2, 4}, {1, 0}});
                }),
                "block_mapping: block 0, the destination of pair 2, shares memory with block 2, "
                "the source of pair 1; legal: blocks apart");
    }
    // Equal ids, other bytes.
    clattn::swap_blocks(*context, queue, low, high, std::vector<BlockPair>{{0, 0}, {1, 1}});
    Bytes want = layer.image;
    apply(low, layer.image, high, want, {{0, 0}, {1, 1}});
    EXPECT_TRUE(download<std::uint8_t>(queue, layer.cache.buffer) == want);
    // Half a block.
    high.k_offset = low.k_offset + low.block_stride / 4;
    high.v_offset = low.v_offset + low.block_stride / 4;
    EXPECT_NE(error_text([&] {
                clattn::swap_blocks(*context, queue, low, high, std::vector<BlockPair>{{3, 3}});
              }).find("shares memory"),
              std::string::npos);
  }
}

// A6.4
TEST(SwapBlocks, CachesOfTwoContextsAreRefused) {
  const auto& context = *all_contexts().at(0);
  const auto other = clattn::Context::create(clattn::select_device({}));
  const clattn::Queue queue = context.create_queue();
  const Layer here(context, queue, {}, kOrders[0], 1);
  const Layer there(*other, other->create_queue(), {}, kOrders[0], 1);
  EXPECT_EQ(error_text([&] {
              clattn::swap_blocks(context, queue, here.cache, there.cache,
                                  std::vector<BlockPair>{{0, 1}});
            }),
            "src and dst must be on the same GPU");
}

TEST(SwapBlocks, NonsenseIsRefusedWithNumbers) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const Layer layer(context, queue, {}, kOrders[0], 1);
  std::vector<std::byte> image(1536 * 2);
  const std::span<std::byte> host(image);
  const auto refuse = [&](const clattn::SwapSpace& from, const clattn::SwapSpace& to,
                          const std::vector<BlockPair>& mapping) {
    return error_text([&] { clattn::swap_blocks(context, queue, from, to, mapping); });
  };
  EXPECT_EQ(refuse(host, host, {}), "Invalid device combination");
  EXPECT_EQ(refuse(layer.cache, host, {{0, 2}}),
            "block_mapping: pair 0: destination block 2, legal: 0 … 1");
  EXPECT_EQ(refuse(host, layer.cache, {{1, 3}, {0, 3}}),
            "block_mapping: pair 1: destination block 3 is pair 0's too, legal: once");
  EXPECT_EQ(refuse(layer.cache, layer.cache, {{0, 1}, {1, 2}}),
            "block_mapping: block 1, the destination of pair 0, shares memory with block 1, the "
            "source of pair 1; legal: blocks apart");
  EXPECT_EQ(refuse(layer.cache, layer.cache, {{3, 3}}),
            "block_mapping: block 3, the destination of pair 0, shares memory with block 3, the "
            "source of pair 0; legal: blocks apart");
  EXPECT_EQ(refuse(layer.cache, host.first(500), {}),
            "swap_blocks: host image of 500 bytes, legal: multiples of a block's 1536");
  Shape other;
  other.dtype = DType::kBF16;
  const Layer bf16(context, queue, other, kOrders[0], 1);
  EXPECT_EQ(refuse(layer.cache, bf16.cache, {}),
            "swap_blocks: dtype f16 and bf16, legal: equal types, shapes and orders of a block");
  const Layer hnd(context, queue, {}, kOrders[1], 1);
  EXPECT_EQ(refuse(layer.cache, hnd.cache, {}),
            "swap_blocks: token_stride 24 and 8, legal: equal types, shapes and orders of a block");
  KVCache gaps = layer.cache;
  gaps.token_stride += 8;
  gaps.num_blocks = 2;
  EXPECT_NE(refuse(gaps, host, {}).find("legal: blocks without gaps"), std::string::npos);
}

}  // namespace test_cache_ops_swap
