#include "bindings.hpp"

namespace clattn::python {

namespace {

void bind_attention_config(nb::module_& module) {
  using C = AttentionConfig;
  Record<C> record(
      module, "AttentionConfig",
      "A layer's configuration: what a backend is asked for and kernels are made for.");
  record.named("dtype", &C::dtype, parse_dtype, "Of query, key, value and output.")
      .cache_dtype("kv_cache_dtype", &C::kv_cache_dtype)
      .named("attn_type", &C::attn_type, parse_attention_type,
             "decoder, encoder, encoder_only or encoder_decoder.")
      .named("kernel_family", &C::kernel_family, parse_kernel_family,
             "auto, cpu, gpu, gpu_ptx or gpu_matrix.");
  record.def_rw("num_heads", &C::num_heads, "Query heads, a multiple of num_kv_heads.")
      .def_rw("num_kv_heads", &C::num_kv_heads)
      .def_rw("head_size", &C::head_size, "With use_mla: kv_lora_rank + rope_dim.")
      .def_rw("head_size_v", &C::head_size_v,
              "Of V where it is smaller; 0 is head_size. Others only with contiguous keys.")
      .def_rw("block_size", &C::block_size, "Tokens per page of the cache.")
      .def_rw("scale", &C::scale, nb::arg().none(), "Of the logits; None is 1 / sqrt(head_size).")
      .def_rw("logits_soft_cap", &C::logits_soft_cap, "0 is none.")
      .def_rw("sliding_window", &C::sliding_window, "Keys seen, the own one included; 0 is all.")
      .def_rw("attention_chunk_size", &C::attention_chunk_size, "0 is none.")
      .def_rw("alibi_slopes", &C::alibi_slopes, "One per query head, or empty.")
      .def_rw("sinks", &C::sinks, "Logits that join the denominator: one per query head, or empty.")
      .def_rw("custom_mask", &C::custom_mask, "Every forward() brings a mask of its own.")
      .def_rw("fp8_products", &C::fp8_products,
              "Over an e4m3 cache: faster prompts, less accurate, where the device can.")
      .def_rw("use_mla", &C::use_mla)
      .def_rw("rope_dim", &C::rope_dim)
      .def_rw("use_non_causal", &C::use_non_causal)
      .def_rw("use_batch_invariant", &C::use_batch_invariant)
      .def_rw("use_per_head_quant_scales", &C::use_per_head_quant_scales);
}

void bind_builder_options(nb::module_& module) {
  using O = BuilderOptions;
  nb::class_<AttentionWorkspace>(
      module, "AttentionWorkspace",
      "Device memory that the forward() calls of several builders share\n"
      "if these run in order on one queue.")
      .def(nb::new_([] { return std::make_shared<AttentionWorkspace>(); }));
  Record<O> record(module, "BuilderOptions", "Bounds of a builder's batches, and how it plans.");
  const auto limit = [&record](const char* name, auto BatchLimits::*field, const char* doc) {
    using Value = std::remove_reference_t<decltype(std::declval<BatchLimits>().*field)>;
    record.def_prop_rw(
        name, [field](const O& self) { return self.limits.*field; },
        [field](O& self, Value value) { self.limits.*field = value; }, doc);
  };
  limit("max_num_reqs", &BatchLimits::max_num_reqs, "Requests of a batch.");
  limit("max_num_batched_tokens", &BatchLimits::max_num_batched_tokens, "Query tokens of a batch.");
  limit("max_model_len", &BatchLimits::max_model_len, "Tokens of a request.");
  limit("num_blocks", &BatchLimits::num_blocks, "Pages of the cache; -1 is unknown.");
  record
      .def_prop_rw(
          "deterministic",
          [](const O& self) { return self.split_policy == SplitPolicy::kDeterministic; },
          [](O& self, bool value) {
            self.split_policy = value ? SplitPolicy::kDeterministic : SplitPolicy::kBalanced;
          },
          "Whether a request's bits must not depend on its batch.")
      .def_rw("num_splits", &O::num_splits, "Forces this many splits of the keys; 0 is planned.")
      .def_rw("decode_threshold", &O::decode_threshold, "Most query tokens of a decode.")
      .def_rw("side_by_side", &O::side_by_side,
              "Whether two launches of a step may run beside each other.")
      .def_rw("workspace", &O::workspace, nb::arg().none(), "None is the builder's own.");
}

}  // namespace

void bind_config(nb::module_& module) {
  bind_attention_config(module);
  bind_builder_options(module);
}

}  // namespace clattn::python
