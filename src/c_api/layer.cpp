#include <clattn/explain.hpp>
#include <clattn/registry.hpp>

#include "base/config_in_c.hpp"
#include "base/log.hpp"
#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

CLATTN_DESTROYS(clattn_model_destroy, ClattnModel)
CLATTN_DESTROYS(clattn_layer_destroy, ClattnLayer)

namespace {

/// A checkpoint's value, or none.
std::span<const float> loaded(const float& value) {
  return value <= 0 ? std::span<const float>{} : std::span(&value, 1);
}

}  // namespace

AttentionOptions clattn::c_api::options_of(const ClattnLayerConfig& config) {
  AttentionOptions options{.config = detail::config_from_c(config)};
  options.prefix = text_or(config.name, "");
  if (config.backend != nullptr) options.attn_backend = find_attn_backend(config.backend);
  options.kv_sharing_target_layer_name = text_or(config.kv_sharing_target_layer_name, "");
  options.calculate_kv_scales = config.calculate_kv_scales != 0;
  return options;
}

AttentionTensors clattn::c_api::tensors_of(const ClattnTensors& given) {
  return {.query = tensor_of(given.query),
          .key = tensor_of(given.key),
          .value = tensor_of(given.value),
          .output = tensor_of(given.output),
          .lse = memory_of(given.lse)};
}

ForwardOptions clattn::c_api::forward_options_of(const ClattnTensors& given) {
  return {.event = event_of(given.event),
          .custom_mask = memory_of(given.custom_mask),
          .custom_mask_stride = given.custom_mask_stride,
          .output_fp8 = memory_of(given.output_fp8),
          .output_scale = memory_of(given.output_scale),
          .num_rows = given.num_rows,
          .enable_kv_scales_calculation = given.no_kv_scales_calculation == 0};
}

void clattn::c_api::load_kv_scales(Attention& layer, const ClattnKVScales* scales) {
  const ClattnKVScales& given = read(scales, "scales");
  const auto warnings = layer.load_kv_scales({.k_scale = loaded(given.k_scale),
                                              .v_scale = loaded(given.v_scale),
                                              .q_scale = loaded(given.q_scale),
                                              .prob_scale = loaded(given.prob_scale),
                                              .fnuz = given.fnuz != 0});
  for (const std::string& warning : warnings) detail::log(LogLevel::kInfo, "{}", warning);
}

ClattnResult clattn_model_create(ClattnModel** model) {
  return make_handle(model, [] { return std::make_shared<LayerRegistry>(); });
}

ClattnResult clattn_layer_create(const ClattnContext* context, ClattnModel* model,
                                 const ClattnLayerConfig* config, ClattnLayer** layer) {
  return make_handle(layer, [&] {
    const auto& on = held(context);
    const auto registry = model == nullptr ? std::make_shared<LayerRegistry>() : model->held;
    return ClattnLayer{on, registry, Attention(on, *registry, options_of(read(config, "config")))};
  });
}

ClattnResult clattn_layer_explain(const ClattnLayer* layer, char* text, size_t capacity,
                                  size_t* size) {
  return give_text(text, capacity, size, [&] { return to_string(held(layer).explain()); });
}

ClattnResult clattn_layer_load_kv_scales(ClattnLayer* layer, const ClattnKVScales* scales) {
  return guarded([&] { load_kv_scales(held(layer), scales); });
}

ClattnResult clattn_layer_bind_cache(ClattnLayer* layer, ClattnCache* cache) {
  return guarded([&] {
    Attention& of = held(layer);
    of.bind_kv_cache(held(cache));
    cache->bound = of.shared_kv_cache();
  });
}

ClattnResult clattn_warm_up(ClattnLayer* const* layers, size_t num_layers, const ClattnQueue* queue,
                            ClattnProgress progress, void* user) {
  return guarded([&] {
    const auto all = elements(layers, num_layers, "layers");
    const Queue& on = held(queue);
    for (ClattnLayer* const layer : all) deref(layer, "layers: an element");
    for (std::size_t done = 0; done < num_layers; ++done) {
      all[done]->held.warm_up(on);
      if (progress != nullptr) progress(user, done + 1, num_layers);
    }
  });
}

ClattnResult clattn_layer_forward(ClattnLayer* layer, const ClattnQueue* queue,
                                  const ClattnTensors* tensors, const ClattnStep* step) {
  return guarded([&] {
    const ClattnTensors& given = read(tensors, "tensors");
    held(layer).forward(held(queue), tensors_of(given),
                        step == nullptr ? nullptr : &metadata_of(step), forward_options_of(given));
  });
}

ClattnResult clattn_extract_layer_index(const char* layer_name, int32_t* index) {
  return give(index, "index",
              [&] { return extract_layer_index(&deref(layer_name, "layer_name")); });
}

ClattnResult clattn_layer_scales(const ClattnLayer* layer, ClattnBuffer** scales,
                                 float* prob_scale) {
  return give(scales, "scales", [&] {
    const Attention& of = held(layer);
    deref(prob_scale, "prob_scale") = of.prob_scale();
    return of.scales() ? new ClattnBuffer{{of.scales()}} : nullptr;
  });
}

ClattnResult clattn_layer_calc_kv_scales(ClattnLayer* layer, const ClattnQueue* queue,
                                         const ClattnTensors* tensors, int64_t num_tokens,
                                         int64_t num_keys) {
  return guarded([&] {
    const ClattnTensors& given = read(tensors, "tensors");
    held(layer).calc_kv_scales(held(queue), tensor_of(given.query), tensor_of(given.key),
                               tensor_of(given.value), num_tokens,
                               num_keys == 0 ? num_tokens : num_keys);
  });
}
