// Layers whose batches say of their requests what rows see, with a cache and before there is one.
#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "oracle/oracle.hpp"

namespace test_layer_lists {

using clattn::Direction;
using layer_test::kShape;
using layer_test::Step;

/// Prompts of 20, 5 and 18 tokens, and what is said of them.
struct Prompts {
  Step step{kShape, 7};
  std::vector<Direction> direction = {Direction::kCausal, Direction::kCanvas, Direction::kBothWays};
  std::vector<std::int32_t> first_keys = {3, 0, 17};
  std::vector<std::int32_t> span_start_loc = {0, 2, 2, 2}, spans = {1, 6, 9, 40};

  Prompts() {
    std::int32_t page = 0;
    for (const std::int32_t query_len : {20, 5, 18}) {
      step.add_request(query_len, 0, {page, page + 1});
      page += 2;
    }
  }
  clattn::CommonAttentionMetadata batch() const {
    auto batch = step.batch();
    batch.direction = direction;
    batch.first_keys = first_keys;
    batch.span_start_loc = span_start_loc;
    batch.spans = spans;
    return batch;
  }
  oracle::AttentionCase truth() const {
    oracle::AttentionCase truth = step.truth();
    truth.window_left = 7;
    truth.window_right = 2;
    truth.looks = {oracle::Looks::kBack, oracle::Looks::kCanvas, oracle::Looks::kBothWays};
    truth.first_keys = first_keys;
    truth.spans = {{0, 1, 6}, {0, 9, 40}};
    truth.span_cut = oracle::SpanCut::kBoth;
    return truth;
  }
};

TEST(LayerLists, HoldWithACacheAndBeforeThereIsOne) {
  clattn::AttentionOptions options = layer_test::layer_options("layers.0");
  options.config.window_left = 7;
  options.config.window_right = 2;
  options.config.use_spans = options.config.use_directions = options.config.use_first_keys = true;
  options.config.span_rule = clattn::SpanRule::kClipBoth;
  const Prompts prompts;
  for (const auto& context : attention_test::all_contexts()) {
    const layer_test::Device device(context);
    clattn::LayerRegistry layers;
    clattn::Attention layer(context, layers, options);
    const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
    const auto& metadata = builder->build(device.queue, prompts.batch());
    Step::expect_truth(prompts.step.run(device, layer, &metadata), prompts.truth());
    layer.bind_kv_cache(
        make_kv_cache(*context, device.queue, *layer.get_attn_backend(), layer.config(), 6));
    Step::expect_truth(prompts.step.run(device, layer, &metadata), prompts.truth());
    device.queue.finish();
  }
}

// Spans and kept keys are for the layers that look at them, also where all share one batch.
TEST(LayerLists, OneBatchServesLayersOfAllKinds) {
  Step step(kShape, 9);
  step.add_request(20, 0, {0, 1});
  step.add_request(25, 0, {2, 3});
  const std::vector<std::int32_t> keep_keys = {3, 15};
  const std::vector<std::int32_t> span_start_loc = {0, 1, 1}, spans = {15, 18};
  auto batch = step.batch();
  batch.keep_keys = keep_keys;
  batch.span_start_loc = span_start_loc;
  batch.spans = spans;
  const auto check = [&](bool windowed, bool keeps, bool images) {
    clattn::AttentionOptions options = layer_test::layer_options("layers.0");
    options.config.sliding_window = windowed ? 4 : 0;
    options.config.use_keep_keys = keeps;
    options.config.use_spans = images;
    oracle::AttentionCase truth = step.truth();
    if (windowed) truth.window_left = truth.window_right = 3;
    if (keeps) truth.keep_keys = keep_keys;
    if (images) truth.spans = {{0, 15, 18}};
    for (const auto& context : attention_test::all_contexts()) {
      const layer_test::Device device(context);
      clattn::LayerRegistry layers;
      clattn::Attention layer(context, layers, options);
      layer.bind_kv_cache(
          make_kv_cache(*context, device.queue, *layer.get_attn_backend(), layer.config(), 4));
      const auto builder = layer.get_attn_backend()->make_builder(context, layer.config());
      Step::expect_truth(step.run(device, layer, &builder->build(device.queue, batch)), truth);
      device.queue.finish();
    }
  };
  for (const bool windowed : {false, true})
    for (const bool keeps : {false, true})
      for (const bool images : {false, true}) check(windowed, keeps, images);
}

}  // namespace test_layer_lists
