#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "device/step_model.hpp"
#include "support/error_text.hpp"

/// Recorded steps of mixed batches (BuilderOptions::graph_mixed): sizes count query tokens.
namespace test_graph_mixed {

using clattn::AttentionState;
using clattn::ReplayMode;
using step_model::Model;
using step_model::Rows;
using test::error_text;
using Lens = std::vector<std::int32_t>;

const Lens kContexts = {700, 31, 0, 12, 300, 16};
constexpr std::int32_t kLargest = 64, kSmall = 16;

class GraphMixed : public testing::TestWithParam<step_model::Form> {
 protected:
  const clattn::AttentionConfig config_ = step_model::config_of(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Forms, GraphMixed, testing::ValuesIn(step_model::kForms),
                         step_model::form_name);

clattn::BuilderOptions mixed_options(const Model& model, std::int32_t decode_threshold) {
  clattn::BuilderOptions options = model.options(decode_threshold);
  options.device_seq_lens = options.device_query_lens = false;
  options.graph_mixed = true;
  return options;
}

Lens contexts_of(const Lens& query_lens) {
  return {kContexts.begin(), kContexts.begin() + std::ssize(query_lens)};
}

// Prompts, chunks, decodes and drafts of any mixture, by the graph of their tokens' class.
TEST_P(GraphMixed, Case40_RunsAnyBatchOfItsClass) {
  const struct {
    Lens query_lens;
    std::int32_t size;
  } steps[] = {{{1, 1, 40, 3, 1, 9}, kLargest},
               {{37, 0, 5}, kLargest},
               {{64}, kLargest},
               {{0, 0, 64}, kLargest},
               {{1, 1, 1}, kSmall},
               {{16}, kSmall},
               {{9, 2, 1, 1}, kSmall},
               {{0, 0}, kSmall},
               {{1, 1, 1, 1, 1, 1}, kSmall},
               {{30, 20, 10, 10}, 0}};
  for (const auto& context : attention_test::all_contexts()) {
    for (const auto mode : {ReplayMode::kLaunchList, ReplayMode::kAuto}) {
      for (const std::int32_t num_splits : {0, 5}) {
        Model model(context, config_, kContexts, 80);
        clattn::BuilderOptions options = mixed_options(model, 3);
        options.num_splits = num_splits;
        AttentionState state(context, model.backend, config_, options);
        std::map<std::int32_t, clattn::Graph> graphs;
        {
          const auto capturing = state.graph_capture(kLargest);
          for (const std::int32_t size : {kLargest, kSmall}) {
            const auto& metadata = state.graph_capture_get_metadata_for_batch(model.queue, size);
            model.queue.finish();
            clattn::GraphCapture capture(model.queue, mode);
            model.launch(metadata);
            graphs[size] = capture.end();
          }
        }
        for (const auto& step : steps) {
          const Rows rows(step.query_lens, contexts_of(step.query_lens));
          const auto how = state.begin_forward(model.queue, model.batch(rows));
          EXPECT_EQ(how.graph_batch_size, step.size)
              << fmt::format("{}", fmt::join(step.query_lens, ","));
          model.refill();
          if (how.graph_batch_size > 0) {
            graphs[how.graph_batch_size].replay(model.queue);
          } else {
            model.launch(*how.metadata);
          }
          model.expect(rows, fmt::format("{} by {}, {} splits", fmt::join(step.query_lens, ","),
                                         how.graph_batch_size, num_splits));
        }
      }
    }
  }
}

// Three requests in a class of 8, whose decodes' rows the device shares out.
TEST_P(GraphMixed, Case40_QueryLengthsOfTheDevice) {
  constexpr std::int32_t kSize = 8, kReqs = 6;
  for (const auto& context : attention_test::all_contexts()) {
    Model model(context, config_, kContexts, kSize);
    clattn::BuilderOptions options = model.options(3);
    options.graph_mixed = true;
    AttentionState state(context, model.backend, config_, options);
    const clattn::Buffer starts = context->allocate((kReqs + 1) * 4);
    const clattn::Buffer lens = context->allocate(kReqs * 4);
    clattn::DeviceErrors errors(*context, model.queue);
    clattn::Graph graph;
    {
      const auto capturing = state.graph_capture(kSize);
      const auto& metadata = state.graph_capture_get_metadata_for_batch(model.queue, kSize);
      model.queue.finish();
      clattn::GraphCapture capture(model.queue);
      clattn::update_query_lens(model.queue, metadata, {starts, lens}, errors);
      model.launch(metadata);
      graph = capture.end();
    }
    Rows host({2, 2, 4}, contexts_of({2, 2, 4}));
    for (const std::size_t r : {std::size_t{0}, std::size_t{1}}) host.lens[r] += 1;
    state.prepare_graph_input_buffers(model.queue, kSize, model.batch(host));
    for (const Lens& given : {Lens{3, 1, 4}, Lens{1, 3, 4}, Lens{2, 2, 4}}) {
      const Rows device(given, contexts_of(given));
      Rows padded = device;
      padded.starts.resize(kReqs + 1, device.starts.back());
      padded.lens.resize(kReqs);
      model.queue.write(starts, std::as_bytes(std::span(padded.starts)));
      model.queue.write(lens, std::as_bytes(std::span(padded.lens)));
      model.refill();
      graph.replay(model.queue);
      model.expect(device, fmt::format("{}", fmt::join(given, ",")));
    }
    errors.check(model.queue);
  }
}

TEST(GraphMixedSteps, WhatDoesNotFitIsRefused) {
  const auto& context = attention_test::all_contexts().at(0);
  const clattn::AttentionConfig config = step_model::config_of(step_model::kForms[0]);
  const Model model(context, config, kContexts, 80);
  clattn::BuilderOptions options = mixed_options(model, 1);
  EXPECT_EQ(error_text([&] { model.backend.make_builder(context, config, options); }),
            "graph_mixed: true, legal without a graph_batch_size: false");
  AttentionState state(context, model.backend, config, options);
  {
    const auto capturing = state.graph_capture(kLargest);
    for (const std::int32_t size : {kLargest, kSmall, 2})
      state.graph_capture_get_metadata_for_batch(model.queue, size);
  }
  const auto prepare_error = [&](std::int32_t size, const Lens& query_lens) {
    const Rows rows(query_lens, contexts_of(query_lens));
    return error_text(
        [&] { state.prepare_graph_input_buffers(model.queue, size, model.batch(rows)); });
  };
  EXPECT_EQ(prepare_error(kSmall, {10, 7}),
            "num_actual_tokens is 17, legal: 0 … 16 (graph_pad_size)");
  EXPECT_EQ(prepare_error(2, {1, 1, 0}), "num_reqs is 3, legal: 0 … 2 (graph_pad_size)");
  EXPECT_EQ(prepare_error(kSmall, {10, 6}), "no error");
  const Rows both_ways({2, 1}, contexts_of({2, 1}));
  clattn::CommonAttentionMetadata batch = model.batch(both_ways);
  batch.causal = false;
  EXPECT_EQ(error_text([&] { state.prepare_graph_input_buffers(model.queue, kSmall, batch); }),
            "causal is false, legal: true: recorded steps of several query tokens are causal");
  clattn::AttentionConfig cross = config;
  cross.attn_type = clattn::AttentionType::kEncoderDecoder;
  options.graph_batch_size = 8;
  EXPECT_EQ(error_text([&] { model.backend.make_builder(context, cross, options); },
                       clattn::ErrorCode::kUnsupported),
            "graph_mixed: true, legal with attn_type encoder_decoder: false");
}

}  // namespace test_graph_mixed
