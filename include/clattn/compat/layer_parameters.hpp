#pragma once

// For planners that allow only one window, cap and scale for all layers, as FlashInfer's does;
// CLAttn's builders need no such check.

#include <clattn/attention.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace CLATTN_API clattn {

/// What a plan of the kernels depends on, layer by layer.
struct PerLayerParameters {
  std::int32_t window_left = -1;  ///< keys before its own that a query sees; -1 = all
  std::optional<float> logits_soft_cap =
      std::nullopt;    ///< nullopt and 0 both mean none, and compare equal
  float sm_scale = 1;  ///< factor of the logits

  bool operator==(const PerLayerParameters& other) const {
    return window_left == other.window_left && sm_scale == other.sm_scale &&
           logits_soft_cap.value_or(0) == other.logits_soft_cap.value_or(0);
  }
};

/// A layer of a model by its name.
struct NamedAttentionConfig {
  std::string name = {};        ///< unique in the model
  AttentionConfig config = {};  ///< of the layer
};
/// Layers by name, in the order of the model.
using LayerParameters = std::vector<std::pair<std::string, PerLayerParameters>>;

/// Each layer's parameters, in the order given. A name given twice is refused.
LayerParameters get_per_layer_parameters(std::span<const NamedAttentionConfig> layers);

/// The first layer's parameters, and how far they hold for the others.
struct GlobalHyperparameters : PerLayerParameters {
  bool has_same_window_lefts = true;  ///< whether all layers have this window_left
  bool has_same_all_params = true;    ///< whether all layers have these parameters
};

/// Layers may differ; the flags say whether they do. An empty list of layers is an error.
GlobalHyperparameters infer_global_hyperparameters(const LayerParameters& per_layer_params);

}  // namespace clattn
