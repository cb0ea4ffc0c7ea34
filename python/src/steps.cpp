#include "steps.hpp"

namespace clattn::python {

namespace {

std::span<const std::int32_t> span_of(const std::optional<Int32s>& array) {
  return array ? std::span(array->data(), array->size()) : std::span<const std::int32_t>();
}

void bind_batch(nb::module_& module) {
  nb::class_<Batch>(module, "CommonAttentionMetadata",
                    "One step's batch, once for all layers of a cache group; vLLM's names.")
      .def(
          "__init__",
          [](Batch* self, Int32s query_start_loc, Int32s seq_lens, std::optional<BlockTable> table,
             std::optional<Values<std::int64_t, 1>> slots, std::optional<Int32s> key_start_loc,
             std::optional<bool> causal, std::int32_t max_query_len, std::int32_t max_seq_len) {
            if (query_start_loc.size() != seq_lens.size() + 1) {
              throw_invalid("query_start_loc: " + std::to_string(query_start_loc.size()) +
                            " values, legal: one more than the requests of seq_lens, " +
                            std::to_string(seq_lens.size() + 1));
            }
            if (table && table->shape(0) < seq_lens.size()) {
              throw_invalid("block_table: " + std::to_string(table->shape(0)) +
                            " rows, legal: at least one a request, " +
                            std::to_string(seq_lens.size()));
            }
            new (self) Batch{std::move(query_start_loc), std::move(seq_lens),      std::move(table),
                             std::move(slots),           std::move(key_start_loc), {}};
            self->common.causal = causal;
            self->common.max_query_len = max_query_len;
            self->common.max_seq_len = max_seq_len;
          },
          "query_start_loc"_a, "seq_lens"_a, "block_table"_a = nb::none(), nb::kw_only(),
          "slot_mapping"_a = nb::none(), "key_start_loc"_a = nb::none(), "causal"_a = nb::none(),
          "max_query_len"_a = 0, "max_seq_len"_a = 0,
          "query_start_loc [num_reqs + 1]: prefix sums of the query lengths. seq_lens [num_reqs]:\n"
          "tokens in the cache, this step's included. block_table [num_reqs, pages]. "
          "slot_mapping:\n"
          "computed from the block table unless given. Integer arrays of other types are "
          "converted.")
      .def_prop_ro("num_reqs", [](const Batch& self) { return self.seq_lens.size(); })
      .def_prop_ro("num_actual_tokens",
                   [](const Batch& self) { return self.view().num_actual_tokens; });
}

void bind_metadata(nb::module_& module) {
  using M = AttentionMetadata;
  nb::class_<M>(module, "AttentionMetadata",
                "A step on the device; valid until its builder's next build().")
      .def_prop_ro("backend", &M::backend)
      .def_prop_ro("num_decodes", [](const M& self) { return self.split().num_decodes; })
      .def_prop_ro("num_prefills", [](const M& self) { return self.split().num_prefills; })
      .def_prop_ro("num_decode_tokens",
                   [](const M& self) { return self.split().num_decode_tokens; })
      .def_prop_ro("num_prefill_tokens",
                   [](const M& self) { return self.split().num_prefill_tokens; })
      .def_prop_ro("num_actual_tokens", &M::num_actual_tokens)
      .def_prop_ro("max_query_len", &M::max_query_len)
      .def_prop_ro("max_seq_len", &M::max_seq_len)
      .def_prop_ro("slot_mapping", [](const M& self) {
        return std::vector<std::int64_t>(self.slot_mapping().begin(), self.slot_mapping().end());
      });
  nb::class_<PlannedLaunch>(module, "PlannedLaunch",
                            "A launch of forward() as a step's plan has it.")
      .def_ro("kernel", &PlannedLaunch::kernel)
      .def_ro("items", &PlannedLaunch::items, "Work items; of a merge, query tokens.")
      .def_ro("tasks", &PlannedLaunch::tasks)
      .def_ro("splits", &PlannedLaunch::splits)
      .def_ro("concurrent_groups", &PlannedLaunch::concurrent_groups)
      .def_ro("predicted_us", &PlannedLaunch::predicted_us);
  module.def("planned_launches", &planned_launches, "metadata"_a,
             nb::call_guard<nb::gil_scoped_release>(), "The launches of a step's plan.");
}

}  // namespace

CommonAttentionMetadata Batch::view() const {
  CommonAttentionMetadata batch = common;
  batch.query_start_loc = {query_start_loc.data(), query_start_loc.size()};
  batch.seq_lens = {seq_lens.data(), seq_lens.size()};
  batch.num_reqs = static_cast<std::int32_t>(seq_lens.size());
  batch.num_actual_tokens = batch.query_start_loc.back();
  batch.key_start_loc = span_of(key_start_loc);
  if (slot_mapping) batch.slot_mapping = {slot_mapping->data(), slot_mapping->size()};
  if (block_table) {
    batch.block_table = {block_table->data(), block_table->size()};
    batch.block_table_stride = static_cast<std::int64_t>(block_table->shape(1));
  }
  return batch;
}

void bind_steps(nb::module_& module) {
  bind_batch(module);
  bind_metadata(module);
  using B = AttentionMetadataBuilder;
  nb::class_<B>(module, "AttentionMetadataBuilder",
                "Host arithmetic of a step and one upload. For one thread at a time.")
      .def(
          "build",
          [](B& self, const Queue& queue, const Batch& batch, std::int32_t common_prefix_len,
             bool fast_build) -> const AttentionMetadata& {
            const BuildOptions options{common_prefix_len, fast_build};
            return without_gil([&]() -> const AttentionMetadata& {
              return self.build(queue, batch.view(), nullptr, options);
            });
          },
          "queue"_a, "batch"_a, nb::kw_only(), "common_prefix_len"_a = 0, "fast_build"_a = false,
          nb::rv_policy::reference_internal,
          "Checks the batch, plans the work and uploads it. The previous metadata becomes invalid.")
      .def_prop_ro("decode_threshold", &B::decode_threshold)
      .def("workspace_bytes",
           [](const B& self, const Batch& batch) { return self.workspace_bytes(batch.view()); });
}

}  // namespace clattn::python
