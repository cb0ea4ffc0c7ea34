#include "steps.hpp"

#include <clattn/explain.hpp>

namespace clattn::python {

namespace {

void make_batch(Batch* self, nb::handle query_start_loc, nb::handle seq_lens, nb::handle table,
                nb::handle slots, nb::handle key_start_loc, nb::handle num_computed_tokens,
                std::optional<bool> causal, nb::handle direction, nb::handle span_start_loc,
                nb::handle spans, nb::handle first_keys, nb::handle keep_keys,
                nb::handle tree_start_loc, nb::handle tree_parents, std::int32_t max_query_len,
                std::int32_t max_seq_len, std::int32_t graph_pad_size,
                std::optional<std::int32_t> num_actual_tokens) {
  Batch batch;
  CommonAttentionMetadata& common = batch.common;
  common.query_start_loc = batch.keep(numbers<std::int32_t>(query_start_loc, "query_start_loc"));
  common.seq_lens = batch.keep(numbers<std::int32_t>(seq_lens, "seq_lens"));
  if (common.query_start_loc.size() != common.seq_lens.size() + 1) {
    throw_invalid("query_start_loc: " + std::to_string(common.query_start_loc.size()) +
                  " values, legal: one more than the requests of seq_lens, " +
                  std::to_string(common.seq_lens.size() + 1));
  }
  common.num_reqs = static_cast<std::int32_t>(common.seq_lens.size());
  common.num_actual_tokens = num_actual_tokens.value_or(common.query_start_loc.back());
  if (const auto pages = optional_numbers<std::int32_t, 2>(table, "block_table")) {
    if (pages->shape(0) < common.seq_lens.size()) {
      throw_invalid("block_table: " + std::to_string(pages->shape(0)) +
                    " rows, legal: at least one a request, " +
                    std::to_string(common.seq_lens.size()));
    }
    common.block_table = batch.keep(*pages);
    common.block_table_stride = static_cast<std::int64_t>(pages->shape(1));
  }
  common.slot_mapping = batch.keep<std::int64_t>(slots, "slot_mapping");
  common.key_start_loc = batch.keep<std::int32_t>(key_start_loc, "key_start_loc");
  common.num_computed_tokens = batch.keep<std::int32_t>(num_computed_tokens, "num_computed_tokens");
  common.causal = causal;
  batch.keep(RequestLists(direction, span_start_loc, spans, first_keys, keep_keys, tree_start_loc,
                          tree_parents));
  common.max_query_len = max_query_len;
  common.max_seq_len = max_seq_len;
  common.graph_pad_size = graph_pad_size;
  new (self) Batch(std::move(batch));
}

/// A block table of C++ as an array of rows.
template <typename Table>
auto table_of(const Table& given, nb::handle owner) {
  const auto columns = static_cast<std::size_t>(given.block_table_stride);
  const std::size_t rows = columns == 0 ? 0 : given.block_table.size() / columns;
  return Result<const std::int32_t>(given.block_table.data(), {rows, columns}, owner);
}

template <auto field>
auto field_of(const Batch& self) {
  return view_of_span(self.common.*field, nb::find(self));
}

void bind_batch(nb::module_& module) {
  using C = CommonAttentionMetadata;
  nb::class_<Batch>(module, "CommonAttentionMetadata",
                    "One step's batch, once for all layers of a cache group; vLLM's names.")
      .def("__init__", &make_batch, "query_start_loc"_a, "seq_lens"_a, "block_table"_a = nb::none(),
           nb::kw_only(), "slot_mapping"_a = nb::none(), "key_start_loc"_a = nb::none(),
           "num_computed_tokens"_a = nb::none(), "causal"_a = nb::none(),
           "direction"_a = nb::none(), "span_start_loc"_a = nb::none(), "spans"_a = nb::none(),
           "first_keys"_a = nb::none(), "keep_keys"_a = nb::none(), "tree_start_loc"_a = nb::none(),
           "tree_parents"_a = nb::none(), "max_query_len"_a = 0, "max_seq_len"_a = 0,
           "graph_pad_size"_a = 0, "num_actual_tokens"_a = nb::none(),
           "query_start_loc [num_reqs + 1]: prefix sums of the query lengths. seq_lens\n"
           "[num_reqs]: tokens in the cache, this step's included. block_table\n"
           "[num_reqs, pages]. slot_mapping: computed from the block table unless given.\n"
           "direction [num_reqs], instead of causal: 0 = both ways, 1 = causal, 2 = both ways\n"
           "with the left window of the first new token (a canvas); of layers with\n"
           "use_directions.\n"
           "spans [number, 2]: first position and one past the last of tokens that see one\n"
           "another, such as an image's; request r has the rows span_start_loc[r] to\n"
           "span_start_loc[r + 1] - 1; of layers with use_spans. first_keys [num_reqs]: the first\n"
           "position that holds a key; of layers with use_first_keys. keep_keys [num_reqs]: how\n"
           "many first keys neither the window's left side nor chunks hide; of layers with\n"
           "use_keep_keys. tree_parents [nodes]: the newest tokens of request r are drafts in a "
           "tree, the elements tree_start_loc[r] to\n"
           "tree_start_loc[r + 1] - 1; each has the number of an earlier one, from 0 in its tree,\n"
           "or -1 (a root); of layers with use_trees.\n"
           "num_actual_tokens: rows of the query, if padding follows the requests' tokens.\n"
           "Lists, or arrays of integers; those that are int32 (slots: int64) are not copied.")
      .def_prop_ro("query_start_loc", &field_of<&C::query_start_loc>)
      .def_prop_ro("seq_lens", &field_of<&C::seq_lens>)
      .def_prop_ro("num_computed_tokens", &field_of<&C::num_computed_tokens>)
      .def_prop_ro("slot_mapping", &field_of<&C::slot_mapping>)
      .def_prop_ro("key_start_loc", &field_of<&C::key_start_loc>)
      .def_prop_ro("span_start_loc", &field_of<&C::span_start_loc>)
      .def_prop_ro("first_keys", &field_of<&C::first_keys>)
      .def_prop_ro("keep_keys", &field_of<&C::keep_keys>)
      .def_prop_ro("tree_start_loc", &field_of<&C::tree_start_loc>)
      .def_prop_ro("tree_parents", &field_of<&C::tree_parents>)
      .def_prop_ro(
          "direction",
          [](const Batch& self) {
            const auto& given = self.common.direction;
            return Result<const std::uint8_t>(given.data(), {given.size()}, nb::find(self));
          },
          "uint8 [num_reqs]: 0 = both ways, 1 = causal, 2 = a canvas; or empty.")
      .def_prop_ro(
          "spans",
          [](const Batch& self) {
            const auto& given = self.common.spans;
            return Result<const std::int32_t>(given.data(), {given.size() / 2, 2}, nb::find(self));
          },
          "[number, 2]: first position, one past the last.")
      .def_prop_ro(
          "block_table", [](const Batch& self) { return table_of(self.common, nb::find(self)); },
          "[num_reqs, pages]")
      .def(
          "is_causal",
          [](const Batch& self, std::string_view attn_type) {
            return self.common.is_causal(parse_attention_type(attn_type));
          },
          "attn_type"_a = "decoder", "causal, or the default of layers of this type.")
      .def_prop_ro("num_reqs", [](const Batch& self) { return self.common.num_reqs; })
      .def_prop_ro("num_actual_tokens",
                   [](const Batch& self) { return self.common.num_actual_tokens; })
      .def_prop_ro("max_query_len", [](const Batch& self) { return self.common.max_query_len; })
      .def_prop_ro("max_seq_len", [](const Batch& self) { return self.common.max_seq_len; })
      .def_prop_ro("causal", [](const Batch& self) { return self.common.causal; })
      .def_prop_ro("graph_pad_size", [](const Batch& self) { return self.common.graph_pad_size; })
      .def(
          "unpadded",
          [](const Batch& self, std::int32_t num_tokens, std::int32_t num_requests) {
            Batch made;
            made.common = self.common.unpadded(num_tokens, num_requests);
            made.made = nb::find(self);
            return made;
          },
          "num_tokens"_a, "num_requests"_a,
          "The first requests alone, with num_tokens rows of the query: a captured batch without\n"
          "its padding.")
      .def(
          "naive_query_lens",
          [](const Batch& self) { return array_of(self.common.naive_query_lens()); },
          "int32 [num_reqs]: query tokens of each request.");
}

void bind_pages(nb::module_& module) {
  nb::class_<Pages>(module, "GroupPages", "A KV cache group's part of a step.")
      .def(
          "__init__",
          [](Pages* self, nb::handle block_table, nb::handle slot_mapping) {
            Batch batch;
            const auto table = numbers<std::int32_t, 2>(block_table, "block_table");
            const auto stride = static_cast<std::int64_t>(table.shape(1));
            const GroupPages pages{batch.keep(table), stride,
                                   batch.keep<std::int64_t>(slot_mapping, "slot_mapping")};
            new (self) Pages{pages, std::move(batch.arrays)};
          },
          "block_table"_a, "slot_mapping"_a = nb::none(),
          "block_table [num_reqs, pages]; slot_mapping is computed from it unless given.")
      .def_prop_ro("block_table",
                   [](const Pages& self) { return table_of(self.pages, nb::find(self)); })
      .def_prop_ro("slot_mapping", [](const Pages& self) {
        return view_of_span(self.pages.slot_mapping, nb::find(self));
      });
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
      .def_prop_ro("common_prefix_len", &M::common_prefix_len)
      .def_prop_ro(
          "slot_mapping_buffer",
          [](const M& self) {
            const cl_mem slots = self.slot_mapping_buffer();
            return slots == nullptr ? Buffer() : Buffer::adopt(slots);
          },
          "The slots on the device, int64 from slot_mapping_offset_bytes on.")
      .def_prop_ro("slot_mapping_offset_bytes", &M::slot_mapping_offset_bytes)
      .def_prop_ro("slot_mapping", [](const M& self) {
        return std::vector<std::int64_t>(self.slot_mapping().begin(), self.slot_mapping().end());
      });
  nb::class_<PlannedLaunch>(module, "PlannedLaunch",
                            "A launch of forward() as a step's plan has it.")
      .def_ro("kernel", &PlannedLaunch::kernel)
      .def_ro("items", &PlannedLaunch::items, "Work items; of a merge, query tokens.")
      .def_ro("tasks", &PlannedLaunch::tasks)
      .def_ro("split_tiles", &PlannedLaunch::split_tiles, "Tiles whose keys are split.")
      .def_ro("splits", &PlannedLaunch::splits)
      .def_ro("concurrent_groups", &PlannedLaunch::concurrent_groups)
      .def_ro("predicted_us", &PlannedLaunch::predicted_us)
      .def_ro("beside_last", &PlannedLaunch::beside_last);
  module.def("planned_launches", &planned_launches, "metadata"_a,
             nb::call_guard<nb::gil_scoped_release>(), "The launches of a step's plan.");
}

void bind_builder(nb::module_& module) {
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
      .def(
          "build_for_drafting",
          [](B& self, const Queue& queue, const Batch& batch) -> const AttentionMetadata& {
            return without_gil([&]() -> const AttentionMetadata& {
              return self.build_for_drafting(queue, batch.view());
            });
          },
          "queue"_a, "batch"_a, nb::rv_policy::reference_internal,
          "build() of a draft model's step, with fast_build.")
      .def_prop_ro("supports_update_block_table", &B::supports_update_block_table)
      .def(
          "update_block_table",
          [](B& self, const Queue& queue, const AttentionMetadata& metadata,
             const Pages& pages) -> const AttentionMetadata& {
            return without_gil([&]() -> const AttentionMetadata& {
              return self.update_block_table(queue, metadata, pages.pages);
            });
          },
          "queue"_a, "metadata"_a, "pages"_a, nb::rv_policy::reference_internal,
          "What build() would make of metadata's batch with other pages: the plan is taken over.")
      .def(
          "workspace_bytes",
          [](const B& self, const Batch& batch) { return self.workspace_bytes(batch.view()); },
          "batch"_a, "Bytes of partial results that build() would use for this batch.")
      .def(
          "can_run_in_graph",
          [](const B& self, const Batch& batch) { return self.can_run_in_graph(batch.view()); },
          "batch"_a, "Whether a recorded step of this builder can run the batch.")
      .def(
          "reorder_batch",
          [](const B& self, nb::handle num_scheduled_tokens) {
            const Int32s scheduled =
                numbers<std::int32_t>(num_scheduled_tokens, "num_scheduled_tokens");
            std::vector<std::int32_t> order(scheduled.size());
            const bool moved = self.reorder_batch(span_of(scheduled), order);
            return nb::make_tuple(moved, array_of(std::move(order)));
          },
          "num_scheduled_tokens"_a,
          "The order that brings decodes first: whether anything moves, and which old index "
          "stands\n"
          "at each new place.")
      .def_prop_ro("decode_threshold", &B::decode_threshold)
      .def(
          "warm_up", [](B& self, const Queue& queue) { without_gil([&] { self.warm_up(queue); }); },
          "queue"_a)
      .def("set_workspace_buffer", &B::set_workspace_buffer, "workspace"_a,
           "From the next build() on, partial results go to this AttentionWorkspace.");
}

}  // namespace

void bind_steps(nb::module_& module) {
  bind_batch(module);
  bind_pages(module);
  bind_metadata(module);
  bind_builder(module);
}

}  // namespace clattn::python
