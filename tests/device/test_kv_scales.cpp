#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"

namespace {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::DType;
using layer_test::Device;

constexpr std::int32_t kHeads = 4, kKVHeads = 2, kDims = 64, kPage = 16;

clattn::AttentionOptions options_of(DType dtype, DType cache_dtype, bool calculate) {
  clattn::AttentionOptions options;
  options.num_heads = kHeads;
  options.head_size = kDims;
  options.num_kv_heads = kKVHeads;
  options.prefix = "layers.0";
  options.dtype = dtype;
  options.cache_config = clattn::CacheConfig{
      .block_size = kPage, .cache_dtype = cache_dtype, .calculate_kv_scales = calculate};
  return options;
}

std::vector<float> scales_of(const Device& device, const Attention& layer) {
  return device.download(layer.scales());
}

/// Rows of a tensor with a gap between them that holds larger numbers, in the element type.
struct Tensor {
  Tensor(const Device& device, oracle::Element element, std::size_t rows, std::size_t row,
         std::uint32_t seed)
      : values(layer_test::random_values(rows * row, seed)) {
    const std::size_t width = element == oracle::Element::kF32 ? 4 : 2;
    const std::size_t stride = row + 8;
    std::vector<std::uint8_t> bytes(rows * stride * width);
    for (std::size_t i = 0; i < rows * stride; ++i) {
      const bool gap = i % stride >= row;
      double value = 1000;
      if (!gap) {
        float& mine = values[i / stride * row + i % stride];
        mine = static_cast<float>(oracle::round_to(element, mine));
        value = mine;
      }
      set(bytes, i, width, oracle::encode(element, value));
    }
    // Two elements that do not count, one of them in the last row.
    set(bytes, 3, width, oracle::encode(element, std::numeric_limits<double>::infinity()));
    set(bytes, (rows - 1) * stride + row - 1, width, oracle::encode(element, std::nan("")));
    values[3] = values[rows * row - 1] = 0;
    buffer = device.context->allocate(bytes.size());
    device.queue.write(buffer, std::as_bytes(std::span(bytes)));
    ref = {buffer.handle(), 0, static_cast<std::int64_t>(stride)};
  }
  float largest() const {
    float result = 0;
    for (const float value : values) result = std::max(result, std::abs(value));
    return result;
  }

  std::vector<float> values;
  clattn::Buffer buffer;
  clattn::TensorRef ref;

 private:
  static void set(std::vector<std::uint8_t>& bytes, std::size_t i, std::size_t width,
                  std::uint32_t bits) {
    for (std::size_t b = 0; b < width; ++b) {
      bytes[i * width + b] = static_cast<std::uint8_t>(bits >> (8 * b));
    }
  }
};

// A2.1: max|k| / 200, max|v| / 100, max|q| / 200 of whole tensors, once, for every element type and
// more rows than work-groups.
TEST(KVScales, AreTheLargestMagnitudesOfTheFirstBatch) {
  struct Row {
    DType dtype;
    oracle::Element element;
  };
  constexpr Row kRows[] = {{DType::kF32, oracle::Element::kF32},
                           {DType::kF16, oracle::Element::kF16},
                           {DType::kBF16, oracle::Element::kBF16}};
  for (const auto& context : all_contexts()) {
    const Device device(context);
    for (const Row& row : kRows) {
      clattn::LayerRegistry layers;
      Attention layer(context, layers, options_of(row.dtype, DType::kFp8E4M3, true));
      EXPECT_EQ(scales_of(device, layer), (std::vector<float>{1, 1, 1}));
      constexpr std::size_t kRowsOfBatch = 777;
      const Tensor k(device, row.element, kRowsOfBatch, kKVHeads * kDims, 1);
      const Tensor v(device, row.element, kRowsOfBatch, kKVHeads * kDims, 2);
      const Tensor q(device, row.element, kRowsOfBatch, kHeads * kDims, 3);
      layer.calc_kv_scales(device.queue, q.ref, k.ref, v.ref, 0);  // nothing to learn from
      EXPECT_EQ(scales_of(device, layer), (std::vector<float>{1, 1, 1}));
      layer.calc_kv_scales(device.queue, q.ref, k.ref, v.ref, kRowsOfBatch);
      const std::vector<float> want = {k.largest() / 200, v.largest() / 100, q.largest() / 200};
      const std::vector<float> got = scales_of(device, layer);
      for (std::size_t i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(got[i], want[i]) << i;
      // Later batches change nothing.
      layer.calc_kv_scales(device.queue, k.ref, v.ref, k.ref, 1);
      EXPECT_EQ(scales_of(device, layer), got);
    }
  }
}

TEST(KVScales, ZerosLeaveOne) {
  const Device device(all_contexts().at(0));
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, options_of(DType::kF32, DType::kInt8, true));
  const clattn::Buffer zeros = device.upload(std::vector<float>(kHeads * kDims, 0.0F));
  layer.calc_kv_scales(device.queue, {zeros.handle()}, {zeros.handle()}, {zeros.handle()}, 1);
  EXPECT_EQ(scales_of(device, layer), (std::vector<float>{1, 1, 1}));
}

// A2.3: the layer's device scales are those of the checkpoint, unless they are to be calculated.
TEST(KVScales, ComeFromTheCheckpoint) {
  const Device device(all_contexts().at(0));
  const float k = 0.5F;
  const float q = 3;
  const float prob = 0.25F;
  const clattn::LoadedKVScales loaded{
      .k_scale = std::span(&k, 1), .q_scale = std::span(&q, 1), .prob_scale = std::span(&prob, 1)};
  for (const bool calculate : {false, true}) {
    clattn::LayerRegistry layers;
    Attention layer(device.context, layers, options_of(DType::kF32, DType::kFp8E4M3, calculate));
    EXPECT_TRUE(layer.load_kv_scales(loaded).empty());
    EXPECT_EQ(layer.prob_scale(), prob);
    const float kv = calculate ? 1 : k;
    EXPECT_EQ(scales_of(device, layer), (std::vector<float>{kv, kv, q}));
  }
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, options_of(DType::kF32, DType::kFp8E4M3, false));
  EXPECT_EQ(layer.load_kv_scales({}).size(), 1U);  // 1.0 may cost accuracy
}

/// What forward() does to a first batch: scales, then a cache stored by them, in one queue.
TEST(KVScales, AFirstForwardStoresByTheScalesThatItFinds) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    Attention layer(context, layers, options_of(DType::kF32, DType::kFp8E4M3, true));
    const auto& backend = *layer.get_attn_backend();
    const clattn::KVCacheSpec spec{.block_size = kPage,
                                   .num_kv_heads = kKVHeads,
                                   .head_size = kDims,
                                   .dtype = DType::kFp8E4M3};
    const clattn::Buffer raw = context->allocate(spec.page_size_bytes());
    layer.bind_kv_cache(reshape_kv_cache(raw, spec, backend, clattn::KVCacheLayout::kNHD));
    layer_test::Step step(
        {.num_heads = kHeads, .num_kv_heads = kKVHeads, .head_size = kDims, .block_size = kPage},
        9);
    step.add_request(6, 0, {0});
    const auto builder = backend.make_builder(context, layer.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    static_cast<void>(step.run(device, layer, &metadata));
    const auto largest = [](const std::vector<float>& values) {
      float result = 0;
      for (const float value : values) result = std::max(result, std::abs(value));
      return result;
    };
    const std::vector<float> scales = scales_of(device, layer);
    EXPECT_FLOAT_EQ(scales[0], largest(step.key()) / 200);
    EXPECT_FLOAT_EQ(scales[1], largest(step.value()) / 100);
    std::vector<std::uint8_t> stored(raw.size_bytes());
    device.queue.read(raw, std::as_writable_bytes(std::span(stored)));
    const std::size_t row = kKVHeads * kDims;
    for (std::size_t i = 0; i < step.tokens() * row; ++i) {
      const auto expect = [&](std::size_t at, float value, float scale) {
        EXPECT_EQ(stored[at], oracle::encode(oracle::Element::kFp8E4M3, double(value / scale)))
            << at;
      };
      expect(i, step.key()[i], scales[0]);
      expect(kPage * row + i, step.value()[i], scales[1]);
    }
  }
}

}  // namespace
