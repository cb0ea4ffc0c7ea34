#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/flashinfer.hpp>
#include <clattn/plugin.hpp>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/graph_layer.hpp"
#include "support/plugin.hpp"

/// AttentionState's protocol (SPEC A2.7), and what recorded steps are bound to. One layer of one
/// KV head whose caches are page by page, so that a token's place is easily said.
namespace test_graph_state {

using attention_test::all_contexts;
using clattn::AttentionState;
using clattn::CommonAttentionMetadata;
using namespace graph_test;

std::string capture_error(AttentionState& state, std::int32_t max_batch_size) {
  return error_text([&] { const auto capturing = state.graph_capture(max_batch_size); });
}

const std::vector<float> kTwos(kDims, 2);

TEST(GraphState, A2_7_CallsOutOfOrderAreRefused) {
  Layer layer(all_contexts().front());
  AttentionState state = layer.state();
  const Step step({3, 5});
  const auto get_metadata = [&](std::int32_t size) {
    return error_text([&] { state.graph_capture_get_metadata_for_batch(layer.queue, size); });
  };
  EXPECT_EQ(get_metadata(2),
            "graph_capture_get_metadata_for_batch: called outside of graph_capture(), legal: "
            "inside");
  EXPECT_EQ(error_text([&] { state.graph_clone(2); }),
            "graph_clone: called outside of graph_capture(), legal: inside");
  EXPECT_EQ(capture_error(state, 0), "max_batch_size is 0, legal: >= 1");
  {
    const auto capturing = state.graph_capture(kSize);
    EXPECT_EQ(capture_error(state, kSize), "graph_capture: this state is capturing already");
    EXPECT_EQ(get_metadata(5), "batch_size is 5, legal: 1 … 4 (max_batch_size)");
    EXPECT_EQ(error_text([&] { state.graph_clone(2); }),
              "batch_size 2 was not captured; legal: a size that was");
    EXPECT_EQ(get_metadata(2), "no error");
    EXPECT_EQ(error_text([&] { state.graph_clone(2); }), "no error");
    EXPECT_EQ(error_text([&] { state.begin_forward(layer.queue, step.batch); }),
              "begin_forward: called inside of graph_capture(), legal: outside");
  }
  EXPECT_EQ(get_metadata(2).substr(0, 45), "graph_capture_get_metadata_for_batch: called ");
  EXPECT_EQ(capture_error(state, 5),
            "max_batch_size is 5, legal: 1 … 4 (the first graph_capture's)");
  EXPECT_EQ(capture_error(state, 3), "no error");
  EXPECT_EQ(state.begin_forward(layer.queue, step.batch).graph_batch_size, 2);
  clattn::BuilderOptions options = builder_options();
  options.graph_batch_size = 4;
  EXPECT_EQ(error_text([&] { layer.state(options); }),
            "graph_batch_size is 4, legal: 0: graph_capture() says it");
  layer.queue.finish();
}

// A2.7: "encoder-decoder capture only for backends named …": who cannot says so, by name.
// A1.1: what a size is recorded with stores nothing and attends to nothing, as for a warm-up.
TEST(GraphState, A1_1_CaptureMetadataHoldsNoRequest) {
  for (const auto& context : all_contexts()) {
    Layer layer(context);
    const std::vector<float> cache = layer.download(layer.attention.kv_cache()->buffer);
    AttentionState state = layer.state();
    const auto capturing = state.graph_capture(kSize);
    for (const std::int32_t size : {4, 3}) {
      const auto& metadata = clattn::metadata_as<clattn::FlashInferMetadata>(
          state.graph_capture_get_metadata_for_batch(layer.queue, size));
      EXPECT_EQ(metadata.num_actual_tokens(), 0);
      EXPECT_EQ(metadata.split(), clattn::BatchSplit{});
      EXPECT_EQ(metadata.seq_lens.size(), 0U);
      EXPECT_EQ(metadata.paged_kv_indices.size(), 0U);
      const auto rows = static_cast<std::size_t>(size);
      EXPECT_TRUE(
          std::ranges::equal(metadata.paged_kv_indptr, std::vector<std::int32_t>(rows + 1, 0)));
      EXPECT_TRUE(std::ranges::equal(metadata.slot_mapping(),
                                     std::vector<std::int64_t>(rows, clattn::kPadSlotId)));
      layer.forward(metadata);  // a warm-up
      EXPECT_EQ(layer.download(layer.attention.kv_cache()->buffer), cache);
      EXPECT_EQ(layer.download(layer.out), std::vector<float>(kSize * kDims, -7));
    }
  }
}

// A4.5: `_workspace_buffer`
TEST(GraphState, A4_5_AStateTakesTheWorkspaceThatItIsGiven) {
  const Layer layer(all_contexts().front());
  clattn::BuilderOptions options = builder_options();
  options.num_splits = 2;  // partial results, which need it
  options.workspace = std::make_shared<clattn::AttentionWorkspace>();
  AttentionState state = layer.state(options);
  EXPECT_EQ(options.workspace->buffer.size_bytes(), 0U);
  const auto capturing = state.graph_capture(kSize);
  state.graph_capture_get_metadata_for_batch(layer.queue, kSize);
  EXPECT_GT(options.workspace->buffer.size_bytes(), 0U);
  layer.queue.finish();
}

TEST(GraphState, A2_7_ABackendThatCannotBeRecordedNamesItself) {
  Layer layer(all_contexts().front());
  clattn::AttentionConfig config = layer.attention.config();
  config.attn_type = clattn::AttentionType::kEncoderDecoder;
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path("none"));
  AttentionState state(layer.context, *plugin.backend(), config, builder_options());
  EXPECT_EQ(capture_error(state, kSize),
            "backend REFERENCE does not support this configuration: attn_type "
            "encoder_decoder not supported by plugins");
}

// A4.5 begin_forward: decodes go to the state of their size, other steps to the state's own plan.
TEST(GraphState, A4_5_StepsThatNoGraphHoldsAreEager) {
  Layer layer(all_contexts().front());
  AttentionState state = layer.state();
  const Step three({3, 5, 7}), five({3, 5, 7, 2, 1});
  const std::vector<std::int32_t> starts{0, 3}, lens{3}, table{0, 1, 2};
  const auto prefill = CommonAttentionMetadata::of(starts, lens, table);
  EXPECT_EQ(state.begin_forward(layer.queue, three.batch).graph_batch_size, 0);  // none captured
  clattn::Graph graph;
  {
    const auto capturing = state.graph_capture(kSize);
    graph = layer.record(
        state.graph_capture_get_metadata_for_batch(layer.context->create_queue(), kSize));
  }
  for (const auto* batch : {&five.batch, &prefill}) {
    const clattn::ForwardStep step = state.begin_forward(layer.queue, *batch);
    EXPECT_EQ(step.graph_batch_size, 0);
    EXPECT_EQ(step.metadata->slot_mapping().size(),
              static_cast<std::size_t>(batch->num_actual_tokens));  // not padded
    clattn::GraphCapture capture(layer.queue);
    EXPECT_EQ(error_text([&] { layer.forward(*step.metadata); }),
              "graph capture: metadata of a builder without graph_batch_size cannot be recorded");
  }
  ASSERT_EQ(state.begin_forward(layer.queue, three.batch).graph_batch_size, kSize);
  graph.replay(layer.queue);
  EXPECT_EQ(layer.key_at(*layer.attention.kv_cache(), 2), layer.row(layer.key, 0));
}

// A2.7 graph_clone: what the runner keeps beside a graph serves it when the state is gone.
TEST(GraphState, A2_7_AClonePreparesItsSize) {
  Layer layer(all_contexts().front());
  auto state = std::make_unique<AttentionState>(layer.state());
  const auto clone = [&] {
    const auto capturing = state->graph_capture(kSize);
    state->graph_capture_get_metadata_for_batch(layer.queue, kSize);
    state->graph_capture_get_metadata_for_batch(layer.queue, 2);
    return std::make_unique<AttentionState>(state->graph_clone(2));
  }();
  clattn::Graph graph;
  {
    const clattn::Queue other = layer.context->create_queue();
    const auto capturing = clone->graph_capture(2);
    graph = layer.record(clone->graph_capture_get_metadata_for_batch(other, 2));
    other.finish();
  }
  state.reset();
  const Step two({3, 5}), three({3, 5, 7});
  EXPECT_EQ(clone->batch_size_for(two.batch), 2);
  EXPECT_EQ(clone->batch_size_for(three.batch), 0);  // another size of the state it came from
  clone->prepare_graph_input_buffers(layer.queue, 2, two.batch);
  graph.replay(layer.queue);
  EXPECT_EQ(layer.key_at(*layer.attention.kv_cache(), 2), layer.row(layer.key, 0));
  EXPECT_EQ(layer.key_at(*layer.attention.kv_cache(), 3 * kPage + 4), layer.row(layer.key, 1));
}

// A2.7, A4.5 get_graph_input_buffers: the runner may say other slots; bad ones store nothing.
TEST(GraphState, A2_7_TheRunnerMayWriteSlots) {
  Layer layer(all_contexts().front());
  AttentionState state = layer.state();
  clattn::Graph graph;
  clattn::GraphInputBuffers buffers;
  {
    const auto capturing = state.graph_capture(kSize);
    const clattn::Queue other = layer.context->create_queue();
    const auto& metadata = state.graph_capture_get_metadata_for_batch(other, kSize);
    buffers = AttentionState::get_graph_input_buffers(metadata);
    graph = layer.record(metadata);
    other.finish();
  }
  ASSERT_EQ(buffers.num_slots, kSize);
  const Step step({3, 5, 7});
  state.prepare_graph_input_buffers(layer.queue, kSize, step.batch);
  std::vector<std::int64_t> slots(kSize);
  layer.queue.read(buffers.slot_mapping, std::as_writable_bytes(std::span(slots)));
  EXPECT_EQ(slots, (std::vector<std::int64_t>{2, 16, 30, clattn::kPadSlotId}));
  slots = {41, std::int64_t{1} << 40, 30, -9};
  layer.queue.write(buffers.slot_mapping, std::as_bytes(std::span(slots)));
  graph.replay(layer.queue);
  const clattn::KVCache& cache = *layer.attention.kv_cache();
  EXPECT_EQ(layer.key_at(cache, 41), layer.row(layer.key, 0));
  EXPECT_EQ(layer.key_at(cache, 30), layer.row(layer.key, 2));
  for (const std::int64_t slot : {2, 16, 40, 42}) EXPECT_EQ(layer.key_at(cache, slot), kTwos);
  const auto builder =
      layer.attention.get_attn_backend()->make_builder(layer.context, layer.attention.config());
  const auto& fixed = builder->build(layer.queue, step.batch);
  EXPECT_EQ(error_text([&] { AttentionState::get_graph_input_buffers(fixed); }),
            "attn_metadata: of a step that is not recorded; legal: of an AttentionState");
}

// Padding rows of a layer's output are zero in every replay, whatever step the buffers held while
// the layers were recorded: a warm-up with a full batch, say.
TEST(GraphState, PaddingRowsOfALayerAreZeroInEveryReplay) {
  for (const auto& context : all_contexts()) {
    Layer layer(context);
    AttentionState state = layer.state();
    clattn::Graph graph;
    const Step full({3, 5, 7, 1});
    {
      const auto capturing = state.graph_capture(kSize);
      state.graph_capture_get_metadata_for_batch(layer.queue, kSize);
      const auto& metadata = state.prepare_graph_input_buffers(layer.queue, kSize, full.batch);
      layer.forward(metadata, kSize);
      graph = layer.record(metadata, kSize);
    }
    graph.replay(layer.queue);
    const std::vector<float> all = layer.download(layer.out);
    for (const std::vector<std::int32_t>& lengths :
         {std::vector<std::int32_t>{3}, std::vector<std::int32_t>{},
          std::vector<std::int32_t>{3, 5}}) {
      const Step some(lengths);
      state.begin_forward(layer.queue, some.batch);
      graph.replay(layer.queue);
      std::vector<float> want(all.begin(),
                              all.begin() + static_cast<std::ptrdiff_t>(lengths.size()) * kDims);
      want.resize(all.size(), 0.0F);
      EXPECT_EQ(layer.download(layer.out), want) << lengths.size();
    }
    clattn::GraphCapture capture(layer.queue);
    const clattn::Queue other = layer.context->create_queue();
    const Step one({3});
    const auto& metadata = state.prepare_graph_input_buffers(other, kSize, one.batch);
    EXPECT_EQ(error_text([&] { layer.forward(metadata, 3); }),
              "num_rows is 3, legal: 0, or at least the recorded step's 4 tokens");
    other.finish();
  }
}

// Binding another cache to the layer does not reach into its graphs.
TEST(GraphState, AGraphGoesOnUsingTheCacheItWasRecordedWith) {
  Layer layer(all_contexts().front());
  AttentionState state = layer.state();
  clattn::Graph graph;
  {
    const auto capturing = state.graph_capture(1);
    const clattn::Queue other = layer.context->create_queue();
    graph = layer.record(state.graph_capture_get_metadata_for_batch(other, 1));
    other.finish();
  }
  const clattn::KVCache old = *layer.attention.kv_cache();
  layer.attention.bind_kv_cache(layer.new_cache());
  const Step step({3});
  state.begin_forward(layer.queue, step.batch);
  graph.replay(layer.queue);
  EXPECT_EQ(layer.key_at(old, 2), layer.row(layer.key, 0));
  EXPECT_EQ(layer.key_at(*layer.attention.kv_cache(), 2), kTwos);
}

/// The least of 50 readings, 1 ms apart: PoCL's threads release their references some time after
/// finish() returns.
cl_uint references(const clattn::Buffer& buffer) {
  cl_uint least = std::numeric_limits<cl_uint>::max();
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cl_uint count = 0;
    clGetMemObjectInfo(buffer.handle(), CL_MEM_REFERENCE_COUNT, sizeof(count), &count, nullptr);
    least = std::min(least, count);
  }
  return least;
}

// Drivers do not keep what kernels are bound to, and some of it the application never sees: slopes,
// the plan, partial results.
TEST(GraphState, AGraphKeepsWhatItIsBoundTo) {
  const auto& context = all_contexts().front();
  clattn::AttentionOptions options = layer_options();
  options.config.alibi_slopes = {0.5F};
  auto layer = std::make_unique<Layer>(context, options);
  auto state = std::make_unique<AttentionState>(layer->state());
  clattn::Graph graph;
  const Step step({9, 12});
  const cl_uint before = references(layer->query);
  {
    const auto capturing = state->graph_capture(kSize);
    const clattn::Queue other = context->create_queue();
    const auto& metadata = state->graph_capture_get_metadata_for_batch(other, kSize);
    clattn::GraphCapture capture(layer->queue);
    layer->forward(metadata);
    EXPECT_GT(references(layer->query), before);  // by us; a command buffer comes on top
    graph = capture.end();
    other.finish();
  }
  layer->queue.fill(layer->out, 0, 0, layer->out.size_bytes());
  state->begin_forward(layer->queue, step.batch);
  graph.replay(layer->queue);
  const Device device = *layer;
  const clattn::Buffer out = layer->out;
  const std::vector<float> want = device.download(out);
  device.queue.fill(out, 0, 0, out.size_bytes());
  const clattn::Buffer query = layer->query;
  const cl_uint held = references(query);
  state.reset();
  layer.reset();
  EXPECT_EQ(references(query), held - 1);  // only the layer's own
  graph.replay(device.queue);
  EXPECT_EQ(device.download(out), want);
  graph = {};
  device.queue.finish();
  EXPECT_EQ(references(query), 1U);
}

// Every request as long as the limits allow, then the empty step: the recorded memory never moves.
TEST(GraphState, TheLongestStepFitsTheMemoryThatWasRecorded) {
  Layer layer(all_contexts().front());
  clattn::AttentionConfig config = layer.attention.config();
  config.head_size = 32;
  config.block_size = 16;
  config.dtype = clattn::DType::kF16;
  clattn::BuilderOptions options = builder_options();
  options.limits.max_model_len = kWidth * 16;
  for (const std::string name : {"FLASHINFER", "XFORMERS"}) {  // page lists; a dense table
    const auto& backend = *clattn::get_attn_backend(config, &layer.context->capabilities(), name);
    AttentionState state(layer.context, backend, config, options);
    cl_mem memory = nullptr;
    {
      const auto capturing = state.graph_capture(kSize);
      memory = state.graph_capture_get_metadata_for_batch(layer.queue, kSize).slot_mapping_buffer();
    }
    const Step longest(std::vector<std::int32_t>(kSize, kWidth * 16)), empty({});
    for (const Step* step : {&longest, &empty}) {
      const auto& metadata = state.prepare_graph_input_buffers(layer.queue, kSize, step->batch);
      EXPECT_EQ(metadata.slot_mapping_buffer(), memory) << name;
      EXPECT_EQ(metadata.num_actual_tokens(), step->batch.num_actual_tokens);
    }
    const Step too_long({3, kWidth * 16 + 1});
    EXPECT_EQ(error_text([&] { state.begin_forward(layer.queue, too_long.batch); }),
              "request 1: seq_lens is 49, legal: 1 … 48 (its 3 pages of 16 hold 48 tokens, it "
              "needs 4 pages)");
  }
  layer.queue.finish();
}

}  // namespace test_graph_state
