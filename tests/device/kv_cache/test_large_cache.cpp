#include <fmt/format.h>
#include <clattn/cache_ops.hpp>
#include <clattn/device.hpp>

#include <cmath>

#include "device/cache_blocks.hpp"
#include "device/step_case.hpp"

// A9.15: element offsets past 2^31. The buffer is 2.2 GiB, of which a few pages are ever touched.
namespace test_large_cache {

using attention_test::all_contexts;
using cache_ops_test::error_text;
using clattn::DType;
using clattn::KVCache;

constexpr std::int32_t kBlock = 16, kKVHeads = 8, kHeads = 16, kDims = 128;
constexpr std::int64_t kBlocks = 72000;  // of 32 KiB in 8 bits
constexpr std::int32_t kTokens = 43;
constexpr std::int32_t kPages[] = {kBlocks - 1, 3, kBlocks - 3};  // of the one request
constexpr std::size_t kRow = std::size_t{kKVHeads} * kDims;

clattn::KVCacheSpec spec() {
  return {
      .block_size = kBlock, .num_kv_heads = kKVHeads, .head_size = kDims, .dtype = DType::kFp8E4M3};
}

std::int64_t slot_of(std::int32_t position) {
  return std::int64_t{kPages[position / kBlock]} * kBlock + position % kBlock;
}

/// Random rows as the device gets them and as they stand in the cache.
struct Rows {
  std::vector<double> given, stored;
  clattn::Buffer buffer;
  Rows(const clattn::Context& context, const clattn::Queue& queue, std::size_t count,
       std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < count; ++i) {
      given.push_back(oracle::round_to(oracle::Element::kF16, normal(random)));
      stored.push_back(oracle::round_to(oracle::Element::kFp8E4M3, given.back()));
    }
    buffer = cache_ops_test::upload(context, queue, cache_ops_test::encode(DType::kF16, given));
  }
};

/// The same pages as a cache of three for the oracle.
oracle::AttentionCase truth_of(std::int32_t query_len, const Rows& query, const Rows& key,
                               const Rows& value) {
  oracle::AttentionCase truth;
  truth.num_heads = kHeads;
  truth.num_kv_heads = kKVHeads;
  truth.head_size = kDims;
  truth.block_size = kBlock;
  truth.scale = 1 / std::sqrt(static_cast<double>(kDims));
  truth.query_start_loc = {0, query_len};
  truth.seq_lens = {kTokens};
  truth.block_table = {0, 1, 2};
  truth.max_blocks = 3;
  truth.query = query.given;
  truth.key_cache = key.stored;
  truth.value_cache = value.stored;
  truth.key_cache.resize(3 * kBlock * kRow);
  truth.value_cache.resize(3 * kBlock * kRow);
  return truth;
}

void expect_attention(const std::shared_ptr<clattn::Context>& context, const clattn::Queue& queue,
                      const KVCache& cache, const Rows& key, const Rows& value,
                      std::int32_t query_len) {
  clattn::AttentionConfig config;
  config.num_heads = kHeads;
  config.num_kv_heads = kKVHeads;
  config.head_size = kDims;
  config.block_size = kBlock;
  config.kv_cache_dtype = DType::kFp8E4M3;
  const auto& backend = block_test::backend_named("FLASHINFER");
  const Rows query(*context, queue, static_cast<std::size_t>(query_len * kHeads * kDims), 3);
  const oracle::AttentionCase truth = truth_of(query_len, query, key, value);
  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = truth.query_start_loc;
  batch.seq_lens = truth.seq_lens;
  batch.num_reqs = 1;
  batch.num_actual_tokens = query_len;
  batch.block_table = kPages;
  batch.block_table_stride = 3;
  clattn::BuilderOptions options;
  options.limits.num_blocks = kBlocks;
  const auto builder = backend.make_builder(context, config, options);
  const clattn::Buffer out =
      context->allocate(query.given.size() * clattn::element_size_bytes(DType::kF16));
  const auto impl = backend.make_impl(context, config);
  impl->forward(queue,
                {.query = {.buffer = query.buffer.handle()}, .output = {.buffer = out.handle()}},
                cache, builder->build(queue, batch));
  const std::vector<double> got =
      cache_ops_test::decode(DType::kF16, cache_ops_test::download<std::byte>(queue, out));
  oracle::AttentionResult want = oracle::attention(truth, oracle::Element::kF16);
  if (step_test::rounds_probabilities(impl->kernels())) want.add_weight_rounding();
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - want.out[i]), 2 * want.bound[i] + 2e-6) << i;
  }
}

/// Bytes of a block's K or V.
std::vector<std::byte> plane_of(const clattn::Queue& queue, const KVCache& cache,
                                std::int64_t block, std::int64_t offset) {
  std::vector<std::byte> bytes(kBlock * kRow);
  queue.read(cache.buffer, bytes, static_cast<std::size_t>(offset + block * cache.block_stride));
  return bytes;
}

/// The keys (or values) at `offset` lie where the strides say, read back by the host's own sums.
void expect_stored(const clattn::Queue& queue, const KVCache& cache, const Rows& rows,
                   std::int64_t offset) {
  for (std::int32_t t = 0; t < kTokens; ++t) {
    const std::vector<std::byte> plane = plane_of(queue, cache, kPages[t / kBlock], offset);
    for (std::int32_t i = 0; i < kKVHeads * kDims; ++i) {
      const std::int64_t at =
          t % kBlock * cache.token_stride + i / kDims * cache.head_stride + i % kDims;
      const double want =
          rows.stored[static_cast<std::size_t>(t) * kRow + static_cast<std::size_t>(i)];
      ASSERT_EQ(oracle::decode(oracle::Element::kFp8E4M3,
                               std::to_integer<std::uint32_t>(plane[static_cast<std::size_t>(at)])),
                want)
          << "token " << t << " element " << i;
    }
  }
}

void expect_blocks_copied(const clattn::Context& context, const clattn::Queue& queue,
                          const KVCache& cache) {
  const std::vector<clattn::BlockPair> pairs = {{3, kBlocks - 5}, {kBlocks - 1, 7}};
  clattn::copy_blocks(context, queue, std::span(&cache, 1), pairs);
  const clattn::BlockPair swapped{kBlocks - 5, kBlocks - 9};
  clattn::swap_blocks(context, queue, cache, cache, std::span(&swapped, 1));
  for (const std::int64_t offset : {cache.k_offset, cache.v_offset}) {
    for (const clattn::BlockPair& pair : {pairs[0], pairs[1], swapped}) {
      EXPECT_TRUE(plane_of(queue, cache, pair.destination, offset) ==
                  plane_of(queue, cache, pair.source, offset))
          << pair.source;
    }
  }
}

void expect_large_cache_works(const std::shared_ptr<clattn::Context>& context,
                              clattn::KVCacheLayout layout) {
  SCOPED_TRACE(clattn::to_string(layout));
  const clattn::Queue queue = context->create_queue();
  const KVCache cache =
      clattn::reshape_kv_cache(context->allocate(kBlocks * spec().page_size_bytes()), spec(),
                               block_test::backend_named("FLASHINFER"), layout);
  ASSERT_GT((kBlocks - 3) * cache.block_stride, std::int64_t{1} << 31);
  const Rows key(*context, queue, kTokens * kRow, 1);
  const Rows value(*context, queue, kTokens * kRow, 2);
  std::vector<std::int64_t> slots;
  for (std::int32_t i = 0; i < kTokens; ++i) slots.push_back(slot_of(i));
  const clattn::Buffer mapping = cache_ops_test::upload(*context, queue, slots);
  clattn::reshape_and_cache_flash(*context, queue, {.buffer = key.buffer.handle()},
                                  {.buffer = value.buffer.handle()}, DType::kF16, cache,
                                  mapping.handle(), 0, kTokens);
  expect_stored(queue, cache, key, cache.k_offset);
  expect_stored(queue, cache, value, cache.v_offset);
  expect_attention(context, queue, cache, key, value, 1);  // decode
  expect_attention(context, queue, cache, key, value, 2);  // prefill
  expect_blocks_copied(*context, queue, cache);
}

TEST(LargeCache, A9_15_OffsetsPast32BitsAreWrittenReadAndCopied) {
  constexpr std::size_t kBytes = kBlocks * 2 * kBlock * kRow;
  for (const auto& context : all_contexts()) {
    const clattn::DeviceCapabilities& device = context->capabilities();
    if (device.max_alloc_bytes < kBytes) {
      EXPECT_EQ(
          error_text([&] { (void)context->allocate(kBytes); }, clattn::ErrorCode::kUnsupported),
          fmt::format("a buffer of {} bytes was asked for; {} allows at most {} bytes in one "
                      "buffer",
                      kBytes, device.name, device.max_alloc_bytes));
      continue;
    }
    expect_large_cache_works(context, clattn::KVCacheLayout::kNHD);
    expect_large_cache_works(context, clattn::KVCacheLayout::kHND);
  }
}

}  // namespace test_large_cache
