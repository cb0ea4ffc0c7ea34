#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <clattn/device.hpp>
#include <string>
#include <vector>

#include "device/attention_case.hpp"
#include "device/failing_builds.hpp"
#include "device/layer_model.hpp"

namespace test_layer_order {

using Programs = std::vector<std::string>;

/// Layers with kernels of their own, and some that share theirs with another.
std::vector<clattn::AttentionOptions> mixed_layers() {
  std::vector<clattn::AttentionOptions> layers(3, layer_test::layer_options(""));
  layers[1].config.sliding_window = 20;
  layers[2].config.dtype = clattn::DType::kF16;
  for (std::size_t i = 0; i < layers.size(); ++i) layers[i].prefix = "layers." + std::to_string(i);
  return layers;
}

/// What a fresh context has the driver build for layers that are made and warmed up in this order.
Programs built_for(const clattn::Context& like,
                   const std::vector<clattn::AttentionOptions>& layers) {
  const auto context = clattn::Context::adopt(like.handle(), like.device());
  const clattn::Queue queue = context->create_queue();
  const test::BuildLog log;
  clattn::LayerRegistry registry;
  std::vector<std::unique_ptr<clattn::Attention>> made;
  for (const clattn::AttentionOptions& options : layers) {
    auto& layer =
        *made.emplace_back(std::make_unique<clattn::Attention>(context, registry, options));
    layer.bind_kv_cache(
        make_kv_cache(*context, queue, *layer.get_attn_backend(), layer.config(), 2));
  }
  for (const auto& layer : made) layer->warm_up(queue);
  Programs programs = log.programs;
  std::ranges::sort(programs);
  return programs;
}

// P7: a driver that keeps what it compiled finds all of it, whatever the order of the layers was.
TEST(LayerOrder, P7_TheOrderOfLayersChangesNothingThatIsCompiled) {
  for (const auto& context : attention_test::all_contexts()) {
    SCOPED_TRACE(context->capabilities().platform_name);
    std::vector<clattn::AttentionOptions> layers = mixed_layers();
    built_for(*context, layers);  // from here on binaries are kept, where they are
    const Programs in_order = built_for(*context, layers);
    EXPECT_FALSE(in_order.empty());
    EXPECT_EQ(std::ranges::adjacent_find(in_order), in_order.end()) << "one is built twice";
    std::ranges::reverse(layers);
    EXPECT_TRUE(built_for(*context, layers) == in_order) << in_order.size() << " programs";
  }
}

}  // namespace test_layer_order
