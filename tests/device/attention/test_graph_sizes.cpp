#include <gtest/gtest.h>

#include <clattn/clattn.hpp>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "device/graph_layer.hpp"
#include "opencl/runtime.hpp"

/// Which graphs a prepared step may be replayed with, and how much of them is launched.
namespace test_graph_sizes {

using attention_test::all_contexts;
using clattn::AttentionState;
using namespace graph_test;

// A2.7: what a graph reads is laid out for one size. Another size's graph would run a wrong step.
TEST(GraphState, A2_7_AGraphOfAnotherSizeThanPreparedIsRefused) {
  Layer layer(all_contexts().front());
  AttentionState state = layer.state();
  std::map<std::int32_t, clattn::Graph> graphs;
  {
    const auto capturing = state.graph_capture(4);
    for (const std::int32_t size : {4, 2})
      graphs[size] = layer.record(state.graph_capture_get_metadata_for_batch(layer.queue, size));
  }
  const auto replay_error = [&](std::int32_t size) {
    return error_text([&] { graphs[size].replay(layer.queue); });
  };
  const std::string of_2 =
      "replay: the graph of batch_size 2, legal: that of 4, which its buffers are prepared for";
  const std::string of_4 =
      "replay: the graph of batch_size 4, legal: that of 2, which its buffers are prepared for";
  const Step one({3}), three({3, 5, 2});
  state.prepare_graph_input_buffers(layer.queue, 4, one.batch);
  EXPECT_EQ(replay_error(2), of_2);
  EXPECT_EQ(replay_error(4), "no error");
  state.prepare_graph_input_buffers(layer.queue, 2, one.batch);
  EXPECT_EQ(replay_error(4), of_4);
  EXPECT_NE(error_text([&] { state.prepare_graph_input_buffers(layer.queue, 2, three.batch); }),
            "no error");  // then what was there stays
  EXPECT_EQ(replay_error(2), "no error");
  EXPECT_EQ(state.begin_forward(layer.queue, three.batch).graph_batch_size, 4);
  EXPECT_EQ(replay_error(2), of_2);
  layer.queue.finish();
}

/// Replays a step of two splits a tile, of none and of no requests; `joins`: decode joins splits
/// itself.
void expect_no_padding(Layer& layer, bool joins) {
  clattn::BuilderOptions options = builder_options();
  options.num_splits = 2;
  AttentionState state = layer.state(options);
  clattn::Graph graph;
  {
    const auto capturing = state.graph_capture(4);
    graph = layer.record(state.graph_capture_get_metadata_for_batch(layer.queue, 4));
  }
  const std::size_t all = joins ? 2 : 3;  // the cache's, decode, and merge
  EXPECT_EQ(graph.num_launches(), all);
  const clattn::Queue other = layer.context->create_queue();
  const auto launched = [&](const Step& step, clattn::Event* event) {
    state.prepare_graph_input_buffers(layer.queue, 4, step.batch);
    layer.queue.finish();
    const std::uint64_t before = clattn::detail::dispatch_count();
    graph.replay(other, event);
    other.finish();
    return clattn::detail::dispatch_count() - before;
  };
  EXPECT_EQ(launched(Step({3, 9}), nullptr), all);
  const Step step({3, kPage});
  EXPECT_EQ(launched(step, nullptr), 2U);  // single pages are not split
  const auto by_list = layer.download(layer.out);
  clattn::Event event;
  EXPECT_EQ(launched(step, &event), all);  // the last one tells of the end
  event.wait();
  const Step nothing({});
  EXPECT_EQ(launched(nothing, nullptr), 1U);
  state.prepare_graph_input_buffers(layer.queue, 4, step.batch);
  graph.replay(layer.queue);
  EXPECT_EQ(layer.download(layer.out), by_list);
}

// One by one, launches are as many as the step needs; on a queue that the graph was not recorded
// for they are always one by one.
TEST(GraphState, LaunchesOneByOneLeavePaddingOut) {
  for (const auto& context : all_contexts()) {
    const clattn::DeviceCapabilities& device = context->capabilities();
    Layer layer(context);
    expect_no_padding(layer, device.inline_ptx || device.kind == clattn::DeviceKind::kCpu);
    clattn::AttentionOptions scalar = layer_options();
    scalar.config.kernel_family = clattn::KernelFamily::kGpu;
    Layer by_launch(context, scalar);
    expect_no_padding(by_launch, false);
  }
}

// While a step is recorded, nothing is known of the keys that its replays will have.
TEST(GraphState, RecordedCrossAttentionReadsTheKeysOfItsReplays) {
  constexpr std::size_t kRow = 64, kTokens = 2;
  for (const auto& context : all_contexts()) {
    const clattn::AttentionConfig config{.num_heads = 1,
                                         .num_kv_heads = 1,
                                         .head_size = static_cast<std::int32_t>(kRow),
                                         .block_size = 0,
                                         .dtype = clattn::DType::kF32,
                                         .attn_type = clattn::AttentionType::kEncoderDecoder};
    const auto& backend = *clattn::get_attn_backend(config, &context->capabilities());
    const auto impl = backend.make_impl(context, config);
    clattn::BuilderOptions options;
    options.limits.num_blocks = 1;
    options.limits.max_model_len = kRow;
    AttentionState state(context, backend, config, options);
    const clattn::Queue queue = context->create_queue();
    const auto rows_of = [&](const std::vector<float>& rows) {
      std::vector<float> elements;
      for (const float row : rows) elements.insert(elements.end(), kRow, row);
      clattn::Buffer buffer = context->allocate(elements.size() * sizeof(float));
      queue.write(buffer, std::as_bytes(std::span(elements)));
      return buffer;
    };
    // One key of each request has all the weight.
    const clattn::Buffer query = rows_of({100, 100}), keys = rows_of({0, 0, 1, 0, 0, 1, 0, 0}),
                         values = rows_of({10, 11, 12, 13, 14, 15, 16, 17}),
                         out = rows_of({-1, -1});
    clattn::AttentionTensors tensors{.query = {query.handle()},
                                     .key = {keys.handle()},
                                     .value = {values.handle()},
                                     .output = {out.handle()}};
    clattn::Graph graph;
    {
      const auto capturing = state.graph_capture(kTokens);
      const auto& metadata = state.graph_capture_get_metadata_for_batch(queue, kTokens);
      clattn::GraphCapture capture(queue);
      EXPECT_EQ(error_text([&] {
                  impl->forward_encoder(queue, {.query = tensors.query, .output = tensors.output},
                                        metadata);
                }),
                "key: no buffer");  // replays would read keys that are not there
      impl->forward_encoder(queue, tensors, metadata);
      graph = capture.end();
    }
    const std::vector<std::int32_t> starts{0, 1, 2}, lens{4, 4}, key_starts{0, 4, 8};
    auto batch = clattn::CommonAttentionMetadata::of(starts, lens, {});
    batch.key_start_loc = key_starts;
    ASSERT_EQ(state.begin_forward(queue, batch).graph_batch_size, 2);
    graph.replay(queue);
    std::vector<float> got(kTokens * kRow);
    queue.read(out, std::as_writable_bytes(std::span(got)));
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], i < kRow ? 12 : 15, 1e-5);
  }
}

}  // namespace test_graph_sizes
