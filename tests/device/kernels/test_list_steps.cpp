// Steps whose batches say of their requests what rows see: recorded ones, those that another step's
// plan is taken over for, and layers that differ from what a step was planned for.
#include <gtest/gtest.h>

#include <clattn/cascade.hpp>
#include <clattn/graph.hpp>
#include <clattn/plugin.hpp>
#include <functional>
#include <vector>

#include "device/graph_layer.hpp"
#include "device/small_call.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"

namespace test_list_steps {

using clattn::Direction;
using clattn::SpanRule;
using small_test::Batch;
using small_test::Call;
using test::error_text;

constexpr std::size_t kTokens = 3;  // of the batches below

clattn::AttentionConfig listing(std::int32_t window = 5) {
  clattn::AttentionConfig config = small_test::config();
  config.use_spans = config.use_directions = config.use_first_keys = true;
  config.use_keep_keys = true;
  config.span_rule = SpanRule::kClipLeft;
  config.sliding_window = window;
  return config;
}

clattn::BuilderOptions recordable() {
  clattn::BuilderOptions options = Call::builder_options();
  options.graph_batch_size = 2;
  options.decode_threshold = 2;
  return options;
}

/// Two queries of 11 keys, and one of 7.
struct Listed : Batch {
  std::vector<Direction> direction;
  std::vector<std::int32_t> first_keys, keep_keys, span_start_loc, spans;
  Listed(Direction of_first, std::int32_t first_key, std::vector<std::int32_t> spans_of_first,
         std::int32_t kept_of_first = 0)
      : Batch({0, 2, 3}, {11, 7}, {7, 3, 9, 5, 8, 0}),
        direction{of_first, Direction::kCausal},
        first_keys{0, first_key},
        keep_keys{kept_of_first, 0},
        spans(std::move(spans_of_first)) {
    const auto number = static_cast<std::int32_t>(spans.size() / 2);
    span_start_loc = {0, number, number};
    metadata.direction = direction;
    metadata.first_keys = first_keys;
    metadata.keep_keys = keep_keys;
    metadata.span_start_loc = span_start_loc;
    metadata.spans = spans;
  }
};

/// What the layer makes of a batch by a plan of its own.
std::vector<float> eager(const Call& call, const clattn::AttentionConfig& config,
                         const Batch& batch) {
  const auto builder = call.backend->make_builder(call.context, config, Call::builder_options());
  call.forward(builder->build(call.queue, batch.metadata));
  return call.rows(kTokens);
}

TEST(ListSteps, ARecordedStepReplaysWithOtherLists) {
  const Listed recorded(Direction::kCausal, 0, {}), canvas(Direction::kCanvas, 3, {}),
      spans(Direction::kCausal, 6, {7, 11}), both(Direction::kBothWays, 0, {0, 4, 8, 10}),
      kept(Direction::kCausal, 0, {}, 2);
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, listing(), recordable());
    std::vector<std::vector<float>> wanted;
    for (const Listed* each : {&recorded, &canvas, &spans, &both, &kept})
      wanted.push_back(eager(call, listing(), *each));
    for (std::size_t i = 1; i < wanted.size(); ++i) EXPECT_NE(wanted[i], wanted[0]);
    const auto& metadata = call.builder->build(call.queue, recorded.metadata);
    clattn::GraphCapture capture(call.queue);
    call.forward(metadata);
    const clattn::Graph graph = capture.end();
    std::size_t i = 0;
    for (const Listed* each : {&recorded, &canvas, &spans, &both, &kept}) {
      call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
      call.builder->build(call.queue, each->metadata);
      graph.replay(call.queue);
      EXPECT_EQ(call.rows(kTokens), wanted[i++]);
    }
  }
}

TEST(ListSteps, AnAttentionStateTakesTheListsOfItsSteps) {
  using namespace graph_test;  // NOLINT(google-build-using-namespace)
  clattn::AttentionOptions options = layer_options();
  options.config.use_first_keys = true;
  for (const auto& context : attention_test::all_contexts()) {
    Layer layer(context, options);
    AttentionState state = layer.state();
    clattn::Graph graph;
    {
      const auto capturing = state.graph_capture(2);
      graph = layer.record(state.graph_capture_get_metadata_for_batch(layer.queue, 2));
    }
    graph_test::Step step({6, 5});
    // The caches hold twos but for the new token's keys: only that is seen, or both are.
    for (const std::vector<std::int32_t>& first_keys :
         {std::vector{0, 4}, std::vector{5, 0}, std::vector{0, 0}}) {
      step.batch.first_keys = first_keys;
      state.prepare_graph_input_buffers(layer.queue, 2, step.batch);
      graph.replay(layer.queue);
      for (std::ptrdiff_t r = 0; r < 2; ++r) {
        const bool alone = first_keys[static_cast<std::size_t>(r)] > 0;
        EXPECT_EQ(layer.row(layer.out, r) == layer.row(layer.key, r), alone) << r;
      }
    }
    layer.queue.finish();
  }
}

TEST(ListSteps, UpdateBlockTableKeepsTheLists) {
  const Listed canvas(Direction::kCanvas, 3, {8, 11}, 1), plain(Direction::kCausal, 0, {});
  for (const auto& context : small_test::all_contexts()) {
    const Call call(context, listing()), other(context, listing());
    const std::vector<float> want = eager(call, listing(), canvas);
    EXPECT_NE(want, eager(call, listing(), plain));
    call.queue.write(call.out, std::vector<std::byte>(call.out.size_bytes()));
    const auto& taken = other.builder->build(call.queue, canvas.metadata);
    call.forward(call.builder->update_block_table(
        call.queue, taken,
        {.block_table = canvas.table, .block_table_stride = 3, .slot_mapping = {}}));
    EXPECT_EQ(call.rows(kTokens), want);
  }
}

TEST(ListSteps, LayersThatDifferFromTheirStepAreRefused) {
  const Call call(small_test::all_contexts().at(0), listing());
  const Listed batch(Direction::kCanvas, 3, {8, 11});
  const auto& metadata = call.builder->build(call.queue, batch.metadata);
  const auto refusal = [&](const std::function<void(clattn::AttentionConfig&)>& change) {
    clattn::AttentionConfig config = listing();
    change(config);
    const auto impl = call.backend->make_impl(call.context, config);
    return error_text([&] { impl->forward(call.queue, call.tensors(), call.cache, metadata); });
  };
  using Config = clattn::AttentionConfig;
  EXPECT_EQ(refusal([](Config&) {}), "no error");
  const std::string differs =
      "attn_metadata: planned for another window, span_rule, use_spans, use_directions, "
      "use_first_keys, use_keep_keys or use_trees than this layer's; legal: a builder with the "
      "layer's own";
  EXPECT_EQ(refusal([](Config& c) { c.sliding_window = 4; }), differs);
  EXPECT_EQ(refusal([](Config& c) { c.attention_chunk_size = 64; }), differs);
  EXPECT_EQ(refusal([](Config& c) { c.span_rule = SpanRule::kClipBoth; }), differs);
  EXPECT_EQ(refusal([](Config& c) {
              c.use_spans = false;
              c.span_rule = SpanRule::kWhole;
            }),
            differs);
  EXPECT_EQ(refusal([](Config& c) { c.use_directions = false; }), differs);
  EXPECT_EQ(refusal([](Config& c) { c.use_first_keys = false; }), differs);
  EXPECT_EQ(refusal([](Config& c) { c.use_keep_keys = false; }), differs);
  EXPECT_EQ(refusal([](Config& c) {
              c.use_spans = c.use_directions = c.use_first_keys = c.use_keep_keys = false;
              c.span_rule = SpanRule::kWhole;
            }),
            differs);
}

TEST(ListSteps, CausalBesideDirectionsIsRefused) {
  const Call call(small_test::all_contexts().at(0), listing());
  Listed batch(Direction::kCanvas, 0, {});
  batch.metadata.causal = true;
  EXPECT_EQ(error_text([&] { call.builder->build(call.queue, batch.metadata); }),
            "causal is true, legal with a direction for each request: none");
}

/// A batch with one list alone.
enum class List : std::uint8_t { kDirection, kSpans, kFirstKeys, kKeepKeys };
void keep_only(List list, clattn::CommonAttentionMetadata& batch) {
  if (list != List::kDirection) batch.direction = {};
  if (list != List::kFirstKeys) batch.first_keys = {};
  if (list != List::kKeepKeys) batch.keep_keys = {};
  if (list != List::kSpans) batch.span_start_loc = batch.spans = {};
}

TEST(ListSteps, CascadesRefuseWhatHidesThePrefix) {
  const Call call(small_test::all_contexts().at(0), listing());
  clattn::AttentionConfig config = listing();
  config.sliding_window = 0;
  config.span_rule = SpanRule::kWhole;
  config.use_trees = true;
  clattn::CascadeAttention cascade(call.context, *call.backend, config, Call::builder_options());
  Listed batch(Direction::kCausal, 3, {0, 2}, 1);
  batch.table[3] = batch.table[0];
  const auto refusal = [&] {
    return error_text([&] { cascade.build(call.queue, batch.metadata, 4); });
  };
  EXPECT_EQ(refusal(), "request 1: first_keys is 3, legal in a cascade: 0");
  batch.metadata.first_keys = {};
  EXPECT_EQ(refusal(), "no error");
  std::vector<std::int32_t> nodes = {0, batch.metadata.seq_lens[0], batch.metadata.seq_lens[0]};
  std::vector<std::int32_t> parents(static_cast<std::size_t>(nodes[1]));
  for (std::int32_t node = 0; node < nodes[1]; ++node)
    parents[static_cast<std::size_t>(node)] = node - 1;
  batch.metadata.span_start_loc = batch.metadata.spans = batch.metadata.keep_keys = {};
  batch.metadata.tree_start_loc = nodes;
  batch.metadata.tree_parents = parents;
  EXPECT_EQ(refusal(),
            "request 0: its tree has 11 nodes, legal in a cascade: 0 … 7 (its keys "
            "behind the common prefix)");
  batch.metadata.tree_start_loc = batch.metadata.tree_parents = {};
  clattn::AttentionConfig plain = small_test::config();
  clattn::CascadeAttention without(call.context, *call.backend, plain, Call::builder_options());
  EXPECT_EQ(error_text([&] { without.build(call.queue, batch.metadata, 4); }),
            "direction holds 2 elements, legal without use_directions: none");
}

TEST(ListSteps, PluginsRefuseThemByName) {
  const auto& context = small_test::all_contexts().at(0);
  const clattn::BackendPlugin plugin =
      clattn::load_backend_plugin(test::plugin_path("older_config"));  // takes none
  const auto queue = context->create_queue();
  const auto builder =
      plugin.backend()->make_builder(context, small_test::config(), Call::builder_options());
  const auto answer = [&](List list) {
    Listed batch(Direction::kCausal, 3, {0, 2});
    keep_only(list, batch.metadata);
    return error_text([&] { builder->build(queue, batch.metadata); });
  };
  EXPECT_EQ(answer(List::kDirection),
            "direction holds 2 elements, legal without use_directions: none");
  EXPECT_EQ(answer(List::kFirstKeys),
            "first_keys holds 2 elements, legal without use_first_keys: none");
  EXPECT_EQ(answer(List::kKeepKeys), "no error") << "its layers have no use_keep_keys";
  EXPECT_EQ(answer(List::kSpans), "no error") << "its layers have no use_spans";
  for (const auto& [name, field] : {std::pair{"use_spans", &clattn::AttentionConfig::use_spans},
                                    {"use_directions", &clattn::AttentionConfig::use_directions},
                                    {"use_first_keys", &clattn::AttentionConfig::use_first_keys},
                                    {"use_keep_keys", &clattn::AttentionConfig::use_keep_keys}})
    EXPECT_EQ(plugin.backend()->why_not(field, true).front(),
              std::string(name) + " not supported by REFERENCE: its takes_seen_keys is 0");
}

}  // namespace test_list_steps
