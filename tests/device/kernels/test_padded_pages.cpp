#include <fmt/format.h>

#include <clattn/device.hpp>
#include <utility>

#include "device/cache_blocks.hpp"

// A7: pages that take more bytes than their K and V (page_size_padded), and other strides.
namespace test_padded_pages {

using attention_test::all_contexts;
using block_test::backend_named;
using cache_ops_test::download;
using cache_ops_test::error_text;
using clattn::DType;
using clattn::KVCache;
using clattn::KVCacheLayout;
using clattn::KVCacheSpec;

struct PaddedCase {
  const char* backend;
  KVCacheLayout layout;
  DType cache_dtype;
  clattn::KernelFamily family;
};

/// Decodes, a chunk and a prompt; the library stores the step's tokens. The fixture compares the
/// whole buffer, poisoned padding included.
attention_test::CaseSpec attention_over(const PaddedCase& c) {
  attention_test::CaseSpec spec;
  spec.backend = c.backend;
  spec.layout = c.layout;
  spec.config.num_heads = 4;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = 64;
  spec.config.block_size = 16;
  spec.config.kv_cache_dtype = c.cache_dtype;
  spec.config.kernel_family = c.family;
  spec.requests = {{1, 99, 1}, {1, 0, 2}, {7, 30, 3}, {40, 0, 4}};
  spec.write_cache = true;
  spec.num_splits = 2;
  spec.page_padding = 16 * clattn::element_size_bytes(c.cache_dtype);
  return spec;
}

TEST(PaddedPages, A7_AttentionReadsAndWritesThem) {
  using clattn::KernelFamily;
  const std::vector<PaddedCase> cases = {
      {"FLASHINFER", KVCacheLayout::kNHD, DType::kF16, KernelFamily::kAuto},
      {"FLASHINFER", KVCacheLayout::kHND, DType::kFp8E4M3, KernelFamily::kAuto},
      {"FLASHINFER", KVCacheLayout::kHND, DType::kF16, KernelFamily::kGpu},
      {"XFORMERS", KVCacheLayout::kNHD, DType::kF16, KernelFamily::kAuto},
  };
  for (const auto& context : all_contexts()) {
    for (const PaddedCase& c : cases) {
      const attention_test::CaseSpec spec = attention_over(c);
      const attention_test::CaseResult result = run_case(context, spec);
      EXPECT_EQ(result.fault, "") << describe(spec);
      EXPECT_LE(result.worst_share, 1) << describe(spec) << result.worst_place;
    }
  }
}

TEST(HeadsApart, AttentionReadsAndWritesThem) {
  for (const auto& context : all_contexts()) {
    for (const auto& [block_size, head_size] : {std::pair{16, 128}, {48, 64}}) {
      attention_test::CaseSpec spec = attention_over(
          {"FLASHINFER", KVCacheLayout::kHND, DType::kF16, clattn::KernelFamily::kAuto});
      spec.page_padding = 0;
      spec.heads_apart = true;
      spec.config.num_kv_heads = 4;
      spec.config.num_heads = 16;
      spec.config.block_size = block_size;
      spec.config.head_size = head_size;
      spec.requests = {{1, 99, 1}, {70, 30, 2}};
      const attention_test::CaseResult result = run_case(context, spec);
      EXPECT_EQ(result.fault, "") << describe(spec);
      EXPECT_LE(result.worst_share, 1) << describe(spec) << result.worst_place;
    }
  }
}

/// A tensor of 6 pages that two groups share, whose layers keep other heads.
struct Shared {
  KVCacheSpec small{.block_size = 16, .num_kv_heads = 2, .head_size = 32};
  KVCacheSpec large{.block_size = 16, .num_kv_heads = 3, .head_size = 64};
  clattn::KVCacheConfig config;
  Shared() {
    small.page_size_padded = large.page_size_padded = large.page_size_bytes() + 64;
    config.num_blocks = 6;
    config.tensors = {{6 * large.page_size_padded, {"small", "large"}}};
    config.groups = {{{"small"}, small}, {{"large"}, large}};
  }
};

/// Stores 16 tokens of random rows in block `block`.
void fill_block(const clattn::Context& context, const clattn::Queue& queue, const KVCache& cache,
                std::int64_t block) {
  const auto count = static_cast<std::size_t>(16 * cache.num_kv_heads * cache.head_size);
  const clattn::Buffer rows =
      cache_ops_test::upload(context, queue, std::vector<std::uint16_t>(count, 0x3C00));
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < 16; ++i) slots.push_back(block * 16 + i);
  const clattn::Buffer mapping = cache_ops_test::upload(context, queue, slots);
  clattn::reshape_and_cache_flash(context, queue, {.buffer = rows.handle()},
                                  {.buffer = rows.handle()}, DType::kF16, cache, mapping.handle(),
                                  0, 16);
  queue.finish();
}

// Blocks of a shared tensor belong to one layer each: what one writes lies inside its pages.
TEST(PaddedPages, A7_LayersOfOtherShapesShareATensorPageByPage) {
  for (const auto& context : all_contexts()) {
    const clattn::Queue queue = context->create_queue();
    for (const auto& order : block_test::kOrders) {
      const Shared shared;
      const auto raw = clattn::allocate_kv_cache(*context, queue, shared.config);
      const auto& backend = backend_named(order.backend);
      const KVCache small =
          clattn::reshape_kv_cache(raw.at("small"), shared.small, backend, order.layout);
      const KVCache large =
          clattn::reshape_kv_cache(raw.at("large"), shared.large, backend, order.layout);
      EXPECT_EQ(small.num_blocks, 6);
      fill_block(*context, queue, small, 4);
      fill_block(*context, queue, large, 1);
      const auto bytes = download<std::uint8_t>(queue, raw.at("small"));
      const std::size_t page = shared.small.page_size_padded;
      const std::size_t own[] = {2 * 16 * 2 * 32 * 2, 2 * 16 * 3 * 64 * 2};
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        const bool written =
            (i / page == 4 && i % page < own[0]) || (i / page == 1 && i % page < own[1]);
        ASSERT_EQ(bytes[i], written && i % 2 == 1 ? 0x3C : 0) << order.backend << " byte " << i;
      }
    }
  }
}

TEST(PaddedPages, PaddingThatVectorsCannotStepOverIsRefused) {
  const auto& context = *all_contexts().at(0);
  KVCacheSpec spec{.block_size = 16, .num_kv_heads = 1, .head_size = 8};
  spec.page_size_padded = spec.page_size_bytes() + 8;
  EXPECT_EQ(error_text([&] {
              (void)clattn::reshape_kv_cache(context.allocate(spec.page_size_padded), spec,
                                             backend_named("FLASHINFER"), KVCacheLayout::kNHD);
            }),
            "KVCacheSpec: page_size_padded is 520, legal: multiples of 16 (8 elements of f16)");
}

}  // namespace test_padded_pages
