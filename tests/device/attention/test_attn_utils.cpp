#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "support/error_text.hpp"

namespace {

using attention_test::all_contexts;
using clattn::Attention;
using clattn::DType;
using clattn::KVCacheKind;
using layer_test::Device;
using layer_test::Step;
using test::error_text;

constexpr std::int32_t kKVHeads = layer_test::kShape.num_kv_heads,
                       kDims = layer_test::kShape.head_size, kPage = layer_test::kShape.block_size;

clattn::AttentionOptions options_of(std::string prefix, std::int32_t window) {
  clattn::AttentionOptions options = layer_test::layer_options(std::move(prefix));
  options.per_layer_sliding_window = window;
  return options;
}

/// Three layers of their own caches, two of them windowed, and one that shares.
struct Model {
  explicit Model(const std::shared_ptr<clattn::Context>& context)
      : windowed(context, layers, options_of("layers.2.attn", 10)),
        full(context, layers, options_of("layers.0.attn", 0)),
        narrow(context, layers, options_of("layers.1.attn", 4)),
        sharer(context, layers, sharing()) {}

  static clattn::AttentionOptions sharing() {
    clattn::AttentionOptions options = options_of("layers.3.attn", 0);
    options.kv_sharing_target_layer_name = "layers.0.attn";
    return options;
  }

  /// Group 0: full; group 1: the windowed ones. Each layer has `blocks` pages of its own.
  clattn::KVCacheConfig cache_config(std::int64_t blocks) const {
    const auto specs = get_kv_cache_spec(layers);
    clattn::KVCacheConfig config;
    config.num_blocks = blocks;
    config.groups = {{{"layers.0.attn"}, specs.at("layers.0.attn")},
                     {{"layers.2.attn", "layers.1.attn"}, specs.at("layers.2.attn")}};
    for (const auto& [name, spec] : specs) {
      config.tensors.push_back({static_cast<std::size_t>(blocks) * spec.page_size_bytes(), {name}});
    }
    return config;
  }

  clattn::LayerRegistry layers;
  Attention windowed, full, narrow, sharer;
};

// A3: get_kv_cache_spec
TEST(AttnUtils, SpecsFollowTheLayers) {
  const Model model(all_contexts().at(0));
  const auto specs = get_kv_cache_spec(model.layers);
  ASSERT_EQ(specs.size(), 3U);  // the sharing layer owns nothing
  EXPECT_EQ(specs.at("layers.0.attn").kind, KVCacheKind::kFull);
  EXPECT_EQ(specs.at("layers.2.attn").kind, KVCacheKind::kSlidingWindow);
  EXPECT_EQ(specs.at("layers.2.attn").sliding_window, 10);
  EXPECT_EQ(specs.at("layers.0.attn").page_size_bytes(), 2U * kPage * kKVHeads * kDims * 4);
  clattn::LayerRegistry others;
  clattn::AttentionOptions options = options_of("layers.0", 0);
  options.attn_type = clattn::AttentionType::kEncoderOnly;
  const Attention encoder(all_contexts().at(0), others, options);
  EXPECT_EQ(error_text([&] { get_kv_cache_spec(others); }),
            "layer layers.0: attn_type is encoder_only, legal: decoder");
}

// A1.1, A3: a group's one plan either cascades for all its layers or for none.
TEST(AttnUtils, AGroupCascadesOnlyIfAllItsLayersCan) {
  const auto& context = all_contexts().at(0);
  const std::vector<std::int32_t> query_lens(16, 5);
  const clattn::CascadeQuery query{.common_prefix_len = 512,
                                   .query_lens = query_lens,
                                   .num_query_heads = layer_test::kShape.num_heads,
                                   .num_kv_heads = kKVHeads,
                                   .num_sms = 8};
  const auto answer = [&](auto change) {
    clattn::LayerRegistry layers;
    const Attention first(context, layers, options_of("layers.0.attn", 0));
    clattn::AttentionOptions other = options_of("layers.1.attn", 0);
    change(other);
    const Attention second(context, layers, other);
    const auto specs = get_kv_cache_spec(layers);
    clattn::KVCacheConfig config;
    config.groups = {{{"layers.0.attn", "layers.1.attn"}, specs.at("layers.0.attn")}};
    const auto groups = init_attn_backend(config, layers, context);
    return groups.at(0).builder->use_cascade_attention(query);
  };
  using Options = clattn::AttentionOptions;
  EXPECT_TRUE(answer([](Options&) {}));
  EXPECT_TRUE(answer([](Options& o) { o.logits_soft_cap = 30; }));
  EXPECT_FALSE(answer([](Options& o) { o.per_layer_sliding_window = 64; }));
  EXPECT_FALSE(answer([](Options& o) {
    o.alibi_slopes.assign(static_cast<std::size_t>(layer_test::kShape.num_heads), 0.5F);
  }));
}

// A3, A9.10: groups with page tables of their own; one metadata object each; every layer right.
TEST(AttnUtils, AModelOfTwoGroupsRunsAStep) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    Model model(context);
    const clattn::KVCacheConfig config = model.cache_config(6);
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 64, .max_model_len = 96};
    options.num_splits = 2;  // partial results, so that the workspace is in use
    options.workspace = std::make_shared<clattn::AttentionWorkspace>();
    const auto groups = init_attn_backend(config, model.layers, context, options);
    ASSERT_EQ(groups.size(), 2U);
    EXPECT_EQ(groups[0].layer_names, (std::vector<std::string>{"layers.0.attn", "layers.3.attn"}));
    EXPECT_GT(options.workspace->buffer.size_bytes(), 0U);

    const auto caches = init_kv_cache(config, model.layers, groups, *context, device.queue);
    const std::vector<const clattn::KVCache*> by_index = {
        model.full.kv_cache(), model.narrow.kv_cache(), model.windowed.kv_cache()};
    EXPECT_EQ(caches, by_index);
    EXPECT_EQ(model.sharer.kv_cache(), model.full.kv_cache());
    // M3: NHD, unless somebody says otherwise.
    EXPECT_EQ(clattn::AttentionState::get_kv_cache_layout(), clattn::KVCacheLayout::kNHD);
    for (const auto* cache : caches) EXPECT_EQ(cache->head_stride, layer_test::kShape.head_size);

    Step full(layer_test::kShape, 1);
    full.add_request(1, 0, {5, 99, 99});
    full.add_request(40, 0, {0, 2, 1});
    Step windowed(layer_test::kShape, 2);
    windowed.add_request(1, 0, {3, 99, 99});
    windowed.add_request(40, 0, {4, 0, 5});
    clattn::CommonAttentionMetadata common = full.batch();
    common.max_query_len = common.num_actual_tokens;  // A9.10: what vLLM passes
    const std::vector<clattn::GroupPages> pages = {
        {full.batch().block_table, full.batch().block_table_stride},
        {windowed.batch().block_table, windowed.batch().block_table_stride}};
    const auto metadata = build_attn_metadata(device.queue, groups, common, pages);
    ASSERT_EQ(metadata.size(), 4U);
    EXPECT_EQ(metadata.at("layers.0.attn"), metadata.at("layers.3.attn"));
    EXPECT_EQ(metadata.at("layers.1.attn"), metadata.at("layers.2.attn"));
    EXPECT_NE(metadata.at("layers.0.attn"), metadata.at("layers.1.attn"));
    EXPECT_EQ(metadata.at("layers.0.attn")->max_query_len(), 40);

    full.expect_truth(full.run(device, model.full, metadata.at("layers.0.attn")));
    windowed.set_window(4);
    windowed.expect_truth(windowed.run(device, model.narrow, metadata.at("layers.1.attn")));
    windowed.set_window(10);
    windowed.expect_truth(windowed.run(device, model.windowed, metadata.at("layers.2.attn")));
    full.expect_truth(full.run(device, model.sharer, metadata.at("layers.3.attn")));
    device.queue.finish();
  }
}

TEST(AttnUtils, ConfigurationsThatDoNotFitTheLayersAreRefused) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  Model model(context);
  clattn::KVCacheConfig config = model.cache_config(1);
  config.groups[0].layer_names.emplace_back("layers.9.attn");
  EXPECT_EQ(error_text([&] { init_attn_backend(config, model.layers, context); }),
            "KVCacheConfig: there is no layer 'layers.9.attn'");
  config = model.cache_config(1);
  config.groups[1].spec.num_kv_heads = 1;
  EXPECT_EQ(
      error_text([&] { init_attn_backend(config, model.layers, context); }),
      "KVCacheConfig: layer 'layers.2.attn' keeps 16 tokens x 2 heads x 64 of f32, legal: its "
      "group's 16 x 1 x 64 of f32");
  config = model.cache_config(1);
  {
    clattn::AttentionOptions options = options_of("layers.7.attn", 4);
    options.dtype = DType::kF16;
    options.cache_config->cache_dtype = DType::kF32;
    const Attention half(context, model.layers, options);
    config.groups[1].layer_names.emplace_back("layers.7.attn");
    EXPECT_EQ(error_text([&] { init_attn_backend(config, model.layers, context); }),
              "KVCacheConfig: layer 'layers.7.attn' has dtype f16, legal: its group's f32");
  }
  config = model.cache_config(1);
  const auto groups = init_attn_backend(config, model.layers, context);
  config.tensors.pop_back();
  EXPECT_NE(error_text([&] {
              init_kv_cache(config, model.layers, groups, *context, device.queue);
            }).find("some layers are not correctly initialized"),
            std::string::npos);
  EXPECT_EQ(error_text([&] {
              build_attn_metadata(device.queue, groups, clattn::CommonAttentionMetadata{}, {});
            }),
            "pages: 0 given, legal: one for each of the 2 groups");
}

/// A group's layers may have kernels of other tiles: what a driver spills depends on the options.
/// Here another family stands for that; whichever comes first, one plan serves both.
TEST(AttnUtils, LayersOfOneGroupMayHaveOtherTiles) {
  for (const auto& context : all_contexts()) {
    for (const bool small_first : {false, true}) {
      const Device device(context);
      clattn::LayerRegistry layers;
      clattn::AttentionOptions first = options_of("layers.0", 0),
                               second = options_of("layers.1", 0);
      (small_first ? first : second).kernel_family = clattn::KernelFamily::kGpu;
      Attention one(context, layers, first);
      Attention other(context, layers, second);
      clattn::KVCacheConfig config;
      config.num_blocks = 6;
      const clattn::KVCacheSpec spec = get_kv_cache_spec(layers).at("layers.0");
      config.groups = {{{"layers.0", "layers.1"}, spec}};
      config.tensors = {{6 * spec.page_size_bytes(), {"layers.0"}},
                        {6 * spec.page_size_bytes(), {"layers.1"}}};
      clattn::BuilderOptions options;
      options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 128, .max_model_len = 96};
      const auto groups = init_attn_backend(config, layers, context, options);
      init_kv_cache(config, layers, groups, *context, device.queue);
      Step step(layer_test::kShape, 8);
      step.add_request(1, 0, {5, 99, 99});
      step.add_request(5, 0, {3, 99, 99});
      step.add_request(40, 0, {0, 2, 1});
      const std::vector<clattn::GroupPages> pages = {
          {step.batch().block_table, step.batch().block_table_stride}};
      const auto metadata = build_attn_metadata(device.queue, groups, step.batch(), pages);
      for (Attention* layer : {&one, &other}) {
        SCOPED_TRACE(layer->layer_name() + (small_first ? ", small first" : ", small last"));
        step.expect_truth(step.run(device, *layer, metadata.at(layer->layer_name())));
      }
      device.queue.finish();
    }
  }
}

// M11
TEST(AttnUtils, M11_BindKVCacheBindsByNameAndOrdersByIndex) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  clattn::LayerRegistry layers;
  Attention second(context, layers, options_of("layers.1", 0));
  Attention first(context, layers, options_of("layers.0", 0));
  std::map<std::string, clattn::KVCache> caches;
  for (const Attention* layer : {&first, &second}) {
    caches.emplace(
        layer->layer_name(),
        make_kv_cache(*context, device.queue, *layer->get_attn_backend(), layer->config(), 2));
  }
  caches.emplace("layers.2", clattn::KVCache{});
  EXPECT_EQ(error_text([&] { bind_kv_cache(caches, layers); }),
            "KVCacheConfig: there is no layer 'layers.2'");
  clattn::AttentionOptions sharing = options_of("layers.2", 0);
  sharing.kv_sharing_target_layer_name = "layers.1";
  const Attention sharer(context, layers, sharing);
  EXPECT_EQ(error_text([&] { bind_kv_cache(caches, layers); }),
            "layer layers.2: it uses the cache of layers.1, bind that layer's");
  EXPECT_EQ(first.kv_cache(), nullptr);  // all or none
  EXPECT_EQ(second.kv_cache(), nullptr);
  caches.erase("layers.2");
  const auto bound = bind_kv_cache(caches, layers);
  EXPECT_EQ(bound, (std::vector<const clattn::KVCache*>{first.kv_cache(), second.kv_cache()}));
  EXPECT_EQ(first.kv_cache()->buffer.handle(), caches.at("layers.0").buffer.handle());
}

// A7: a backend that keeps all keys in front of all values shares no page with a state unless
// padded.
TEST(AttnUtils, A7_PagesBesideStatesAreInOnePiece) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  clattn::LayerRegistry layers;
  clattn::AttentionOptions options = options_of("layers.0", 0);
  options.dtype = clattn::DType::kF16;
  options.attn_backend = clattn::find_attn_backend("XFORMERS");
  const Attention layer(context, layers, options);
  auto specs = get_kv_cache_spec(layers);
  specs["layers.1"].kind = KVCacheKind::kMamba;
  specs["layers.1"].states = {{{4, 8}, clattn::DType::kF32}};
  unify_kv_cache_spec_page_size(specs);
  const auto init = [&] {
    const std::size_t page = specs.at("layers.0").page_size_bytes();
    const clattn::KVCacheConfig config{
        3,
        {{3 * page, {"layers.0", "layers.1"}}},
        {{{"layers.0"}, specs.at("layers.0")}, {{"layers.1"}, specs.at("layers.1")}}};
    const auto groups = init_attn_backend(config, layers, context);
    clattn::StatesByLayer states;
    init_kv_cache(config, layers, groups, *context, device.queue, std::nullopt, &states);
  };
  EXPECT_EQ(error_text(init),
            "KVCacheConfig: layer 'layers.0' shares a tensor with states, but keeps all keys in "
            "front of all values; legal: a spec with page_size_padded");
  EXPECT_EQ(layer.kv_cache(), nullptr);
  specs["layers.0"].page_size_padded = specs["layers.0"].page_size_bytes();
  init();
  EXPECT_NE(layer.kv_cache(), nullptr);
}

// M11: one workspace for all builders, given to them later.
TEST(AttnUtils, M11_AWorkspaceMayBeSetAfterwards) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  clattn::LayerRegistry layers;
  Attention layer(context, layers, options_of("layers.0", 0));
  layer.bind_kv_cache(
      make_kv_cache(*context, device.queue, *layer.get_attn_backend(), layer.config(), 4));
  clattn::BuilderOptions options;
  options.limits = {.max_num_reqs = 1, .max_num_batched_tokens = 64, .max_model_len = 64};
  options.num_splits = 2;  // partial results, so that the workspace is in use
  const auto builder = layer.get_attn_backend()->make_builder(context, layer.config(), options);
  const auto workspace = std::make_shared<clattn::AttentionWorkspace>();
  builder->set_workspace_buffer(workspace);
  Step step(layer_test::kShape, 3);
  step.add_request(60, 0, {0, 1, 2, 3});
  const auto& metadata = builder->build(device.queue, step.batch());
  EXPECT_GT(workspace->buffer.size_bytes(), 0U);
  step.expect_truth(step.run(device, layer, &metadata));
  EXPECT_EQ(error_text([&] { builder->set_workspace_buffer(nullptr); }),
            "set_workspace_buffer: null, legal: a workspace");
  options.limits.num_blocks = 4;
  options.graph_batch_size = 1;
  const auto recorded = layer.get_attn_backend()->make_builder(context, layer.config(), options);
  EXPECT_EQ(error_text([&] { recorded->set_workspace_buffer(workspace); },
                       clattn::ErrorCode::kUnsupported),
            "set_workspace_buffer: recorded launches are bound to the builder's own; legal: "
            "BuilderOptions::workspace");
  device.queue.finish();
}

/// A builder may outgrow the workspace while another one's step is still to run.
TEST(AttnUtils, BuildersThatShareAWorkspaceMayGrowIt) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  clattn::LayerRegistry layers;
  Attention layer(context, layers, options_of("layers.0", 0));
  const auto& backend = *layer.get_attn_backend();
  const clattn::KVCacheSpec spec{
      .block_size = kPage, .num_kv_heads = kKVHeads, .head_size = kDims, .dtype = DType::kF32};
  layer.bind_kv_cache(reshape_kv_cache(context->allocate(4 * spec.page_size_bytes()), spec, backend,
                                       clattn::KVCacheLayout::kNHD));
  clattn::BuilderOptions options;
  options.workspace = std::make_shared<clattn::AttentionWorkspace>();
  options.limits = {.max_num_reqs = 1, .max_num_batched_tokens = 64, .max_model_len = 8192};
  const auto small = backend.make_builder(context, layer.config(), options);
  Step step(layer_test::kShape, 3);
  step.add_request(60, 0, {0, 1, 2, 3});
  const auto& metadata = small->build(device.queue, step.batch());
  const auto before = options.workspace->buffer.size_bytes();
  clattn::AttentionConfig wide = layer.config();
  wide.head_size = 256;
  const auto large = backend.make_builder(context, wide, options);
  EXPECT_GT(options.workspace->buffer.size_bytes(), before);
  step.expect_truth(step.run(device, layer, &metadata));
  step.expect_truth(step.run(device, layer, &small->build(device.queue, step.batch())));
  device.queue.finish();
}

}  // namespace
