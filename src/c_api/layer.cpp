#include <clattn/attention.hpp>
#include <clattn/layer.hpp>
#include <span>
#include <vector>

#include "base/log.hpp"
#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

std::vector<float> floats(const float* values, std::int32_t count) {
  if (values == nullptr || count <= 0) return {};
  return {values, values + count};
}

/// A checkpoint's value, or none.
std::span<const float> loaded(const float& value) {
  return value <= 0 ? std::span<const float>{} : std::span(&value, 1);
}

}  // namespace

AttentionOptions clattn::c_api::options_of(const ClattnLayerConfig& config) {
  AttentionOptions options;
  options.num_heads = config.num_heads;
  options.head_size = config.head_size;
  options.head_size_v = config.head_size_v;
  if (config.num_kv_heads != 0) options.num_kv_heads = config.num_kv_heads;
  CacheConfig cache;
  if (config.block_size != 0) cache.block_size = config.block_size;
  cache.cache_dtype = parse_kv_cache_dtype(text_or(config.kv_cache_dtype, "auto"));
  cache.calculate_kv_scales = config.calculate_kv_scales != 0;
  options.cache_config = cache;
  options.prefix = text_or(config.name, "");
  options.dtype = parse_dtype(text_or(config.dtype, "f16"));
  options.attn_type = parse_attention_type(text_or(config.attn_type, "decoder"));
  options.kernel_family = parse_kernel_family(text_or(config.kernel_family, "auto"));
  if (config.backend != nullptr) options.attn_backend = find_attn_backend(config.backend);
  options.kv_sharing_target_layer_name = text_or(config.kv_sharing_target_layer_name, "");
  options.alibi_slopes = floats(config.alibi_slopes, config.num_heads);
  options.sinks = floats(config.sinks, config.num_heads);
  if (config.scale != 0) options.scale = config.scale;
  options.logits_soft_cap = config.logits_soft_cap;
  options.per_layer_sliding_window = config.sliding_window;
  options.attention_chunk_size = config.attention_chunk_size;
  options.use_mla = config.use_mla != 0;
  if (config.rope_dim != 0) options.rope_dim = config.rope_dim;
  options.custom_mask = config.custom_mask != 0;
  options.output_fp8 = config.output_fp8 != 0;
  options.fp8_products = config.fp8_products != 0;
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
          .num_rows = given.num_rows};
}

void clattn::c_api::load_kv_scales(Attention& layer, const ClattnKVScales* scales) {
  const ClattnKVScales& given = read(scales, "scales");
  const auto warnings = layer.load_kv_scales({.k_scale = loaded(given.k_scale),
                                              .v_scale = loaded(given.v_scale),
                                              .q_scale = loaded(given.q_scale),
                                              .prob_scale = loaded(given.prob_scale)});
  for (const std::string& warning : warnings) detail::log(LogLevel::kInfo, "{}", warning);
}

ClattnResult clattn_model_create(ClattnModel** model) {
  return make_handle(model, "model", [] { return ClattnModel{std::make_shared<LayerRegistry>()}; });
}

void clattn_model_destroy(ClattnModel* model) {
  delete model;
}

ClattnResult clattn_layer_create(const ClattnContext* context, ClattnModel* model,
                                 const ClattnLayerConfig* config, ClattnLayer** layer) {
  return make_handle(layer, "layer", [&] {
    const auto& on = deref(context, "context").context;
    const auto registry = model == nullptr ? std::make_shared<LayerRegistry>() : model->registry;
    return ClattnLayer{on, registry, Attention(on, *registry, options_of(read(config, "config")))};
  });
}

void clattn_layer_destroy(ClattnLayer* layer) {
  delete layer;
}

ClattnResult clattn_layer_explain(const ClattnLayer* layer, char* text, size_t capacity,
                                  size_t* size) {
  return guarded([&] {
    const Attention& of = deref(layer, "layer").layer;
    copy_text(to_string(of.explain()), text, capacity, size);
  });
}

ClattnResult clattn_layer_load_kv_scales(ClattnLayer* layer, const ClattnKVScales* scales) {
  return guarded([&] { load_kv_scales(deref(layer, "layer").layer, scales); });
}

ClattnResult clattn_layer_bind_cache(ClattnLayer* layer, ClattnCache* cache) {
  return guarded([&] {
    Attention& of = deref(layer, "layer").layer;
    ClattnCache& bound = deref(cache, "cache");
    of.bind_kv_cache(bound.cache);
    bound.bound = of.shared_kv_cache();
  });
}

ClattnResult clattn_warm_up(ClattnLayer* const* layers, size_t num_layers, const ClattnQueue* queue,
                            ClattnProgress progress, void* user) {
  return guarded([&] {
    const auto all = elements(layers, num_layers, "layers");
    const Queue& on = deref(queue, "queue").queue;
    for (ClattnLayer* const layer : all) deref(layer, "layers: an element");
    for (std::size_t done = 0; done < num_layers; ++done) {
      all[done]->layer.warm_up(on);
      if (progress != nullptr) progress(user, done + 1, num_layers);
    }
  });
}

ClattnResult clattn_layer_forward(ClattnLayer* layer, const ClattnQueue* queue,
                                  const ClattnTensors* tensors, const ClattnStep* step) {
  return guarded([&] {
    Attention& of = deref(layer, "layer").layer;
    const Queue& on = deref(queue, "queue").queue;
    const ClattnTensors& given = read(tensors, "tensors");
    of.forward(on, tensors_of(given), &metadata_of(step), forward_options_of(given));
  });
}
