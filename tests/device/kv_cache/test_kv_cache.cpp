#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/compat/packed_cache.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <clattn/registry.hpp>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "compat/packed_cache.hpp"
#include "device/cache_ops_support.hpp"
#include "kernels/choose/variants.hpp"
#include "kernels/launch/cache_write.hpp"
#include "support/error_text.hpp"

namespace test_kv_cache {

using attention_test::all_contexts;
using cache_ops_test::element;
using cache_ops_test::error_text;
using clattn::DType;
using clattn::KVCacheLayout;
using clattn::detail::Role;
using test::error_text;

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

/// One cache write: tokens with stray strides and offsets, slots that repeat nothing and include
/// padding and a slot past the cache.
struct Write {
  static constexpr std::int32_t kHeads = 3;
  static constexpr std::int32_t kBlock = 5;
  static constexpr std::int64_t kBlocks = 4;
  static constexpr std::int64_t kPadding = 13;  // elements between tokens: odd strides
  static constexpr std::int64_t kOffset = 7;    // elements before token 0
  const std::vector<std::int64_t> slots = {99, 7,  -1, 19,
                                           0,  20, 12};  // the first is skipped by the offset
  std::int32_t dims;
  std::int64_t row = std::int64_t{kHeads} * dims;
  std::int64_t stride = row + kPadding;
  DType dtype;
  DType cache_dtype;
  Rows key{static_cast<std::size_t>(kOffset + 6 * stride), dtype, 1};
  Rows value{static_cast<std::size_t>(kOffset + 6 * stride), dtype, 2};

  Write(std::int32_t head_size, DType in, DType out)
      : dims(head_size), dtype(in), cache_dtype(out) {}

  std::size_t width() const { return clattn::element_size_bytes(cache_dtype); }
  std::size_t cache_bytes() const {
    return static_cast<std::size_t>(kBlocks * kBlock * row) * width();
  }
  clattn::detail::KernelShape shape() const {
    return {kHeads, kHeads, dims, kBlock, dtype, cache_dtype, {}};
  }
  /// Calls place(slot, head, dim, element index of the input) for every element that must be
  /// stored.
  template <typename Place>
  void for_each_stored(const Place& place) const {
    for (std::size_t t = 0; t + 1 < slots.size(); ++t) {
      const std::int64_t slot = slots[t + 1];
      if (slot < 0 || slot >= kBlocks * kBlock) continue;
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t d = 0; d < dims; ++d) {
          place(slot, h, d,
                static_cast<std::size_t>(kOffset + static_cast<std::int64_t>(t) * stride +
                                         h * dims + d));
        }
      }
    }
  }
  void store(std::vector<std::byte>& image, std::int64_t at, double value_in) const {
    const std::uint32_t bits = oracle::encode(element(cache_dtype), value_in);
    std::memcpy(image.data() + static_cast<std::size_t>(at) * width(), &bits, width());
  }
};

/// Device copies of a Write's inputs.
struct WriteBuffers {
  clattn::Queue queue;
  clattn::Buffer key, value, slots;
  WriteBuffers(const clattn::Context& context, const Write& write)
      : queue(context.create_queue()),
        key(context.allocate(write.key.bytes.size())),
        value(context.allocate(write.value.bytes.size())),
        slots(context.allocate(write.slots.size() * 8)) {
    queue.write(key, write.key.bytes);
    queue.write(value, write.value.bytes);
    queue.write(slots, std::as_bytes(std::span(write.slots)));
  }
  clattn::TensorRef key_ref(const Write& w) const {
    return {key.handle(), Write::kOffset, w.stride};
  }
  clattn::TensorRef value_ref(const Write& w) const {
    return {value.handle(), Write::kOffset, w.stride};
  }
};

/// Runs `run(context, built kernel, write)` for every variant of a role that the device has, every
/// pair of types (8-bit caches from f16 only) and head sizes that fill vectors and ones that do
/// not.
template <typename Run>
void for_each_write(clattn::detail::Role role, const Run& run) {
  constexpr std::array kTypes = {DType::kF32, DType::kF16, DType::kBF16};
  constexpr std::array kCacheTypes = {DType::kF32,     DType::kF16,     DType::kBF16,
                                      DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};
  for (const auto& context : all_contexts()) {
    for (const auto& variant : clattn::detail::variants()) {
      if (variant.role != role || !why_not(variant, context->capabilities()).empty()) continue;
      for (const DType dtype : kTypes) {
        for (const DType cache_dtype : kCacheTypes) {
          const bool quantized = clattn::is_quantized(cache_dtype);
          if (quantized && dtype != DType::kF16) continue;
          for (const std::int32_t dims : {quantized ? 16 : 8, 72}) {
            if (quantized && role == Role::kCacheWritePacked && dims % 16 != 0) continue;
            const Write write(dims, dtype, cache_dtype);
            SCOPED_TRACE(fmt::format("{} {} to {} dims {}", variant.name, clattn::to_string(dtype),
                                     clattn::to_string(cache_dtype), dims));
            const clattn::detail::BuiltKernel kernel{
                variant,
                context->runtime().kernel(
                    kernel_source(variant, write.shape(), context->capabilities())),
                {}};
            run(*context, kernel, write);
          }
        }
      }
    }
  }
}

TEST(ReshapeAndCache, PackedCacheHoldsEveryTokenInItsPlace) {
  for_each_write(Role::kCacheWritePacked, [](const clattn::Context& context, const auto& kernel,
                                             const Write& write) {
    const WriteBuffers in(context, write);
    std::vector<std::byte> want_k(write.cache_bytes(), std::byte{0x5A});
    std::vector<std::byte> want_v = want_k;
    const clattn::Buffer k = context.allocate(want_k.size());
    const clattn::Buffer v = context.allocate(want_v.size());
    in.queue.write(k, want_k);
    in.queue.write(v, want_v);
    const clattn::PackedKVCache cache{.key = k.handle(),
                                      .value = v.handle(),
                                      .dtype = write.cache_dtype,
                                      .num_blocks = Write::kBlocks,
                                      .block_size = Write::kBlock,
                                      .num_kv_heads = Write::kHeads,
                                      .head_size = write.dims};
    clattn::detail::enqueue_cache_write(kernel, write.shape(), in.queue, in.key_ref(write),
                                        in.value_ref(write), clattn::detail::pages_of(cache),
                                        {in.slots.handle(), 8, 6}, nullptr);
    std::vector<std::byte> got_k(want_k.size());
    std::vector<std::byte> got_v(want_v.size());
    in.queue.read(k, got_k);
    in.queue.read(v, got_v);
    const std::int64_t x = 16 / static_cast<std::int64_t>(write.width());
    write.for_each_stored([&](std::int64_t slot, std::int64_t h, std::int64_t d, std::size_t from) {
      const std::int64_t head = slot / Write::kBlock * Write::kHeads + h;
      const std::int64_t token = slot % Write::kBlock;
      write.store(want_k, ((head * (write.dims / x) + d / x) * Write::kBlock + token) * x + d % x,
                  write.key.values[from]);
      write.store(want_v, (head * write.dims + d) * Write::kBlock + token,
                  write.value.values[from]);
    });
    EXPECT_TRUE(got_k == want_k);
    EXPECT_TRUE(got_v == want_v);
  });
}

// A6.3: the shape of PagedAttention.get_kv_cache_shape, split and filled.
TEST(ReshapeAndCache, A6_3_OneAllocationIsSplitIntoThePackedPair) {
  EXPECT_EQ(clattn::get_packed_kv_cache_shape(4, 5, 3, 16),
            (std::array<std::int64_t, 3>{2, 4, 5 * 3 * 16}));
  const Write write(16, DType::kF16, DType::kF16);
  clattn::KVCacheSpec spec{
      .block_size = Write::kBlock, .num_kv_heads = Write::kHeads, .head_size = write.dims};
  for (const auto& context : all_contexts()) {
    const WriteBuffers in(*context, write);
    std::vector<std::byte> want(2 * write.cache_bytes(), std::byte{0x5A});
    const clattn::Buffer raw = context->allocate(want.size());
    in.queue.write(raw, want);
    const clattn::PackedKVCache cache = clattn::split_kv_cache(raw, spec);
    clattn::reshape_and_cache(*context, in.queue, in.key_ref(write), in.value_ref(write),
                              DType::kF16, cache, in.slots.handle(), 8, 6);
    const std::int64_t plane = Write::kBlocks * Write::kBlock * write.row;
    write.for_each_stored([&](std::int64_t slot, std::int64_t h, std::int64_t d, std::size_t from) {
      const std::int64_t head = slot / Write::kBlock * Write::kHeads + h;
      const std::int64_t token = slot % Write::kBlock;
      write.store(want, ((head * 2 + d / 8) * Write::kBlock + token) * 8 + d % 8,
                  write.key.values[from]);
      write.store(want, plane + (head * 16 + d) * Write::kBlock + token, write.value.values[from]);
    });
    std::vector<std::byte> got(want.size());
    in.queue.read(raw, got);
    EXPECT_TRUE(got == want);
  }
  const clattn::Buffer raw = all_contexts().at(0)->allocate(2 * write.cache_bytes());
  spec.head_size = 20;
  EXPECT_EQ(error_text([&] { (void)clattn::split_kv_cache(raw, spec); }),
            "KV cache: buffer of 3840 bytes, legal: a positive multiple of the page size 1200");
  spec.head_size = 4;
  EXPECT_EQ(error_text([&] { (void)clattn::split_kv_cache(raw, spec); }),
            "cache: head_size is 4, legal in an x-packed cache of f16: multiples of 8");
  spec.page_size_padded = 960;
  EXPECT_EQ(
      error_text([&] { (void)clattn::split_kv_cache(raw, spec); }, clattn::ErrorCode::kUnsupported),
      "KV cache: page_size_padded is 960, supported: 0 (x-packed pages)");
}

TEST(ReshapeAndCache, PagesOfEveryLayoutHoldEveryTokenInItsPlace) {
  for_each_write(Role::kCacheWrite, [](const clattn::Context& context, const auto& kernel,
                                       const Write& write) {
    for (const KVCacheLayout layout : {KVCacheLayout::kNHD, KVCacheLayout::kHND}) {
      const WriteBuffers in(context, write);
      std::vector<std::byte> want(2 * write.cache_bytes(), std::byte{0x5A});
      const clattn::Buffer memory = context.allocate(want.size());
      in.queue.write(memory, want);
      const clattn::KVCacheSpec spec{.block_size = Write::kBlock,
                                     .num_kv_heads = Write::kHeads,
                                     .head_size = write.dims,
                                     .dtype = write.cache_dtype};
      const auto& backend = *clattn::list_attn_backends()[0];
      const clattn::KVCache cache = clattn::reshape_kv_cache(memory, spec, backend, layout);
      clattn::detail::enqueue_cache_write(kernel, write.shape(), in.queue, in.key_ref(write),
                                          in.value_ref(write), cache, {in.slots.handle(), 8, 6},
                                          nullptr);
      std::vector<std::byte> got(want.size());
      in.queue.read(memory, got);
      write.for_each_stored(
          [&](std::int64_t slot, std::int64_t h, std::int64_t d, std::size_t from) {
            const std::int64_t block = slot / Write::kBlock;
            const std::int64_t token = slot % Write::kBlock;
            // (block, K or V, token, head, dim) in NHD, (block, K or V, head, token, dim) in HND
            const std::int64_t inner = layout == KVCacheLayout::kNHD ? token * Write::kHeads + h
                                                                     : h * Write::kBlock + token;
            const std::int64_t page = std::int64_t{Write::kBlock} * Write::kHeads;
            write.store(want, (2 * block * page + inner) * write.dims + d, write.key.values[from]);
            write.store(want, ((2 * block + 1) * page + inner) * write.dims + d,
                        write.value.values[from]);
          });
      EXPECT_TRUE(got == want) << clattn::to_string(layout);
    }
  });
}

// A6.2: the originals' words, in both calls.
TEST(ReshapeAndCache, A6_2_TypesAreRefusedInVLLMsWords) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  clattn::KVCache paged;
  clattn::PackedKVCache packed;
  const auto expect = [&](DType dtype, DType cache_dtype, const std::string& text) {
    paged.dtype = packed.dtype = cache_dtype;
    EXPECT_EQ(error_text([&] {
                clattn::reshape_and_cache_flash(context, queue, {}, {}, dtype, paged, nullptr, 0,
                                                1);
              }),
              text);
    EXPECT_EQ(error_text([&] {
                clattn::reshape_and_cache(context, queue, {}, {}, dtype, packed, nullptr, 0, 1);
              }),
              text);
  };
  expect(DType::kFp8E4M3, DType::kFp8E4M3,
         "Unsupported input type of kv cache: fp8_e4m3; legal: f32, f16, bf16");
  expect(static_cast<DType>(9), DType::kF16,
         "Unsupported input type of kv cache: 9; legal: f32, f16, bf16");
  expect(DType::kF16, static_cast<DType>(77),
         "Unsupported data type of kv cache: 77; legal: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, "
         "uint4x2");
}

TEST(ReshapeAndCache, ThePublicCallsRefuseNonsense) {
  const auto& context = *all_contexts().at(0);
  const Write write(8, DType::kF16, DType::kF16);
  const WriteBuffers in(context, write);
  const clattn::Buffer keys = context.allocate(write.cache_bytes());
  const clattn::Buffer values = context.allocate(write.cache_bytes());
  clattn::PackedKVCache cache{keys.handle(), values.handle(), DType::kF16, Write::kBlocks,
                              Write::kBlock, Write::kHeads,   8,           {},
                              false};
  const auto call = [&](std::size_t slot_offset_bytes, std::int64_t num_tokens) {
    return error_text([&] {
      clattn::reshape_and_cache(context, in.queue, in.key_ref(write), in.value_ref(write),
                                DType::kF16, cache, in.slots.handle(), slot_offset_bytes,
                                num_tokens);
    });
  };
  EXPECT_EQ(call(8, 6), "no error");
  EXPECT_EQ(call(4, 6), "slot_mapping: offset of 4 bytes, legal: multiples of 8");
  EXPECT_EQ(call(0, -1), "num_tokens is -1, legal: 0 … 2147483647");
  EXPECT_EQ(call(16, 6), "slot_mapping: its 6 slots end at element 8, legal: the buffer's 7");
  EXPECT_EQ(call(std::size_t{1} << 63U, 6),
            "slot_mapping: its 6 slots end at element 1152921504606846982, legal: the buffer's 7");
  cache.value_offset = -8;
  EXPECT_EQ(call(0, 1), "kv_cache: value_offset is -8, legal: >= 0");
  cache.value_offset = 0;
  cache.num_blocks = INT64_MAX;
  EXPECT_NE(call(0, 1).find("overflows"), std::string::npos);
  cache.num_blocks = Write::kBlocks + 1;
  EXPECT_EQ(call(0, 1), "kv_cache: key holds 480 elements, legal: at least 600 (num_blocks 5)");
  cache.num_blocks = -1;
  EXPECT_EQ(call(0, 1), "kv_cache: num_blocks is -1, legal: >= 0");
  cache.num_blocks = Write::kBlocks;
  cache.head_size = 12;
  EXPECT_EQ(call(0, 1), "cache: head_size is 12, legal: 8 … 256 in steps of 8");
  cache.head_size = 8;
  cache.dtype = DType::kInt8;  // x = 16
  EXPECT_EQ(call(0, 1),
            "cache: head_size is 8, legal in an x-packed cache of int8: multiples of 16");
  cache.dtype = DType::kF16;
  cache.scales = context.allocate(8);
  EXPECT_EQ(call(0, 1), "kv_cache: scales given, legal: none for f16");
  cache.dtype = DType::kFp8E4M3;
  cache.head_size = 16;
  cache.scales_per_head = true;
  EXPECT_EQ(call(0, 1), "kv_cache: scales hold 8 bytes, legal: at least 24 (f32 [2][3])");
  in.queue.finish();
}

TEST(ReshapeAndCache, PlacesOutsideTheBufferAreRefused) {
  const auto& context = *all_contexts().at(0);
  const Write write(8, DType::kF16, DType::kF16);
  const WriteBuffers in(context, write);
  const clattn::Buffer memory = context.allocate(2 * write.cache_bytes());
  const clattn::KVCacheSpec spec{
      .block_size = Write::kBlock, .num_kv_heads = Write::kHeads, .head_size = 8};
  const clattn::KVCache good =
      clattn::reshape_kv_cache(memory, spec, *clattn::list_attn_backends()[0], KVCacheLayout::kNHD);
  const auto call = [&](auto change) {
    clattn::KVCache cache = good;
    change(cache);
    return error_text([&] {
      clattn::reshape_and_cache_flash(context, in.queue, in.key_ref(write), in.value_ref(write),
                                      DType::kF16, cache, in.slots.handle(), 8, 6);
    });
  };
  using Cache = clattn::KVCache;
  EXPECT_EQ(call([](Cache&) {}), "no error");
  EXPECT_EQ(call([](Cache& c) { c.num_blocks = 0; }), "no error");  // and nothing is stored
  EXPECT_EQ(call([](Cache& c) { ++c.num_blocks; }),
            "kv_cache: its last element is number 1199, legal: below the buffer's 960 elements");
  EXPECT_EQ(call([](Cache& c) { c.v_offset += 8; }),
            "kv_cache: its last element is number 967, legal: below the buffer's 960 elements");
  EXPECT_NE(call([](Cache& c) { c.block_stride = INT64_MAX; }).find("overflows"),
            std::string::npos);
  EXPECT_EQ(call([](Cache& c) { c.head_stride = -8; }),
            "kv_cache: an offset or stride is -8, legal: >= 0");
  EXPECT_EQ(call([](Cache& c) { c.buffer = {}; }), "kv_cache: no buffer");
  in.queue.finish();
}

}  // namespace test_kv_cache
