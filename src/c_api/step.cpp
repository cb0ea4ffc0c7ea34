#include <cstdint>
#include <limits>
#include <span>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

namespace {

template <typename T>
T given_or(T value, T otherwise) {
  return value == 0 ? otherwise : value;
}

/// An array of the batch; empty where it may be left out and is.
template <typename T>
std::span<const T> array(const T* values, std::int64_t count, const char* name) {
  detail::throw_invalid_if(count < 0, "{}: {} elements, legal: >= 0", name, count);
  if (values == nullptr) return {};
  return {values, static_cast<std::size_t>(count)};
}

}  // namespace

BuilderOptions clattn::c_api::builder_options_of(const ClattnStepOptions* given_options) {
  const BatchLimits limits;
  BuilderOptions options;
  if (given_options == nullptr) return options;
  const ClattnStepOptions& given = read(given_options, "options");
  options.limits = {.max_num_reqs = given_or(given.max_num_reqs, limits.max_num_reqs),
                    .max_num_batched_tokens =
                        given_or(given.max_num_batched_tokens, limits.max_num_batched_tokens),
                    .max_model_len = given_or(given.max_model_len, limits.max_model_len),
                    .num_blocks = given_or(given.num_blocks, limits.num_blocks)};
  options.decode_threshold = given_or(given.decode_threshold, options.decode_threshold);
  options.num_splits = given.num_splits;
  if (given.deterministic != 0) options.split_policy = SplitPolicy::kDeterministic;
  detail::throw_invalid_if(given.side_by_side < -1 || given.side_by_side > 1,
                           "options: side_by_side is {}, legal: -1, 0, 1", given.side_by_side);
  options.side_by_side = given.side_by_side != -1;
  return options;
}

CommonAttentionMetadata clattn::c_api::batch_of(const ClattnBatchInfo& given) {
  constexpr std::int64_t kMostColumns = std::numeric_limits<std::int32_t>::max();
  const std::int64_t rows = given.num_reqs;
  detail::throw_invalid_if(rows < 0, "batch: num_reqs is {}, legal: >= 0", rows);
  detail::throw_invalid_if(given.block_table_stride < 0 || given.block_table_stride > kMostColumns,
                           "batch: block_table_stride is {}, legal: 0 to {}",
                           given.block_table_stride, kMostColumns);
  deref(given.query_start_loc, "batch: query_start_loc");
  deref(given.seq_lens, "batch: seq_lens");
  CommonAttentionMetadata batch;
  batch.query_start_loc = array(given.query_start_loc, rows + 1, "batch: query_start_loc");
  batch.seq_lens = array(given.seq_lens, rows, "batch: seq_lens");
  batch.num_reqs = given.num_reqs;
  batch.num_actual_tokens = batch.query_start_loc.back();
  batch.block_table =
      array(given.block_table, rows * given.block_table_stride, "batch: block_table");
  batch.block_table_stride = given.block_table_stride;
  batch.slot_mapping = array(given.slot_mapping, given.num_slots, "batch: slot_mapping");
  batch.key_start_loc = array(given.key_start_loc, rows + 1, "batch: key_start_loc");
  if (given.causal != 0) batch.causal = given.causal > 0;
  return batch;
}

ClattnResult clattn_step_create(const ClattnLayer* layer, const ClattnStepOptions* options,
                                ClattnStep** step) {
  return make_handle(step, "step", [&] {
    const ClattnLayer& of = deref(layer, "layer");
    return ClattnStep{of.context,
                      of.layer.get_attn_backend()->make_builder(of.context, of.layer.config(),
                                                                builder_options_of(options)),
                      nullptr};
  });
}

void clattn_step_destroy(ClattnStep* step) {
  delete step;
}

ClattnResult clattn_step_build(ClattnStep* step, const ClattnQueue* queue,
                               const ClattnBatchInfo* batch) {
  return guarded([&] {
    ClattnStep& of = deref(step, "step");
    const Queue& on = deref(queue, "queue").queue;
    const ClattnBatchInfo& given = read(batch, "batch");
    const CommonAttentionMetadata next = batch_of(given);
    of.metadata = nullptr;  // a build that fails leaves none
    of.metadata =
        &of.builder->build(on, next, nullptr, {.common_prefix_len = given.common_prefix_len});
  });
}

ClattnResult clattn_step_info(const ClattnStep* step, ClattnStepInfo* info) {
  return guarded([&] {
    const AttentionMetadata& metadata = metadata_of(step);
    const BatchSplit& split = metadata.split();
    fill(info,
         {.struct_size = 0,
          .num_actual_tokens = metadata.num_actual_tokens(),
          .num_decodes = split.num_decodes,
          .num_prefills = split.num_prefills,
          .num_decode_tokens = split.num_decode_tokens,
          .num_prefill_tokens = split.num_prefill_tokens,
          .max_query_len = metadata.max_query_len(),
          .max_seq_len = metadata.max_seq_len()},
         "info");
  });
}
