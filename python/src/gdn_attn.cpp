// Steps of gated delta nets (gdn_attn.hpp).

#include <clattn/gdn_attn.hpp>

#include "steps.hpp"

namespace clattn::python {

namespace {

/// A list as an array of `rows` rows.
auto rows_of(const std::vector<std::int32_t>& list, std::size_t rows, nb::handle owner) {
  const std::size_t columns = rows == 0 ? 0 : list.size() / rows;
  return Result<const std::int32_t>(list.data(), {rows, columns}, owner);
}

}  // namespace

void bind_gdn_attn(nb::module_& module) {
  using M = GDNAttentionMetadata;
  nb::class_<M>(
      module, "GDNAttentionMetadata",
      "A step of gated delta nets as vLLM has it; lists are arrays of the host. CLAttn's\n"
      "operations take metadata alone, whose lists hold until the builder's next build().")
      .def_ro("num_prefills", &M::num_prefills, "Beside drafts, decodes count as prefills.")
      .def_ro("num_prefill_tokens", &M::num_prefill_tokens)
      .def_ro("num_decodes", &M::num_decodes)
      .def_ro("num_decode_tokens", &M::num_decode_tokens)
      .def_ro("num_spec_decodes", &M::num_spec_decodes, "Requests with drafts.")
      .def_ro("num_spec_decode_tokens", &M::num_spec_decode_tokens)
      .def_ro("num_actual_tokens", &M::num_actual_tokens)
      .def_prop_ro("has_initial_state", &view_of<&M::has_initial_state>,
                   "uint8 [non-spec]; empty without prefills.")
      .def_prop_ro("spec_query_start_loc", &view_of<&M::spec_query_start_loc>, "[spec + 1].")
      .def_prop_ro("non_spec_query_start_loc", &view_of<&M::non_spec_query_start_loc>,
                   "[non-spec + 1].")
      .def_prop_ro(
          "spec_state_indices_tensor",
          [](const M& self) {
            return rows_of(self.spec_state_indices_tensor, self.num_accepted_tokens.size(),
                           nb::find(self));
          },
          "[spec, 1 + most drafts].")
      .def_prop_ro("non_spec_state_indices_tensor", &view_of<&M::non_spec_state_indices_tensor>,
                   "[non-spec].")
      .def_prop_ro("spec_sequence_masks", &view_of<&M::spec_sequence_masks>, "uint8 [num_reqs].")
      .def_prop_ro("spec_token_indx", &view_of<&M::spec_token_indx>, "Rows of spec requests.")
      .def_prop_ro("non_spec_token_indx", &view_of<&M::non_spec_token_indx>, "The other rows.")
      .def_prop_ro("num_accepted_tokens", &view_of<&M::num_accepted_tokens>, "[spec].")
      .def_prop_ro("prefill_query_start_loc", &view_of<&M::prefill_query_start_loc>,
                   "[num_prefills + 1], from 0.")
      .def_prop_ro("prefill_state_indices", &view_of<&M::prefill_state_indices>, "[num_prefills].")
      .def_prop_ro("prefill_has_initial_state", &view_of<&M::prefill_has_initial_state>,
                   "uint8 [num_prefills].")
      .def_prop_ro(
          "chunk_indices",
          [](const M& self) {
            return rows_of(self.chunk_indices, self.chunk_indices.size() / 2, nb::find(self));
          },
          "[chunks, 2]: prefill and number of its chunk.")
      .def_prop_ro("chunk_offsets", &view_of<&M::chunk_offsets>, "[num_prefills + 1].")
      .def_ro("metadata", &M::metadata, "RecurrentMetadata of all requests, in their order.");
  using B = GDNAttentionMetadataBuilder;
  nb::class_<B> builder(module, "GDNAttentionMetadataBuilder",
                        "Makes the metadata of gated delta nets from what attention is given.");
  builder
      .def(nb::init<const Context&, KVCacheSpec, std::int32_t>(), "context"_a, "spec"_a,
           "null_block_id"_a = -1,
           "spec: of the layers, of kind mamba. null_block_id: a page that stands for none.")
      .def(
          "build",
          [](B& self, const Queue& queue, const Batch& batch, nb::handle num_accepted_tokens,
             nb::handle num_decode_draft_tokens) {
            const auto accepted =
                optional_numbers<std::int32_t>(num_accepted_tokens, "num_accepted_tokens");
            const auto drafts =
                optional_numbers<std::int32_t>(num_decode_draft_tokens, "num_decode_draft_tokens");
            return without_gil([&]() -> M {
              return self.build(queue, batch.view(), span_of(accepted), span_of(drafts));
            });
          },
          "queue"_a, "batch"_a, "num_accepted_tokens"_a = nb::none(),
          "num_decode_draft_tokens"_a = nb::none(), nb::keep_alive<0, 1>(),
          "batch: with block_table, the pages of states. num_accepted_tokens: of each request's\n"
          "last step, its bonus token included. num_decode_draft_tokens: -1 for requests that are\n"
          "no decodes with drafts.");
}

}  // namespace clattn::python
