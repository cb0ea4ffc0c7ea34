// Layers of other sizes under one block table.
#include <gtest/gtest.h>

#include <clattn/attn_utils.hpp>
#include <clattn/clattn.hpp>
#include <memory>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/layer_model.hpp"
#include "support/error_text.hpp"

namespace test_attn_groups {

using attention_test::all_contexts;
using clattn::Attention;
using layer_test::Device;
using layer_test::kShape;
using layer_test::Shape;
using layer_test::Step;
using test::error_text;

clattn::AttentionOptions options_of(std::string prefix, const Shape& shape) {
  clattn::AttentionOptions options = layer_test::layer_options(std::move(prefix));
  options.config.num_heads = shape.num_heads;
  options.config.num_kv_heads = shape.num_kv_heads;
  options.config.head_size = shape.head_size;
  return options;
}

constexpr Shape kWide = {6, 3, 96, 16}, kManyHeads = {8, 2, 64, 16};

/// Two layers of other sizes, and one of more query heads that attends to the first one's cache.
struct Model {
  explicit Model(const std::shared_ptr<clattn::Context>& context)
      : plain(context, layers, options_of("layers.0", kShape)),
        wide(context, layers, options_of("layers.1", kWide)),
        sharer(context, layers, sharing()) {}

  static clattn::AttentionOptions sharing() {
    clattn::AttentionOptions options = options_of("layers.2", kManyHeads);
    options.kv_sharing_target_layer_name = "layers.0";
    return options;
  }

  clattn::KVCacheConfig cache_config(std::int64_t blocks) const {
    const auto specs = get_kv_cache_spec(layers);
    clattn::KVCacheConfig config{.num_blocks = blocks, .tensors = {}, .groups = {}};
    config.groups = {
        {{"layers.0", "layers.1"}, specs.at("layers.0"), {{"layers.1", specs.at("layers.1")}}}};
    for (const auto& [name, spec] : specs)
      config.tensors.push_back({static_cast<std::size_t>(blocks) * spec.page_size_bytes(), {name}});
    return config;
  }

  clattn::LayerRegistry layers;
  Attention plain, wide, sharer;
};

/// The same requests for a layer of any shape.
Step step_of(const Shape& shape) {
  Step step(shape, 5);
  step.add_request(1, 0, {5, 99, 99});
  step.add_request(40, 0, {0, 2, 1});
  step.add_request(3, 0, {4, 99, 99});
  return step;
}

TEST(AttnGroups, S5_LayersOfOtherSizesShareABlockTable) {
  for (const auto& context : all_contexts()) {
    const Device device(context);
    Model model(context);
    const clattn::KVCacheConfig config = model.cache_config(6);
    EXPECT_EQ(config.groups[0].page_size_bytes(), 2U * 16 * (2 * 64 + 3 * 96) * sizeof(float));
    clattn::BuilderOptions options;
    options.limits = {.max_num_reqs = 4, .max_num_batched_tokens = 64, .max_model_len = 96};
    options.num_splits = 2;  // partial results, whose memory all groups share
    const auto groups = init_attn_backend(config, model.layers, context, options);
    ASSERT_EQ(groups.size(), 3U);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      EXPECT_EQ(groups[i].kv_cache_group_id, 0);
      EXPECT_EQ(groups[i].layer_names, std::vector{"layers." + std::to_string(i)});
    }
    EXPECT_EQ(groups[1].spec.head_size, 96);
    EXPECT_EQ(groups[2].spec, groups[0].spec);
    EXPECT_EQ(groups[2].config.num_heads, 8);
    init_kv_cache(config, model.layers, groups, *context, device.queue);
    EXPECT_EQ(model.wide.kv_cache()->num_kv_heads, 3);
    EXPECT_EQ(model.sharer.kv_cache(), model.plain.kv_cache());

    const Step plain = step_of(kShape), wide = step_of(kWide), sharing = step_of(kManyHeads);
    const std::vector<clattn::GroupPages> pages = {
        {plain.batch().block_table, plain.batch().block_table_stride}};
    const auto metadata = build_attn_metadata(device.queue, groups, plain.batch(), pages);
    ASSERT_EQ(metadata.size(), 3U);
    plain.expect_truth(plain.run(device, model.plain, metadata.at("layers.0")));
    wide.expect_truth(wide.run(device, model.wide, metadata.at("layers.1")));
    sharing.expect_truth(sharing.run(device, model.sharer, metadata.at("layers.2")));
    device.queue.finish();
  }
}

TEST(AttnGroups, S5_SpecsThatAreNotTheLayersAreRefused) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  Model model(context);
  const auto refusal = [&](auto change) {
    clattn::KVCacheConfig config = model.cache_config(2);
    change(config.groups[0]);
    return error_text([&] { init_attn_backend(config, model.layers, context); });
  };
  using Group = clattn::KVCacheGroupSpec;
  EXPECT_EQ(refusal([](Group& group) { group.layer_specs.clear(); }),
            "KVCacheConfig: layer 'layers.1' keeps 16 tokens x 3 heads x 96 of f32, legal: its "
            "group's 16 x 2 x 64 of f32");
  EXPECT_EQ(refusal([](Group& group) { group.layer_specs.at("layers.1").block_size = 32; }),
            "KVCacheGroupSpec: layer 'layers.1' has block_size 32, legal: spec's 16");
  EXPECT_EQ(refusal([](Group& group) { group.layer_specs["layers.7"] = group.spec; }),
            "KVCacheGroupSpec: layer_specs has a layer 'layers.7', legal: layer_names");
  clattn::KVCacheConfig config = model.cache_config(2);
  config.groups[0].layer_specs.at("layers.1").kind = clattn::KVCacheKind::kCross;
  EXPECT_EQ(error_text([&] { allocate_kv_cache(*context, device.queue, config); }),
            "KVCacheGroupSpec: layer 'layers.1' has kind cross, legal: spec's full");
}

// States of one KV cache group may differ in size, too.
TEST(AttnGroups, S5_StatesOfOtherSizesShareAGroup) {
  const auto& context = all_contexts().at(0);
  const Device device(context);
  const clattn::LayerRegistry layers;
  clattn::KVCacheSpec small, large;
  small.kind = large.kind = clattn::KVCacheKind::kMamba;
  small.states = {{{4}, clattn::DType::kF32}};
  large.states = {{{12}, clattn::DType::kF32}};
  const clattn::KVCacheConfig config{3,
                                     {{3 * 16, {"a"}}, {3 * 48, {"b"}}, {3 * 16, {"c"}}},
                                     {{{"a", "b", "c"}, small, {{"b", large}}}}};
  const auto groups = init_attn_backend(config, layers, context);
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].layer_names, (std::vector<std::string>{"a", "c"}));
  EXPECT_EQ(groups[1].spec, large);
  clattn::StatesByLayer states;
  init_kv_cache(config, layers, groups, *context, device.queue, std::nullopt, &states);
  EXPECT_EQ(states.at("b").at(0).block_stride, 12);
  EXPECT_EQ(states.at("c").at(0).num_blocks, 3);
}

}  // namespace test_attn_groups
