#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/forced_variant.hpp"
#include "kernels/choose/variants.hpp"
#include "support/error_text.hpp"

/// Recorded steps (SPEC A2.7): a replay does what the eager calls do, bit for bit.
namespace test_graph {

using attention_test::all_contexts;
using clattn::CommonAttentionMetadata;
using test::error_text;

constexpr std::int32_t kBlock = 16, kMaxPages = 24, kBlocks = 256, kLayers = 2;
constexpr std::int32_t kSizes[] = {6, 3};  // captured, the largest first

clattn::AttentionConfig graph_config(clattn::DType dtype = clattn::DType::kF32) {
  clattn::AttentionConfig config;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 64;
  config.block_size = kBlock;
  config.dtype = dtype;
  return config;
}

/// Numbers around 0 as bytes: normal f32, or f16 between 0.5 and 1 of either sign.
std::vector<std::byte> random_elements(std::mt19937& random, clattn::DType dtype,
                                       std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  if (dtype == clattn::DType::kF32) {
    std::normal_distribution<float> normal;
    for (std::size_t at = 0; at + sizeof(float) <= size_bytes; at += sizeof(float)) {
      const float value = normal(random);
      std::memcpy(&bytes[at], &value, sizeof(value));
    }
  } else {
    for (std::size_t at = 0; at + 2 <= size_bytes; at += 2) {
      const auto value = static_cast<std::uint16_t>(0x3800U | (random() & 0x83FFU));
      std::memcpy(&bytes[at], &value, sizeof(value));
    }
  }
  return bytes;
}

/// A random decode step over pages of its own.
struct Step {
  std::vector<std::int32_t> starts{0}, lens, table;
  CommonAttentionMetadata batch;

  Step(std::mt19937& random, std::int32_t num_reqs, std::int32_t most_tokens) {
    for (std::int32_t r = 0; r < num_reqs; ++r) {
      const bool idle = r % 3 == 2;  // without a query: legal anywhere
      const auto tokens =
          idle ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(most_tokens)) + 1;
      starts.push_back(starts.back() + tokens);
      lens.push_back(tokens + static_cast<std::int32_t>(random() % (kMaxPages * kBlock - 8)));
      for (std::int32_t p = 0; p < kMaxPages; ++p) {
        table.push_back((r * kMaxPages + p * 5 + 3) % kBlocks);
      }
    }
    // Pages are unique inside a request; requests of one step may share pages that are only read.
    batch = CommonAttentionMetadata::of(starts, lens, table);
  }
};

/// Buffers of one side: a cache, queries and outputs per layer, started from the same bytes.
struct Side {
  std::vector<clattn::KVCache> caches;
  std::vector<clattn::Buffer> rows, outs, lses;
  clattn::DType dtype;

  Side(const clattn::Context& context, cl_command_queue queue,
       const clattn::AttentionBackend& backend, std::int32_t tokens,
       clattn::DType of = clattn::DType::kF32)
      : dtype(of) {
    const std::size_t rows_of_heads = static_cast<std::size_t>(tokens) * 4;
    const std::size_t row_bytes = rows_of_heads * 64 * clattn::element_size_bytes(dtype);
    const clattn::Queue writer = clattn::Queue::adopt(queue);
    std::mt19937 random(7);
    for (int layer = 0; layer < kLayers; ++layer) {
      caches.push_back(
          clattn::make_kv_cache(context, queue, backend, graph_config(dtype), kBlocks));
      const clattn::Buffer& cache = caches.back().buffer;
      writer.write(cache, random_elements(random, dtype, cache.size_bytes()));
      rows.push_back(context.allocate(row_bytes));
      outs.push_back(context.allocate(row_bytes));
      lses.push_back(context.allocate(rows_of_heads * sizeof(float)));
    }
  }

  void launch(cl_command_queue queue, const clattn::AttentionImpl& impl,
              const clattn::AttentionMetadata& metadata) const {
    for (std::size_t i = 0; i < caches.size(); ++i) {
      impl.write_kv_cache(queue, {rows[i].handle()}, {rows[i].handle()}, caches[i], metadata);
      impl.forward(
          queue,
          {.query = {rows[i].handle()}, .output = {outs[i].handle()}, .lse = lses[i].handle()},
          caches[i], metadata);
    }
  }
};

std::vector<std::byte> bytes_of(const clattn::Queue& queue, const clattn::Buffer& buffer) {
  std::vector<std::byte> bytes(buffer.size_bytes());
  queue.read(buffer, bytes);
  return bytes;
}

struct Options {
  std::int32_t num_splits = 0;
  clattn::SplitPolicy policy = clattn::SplitPolicy::kBalanced;
  std::int32_t query_len = 1;
  clattn::ReplayMode mode = clattn::ReplayMode::kAuto;
  clattn::DType dtype = clattn::DType::kF32;
  clattn::KernelFamily family = clattn::KernelFamily::kAuto;
  std::string_view backend = {};
};

/// Random rows for every layer, the same on each side, and outputs that show what was not written.
void refill(const clattn::Queue& queue, const Side& side, unsigned seed) {
  std::mt19937 fresh(seed);
  for (const clattn::Buffer& rows : side.rows)
    queue.write(rows, random_elements(fresh, side.dtype, rows.size_bytes()));
  for (const auto& out : side.outs) queue.fill(out, 0x12345678, 0, out.size_bytes());
  for (const auto& lse : side.lses) queue.fill(lse, 0x12345678, 0, lse.size_bytes());
}

void expect_equal(const clattn::Queue& queue, const Side& eager, const Side& recorded, int step) {
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(bytes_of(queue, eager.outs[layer]), bytes_of(queue, recorded.outs[layer])) << step;
    EXPECT_EQ(bytes_of(queue, eager.lses[layer]), bytes_of(queue, recorded.lses[layer])) << step;
    EXPECT_EQ(bytes_of(queue, eager.caches[layer].buffer),
              bytes_of(queue, recorded.caches[layer].buffer))
        << step;
  }
}

bool is_pocl(const clattn::Context& context) {
  return context.capabilities().platform_name == "Portable Computing Language";
}

/// Records a step of every size.
std::map<std::int32_t, clattn::Graph> record(const clattn::Context& context,
                                             const clattn::Queue& queue,
                                             clattn::AttentionState& state,
                                             const clattn::AttentionImpl& impl, const Side& side,
                                             clattn::ReplayMode mode) {
  std::map<std::int32_t, clattn::Graph> graphs;
  const clattn::Queue other = context.create_queue();
  const auto capturing = state.graph_capture(kSizes[0]);
  for (const std::int32_t size : kSizes) {
    clattn::GraphCapture capture(queue, mode);
    EXPECT_THROW(state.graph_capture_get_metadata_for_batch(queue, 1), clattn::Error);
    side.launch(queue, impl, state.graph_capture_get_metadata_for_batch(other, size));
    graphs[size] = capture.end();
    other.finish();
  }
  return graphs;
}

void expect_same_bits(const std::shared_ptr<clattn::Context>& context, const Options& options) {
  clattn::AttentionConfig config = graph_config(options.dtype);
  config.kernel_family = options.family;
  const auto& backend =
      *clattn::get_attn_backend(config, &context->capabilities(), options.backend);
  const clattn::Queue queue = context->create_queue();
  clattn::BuilderOptions builder_options;
  builder_options.num_splits = options.num_splits;
  builder_options.split_policy = options.policy;
  builder_options.decode_threshold = options.query_len;
  builder_options.limits.num_blocks = kBlocks;
  const auto impl = backend.make_impl(context, config);
  const auto builder = backend.make_builder(context, config, builder_options);
  const std::int32_t tokens = kSizes[0] * options.query_len;
  const Side eager(*context, queue, backend, tokens, options.dtype);
  const Side recorded(*context, queue, backend, tokens, options.dtype);
  clattn::AttentionState state(context, backend, config, builder_options);
  const auto graphs = record(*context, queue, state, *impl, recorded, options.mode);
  for (const auto& [size, graph] : graphs) {
    ASSERT_GE(graph.num_launches(), 2U * kLayers) << size;
    if (options.mode != clattn::ReplayMode::kAuto || is_pocl(*context)) {
      EXPECT_EQ(graph.uses_command_buffer(), options.mode == clattn::ReplayMode::kCommandBuffer);
    }
  }

  std::mt19937 random(1);
  for (int i = 0; i < 12; ++i) {
    const Step step(random, i % (kSizes[0] + 1), options.query_len);
    for (const Side* side : {&eager, &recorded}) {
      refill(queue, *side, static_cast<unsigned>(100 + i));
    }
    eager.launch(queue, *impl, builder->build(queue, step.batch));
    const clattn::ForwardStep planned = state.begin_forward(queue, step.batch);
    ASSERT_EQ(planned.graph_batch_size, step.batch.num_reqs <= kSizes[1] ? kSizes[1] : kSizes[0]);
    EXPECT_EQ(planned.metadata->num_actual_tokens(), step.batch.num_actual_tokens);
    graphs.at(planned.graph_batch_size).replay(queue);
    expect_equal(queue, eager, recorded, i);
  }
}

TEST(Graph, AReplayHasTheBitsOfTheEagerStep) {
  for (const auto& context : all_contexts()) {
    expect_same_bits(context, {});
    expect_same_bits(context, {.num_splits = 3});
    expect_same_bits(context, {.policy = clattn::SplitPolicy::kDeterministic});
    expect_same_bits(context, {.query_len = 4});
  }
}

// With more than 12 splits, work-items share a column, which takes more tasks. One recording must
// serve steps of both kinds.
TEST(Graph, AReplayThatMergesFewOrManySplitsHasTheBitsOfTheEagerStep) {
  const auto& small =
      *std::ranges::find(clattn::detail::variants(), "merge__wg32", &clattn::detail::Variant::name);
  for (const auto& context : all_contexts()) {
    const attention_test::ForcedVariants forced(context, {&small});
    expect_same_bits(context, {.num_splits = 20, .family = clattn::KernelFamily::kGpu});
  }
}

TEST(Graph, AReplayOverF16HasThem) {
  for (const auto& context : all_contexts())
    expect_same_bits(context, {.dtype = clattn::DType::kF16});
}

// One state serves every backend that can be recorded.
TEST(Graph, A2_4_EveryBackendsStepsAreRecorded) {
  for (const auto& context : all_contexts()) {
    for (const std::string_view backend : {"FLASHINFER", "XFORMERS"}) {
      SCOPED_TRACE(backend);
      expect_same_bits(context, {.dtype = clattn::DType::kF16, .backend = backend});
    }
  }
}

// Which way pays is the platform's: PoCL's command buffers cost more than their launches.
TEST(Graph, EveryModeHasThem) {
  for (const auto& context : all_contexts()) {
    expect_same_bits(context, {.num_splits = 3, .mode = clattn::ReplayMode::kLaunchList});
    try {
      expect_same_bits(context, {.num_splits = 3, .mode = clattn::ReplayMode::kCommandBuffer});
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kUnsupported);
      EXPECT_STREQ(
          error.what(),
          "graph capture: mode is kCommandBuffer, legal on this device: kAuto, kLaunchList");
      EXPECT_FALSE(is_pocl(*context));
    }
  }
}

clattn::AttentionState make_state(const std::shared_ptr<clattn::Context>& context) {
  clattn::BuilderOptions options;
  options.limits.num_blocks = kBlocks;
  return {context, *clattn::get_attn_backend(graph_config(), &context->capabilities()),
          graph_config(), options};
}

TEST(Graph, WhatCannotBeReplayedIsRefused) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  clattn::AttentionState state = make_state(context);
  {
    const auto capturing = state.graph_capture(8);
    state.graph_capture_get_metadata_for_batch(queue, 2);
  }
  std::mt19937 random(3);
  const Step three(random, 3, 1);
  EXPECT_EQ(state.batch_size_for(three.batch), 0);
  EXPECT_EQ(error_text([&] { state.prepare_graph_input_buffers(queue, 2, three.batch); }),
            "num_reqs is 3, legal: 0 … 2 (graph_pad_size)");
  EXPECT_EQ(error_text([&] { state.prepare_graph_input_buffers(queue, 4, three.batch); }),
            "batch_size 4 was not captured; legal: a size that was");
  const std::vector<std::int32_t> starts{0, 2}, lens{9}, table{0};
  const auto two_tokens = CommonAttentionMetadata::of(starts, lens, table);
  EXPECT_EQ(state.batch_size_for(two_tokens), 0);
  EXPECT_EQ(error_text([&] { state.prepare_graph_input_buffers(queue, 2, two_tokens); }),
            "max_query_len is 2, legal: 0 … 1 (decode_threshold)");
  EXPECT_EQ(error_text([] { clattn::Graph().replay(nullptr); }),
            "graph: empty, legal: one from GraphCapture");
  {
    const clattn::GraphCapture capture(queue);
    EXPECT_EQ(error_text([&] { const clattn::GraphCapture nested(queue); }),
              "graph capture: this thread is capturing already");
  }
  EXPECT_EQ(clattn::GraphCapture(queue).end().num_launches(), 0U);  // the abandoned one is over
}

TEST(Graph, WhatAReplayWouldFindChangedOrGoneIsNotRecorded) {
  const auto& context = all_contexts().front();
  const auto& backend = *clattn::get_attn_backend(graph_config(), &context->capabilities());
  const clattn::Queue queue = context->create_queue();
  const auto impl = backend.make_impl(context, graph_config());
  const auto builder = backend.make_builder(context, graph_config());
  const Side side(*context, queue, backend, 1);
  std::mt19937 random(3);
  const Step step(random, 1, 1);
  const auto& metadata = builder->build(queue, step.batch);
  {
    const clattn::GraphCapture capture(queue);
    constexpr auto unsupported = clattn::ErrorCode::kUnsupported;
    const std::string fixed =
        "graph capture: metadata of a builder without graph_batch_size cannot be recorded";
    EXPECT_EQ(error_text(
                  [&] {
                    impl->forward(
                        queue,
                        {.query = {side.rows[0].handle()}, .output = {side.outs[0].handle()}},
                        side.caches[0], metadata);
                  },
                  unsupported),
              fixed);
    EXPECT_EQ(error_text(
                  [&] {
                    impl->write_kv_cache(queue, {side.rows[0].handle()}, {side.rows[0].handle()},
                                         side.caches[0], metadata);
                  },
                  unsupported),
              fixed);
    const clattn::BlockPair pair{0, 1};
    EXPECT_EQ(error_text(
                  [&] {
                    clattn::copy_blocks(*context, queue, std::span(side.caches).first(1),
                                        std::span(&pair, 1));
                  },
                  unsupported),
              "graph capture: copy_blocks cannot be recorded");
    EXPECT_EQ(error_text(
                  [&] {
                    clattn::swap_blocks(*context, queue, side.caches[0], side.caches[1],
                                        std::span(&pair, 1));
                  },
                  unsupported),
              "graph capture: swap_blocks cannot be recorded");
  }
  clattn::BuilderOptions options;
  options.graph_batch_size = 2;
  EXPECT_EQ(error_text([&] { backend.make_builder(context, graph_config(), options); }),
            "BuilderOptions::limits.num_blocks is -1, legal: the cache's number of blocks, which "
            "recorded steps need");
  options.limits.num_blocks = kBlocks;
  const auto recorded = backend.make_builder(context, graph_config(), options);
  CommonAttentionMetadata padded = step.batch;
  padded.graph_pad_size = 3;
  EXPECT_EQ(error_text([&] { recorded->build(queue, padded); }),
            "graph_pad_size is 3, legal: 0 … 2 (graph_batch_size)");
  EXPECT_EQ(error_text([&] { builder->build(queue, padded); }),
            "graph_pad_size is 3, legal: 0 … 0 (graph_batch_size)");
}

// A request's only query is its last token, so there is no later key to see; of two there is.
TEST(Graph, RecordedStepsAreCausalWhereItMatters) {
  const auto& context = all_contexts().front();
  const auto& backend = *clattn::get_attn_backend(graph_config(), &context->capabilities());
  const clattn::Queue queue = context->create_queue();
  clattn::BuilderOptions options;
  options.graph_batch_size = 2;
  options.decode_threshold = 2;
  options.limits.num_blocks = kBlocks;
  const auto builder = backend.make_builder(context, graph_config(), options);
  const std::vector<std::int32_t> one{0, 1}, two{0, 2}, lens{9}, table{0};
  auto both_ways = CommonAttentionMetadata::of(one, lens, table);
  both_ways.causal = false;
  both_ways.num_actual_tokens = 9;  // padding does not count
  EXPECT_TRUE(builder->can_run_in_graph(both_ways));
  EXPECT_EQ(error_text([&] { builder->build(queue, both_ways); }), "no error");
  both_ways = CommonAttentionMetadata::of(two, lens, table);
  both_ways.causal = false;
  EXPECT_FALSE(builder->can_run_in_graph(both_ways));
  EXPECT_EQ(error_text([&] { builder->build(queue, both_ways); }),
            "causal is false, legal: true: recorded steps of several query tokens are causal");
  queue.finish();
}

// A causal plan has no item for the keys that cross attention sees.
TEST(Graph, ACausalPlanIsRefusedByACrossAttentionLayer) {
  const auto& context = all_contexts().front();
  clattn::AttentionConfig cross = graph_config();
  cross.attn_type = clattn::AttentionType::kEncoderDecoder;
  const auto& backend = *clattn::get_attn_backend(cross, &context->capabilities());
  const clattn::Queue queue = context->create_queue();
  const auto builder = backend.make_builder(context, graph_config());
  const auto impl = backend.make_impl(context, cross);
  const Side side(*context, queue, backend, 1);
  std::mt19937 random(3);
  const Step step(random, 1, 1);
  EXPECT_EQ(error_text([&] {
              impl->forward(queue,
                            {.query = {side.rows[0].handle()}, .output = {side.outs[0].handle()}},
                            side.caches[0], builder->build(queue, step.batch));
            }),
            "attn_metadata: planned for causal attention; legal: a builder with attn_type "
            "encoder_decoder");
}

TEST(Graph, OneSizeServesEveryStepUpToIt) {
  const auto& context = all_contexts().front();
  const clattn::Queue queue = context->create_queue();
  clattn::AttentionState state = make_state(context);
  std::vector<cl_mem> buffers;
  {
    const auto capturing = state.graph_capture(8);
    for (const std::int32_t size : {8, 4, 1}) {
      const auto& metadata = state.graph_capture_get_metadata_for_batch(queue, size);
      buffers.push_back(metadata.slot_mapping_buffer());
    }
  }
  EXPECT_EQ(buffers, std::vector<cl_mem>(3, buffers[0]));  // one memory for all sizes
  std::mt19937 random(3);
  const std::pair<std::int32_t, std::int32_t> expected[] = {{0, 1}, {1, 1}, {2, 4},
                                                            {4, 4}, {7, 8}, {9, 0}};
  for (const auto& [num_reqs, size] : expected) {
    EXPECT_EQ(state.batch_size_for(Step(random, num_reqs, 1).batch), size) << num_reqs;
  }
  const Step three(random, 3, 1);
  CommonAttentionMetadata cut_short = three.batch;
  cut_short.query_start_loc = cut_short.query_start_loc.first(2);
  EXPECT_EQ(error_text([&] { state.batch_size_for(cut_short); }),
            "query_start_loc holds 2 elements, legal: at least 4 (num_reqs + 1)");
}

}  // namespace test_graph
