#include <gtest/gtest.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/plugin.hpp>
#include <cstdint>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"

namespace test_refused_forward {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::AttentionOptions;
using clattn::AttentionTensors;
using clattn::ForwardOptions;
using layer_test::Device;
using layer_test::layer_options;

/// Elements of a token's rows.
struct Widths {
  std::size_t query, key, value, output;
};

/// Calls with an illegal tensor each, then one that is legal: only that one may change cache or
/// output.
void expect_no_trace(const Device& device, const AttentionOptions& options, const Widths& widths) {
  constexpr std::int32_t kTokens = 3;
  constexpr std::size_t kRows = 5;  // two of padding
  clattn::LayerRegistry layers;
  Attention layer(device.context, layers, options);
  const auto& backend = *layer.get_attn_backend();
  layer.bind_kv_cache(make_kv_cache(*device.context, device.queue, backend, layer.config(), 1));
  const auto builder = backend.make_builder(device.context, layer.config());
  const std::array<std::int32_t, 2> starts = {0, kTokens};
  const std::array<std::int32_t, 1> lens = {kTokens}, pages = {0};
  const auto& metadata =
      builder->build(device.queue, clattn::CommonAttentionMetadata::of(starts, lens, pages));
  const auto rows = [&](std::size_t width) {
    return device.upload(std::vector<float>(kRows * width, 1));
  };
  const clattn::Buffer query = rows(widths.query), key = rows(widths.key),
                       value = rows(widths.value), output = rows(widths.output),
                       small = device.upload({0});
  const AttentionTensors legal{.query = {query.handle()},
                               .key = {key.handle()},
                               .value = {value.handle()},
                               .output = {output.handle()}};
  struct Call {
    AttentionTensors tensors;
    ForwardOptions options{.num_rows = kRows};
  };
  std::array<Call, 8> calls;
  for (Call& call : calls) call.tensors = legal;
  calls[0].tensors.query.buffer = small.handle();
  calls[1].tensors.key.buffer = small.handle();
  calls[2].tensors.value.buffer = small.handle();
  calls[3].tensors.output.buffer = small.handle();
  calls[4].tensors.lse = small.handle();
  calls[5].options.custom_mask = query.handle();
  calls[6].options.num_rows = kRows + 1;
  calls[7].options.num_rows = kTokens - 1;
  const auto state = [&] {
    std::vector<float> all = device.download(layer.kv_cache()->buffer);
    const std::vector<float> rows_out = device.download(output);
    all.insert(all.end(), rows_out.begin(), rows_out.end());
    return all;
  };
  const std::vector<float> before = state();
  for (const Call& call : calls) {
    EXPECT_NE(test::error_text(
                  [&] { layer.forward(device.queue, call.tensors, &metadata, call.options); }),
              "no error")
        << &call - calls.data();
    EXPECT_EQ(state(), before) << &call - calls.data();
  }
  layer.forward(device.queue, legal, &metadata, {.num_rows = kRows});
  const std::vector<float> after = state();
  EXPECT_EQ(after.front(), 1);  // the first key
  EXPECT_EQ(after.back(), 0);   // the last row of padding
  device.queue.finish();
}

// A2.1
TEST(RefusedForward, LeavesNoTraceOfALayerOverPages) {
  for (const auto& context : all_contexts()) {
    expect_no_trace(Device(context), layer_options("layers.0"), {4 * 64, 2 * 64, 2 * 64, 4 * 64});
  }
}

TEST(RefusedForward, LeavesNoTraceOfALatentLayer) {
  for (const auto& context : all_contexts()) {
    AttentionOptions options = layer_options("layers.0");
    options.config.num_kv_heads = 1;
    options.config.head_size = 64 + 16;
    options.config.use_mla = true;
    options.config.rope_dim = 16;
    expect_no_trace(Device(context), options, {4 * 80, 64, 16, 4 * 64});
  }
}

TEST(RefusedForward, LeavesNoTraceOfAPluginsLayer) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path("none"));
  for (const auto& context : all_contexts()) {
    AttentionOptions options = layer_options("layers.0");
    options.config.head_size = 8;
    options.attn_backend = plugin.backend();
    expect_no_trace(Device(context), options, {4 * 8, 2 * 8, 2 * 8, 4 * 8});
  }
}

// The keys of encoders are in no cache, so only the output can show it.
TEST(RefusedForward, ZeroesNoRowOfAnEncoder) {
  const Device device(all_contexts().at(0));
  clattn::LayerRegistry layers;
  AttentionOptions options = layer_options("layers.0");
  options.config.attn_type = clattn::AttentionType::kEncoderOnly;
  Attention layer(device.context, layers, options);
  const auto builder = layer.get_attn_backend()->make_builder(device.context, layer.config());
  const std::array<std::int32_t, 2> starts = {0, 1};
  const std::array<std::int32_t, 1> lens = {1};
  const auto& metadata =
      builder->build(device.queue, clattn::CommonAttentionMetadata::of(starts, lens, {}));
  const std::vector<float> ones(std::size_t{2} * 4 * 64, 1);
  const clattn::Buffer rows = device.upload(ones), output = device.upload(ones);
  const clattn::TensorRef in{rows.handle()}, odd{rows.handle(), 1};
  EXPECT_EQ(
      test::error_text([&] {
        layer.forward(device.queue, {in, odd, in, {output.handle()}}, &metadata, {.num_rows = 2});
      }),
      "key, value: offsets 1, 0 and token_stride 128, legal: multiples of 8 elements");
  EXPECT_EQ(device.download(output), ones);
}

}  // namespace test_refused_forward
