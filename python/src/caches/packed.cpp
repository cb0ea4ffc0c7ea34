// x-packed caches, and decode over them (compat/paged_attention.hpp).

#include <clattn/compat/paged_attention.hpp>

#include "attention.hpp"
#include "caches.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

/// Decode over such caches, and the context that has to outlive it.
struct Decoder {
  std::shared_ptr<Context> context;
  std::shared_ptr<const PagedAttention> impl;
};

void bind_packed_cache(nb::module_& module) {
  nb::class_<Packed>(module, "PackedKVCache",
                     "An x-packed cache, x = 16 / bytes of an element: keys [num_blocks,\n"
                     "num_kv_heads, head_size / x, block_size, x], values [num_blocks,\n"
                     "num_kv_heads, head_size, block_size].")
      .def(
          "__init__",
          [](Packed* self, const Buffer& key, const Buffer& value, nb::handle dtype,
             std::int64_t num_blocks, std::int32_t block_size, std::int32_t num_kv_heads,
             std::int32_t head_size) {
            new (self) Packed(key, value);
            self->dtype = parse_dtype(name_of(dtype));
            self->num_blocks = num_blocks;
            self->block_size = block_size;
            self->num_kv_heads = num_kv_heads;
            self->head_size = head_size;
          },
          "key"_a, "value"_a, "dtype"_a, nb::kw_only(), "num_blocks"_a, "block_size"_a,
          "num_kv_heads"_a, "head_size"_a)
      .def(
          "set_scales",
          [](Packed& self, const Context& context, nb::handle scales) {
            self.scales = scales_of(context, scales, "scales");
            self.scales_per_head = self.scales.size_bytes() > 2 * sizeof(float);
          },
          "context"_a, "scales"_a.none(), "As KVCache.set_scales(), without a scale of queries.")
      .def_ro("key", &Packed::kept_key)
      .def_ro("value", &Packed::kept_value)
      .def_prop_ro("dtype", [](const Packed& self) { return std::string(to_string(self.dtype)); })
      .def_ro("num_blocks", &Packed::num_blocks)
      .def_ro("block_size", &Packed::block_size)
      .def_ro("num_kv_heads", &Packed::num_kv_heads)
      .def_ro("head_size", &Packed::head_size)
      .def_ro("key_offset", &Packed::key_offset, "Elements before the keys.")
      .def_ro("value_offset", &Packed::value_offset, "Elements before the values.")
      .def_ro("scales", &Packed::scales)
      .def_ro("scales_per_head", &Packed::scales_per_head)
      .def("key_at", &PackedKVCache::key_at, "block"_a, "token"_a, "head"_a, "dim"_a,
           "The element of `key` that holds it.")
      .def("value_at", &PackedKVCache::value_at, "block"_a, "token"_a, "head"_a, "dim"_a);
  module.def("get_packed_kv_cache_shape", &get_packed_kv_cache_shape, "num_blocks"_a,
             "block_size"_a, "num_kv_heads"_a, "head_size"_a,
             "One allocation of all x-packed keys, then all values.");
  module.def(
      "split_kv_cache",
      [](const Buffer& raw, const KVCacheSpec& spec) {
        Packed packed(raw, raw);
        static_cast<PackedKVCache&>(packed) = split_kv_cache(raw, spec);
        return packed;
      },
      "raw"_a, "spec"_a, "Views such an allocation as keys and values.");
}

void bind_decoder(nb::module_& module) {
  module.attr("PAGED_ATTENTION_PARTITION_SIZE") = kPagedAttentionPartitionSize;
  module.def("use_paged_attention_v1", &use_paged_attention_v1, "max_seq_len"_a, "num_seqs"_a,
             "num_heads"_a, "vLLM's choice between one kernel and partitions with a merge.");
  module.def(
      "validate_paged_attention",
      [](const AttentionConfig& config, const Context* context) {
        return validate_paged_attention(config, context ? &context->capabilities() : nullptr);
      },
      "config"_a, "context"_a.none() = nb::none(), "Why it cannot run over x-packed caches.");
  nb::class_<Decoder>(module, "PagedAttention", "Decode over an x-packed cache, compiled.")
      .def_prop_ro(
          "config",
          [](const Decoder& self) -> const AttentionConfig& { return self.impl->config(); },
          nb::rv_policy::reference_internal)
      .def(
          "forward",
          [](const Decoder& self, const Queue& queue, nb::handle query, nb::handle output,
             const Packed& cache, const AttentionMetadata& metadata, nb::handle lse,
             nb::handle launches) {
            return forward_with(
                *self.context, queue, self.impl->config(), &metadata,
                {.query = query, .output = output, .lse = lse, .launches = launches},
                [&](const AttentionTensors& tensors, const ForwardOptions& options) {
                  self.impl->forward(queue, tensors, cache, metadata, options.event,
                                     options.launches);
                });
          },
          "queue"_a, "query"_a, "output"_a, "cache"_a, "metadata"_a, nb::kw_only(),
          "lse"_a = nb::none(), "launches"_a = nb::none(),
          "query and output [num_reqs, num_heads, head_size]; lse f32 [num_reqs, num_heads].")
      .def("kernels", [](const Decoder& self) { return self.impl->kernels(); });
  module.def(
      "make_paged_attention",
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config) {
        return without_gil([&] {
          return Decoder{context, make_paged_attention(*context, config)};
        });
      },
      "context"_a, "config"_a);
  module.def(
      "make_paged_attention_builder",
      [](const std::shared_ptr<Context>& context, const AttentionConfig& config,
         const BuilderOptions& options) {
        return without_gil([&] { return make_paged_attention_builder(context, config, options); });
      },
      "context"_a, "config"_a, "options"_a = BuilderOptions());
}

}  // namespace

void bind_packed(nb::module_& module) {
  bind_packed_cache(module);
  bind_decoder(module);
}

}  // namespace clattn::python
