#include "layer.hpp"

#include <clattn/compat/vllm_layer.hpp>
#include <clattn/kv_scales.hpp>
#include <clattn/registry.hpp>

#include "config_fields.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

std::shared_ptr<const AttentionBackend> backend_of(nb::handle given) {
  if (given.is_none()) return nullptr;
  std::shared_ptr<const AttentionBackend> backend;
  return nb::try_cast(given, backend) ? backend : find_attn_backend(name_of(given));
}

void bind_options(nb::module_& module) {
  using O = AttentionOptions;
  Record<O> record(module, "AttentionOptions",
                   "A layer: the fields of AttentionConfig, and what makes it this one among a\n"
                   "model's layers. num_kv_heads 0 is num_heads.");
  bind_config_fields(
      record, [](auto& self) -> auto& { return self.config; });
  record.def_rw("config", &O::config, "All fields of the configuration at once.")
      .def_rw("prefix", &O::prefix, "The layer's name.")
      .def_rw("kv_sharing_target_layer_name", &O::kv_sharing_target_layer_name,
              "Attends to that layer's cache; empty is one of its own.")
      .def_rw("calculate_kv_scales", &O::calculate_kv_scales,
              "Take scales from the first batch instead of the checkpoint.")
      .def_rw("fp8_checkpoint", &O::fp8_checkpoint, "Weights and scales were stored as fp8.")
      .def_prop_rw(
          "attn_backend", [](const O& self) { return self.attn_backend; },
          [](O& self, nb::handle backend) { self.attn_backend = backend_of(backend); },
          nb::for_setter(nb::arg("backend").none()),
          "An AttentionBackend or a name; None: get_attn_backend() chooses.");
}

void calc_kv_scales(Layer& self, const Queue& queue, nb::handle query, nb::handle key,
                    nb::handle value, std::int64_t num_tokens,
                    std::optional<std::int64_t> num_keys) {
  const AttentionConfig& config = self.attention->config();
  const Widths widths = widths_of(config);
  CallTensors tensors(*self.context, queue);
  const TensorRef q = tensors.input(query, config.dtype, widths.query, "query");
  const TensorRef k = tensors.input(key, config.dtype, widths.key, "key");
  const TensorRef v = tensors.input(value, config.dtype, widths.value, "value");
  tensors.run(
      [&](Event*) { self.attention->calc_kv_scales(queue, q, k, v, num_tokens, num_keys); });
}

std::vector<std::string> load_scales(Layer& self, std::optional<float> k_scale,
                                     std::optional<float> v_scale, std::optional<float> q_scale,
                                     std::optional<float> prob_scale, bool fnuz) {
  return without_gil([&] {
    return self.attention->load_kv_scales(
        loaded_scales(k_scale, v_scale, q_scale, prob_scale, fnuz));
  });
}

Event forward(Layer& self, const Queue& queue, nb::handle query, nb::handle key, nb::handle value,
              nb::handle output, const AttentionMetadata* metadata, nb::handle lse,
              nb::handle custom_mask, nb::handle output_fp8, nb::handle output_scale,
              nb::handle launches, std::optional<std::int64_t> num_rows,
              bool enable_kv_scales_calculation) {
  return forward_with(
      *self.context, queue, self.attention->config(), metadata,
      {query, key, value, output, lse, custom_mask, output_fp8, output_scale, launches, num_rows},
      [&](const AttentionTensors& tensors, ForwardOptions options) {
        if (metadata == nullptr && options.num_rows == 0) {
          throw_invalid(
              "num_rows: none in a profile run, legal: the rows of the output, whose "
              "Buffer does not tell them");
        }
        options.enable_kv_scales_calculation = enable_kv_scales_calculation;
        self.attention->forward(queue, tensors, metadata, options);
      });
}

void bind_layer_calls(nb::class_<Layer>& layer) {
  layer
      .def(
          "bind_kv_cache",
          [](Layer& self, const KVCache& cache) {
            without_gil([&] { self.attention->bind_kv_cache(cache); });
          },
          "cache"_a, nb::keep_alive<1, 2>())
      .def(
          "check_kv_cache",
          [](const Layer& self, const KVCache& cache) { self.attention->check_kv_cache(cache); },
          "cache"_a, "Raises what bind_kv_cache() would.")
      .def("load_kv_scales", &load_scales, "k_scale"_a = nb::none(), "v_scale"_a = nb::none(),
           "q_scale"_a = nb::none(), "prob_scale"_a = nb::none(), "fnuz"_a = false,
           "Sets the layer's own scales from a checkpoint; returns warnings.")
      .def("calc_kv_scales", &calc_kv_scales, "queue"_a, "query"_a, "key"_a, "value"_a,
           "num_tokens"_a, "num_keys"_a = nb::none(),
           "Sets the scales from the largest magnitudes of these tensors, once.")
      .def("forward", &forward, "queue"_a, "query"_a, "key"_a.none(), "value"_a.none(), "output"_a,
           "metadata"_a.none(), nb::kw_only(), "lse"_a = nb::none(), "custom_mask"_a = nb::none(),
           "output_fp8"_a = nb::none(), "output_scale"_a = nb::none(), "launches"_a = nb::none(),
           "num_rows"_a = nb::none(), "enable_kv_scales_calculation"_a = true,
           "Stores key and value in the cache, attends, and zeroes the output's rows that belong\n"
           "to no token, up to num_rows: None is all of an array's, and none of a Buffer's. With\n"
           "metadata None, a profile run, those are all rows. Tensors as AttentionImpl.forward()\n"
           "takes them.")
      .def(
          "warm_up",
          [](Layer& self, const Queue& queue) {
            without_gil([&] { self.attention->warm_up(queue); });
          },
          "queue"_a, "As AttentionImpl.warm_up(), for the cache that is bound.")
      .def(
          "explain",
          [](const Layer& self) { return without_gil([&] { return self.attention->explain(); }); },
          "Every backend and kernel that was considered, and why it was not chosen.");
}

void bind_layer_properties(nb::class_<Layer>& layer) {
  layer.def_prop_ro("layer_name", [](const Layer& self) { return self.attention->layer_name(); })
      .def_prop_ro(
          "options",
          [](const Layer& self) -> const AttentionOptions& { return self.attention->options(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "config",
          [](const Layer& self) -> const AttentionConfig& { return self.attention->config(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro("backend", [](const Layer& self) { return self.attention->get_attn_backend(); })
      .def_prop_ro(
          "impl",
          [](const Layer& self) {
            // The layer, which the result keeps, owns it.
            return Impl{self.context, {std::shared_ptr<void>(), &self.attention->impl()}};
          },
          nb::keep_alive<0, 1>(), "The AttentionImpl.")
      .def_prop_ro("has_sink", [](const Layer& self) { return self.attention->has_sink(); })
      .def_prop_ro("shares_kv_cache",
                   [](const Layer& self) { return self.attention->shares_kv_cache(); })
      .def_prop_ro(
          "kv_cache",
          [](const Layer& self) -> std::optional<KVCache> {
            const KVCache* const cache = self.attention->kv_cache();
            return cache == nullptr ? std::nullopt : std::optional(*cache);
          },
          nb::keep_alive<0, 1>(), "The KVCache, that of the target if it shares one; or None.")
      .def_prop_ro(
          "scales", [](const Layer& self) { return self.attention->scales(); },
          "f32 [3]: K, V, Q on the device; empty unless the cache has 8 bits.")
      .def_prop_ro("prob_scale", [](const Layer& self) { return self.attention->prob_scale(); })
      .def("__repr__",
           [](const Layer& self) { return "Attention(" + extra_repr(*self.attention) + ")"; });
}

}  // namespace

LoadedKVScales loaded_scales(const std::optional<float>& k_scale,
                             const std::optional<float>& v_scale,
                             const std::optional<float>& q_scale,
                             const std::optional<float>& prob_scale, bool fnuz) {
  const auto one = [](const std::optional<float>& scale) {
    return scale ? std::span<const float>(&*scale, 1) : std::span<const float>();
  };
  return {one(k_scale), one(v_scale), one(q_scale), one(prob_scale), fnuz};
}

void bind_layer(nb::module_& module) {
  bind_options(module);
  nb::class_<LayerRegistry>(module, "LayerRegistry", "A model's attention layers by name.")
      .def(nb::init<>())
      .def("__len__", [](const LayerRegistry& self) { return self.layers().size(); })
      .def(
          "__contains__",
          [](const LayerRegistry& self, std::string_view name) {
            return self.find(name) != nullptr;
          },
          "name"_a)
      .def_prop_ro("names", [](const LayerRegistry& self) {
        std::vector<std::string> names;
        for (const Attention* layer : self.layers()) names.push_back(layer->layer_name());
        return names;
      });
  nb::class_<KVScales>(module, "KVScales", "Per-tensor scales: real = stored * scale.")
      .def_ro("k_scale", &KVScales::k_scale)
      .def_ro("v_scale", &KVScales::v_scale)
      .def_ro("q_scale", &KVScales::q_scale)
      .def_ro("prob_scale", &KVScales::prob_scale)
      .def_ro("warnings", &KVScales::warnings);
  module.def(
      "load_kv_scales",
      [](nb::handle kv_cache_dtype, std::optional<float> k_scale, std::optional<float> v_scale,
         std::optional<float> q_scale, std::optional<float> prob_scale, bool fnuz) {
        return load_kv_scales(loaded_scales(k_scale, v_scale, q_scale, prob_scale, fnuz),
                              parse_kv_cache_dtype(name_of(kv_cache_dtype)));
      },
      "kv_cache_dtype"_a, nb::kw_only(), "k_scale"_a = nb::none(), "v_scale"_a = nb::none(),
      "q_scale"_a = nb::none(), "prob_scale"_a = nb::none(), "fnuz"_a = false,
      "Which scales a cache of this type gets from what a checkpoint holds.");
  nb::class_<Layer> layer(module, "Attention", "One attention layer of a model.");
  layer.def(
      nb::new_([](const std::shared_ptr<Context>& context, LayerRegistry& registry,
                  const AttentionOptions& options) {
        return without_gil([&] { return std::make_unique<Layer>(context, registry, options); });
      }),
      "context"_a, "registry"_a, "options"_a, nb::keep_alive<0, 2>());
  bind_layer_properties(layer);
  bind_layer_calls(layer);
  module.def(
      "extra_repr", [](const Layer& of) { return extra_repr(*of.attention); }, "layer"_a,
      "The layer's sizes and backend, as vLLM prints them.");
  module.def("get_kv_cache_spec_kind", &get_kv_cache_spec_kind, "spec"_a,
             "vLLM's KVCacheSpecKind of a KVCacheSpec, as full_attention.");
  module.def(
      "process_weights_after_loading",
      [](const Layer& of, nb::handle act_dtype) {
        process_weights_after_loading(*of.attention, parse_dtype(name_of(act_dtype)));
      },
      "layer"_a, "act_dtype"_a, "Raises InvalidArgument unless activations have its dtype.");
}

}  // namespace clattn::python
