#include <fmt/format.h>

#include <clattn/explain.hpp>
#include <limits>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

CLATTN_DESTROYS(clattn_step_destroy, ClattnStep)
CLATTN_DESTROYS(clattn_workspace_destroy, ClattnWorkspace)

namespace {

/// An array of the batch; empty where it may be left out and is.
template <typename T>
std::span<const T> array(const T* values, std::int64_t count, const char* name) {
  detail::throw_invalid_if(count < 0, "{}: {} elements, legal: >= 0", name, count);
  if (values == nullptr) return {};
  return {values, static_cast<std::size_t>(count)};
}

void check_stride(std::int64_t columns, const char* name) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  detail::throw_invalid_if(columns < 0 || columns > kMost,
                           "{}: block_table_stride is {}, legal: 0 to {}", name, columns, kMost);
}

}  // namespace

AttentionMetadataBuilder& clattn::c_api::builder_of(const ClattnStep* step) {
  const auto& builder = deref(step, "step").builder;
  detail::throw_invalid_if(builder == nullptr,
                           "step: it is a state's, a group's or a cascade's, legal: one that "
                           "clattn_step_create() made");
  return *builder;
}

BuilderOptions clattn::c_api::builder_options_of(const ClattnStepOptions* given_options) {
  BuilderOptions options;
  if (given_options == nullptr) return options;
  const ClattnStepOptions& given = read(given_options, "options");
  take(given.max_num_reqs, options.limits.max_num_reqs);
  take(given.max_num_batched_tokens, options.limits.max_num_batched_tokens);
  take(given.max_model_len, options.limits.max_model_len);
  take(given.num_blocks, options.limits.num_blocks);
  take(given.decode_threshold, options.decode_threshold);
  options.num_splits = given.num_splits;
  if (given.deterministic != 0) options.split_policy = SplitPolicy::kDeterministic;
  detail::throw_invalid_if(given.side_by_side < -1 || given.side_by_side > 1,
                           "options: side_by_side is {}, legal: -1, 0, 1", given.side_by_side);
  options.side_by_side = given.side_by_side != -1;
  options.device_seq_lens = given.device_seq_lens != 0;
  options.device_query_lens = given.device_query_lens != 0;
  options.device_directions = given.device_directions != 0;
  options.device_trees = given.device_trees != 0;
  options.graph_mixed = given.graph_mixed != 0;
  options.disable_cascade_attn = given.disable_cascade_attn != 0;
  if (given.workspace != nullptr) options.workspace = given.workspace->held;
  return options;
}

CommonAttentionMetadata clattn::c_api::batch_of(const ClattnBatchInfo& given) {
  const std::int64_t rows = given.num_reqs;
  detail::throw_invalid_if(rows < 0, "batch: num_reqs is {}, legal: >= 0", rows);
  check_stride(given.block_table_stride, "batch");
  deref(given.query_start_loc, "batch: query_start_loc");
  deref(given.seq_lens, "batch: seq_lens");
  CommonAttentionMetadata batch;
  batch.query_start_loc = array(given.query_start_loc, rows + 1, "batch: query_start_loc");
  batch.seq_lens = array(given.seq_lens, rows, "batch: seq_lens");
  batch.num_reqs = given.num_reqs;
  batch.num_actual_tokens = batch.query_start_loc.back();
  take(given.num_actual_tokens, batch.num_actual_tokens);
  batch.block_table =
      array(given.block_table, rows * given.block_table_stride, "batch: block_table");
  batch.block_table_stride = given.block_table_stride;
  batch.slot_mapping = array(given.slot_mapping, given.num_slots, "batch: slot_mapping");
  batch.num_computed_tokens = array(given.num_computed_tokens, rows, "batch: num_computed_tokens");
  batch.key_start_loc = array(given.key_start_loc, rows + 1, "batch: key_start_loc");
  if (given.causal != 0) batch.causal = given.causal > 0;
  take_lists(given, static_cast<std::size_t>(rows), "batch", batch);
  return batch;
}

CommonAttentionMetadata clattn::c_api::plain_batch_of(const ClattnBatchInfo* batch) {
  const ClattnBatchInfo& given = read(batch, "batch");
  detail::throw_invalid_if(given.common_prefix_len != 0 || given.fast_build != 0,
                           "batch: common_prefix_len is {} and fast_build {}, legal: 0 here",
                           given.common_prefix_len, given.fast_build);
  return batch_of(given);
}

GroupPages clattn::c_api::pages_of(const ClattnGroupPages& given, std::int32_t num_reqs) {
  detail::throw_invalid_if(num_reqs < 0, "num_reqs is {}, legal: >= 0", num_reqs);
  check_stride(given.block_table_stride, "pages");
  return {array(given.block_table, num_reqs * given.block_table_stride, "pages: block_table"),
          given.block_table_stride,
          array(given.slot_mapping, given.num_slots, "pages: slot_mapping")};
}

ClattnResult clattn_step_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                ClattnStep** step) {
  return make_handle(step, [&] {
    const Attention& of = held(layer);
    return ClattnStep{layer->context,
                      of.get_attn_backend()->make_builder(layer->context, of.config(),
                                                          builder_options_of(options))};
  });
}

ClattnResult clattn_step_build(ClattnStep* step, const ClattnQueue* queue,
                               const ClattnBatchInfo* batch) {
  return guarded([&] {
    AttentionMetadataBuilder& of = builder_of(step);
    const ClattnBatchInfo& given = read(batch, "batch");
    const BuildOptions options{.common_prefix_len = given.common_prefix_len,
                               .fast_build = given.fast_build != 0};
    rebuild(*step, &AttentionMetadataBuilder::build, of, held(queue), batch_of(given), nullptr,
            options);
  });
}

ClattnResult clattn_step_info(const ClattnStep* step, ClattnStepInfo* info) {
  return guarded([&] {
    const AttentionMetadata& metadata = metadata_of(step);
    const BatchSplit& split = metadata.split();
    fill(info, "info",
         {.struct_size = 0,
          .num_actual_tokens = metadata.num_actual_tokens(),
          .num_decodes = split.num_decodes,
          .num_prefills = split.num_prefills,
          .num_decode_tokens = split.num_decode_tokens,
          .num_prefill_tokens = split.num_prefill_tokens,
          .max_query_len = metadata.max_query_len(),
          .max_seq_len = metadata.max_seq_len()});
  });
}

ClattnResult clattn_step_update_block_table(ClattnStep* step, const ClattnQueue* queue,
                                            const ClattnStep* planned, int32_t num_reqs,
                                            const ClattnGroupPages* pages) {
  return guarded([&] {
    AttentionMetadataBuilder& of = builder_of(step);
    deref(planned, "planned");
    rebuild(*step, &AttentionMetadataBuilder::update_block_table, of, held(queue),
            metadata_of(planned), pages_of(deref(pages, "pages"), num_reqs), nullptr);
  });
}

ClattnResult clattn_step_workspace_bytes(const ClattnStep* step, const ClattnBatchInfo* batch,
                                         uint64_t* size_bytes) {
  return give(size_bytes, "size_bytes",
              [&] { return builder_of(step).workspace_bytes(plain_batch_of(batch)); });
}

ClattnResult clattn_step_set_workspace(ClattnStep* step, const ClattnWorkspace* workspace) {
  return guarded([&] { builder_of(step).set_workspace_buffer(held(workspace)); });
}

ClattnResult clattn_step_warm_up(ClattnStep* step, const ClattnQueue* queue) {
  return guarded([&] { builder_of(step).warm_up(held(queue)); });
}

ClattnResult clattn_step_slot_mapping(const ClattnStep* step, ClattnBuffer** slots,
                                      size_t* offset_bytes) {
  return give(slots, "slots", [&] {
    const AttentionMetadata& of = metadata_of(step);
    deref(offset_bytes, "offset_bytes") = of.slot_mapping_offset_bytes();
    cl_mem memory = of.slot_mapping_buffer();
    return memory == nullptr ? nullptr : new ClattnBuffer{{Buffer::adopt(memory)}};
  });
}

ClattnResult clattn_step_planned_launches(const ClattnStep* step, char* text, size_t capacity,
                                          size_t* size) {
  return give_text(text, capacity, size, [&] {
    std::string all;
    for (const PlannedLaunch& each : planned_launches(metadata_of(step))) {
      all += fmt::format("{}: {} items, {} tasks, {} splits of {} tiles, {:.3g} us{}\n",
                         each.kernel, each.items, each.tasks, each.splits, each.split_tiles,
                         each.predicted_us, each.beside_last ? ", beside the last" : "");
    }
    return all;
  });
}

ClattnResult clattn_workspace_create(ClattnWorkspace** workspace) {
  return make_handle(workspace, [] { return std::make_shared<AttentionWorkspace>(); });
}
