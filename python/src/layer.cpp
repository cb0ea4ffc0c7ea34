#include <clattn/layer.hpp>

#include "attention.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

void bind_options(nb::module_& module) {
  using C = CacheConfig;
  Record<C>(module, "CacheConfig", "What the engine says about the caches of all layers.")
      .cache_dtype("cache_dtype", &C::cache_dtype)
      .def_rw("block_size", &C::block_size, "Tokens per page.")
      .def_rw("sliding_window", &C::sliding_window, "For layers without one; 0 is none.")
      .def_rw("is_attention_free", &C::is_attention_free)
      .def_rw("calculate_kv_scales", &C::calculate_kv_scales,
              "Take scales from the first batch instead of the checkpoint.");
  using O = AttentionOptions;
  Record<O> record(module, "AttentionOptions", "vLLM's constructor arguments of Attention.");
  record.named("dtype", &O::dtype, parse_dtype, "Of query, key, value and output.")
      .named("attn_type", &O::attn_type, parse_attention_type, "As AttentionConfig's.")
      .named("kernel_family", &O::kernel_family, parse_kernel_family, "As AttentionConfig's.");
  record.def_rw("num_heads", &O::num_heads)
      .def_rw("head_size", &O::head_size)
      .def_rw("head_size_v", &O::head_size_v)
      .def_rw("scale", &O::scale, nb::arg().none(), "None is 1 / sqrt(head_size).")
      .def_rw("num_kv_heads", &O::num_kv_heads, nb::arg().none(), "None is num_heads.")
      .def_rw("alibi_slopes", &O::alibi_slopes)
      .def_rw("cache_config", &O::cache_config, nb::arg().none())
      .def_rw("logits_soft_cap", &O::logits_soft_cap)
      .def_rw("per_layer_sliding_window", &O::per_layer_sliding_window, nb::arg().none(),
              "None is the cache configuration's.")
      .def_rw("use_mla", &O::use_mla)
      .def_rw("rope_dim", &O::rope_dim)
      .def_rw("prefix", &O::prefix, "The layer's name.")
      .def_rw("kv_sharing_target_layer_name", &O::kv_sharing_target_layer_name)
      .def_rw("sinks", &O::sinks)
      .def_rw("attention_chunk_size", &O::attention_chunk_size)
      .def_rw("custom_mask", &O::custom_mask)
      .def_rw("fp8_products", &O::fp8_products,
              "Over an e4m3 cache: faster prompts, less accurate, where the device can.");
}

/// A layer, and the context in which arrays become buffers.
struct Layer {
  Layer(const std::shared_ptr<Context>& layer_context, LayerRegistry& registry,
        const AttentionOptions& options)
      : context(layer_context), attention(layer_context, registry, options) {}
  std::shared_ptr<Context> context;
  Attention attention;
};

void bind_layer_calls(nb::class_<Layer>& layer) {
  layer
      .def(
          "bind_kv_cache",
          [](Layer& self, const KVCache& cache) {
            without_gil([&] { self.attention.bind_kv_cache(cache); });
          },
          "cache"_a, nb::keep_alive<1, 2>())
      .def(
          "load_kv_scales",
          [](Layer& self, std::optional<float> k_scale, std::optional<float> v_scale) {
            LoadedKVScales loaded;
            if (k_scale) loaded.k_scale = {&*k_scale, 1};
            if (v_scale) loaded.v_scale = {&*v_scale, 1};
            return without_gil([&] { return self.attention.load_kv_scales(loaded); });
          },
          "k_scale"_a = nb::none(), "v_scale"_a = nb::none(),
          "Sets the layer's own scales from a checkpoint; returns warnings.")
      .def(
          "forward",
          [](Layer& self, const Queue& queue, nb::handle query, nb::handle key, nb::handle value,
             nb::handle output, const AttentionMetadata* metadata, nb::handle lse) {
            return forward_with(
                *self.context, queue, self.attention.config(),
                {query, key, value, output, lse, nb::none()},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.attention.forward(queue, tensors, metadata, options);
                });
          },
          "queue"_a, "query"_a, "key"_a.none(), "value"_a.none(), "output"_a, "metadata"_a.none(),
          nb::kw_only(), "lse"_a = nb::none(),
          "Stores key and value in the cache, attends, and zeroes the output's padding rows.\n"
          "Tensors as AttentionImpl takes them.")
      .def(
          "warm_up",
          [](Layer& self, const Queue& queue) {
            without_gil([&] { self.attention.warm_up(queue); });
          },
          "queue"_a, "As AttentionImpl.warm_up(), for the cache that is bound.")
      .def(
          "explain",
          [](const Layer& self) { return without_gil([&] { return self.attention.explain(); }); },
          "Every backend and kernel that was considered, and why it was not chosen.");
}

}  // namespace

void bind_layer(nb::module_& module) {
  bind_options(module);
  nb::class_<LayerRegistry>(module, "LayerRegistry", "A model's attention layers by name.")
      .def(nb::init<>())
      .def("__len__", [](const LayerRegistry& self) { return self.layers().size(); })
      .def_prop_ro("names", [](const LayerRegistry& self) {
        std::vector<std::string> names;
        for (const Attention* layer : self.layers()) names.push_back(layer->layer_name());
        return names;
      });
  nb::class_<Layer> layer(module, "Attention", "One attention layer of a model.");
  layer
      .def(
          nb::new_([](const std::shared_ptr<Context>& context, LayerRegistry& registry,
                      const AttentionOptions& options) {
            return without_gil([&] { return std::make_unique<Layer>(context, registry, options); });
          }),
          "context"_a, "registry"_a, "options"_a, nb::keep_alive<0, 2>())
      .def_prop_ro("layer_name", [](const Layer& self) { return self.attention.layer_name(); })
      .def_prop_ro(
          "config",
          [](const Layer& self) -> const AttentionConfig& { return self.attention.config(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro("backend", [](const Layer& self) { return self.attention.get_attn_backend(); })
      .def("__repr__",
           [](const Layer& self) { return "Attention(" + self.attention.extra_repr() + ")"; });
  bind_layer_calls(layer);
}

}  // namespace clattn::python
