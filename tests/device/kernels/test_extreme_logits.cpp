// Keys whose logits are -inf or NaN: a split of them counts for no less than in one pass.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "device/step_case.hpp"

namespace {

using attention_test::all_contexts;
using clattn::KernelFamily;
using step_test::index;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kHeads = 2, kDims = 16, kKeys = 400, kPage = 16;

/// One request whose keys and values 0 … num_odd - 1 have `key` and `value` as their first element.
struct Odd {
  double key = 0, value = 0;
  std::int32_t num_odd = 0;
  std::int32_t query_len = 1;
};

struct Result {
  std::vector<double> out, lse;  // [query_len, heads, dims], [query_len, heads]
};

double element(std::int64_t i) {
  return static_cast<double>(i * 37 % 19 - 9) / 16;  // exact in f32
}

double query_element(std::int64_t row, std::int64_t dim) {
  return dim == 0 ? 1 : element(row * kDims + dim + 5);
}
double key_element(const Odd& odd, std::int64_t key, std::int64_t dim) {
  return dim == 0 && key < odd.num_odd ? odd.key : element(key * kDims + dim);
}
double value_element(const Odd& odd, std::int64_t key, std::int64_t dim) {
  return dim == 0 && key < odd.num_odd ? odd.value : element(key * kDims + dim + 11);
}

/// Softmax over finite, infinite and NaN logits; where all are -inf, the weights are 0.
Result truth(const Odd& odd) {
  Result want;
  for (std::int64_t row = 0; row < std::int64_t{odd.query_len} * kHeads; ++row) {
    const std::int64_t seen = kKeys - odd.query_len + row / kHeads + 1;
    std::vector<double> logits;
    double largest = -kInfinity;
    for (std::int64_t key = 0; key < seen; ++key) {
      double x = 0;
      for (std::int64_t d = 0; d < kDims; ++d)
        x += query_element(row, d) * key_element(odd, key, d);
      logits.push_back(x);
      largest = std::fmax(largest, x);
    }
    double sum = 0;
    std::vector<double> out(kDims);
    for (std::int64_t key = 0; key < seen; ++key) {
      const double x = logits[index(key)];
      const double weight = x == -kInfinity ? 0 : std::exp(x - largest);
      sum += weight;
      for (std::int64_t d = 0; d < kDims; ++d) out[index(d)] += weight * value_element(odd, key, d);
    }
    for (const double o : out) want.out.push_back(sum == 0 ? o * 0 : o / sum);
    want.lse.push_back(sum == 0 ? -kInfinity : largest + std::log(sum));
  }
  return want;
}

Result attend(const std::shared_ptr<clattn::Context>& context, const Odd& odd, KernelFamily family,
              std::int32_t num_splits) {
  const clattn::Queue queue = context->create_queue();
  clattn::AttentionConfig config;
  config.num_heads = kHeads;
  config.num_kv_heads = 1;
  config.head_size = kDims;
  config.block_size = kPage;
  config.dtype = clattn::DType::kF32;
  config.scale = 1.0F;
  config.kernel_family = family;
  const auto& backend = clattn::get_attn_backend(config, &context->capabilities(), "FLASHINFER");
  const step_test::Layout layout({{odd.query_len, kKeys - odd.query_len}}, kPage);
  const clattn::KVCacheSpec spec{
      .block_size = kPage, .num_kv_heads = 1, .head_size = kDims, .dtype = config.dtype};
  const clattn::KVCache cache =
      clattn::reshape_kv_cache(context->allocate(index(layout.num_blocks) * spec.page_size_bytes()),
                               spec, backend, clattn::KVCacheLayout::kNHD);
  step_test::Elements memory(config.dtype,
                             static_cast<std::int64_t>(cache.buffer.size_bytes() / 4));
  for (std::int64_t key = 0; key < kKeys; ++key) {
    const std::int64_t slot = layout.slot(0, key, kPage);
    const std::int64_t at = slot / kPage * cache.block_stride + slot % kPage * cache.token_stride;
    for (std::int64_t d = 0; d < kDims; ++d) {
      memory.set(cache.k_offset + at + d, key_element(odd, key, d));
      memory.set(cache.v_offset + at + d, value_element(odd, key, d));
    }
  }
  queue.write(cache.buffer, memory.bytes());
  const std::int64_t rows = std::int64_t{odd.query_len} * kHeads;
  step_test::Elements query(config.dtype, rows * kDims);
  for (std::int64_t i = 0; i < rows * kDims; ++i) query.set(i, query_element(i / kDims, i % kDims));
  const clattn::Buffer q = query.upload(*context, queue);
  step_test::FencedOutput out(*context, queue, config.dtype, rows * kDims, 0);
  step_test::FencedOutput lse(*context, queue, config.dtype, rows, 0);
  const auto builder = backend.make_builder(context, config, layout.options(num_splits));
  std::vector<clattn::LaunchRecord> launches;
  backend.make_impl(context, config)
      ->forward(
          queue,
          {.query = {q.handle()}, .output = {out.buffer.handle()}, .lse = lse.buffer.handle()},
          cache, builder->build(queue, layout.batch()), {.launches = &launches});
  EXPECT_GE(launches.front().tasks, num_splits);
  // Kernels of inline PTX and of CPUs join the splits of short queries themselves.
  const std::string_view last = launches.back().kernel;
  const bool joins = last.starts_with("decode_mma") || last.starts_with("decode_ring") ||
                     last.starts_with("decode_cpu") || last.ends_with("_ptx");
  EXPECT_EQ(last.starts_with("merge"), num_splits > 1 && !joins);
  return {out.read(queue), lse.read(queue)};
}

void expect_same(const std::vector<double>& got, const std::vector<double>& want,
                 std::string_view what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool right = std::isnan(want[i])   ? std::isnan(got[i])
                       : std::isinf(want[i]) ? got[i] == want[i]
                                             : std::abs(got[i] - want[i]) <= 2e-5;
    ASSERT_TRUE(right) << what << ' ' << i << ": got " << got[i] << ", expected " << want[i];
  }
}

class ExtremeLogits : public testing::TestWithParam<KernelFamily> {};

// DESIGN 4: a query that sees no key gives 0 and -inf; what a query does see counts, in any split.
TEST_P(ExtremeLogits, ASplitOfThemCountsAsInOnePass) {
  const Odd cases[] = {{-kInfinity, 1, kKeys - 9},          // nothing of most splits weighs
                       {-kInfinity, kInfinity, kKeys - 9},  // 0 * inf
                       {-kInfinity, 1, kKeys},              // of none
                       {-kInfinity, kInfinity, kKeys},      //
                       {kNaN, 1, 9},                        // in one split
                       {kNaN, 1, kKeys},                    //
                       {kInfinity, 1, 1}};                  //
  for (Odd odd : cases) {
    for (const std::int32_t query_len : {1, 40}) {
      odd.query_len = query_len;
      const Result want = truth(odd);
      for (const auto& context : all_contexts()) {
        for (const std::int32_t num_splits : {1, 5}) {
          SCOPED_TRACE(fmt::format("key {} value {} of {}, {} queries, {} splits", odd.key,
                                   odd.value, odd.num_odd, query_len, num_splits));
          const Result got = attend(context, odd, GetParam(), num_splits);
          expect_same(got.out, want.out, "out");
          expect_same(got.lse, want.lse, "lse");
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ExtremeLogits,
                         testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

}  // namespace
