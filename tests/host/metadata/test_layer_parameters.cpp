#include <gtest/gtest.h>

#include <clattn/compat/layer_parameters.hpp>
#include <vector>

#include "host/metadata_batch.hpp"

namespace clattn {
namespace {

using test::error_text;

// A9.5: kernels treat both alike, so equality does.
TEST(PerLayerParameters, A1_3_NoCapEqualsACapOfZero) {
  const PerLayerParameters none{.window_left = 7, .logits_soft_cap = {}, .sm_scale = 0.5F};
  PerLayerParameters other = none;
  other.logits_soft_cap = 0.0F;
  EXPECT_EQ(none, other);
  other.logits_soft_cap = 30.0F;
  EXPECT_FALSE(none == other);
  other = none;
  other.window_left = -1;
  EXPECT_FALSE(none == other);
  other = none;
  other.sm_scale = 0.25F;
  EXPECT_FALSE(none == other);
}

AttentionConfig config(std::int32_t sliding_window, float logits_soft_cap = 0) {
  AttentionConfig result;
  result.num_heads = result.num_kv_heads = 4;
  result.head_size = 64;
  result.sliding_window = sliding_window;
  result.logits_soft_cap = logits_soft_cap;
  return result;
}

TEST(GetPerLayerParameters, A1_5_TranslatesConfigurations) {
  std::vector<NamedAttentionConfig> layers{
      {"b.attn", config(0)}, {"a.attn", config(4096)}, {"c.attn", config(1, 50.0F)}};
  layers[2].config.scale = 0.1F;
  const LayerParameters result = get_per_layer_parameters(layers);
  ASSERT_EQ(result.size(), 3U);
  EXPECT_EQ(result[0].first, "b.attn");
  EXPECT_EQ(result[0].second, (PerLayerParameters{-1, {}, 0.125F}));
  // A window of w tokens reaches w - 1 to the left.
  EXPECT_EQ(result[1].second, (PerLayerParameters{4095, {}, 0.125F}));
  EXPECT_EQ(result[2].second, (PerLayerParameters{0, 50.0F, 0.1F}));
  layers[0].config.window_left = 7;
  layers[1].config.sliding_window = 0;
  layers[1].config.window_right = 7;
  EXPECT_EQ(get_per_layer_parameters(layers)[0].second.window_left, 7);
  EXPECT_EQ(get_per_layer_parameters(layers)[1].second.window_left, -1);
  EXPECT_TRUE(get_per_layer_parameters({}).empty());
  layers[2].name = "b.attn";
  EXPECT_EQ(error_text([&] { get_per_layer_parameters(layers); }),
            "layer name \"b.attn\" is given twice, legal: once");
}

TEST(InferGlobalHyperparameters, A1_6_LayersThatDifferAreNoError) {
  const auto infer = [](const std::vector<NamedAttentionConfig>& layers) {
    return infer_global_hyperparameters(get_per_layer_parameters(layers));
  };
  const GlobalHyperparameters same = infer({{"0", config(8)}, {"1", config(8)}});
  EXPECT_EQ(same.window_left, 7);
  EXPECT_TRUE(same.has_same_window_lefts);
  EXPECT_TRUE(same.has_same_all_params);

  const GlobalHyperparameters mixed = infer({{"0", config(8)}, {"1", config(0)}});
  EXPECT_EQ(mixed.window_left, 7);  // the first layer's
  EXPECT_FALSE(mixed.has_same_window_lefts);
  EXPECT_FALSE(mixed.has_same_all_params);

  const GlobalHyperparameters caps = infer({{"0", config(8)}, {"1", config(8, 30.0F)}});
  EXPECT_TRUE(caps.has_same_window_lefts);
  EXPECT_FALSE(caps.has_same_all_params);

  EXPECT_EQ(error_text([] { infer_global_hyperparameters({}); }),
            "No attention layers found in the model.");
}

}  // namespace
}  // namespace clattn
