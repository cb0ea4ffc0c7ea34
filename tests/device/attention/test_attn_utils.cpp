#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/cascade.hpp>
#include <clattn/clattn.hpp>
#include <clattn/graph.hpp>
#include <clattn/registry.hpp>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "support/error_text.hpp"

namespace test_attn_utils {

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
  options.config.sliding_window = window;
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
  options.config.attn_type = clattn::AttentionType::kEncoderOnly;
  const Attention encoder(all_contexts().at(0), others, options);
  EXPECT_EQ(error_text([&] { get_kv_cache_spec(others); }),
            "layer layers.0: attn_type is encoder_only, legal: decoder");
}

/// The spec of a layer whose window has these sides.
clattn::KVCacheSpec spec_of(std::int32_t left, std::int32_t right) {
  clattn::LayerRegistry layers;
  clattn::AttentionOptions options = options_of("layers.0", 0);
  options.config.window_left = left;
  options.config.window_right = right;
  const Attention layer(all_contexts().at(0), layers, options);
  return get_kv_cache_spec(layers).at("layers.0");
}

TEST(AttnUtils, SpecsFollowTheLeftSidesOfWindows) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(spec_of(5, -1).kind, KVCacheKind::kSlidingWindow);
  EXPECT_EQ(spec_of(5, -1).sliding_window, 6);
  EXPECT_EQ(spec_of(0, 3).sliding_window, 1);
  EXPECT_EQ(spec_of(kMost, -1).sliding_window, kMost);
  EXPECT_EQ(spec_of(-1, 3).kind, KVCacheKind::kFull);
  EXPECT_EQ(spec_of(-1, 3).sliding_window, 0);
}

/// The configuration that the plan of two layers' group is made for.
clattn::AttentionConfig plan_of(void (*change)(clattn::AttentionConfig& one,
                                               clattn::AttentionConfig& other)) {
  const auto& context = all_contexts().at(0);
  clattn::AttentionOptions one = options_of("layers.0", 0), other = options_of("layers.1", 0);
  change(one.config, other.config);
  clattn::LayerRegistry layers;
  const Attention first(context, layers, one), second(context, layers, other);
  clattn::KVCacheConfig config;
  config.groups = {{{"layers.0", "layers.1"}, get_kv_cache_spec(layers).at("layers.0")}};
  return init_attn_backend(config, layers, context).at(0).config;
}

TEST(AttnUtils, AGroupPlansForTheWiderOfEachSide) {
  using Config = clattn::AttentionConfig;
  const Config mixed = plan_of([](Config& one, Config& other) {
    one.sliding_window = 10;
    other.window_left = 20;
    other.window_right = 3;
  });
  EXPECT_EQ(mixed.sliding_window, 0);
  EXPECT_EQ(mixed.window_left, 20);
  EXPECT_EQ(mixed.window_right, 9);
  const Config causal = plan_of([](Config& one, Config& other) {
    one.sliding_window = 10;
    other.window_left = 4;
  });
  EXPECT_EQ(causal.sliding_window, 0);
  EXPECT_EQ(causal.window_left, 9);
  EXPECT_EQ(causal.window_right, -1);
  const Config full = plan_of([](Config& one, Config&) { one.window_left = 4; });
  EXPECT_EQ(full.sliding_window, 0);
  EXPECT_EQ(full.window_left, -1);
  EXPECT_EQ(full.window_right, -1);
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
  EXPECT_TRUE(answer([](Options& o) { o.config.logits_soft_cap = 30; }));
  EXPECT_FALSE(answer([](Options& o) { o.config.sliding_window = 64; }));
  EXPECT_FALSE(answer([](Options& o) {
    o.config.alibi_slopes.assign(static_cast<std::size_t>(layer_test::kShape.num_heads), 0.5F);
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
    // The backend's preferred layout, unless somebody says otherwise.
    for (const auto* cache : caches) EXPECT_GT(cache->head_stride, cache->token_stride);

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

// A3: layers of one cache group and two backends share its pages, not their plan or its memory.
TEST(AttnUtils, A3_LayersOfTwoBackendsShareACacheGroup) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    clattn::LayerRegistry layers;
    std::vector<std::unique_ptr<Attention>> model;
    for (const char* const backend : {"FLASHINFER", "XFORMERS", "FLASHINFER"}) {
      clattn::AttentionOptions options =
          options_of("layers." + std::to_string(model.size()) + ".attn", 0);
      options.config.dtype = DType::kF16;
      options.attn_backend = clattn::find_attn_backend(backend);
      model.push_back(std::make_unique<Attention>(context, layers, options));
    }
    const clattn::KVCacheSpec spec = get_kv_cache_spec(layers).at("layers.0.attn");
    clattn::KVCacheConfig config{
        .num_blocks = 6, .tensors = {}, .groups = {{{}, spec}, {{}, spec}}};
    for (const auto& layer : model) {
      const std::size_t id = layer == model.back() ? 1 : 0;
      config.groups[id].layer_names.push_back(layer->layer_name());
      config.tensors.push_back({6 * spec.page_size_bytes(), {layer->layer_name()}});
    }
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 64, .max_model_len = 96};
    const auto groups = init_attn_backend(config, layers, context, options);
    ASSERT_EQ(groups.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(groups[i].kv_cache_group_id, i == 2 ? 1 : 0);
      EXPECT_EQ(groups[i].backend, model[i]->get_attn_backend());
      EXPECT_EQ(groups[i].layer_names, std::vector{model[i]->layer_name()});
    }
    init_kv_cache(config, layers, groups, *context, device.queue);
    // As each backend shapes it: XFORMERS keeps all keys in front of all values.
    EXPECT_GT(model[1]->kv_cache()->v_offset, model[0]->kv_cache()->v_offset);
    const std::vector<std::int32_t> starts = {0, 40}, lens = {40}, own = {0, 2, 1},
                                    others = {4, 0, 5};
    const std::vector<clattn::GroupPages> pages = {{own, 3}, {others, 3}};
    const auto metadata = build_attn_metadata(
        device.queue, groups, clattn::CommonAttentionMetadata::of(starts, lens, {}), pages);
    EXPECT_EQ(metadata.at("layers.0.attn")->backend(), "FLASHINFER");
    EXPECT_EQ(metadata.at("layers.1.attn")->backend(), "XFORMERS");
    // The backends have the same kernels, so the same rows have the same bits wherever they lie.
    constexpr std::size_t kRow = layer_test::kShape.num_heads * kDims;
    std::mt19937 random(3);
    std::vector<std::uint16_t> rows(40 * kRow);  // halves between 0.5 and 1
    for (std::uint16_t& row : rows) row = static_cast<std::uint16_t>(0x3800U | (random() & 0x3FFU));
    const clattn::Buffer in = context->allocate(rows.size() * 2);
    device.queue.write(in, std::as_bytes(std::span(rows)));
    std::vector<std::vector<std::uint16_t>> outputs;
    for (const auto& layer : model) {
      const clattn::Buffer out = context->allocate(rows.size() * 2);
      layer->forward(device.queue,
                     {.query = {in.handle()},
                      .key = {in.handle()},
                      .value = {in.handle()},
                      .output = {out.handle()}},
                     metadata.at(layer->layer_name()));
      std::vector<std::uint16_t>& got = outputs.emplace_back(rows.size());
      device.queue.read(out, std::as_writable_bytes(std::span(got)));
      EXPECT_EQ(got, outputs.front()) << layer->layer_name();
    }
    // A query's first row is its value.
    EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + kDims, outputs.front().begin()));
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
    options.config.dtype = DType::kF16;
    options.config.kv_cache_dtype = DType::kF32;
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
            "pages: 0 given, legal: one for each of the 2 KV cache groups");
  const std::span<const clattn::AttentionGroup> too_few = std::span(groups).first(1);
  EXPECT_EQ(error_text([&] {
              init_kv_cache(model.cache_config(1), model.layers, too_few, *context, device.queue);
            }),
            "groups: none holds layer 'layers.2.attn' of the configuration's group 1, legal: those "
            "that init_attn_backend() made from it");
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
      (small_first ? first : second).config.kernel_family = clattn::KernelFamily::kGpu;
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
  options.config.dtype = clattn::DType::kF16;
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

TEST(AttnUtils, EveryWayToMakeACacheHasOneDefaultLayout) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  for (const auto set :
       {std::optional<clattn::KVCacheLayout>{}, std::optional(clattn::KVCacheLayout::kNHD),
        std::optional(clattn::KVCacheLayout::kHND)}) {
    clattn::set_kv_cache_layout(set);
    const clattn::AttentionOptions options = options_of("layers.0", 0);
    clattn::LayerRegistry layers;
    Attention layer(context, layers, options);
    const auto backend = layer.get_attn_backend();
    const bool by_head =
        default_kv_cache_layout(*backend, context->capabilities()) == clattn::KVCacheLayout::kHND;
    EXPECT_EQ(by_head, set != clattn::KVCacheLayout::kNHD);
    const clattn::KVCache single =
        make_kv_cache(*context, device.queue, *backend, layer.config(), 4);
    const auto specs = get_kv_cache_spec(layers);
    const clattn::KVCacheConfig config{4,
                                       {{4 * specs.at("layers.0").page_size_bytes(), {"layers.0"}}},
                                       {{{"layers.0"}, specs.at("layers.0")}}};
    const auto groups = init_attn_backend(config, layers, context);
    init_kv_cache(config, layers, groups, *context, device.queue);
    const clattn::Session session(context, device.queue, {.layers = {options}, .num_blocks = 4});
    for (const clattn::KVCache* cache : {&single, layer.kv_cache(), session.layer(0).kv_cache()}) {
      EXPECT_EQ(cache->head_stride > cache->token_stride, by_head);
    }
  }
  clattn::set_kv_cache_layout(std::nullopt);
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

}  // namespace test_attn_utils
