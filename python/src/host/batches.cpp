// metadata.hpp and reorder.hpp: arithmetic on batches.

#include <clattn/compat/page.hpp>
#include <clattn/reorder.hpp>

#include "steps.hpp"

namespace clattn::python {

namespace {

struct Options {
  SplitOptions options;
  std::vector<HostArray> arrays;
};

void bind_split_classes(nb::module_& module) {
  nb::class_<BatchSplit>(module, "BatchSplit", "How a batch divides when decodes come first.")
      .def_ro("num_decodes", &BatchSplit::num_decodes)
      .def_ro("num_prefills", &BatchSplit::num_prefills)
      .def_ro("num_decode_tokens", &BatchSplit::num_decode_tokens)
      .def_ro("num_prefill_tokens", &BatchSplit::num_prefill_tokens);
  nb::class_<ExtendSplit>(module, "ExtendSplit", "A batch as decodes, extends, then prefills.")
      .def_ro("num_decodes", &ExtendSplit::num_decodes)
      .def_ro("num_extends", &ExtendSplit::num_extends)
      .def_ro("num_prefills", &ExtendSplit::num_prefills)
      .def_ro("num_decode_tokens", &ExtendSplit::num_decode_tokens)
      .def_ro("num_extend_tokens", &ExtendSplit::num_extend_tokens)
      .def_ro("num_prefill_tokens", &ExtendSplit::num_prefill_tokens);
  nb::class_<Options>(module, "SplitOptions", "How split_decodes_and_prefills() counts.")
      .def(
          "__init__",
          [](Options* self, std::int32_t decode_threshold, bool require_uniform, bool short_extends,
             nb::handle is_prefilling) {
            Batch batch;
            const auto marks = batch.keep<std::uint8_t>(is_prefilling, "is_prefilling");
            new (self) Options{{decode_threshold, require_uniform, short_extends, marks},
                               std::move(batch.arrays)};
          },
          nb::kw_only(), "decode_threshold"_a = 1, "require_uniform"_a = false,
          "treat_short_extends_as_decodes"_a = true, "is_prefilling"_a = nb::none(),
          "require_uniform: all decodes have the first one's query length. is_prefilling\n"
          "[num_reqs], 1 or True: prefills however short, unless treat_short_extends_as_decodes.")
      .def_prop_ro("decode_threshold",
                   [](const Options& self) { return self.options.decode_threshold; })
      .def_prop_ro("require_uniform",
                   [](const Options& self) { return self.options.require_uniform; })
      .def_prop_ro("treat_short_extends_as_decodes",
                   [](const Options& self) { return self.options.treat_short_extends_as_decodes; })
      .def_prop_ro("is_prefilling", [](const Options& self) {
        return view_of_span(self.options.is_prefilling, nb::find(self));
      });
}

void bind_splits(nb::module_& module) {
  module.def(
      "split_decodes_and_prefills",
      [](const Batch& batch, std::int32_t decode_threshold) {
        return split_decodes_and_prefills(batch.view(), decode_threshold);
      },
      "batch"_a, "decode_threshold"_a = 1, "Counts decodes, which must stand before the others.");
  module.def(
      "split_decodes_and_prefills",
      [](const Batch& batch, const Options& options) {
        return split_decodes_and_prefills(batch.view(), options.options);
      },
      "batch"_a, "options"_a, "Of a batch in the order of the four regions.");
  module.def(
      "split_decodes_prefills_and_extends",
      [](const Batch& batch, std::int32_t decode_threshold) {
        return split_decodes_prefills_and_extends(batch.view(), decode_threshold);
      },
      "batch"_a, "decode_threshold"_a = 1);
  module.def(
      "split_prefill_chunks",
      [](nb::handle seq_lens, std::int64_t workspace_size, std::int32_t request_offset) {
        const Int32s lengths = numbers<std::int32_t>(seq_lens, "seq_lens");
        std::vector<std::pair<std::int32_t, std::int32_t>> chunks;
        for (const RequestRange& range :
             split_prefill_chunks(span_of(lengths), workspace_size, request_offset)) {
          chunks.emplace_back(range.begin, range.end);
        }
        return chunks;
      },
      "seq_lens"_a, "workspace_size"_a, "request_offset"_a = 0,
      "Runs (begin, end) of requests whose seq_lens sum to at most workspace_size tokens.");
}

void bind_reordering(nb::module_& module) {
  constexpr const char* kName = "reorder_batch_to_split_decodes_and_prefills";
  module.def(
      kName,
      [](nb::handle num_scheduled_tokens, std::int32_t decode_threshold) {
        const Int32s scheduled =
            numbers<std::int32_t>(num_scheduled_tokens, "num_scheduled_tokens");
        std::vector<std::int32_t> order(scheduled.size());
        const bool moved = reorder_batch_to_split_decodes_and_prefills(span_of(scheduled),
                                                                       decode_threshold, order);
        return nb::make_tuple(moved, array_of(std::move(order)));
      },
      "num_scheduled_tokens"_a, "decode_threshold"_a,
      "Brings decodes to the front with the fewest swaps: whether anything moved, and which old\n"
      "index stands at each new place.");
  module.def(
      kName,
      [](nb::handle num_scheduled_tokens, nb::handle num_computed_tokens,
         nb::handle num_prompt_tokens, std::int32_t decode_threshold) {
        Batch batch;
        const RequestProgress progress{
            batch.keep(numbers<std::int32_t>(num_scheduled_tokens, "num_scheduled_tokens")),
            batch.keep(numbers<std::int32_t>(num_computed_tokens, "num_computed_tokens")),
            batch.keep(numbers<std::int32_t>(num_prompt_tokens, "num_prompt_tokens"))};
        std::vector<std::int32_t> order(progress.num_scheduled_tokens.size());
        std::vector<RowSwap> swaps;
        const bool moved =
            reorder_batch_to_split_decodes_and_prefills(progress, decode_threshold, order, &swaps);
        return nb::make_tuple(moved, array_of(std::move(order)), swaps);
      },
      "num_scheduled_tokens"_a, "num_computed_tokens"_a, "num_prompt_tokens"_a,
      "decode_threshold"_a,
      "Decodes, short extends, long extends, then first chunks. Gives the row swaps, too.");
  module.def(
      "reorder_batch_threshold",
      [](std::int32_t num_speculative_tokens, bool parallel_drafting) {
        return reorder_batch_threshold(num_speculative_tokens, parallel_drafting
                                                                   ? Drafting::kParallel
                                                                   : Drafting::kSequential);
      },
      "num_speculative_tokens"_a, "parallel_drafting"_a = false,
      "The decode threshold of a backend that runs speculative tokens as decodes.");
}

void bind_slots(nb::module_& module) {
  module.attr("PAD_SLOT_ID") = kPadSlotId;
  module.def(
      "compute_slot_mapping",
      [](const Batch& batch, std::int32_t block_size, std::optional<std::int64_t> num_slots) {
        const std::int64_t count = num_slots.value_or(batch.view().num_actual_tokens);
        std::vector<std::int64_t> slots(static_cast<std::size_t>(std::max<std::int64_t>(0, count)));
        compute_slot_mapping(batch.view(), block_size, slots);
        return array_of(std::move(slots));
      },
      "batch"_a, "block_size"_a, "num_slots"_a = nb::none(),
      "int64 [num_slots]: where the query tokens are stored, then PAD_SLOT_ID. None: one a token.");
  module.def(
      "pad_slot_mapping",
      [](nb::handle slot_mapping, std::int32_t num_actual_tokens) {
        nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> slots;
        if (!nb::try_cast(slot_mapping, slots, false)) {
          throw_invalid("slot_mapping: legal: a writable array of int64 without gaps");
        }
        pad_slot_mapping({slots.data(), slots.size()}, num_actual_tokens);
      },
      "slot_mapping"_a, "num_actual_tokens"_a,
      "Makes the slots from num_actual_tokens on PAD_SLOT_ID, in place.");
  module.def(
      "map_to_kernel_blocks",
      [](nb::handle block_table, std::int32_t block_size, std::int32_t kernel_block_size) {
        const auto table = numbers<std::int32_t, 2>(block_table, "block_table");
        const auto times = static_cast<std::size_t>(
            kernel_block_size > 0 && block_size > 0 ? block_size / kernel_block_size : 0);
        std::vector<std::int32_t> kernel_table(table.size() * times);
        map_to_kernel_blocks(span_of(table), block_size, kernel_block_size, kernel_table);
        return array_of(std::move(kernel_table), {table.shape(0), table.shape(1) * times});
      },
      "block_table"_a, "block_size"_a, "kernel_block_size"_a,
      "The block table of kernels whose pages are parts of the allocator's blocks.");
  nb::class_<PagedKVMetadata>(module, "PagedKVMetadata", "CSR page lists, int32.")
      .def_prop_ro("indptr", &view_of<&PagedKVMetadata::indptr>, "[num_reqs + 1]")
      .def_prop_ro("indices", &view_of<&PagedKVMetadata::indices>, "[indptr[-1]], block ids")
      .def_prop_ro("last_page_len", &view_of<&PagedKVMetadata::last_page_len>, "[num_reqs]");
  module.def(
      "build_paged_kv_metadata",
      [](const Batch& batch, std::int32_t block_size) {
        return build_paged_kv_metadata(batch.view(), block_size);
      },
      "batch"_a, "block_size"_a, "The page lists of a batch.");
  module.def(
      "validate_batch",
      [](const Batch& batch, std::int32_t block_size, std::int64_t num_blocks) {
        validate_batch(batch.view(), block_size, num_blocks);
      },
      "batch"_a, "block_size"_a, "num_blocks"_a = -1,
      "Raises InvalidArgument, naming request and field, for a batch that is wrong in itself.");
}

}  // namespace

void bind_batches(nb::module_& module) {
  bind_split_classes(module);
  bind_splits(module);
  bind_reordering(module);
  bind_slots(module);
}

}  // namespace clattn::python
