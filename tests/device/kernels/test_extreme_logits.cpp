// Logits that are infinite or NaN, or whose maxima move along the keys.

#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/kv_cache_spec.hpp>
#include <cmath>
#include <functional>
#include <limits>

#include "device/step_case.hpp"

namespace test_extreme_logits {

using attention_test::all_contexts;
using clattn::KernelFamily;
using step_test::index;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kPage = 16;

/// One request, whose elements are functions of their place.
struct Problem {
  clattn::DType dtype = clattn::DType::kF32;
  std::int32_t heads = 2, dims = 16, keys = 400, query_len = 1;
  std::function<double(std::int64_t key, std::int64_t dim)> key = {}, value = {};

  std::int64_t rows() const { return std::int64_t{query_len} * heads; }
};

struct Result {
  std::vector<double> out, lse;  // [query_len, heads, dims], [query_len, heads]
};

double element(std::int64_t i) {
  return static_cast<double>(i * 37 % 19 - 9) / 16;  // exact in all types
}

/// Element 0 of a query is 1, so element 0 of a key is added to the logit as it is.
double query_element(const Problem& problem, std::int64_t row, std::int64_t dim) {
  return dim == 0 ? 1 : element(row * problem.dims + dim + 5);
}

/// Softmax over finite, infinite and NaN logits; where all are -inf, the weights are 0.
Result truth(const Problem& problem) {
  Result want;
  std::vector<double> keys, values;  // [keys, dims]
  for (std::int64_t key = 0; key < problem.keys; ++key) {
    for (std::int64_t d = 0; d < problem.dims; ++d) {
      keys.push_back(problem.key(key, d));
      values.push_back(problem.value(key, d));
    }
  }
  for (std::int64_t row = 0; row < problem.rows(); ++row) {
    const std::int64_t seen = problem.keys - problem.query_len + row / problem.heads + 1;
    std::vector<double> logits;
    double largest = -kInfinity;
    for (std::int64_t key = 0; key < seen; ++key) {
      double x = 0;
      for (std::int64_t d = 0; d < problem.dims; ++d)
        x += query_element(problem, row, d) * keys[index(key * problem.dims + d)];
      logits.push_back(x);
      largest = std::fmax(largest, x);
    }
    double sum = 0;
    std::vector<double> out(index(problem.dims));
    for (std::int64_t key = 0; key < seen; ++key) {
      const double x = logits[index(key)];
      const double weight = x == -kInfinity ? 0 : std::exp(x - largest);
      sum += weight;
      for (std::int64_t d = 0; d < problem.dims; ++d)
        out[index(d)] += weight * values[index(key * problem.dims + d)];
    }
    for (const double o : out) want.out.push_back(sum == 0 ? o * 0 : o / sum);
    want.lse.push_back(sum == 0 ? -kInfinity : largest + std::log(sum));
  }
  return want;
}

Result attend(const std::shared_ptr<clattn::Context>& context, const Problem& problem,
              KernelFamily family, std::int32_t num_splits) {
  const clattn::Queue queue = context->create_queue();
  clattn::AttentionConfig config;
  config.num_heads = problem.heads;
  config.num_kv_heads = 1;
  config.head_size = problem.dims;
  config.block_size = kPage;
  config.dtype = problem.dtype;
  config.scale = 1.0F;
  config.kernel_family = family;
  const auto& backend = *clattn::get_attn_backend(config, &context->capabilities(), "FLASHINFER");
  const step_test::Layout layout({{problem.query_len, problem.keys - problem.query_len}}, kPage);
  const clattn::KVCacheSpec spec{
      .block_size = kPage, .num_kv_heads = 1, .head_size = problem.dims, .dtype = config.dtype};
  const clattn::KVCache cache =
      clattn::reshape_kv_cache(context->allocate(index(layout.num_blocks) * spec.page_size_bytes()),
                               spec, backend, clattn::KVCacheLayout::kNHD);
  step_test::Elements memory(config.dtype,
                             static_cast<std::int64_t>(cache.buffer.size_bytes() /
                                                       clattn::element_size_bytes(config.dtype)));
  for (std::int64_t key = 0; key < problem.keys; ++key) {
    const std::int64_t slot = layout.slot(0, key, kPage);
    const std::int64_t at = slot / kPage * cache.block_stride + slot % kPage * cache.token_stride;
    for (std::int64_t d = 0; d < problem.dims; ++d) {
      memory.set(cache.k_offset + at + d, problem.key(key, d));
      memory.set(cache.v_offset + at + d, problem.value(key, d));
    }
  }
  queue.write(cache.buffer, memory.bytes());
  const std::int64_t size = problem.rows() * problem.dims;
  step_test::Elements query(config.dtype, size);
  for (std::int64_t i = 0; i < size; ++i)
    query.set(i, query_element(problem, i / problem.dims, i % problem.dims));
  const clattn::Buffer q = query.upload(*context, queue);
  step_test::FencedOutput out(*context, queue, config.dtype, size, 0);
  step_test::FencedOutput lse(*context, queue, clattn::DType::kF32, problem.rows(), 0);
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

/// Within `allowed`, relative to values above 256.
void expect_close(const std::vector<double>& got, const std::vector<double>& want, double allowed,
                  std::string_view what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool right = std::isnan(want[i])   ? std::isnan(got[i])
                       : std::isinf(want[i]) ? got[i] == want[i]
                                             : std::abs(got[i] - want[i]) <=
                                                   allowed * std::max(1.0, std::abs(want[i]) / 256);
    ASSERT_TRUE(right) << what << ' ' << i << ": got " << got[i] << ", expected " << want[i];
  }
}

class ExtremeLogits : public testing::TestWithParam<KernelFamily> {};

/// Keys and values 0 … num_odd - 1 have `key` and `value` as their first element.
struct Odd {
  double key = 0, value = 0;
  std::int32_t num_odd = 0;
};
constexpr std::int32_t kKeys = 400;

Problem problem_of(const Odd& odd, std::int32_t query_len, clattn::DType dtype) {
  const bool f32 = dtype == clattn::DType::kF32;
  Problem problem{.dtype = dtype, .dims = f32 ? 16 : 128, .keys = kKeys, .query_len = query_len};
  problem.key = [odd, f32](std::int64_t key, std::int64_t dim) {
    return dim == 0 && key < odd.num_odd ? odd.key : element(key * 16 + dim) / (f32 ? 1 : 16);
  };
  problem.value = [odd](std::int64_t key, std::int64_t dim) {
    return dim == 0 && key < odd.num_odd ? odd.value : 0.5 + element(key * 16 + dim + 11) / 2;
  };
  return problem;
}

// DESIGN 4: a query that sees no key gives 0 and -inf; what a query does see counts, in any split.
TEST_P(ExtremeLogits, ASplitOfThemCountsAsInOnePass) {
  const Odd cases[] = {{-kInfinity, 1, kKeys - 9},          // nothing of most splits weighs
                       {-kInfinity, kInfinity, kKeys - 9},  // 0 * inf
                       {-kInfinity, 1, kKeys},              // of none
                       {-kInfinity, kInfinity, kKeys},      //
                       {kNaN, 1, 9},                        // in one split
                       {kNaN, 1, kKeys},                    //
                       {kInfinity, 1, 1}};                  //
  using enum clattn::DType;
  for (const auto& [query_len, dtype] :
       {std::pair{1, kF32}, {40, kF32}, {1, kBF16}, {40, kBF16}, {40, kF16}}) {
    const double allowed = dtype == kF32 ? 2e-5 : dtype == kF16 ? 1e-3 : 8e-3;
    for (const Odd& odd : cases) {
      const Problem problem = problem_of(odd, query_len, dtype);
      const Result want = truth(problem);
      for (const auto& context : all_contexts()) {
        for (const std::int32_t num_splits : {1, 5}) {
          SCOPED_TRACE(fmt::format("key {} value {} of {}, {} queries, {} splits", odd.key,
                                   odd.value, odd.num_odd, query_len, num_splits));
          const Result got = attend(context, problem, GetParam(), num_splits);
          expect_close(got.out, want.out, allowed, "out");
          expect_close(got.lse, want.lse, allowed, "lse");
        }
      }
    }
  }
}

/// How logits change along the keys, all exact in bf16: the first one, their growth from each
/// stretch of 64 keys to the next, and what is added in the last stretch but one.
struct Course {
  double first = 0, growth = 0, jump = 0;
};

// Kernels that keep a row's base while its probabilities are small must notice when they are not.
TEST_P(ExtremeLogits, MaximaMayMoveFromTileToTile) {
  constexpr std::int32_t kStretch = 64, kLong = 450;
  const Course courses[] = {{0, 0, 0},    {0, 4, 0},     {0, 16, 0},      {0, -16, 0},
                            {0, 112, 0},  {-400, 0, 16}, {-400, 0, 800},  {300, -4, 0},
                            {0, -112, 0}, {0, 4, -200},  {-800, 64, 256}, {0, 1, 2}};
  for (const clattn::DType dtype : {clattn::DType::kF16, clattn::DType::kBF16}) {
    for (const Course& course : courses) {
      Problem problem{.dtype = dtype, .heads = 4, .dims = 128, .keys = kLong, .query_len = 40};
      problem.key = [&course](std::int64_t key, std::int64_t dim) {
        const auto stretch = static_cast<double>(key / kStretch);
        if (dim != 0) return element(key * 128 + dim) / 16;
        return course.first + course.growth * stretch +
               (key / kStretch == kLong / kStretch - 1 ? course.jump : 0);
      };
      problem.value = [](std::int64_t key, std::int64_t dim) {  // tells which stretch it is of
        return 0.25 + static_cast<double>(key / kStretch % 4) / 8 +
               element(key * 128 + dim + 11) / 16;
      };
      const Result want = truth(problem);
      for (const auto& context : all_contexts()) {
        SCOPED_TRACE(fmt::format("{}, from {} by {}, once by {}", clattn::to_string(dtype),
                                 course.first, course.growth, course.jump));
        const Result got = attend(context, problem, GetParam(), 1);
        expect_close(got.out, want.out, dtype == clattn::DType::kF16 ? 1e-3 : 8e-3, "out");
        expect_close(got.lse, want.lse, 1e-3, "lse");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ExtremeLogits,
                         testing::Values(KernelFamily::kAuto, KernelFamily::kGpu),
                         attention_test::family_name<testing::TestParamInfo<KernelFamily>>);

}  // namespace test_extreme_logits
