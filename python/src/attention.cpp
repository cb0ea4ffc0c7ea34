#include "attention.hpp"

#include "steps.hpp"

namespace clattn::python {

namespace {

/// Elements of a token's keys, and of its values: with use_mla the latent and the rotary part.
std::pair<std::int64_t, std::int64_t> key_widths(const AttentionConfig& config) {
  if (config.use_mla) return {config.output_head_size(), config.rope_dim};
  const std::int64_t heads = config.num_kv_heads;
  return {heads * config.head_size, heads * config.output_head_size()};
}

void bind_reports(nb::module_& module) {
  nb::class_<Candidate>(module, "Candidate", "A backend or kernel that was considered.")
      .def_ro("role", &Candidate::role)
      .def_ro("name", &Candidate::name)
      .def_ro("chosen", &Candidate::chosen)
      .def_ro("reason", &Candidate::reason, "Why it was not chosen.");
  module.def(
      "format_candidates",
      [](const std::vector<Candidate>& candidates) { return to_string(candidates); },
      "candidates"_a, "A line for each, in columns.");
  nb::class_<KernelInfo>(module, "KernelInfo", "A kernel that a layer launches.")
      .def_ro("name", &KernelInfo::name)
      .def_ro("role", &KernelInfo::role)
      .def_ro("work_group_size", &KernelInfo::work_group_size)
      .def_ro("block_rows", &KernelInfo::block_rows)
      .def_ro("block_kv", &KernelInfo::block_kv)
      .def_ro("rounds_weights", &KernelInfo::rounds_weights);
}

void bind_impl(nb::module_& module) {
  nb::class_<Impl>(
      module, "AttentionImpl",
      "A layer's configuration, compiled. Immutable and thread-safe.\n\n"
      "Tensors are NumPy or DLPack arrays of the host, Buffers or Tensors. With arrays\n"
      "a call returns when its work is done; with device memory alone it returns after\n"
      "enqueueing, and the event says when it is done.")
      .def_prop_ro(
          "config", [](const Impl& self) -> const AttentionConfig& { return self.impl->config(); },
          nb::rv_policy::reference_internal)
      .def(
          "write_kv_cache",
          [](const Impl& self, const Queue& queue, nb::handle key, nb::handle value,
             const KVCache& cache, const AttentionMetadata& metadata) {
            const auto& config = self.impl->config();
            const auto [key_width, value_width] = key_widths(config);
            CallTensors tensors(*self.context, queue);
            const TensorRef keys = tensors.input(key, config.dtype, key_width, "key");
            const TensorRef values = tensors.input(value, config.dtype, value_width, "value");
            Event event;
            without_gil([&] {
              self.impl->write_kv_cache(queue, keys, values, cache, metadata, &event);
              tensors.finish();
            });
            return event;
          },
          "queue"_a, "key"_a.none(), "value"_a.none(), "cache"_a, "metadata"_a,
          "Stores the step's keys and values [num_actual_tokens, num_kv_heads, head_size] at the\n"
          "metadata's slots.")
      .def(
          "forward",
          [](const Impl& self, const Queue& queue, nb::handle query, nb::handle output,
             const KVCache& cache, const AttentionMetadata& metadata, nb::handle key,
             nb::handle value, nb::handle lse, nb::handle custom_mask) {
            return forward_with(
                *self.context, queue, self.impl->config(),
                {query, key, value, output, lse, custom_mask},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  if (tensors.key.buffer == nullptr) {
                    if (tensors.value.buffer != nullptr)
                      throw_invalid("value: given without key, legal: both or none");
                    self.impl->forward(queue, tensors, cache, metadata, options);
                    return;
                  }
                  self.impl->check_forward(queue, tensors, cache, metadata, options);
                  self.impl->forward_checked(queue, tensors, cache, metadata, options);
                });
          },
          "queue"_a, "query"_a, "output"_a, "cache"_a, "metadata"_a, nb::kw_only(),
          "key"_a = nb::none(), "value"_a = nb::none(), "lse"_a = nb::none(),
          "custom_mask"_a = nb::none(),
          "output[t, h] = attention of query token t over its request's pages, both\n"
          "[num_actual_tokens, num_heads, head_size]. lse [num_actual_tokens, num_heads], f32:\n"
          "natural logarithms of the softmax denominators. custom_mask: uint8 or bool\n"
          "[num_actual_tokens, keys]. key and value, if given, are stored first, as by\n"
          "write_kv_cache; with host arrays this waits once, where two calls wait twice.")
      .def(
          "forward_encoder",
          [](const Impl& self, const Queue& queue, nb::handle query, nb::handle key,
             nb::handle value, nb::handle output, const AttentionMetadata& metadata,
             nb::handle lse) {
            return forward_with(
                *self.context, queue, self.impl->config(),
                {query, key, value, output, lse, nb::none()},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.impl->forward_encoder(queue, tensors, metadata, options);
                });
          },
          "queue"_a, "query"_a, "key"_a, "value"_a, "output"_a, "metadata"_a, nb::kw_only(),
          "lse"_a = nb::none(), "For encoder types: attends to the given keys directly.")
      .def(
          "warm_up",
          [](const Impl& self, const Queue& queue) {
            without_gil([&] { self.impl->warm_up(queue); });
          },
          "queue"_a,
          "Runs every kernel once over nothing, so that no request waits for a compiler.")
      .def("kernels", [](const Impl& self) { return self.impl->kernels(); })
      .def(
          "candidates", [](const Impl& self) { return self.impl->candidates(); },
          "Every kernel that was considered, and why it was not chosen.");
}

void bind_backend(nb::module_& module) {
  using B = AttentionBackend;
  nb::class_<B>(module, "AttentionBackend", "A registered backend.")
      .def_prop_ro("name", [](const B& self) { return std::string(self.name()); })
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
          [](const B& self, const std::string& layout, const AttentionConfig& config,
             const Context& context) {
            const KVCacheLayout parsed = parse_kv_cache_layout(layout);
            return without_gil(
                [&] { return self.validate_layout(parsed, config, &context.capabilities()); });
          },
          "layout"_a, "config"_a, "context"_a,
          "Why caches of this layout do not serve the configuration here; empty: they do.")
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

}  // namespace

Event forward_with(const Context& context, const Queue& queue, const AttentionConfig& config,
                   const PythonTensors& given,
                   const std::function<void(const AttentionTensors&, ForwardOptions)>& call) {
  const auto [key_width, value_width] = key_widths(config);
  const std::int64_t query_width = std::int64_t{config.num_heads} * config.head_size;
  const std::int64_t output_width = std::int64_t{config.num_heads} * config.output_head_size();
  CallTensors taken(context, queue);
  AttentionTensors tensors;
  tensors.query = taken.input(given.query, config.dtype, query_width, "query");
  tensors.key = taken.input(given.key, config.dtype, key_width, "key");
  tensors.value = taken.input(given.value, config.dtype, value_width, "value");
  tensors.output = taken.output(given.output, config.dtype, output_width, "output");
  tensors.lse = taken.dense_output(given.lse, DType::kF32, config.num_heads, "lse").buffer;
  ForwardOptions options;
  const TensorRef mask = taken.mask(given.custom_mask);
  options.custom_mask = mask.buffer;
  options.custom_mask_stride = mask.token_stride;
  Event event;
  options.event = &event;
  without_gil([&] {
    try {
      call(tensors, options);
    } catch (...) {
      taken.finish();  // what was enqueued before reads the arrays
      throw;
    }
    taken.finish();
  });
  return event;
}

void bind_attention(nb::module_& module) {
  bind_reports(module);
  bind_impl(module);
  bind_backend(module);
  module.def(
      "get_attn_backend",
      [](const AttentionConfig& config, const Context& context, const std::string& name) {
        return without_gil([&] {
          return get_attn_backend(config, &context.capabilities(), name).shared_from_this();
        });
      },
      "config"_a, "context"_a, "name"_a = "",
      "The backend for a configuration on a device; a name forces one.");
  module.def(
      "list_attn_backends",
      [] {
        std::vector<std::shared_ptr<const AttentionBackend>> backends;
        for (const AttentionBackend* backend : without_gil([] { return list_attn_backends(); })) {
          backends.push_back(backend->shared_from_this());
        }
        return backends;
      },
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
      "One layer's zeroed cache in device memory; layout is NHD, HND, HDN or the backend's "
      "choice.");
}

}  // namespace clattn::python
