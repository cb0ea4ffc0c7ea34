#include "backends/plugin_adapter.hpp"

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "metadata/page_list.hpp"

namespace clattn::detail {

PluginMetadataBuilder::PluginMetadataBuilder(std::shared_ptr<const AttentionBackend> backend,
                                             std::shared_ptr<Context> context,
                                             const AttentionConfig& config,
                                             const BuilderOptions& options)
    : backend_(std::move(backend)),
      context_(std::move(context)),
      limits_(options.limits),
      decode_threshold_(options.decode_threshold),
      staging_(context_->runtime()) {
  validate_limits(limits_);
  throw_unsupported_if(options.graph_batch_size > 0,
                       "backend {}: graph_batch_size is {}, legal: 0: plugins cannot be recorded",
                       backend_->name(), options.graph_batch_size);
  throw_unsupported_if(
      options.device_seq_lens,
      "backend {}: device_seq_lens: true, legal: false: plugins plan by the host's "
      "lengths",
      backend_->name());
  throw_unsupported_if(
      options.split_policy != SplitPolicy::kBalanced || options.num_splits != 0,
      "backend {}: split_policy and num_splits, legal: balanced and 0: plugins cut "
      "their work themselves",
      backend_->name());
  throw_invalid_if(options.decode_threshold < 1, "decode_threshold is {}, legal: >= 1",
                   options.decode_threshold);
  metadata_.backend_ = backend_->name();
  metadata_.block_size_ = config.block_size;
}

BatchSummary PluginMetadataBuilder::check(const CommonAttentionMetadata& batch) const {
  const BatchSummary summary = validate_lengths(batch, metadata_.block_size_);
  validate_limits(batch, summary, limits_);
  validate_page_ids(batch, metadata_.block_size_, limits_.num_blocks);
  validate_slots(batch, metadata_.block_size_, limits_.num_blocks);
  return summary;
}

/// Bytes of the largest step within the limits, block tables up to a million entries.
std::size_t PluginMetadataBuilder::largest_step_bytes() const {
  constexpr std::int64_t kPages = std::int64_t{1} << 20;
  const std::int64_t reqs = limits_.max_num_reqs;
  const std::int64_t pages = reqs * page_count(limits_.max_model_len, metadata_.block_size_);
  const std::int64_t ints = 2 * reqs + 1 + std::min(pages, kPages);
  return to_size(limits_.max_num_batched_tokens) * sizeof(std::int64_t) +
         to_size(ints) * sizeof(std::int32_t);
}

void PluginMetadataBuilder::copy_table(const CommonAttentionMetadata& batch,
                                       std::span<std::int32_t> table) const {
  const auto width = to_size(metadata_.batch_.block_table_stride);
  std::ranges::fill(table, 0);
  for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
    const std::int32_t pages = page_count(batch.seq_lens[r], metadata_.block_size_);
    std::copy_n(table_row(batch, r), pages, table.data() + r * width);
  }
}

void PluginMetadataBuilder::copy_slots(const CommonAttentionMetadata& batch,
                                       std::span<std::int64_t> slots) const {
  if (!batch.slot_mapping.empty()) {
    std::copy_n(batch.slot_mapping.begin(), slots.size(), slots.begin());
  } else {
    write_slot_mapping(batch, metadata_.block_size_, slots);
  }
}

void PluginMetadataBuilder::copy_arrays(const CommonAttentionMetadata& batch,
                                        std::span<std::byte> bytes) {
  ClattnBatch& step = metadata_.batch_;
  const auto reqs = to_size(batch.num_reqs);
  const auto tokens = to_size(batch.num_actual_tokens);
  const auto slots = part<std::int64_t>(bytes, step.slot_mapping_bytes, tokens);
  copy_slots(batch, slots);
  const auto starts = part<std::int32_t>(bytes, step.query_start_loc_bytes, reqs + 1);
  std::copy_n(batch.query_start_loc.begin(), reqs + 1, starts.begin());
  const auto lens = part<std::int32_t>(bytes, step.seq_lens_bytes, reqs);
  std::copy_n(batch.seq_lens.begin(), reqs, lens.begin());
  const auto table =
      part<std::int32_t>(bytes, step.block_table_bytes, reqs * to_size(step.block_table_stride));
  copy_table(batch, table);
  step.slot_mapping = slots.data();
  step.query_start_loc = starts.data();
  step.seq_lens = lens.data();
  step.block_table = table.data();
  metadata_.slots_ = slots;
  metadata_.block_ids_ = {limits_.num_blocks, table};
}

const AttentionMetadata& PluginMetadataBuilder::build(cl_command_queue queue,
                                                      const CommonAttentionMetadata& batch,
                                                      Event* upload, const BuildOptions& options) {
  ClattnBatch& step = metadata_.batch_;
  step = {};  // a refused batch leaves no metadata to run by
  const BatchSummary summary = check(batch);
  validate_common_prefix(batch, metadata_.block_size_, options.common_prefix_len);
  metadata_.common_prefix_len_ = options.common_prefix_len;
  const StepSplit split = split_step(batch, decode_threshold_, KeySource::kOwnPages);
  metadata_.split_ = split.counts;
  metadata_.decodes_at_ = split.decodes_at;
  metadata_.prefills_at_ = split.prefills_at;
  ClattnBatch next{};
  next.struct_size = sizeof(ClattnBatch);
  next.num_reqs = batch.num_reqs;
  next.num_actual_tokens = metadata_.num_actual_tokens_ = batch.num_actual_tokens;
  next.num_decodes = split.decodes_at == 0 ? split.counts.num_decodes : 0;
  next.max_query_len = metadata_.max_query_len_ = summary.max_query_len;
  next.max_seq_len = metadata_.max_seq_len_ = summary.max_seq_len;
  next.causal = batch.is_causal() ? 1 : 0;
  next.block_table_stride = page_count(summary.max_seq_len, metadata_.block_size_);

  const auto reqs = to_size(batch.num_reqs);
  std::size_t total = to_size(batch.num_actual_tokens) * sizeof(std::int64_t);
  const auto take = [&](std::size_t count) {
    const std::size_t at = total;
    total = checked_add(total, checked_mul(count, sizeof(std::int32_t), "batch"), "batch");
    return at;
  };
  next.query_start_loc_bytes = take(reqs + 1);
  next.seq_lens_bytes = take(reqs);
  next.block_table_bytes = take(reqs * to_size(next.block_table_stride));
  if (staging_.buffer().size_bytes() == 0) staging_.host(queue, largest_step_bytes());
  const std::span<std::byte> bytes = staging_.host(queue, total);
  // Until the batch is on the device, it has no size: no call takes it.
  const auto size = std::exchange(next.struct_size, 0);
  step = next;
  copy_arrays(batch, bytes);
  staging_.upload(queue, total, upload);
  step.device = staging_.buffer().handle();
  step.struct_size = size;
  metadata_.slot_buffer_ = step.device;
  metadata_.slot_offset_bytes_ = step.slot_mapping_bytes;
  return metadata_;
}

}  // namespace clattn::detail
