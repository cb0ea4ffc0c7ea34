// compat/: batches that are made from others, as vLLM's and FlashInfer's engines do.

#include <clattn/compat/derived_batches.hpp>
#include <clattn/compat/page.hpp>
#include <clattn/compat/virtual_batches.hpp>

#include "steps.hpp"

namespace clattn::python {

namespace {

/// What was made from a batch, which it keeps.
template <typename Made>
struct Derived : Made {
  nb::object from;
  CommonAttentionMetadata metadata(std::span<const std::int64_t>) const { return Made::metadata(); }
};

template <typename Made>
Derived<Made> derived(Made made, const Batch& from) {
  return {std::move(made), nb::find(from)};
}

template <typename Made>
nb::class_<Derived<Made>> bind_derived(nb::module_& module, const char* name, const char* doc) {
  return nb::class_<Derived<Made>>(module, name, doc)
      .def_prop_ro("query_start_loc", &view_of<&Made::query_start_loc, Derived<Made>>)
      .def(
          "metadata", [](const Derived<Made>& self) { return batch_of(self, nb::none()); },
          "It as a CommonAttentionMetadata.");
}

void bind_draft_steps(nb::module_& module) {
  bind_derived<FastPrefillBatch>(
      module, "FastPrefillBatch",
      "A batch's requests with the tokens alone whose logits are wanted.");
  module.def(
      "make_kv_sharing_fast_prefill_common_attn_metadata",
      [](const Batch& batch, nb::handle logits_indices) {
        const Int32s indices = numbers<std::int32_t>(logits_indices, "logits_indices");
        return derived(
            make_kv_sharing_fast_prefill_common_attn_metadata(batch.view(), span_of(indices)),
            batch);
      },
      "batch"_a, "logits_indices"_a,
      "For layers that share another layer's cache; logits_indices: ascending tokens.");
  bind_derived<AdvancedBatch>(module, "AdvancedBatch", "The step after a step.")
      .def_prop_ro("seq_lens", &view_of<&AdvancedBatch::seq_lens, Derived<AdvancedBatch>>);
  module.def(
      "advance_batch",
      [](const Batch& batch, bool turn_prefills_into_decodes) {
        return derived(advance_batch(batch.view(), turn_prefills_into_decodes), batch);
      },
      "batch"_a, "turn_prefills_into_decodes"_a = false,
      "One new token for each request that had any.");
}

using Slice =
    std::pair<std::pair<std::int32_t, std::int32_t>, std::pair<std::int32_t, std::int32_t>>;

void bind_slices(nb::module_& module) {
  nb::class_<UBatchSlice>(module, "UBatchSlice", "A part of a batch that is run as a batch.")
      .def(
          "__init__",
          [](UBatchSlice* self, std::pair<std::int32_t, std::int32_t> requests,
             std::pair<std::int32_t, std::int32_t> tokens) {
            new (self)
                UBatchSlice{{requests.first, requests.second}, {tokens.first, tokens.second}};
          },
          "request_slice"_a, "token_slice"_a, "Two ranges (begin, end).")
      .def_prop_ro("request_slice",
                   [](const UBatchSlice& self) {
                     return std::pair(self.request_slice.begin, self.request_slice.end);
                   })
      .def_prop_ro("token_slice", [](const UBatchSlice& self) {
        return std::pair(self.token_slice.begin, self.token_slice.end);
      });
  module.def(
      "create_ubatch_slices",
      [](const Batch& batch, std::int32_t split_point, std::int32_t num_ubatches) {
        return create_ubatch_slices(batch.view(), split_point, num_ubatches);
      },
      "batch"_a, "split_point"_a, "num_ubatches"_a = 2,
      "Slices of split_point tokens, the last of which takes what is left.");
  module.def(
      "slice_query_start_locs",
      [](nb::handle query_start_loc, std::pair<std::int32_t, std::int32_t> requests) {
        const Int32s starts = numbers<std::int32_t>(query_start_loc, "query_start_loc");
        return array_of(slice_query_start_locs(span_of(starts), {requests.first, requests.second}));
      },
      "query_start_loc"_a, "request_slice"_a,
      "Where the tokens of requests (begin, end) start, counted from the first of them.");
  bind_derived<SlicedBatch>(module, "SlicedBatch", "A slice as a batch.")
      .def_prop_ro("seq_lens", &view_of<&SlicedBatch::seq_lens, Derived<SlicedBatch>>)
      .def_prop_ro("slice", [](const Derived<SlicedBatch>& self) { return self.slice; });
  module.def(
      "make_metadata_with_slice",
      [](const UBatchSlice& slice, const Batch& batch) {
        return derived(make_metadata_with_slice(slice, batch.view()), batch);
      },
      "slice"_a, "batch"_a);
  module.def(
      "split_attn_metadata",
      [](const std::vector<UBatchSlice>& slices, const Batch& batch) {
        std::vector<Derived<SlicedBatch>> parts;
        for (SlicedBatch& part : split_attn_metadata(slices, batch.view()))
          parts.push_back(derived(std::move(part), batch));
        return parts;
      },
      "slices"_a, "batch"_a, "Each slice as a batch.");
}

void bind_virtual_batches(nb::module_& module) {
  using V = LocalAttentionVirtualBatches;
  nb::class_<V>(module, "LocalAttentionVirtualBatches",
                "Chunked-local attention as causal attention over more requests.")
      .def_prop_ro("query_start_loc", &view_of<&V::query_start_loc>)
      .def_prop_ro("seq_lens", &view_of<&V::seq_lens>)
      .def_prop_ro("virtual_batch_to_request", &view_of<&V::virtual_batch_to_request>)
      .def_prop_ro("first_block", &view_of<&V::first_block>)
      .def_prop_ro("block_table",
                   [](const V& self) {
                     return Result<const std::int32_t>(
                         self.block_table.data(),
                         {self.seq_lens.size(), static_cast<std::size_t>(self.blocks_per_chunk)},
                         nb::find(self));
                   })
      .def_prop_ro("num_virtual", &V::num_virtual)
      .def_ro("blocks_per_chunk", &V::blocks_per_chunk)
      .def_ro("block_table_columns", &V::block_table_columns)
      .def_ro("causal", &V::causal)
      .def("metadata", &batch_of<V>, "slot_mapping"_a = nb::none(),
           "The virtual requests as a CommonAttentionMetadata.")
      .def(
          "gather_block_table",
          [](const V& self, nb::handle other_block_table) {
            const auto table = numbers<std::int32_t, 2>(other_block_table, "other_block_table");
            return array_of(
                self.gather_block_table(span_of(table)),
                {self.seq_lens.size(), static_cast<std::size_t>(self.blocks_per_chunk)});
          },
          "other_block_table"_a, "The rows of another cache group's table of the same shape.");
  module.def(
      "make_local_attention_virtual_batches",
      [](std::int32_t attn_chunk_size, const Batch& batch, std::int32_t block_size) {
        return make_local_attention_virtual_batches(attn_chunk_size, batch.view(), block_size);
      },
      "attn_chunk_size"_a, "batch"_a, "block_size"_a);
}

void bind_pages(nb::module_& module) {
  module.def(
      "get_dcp_local_seq_lens",
      [](nb::handle seq_lens, std::int32_t dcp_size, std::optional<std::int32_t> dcp_rank,
         std::int32_t cp_kv_cache_interleave_size) {
        const Int32s lengths = numbers<std::int32_t>(seq_lens, "seq_lens");
        auto local = get_dcp_local_seq_lens(span_of(lengths),
                                            {dcp_size, dcp_rank, cp_kv_cache_interleave_size});
        if (dcp_rank) return array_of(std::move(local));
        return array_of(std::move(local), {lengths.size(), static_cast<std::size_t>(dcp_size)});
      },
      "seq_lens"_a, "dcp_size"_a = 1, "dcp_rank"_a = nb::none(),
      "cp_kv_cache_interleave_size"_a = 1,
      "Tokens of each sequence that a rank holds: [num_reqs], of all ranks [num_reqs, dcp_size].");
  module.def(
      "get_seq_lens",
      [](nb::handle indptr, nb::handle last_page_len, std::int32_t page_size) {
        const Int32s starts = numbers<std::int32_t>(indptr, "indptr");
        const Int32s last = numbers<std::int32_t>(last_page_len, "last_page_len");
        return array_of(get_seq_lens(span_of(starts), span_of(last), page_size));
      },
      "indptr"_a, "last_page_len"_a, "page_size"_a, "[num_reqs]: the tokens on CSR page lists.");
  module.def(
      "get_batch_indices_positions",
      [](nb::handle append_indptr, nb::handle seq_lens, std::int64_t nnz) {
        const Int32s starts = numbers<std::int32_t>(append_indptr, "append_indptr");
        const Int32s lengths = numbers<std::int32_t>(seq_lens, "seq_lens");
        BatchIndicesPositions found =
            get_batch_indices_positions(span_of(starts), span_of(lengths), nnz);
        return nb::make_tuple(array_of(std::move(found.batch_indices)),
                              array_of(std::move(found.positions)));
      },
      "append_indptr"_a, "seq_lens"_a, "nnz"_a,
      "Request and position of each new token, int32 [nnz] each; -1 and 0 behind the last.");
}

}  // namespace

void bind_derived_batches(nb::module_& module) {
  bind_draft_steps(module);
  bind_slices(module);
  bind_virtual_batches(module);
  bind_pages(module);
}

}  // namespace clattn::python
