#include "config_fields.hpp"

namespace clattn::python {

namespace {

void bind_attention_config(nb::module_& module) {
  Record<AttentionConfig> record(
      module, "AttentionConfig",
      "A layer's configuration: what a backend is asked for and kernels are made for.");
  bind_config_fields(
      record, [](auto& self) -> auto& { return self; });
  using C = AttentionConfig;
  record
      .def_prop_ro(
          "cache_dtype", [](const C& self) { return to_text(self.cache_dtype()); },
          "The type that the cache has: kv_cache_dtype, or dtype.")
      .def_prop_ro(
          "cache_format", [](const C& self) { return std::string(to_string(self.cache_format())); },
          "The format of the cache by name: cache_dtype, or one with a scale for each token and "
          "head.")
      .def_prop_ro("num_queries_per_kv", &C::num_queries_per_kv)
      .def_prop_ro("output_head_size", &C::output_head_size, "Elements of a head's output.")
      .def_prop_ro("contiguous_kv", &C::contiguous_kv,
                   "Whether keys and values are attended directly: forward_encoder().")
      .def("__str__", [](const C& self) { return to_string(self); });
}

void bind_builder_options(nb::module_& module) {
  using O = BuilderOptions;
  nb::class_<AttentionWorkspace>(
      module, "AttentionWorkspace",
      "Device memory that the forward() calls of several builders share\n"
      "if these run in order on one queue.")
      .def(nb::new_([] { return std::make_shared<AttentionWorkspace>(); }))
      .def_ro("buffer", &AttentionWorkspace::buffer)
      .def_ro("counter_bytes", &AttentionWorkspace::counter_bytes)
      .def_ro("partial_lse2_bytes", &AttentionWorkspace::partial_lse2_bytes)
      .def_ro("counters_ready", &AttentionWorkspace::counters_ready);
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
      .def_rw("workspace", &O::workspace, nb::arg().none(), "None is the builder's own.")
      .def_rw("graph_batch_size", &O::graph_batch_size, "> 0: steps can be recorded up to it.")
      .def_rw("graph_mixed", &O::graph_mixed,
              "Whether sizes of recorded steps count query tokens, of any requests.")
      .def_rw("disable_cascade_attn", &O::disable_cascade_attn)
      .def_rw("device_seq_lens", &O::device_seq_lens,
              "The lengths of a step are known on the device alone: update_seq_lens().")
      .def_rw("device_query_lens", &O::device_query_lens,
              "So are the query tokens of its decodes: update_query_lens().")
      .def_rw("device_directions", &O::device_directions,
              "The directions of its requests are known on the device alone: update_lists().")
      .def_rw("device_trees", &O::device_trees,
              "So are trees of drafts; a batch's tree_start_loc says how large they are at most.");
}

}  // namespace

void bind_config(nb::module_& module) {
  bind_attention_config(module);
  bind_builder_options(module);
}

}  // namespace clattn::python
