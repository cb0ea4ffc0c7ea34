// Layers with use_mla, from options to outputs (SPEC A2.1, A3, A8).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <clattn/attn_utils.hpp>
#include <clattn/cache_ops.hpp>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <clattn/mla.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/latent_model.hpp"
#include "device/layer_model.hpp"
#include "device/runtime_fixture.hpp"
#include "support/counting_new.hpp"
#include "support/error_text.hpp"

namespace test_mla_layer {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::DType;
using clattn::ErrorCode;
using latent_test::options_of;
using latent_test::Requests;
using latent_test::Shape;
using test::error_text;

Shape small_shape(DType dtype = DType::kF32) {
  return {.num_heads = 4,
          .rank = 64,
          .rope = 16,
          .block_size = 4,
          .dtype = dtype,
          .cache_dtype = dtype};
}

/// One tensor and, as the caller groups them, one block table a layer.
clattn::KVCacheConfig config_of(const clattn::LayerRegistry& layers, std::int64_t blocks,
                                const std::vector<std::vector<std::string>>& groups) {
  const auto specs = get_kv_cache_spec(layers);
  clattn::KVCacheConfig config;
  config.num_blocks = blocks;
  for (const auto& names : groups) config.groups.push_back({names, specs.at(names.front())});
  for (const auto& [name, spec] : specs) {
    config.tensors.push_back({static_cast<std::size_t>(blocks) * spec.page_size_bytes(), {name}});
  }
  return config;
}

void poison(const clattn::Queue& queue, const Attention& layer) {
  const clattn::Buffer& cache = layer.kv_cache()->buffer;
  queue.fill(cache, 0xFFFFFFFFU, 0, cache.size_bytes());  // NaN in every type
}

/// A layer with a poisoned cache of its own, its group's builder, and requests.
struct OneLayer {
  OneLayer(const std::shared_ptr<clattn::Context>& opened, const Shape& shape,
           std::int32_t num_reqs, std::int32_t pages)
      : context(opened),
        queue(opened->create_queue()),
        layer(opened, layers, options_of(shape, "layers.0")),
        requests(shape, num_reqs, pages) {
    const auto config = config_of(layers, requests.num_blocks(), {{"layers.0"}});
    groups = init_attn_backend(config, layers, context);
    init_kv_cache(config, layers, groups, *context, queue);
    poison(queue, layer);
  }
  const clattn::AttentionMetadata& build() const {
    return groups.at(0).builder->build(queue, requests.batch());
  }
  ~OneLayer() { queue.finish(); }
  OneLayer(const OneLayer&) = delete;
  OneLayer& operator=(const OneLayer&) = delete;

  std::shared_ptr<clattn::Context> context;
  clattn::Queue queue;
  clattn::LayerRegistry layers;
  Attention layer;
  Requests requests;
  std::vector<clattn::AttentionGroup> groups;
};

// A2.1, A6.6, A7: DeepSeek's shape; prefills, chunks and decodes of one request after the other.
TEST(MLALayer, A2_1_StepsStoreAndAttendInEveryType) {
  constexpr std::array kTypes = {std::pair{DType::kF16, DType::kF16},
                                 std::pair{DType::kBF16, DType::kBF16},
                                 std::pair{DType::kF16, DType::kFp8E4M3}};
  for (const auto& context : all_contexts()) {
    for (const auto& [dtype, cache_dtype] : kTypes) {
      Shape shape{.dtype = dtype, .cache_dtype = cache_dtype};
      if (clattn::is_quantized(cache_dtype)) shape.cache_scale = 0.25;
      OneLayer model(context, shape, 4, 3);
      EXPECT_EQ(model.layer.get_attn_backend()->name(), "CLATTN_MLA");
      EXPECT_EQ(model.layer.config().num_kv_heads, 1);
      EXPECT_EQ(model.groups[0].spec.page_size_bytes(),
                16 * 576 * clattn::element_size_bytes(cache_dtype));
      const auto scale = static_cast<float>(shape.cache_scale);
      model.layer.load_kv_scales({.k_scale = std::span(&scale, 1)});
      std::uint32_t seed = 1;
      for (const auto& lens :
           {std::vector<std::int32_t>{21, 1, 0, 7}, std::vector<std::int32_t>{1, 17, 0, 1},
            std::vector<std::int32_t>{1, 1, 5, 1}}) {
        model.requests.step(lens, seed++);
        model.requests.expect_truth(model.requests.run(*context, model.queue, model.layer,
                                                       &model.build(), {.padding_rows = 2}),
                                    model.layer,
                                    fmt::format("{} step {}", to_string(cache_dtype), seed));
      }
    }
  }
}

/// A layer of four heads over two KV heads, in f32.
clattn::AttentionOptions plain_options(std::int32_t head_size) {
  clattn::AttentionOptions plain;
  plain.config.num_heads = 4;
  plain.config.num_kv_heads = 2;
  plain.config.head_size = head_size;
  plain.prefix = "layers.0";
  plain.config.dtype = DType::kF32;
  return plain;
}

// A3: full and latent attention side by side, and a layer that shares the latent cache.
TEST(MLALayer, A3_AHybridModelRunsAStep) {
  for (const auto& context : all_contexts()) {
    const layer_test::Device device(context);
    const Shape shape = small_shape();
    clattn::LayerRegistry layers;
    Attention full(context, layers, plain_options(64));
    Attention latent(context, layers, options_of(shape, "layers.1"));
    clattn::AttentionOptions shares = options_of(shape, "layers.2");
    shares.kv_sharing_target_layer_name = "layers.1";
    Attention sharer(context, layers, shares);

    Requests requests(shape, 2, 3);
    requests.step({1, 9}, 1);
    layer_test::Step step({4, 2, 64, 16}, 2);
    step.add_request(1, 0, {5});
    step.add_request(9, 0, {2});
    const auto config = config_of(layers, requests.num_blocks(), {{"layers.0"}, {"layers.1"}});
    EXPECT_EQ(config.groups[1].spec.page_size_bytes(), 4U * 80 * 4);
    const auto groups = init_attn_backend(config, layers, context);
    EXPECT_EQ(groups[0].backend->name(), "FLASHINFER");
    EXPECT_EQ(groups[1].backend->name(), "CLATTN_MLA");
    EXPECT_EQ(groups[1].layer_names, (std::vector<std::string>{"layers.1", "layers.2"}));
    for (const auto layout : {clattn::KVCacheLayout::kNHD, clattn::KVCacheLayout::kHND}) {
      const auto caches = init_kv_cache(config, layers, groups, *context, device.queue, layout);
      ASSERT_EQ(caches.size(), 2U);
      EXPECT_EQ(caches[1]->shape, (std::array<std::int64_t, 5>{1, 7, 4, 1, 80}));
      EXPECT_EQ(sharer.kv_cache(), latent.kv_cache());
      poison(device.queue, full);
      poison(device.queue, latent);
      const std::vector<clattn::GroupPages> pages = {
          {step.batch().block_table, step.batch().block_table_stride},
          {requests.batch().block_table, requests.batch().block_table_stride}};
      const auto metadata = build_attn_metadata(device.queue, groups, step.batch(), pages);
      EXPECT_EQ(metadata.at("layers.1"), metadata.at("layers.2"));
      step.expect_truth(step.run(device, full, metadata.at("layers.0")));
      requests.expect_truth(requests.run(*context, device.queue, latent, metadata.at("layers.1")),
                            latent, "owner");
      requests.expect_truth(requests.run(*context, device.queue, sharer, metadata.at("layers.2"),
                                         {.poison_key_and_value = true}),
                            sharer, "sharer");
      device.queue.finish();
    }
  }
}

// A7: full, windowed and latent attention and a state share one tensor page by page.
TEST(MLALayer, A7_LayersOfEveryKindShareATensor) {
  for (const auto& context : all_contexts()) {
    const layer_test::Device device(context);
    const Shape shape = small_shape();
    clattn::LayerRegistry layers;
    clattn::AttentionOptions plain = plain_options(80);
    Attention full(context, layers, plain);
    plain.prefix = "layers.1";
    plain.config.num_kv_heads = 1;  // half a page
    plain.config.sliding_window = 5;
    Attention windowed(context, layers, plain);
    Attention latent(context, layers, options_of(shape, "layers.2"));

    auto specs = get_kv_cache_spec(layers);
    clattn::KVCacheSpec state;
    state.kind = clattn::KVCacheKind::kMamba;
    state.states = {{{4, 5}, DType::kF16}, {{2, 8}, DType::kF16}, {{4, 4}, DType::kF32}};
    specs["layers.3"] = state;
    unify_kv_cache_spec_page_size(specs);
    const std::size_t page = specs.at("layers.0").page_size_bytes();
    EXPECT_EQ(specs.at("layers.1").block_size, 32);
    EXPECT_EQ(specs.at("layers.2").block_size, 64);  // 16 of its kernels' blocks
    clattn::KVCacheConfig config;
    config.num_blocks = 8;
    config.tensors = {{8 * page, {}}};
    for (const auto& [name, spec] : specs) {
      config.groups.push_back({{name}, spec});
      config.tensors[0].shared_by.push_back(name);
    }
    const auto groups = init_attn_backend(config, layers, context);
    EXPECT_EQ(groups[3].backend, nullptr);
    EXPECT_EQ(error_text([&] { init_kv_cache(config, layers, groups, *context, device.queue); }),
              "states: null, legal: where to put the states of 'layers.3'");
    clattn::StatesByLayer states;
    ASSERT_EQ(
        init_kv_cache(config, layers, groups, *context, device.queue, std::nullopt, &states).size(),
        3U);
    const std::vector<clattn::StateView>& views = states.at("layers.3");
    ASSERT_EQ(views.size(), 3U);
    EXPECT_EQ(views[0].buffer.handle(), full.kv_cache()->buffer.handle());
    EXPECT_EQ(views[1].offset, 20);
    EXPECT_EQ(views[2].offset, 18);  // floats
    EXPECT_EQ(views[2].block_stride * 4, static_cast<std::int64_t>(page));
    EXPECT_EQ(windowed.kv_cache()->num_blocks, 16);
    EXPECT_EQ(latent.kv_cache()->num_blocks, 8 * 16);

    // Page 7 is the state's, 6 the full layer's, 5 the windowed one's; the latent one's stand in
    // front.
    poison(device.queue, full);
    const std::vector<std::byte> kept(page, std::byte{0x5A});
    device.queue.write(views[0].buffer, kept, 7 * page);
    Requests requests(shape, 1, 3);
    ASSERT_LE(requests.num_blocks(), 5 * 16);
    requests.step({9}, 1);
    layer_test::Step wide({4, 2, 80, 16}, 2), narrow({4, 1, 80, 16}, 3);
    wide.add_request(9, 0, {6});
    const std::vector<std::int32_t> block = {5};
    std::vector<std::int32_t> kernel_blocks(2);
    clattn::map_to_kernel_blocks(block, 32, 16, kernel_blocks);
    EXPECT_EQ(kernel_blocks, (std::vector<std::int32_t>{10, 11}));
    narrow.add_request(9, 0, {kernel_blocks[0]});
    const auto pages_of = [](const auto& batch) {
      return clattn::GroupPages{batch.block_table, batch.block_table_stride};
    };
    const std::vector<clattn::GroupPages> pages = {
        pages_of(wide.batch()), pages_of(narrow.batch()), pages_of(requests.batch()), {}};
    const auto metadata = build_attn_metadata(device.queue, groups, wide.batch(), pages);
    EXPECT_FALSE(metadata.contains("layers.3"));
    wide.expect_truth(wide.run(device, full, metadata.at("layers.0")));
    narrow.set_window(5);
    narrow.expect_truth(narrow.run(device, windowed, metadata.at("layers.1")));
    requests.expect_truth(requests.run(*context, device.queue, latent, metadata.at("layers.2")),
                          latent, "latent");
    std::vector<std::byte> after(page);
    device.queue.read(views[0].buffer, after, 7 * page);
    EXPECT_EQ(after, kept);
  }
}

TEST(MLALayer, F3_AProfilingRunZeroesItsOutputAndABatchNeedsACache) {
  const auto& context = all_contexts().front();
  OneLayer model(context, small_shape(), 1, 2);
  model.requests.step({5}, 1);
  const std::vector<double> zeros(5 * 4 * 64, 0.0);
  EXPECT_EQ(model.requests.run(*context, model.queue, model.layer, nullptr), zeros);
  clattn::LayerRegistry others;
  Attention unbound(context, others, options_of(small_shape(), "layers.0"));
  EXPECT_EQ(model.requests.run(*context, model.queue, unbound, nullptr), zeros);
  EXPECT_EQ(error_text([&] {
              model.requests.run(*context, model.queue, unbound, &model.build());
            }).find("layer layers.0: no cache is bound"),
            0U);
}

// A2.1: one scale serves the whole row, so the larger part decides, whichever it is.
TEST(MLALayer, BothPartsOfARowCountForItsScale) {
  for (const auto& context : all_contexts()) {
    const layer_test::Device device(context);
    for (const bool rope_is_larger : {false, true}) {
      Shape shape = small_shape();
      shape.cache_dtype = DType::kFp8E4M3;
      clattn::AttentionOptions options = options_of(shape, "layers.0");
      options.calculate_kv_scales = true;
      clattn::LayerRegistry layers;
      Attention layer(context, layers, options);
      constexpr std::size_t kTokens = 3;
      std::vector<float> kv_c(kTokens * 64, 1), k_pe(kTokens * 16, -1), query(kTokens * 4 * 80, 2);
      (rope_is_larger ? k_pe : kv_c).back() = -50;
      query.back() = 7;
      const clattn::Buffer q = device.upload(query), c = device.upload(kv_c),
                           p = device.upload(k_pe);
      layer.calc_kv_scales(device.queue, {q.handle()}, {c.handle()}, {p.handle()}, kTokens);
      const std::vector<float> scales = device.download(layer.scales());
      EXPECT_FLOAT_EQ(scales[0], 50.0F / 200) << rope_is_larger;
      EXPECT_EQ(scales[1], 1);
      EXPECT_FLOAT_EQ(scales[2], 7.0F / 200);
    }
  }
}

// A2.7: a recorded step of the layer runs later batches.
TEST(MLALayer, A2_7_AReplayAttendsToTheNextBatch) {
  for (const auto& context : all_contexts()) {
    const Shape shape = small_shape();
    OneLayer model(context, shape, 3, 3);
    constexpr std::int64_t kRows = 3, kElems = kRows * 4 * 64;
    const auto room = [&](std::int64_t row) {
      return context->allocate(static_cast<std::size_t>(kRows * row) * sizeof(float));
    };
    const clattn::Buffer query = room(4 * 80), kv_c = room(64), k_pe = room(16);
    clattn::AttentionState state(context, *model.layer.get_attn_backend(), model.layer.config(),
                                 {.limits = {.num_blocks = model.requests.num_blocks()}});
    const auto capturing = state.graph_capture(kRows);
    const auto& metadata = state.graph_capture_get_metadata_for_batch(model.queue, kRows);
    step_test::FencedOutput out(*context, model.queue, shape.dtype, kElems, 64);
    clattn::GraphCapture capture(model.queue);
    model.layer.forward(model.queue,
                        {.query = {query.handle()},
                         .key = {kv_c.handle()},
                         .value = {k_pe.handle()},
                         .output = {out.buffer.handle(), out.front}},
                        &metadata, {.num_rows = kRows});
    const clattn::Graph graph = capture.end();
    for (std::uint32_t i = 1; i <= 3; ++i) {
      model.requests.step({1, i == 2 ? 0 : 1, 1}, i);
      const auto write = [&](const clattn::Buffer& to, step_test::Elements from) {
        model.queue.write(to, from.bytes());
      };
      write(query, model.requests.query());
      write(kv_c, model.requests.kv_c());
      write(k_pe, model.requests.k_pe());
      state.prepare_graph_input_buffers(model.queue, kRows, model.requests.batch());
      graph.replay(model.queue);
      model.requests.expect_truth(out.read(model.queue), model.layer, fmt::format("replay {}", i));
    }
  }
}

TEST(MLALayer, AWarmStepAllocatesNothing) {
  const auto& context = all_contexts().front();
  OneLayer model(context, small_shape(), 2, 2);
  model.requests.step({1, 1}, 1);
  const auto batch = model.requests.batch();
  const clattn::Buffer rows = context->allocate(2 * 4 * 80 * 4);
  const clattn::Buffer output = context->allocate(2 * 4 * 80 * 4);
  const auto step = [&] {
    const auto& metadata = model.groups[0].builder->build(model.queue, batch);
    model.layer.forward(model.queue,
                        {.query = {rows.handle()},
                         .key = {rows.handle()},
                         .value = {rows.handle()},
                         .output = {output.handle()}},
                        &metadata, {.num_rows = 2});
  };
  for (int warm = 0; warm < 4; ++warm) step();
  EXPECT_EQ(test::allocations_of([&] {
              for (int i = 0; i < 10; ++i) step();
            }),
            0U);
}

/// Whole blocks of a layer's cache are latent rows, once.
TEST(MLALayer, BlocksAreCopiedAndSwappedAsLatentRows) {
  const auto& context = all_contexts().front();
  const OneLayer model(context, small_shape(), 1, 3);
  const clattn::KVCache& cache = *model.layer.kv_cache();
  constexpr std::size_t kBlock = 4 * 80;
  const std::vector<float> before = layer_test::random_values(4 * kBlock, 1);
  model.queue.write(cache.buffer, std::as_bytes(std::span(before)));
  const clattn::BlockPair pair[] = {{2, 0}};
  clattn::copy_blocks(*context, model.queue, std::span(&cache, 1), pair);
  std::vector<float> after(before.size()), want = before;
  std::copy_n(before.begin() + 2 * kBlock, kBlock, want.begin());
  model.queue.read(cache.buffer, std::as_writable_bytes(std::span(after)));
  EXPECT_EQ(after, want);
  std::vector<float> image(kBlock);
  const clattn::BlockPair out[] = {{3, 0}};
  clattn::swap_blocks(*context, model.queue, cache, std::as_writable_bytes(std::span(image)), out);
  model.queue.finish();
  EXPECT_TRUE(std::equal(image.begin(), image.end(), before.begin() + 3 * kBlock));
  const clattn::MLACache rows = clattn::make_mla_cache(cache, 16);
  EXPECT_EQ(rows.buffer.handle(), cache.buffer.handle());
  EXPECT_EQ(rows.kv_lora_rank, 64);
  EXPECT_EQ(rows.num_blocks, cache.num_blocks);
}

TEST(MLALayer, OptionsThatLatentAttentionLacksAreRefused) {
  clattn::LayerRegistry layers;
  const auto refused = [&](ErrorCode code, auto change) {
    clattn::AttentionOptions options = options_of(small_shape(), "layers.1");
    change(options);
    return error_text([&] { const Attention layer(all_contexts()[0], layers, options); }, code);
  };
  using Options = clattn::AttentionOptions;
  EXPECT_NE(refused(ErrorCode::kUnsupported, [](Options& o) { o.config.sliding_window = 8; })
                .find("CLATTN_MLA: MLA is not supported for sliding_window"),
            std::string::npos);
  EXPECT_NE(refused(ErrorCode::kUnsupported, [](Options& o) { o.config.num_kv_heads = 4; })
                .find("CLATTN_MLA: num_kv_heads is 4, supported: 1"),
            std::string::npos);
  const Attention first(all_contexts()[0], layers, options_of(small_shape(), "layers.0"));
  EXPECT_EQ(refused(ErrorCode::kInvalidArgument,
                    [](Options& o) {
                      o.kv_sharing_target_layer_name = "layers.0";
                      o.config.rope_dim = 32;
                    }),
            "Specified KV sharing target layer for layers.1 is not valid: target layer layers.0 "
            "must have KV heads, head_size, block_size, kv_cache_dtype, use_mla and rope_dim of "
            "the current layer.");
  // Groups keep what their layers keep.
  clattn::KVCacheConfig config = config_of(layers, 1, {{"layers.0"}});
  config.groups[0].spec.use_mla = false;
  EXPECT_EQ(error_text([&] { init_attn_backend(config, layers, all_contexts()[0]); }),
            "KVCacheConfig: layer 'layers.0' has use_mla true, legal: its group's false");
}

TEST(MLALayer, WhatDoesNotFitTheLayerIsRefused) {
  const auto& context = all_contexts().front();
  OneLayer model(context, small_shape(), 1, 2);
  model.requests.step({3}, 1);
  const auto& metadata = model.build();
  const clattn::AttentionImpl& impl = model.layer.impl();
  const clattn::Buffer any = context->allocate(1 << 16);
  const clattn::TensorRef rows{any.handle()};
  const auto refused = [&](auto call) { return error_text(call); };
  const auto forward = [&](const clattn::KVCache& cache, const clattn::ForwardOptions& options) {
    impl.forward(model.queue, {.query = rows, .output = rows}, cache, metadata, options);
  };
  const clattn::KVCache& own = *model.layer.kv_cache();
  EXPECT_EQ(refused([&] { forward(own, {.custom_mask = any.handle()}); }),
            "custom_mask, output_fp8, output_scale: given, legal: none of them (MLA)");
  clattn::KVCache other = own;
  other.head_size = 88;
  EXPECT_EQ(refused([&] { forward(other, {}); }),
            "kv_cache: 4 tokens x 88 of f32, legal: 4 x 80 of f32 as this layer was configured");
  other = own;
  other.token_stride = 96;
  EXPECT_EQ(refused([&] { forward(other, {}); }),
            "kv_cache: K at 0, V at 0, tokens 96 and blocks 320 elements apart; legal for latent "
            "rows: 0, 0, 80 and 320");
  other = own;
  other.num_kv_heads = 2;
  EXPECT_EQ(refused([&] { forward(other, {}); }), "kv_cache: 2 KV heads, legal: 1 (MLA)");
  EXPECT_EQ(refused([&] { (void)clattn::make_mla_cache(own, 80); }),
            "rope_dim is 80, legal: multiples of 8 below the cache's head_size 80");
  other = own;
  other.num_blocks = 1000;
  EXPECT_NE(refused([&] {
              impl.write_kv_cache(model.queue, rows, rows, other, metadata);
            }).find("elements, legal: at least 320000 (num_blocks 1000)"),
            std::string::npos);
  clattn::AttentionConfig plain = {
      .num_heads = 4, .num_kv_heads = 2, .head_size = 64, .block_size = 4, .dtype = DType::kF32};
  const auto& flashinfer = *clattn::get_attn_backend(plain, nullptr, "FLASHINFER");
  const auto stranger = flashinfer.make_builder(context, plain);
  const auto& slots = stranger->build(model.queue, model.requests.batch());
  EXPECT_EQ(refused([&] { impl.write_kv_cache(model.queue, rows, rows, own, slots); }),
            "attn_metadata: built for other caches, legal: CLATTN_MLA with block_size 4");
  EXPECT_NE(refused([&] {
              impl.forward(model.queue, {.query = rows, .output = rows}, own, slots);
            }).find("attn_metadata: built for another configuration"),
            std::string::npos);
  EXPECT_EQ(error_text(
                [&] {
                  impl.forward_encoder(model.queue,
                                       {.query = rows, .key = rows, .value = rows, .output = rows},
                                       slots);
                },
                ErrorCode::kUnsupported),
            "attn_type decoder: keys and values come from the cache, use forward()");
  const clattn::KVCacheSpec spec = model.groups[0].spec;
  EXPECT_EQ(error_text(
                [&] {
                  (void)clattn::reshape_kv_cache(own.buffer, spec, flashinfer,
                                                 clattn::KVCacheLayout::kNHD);
                },
                ErrorCode::kUnsupported),
            "KV cache: use_mla is true, supported by backend FLASHINFER: false");
}

}  // namespace test_mla_layer
