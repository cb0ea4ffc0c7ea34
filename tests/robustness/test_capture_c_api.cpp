// Scales and options that the C API is given reach the call: its captured case records them, also
// on devices whose kernels ignore them.

#include <clattn/clattn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <vector>

#include "robustness/capture.hpp"

namespace test_capture_c_api {

#define EXPECT_SUCCESS(call) EXPECT_EQ(call, CLATTN_SUCCESS) << clattn_last_error()

/// A layer over an e4m3 cache of two pages that asks for products of 8 bits, and rows of a prompt
/// of five tokens.
class CaptureOfTheCApi : public CaptureInProcess {
 protected:
  void SetUp() override {
    ClattnLayerConfig config = {};
    config.struct_size = sizeof config;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_size = 64;
    config.dtype = "f16";
    config.kv_cache_dtype = "fp8_e4m3";
    config.fp8_products = 1;
    EXPECT_SUCCESS(clattn_context_create(nullptr, &context_));
    EXPECT_SUCCESS(clattn_queue_create(context_, 0, &queue_));
    EXPECT_SUCCESS(clattn_layer_create(context_, nullptr, &config, &layer_));
    EXPECT_SUCCESS(clattn_cache_create(layer_, queue_, 2, nullptr, &cache_));
    const std::vector<std::uint16_t> ones(std::size_t{5} * 4 * 64, 0x3c00);
    for (ClattnBuffer** rows : {&rows_, &output_}) {
      EXPECT_SUCCESS(clattn_buffer_create(context_, 2 * ones.size(), rows));
      EXPECT_SUCCESS(clattn_buffer_write(*rows, queue_, 0, ones.data(), 2 * ones.size()));
    }
  }
  void TearDown() override {
    clattn_buffer_destroy(output_);
    clattn_buffer_destroy(rows_);
    clattn_buffer_destroy(scales_);
    clattn_cache_destroy(cache_);
    clattn_layer_destroy(layer_);
    clattn_queue_destroy(queue_);
    clattn_context_destroy(context_);
  }

  /// Fills a buffer of scales; it replaces the last one.
  const ClattnBuffer* scales(std::initializer_list<float> values) {
    clattn_buffer_destroy(scales_);
    EXPECT_SUCCESS(clattn_buffer_create(context_, values.size() * sizeof(float), &scales_));
    EXPECT_SUCCESS(
        clattn_buffer_write(scales_, queue_, 0, values.begin(), values.size() * sizeof(float)));
    return scales_;
  }

  /// The case of a call over the cache as it is now.
  nlohmann::json forward(const ClattnStepOptions* options = nullptr) {
    constexpr std::array<std::int32_t, 2> kStarts = {0, 5};
    constexpr std::array<std::int32_t, 1> kLens = {5}, kPages = {1};
    ClattnBatchInfo batch = {};
    batch.struct_size = sizeof batch;
    batch.num_reqs = 1;
    batch.query_start_loc = kStarts.data();
    batch.seq_lens = kLens.data();
    batch.block_table = kPages.data();
    batch.block_table_stride = 1;
    ClattnTensors tensors = {};
    tensors.struct_size = sizeof tensors;
    tensors.query.buffer = tensors.key.buffer = tensors.value.buffer = rows_;
    tensors.output.buffer = output_;
    ClattnStep* step = nullptr;
    EXPECT_SUCCESS(clattn_layer_bind_cache(layer_, cache_));
    EXPECT_SUCCESS(clattn_step_create(layer_, options, &step));
    EXPECT_SUCCESS(clattn_step_build(step, queue_, &batch));
    EXPECT_SUCCESS(clattn_layer_forward(layer_, queue_, &tensors, step));
    EXPECT_SUCCESS(clattn_queue_finish(queue_));
    clattn_step_destroy(step);
    return nlohmann::json::parse(read_bytes(newest() / "case.json"));
  }

  ClattnContext* context_ = nullptr;
  ClattnQueue* queue_ = nullptr;
  ClattnLayer* layer_ = nullptr;
  ClattnCache* cache_ = nullptr;
  ClattnBuffer *rows_ = nullptr, *output_ = nullptr, *scales_ = nullptr;
};

TEST_F(CaptureOfTheCApi, TheQueryScaleFollowsThoseOfKeysAndValues) {
  EXPECT_SUCCESS(clattn_cache_set_scales_with_query(cache_, scales({0.5F, 0.25F, 0.125F}), 0));
  EXPECT_EQ(forward().value("q_scale", 0.0), 0.125);
  EXPECT_SUCCESS(
      clattn_cache_set_scales_with_query(cache_, scales({0.5F, 0.25F, 2.0F, 4.0F, 0.0625F}), 1));
  EXPECT_EQ(forward().value("q_scale", 0.0), 0.0625);
  EXPECT_SUCCESS(clattn_cache_set_scales(cache_, scales({0.5F, 0.25F, 0.125F}), 0));
  const nlohmann::json without = forward();
  EXPECT_TRUE(without.value("fp8_products", false));
  EXPECT_FALSE(without.contains("q_scale"));
}

TEST_F(CaptureOfTheCApi, LaunchesRunInTurnWhereTheStepSaysSo) {
  EXPECT_SUCCESS(clattn_cache_set_scales(cache_, scales({0.5F, 0.25F}), 0));
  ClattnStepOptions options = {};
  options.struct_size = sizeof options;
  for (const std::int32_t beside : {0, 1}) {
    options.side_by_side = beside;
    EXPECT_TRUE(forward(&options).value("side_by_side", true));
  }
  options.side_by_side = -1;
  EXPECT_FALSE(forward(&options).value("side_by_side", true));
}

}  // namespace test_capture_c_api
