// What attention kernels read from 8-bit caches, code by code.
#include <gtest/gtest.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <clattn/kv_cache_spec.hpp>
#include <cmath>

#include "device/attention_case.hpp"
#include "device/step_case.hpp"

namespace test_cache_codes {

using attention_test::all_contexts;
using clattn::DType;
using clattn::KernelFamily;
using clattn::KVCacheLayout;

/// A cache of one page whose token 0 holds all 256 codes as values and zeros as keys. Rows that see
/// only that token must come out as exactly its values, in a decode and in a prefill. On matrix
/// units numbers alone are asked for: over a NaN they are not used.
void expect_codes_exact(const std::shared_ptr<clattn::Context>& context, KernelFamily family,
                        DType dtype, DType cache_dtype) {
  clattn::AttentionConfig config;
  config.num_heads = config.num_kv_heads = 1;
  config.head_size = 256;
  config.dtype = dtype;
  config.kv_cache_dtype = cache_dtype;
  config.kernel_family = family;
  const clattn::Queue queue = context->create_queue();
  const auto& backend = *clattn::get_attn_backend(config, &context->capabilities(), "FLASHINFER");
  const clattn::KVCacheSpec cache_spec{
      .block_size = 16, .num_kv_heads = 1, .head_size = 256, .dtype = cache_dtype};
  clattn::KVCache cache =
      clattn::reshape_kv_cache(context->allocate(2 * cache_spec.page_size_bytes()), cache_spec,
                               backend, KVCacheLayout::kNHD);
  const auto element = static_cast<oracle::Element>(static_cast<int>(cache_dtype));
  const auto code_of = [&](std::int64_t dim) {
    const auto code = static_cast<std::uint8_t>(dim % 256);
    const bool dropped =
        family == KernelFamily::kGpuMatrix && std::isnan(oracle::decode(element, code));
    return dropped ? std::uint8_t{0} : code;
  };
  std::vector<std::uint8_t> bytes(cache.buffer.size_bytes(), 0);
  for (const std::int64_t page : {0, 1}) {
    for (std::int64_t code = 0; code < 256; ++code) {
      bytes.at(static_cast<std::size_t>(cache.v_offset + page * cache.block_stride + code)) =
          code_of(code);
    }
  }
  queue.write(cache.buffer, std::as_bytes(std::span(bytes)));

  if (cache_dtype == DType::kInt8) {
    const std::array<float, 2> ones = {1, 1};
    cache.scales = context->allocate(sizeof(ones));
    queue.write(cache.scales, std::as_bytes(std::span(ones)));
  }

  constexpr std::int32_t kLong = 300;  // causal: its row 0 sees one key
  const std::vector<std::int32_t> starts = {0, 1, 1 + kLong}, lens = {1, kLong};
  std::vector<std::int32_t> table(std::size_t{2} * 19, 1);
  table[0] = 0;
  clattn::BuilderOptions options;
  options.limits.num_blocks = 2;
  options.num_splits = 1;
  const auto builder = backend.make_builder(context, config, options);
  const auto impl = backend.make_impl(context, config);
  clattn::CommonAttentionMetadata batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.num_reqs = 2;
  batch.num_actual_tokens = starts.back();
  batch.block_table = table;
  batch.block_table_stride = 19;
  step_test::Elements query(dtype, std::int64_t{starts.back()} * 256);
  step_test::Elements result = query;
  for (std::int64_t i = 0; i < std::int64_t{starts.back()} * 256; ++i) query.set(i, 1.0);
  const clattn::Buffer q = query.upload(*context, queue);
  const clattn::Buffer out = result.upload(*context, queue);
  std::vector<clattn::LaunchRecord> launches;
  impl->forward(queue, {.query = {q.handle()}, .output = {out.handle()}}, cache,
                builder->build(queue, batch), {.launches = &launches});
  queue.read(out, result.bytes());

  ASSERT_EQ(launches.size(), 2U) << "a decode and a prefill";
  for (std::int64_t i = 0; i < 512; ++i) {
    const double want = oracle::decode(element, code_of(i));
    const double got = result.get(i);
    EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
        << launches.front().kernel << ' ' << clattn::to_string(cache_dtype) << " row " << i / 256
        << " code " << i % 256 << ": " << got << ", expected " << want;
  }
}

/// Whether a device has kernels of a family, not counting those that only stand for its hardware's.
bool has(const clattn::Context& context, KernelFamily family) {
  const clattn::DeviceCapabilities& device = context.capabilities();
  if (family == KernelFamily::kCpu) return device.kind == clattn::DeviceKind::kCpu;
  return family != KernelFamily::kGpuMatrix || !device.matrix_units.empty();
}

struct Conversion {
  KernelFamily family;
  DType dtype, cache_dtype;
};

TEST(CacheCodes, EveryCodeOfAnEightBitCacheIsExact) {
  // On CPUs, queries of bf16 are another way to convert codes. Not e5m2 by f16 products: f16 holds
  // its smallest as subnormals, which the matrix unit of AMD's MI200 takes as 0.
  constexpr Conversion kConversions[] = {
      {KernelFamily::kCpu, DType::kF32, DType::kFp8E4M3},
      {KernelFamily::kCpu, DType::kF32, DType::kFp8E5M2},
      {KernelFamily::kCpu, DType::kF32, DType::kInt8},
      {KernelFamily::kCpu, DType::kBF16, DType::kFp8E4M3},
      {KernelFamily::kCpu, DType::kBF16, DType::kFp8E5M2},
      {KernelFamily::kCpu, DType::kBF16, DType::kInt8},
      {KernelFamily::kGpu, DType::kF32, DType::kFp8E4M3},
      {KernelFamily::kGpu, DType::kF32, DType::kFp8E5M2},
      {KernelFamily::kGpu, DType::kF32, DType::kInt8},
      {KernelFamily::kGpuMatrix, DType::kF16, DType::kFp8E4M3},
      {KernelFamily::kGpuMatrix, DType::kF16, DType::kInt8},
      {KernelFamily::kGpuMatrix, DType::kBF16, DType::kFp8E4M3},
      {KernelFamily::kGpuMatrix, DType::kBF16, DType::kFp8E5M2},
      {KernelFamily::kGpuMatrix, DType::kBF16, DType::kInt8},
  };
  int checked = 0;
  for (const auto& context : all_contexts()) {
    for (const Conversion& each : kConversions) {
      if (!has(*context, each.family)) continue;
      expect_codes_exact(context, each.family, each.dtype, each.cache_dtype);
      ++checked;
    }
  }
  EXPECT_GT(checked, 0);
}

}  // namespace test_cache_codes
