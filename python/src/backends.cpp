#include <clattn/plugin.hpp>
#include <clattn/registry.hpp>

#include "attention.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

using Backend = std::shared_ptr<const AttentionBackend>;
using Reasons = std::vector<std::string>;

std::vector<std::string> names_of(std::span<const KVCacheLayout> layouts) {
  std::vector<std::string> names;
  for (const KVCacheLayout layout : layouts) names.emplace_back(to_string(layout));
  return names;
}

/// The reasons against a value of one field, set as Python sets it.
Reasons why_not(const AttentionBackend& self, nb::handle field_name, nb::handle value) {
  const nb::object config = nb::cast(self.common_configuration());
  if (!nb::hasattr(config, field_name)) {
    throw_invalid("field_name: no field '" + name_of(field_name) + "' of AttentionConfig");
  }
  nb::setattr(config, field_name, value);
  const auto& asked = nb::cast<const AttentionConfig&>(config);
  return without_gil([&] { return self.validate_configuration(asked, nullptr); });
}

void bind_predicates(nb::class_<AttentionBackend>& backend) {
  using B = AttentionBackend;
  backend
      .def("why_not", &why_not, "field_name"_a, "value"_a.none(),
           "Why it does not take this value of one field of AttentionConfig where all others suit\n"
           "it, one sentence each; empty: it does. Asked without a device.")
      .def("common_configuration", &B::common_configuration,
           "An AttentionConfig that it takes, to ask about others that differ a little.")
      .def("get_supported_head_sizes", &B::get_supported_head_sizes)
      .def("get_supported_dtypes",
           [](const B& self) {
             std::vector<std::string> names;
             for (const DType dtype : self.get_supported_dtypes())
               names.emplace_back(to_string(dtype));
             return names;
           })
      .def("validate_head_size", &B::validate_head_size, "head_size"_a)
      .def(
          "get_supported_kernel_block_sizes",
          [](const B& self) {
            std::vector<std::pair<std::int32_t, bool>> sizes;
            for (const SupportedBlockSize& size : self.get_supported_kernel_block_sizes())
              sizes.emplace_back(size.size, size.multiples);
            return sizes;
          },
          "Pairs: a page size in tokens, and whether its multiples are taken, too.")
      .def("get_preferred_block_size", &B::get_preferred_block_size, "default_size"_a = 16,
           "default_size if its kernels read such pages, else the smallest that they read.");
}

void bind_cache_shapes(nb::class_<AttentionBackend>& backend) {
  using B = AttentionBackend;
  backend
      .def("get_kv_cache_shape", &B::get_kv_cache_shape, "num_blocks"_a, "block_size"_a,
           "num_kv_heads"_a, "head_size"_a, "The logical shape of one layer's cache.")
      .def(
          "get_kv_cache_stride_order",
          [](const B& self, std::string_view layout) {
            return self.get_kv_cache_stride_order(parse_kv_cache_layout(layout));
          },
          "layout"_a, "Which logical dimension stands at each place in memory, slowest first.")
      .def_prop_ro("kv_dimension", &B::kv_dimension, "The logical dimension of K (0) and V (1).")
      .def_prop_ro("supported_layouts",
                   [](const B& self) { return names_of(self.supported_layouts()); })
      .def(
          "get_required_kv_cache_layout",
          [](const B& self) -> std::optional<std::string> {
            const auto layout = self.get_required_kv_cache_layout();
            if (!layout) return std::nullopt;
            return std::string(to_string(*layout));
          },
          "The one layout that works, or None where there is a choice.")
      .def_prop_ro("library", &B::library, "Path of its plug-in; empty: it is built in.")
      .def_prop_ro("is_mla", &B::is_mla)
      .def_prop_ro("supports_device_cpu_query_lens_mismatch",
                   &B::supports_device_cpu_query_lens_mismatch,
                   "Whether its builders take device_query_lens.")
      .def_prop_ro(
          "graph_support", [](const B& self) { return graph_support_name(self.graph_support()); },
          "never, uniform_single_token_decode, uniform_batch or always (AttentionCGSupport).")
      .def(
          "get_cudagraph_support",
          [](const B& self, const AttentionConfig& config) {
            return graph_support_name(self.get_cudagraph_support(config));
          },
          "config"_a, "graph_support of layers of this configuration.")
      .def(
          "get_varlen_cudagraph_max_query_len", &B::get_varlen_cudagraph_max_query_len, "config"_a,
          "decode_threshold"_a,
          "The most query tokens that decodes of one recorded step may have, each another number;\n"
          "None: all must have equally many, or nothing is recorded.");
}

void bind_backend(nb::module_& module) {
  using B = AttentionBackend;
  nb::class_<B> backend(module, "AttentionBackend", "A registered backend.");
  bind_predicates(backend);
  bind_cache_shapes(backend);
  backend.def_prop_ro("name", [](const B& self) { return std::string(self.name()); })
      .def(
          "validate_configuration",
          [](const B& self, const AttentionConfig& config, const Context* context) {
            return without_gil([&] {
              return self.validate_configuration(
                  config, context == nullptr ? nullptr : &context->capabilities());
            });
          },
          "config"_a, "context"_a.none() = nb::none(),
          "Why it cannot run this configuration, one sentence each; empty: it can.")
      .def(
          "validate_layout",
          [](const B& self, std::string_view layout) {
            return self.validate_layout(parse_kv_cache_layout(layout));
          },
          "layout"_a, "Why caches of this layout do not serve its layers; empty: they do.")
      .def(
          "preferred_layout",
          [](const B& self, const Context& context) {
            return std::string(to_string(self.preferred_layout(context.capabilities())));
          },
          "context"_a)
      .def(
          "make_impl",
          [](const B& self, std::shared_ptr<Context> context, const AttentionConfig& config) {
            return without_gil([&] { return Impl{context, self.make_impl(context, config)}; });
          },
          "context"_a, "config"_a, "Chooses and compiles the kernels of a configuration.")
      .def(
          "make_builder",
          [](const B& self, std::shared_ptr<Context> context, const AttentionConfig& config,
             const BuilderOptions& options) {
            return without_gil(
                [&] { return self.make_builder(std::move(context), config, options); });
          },
          "context"_a, "config"_a, "options"_a = BuilderOptions());
}

void bind_registry(nb::module_& module) {
  nb::class_<BackendChoice>(module, "BackendChoice", "What choose_attn_backend() decided.")
      .def_prop_ro("backend", [](const BackendChoice& self) { return self.backend; })
      .def_prop_ro(
          "rejected",
          [](const BackendChoice& self) {
            std::vector<std::pair<std::string, Reasons>> rejected;
            for (const auto& row : self.rejected) rejected.emplace_back(row.name, row.reasons);
            return rejected;
          },
          "Pairs: a backend's name and why it was passed over, in the order of asking.");
  module.def(
      "choose_attn_backend",
      [](const AttentionConfig& config, const Context* context) {
        return without_gil([&] {
          return choose_attn_backend(config, context ? &context->capabilities() : nullptr);
        });
      },
      "config"_a, "context"_a.none() = nb::none(),
      "Asks every backend in order; raises nothing where none fits.");
  module.def(
      "find_attn_backend",
      [](std::string_view name) { return without_gil([&] { return find_attn_backend(name); }); },
      "name"_a, "The registered backend of this name, which may be vLLM's.");
  module.def(
      "register_backend",
      [](Backend backend, std::optional<std::size_t> position) {
        register_backend(std::move(backend), position.value_or(kLowestPriority));
      },
      "backend"_a, "position"_a = nb::none(),
      "Adds a backend (that unregister_backend() gave) at a place of the order; None: behind all.");
  module.def("unregister_backend", &unregister_backend, "name"_a,
             "Takes a backend out of the registry and returns it.");
  nb::class_<BackendPlugin>(module, "BackendPlugin",
                            "A backend of a shared object, registered as long as this lives.")
      .def_prop_ro("backend", [](const BackendPlugin& self) { return self.backend(); })
      .def("reset", &BackendPlugin::reset, "Unregisters the backend.");
  module.def(
      "load_backend_plugin",
      [](const std::string& path, std::optional<std::size_t> position) {
        return without_gil(
            [&] { return load_backend_plugin(path, position.value_or(kLowestPriority)); });
      },
      "path"_a, "position"_a = nb::none(), "Loads a shared object and registers its backend.");
}

}  // namespace

void bind_backends(nb::module_& module) {
  bind_backend(module);
  bind_registry(module);
  module.def(
      "get_attn_backend",
      [](const AttentionConfig& config, const Context& context, const std::string& name) {
        return without_gil([&] { return get_attn_backend(config, &context.capabilities(), name); });
      },
      "config"_a, "context"_a, "name"_a = "",
      "The backend for a configuration on a device; a name forces one.");
  module.def(
      "get_attn_backend",
      [](std::int32_t head_size, nb::handle dtype, nb::handle kv_cache_dtype,
         std::int32_t block_size, bool is_attention_free, bool use_mla, bool has_sink) {
        const DType type = parse_dtype(name_of(dtype));
        const std::optional<CacheFormat> cache_type = parse_kv_cache_dtype(name_of(kv_cache_dtype));
        return get_attn_backend(head_size, type, cache_type, block_size, is_attention_free, use_mla,
                                has_sink);
      },
      "head_size"_a, "dtype"_a, "kv_cache_dtype"_a, "block_size"_a, "is_attention_free"_a = false,
      "use_mla"_a = false, "has_sink"_a = false, "vLLM's form, judged without a device.");
  module.def(
      "list_attn_backends", [] { return without_gil([] { return list_attn_backends(); }); },
      "The registered backends, in priority order.");
  module.def(
      "make_kv_cache",
      [](const Context& context, const Queue& queue, const AttentionBackend& backend,
         const AttentionConfig& config, std::int64_t num_blocks,
         std::optional<std::string> layout) {
        return without_gil([&] {
          return make_kv_cache(
              context, queue, backend, config, num_blocks,
              layout ? std::optional(parse_kv_cache_layout(*layout)) : std::nullopt);
        });
      },
      "context"_a, "queue"_a, "backend"_a, "config"_a, "num_blocks"_a, "layout"_a = nb::none(),
      "One layer's zeroed cache in device memory; layout is NHD or HND; None is\n"
      "default_kv_cache_layout()'s.");
  module.def(
      "default_kv_cache_layout",
      [](const AttentionBackend& backend, const Context& context) {
        return std::string(to_string(default_kv_cache_layout(backend, context.capabilities())));
      },
      "backend"_a, "context"_a,
      "Of caches that are made without naming one: set_kv_cache_layout()'s, else the backend's.");
}

}  // namespace clattn::python
