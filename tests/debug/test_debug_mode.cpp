#include <gtest/gtest.h>

#include <CL/cl.h>

#include <array>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <memory>
#include <vector>

#include "support/error_text.hpp"

// What CLATTN_DEBUG finds: docs/environment.md.
namespace {

using clattn::AttentionTensors;
using test::error_text;

constexpr std::size_t kRow = 2 * 16;

/// A layer with a batch of one decode.
struct Layer {
  std::shared_ptr<clattn::Context> context = clattn::Context::create();
  clattn::Queue queue = context->create_queue();
  clattn::AttentionConfig config;
  std::shared_ptr<const clattn::AttentionImpl> impl;
  std::unique_ptr<clattn::AttentionMetadataBuilder> builder;
  clattn::KVCache cache;
  clattn::Buffer rows = context->allocate(8 * kRow * sizeof(float)),
                 out = context->allocate(8 * kRow * sizeof(float));
  std::array<std::int32_t, 2> starts = {0, 1};
  std::array<std::int32_t, 1> lens = {5};
  std::array<std::int32_t, 2> pages = {2, 1};

  explicit Layer(bool use_mla = false) {
    config = {.num_heads = 2,
              .num_kv_heads = use_mla ? 1 : 2,
              .head_size = use_mla ? 24 : 16,
              .block_size = 4,
              .dtype = clattn::DType::kF32};
    config.use_mla = use_mla;
    config.rope_dim = use_mla ? 8 : 0;
    const auto backend = get_attn_backend(config, &context->capabilities());
    impl = backend->make_impl(context, config);
    builder = backend->make_builder(context, config);
    cache = make_kv_cache(*context, queue, *backend, config, 4);
  }
  const clattn::AttentionMetadata& build() {
    return builder->build(queue, clattn::CommonAttentionMetadata::of(starts, lens, pages));
  }
  std::string forward(const clattn::AttentionMetadata& metadata, cl_command_queue on) const {
    return error_text([&] {
      impl->forward(on, {.query = {rows.handle()}, .output = {out.handle()}}, cache, metadata);
    });
  }
  std::string write(const clattn::AttentionMetadata& metadata, cl_command_queue on) const {
    return error_text(
        [&] { impl->write_kv_cache(on, {rows.handle()}, {rows.handle()}, cache, metadata); });
  }
};

const char* const kStale =
    "attn_metadata: its builder has built since, legal: what its last build() gave";
const char* const kOtherQueue =
    "queue: another than the one that attn_metadata was built on, legal: that one";

TEST(DebugMode, FindsMetadataThatIsNotItsBuildersLast) {
  for (const bool use_mla : {false, true}) {
    Layer layer(use_mla);
    const auto& first = layer.build();
    EXPECT_EQ(layer.forward(first, layer.queue), "no error");
    const auto& second = layer.build();
    EXPECT_EQ(layer.forward(first, layer.queue), kStale);
    EXPECT_EQ(layer.write(first, layer.queue), kStale);
    EXPECT_EQ(layer.forward(second, layer.queue), "no error");
    EXPECT_EQ(layer.write(second, layer.queue), "no error");
    layer.lens[0] = -1;
    EXPECT_NE(error_text([&] { layer.build(); }), "no error");
    EXPECT_EQ(layer.forward(second, layer.queue), kStale);
    layer.queue.finish();
  }
}

TEST(DebugMode, FindsAnotherQueue) {
  for (const bool use_mla : {false, true}) {
    Layer layer(use_mla);
    const clattn::Queue other = layer.context->create_queue();
    const auto& metadata = layer.build();
    EXPECT_EQ(layer.forward(metadata, other), kOtherQueue);
    EXPECT_EQ(layer.write(metadata, other), kOtherQueue);
    EXPECT_EQ(layer.forward(metadata, layer.queue), "no error");
    layer.queue.finish();
  }
}

TEST(DebugMode, RecordsAndReplaysAsWithoutIt) {
  Layer layer;
  clattn::BuilderOptions options;
  options.graph_batch_size = 1;
  options.limits = {
      .max_num_reqs = 1, .max_num_batched_tokens = 1, .max_model_len = 8, .num_blocks = 4};
  layer.builder = get_attn_backend(layer.config, &layer.context->capabilities())
                      ->make_builder(layer.context, layer.config, options);
  const auto& metadata = layer.build();
  clattn::GraphCapture capture(layer.queue);
  EXPECT_EQ(layer.forward(metadata, layer.queue), "no error");
  const clattn::Graph graph = capture.end();
  layer.build();
  graph.replay(layer.queue);
  layer.queue.finish();
}

TEST(DebugMode, FindsBuffersOfAnotherContext) {
  Layer layer;
  const Layer other;
  const auto& metadata = layer.build();
  const AttentionTensors foreign{.query = {other.rows.handle()}, .output = {layer.out.handle()}};
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(layer.forward(metadata, layer.queue), "no error");
    EXPECT_EQ(error_text([&] { layer.impl->forward(layer.queue, foreign, layer.cache, metadata); }),
              "query: a buffer of another context, legal: of the layer's");
  }
  layer.queue.finish();
}

TEST(DebugMode, FindsPartsOfOneBufferThatOverlap) {
  Layer layer;
  const auto& metadata = layer.build();
  const auto part = [&](std::size_t begin) {
    const cl_buffer_region region = {begin, kRow * sizeof(float)};
    cl_int status = CL_SUCCESS;
    const cl_mem memory =
        clCreateSubBuffer(layer.rows.handle(), 0, CL_BUFFER_CREATE_TYPE_REGION, &region, &status);
    EXPECT_EQ(status, CL_SUCCESS);
    clattn::Buffer buffer = clattn::Buffer::adopt(memory);
    clReleaseMemObject(memory);
    return buffer;
  };
  const clattn::Buffer query = part(0), same = part(0), behind = part(kRow * sizeof(float));
  const auto text = [&](const clattn::Buffer& output) {
    return error_text([&] {
      layer.impl->forward(layer.queue, {.query = {query.handle()}, .output = {output.handle()}},
                          layer.cache, metadata);
    });
  };
  EXPECT_EQ(text(same), "output: it overlaps query, legal: memory of its own");
  EXPECT_EQ(text(behind), "no error");
  EXPECT_EQ(layer.forward(metadata, layer.queue), "no error");
  layer.queue.finish();
}

}  // namespace
