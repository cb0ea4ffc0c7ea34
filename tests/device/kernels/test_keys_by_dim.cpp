// Caches whose keys lie by dim (layout HDN): what CPU kernels write and read there, judged like
// the other layouts, and who refuses them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device/layout_cases.hpp"

namespace {

using attention_test::CaseSpec;
using block_test::backend_named;
using cache_ops_test::all_contexts;
using cache_ops_test::element;
using clattn::DType;
using clattn::ErrorCode;
using clattn::KernelFamily;
using clattn::KVCache;
using clattn::KVCacheLayout;
using test::error_text;

constexpr std::array kCacheTypes = {DType::kF32,     DType::kF16,     DType::kBF16,
                                    DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8};

bool is_cpu(const clattn::Context& context) {
  return context.capabilities().kind == clattn::DeviceKind::kCpu;
}

CaseSpec mixed_batch(std::int32_t head_size = 64) {
  return layout_test::mixed_batch(KVCacheLayout::kHDN, head_size);
}

/// Judges the case on every CPU, and asks every other device for its refusal.
void expect_right(const CaseSpec& spec) {
  for (const auto& context : all_contexts()) {
    if (is_cpu(*context)) {
      layout_test::expect_right(context, spec);
    } else {
      EXPECT_THROW(attention_test::run_case(context, spec), clattn::Error);
    }
  }
}

TEST(KeysByDim, EveryPairOfTypes) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType cache_dtype : kCacheTypes) {
      const bool pairs = dtype == DType::kBF16 && clattn::element_size_bytes(cache_dtype) == 1;
      if (dtype != DType::kF16 && cache_dtype != dtype && !pairs) continue;  // compiling takes time
      CaseSpec spec = mixed_batch();
      spec.config.dtype = dtype;
      spec.config.kv_cache_dtype = cache_dtype;
      spec.scales_per_head = dtype != DType::kF32;
      spec.write_cache = true;
      expect_right(spec);
    }
  }
}

// Vectors of 16 lanes, and of 8 where the head size asks for them.
TEST(KeysByDim, HeadSizes) {
  for (const std::int32_t head_size : {8, 72, 256}) expect_right(mixed_batch(head_size));
  for (const DType cache_dtype : {DType::kBF16, DType::kInt8}) {
    CaseSpec spec = mixed_batch(128);
    spec.config.dtype = DType::kBF16;
    spec.config.kv_cache_dtype = cache_dtype;
    expect_right(spec);
  }
}

// Queries of bf16 take dims by pairs where the processor has products of them.
TEST(KeysByDim, PagesPaddingAndPlaces) {
  for (const auto& [dtype, cache_dtype] :
       {std::pair(DType::kF16, DType::kF16), std::pair(DType::kBF16, DType::kBF16),
        std::pair(DType::kBF16, DType::kInt8)}) {
    for (const std::int32_t block_size : {16, 32, 48, 256}) {
      CaseSpec spec = mixed_batch();
      spec.config.dtype = dtype;
      spec.config.kv_cache_dtype = cache_dtype;
      spec.config.block_size = block_size;
      spec.page_padding = block_size == 32 ? 160 : 0;
      spec.page_seed = 5;
      expect_right(spec);
    }
  }
}

TEST(KeysByDim, GroupsAndKVHeads) {
  for (const auto& [num_kv_heads, group] : layout_test::kHeads) {
    CaseSpec spec = mixed_batch(32);
    spec.config.num_kv_heads = num_kv_heads;
    spec.config.num_heads = num_kv_heads * group;
    spec.requests = {{1, 330}, {1, 7}, {3, 100}, {20, 3}};
    expect_right(spec);
  }
}

TEST(KeysByDim, OptionsAndSplits) {
  for (const layout_test::Option& option : layout_test::kOptions) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const std::int32_t splits : {1, 3}) {
        CaseSpec spec = mixed_batch();
        spec.config.dtype = dtype;  // the cache's, too
        layout_test::apply(option, splits, spec);
        expect_right(spec);
      }
    }
  }
}

std::vector<double> random_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<double> values(count);
  for (double& value : values) value = static_cast<double>(normal(random));
  return values;
}

/// Where a plain loop puts a token's element.
std::int64_t place_of(const clattn::KVCacheSpec& spec, bool value, std::int64_t slot,
                      std::int64_t head, std::int64_t dim) {
  const std::int64_t block = slot / spec.block_size, token = slot % spec.block_size;
  const std::int64_t plane = std::int64_t{spec.block_size} * spec.num_kv_heads * spec.head_size;
  const std::int64_t of_head = std::int64_t{spec.block_size} * spec.head_size;
  return block * 2 * plane + (value ? plane : 0) + head * of_head +
         (value ? token * spec.head_size + dim : dim * spec.block_size + token);
}

TEST(KeysByDim, AWriteStoresEveryTokenInItsPlace) {
  const std::vector<std::int64_t> slots = {7, -1, 33, 0, 96, 18, 95};  // 96 slots in all
  for (const auto& context : all_contexts()) {
    if (!is_cpu(*context)) continue;
    for (const DType dtype : kCacheTypes) {
      clattn::KVCacheSpec spec{
          .block_size = 16, .num_kv_heads = 3, .head_size = 24, .dtype = dtype};
      if (dtype == DType::kF16) spec.block_size = 32;
      const clattn::Queue queue = context->create_queue();
      const std::size_t row = std::size_t{3} * 24;
      const auto key = random_values(slots.size() * row, 1);
      const auto value = random_values(slots.size() * row, 2);
      const auto up = [&](const std::vector<double>& from) {
        return cache_ops_test::upload(*context, queue, cache_ops_test::encode(DType::kF32, from));
      };
      const clattn::Buffer k = up(key), v = up(value);
      const clattn::Buffer mapping = cache_ops_test::upload(*context, queue, slots);
      std::vector<std::uint8_t> want(
          96 / static_cast<std::size_t>(spec.block_size) * spec.page_size_bytes(), 0x5A);
      const clattn::Buffer memory = cache_ops_test::upload(*context, queue, want);
      KVCache cache =
          clattn::reshape_kv_cache(memory, spec, backend_named("FLASHINFER"), KVCacheLayout::kHDN);
      if (dtype == DType::kInt8)
        cache.scales = cache_ops_test::upload(*context, queue, std::vector<float>{1, 1});
      clattn::reshape_and_cache_flash(*context, queue, {.buffer = k.handle()},
                                      {.buffer = v.handle()}, DType::kF32, cache, mapping.handle(),
                                      0, static_cast<std::int64_t>(slots.size()));
      const std::size_t width = clattn::element_size_bytes(dtype);
      for (std::size_t t = 0; t < slots.size(); ++t) {
        if (slots[t] < 0 || slots[t] >= 96) continue;
        for (std::size_t i = 0; i < row; ++i) {
          for (const bool values : {false, true}) {
            const std::uint32_t bits =
                oracle::encode(element(dtype), (values ? value : key)[t * row + i]);
            const std::int64_t at =
                place_of(spec, values, slots[t], static_cast<std::int64_t>(i / 24),
                         static_cast<std::int64_t>(i % 24));
            std::memcpy(&want[static_cast<std::size_t>(at) * width], &bits, width);
          }
        }
      }
      EXPECT_TRUE(cache_ops_test::download<std::uint8_t>(queue, memory) == want)
          << clattn::to_string(dtype);
    }
  }
}

TEST(KeysByDim, WhoDoesNotReadThemSaysSo) {
  const auto& flashinfer = backend_named("FLASHINFER");
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    clattn::AttentionConfig config = mixed_batch().config;
    const auto make = [&] {
      (void)clattn::make_kv_cache(*context, queue, flashinfer, config, 2, KVCacheLayout::kHDN);
    };
    if (!is_cpu(*context)) {
      EXPECT_EQ(error_text(make, ErrorCode::kUnsupported),
                "KV cache: layout HDN needs the kernels of CPUs: those of GPUs read keys by token");
      continue;
    }
    config.block_size = 24;
    EXPECT_EQ(error_text(make, ErrorCode::kUnsupported),
              "KV cache: layout HDN with block_size 24 not supported: multiples of 16 are");
    config.block_size = 16;
    config.kernel_family = KernelFamily::kGpu;
    EXPECT_EQ(error_text(make, ErrorCode::kUnsupported),
              "KV cache: layout HDN needs the kernels of CPUs: those of GPUs read keys by token");
    // A cache that is there already, handed to kernels that cannot read it.
    CaseSpec spec = mixed_batch();
    spec.config.kernel_family = KernelFamily::kGpu;
    for (const bool writes : {false, true}) {
      spec.write_cache = writes;
      EXPECT_EQ(
          error_text([&] { attention_test::run_case(context, spec); }, ErrorCode::kUnsupported),
          "kv_cache: key_dim_stride is 16, supported by kernels of family gpu: 1 (those of CPUs "
          "alone take keys by dim, layout HDN)");
    }
  }
}

TEST(KeysByDim, LayersThatCannotReadThemDoNotBindThem) {
  for (const auto& context : all_contexts()) {
    EXPECT_EQ(layout_test::bind_refusal(context, KVCacheLayout::kHDN),
              "layer layers.0: kv_cache: layout HDN needs the kernels of CPUs: those of GPUs read "
              "keys by token");
  }
}

TEST(KeysByDim, CachesThatSayNonsenseAreRefused) {
  const auto& context = *all_contexts().at(0);
  const clattn::Queue queue = context.create_queue();
  const clattn::KVCacheSpec spec{.block_size = 16, .num_kv_heads = 2, .head_size = 8};
  const clattn::Buffer memory = context.allocate(3 * spec.page_size_bytes());
  const KVCache good =
      clattn::reshape_kv_cache(memory, spec, backend_named("FLASHINFER"), KVCacheLayout::kHDN);
  const auto write = [&](const std::function<void(KVCache&)>& change) {
    KVCache cache = good;
    change(cache);
    return error_text([&] {
      clattn::reshape_and_cache_flash(context, queue, {}, {}, DType::kF16, cache, nullptr, 0, 1);
    });
  };
  EXPECT_EQ(write([](KVCache& c) { c.key_dim_stride = 8; }),
            "kv_cache: key_dim_stride is 8, legal: 1 or >= 16 (block_size)");
  EXPECT_EQ(write([](KVCache& c) { c.key_dim_stride = -16; }),
            "kv_cache: an offset or stride is -16, legal: >= 0");
  EXPECT_EQ(write([](KVCache& c) { c.block_size = 8; }),
            "kv_cache: block_size is 8, legal where keys lie by dim: multiples of 16");
  EXPECT_EQ(write([](KVCache& c) { c.key_dim_stride = 96; }),
            "kv_cache: head_stride is 128, legal where keys lie by dim: >= 768");
  // Key (2, 15, 1, 7) at 2 * 512 + 768 + 7 * 96 + 15.
  EXPECT_EQ(write([](KVCache& c) {
              c.key_dim_stride = 96;
              c.head_stride = 768;
            }),
            "kv_cache: its last element is number 2479, legal: below the buffer's 1536 elements");
  KVCache gaps = good;
  gaps.key_dim_stride = 24;
  gaps.num_blocks = 2;
  const clattn::BlockPair pair{0, 1};
  EXPECT_EQ(error_text([&] {
              clattn::copy_blocks(context, queue, std::span(&gaps, 1), std::span(&pair, 1));
            }),
            "cache: keys by dim with key_dim_stride 24, token_stride 8 and head_stride 128, legal "
            "where blocks are copied: pages without gaps (16, 8 and 128)");
}

}  // namespace
