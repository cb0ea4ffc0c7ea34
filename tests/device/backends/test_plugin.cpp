#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/compat/vllm_layer.hpp>
#include <clattn/graph.hpp>
#include <clattn/plugin.hpp>
#include <memory>
#include <string>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "support/error_text.hpp"
#include "support/plugin.hpp"

namespace test_plugin {

using attention_test::all_contexts;
using clattn::DType;
using layer_test::Device;
using layer_test::Step;
using test::error_text;

const std::string kPlugin = test::plugin_path("none");

attention_test::CaseSpec reference_case() {
  attention_test::CaseSpec spec;
  spec.backend = "REFERENCE";
  spec.layout = clattn::KVCacheLayout::kNHD;
  spec.config.num_heads = 4;
  spec.config.num_kv_heads = 2;
  spec.config.head_size = 8;
  spec.config.block_size = 4;
  spec.config.dtype = DType::kF32;
  spec.requests = {{1, 9, 1}, {1, 0, 2}, {0, 3, 3}, {5, 6, 4}};
  spec.write_cache = true;
  spec.query_padding = 8;
  return spec;
}

// B3.1: a third party's kernels end to end, judged by the oracle over a poisoned cache.
TEST(Plugin, AttendsLikeTheOracle) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(kPlugin);
  for (const auto& context : all_contexts()) {
    const auto result = attention_test::run_case(context, reference_case());
    EXPECT_EQ(result.fault, "");
    EXPECT_LE(result.worst_share, 1.0) << result.worst_place;
    EXPECT_FALSE(result.out.empty());
  }
}

// What a batch says of its requests reaches a plug-in as the keys that each query sees; what none
// of them sees is NaN.
TEST(Plugin, AttendsByTheListsOfABatch) {
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(kPlugin);
  attention_test::CaseSpec directed = reference_case();
  directed.unseen_is_nan = true;
  clattn::AttentionConfig& config = directed.config;
  config.use_directions = config.use_spans = config.use_first_keys = config.use_keep_keys = true;
  config.window_left = 5;
  config.window_right = 2;
  config.span_rule = clattn::SpanRule::kClipBoth;
  using enum clattn::Direction;
  directed.requests = {{1, 9, 1, kCanvas, {}, 2, 3},
                       {0, 3, 2, kBothWays},
                       {5, 16, 3, kCausal, {{14, 19}}, 0, 3},
                       {6, 8, 4, kBothWays, {{9, 12}}, 1},
                       {7, 4, 5, kCanvas, {}, 3, 9}};
  attention_test::CaseSpec trees = reference_case();
  trees.unseen_is_nan = true;
  trees.config.use_trees = trees.config.use_keep_keys = true;
  trees.config.sliding_window = 4;
  trees.requests = {
      {4, 9, 1, {}, {}, 0, 2, {-1, 0, 0, 1}}, {3, 5, 2}, {2, 2, 3, {}, {}, 0, 0, {-1, -1}}};
  trees.requests.push_back({40, 7, 4, {}, {}, 0, 0, std::vector<std::int32_t>(40, -1)});
  for (const auto& context : all_contexts()) {
    for (const attention_test::CaseSpec& spec : {directed, trees}) {
      const auto result = attention_test::run_case(context, spec);
      EXPECT_EQ(result.fault, "");
      EXPECT_LE(result.worst_share, 1.0) << describe(spec) << result.worst_place;
    }
    const auto builder = plugin.backend()->make_builder(context, config);
    const std::vector<std::int32_t> starts = {0, 1}, lens = {1}, table = {0};
    auto batch = clattn::CommonAttentionMetadata::of(starts, lens, table);
    const std::vector<clattn::Direction> direction = {kCanvas};
    batch.direction = direction;
    batch.causal = true;
    EXPECT_EQ(error_text([&] { builder->build(context->create_queue(), batch); }),
              "causal is true, legal with a direction for each request: none");
  }
}

TEST(Plugin, UsersKeepItLoadedAndTheLastOneUnloadsIt) {
  const Device device(all_contexts().at(0));
  {
    auto plugin = std::make_unique<clattn::BackendPlugin>(clattn::load_backend_plugin(kPlugin));
    clattn::LayerRegistry layers;
    clattn::AttentionOptions options;
    options.config.num_heads = 4;
    options.config.num_kv_heads = 2;
    options.config.head_size = 8;
    options.config.dtype = DType::kF32;
    options.config.block_size = 4;
    options.attn_backend = plugin->backend();
    clattn::Attention layer(device.context, layers, options);
    const auto builder = plugin->backend()->make_builder(device.context, layer.config());
    options.attn_backend = nullptr;
    plugin.reset();
    for (const auto& backend : clattn::list_attn_backends())
      EXPECT_NE(backend->name(), "REFERENCE");
    EXPECT_TRUE(test::is_loaded(kPlugin));

    const clattn::KVCacheSpec spec{
        .block_size = 4, .num_kv_heads = 2, .head_size = 8, .dtype = DType::kF32};
    layer.bind_kv_cache(reshape_kv_cache(device.context->allocate(3 * spec.page_size_bytes()), spec,
                                         *layer.get_attn_backend(), clattn::KVCacheLayout::kNHD));
    EXPECT_EQ(clattn::extra_repr(layer).find("backend=REFERENCE") == std::string::npos, false);
    Step step({4, 2, 8, 4}, 5);
    step.add_request(7, 0, {2, 0});
    const auto& metadata = builder->build(device.queue, step.batch());
    step.expect_truth(step.run(device, layer, &metadata, {.padding_rows = 2}));
    device.queue.finish();
  }
  EXPECT_FALSE(test::is_loaded(kPlugin));
}

TEST(Plugin, ChecksWhatItsCallsAreGiven) {
  const Device device(all_contexts().at(0));
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(kPlugin);
  const auto& backend = *plugin.backend();
  clattn::AttentionConfig config = reference_case().config;
  const auto impl = backend.make_impl(device.context, config);
  const auto builder = backend.make_builder(device.context, config);
  const clattn::KVCacheSpec spec{
      .block_size = 4, .num_kv_heads = 2, .head_size = 8, .dtype = DType::kF32};
  const clattn::Buffer memory = device.context->allocate(spec.page_size_bytes());
  const auto cache = reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  Step step({4, 2, 8, 4}, 5);
  step.add_request(7, 0, {1, 0});
  clattn::CommonAttentionMetadata padded = step.batch();
  padded.num_actual_tokens = 9000;  // above the limits, which leave padding out
  EXPECT_EQ(builder->build(device.queue, padded).num_actual_tokens(), 7);
  const auto& metadata = builder->build(device.queue, step.batch());
  const auto forward = [&](const clattn::AttentionMetadata& built, const clattn::KVCache& where) {
    return error_text([&] {
      impl->forward(device.queue, {.query = {memory.handle()}, .output = {memory.handle()}}, where,
                    built);
    });
  };
  EXPECT_EQ(forward(metadata, cache),
            "attn_metadata: its block ids reach up to 1, legal: below the cache's 1 blocks");
  clattn::KVCache wrong = cache;
  wrong.head_size = 16;
  EXPECT_EQ(forward(metadata, wrong),
            "kv_cache: 4 tokens x 2 heads x 16 of f32, legal: 4 x 2 x 8 of f32");
  const auto stranger =
      clattn::get_attn_backend(config, nullptr, "FLASHINFER")->make_builder(device.context, config);
  EXPECT_EQ(
      forward(stranger->build(device.queue, step.batch()), cache).find("attn_metadata: built"), 0U);
  // A1.10: what plugins do by themselves can neither be recorded nor taken over.
  EXPECT_EQ(backend.graph_support(), clattn::AttentionCGSupport::kNever);
  EXPECT_FALSE(builder->can_run_in_graph(step.batch()));
  EXPECT_FALSE(builder->supports_update_block_table());
  EXPECT_EQ(error_text([&] { builder->update_block_table(device.queue, metadata, {}); },
                       clattn::ErrorCode::kUnsupported),
            "update_block_table: not supported by this builder; use build()");
  clattn::CascadeQuery query{.common_prefix_len = 1 << 20, .num_query_heads = 4, .num_kv_heads = 2};
  const std::vector<std::int32_t> query_lens(64, 7);
  query.query_lens = query_lens;
  query.num_sms = 1;
  EXPECT_TRUE(clattn::use_cascade_attention(query));
  EXPECT_FALSE(builder->use_cascade_attention(query));
  EXPECT_EQ(error_text([&] {
              builder->build(device.queue, step.batch(), nullptr, {.common_prefix_len = 4});
            }),
            "request 0: common_prefix_len is 4, legal: 0 (its computed tokens)");
  EXPECT_EQ(error_text([&] { backend.get_kv_cache_stride_order(clattn::KVCacheLayout::kHND); },
                       clattn::ErrorCode::kUnsupported),
            "layout HND not supported by REFERENCE");
  config.head_size = 128;
  EXPECT_EQ(error_text([&] { backend.make_impl(device.context, config); },
                       clattn::ErrorCode::kUnsupported),
            "backend REFERENCE does not support this configuration: head_size 128 not supported: 1 "
            "to 64 are");
  device.queue.finish();
}

// B3: what a plugin says of its caches must be what it is handed: the C contract has no stride of
// dims, and strides of another layout would be read as its own.
TEST(Plugin, B3_AnswersThatDoNotFitWhatIsHandedOnAreRefused) {
  const auto refusal = [](const std::string& defect, auto&& call) {
    const clattn::BackendPlugin plugin = clattn::load_backend_plugin(test::plugin_path(defect));
    return error_text([&] { call(*plugin.backend()); }, clattn::ErrorCode::kUnsupported);
  };
  EXPECT_EQ(
      refusal("cache_shape", [](const auto& backend) { backend.get_kv_cache_shape(3, 4, 2, 8); }),
      "backend REFERENCE: kv_cache_shape[2] is 5, legal: 4 (block_size, kv_dimension 1)");
  EXPECT_EQ(refusal("stride_order",
                    [](const auto& backend) {
                      backend.get_kv_cache_stride_order(clattn::KVCacheLayout::kNHD);
                    }),
            "backend REFERENCE: kv_cache_stride_order is 0, 1, 2, 4, 3, legal: 4 last (a head's "
            "elements are contiguous)");
}

TEST(Plugin, B3_CachesOfOtherStridesAndShortTensorsAreRefused) {
  const Device device(all_contexts().at(0));
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(kPlugin);
  const auto& backend = *plugin.backend();
  const clattn::AttentionConfig config = reference_case().config;
  const auto impl = backend.make_impl(device.context, config);
  const auto builder = backend.make_builder(device.context, config);
  clattn::KVCacheSpec spec{
      .block_size = 4, .num_kv_heads = 2, .head_size = 8, .dtype = DType::kF32};
  const clattn::Buffer memory = device.context->allocate(2 * spec.page_size_bytes());
  Step step({4, 2, 8, 4}, 5);
  step.add_request(3, 0, {1, 0});
  const auto& metadata = builder->build(device.queue, step.batch());
  const clattn::Buffer rows = device.context->allocate(3 * 4 * 8 * 4);
  const auto write = [&](const clattn::KVCache& where, const clattn::TensorRef& key) {
    return error_text(
        [&] { impl->write_kv_cache(device.queue, key, {rows.handle()}, where, metadata); });
  };
  const auto forward = [&](const clattn::Buffer& output, const clattn::Buffer& lse) {
    const auto cache = reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
    return error_text([&] {
      impl->forward(device.queue,
                    {.query = {rows.handle()}, .output = {output.handle()}, .lse = lse.handle()},
                    cache, metadata);
    });
  };
  const auto& flashinfer = *clattn::get_attn_backend(config, nullptr, "FLASHINFER");
  EXPECT_EQ(write(reshape_kv_cache(memory, spec, flashinfer, clattn::KVCacheLayout::kHND),
                  {rows.handle()}),
            "kv_cache: v_offset - k_offset 64, block_stride 128, token_stride 8, head_stride 32, "
            "legal: backend REFERENCE's layouts: NHD has token_stride 16");
  clattn::KVCache beyond = reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  beyond.num_blocks = 3;
  EXPECT_EQ(write(beyond, {rows.handle()}),
            "kv_cache: its last element is number 383, legal: below the buffer's 256 elements");
  const auto cache = reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  EXPECT_EQ(write(cache, {rows.handle(), 60}),
            "key: its 3 rows end at element 108, legal: the buffer's 96");
  const clattn::Buffer small = device.context->allocate(16);
  const clattn::Buffer apart = device.context->allocate(96 * sizeof(float));
  EXPECT_EQ(forward(small, apart), "output: its 3 rows end at element 96, legal: the buffer's 4");
  EXPECT_EQ(forward(apart, small), "lse: its 3 rows end at element 12, legal: the buffer's 4");
  spec.page_size_padded = spec.page_size_bytes() + 64;  // K and V together, wherever pages end
  const clattn::Buffer padded = device.context->allocate(2 * spec.page_size_bytes());
  EXPECT_EQ(
      write(reshape_kv_cache(padded, spec, backend, clattn::KVCacheLayout::kNHD), {rows.handle()}),
      "no error");
  device.queue.finish();
}

// A2.7: what a plugin enqueues would run at once and be missing from every replay.
TEST(Plugin, ItsCallsAreNotRecorded) {
  const Device device(all_contexts().at(0));
  const clattn::BackendPlugin plugin = clattn::load_backend_plugin(kPlugin);
  const auto& backend = *plugin.backend();
  const clattn::AttentionConfig config = reference_case().config;
  const auto impl = backend.make_impl(device.context, config);
  const auto builder = backend.make_builder(device.context, config);
  const clattn::KVCacheSpec spec{
      .block_size = 4, .num_kv_heads = 2, .head_size = 8, .dtype = DType::kF32};
  const clattn::Buffer memory = device.context->allocate(spec.page_size_bytes());
  const auto cache = reshape_kv_cache(memory, spec, backend, clattn::KVCacheLayout::kNHD);
  Step step({4, 2, 8, 4}, 5);
  step.add_request(1, 0, {0});
  const auto& metadata = builder->build(device.queue, step.batch());
  const clattn::TensorRef tensor{memory.handle()};
  clattn::GraphCapture capture(device.queue);
  const std::string expected = "graph capture: backend REFERENCE cannot be recorded";
  EXPECT_EQ(error_text(
                [&] {
                  impl->forward(device.queue, {.query = tensor, .output = tensor}, cache, metadata);
                },
                clattn::ErrorCode::kUnsupported),
            expected);
  EXPECT_EQ(error_text([&] { impl->write_kv_cache(device.queue, tensor, tensor, cache, metadata); },
                       clattn::ErrorCode::kUnsupported),
            expected);
  EXPECT_EQ(capture.end().num_launches(), 0U);
  clattn::BuilderOptions options;
  options.graph_batch_size = 2;
  EXPECT_EQ(error_text([&] { backend.make_builder(device.context, config, options); },
                       clattn::ErrorCode::kUnsupported),
            "backend REFERENCE: graph_batch_size is 2, legal: 0: plugins cannot be recorded");
  options.graph_batch_size = 0;
  options.device_seq_lens = true;
  EXPECT_EQ(error_text([&] { backend.make_builder(device.context, config, options); },
                       clattn::ErrorCode::kUnsupported),
            "backend REFERENCE: device_seq_lens: true, legal: false: plugins plan by the host's "
            "lengths");
  device.queue.finish();
}

}  // namespace test_plugin
