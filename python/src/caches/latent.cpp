// Multi-head latent attention's own calls (mla.hpp).

#include "attention.hpp"
#include "caches.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

/// A latent layer, and the context that has to outlive it.
struct LatentImpl {
  std::shared_ptr<Context> context;
  std::shared_ptr<const MLAImpl> impl;
};

/// What forward_with() needs of a latent layer: the widths of its tensors.
AttentionConfig shape_of(const MLAConfig& config) {
  AttentionConfig shape;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = 1;
  shape.head_size = config.kv_lora_rank + config.rope_dim;
  shape.rope_dim = config.rope_dim;
  shape.use_mla = true;
  shape.dtype = config.dtype;
  return shape;
}

void bind_latent_cache(nb::module_& module) {
  nb::class_<MLACache>(module, "MLACache",
                       "A latent cache [num_blocks, block_size, kv_lora_rank + rope_dim].")
      .def(
          "__init__",
          [](MLACache* self, const Buffer& buffer, nb::handle dtype, std::int64_t num_blocks,
             std::int32_t block_size, std::int32_t kv_lora_rank, std::int32_t rope_dim) {
            new (self) MLACache{buffer,       parse_dtype(name_of(dtype)),
                                num_blocks,   block_size,
                                kv_lora_rank, rope_dim,
                                Buffer()};
          },
          "buffer"_a, "dtype"_a, nb::kw_only(), "num_blocks"_a, "block_size"_a, "kv_lora_rank"_a,
          "rope_dim"_a)
      .def(
          "set_scale",
          [](MLACache& self, const Context& context, nb::handle scale) {
            self.scale = scales_of(context, scale, "scale");
          },
          "context"_a, "scale"_a.none(), "[1]: what stored values of 8 bits are multiplied by.")
      .def_ro("buffer", &MLACache::buffer)
      .def_prop_ro("dtype", [](const MLACache& self) { return std::string(to_string(self.dtype)); })
      .def_ro("num_blocks", &MLACache::num_blocks)
      .def_ro("block_size", &MLACache::block_size)
      .def_ro("kv_lora_rank", &MLACache::kv_lora_rank)
      .def_ro("rope_dim", &MLACache::rope_dim)
      .def_ro("scale", &MLACache::scale);
  module.def("make_mla_cache", &make_mla_cache, "cache"_a, "rope_dim"_a,
             "The cache of a layer with use_mla, the same memory.");
  module.def(
      "gather_and_maybe_dequant_cache",
      [](const Context& context, const Queue& queue, const MLACache& cache, nb::handle destination,
         nb::handle dtype, nb::handle cu_seq_lens, nb::handle block_table, nb::handle seq_starts) {
        const DType type = parse_dtype(name_of(dtype));
        CallTensors tensors(context, queue);
        const std::int64_t width = std::int64_t{cache.kv_lora_rank} + cache.rope_dim;
        const TensorRef rows = tensors.output(destination, type, width, "destination");
        const Int32s lengths = numbers<std::int32_t>(cu_seq_lens, "cu_seq_lens");
        const auto table = numbers<std::int32_t, 2>(block_table, "block_table");
        const auto starts = optional_numbers<std::int32_t>(seq_starts, "seq_starts");
        const MLAGather gather{span_of(lengths), span_of(table),
                               static_cast<std::int64_t>(table.shape(1)), span_of(starts)};
        return tensors.run([&](Event* event) {
          gather_and_maybe_dequant_cache(context, queue, cache, rows, type, gather, event);
        });
      },
      "context"_a, "queue"_a, "cache"_a, "destination"_a, "dtype"_a, nb::kw_only(), "cu_seq_lens"_a,
      "block_table"_a, "seq_starts"_a = nb::none(),
      "Copies requests' tokens, one request after another, to destination [cu_seq_lens[-1],\n"
      "kv_lora_rank + rope_dim] of dtype. seq_starts: tokens of each request to pass over.");
}

void bind_latent_impl(nb::module_& module) {
  nb::class_<LatentImpl>(module, "MLAImpl", "A layer of latent attention, compiled.")
      .def_prop_ro(
          "config", [](const LatentImpl& self) -> const MLAConfig& { return self.impl->config(); },
          nb::rv_policy::reference_internal)
      .def(
          "forward",
          [](const LatentImpl& self, const Queue& queue, nb::handle query, nb::handle output,
             const MLACache& cache, const AttentionMetadata& metadata, nb::handle lse,
             nb::handle launches) {
            return forward_with(
                *self.context, queue, shape_of(self.impl->config()), &metadata,
                {.query = query, .output = output, .lse = lse, .launches = launches},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.impl->forward(queue, tensors, cache, metadata, options.event,
                                     options.launches);
                });
          },
          "queue"_a, "query"_a, "output"_a, "cache"_a, "metadata"_a, nb::kw_only(),
          "lse"_a = nb::none(), "launches"_a = nb::none(),
          "query [num_actual_tokens, num_heads, kv_lora_rank + rope_dim], output\n"
          "[num_actual_tokens, num_heads, kv_lora_rank], lse f32 [num_actual_tokens, num_heads].")
      .def(
          "warm_up",
          [](const LatentImpl& self, const Queue& queue) {
            without_gil([&] { self.impl->warm_up(queue); });
          },
          "queue"_a)
      .def("kernels", [](const LatentImpl& self) { return self.impl->kernels(); })
      .def("candidates", [](const LatentImpl& self) { return self.impl->candidates(); });
  module.def(
      "make_mla_impl",
      [](const std::shared_ptr<Context>& context, const MLAConfig& config) {
        return without_gil([&] { return LatentImpl{context, make_mla_impl(*context, config)}; });
      },
      "context"_a, "config"_a);
  module.def(
      "make_mla_builder",
      [](const std::shared_ptr<Context>& context, const MLAConfig& config,
         const BuilderOptions& options) {
        return without_gil([&] { return make_mla_builder(context, config, options); });
      },
      "context"_a, "config"_a, "options"_a = BuilderOptions());
}

}  // namespace

void bind_latent(nb::module_& module) {
  using C = MLAConfig;
  Record<C> record(module, "MLAConfig", "A layer of latent attention in its absorbed form.");
  record.named("dtype", &C::dtype, parse_dtype, "Of query and output: f32, f16 or bf16.")
      .cache_dtype("kv_cache_dtype", &C::kv_cache_dtype)
      .named("kernel_family", &C::kernel_family, parse_kernel_family, "As AttentionConfig's.");
  record.def_rw("num_heads", &C::num_heads)
      .def_rw("kv_lora_rank", &C::kv_lora_rank, "A multiple of 16, up to 512.")
      .def_rw("rope_dim", &C::rope_dim, "A multiple of 8, up to 64.")
      .def_rw("block_size", &C::block_size, "Tokens per page of the cache.")
      .def_rw("scale", &C::scale, nb::arg().none(), "None is 1 / sqrt(kv_lora_rank + rope_dim).")
      .def_rw("use_spans", &C::use_spans, "Tokens of a batch's spans see one another.")
      .def_rw("use_directions", &C::use_directions, "Each request may have a direction.")
      .def_rw("use_first_keys", &C::use_first_keys, "Each request may have a first key.")
      .def_rw("use_trees", &C::use_trees, "The newest tokens may be drafts in a tree.")
      .def_prop_ro("cache_dtype", [](const C& self) { return name_of(self.cache_dtype()); });
  module.attr("MLA_BACKEND_NAME") = std::string(kMLABackendName);
  module.attr("MAX_KV_LORA_RANK") = kMaxKVLoraRank;
  module.attr("KV_LORA_RANK_STEP") = kKVLoraRankStep;
  module.def(
      "validate_mla_configuration",
      [](const MLAConfig& config, const Context* context) {
        return validate_mla_configuration(config, context ? &context->capabilities() : nullptr);
      },
      "config"_a, "context"_a.none() = nb::none(), "Why it cannot run, one sentence each.");
  bind_latent_cache(module);
  bind_latent_impl(module);
}

}  // namespace clattn::python
