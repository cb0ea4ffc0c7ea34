#include <fmt/format.h>
#include <clattn/mla.hpp>

#include <array>
#include <cmath>

#include "device/cache_ops_support.hpp"

namespace test_cache_ops_mla {

using cache_ops_test::all_contexts;
using cache_ops_test::decode;
using cache_ops_test::download;
using cache_ops_test::element;
using cache_ops_test::encode;
using cache_ops_test::error_text;
using cache_ops_test::upload;
using clattn::DType;

constexpr std::int32_t kRank = 32, kRope = 16, kBlock = 5;
constexpr std::size_t kWidth = kRank + kRope;
constexpr std::int64_t kBlocks = 6;
constexpr std::size_t kEntries = kBlocks * kBlock;

constexpr std::array kCacheTypes = {DType::kF32,     DType::kF16,     DType::kBF16,
                                    DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};

std::vector<double> random_values(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, 3.0);
  std::vector<double> values(count);
  for (double& value : values) value = oracle::round_to(element(dtype), normal(random));
  return values;
}

clattn::MLACache cache_over(const clattn::Buffer& buffer, DType dtype) {
  clattn::MLACache cache;
  cache.buffer = buffer;
  cache.dtype = dtype;
  cache.num_blocks = kBlocks;
  cache.block_size = kBlock;
  cache.kv_lora_rank = kRank;
  cache.rope_dim = kRope;
  return cache;
}

/// The code of x as the cache holds it: the f32 quotient, rounded by the oracle.
std::uint32_t code(DType dtype, double x, float scale) {
  const double stored =
      clattn::is_quantized(dtype) ? static_cast<double>(static_cast<float>(x) / scale) : x;
  return oracle::encode(element(dtype), stored);
}

void expect_concat(const clattn::Context& context, DType dtype, DType cache_dtype, float scale) {
  SCOPED_TRACE(fmt::format("{} to {}, scale {}", clattn::to_string(dtype),
                           clattn::to_string(cache_dtype), scale));
  const clattn::Queue queue = context.create_queue();
  const std::vector<std::int64_t> slots = {77, 7, -1, 29, 0, 30};  // from the second on
  constexpr std::size_t kTokens = 5, kStride = kRank + 8, kOffset = 3;
  const std::vector<double> kv_c = random_values(dtype, kOffset + kTokens * kStride, 1);
  const std::vector<double> k_pe = random_values(dtype, kTokens * kRope, 2);
  const std::size_t width = clattn::element_size_bytes(cache_dtype);
  std::vector<std::byte> want(kEntries * kWidth * width, std::byte{0x5A});
  clattn::MLACache cache = cache_over(upload(context, queue, want), cache_dtype);
  if (scale != 1 || cache_dtype == DType::kInt8)
    cache.scale = upload(context, queue, std::vector<float>{scale});
  const clattn::Buffer latent = upload(context, queue, encode(dtype, kv_c));
  const clattn::Buffer rope = upload(context, queue, encode(dtype, k_pe));
  const clattn::Buffer mapping = upload(context, queue, slots);
  clattn::concat_and_cache_mla(context, queue, {latent.handle(), kOffset, kStride},
                               {.buffer = rope.handle()}, dtype, cache, mapping.handle(), 8,
                               kTokens);
  for (std::size_t t = 0; t < kTokens; ++t) {
    const std::int64_t slot = slots[t + 1];
    if (slot < 0 || slot >= static_cast<std::int64_t>(kEntries)) continue;
    for (std::size_t d = 0; d < kWidth; ++d) {
      const double x = d < kRank ? kv_c[kOffset + t * kStride + d] : k_pe[t * kRope + d - kRank];
      const std::uint32_t bits = code(cache_dtype, x, scale);
      std::memcpy(&want[(static_cast<std::size_t>(slot) * kWidth + d) * width], &bits, width);
    }
  }
  EXPECT_TRUE(download<std::byte>(queue, cache.buffer) == want);
}

// A6.6: latent, then rope; slot -1 and slots past the cache store nothing.
TEST(MLACache, ConcatStoresLatentAndRopeOfEveryType) {
  for (const auto& context : all_contexts()) {
    for (const DType cache_dtype : kCacheTypes) {
      const bool quantized = clattn::is_quantized(cache_dtype);
      expect_concat(*context, DType::kF16, cache_dtype, 1);
      if (quantized) expect_concat(*context, DType::kF16, cache_dtype, 0.07F);
    }
    expect_concat(*context, DType::kBF16, DType::kBF16, 1);
    expect_concat(*context, DType::kF32, DType::kFp8E4M3, 3);
  }
}

void expect_gather(const clattn::Context& context, DType cache_dtype, DType dtype, float scale) {
  SCOPED_TRACE(fmt::format("{} to {}", clattn::to_string(cache_dtype), clattn::to_string(dtype)));
  const clattn::Queue queue = context.create_queue();
  const std::vector<std::byte> stored =
      encode(cache_dtype, random_values(cache_dtype, kEntries * kWidth, 3));
  const std::vector<double> entries = decode(cache_dtype, stored);
  clattn::MLACache cache = cache_over(upload(context, queue, stored), cache_dtype);
  if (scale != 1 || cache_dtype == DType::kInt8)
    cache.scale = upload(context, queue, std::vector<float>{scale});
  // Request 1 has nothing to gather; request 2 passes over its first two pages.
  const std::vector<std::int32_t> lengths = {0, 7, 7, 13};
  const std::vector<std::int32_t> starts = {0, 5, 10};
  const std::vector<std::int32_t> table = {4, 0, -9, -9, -9, -9, -9, -9, -9, -9, 2, 5};
  constexpr std::size_t kStride = kWidth + 4;
  const std::size_t width = clattn::element_size_bytes(dtype);
  std::vector<std::byte> want(13 * kStride * width, std::byte{0x5A});
  const clattn::Buffer out = upload(context, queue, want);
  clattn::gather_and_maybe_dequant_cache(context, queue, cache, {out.handle(), 0, kStride}, dtype,
                                         {.cu_seq_lens = lengths,
                                          .block_table = table,
                                          .block_table_stride = 4,
                                          .seq_starts = starts});
  for (std::int32_t t = 0; t < 13; ++t) {
    const std::int32_t request = t < 7 ? 0 : 2;
    const std::int32_t place =
        t - lengths[static_cast<std::size_t>(request)] + starts[static_cast<std::size_t>(request)];
    const std::int32_t page = table[static_cast<std::size_t>(request * 4 + place / kBlock)];
    for (std::size_t d = 0; d < kWidth; ++d) {
      const double x =
          entries[static_cast<std::size_t>(page * kBlock + place % kBlock) * kWidth + d];
      const std::uint32_t bits =
          oracle::encode(element(dtype), static_cast<double>(static_cast<float>(x) * scale));
      std::memcpy(&want[(static_cast<std::size_t>(t) * kStride + d) * width], &bits, width);
    }
  }
  EXPECT_TRUE(download<std::byte>(queue, out) == want);
}

TEST(MLACache, GatherReadsEveryTypeByTheTable) {
  for (const auto& context : all_contexts()) {
    for (const DType cache_dtype : kCacheTypes) {
      expect_gather(*context, cache_dtype, DType::kF16,
                    clattn::is_quantized(cache_dtype) ? 0.37F : 1.0F);
    }
    expect_gather(*context, DType::kFp8E5M2, DType::kF32, 1);
    expect_gather(*context, DType::kF32, DType::kBF16, 1);
  }
}

/// Every code of the 8-bit types comes back as the oracle decodes it.
TEST(MLACache, GatherDecodesEveryCode) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    std::vector<std::uint8_t> codes(256);
    for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
    const clattn::Buffer buffer = upload(*context, queue, codes);
    for (const DType dtype : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8}) {
      clattn::MLACache cache;
      cache.buffer = buffer;
      cache.dtype = dtype;
      cache.num_blocks = 1;
      cache.block_size = 16;
      cache.kv_lora_rank = cache.rope_dim = 8;
      if (dtype == DType::kInt8) cache.scale = upload(*context, queue, std::vector<float>{1.0F});
      const clattn::Buffer out = context->allocate(256 * 4);
      const std::vector<std::int32_t> lengths = {0, 16};
      const std::vector<std::int32_t> table = {0};
      clattn::gather_and_maybe_dequant_cache(*context, queue, cache, {.buffer = out.handle()},
                                             DType::kF32,
                                             {.cu_seq_lens = lengths,
                                              .block_table = table,
                                              .block_table_stride = 1,
                                              .seq_starts = {}});
      const std::vector<float> got = download<float>(queue, out);
      for (std::uint32_t i = 0; i < 256; ++i) {
        const double want = oracle::decode(element(dtype), i);
        EXPECT_TRUE(static_cast<double>(got[i]) == want || (std::isnan(got[i]) && std::isnan(want)))
            << clattn::to_string(dtype) << " " << i << ": " << got[i] << ", expected " << want;
      }
    }
  }
}

TEST(MLACache, NonsenseIsRefused) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const clattn::Buffer memory = context.allocate(kEntries * kWidth * 2);
  clattn::MLACache cache = cache_over(memory, DType::kF16);
  const std::vector<std::int32_t> table = {0, 6};
  std::vector<std::int32_t> lengths = {0, 5};
  std::vector<std::int32_t> starts = {3};
  const auto refuse = [&] {
    return error_text([&] {
      clattn::gather_and_maybe_dequant_cache(context, queue, cache, {.buffer = memory.handle()},
                                             DType::kF16,
                                             {.cu_seq_lens = lengths,
                                              .block_table = table,
                                              .block_table_stride = 2,
                                              .seq_starts = starts});
    });
  };
  EXPECT_EQ(refuse(), "seq_starts: request 0 starts at 3, legal: multiples of the block size 5");
  starts = {5};
  EXPECT_EQ(refuse(), "block_table: request 0, page 1: block 6, legal: 0 … 5");
  starts = {10};
  EXPECT_EQ(refuse(), "block_table: request 0 needs 3 pages, legal: up to 2");
  starts.clear();
  lengths = {0, -1};
  EXPECT_EQ(refuse(), "cu_seq_lens: entry 1 is -1, legal: at least entry 0's 0");
  lengths = {1, 2};
  EXPECT_NE(refuse().find("legal: prefix sums that begin with 0"), std::string::npos);
  lengths = {0, 5, 5};
  EXPECT_EQ(refuse(), "block_table: 2 entries, legal: 2 requests x 2 pages");
  cache.rope_dim = 12;
  EXPECT_EQ(refuse(), "kv_cache: rope_dim is 12, legal: multiples of 8");
  cache.rope_dim = kRope;
  cache.num_blocks = 7;
  EXPECT_EQ(refuse(),
            "kv_cache: its buffer holds 1440 elements, legal: at least 1680 (num_blocks 7)");
  cache.num_blocks = kBlocks;
  cache.scale = memory;
  EXPECT_EQ(refuse(), "kv_cache: scale given, legal: none for f16");
  cache.scale = {};
  lengths = {0, 5};
  const clattn::Buffer few = context.allocate(4 * kWidth * 2);
  EXPECT_EQ(error_text([&] {
              clattn::gather_and_maybe_dequant_cache(context, queue, cache,
                                                     {.buffer = few.handle()}, DType::kF16,
                                                     {.cu_seq_lens = lengths,
                                                      .block_table = table,
                                                      .block_table_stride = 2,
                                                      .seq_starts = {}});
            }),
            fmt::format("destination: its 5 rows end at element {}, legal: the buffer's {}",
                        5 * kWidth, 4 * kWidth));
  const clattn::Buffer slots = context.allocate(4 * sizeof(std::int64_t));
  EXPECT_EQ(error_text([&] {
              clattn::concat_and_cache_mla(context, queue, {.buffer = memory.handle()},
                                           {.buffer = memory.handle()}, DType::kF16, cache,
                                           slots.handle(), 8, 4);
            }),
            "slot_mapping: its 4 slots end at element 5, legal: the buffer's 4");
}

}  // namespace test_cache_ops_mla
