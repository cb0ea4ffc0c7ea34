#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/kv_scales.hpp>
#include <cmath>
#include <latch>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "capture/capture.hpp"
#include "device/attention_case.hpp"
#include "device/failing_builds.hpp"
#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"
#include "support/error_text.hpp"

namespace test_kv_scales {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::DType;
using layer_test::Device;

constexpr std::int32_t kHeads = 4, kKVHeads = 2, kDims = 64, kPage = 16;

clattn::AttentionOptions options_of(DType dtype, DType cache_dtype, bool calculate) {
  clattn::AttentionOptions options;
  options.config.num_heads = kHeads;
  options.config.head_size = kDims;
  options.config.num_kv_heads = kKVHeads;
  options.prefix = "layers.0";
  options.config.dtype = dtype;
  options.config.block_size = kPage;
  options.config.kv_cache_dtype = cache_dtype;
  options.calculate_kv_scales = calculate;
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

// Else the layer would take its cache's scales for the engine's, and later ones would not reach it.
TEST(KVScales, AreThoseOfTheCacheAlsoAfterTheDriverWasShort) {
  const Device device(all_contexts().at(0));
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, options_of(DType::kF32, DType::kFp8E4M3, false));
  const auto& backend = *layer.get_attn_backend();
  layer.bind_kv_cache(make_kv_cache(*device.context, device.queue, backend, layer.config(), 1));
  const float half = 0.5F, quarter = 0.25F;
  const auto load_half = [&] {
    const test::ShortDriver shortage(0, true);
    layer.load_kv_scales({.k_scale = {&half, 1}, .prob_scale = {&half, 1}});
  };
  EXPECT_EQ(test::error_text(load_half, clattn::ErrorCode::kOpenCL),
            "clRetainMemObject failed: CL_OUT_OF_RESOURCES (-5)");
  EXPECT_EQ(scales_of(device, layer), (std::vector<float>{1, 1, 1}));
  EXPECT_EQ(layer.prob_scale(), 1);
  EXPECT_TRUE(layer.load_kv_scales({.k_scale = {&quarter, 1}}).empty());
  EXPECT_EQ(scales_of(device, layer), (std::vector<float>{quarter, quarter, 1}));
  EXPECT_EQ(layer.kv_cache()->scales.handle(), layer.scales().handle());
}

float largest_of(const std::vector<float>& values) {
  float result = 0;
  for (const float value : values) result = std::max(result, std::abs(value));
  return result;
}

/// A layer over a zeroed fp8 e4m3 cache of NHD pages.
struct Fp8Layer {
  Fp8Layer(const Device& device, bool calculate, std::int64_t num_blocks)
      : layer(device.context, layers, options_of(DType::kF32, DType::kFp8E4M3, calculate)),
        raw(device.context->allocate(static_cast<std::size_t>(num_blocks) *
                                     kSpec.page_size_bytes())) {
    device.queue.fill(raw, 0, 0, raw.size_bytes());
    layer.bind_kv_cache(shaped());
  }
  clattn::KVCache shaped() const {
    return reshape_kv_cache(raw, kSpec, *layer.get_attn_backend(), clattn::KVCacheLayout::kNHD);
  }
  /// Compares the one page of a step's one request with its keys and values under these scales.
  void expect_stored(const Device& device, const layer_test::Step& step, std::size_t page,
                     const std::vector<float>& scales) const {
    std::vector<std::uint8_t> stored(raw.size_bytes());
    device.queue.read(raw, std::as_writable_bytes(std::span(stored)));
    const std::size_t row = kKVHeads * kDims;
    std::size_t wrong = 0;
    const auto compare = [&](std::size_t at, float value, float scale) {
      const std::uint32_t want = oracle::encode(oracle::Element::kFp8E4M3, double(value / scale));
      wrong += stored[at] != want ? 1U : 0U;
    };
    for (std::size_t i = 0; i < step.tokens() * row; ++i) {
      compare(page * 2 * kPage * row + i, step.key()[i], scales[0]);
      compare((page * 2 + 1) * kPage * row + i, step.value()[i], scales[1]);
    }
    EXPECT_EQ(wrong, 0U) << "elements of page " << page << " under " << scales[0] << ", "
                         << scales[1];
  }

  static constexpr clattn::KVCacheSpec kSpec{
      .block_size = kPage, .num_kv_heads = kKVHeads, .head_size = kDims, .dtype = DType::kFp8E4M3};
  clattn::LayerRegistry layers;
  Attention layer;
  clattn::Buffer raw;
};

layer_test::Step one_page(std::uint32_t seed, std::int32_t page) {
  layer_test::Step step(
      {.num_heads = kHeads, .num_kv_heads = kKVHeads, .head_size = kDims, .block_size = kPage},
      seed);
  step.add_request(6, 0, {page});
  return step;
}

/// What forward() does to a first batch: scales, then a cache stored by them, in one queue.
TEST(KVScales, AFirstForwardStoresByTheScalesThatItFinds) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    Fp8Layer model(device, true, 1);
    const layer_test::Step step = one_page(9, 0);
    const auto builder =
        model.layer.get_attn_backend()->make_builder(context, model.layer.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    static_cast<void>(step.run(device, model.layer, &metadata));
    const std::vector<float> scales = scales_of(device, model.layer);
    EXPECT_FLOAT_EQ(scales[0], largest_of(step.key()) / 200);
    EXPECT_FLOAT_EQ(scales[1], largest_of(step.value()) / 100);
    model.expect_stored(device, step, 0, scales);
  }
}

// A2.1 (enable_kv_scales_calculation): such a call stores by the scales as they are and leaves the
// calculation to the next.
TEST(KVScales, ACallMayLeaveThemToTheNext) {
  const Device device(all_contexts().at(0));
  Fp8Layer model(device, true, 1);
  const layer_test::Step step = one_page(10, 0);
  const auto builder =
      model.layer.get_attn_backend()->make_builder(device.context, model.layer.config());
  const auto& metadata = builder->build(device.queue, step.batch());
  static_cast<void>(step.run(device, model.layer, &metadata,
                             {.forward = {.enable_kv_scales_calculation = false}}));
  EXPECT_EQ(scales_of(device, model.layer), (std::vector<float>{1, 1, 1}));
  model.expect_stored(device, step, 0, {1, 1});
  static_cast<void>(step.run(device, model.layer, &metadata));
  const std::vector<float> found = scales_of(device, model.layer);
  EXPECT_FLOAT_EQ(found[0], largest_of(step.key()) / 200);
  model.expect_stored(device, step, 0, found);
}

TEST(KVScales, F2_AnInt8LayerRefusesKeysUntilItsScalesAreKnown) {
  const Device device(all_contexts().at(0));
  const layer_test::Step step = one_page(11, 0);
  const std::string refused =
      "layer layers.0: its int8 cache has no scales, legal: load_kv_scales() with k_scale or "
      "v_scale, calculate_kv_scales, or a cache bound with scales";
  for (const bool calculate : {false, true}) {
    clattn::LayerRegistry layers;
    Attention layer(device.context, layers, options_of(DType::kF32, DType::kInt8, calculate));
    const auto& backend = *layer.get_attn_backend();
    layer.bind_kv_cache(make_kv_cache(*device.context, device.queue, backend, layer.config(), 1));
    const auto builder = backend.make_builder(device.context, layer.config());
    const auto& metadata = builder->build(device.queue, step.batch());
    const auto run = [&](bool enable) {
      return test::error_text([&] {
        step.run(device, layer, &metadata, {.forward = {.enable_kv_scales_calculation = enable}});
      });
    };
    EXPECT_EQ(run(false), refused);
    const auto idle = backend.make_builder(device.context, layer.config());
    const clattn::Buffer row = device.context->allocate(4096);
    const clattn::TensorRef none{row.handle()};
    const std::vector<std::int32_t> start = {0};
    EXPECT_EQ(test::error_text([&] {  // stores no key
                layer.forward(
                    device.queue, {none, none, none, none},
                    &idle->build(device.queue, clattn::CommonAttentionMetadata::of(start, {}, {})));
              }),
              "no error");
    layer.load_kv_scales({});  // a checkpoint without any
    EXPECT_EQ(run(false), refused);
    if (!calculate) {
      const float loaded = 0.03F;
      layer.load_kv_scales({.k_scale = {&loaded, 1}});
    }
    EXPECT_EQ(run(true), "no error");
  }
  device.queue.finish();
}

// M8: no kernel rounds queries or probabilities to 8 bits, so their scales change no bit.
TEST(KVScales, M8_ScalesOfQueriesAndProbabilitiesChangeNothing) {
  const Device device(all_contexts().at(0));
  Fp8Layer model(device, false, 1);
  const layer_test::Step step = one_page(11, 0);
  const auto builder =
      model.layer.get_attn_backend()->make_builder(device.context, model.layer.config());
  const auto& metadata = builder->build(device.queue, step.batch());
  const auto before = step.run(device, model.layer, &metadata).out;
  const float q = 3, prob = 0.25F;
  static_cast<void>(
      model.layer.load_kv_scales({.q_scale = std::span(&q, 1), .prob_scale = std::span(&prob, 1)}));
  EXPECT_EQ(step.run(device, model.layer, &metadata).out, before);
}

/// A step of a queue of its own, its tensors on the device, so that forward() is all that is left.
struct ReadyStep {
  ReadyStep(const std::shared_ptr<clattn::Context>& context, const Attention& layer,
            std::uint32_t seed, std::int32_t page)
      : device(context),
        step(one_page(seed, page)),
        query(device.upload(step.query())),
        key(device.upload(step.key())),
        value(device.upload(step.value())),
        out(device.upload(step.query())),
        builder(layer.get_attn_backend()->make_builder(context, layer.config())),
        metadata(&builder->build(device.queue, step.batch())) {
    device.queue.finish();
  }
  void forward(Attention& layer) const {
    layer.forward(device.queue,
                  {.query = {query.handle()},
                   .key = {key.handle()},
                   .value = {value.handle()},
                   .output = {out.handle()}},
                  metadata);
  }

  Device device;
  layer_test::Step step;
  clattn::Buffer query, key, value, out;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  const clattn::AttentionMetadata* metadata;
};

/// A second queue's first forward must not store before the first queue's found the scales.
TEST(KVScales, AnotherQueueWaitsForThem) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    Fp8Layer model(device, true, 2);
    const ReadyStep first(context, model.layer, 1, 0);
    const ReadyStep second(context, model.layer, 2, 1);
    cl_int status = CL_SUCCESS;
    cl_event gate = clCreateUserEvent(context->handle(), &status);
    ASSERT_EQ(status, CL_SUCCESS);
    ASSERT_EQ(clEnqueueBarrierWithWaitList(first.device.queue, 1, &gate, nullptr), CL_SUCCESS);
    const clattn::detail::CapturePause paused;  // captures wait for the queue
    first.forward(model.layer);
    second.forward(model.layer);
    second.device.queue.flush();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // ample for what does not wait
    clSetUserEventStatus(gate, CL_COMPLETE);
    first.device.queue.finish();
    second.device.queue.finish();
    clReleaseEvent(gate);
    const std::vector<float> scales = scales_of(device, model.layer);
    EXPECT_FLOAT_EQ(scales[0], largest_of(first.step.key()) / 200);
    model.expect_stored(device, first.step, 0, scales);
    model.expect_stored(device, second.step, 1, scales);
  }
}

TEST(KVScales, ThreadsThatStartTogetherStoreByTheSame) {
  constexpr std::int32_t kThreads = 3;
  const auto& context = all_contexts().at(0);
  const Device device(context);
  for (std::uint32_t round = 0; round < 8; ++round) {
    Fp8Layer model(device, true, kThreads);
    std::vector<std::unique_ptr<ReadyStep>> steps;
    for (std::int32_t t = 0; t < kThreads; ++t) {
      steps.push_back(std::make_unique<ReadyStep>(context, model.layer,
                                                  round * 10 + static_cast<std::uint32_t>(t), t));
    }
    std::latch start(kThreads);
    std::vector<std::thread> threads;
    for (const auto& step : steps) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        step->forward(model.layer);
        step->device.queue.finish();
      });
    }
    for (std::thread& thread : threads) thread.join();
    const std::vector<float> scales = scales_of(device, model.layer);
    EXPECT_NE(scales[0], 1);
    for (std::size_t t = 0; t < steps.size(); ++t) {
      model.expect_stored(device, steps[t]->step, t, scales);
    }
  }
}

// Scales that come with a cache are the engine's: the layer reads them and never changes them.
TEST(KVScales, TheEnginesOwnStayTheEngines) {
  const Device device(all_contexts().at(0));
  const float k = 0.5F;
  const float q = 3;
  const clattn::LoadedKVScales loaded{.k_scale = std::span(&k, 1), .q_scale = std::span(&q, 1)};
  for (const bool calculate : {false, true}) {
    Fp8Layer model(device, calculate, 1);
    clattn::KVCache cache = model.shaped();
    const std::vector<float> theirs = {0.25F, 0.25F, 0.125F, 0.125F};  // per head
    cache.scales = device.upload(theirs);
    cache.scales_per_head = true;
    model.layer.bind_kv_cache(cache);
    EXPECT_TRUE(model.layer.load_kv_scales(loaded).empty());
    EXPECT_EQ(model.layer.kv_cache()->scales.handle(), cache.scales.handle());
    EXPECT_TRUE(model.layer.kv_cache()->scales_per_head);
    const ReadyStep step(device.context, model.layer, 5, 0);
    step.forward(model.layer);
    step.device.queue.finish();
    EXPECT_EQ(device.download(cache.scales), theirs);
    model.expect_stored(device, step.step, 0, {0.25F, 0.125F});
    // A cache without scales goes back to the layer's own, which hold what was loaded.
    model.layer.bind_kv_cache(model.shaped());
    EXPECT_EQ(model.layer.kv_cache()->scales.handle(), model.layer.scales().handle());
    EXPECT_FALSE(model.layer.kv_cache()->scales_per_head);
    const float kv = calculate ? 1 : k;
    EXPECT_EQ(scales_of(device, model.layer), (std::vector<float>{kv, kv, q}));
  }
}

}  // namespace test_kv_scales
