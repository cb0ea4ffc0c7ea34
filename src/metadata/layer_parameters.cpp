#include <clattn/compat/layer_parameters.hpp>
#include <cmath>
#include <set>
#include <string_view>

#include "base/error.hpp"

namespace clattn {
namespace {

PerLayerParameters parameters_of(const AttentionConfig& config) {
  PerLayerParameters result;
  // A window counts the own key, window_left does not.
  if (config.sliding_window > 0) result.window_left = config.sliding_window - 1;
  if (config.logits_soft_cap != 0) result.logits_soft_cap = config.logits_soft_cap;
  result.sm_scale = config.scale.value_or(1.0F / std::sqrt(static_cast<float>(config.head_size)));
  return result;
}

}  // namespace

LayerParameters get_per_layer_parameters(std::span<const NamedAttentionConfig> layers) {
  LayerParameters result;
  std::set<std::string_view> names;
  for (const NamedAttentionConfig& layer : layers) {
    detail::throw_invalid_if(!names.insert(layer.name).second,
                             "layer name \"{}\" is given twice, legal: once", layer.name);
    result.emplace_back(layer.name, parameters_of(layer.config));
  }
  return result;
}

GlobalHyperparameters infer_global_hyperparameters(const LayerParameters& per_layer_params) {
  detail::throw_invalid_if(per_layer_params.empty(), "No attention layers found in the model.");
  const PerLayerParameters& first = per_layer_params.front().second;
  GlobalHyperparameters result{first};
  for (const auto& [name, parameters] : per_layer_params) {
    if (parameters.window_left != first.window_left) result.has_same_window_lefts = false;
    if (!(parameters == first)) result.has_same_all_params = false;
  }
  return result;
}

}  // namespace clattn
