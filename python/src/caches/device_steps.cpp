// Steps whose lengths only the device knows (cache_ops.hpp).

#include "caches.hpp"

namespace clattn::python {

namespace {

/// The batch of advance_step_*() as Python gives it.
struct Advance {
  std::int32_t num_seqs, num_queries, block_size;
  std::int64_t num_blocks;
  nb::handle input_tokens, sampled_token_ids, input_positions, seq_lens, slot_mapping, block_tables;
  std::optional<std::int64_t> block_table_stride;
  const AttentionMetadata* metadata;
};

AdvanceStep step_of(const Advance& given, CallTensors& tensors) {
  AdvanceStep step;
  step.num_seqs = given.num_seqs;
  step.num_queries = given.num_queries;
  step.block_size = given.block_size;
  step.num_blocks = given.num_blocks;
  step.input_tokens = tensors.written_values<std::int64_t>(given.input_tokens, "input_tokens");
  step.sampled_token_ids =
      tensors.values<std::int64_t>(given.sampled_token_ids, "sampled_token_ids");
  step.input_positions =
      tensors.written_values<std::int64_t>(given.input_positions, "input_positions");
  step.seq_lens = tensors.written_values<std::int32_t>(given.seq_lens, "seq_lens");
  step.slot_mapping = tensors.written_values<std::int64_t>(given.slot_mapping, "slot_mapping");
  if (nb::isinstance<Buffer>(given.block_tables)) {
    step.block_tables = nb::cast<const Buffer&>(given.block_tables);
    if (!given.block_table_stride) throw_invalid("block_table_stride: none, legal: a Buffer's row");
    step.block_table_stride = *given.block_table_stride;
  } else {
    const auto table = numbers<std::int32_t, 2>(given.block_tables, "block_tables");
    const auto columns = static_cast<std::int64_t>(table.shape(1));
    if (given.block_table_stride.value_or(columns) != columns) {
      throw_invalid("block_table_stride: " + std::to_string(*given.block_table_stride) +
                    ", legal: the array's columns, " + std::to_string(columns));
    }
    step.block_tables = tensors.array_values(HostArray(table), "block_tables");
    step.block_table_stride = columns;
  }
  step.metadata = given.metadata;
  return step;
}

Event advance(const Context& context, const Queue& queue, const Advance& given, Errors& errors) {
  CallTensors tensors(context, queue);
  const AdvanceStep step = step_of(given, tensors);
  return tensors.run(
      [&](Event* event) { advance_step_flashattn(context, queue, step, errors.errors, event); });
}

constexpr const char* kAdvanceDoc =
    "Makes the sampled tokens the next step's input without the host: per row the token, one more\n"
    "seq_len, its position and slot. input_tokens, input_positions and slot_mapping int64\n"
    "[num_seqs] and seq_lens int32 [num_seqs] are written: Buffers, or arrays of just that type.\n"
    "sampled_token_ids int64 [num_queries], block_tables int32 [num_seqs, pages]. metadata: of "
    "the\n"
    "next step, updated with it. Rows that are wrong become padding and are noted in errors.";

void bind_advance(nb::module_& module) {
  module.def(
      "advance_step_flashattn",
      [](const Context& context, const Queue& queue, Errors& errors, std::int32_t num_seqs,
         std::int32_t num_queries, std::int32_t block_size, std::int64_t num_blocks,
         nb::handle input_tokens, nb::handle sampled_token_ids, nb::handle input_positions,
         nb::handle seq_lens, nb::handle slot_mapping, nb::handle block_tables,
         std::optional<std::int64_t> block_table_stride, const AttentionMetadata* metadata) {
        return advance(
            context, queue,
            {num_seqs, num_queries, block_size, num_blocks, input_tokens, sampled_token_ids,
             input_positions, seq_lens, slot_mapping, block_tables, block_table_stride, metadata},
            errors);
      },
      "context"_a, "queue"_a, "errors"_a, nb::kw_only(), "num_seqs"_a, "num_queries"_a,
      "block_size"_a, "num_blocks"_a, "input_tokens"_a, "sampled_token_ids"_a, "input_positions"_a,
      "seq_lens"_a, "slot_mapping"_a, "block_tables"_a, "block_table_stride"_a = nb::none(),
      "metadata"_a = nb::none(), kAdvanceDoc);
  module.def(
      "advance_step_flashinfer",
      [](const Context& context, const Queue& queue, Errors& errors, std::int32_t num_seqs,
         std::int32_t num_queries, std::int32_t block_size, std::int64_t num_blocks,
         nb::handle input_tokens, nb::handle sampled_token_ids, nb::handle input_positions,
         nb::handle seq_lens, nb::handle slot_mapping, nb::handle block_tables,
         nb::handle paged_kv_indices, nb::handle paged_kv_indptr, nb::handle paged_kv_last_page_len,
         nb::handle block_table_bound, std::optional<std::int64_t> block_table_stride,
         const AttentionMetadata* metadata) {
        CallTensors tensors(context, queue);
        const AdvanceStep step = step_of(
            {num_seqs, num_queries, block_size, num_blocks, input_tokens, sampled_token_ids,
             input_positions, seq_lens, slot_mapping, block_tables, block_table_stride, metadata},
            tensors);
        using Int = std::int32_t;
        const AdvanceStepPages pages{
            tensors.written_values<Int>(paged_kv_indices, "paged_kv_indices"),
            tensors.written_values<Int>(paged_kv_indptr, "paged_kv_indptr"),
            tensors.written_values<Int>(paged_kv_last_page_len, "paged_kv_last_page_len"),
            tensors.written_values<Int>(block_table_bound, "block_table_bound")};
        return tensors.run([&](Event* event) {
          advance_step_flashinfer(context, queue, step, pages, errors.errors, event);
        });
      },
      "context"_a, "queue"_a, "errors"_a, nb::kw_only(), "num_seqs"_a, "num_queries"_a,
      "block_size"_a, "num_blocks"_a, "input_tokens"_a, "sampled_token_ids"_a, "input_positions"_a,
      "seq_lens"_a, "slot_mapping"_a, "block_tables"_a, "paged_kv_indices"_a, "paged_kv_indptr"_a,
      "paged_kv_last_page_len"_a, "block_table_bound"_a, "block_table_stride"_a = nb::none(),
      "metadata"_a = nb::none(),
      "advance_step_flashattn(), and the page lists with it, int32: paged_kv_indices,\n"
      "paged_kv_indptr [num_seqs + 1], paged_kv_last_page_len and block_table_bound [num_seqs].");
}

}  // namespace

void bind_device_steps(nb::module_& module) {
  nb::class_<Errors>(module, "DeviceErrors", "Errors that kernels find in metadata on the device.")
      .def(nb::init<std::shared_ptr<Context>, const Queue&>(), "context"_a, "queue"_a)
      .def(
          "check",
          [](Errors& self, const Queue& queue) { without_gil([&] { self.errors.check(queue); }); },
          "queue"_a,
          "Waits; raises InvalidArgument for the lowest row found wrong since the last call.");
  module.def(
      "update_seq_lens",
      [](const Queue& queue, const AttentionMetadata& metadata, nb::handle seq_lens, Errors& errors,
         nb::handle slot_mapping) {
        CallTensors tensors(*errors.context, queue);
        const DeviceLengths lengths{tensors.values<std::int32_t>(seq_lens, "seq_lens"),
                                    tensors.values<std::int64_t>(slot_mapping, "slot_mapping")};
        return tensors.run(
            [&](Event* event) { update_seq_lens(queue, metadata, lengths, errors.errors, event); });
      },
      "queue"_a, "metadata"_a, "seq_lens"_a, "errors"_a, nb::kw_only(),
      "slot_mapping"_a = nb::none(),
      "Gives a step of a builder with device_seq_lens its lengths int32 [num_reqs], and slots\n"
      "int64 [num_actual_tokens]; None: those of the last positions.");
  module.def(
      "update_query_lens",
      [](const Queue& queue, const AttentionMetadata& metadata, nb::handle query_start_loc,
         nb::handle seq_lens, Errors& errors, nb::handle slot_mapping) {
        CallTensors tensors(*errors.context, queue);
        const DeviceQueryLengths lengths{
            tensors.values<std::int32_t>(query_start_loc, "query_start_loc"),
            tensors.values<std::int32_t>(seq_lens, "seq_lens"),
            tensors.values<std::int64_t>(slot_mapping, "slot_mapping")};
        return tensors.run([&](Event* event) {
          update_query_lens(queue, metadata, lengths, errors.errors, event);
        });
      },
      "queue"_a, "metadata"_a, "query_start_loc"_a, "seq_lens"_a, "errors"_a, nb::kw_only(),
      "slot_mapping"_a = nb::none(),
      "Gives a step of a builder with device_query_lens its rows int32 [num_reqs + 1] and lengths\n"
      "int32 [num_reqs]; slots as for update_seq_lens().");
  module.def(
      "update_lists",
      [](const Queue& queue, const AttentionMetadata& metadata, Errors& errors,
         nb::handle direction, nb::handle tree_sizes, nb::handle tree_bits,
         std::int64_t tree_bits_stride) {
        CallTensors tensors(*errors.context, queue);
        const DeviceLists lists{
            .direction = tensors.values<std::uint8_t>(direction, "direction"),
            .tree_sizes = tensors.values<std::int32_t>(tree_sizes, "tree_sizes"),
            .tree_bits = tensors.values<std::uint32_t>(tree_bits, "tree_bits"),
            .tree_bits_stride = tree_bits_stride};
        return tensors.run(
            [&](Event* event) { update_lists(queue, metadata, lists, errors.errors, event); });
      },
      "queue"_a, "metadata"_a, "errors"_a, nb::kw_only(), "direction"_a = nb::none(),
      "tree_sizes"_a = nb::none(), "tree_bits"_a = nb::none(), "tree_bits_stride"_a = 0,
      "Gives a step of a builder with device_directions the direction of each request, uint8\n"
      "[num_reqs] (0 = both ways, 1 = causal, 2 = a canvas); of one with device_trees how many\n"
      "nodes its tree has, int32 [num_reqs] (0 = none), and which nodes each query token sees,\n"
      "uint32 words of a flat [num_actual_tokens * tree_bits_stride], lowest bit first.");
  bind_advance(module);
}

}  // namespace clattn::python
