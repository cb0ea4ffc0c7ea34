#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "backends/plugin_adapter.hpp"
#include "base/checked.hpp"
#include "base/one_thread.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "metadata/page_list.hpp"
#include "metadata/plan/planner.hpp"
#include "metadata/validate.hpp"
#include "opencl/staging.hpp"

namespace clattn::detail {

/// Checks a batch and gives plugins its arrays on the host and, by one upload, on the device.
class PluginMetadataBuilder final : public AttentionMetadataBuilder {
 public:
  PluginMetadataBuilder(std::shared_ptr<const AttentionBackend> backend,
                        std::shared_ptr<Context> context, const AttentionConfig& config,
                        const BuilderOptions& options)
      : backend_(std::move(backend)),
        context_(std::move(context)),
        limits_(options.limits),
        decode_threshold_(options.decode_threshold),
        block_size_(config.block_size),
        sight_(sight_under(config)),
        staging_(context_->runtime()) {
    validate_limits(limits_);
    const auto refuse_if = [&](bool given, std::string_view what) {
      throw_unsupported_if(given, "backend {}: {}", backend_->name(), what);
    };
    refuse_if(options.graph_batch_size > 0,
              fmt::format("graph_batch_size is {}, legal: 0: plugins cannot be recorded",
                          options.graph_batch_size));
    refuse_if(options.graph_mixed, "graph_mixed: true, legal: false: plugins cannot be recorded");
    refuse_if(options.device_seq_lens,
              "device_seq_lens: true, legal: false: plugins plan by the host's lengths");
    refuse_if(options.device_query_lens,
              "device_query_lens: true, legal: false: plugins plan by the host's lengths");
    refuse_if(options.device_directions || options.device_trees,
              "device_directions or device_trees: true, legal: false: plugins take no lists");
    refuse_if(options.split_policy != SplitPolicy::kBalanced || options.num_splits != 0,
              "split_policy and num_splits, legal: balanced and 0: plugins cut their work "
              "themselves");
    throw_invalid_if(options.decode_threshold < 1, "decode_threshold is {}, legal: >= 1",
                     options.decode_threshold);
    metadata_.backend_ = backend_->name();
    metadata_.block_size = block_size_;
  }

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& given,
                                 Event* upload, const BuildOptions& options) override {
    const OneThread call(busy_, "build");
    ClattnBatch& step = metadata_.batch;
    step = {};  // until the batch is on the device, it has no size: no call takes it
    const BatchSummary summary = check(given);
    const CommonAttentionMetadata batch = without_padding(given);
    validate_common_prefix(batch, block_size_, options.common_prefix_len);
    metadata_.common_prefix_len_ = options.common_prefix_len;
    const StepSplit split = split_step(batch, decode_threshold_, KeySource::kOwnPages);
    metadata_.split_ = split.counts;
    metadata_.decodes_at_ = split.decodes_at;
    metadata_.prefills_at_ = split.prefills_at;
    step.num_reqs = batch.num_reqs;
    step.num_actual_tokens = metadata_.num_actual_tokens_ = batch.num_actual_tokens;
    step.num_decodes = split.decodes_at == 0 ? split.counts.num_decodes : 0;
    step.max_query_len = metadata_.max_query_len_ = summary.max_query_len;
    step.max_seq_len = metadata_.max_seq_len_ = summary.max_seq_len;
    step.causal = batch.is_causal() ? 1 : 0;
    step.block_table_stride = page_count(summary.max_seq_len, block_size_);

    const auto reqs = to_size(batch.num_reqs);
    std::size_t total = to_size(batch.num_actual_tokens) * sizeof(std::int64_t);
    const auto take = [&](std::size_t count) {
      const std::size_t at = total;
      total = checked_add(total, checked_mul(count, sizeof(std::int32_t), "batch"), "batch");
      return at;
    };
    step.query_start_loc_bytes = take(reqs + 1);
    step.seq_lens_bytes = take(reqs);
    step.block_table_bytes = take(reqs * to_size(step.block_table_stride));
    if (staging_.buffer().size_bytes() == 0) staging_.host(queue, largest_step_bytes());
    copy_arrays(batch, staging_.host(queue, total));
    staging_.upload(queue, total, upload);
    step.device = metadata_.slot_buffer_ = staging_.buffer().handle();
    metadata_.slot_offset_bytes_ = step.slot_mapping_bytes;
    step.struct_size = sizeof(ClattnBatch);
    return metadata_;
  }

  /// Plugins bring their own workspace.
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const override {
    check(batch);
    return 0;
  }
  /// Plugins enqueue by themselves, which cannot be recorded.
  bool can_run_in_graph(const CommonAttentionMetadata&) const override { return false; }
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const override {
    return reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, decode_threshold_,
                                                       order);
  }
  std::int32_t decode_threshold() const noexcept override { return decode_threshold_; }

 private:
  static ClaSight sight_under(const AttentionConfig& config) {
    PlannerConfig planner;
    planner.block_size = config.block_size;
    planner.window = window_of(config);
    return sight_of(planner, false);
  }

  /// The pages of a request that its queries see.
  struct SeenPages {
    std::size_t first, count;
  };
  SeenPages seen_pages(const CommonAttentionMetadata& batch, std::size_t request) const {
    const std::int32_t seq_len = batch.seq_lens[request];
    const std::size_t first = unseen_pages(sight_, query_len_of(batch, request), seq_len);
    return {first, to_size(page_count(seq_len, block_size_)) - first};
  }

  BatchSummary check(const CommonAttentionMetadata& batch) const {
    const BatchSummary summary = validate_lengths(batch, block_size_);
    validate_limits(batch, summary, limits_);
    check_lists(batch, {});
    for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
      const auto [first, count] = seen_pages(batch, r);
      if (!pages_in_range(table_row(batch, r) + first, count, last_block_id(limits_.num_blocks)))
        throw_bad_page_id(batch, block_size_, limits_.num_blocks, r, first);
    }
    validate_slots(batch, block_size_, limits_.num_blocks);
    return summary;
  }

  /// Bytes of the largest step within the limits, block tables up to a million entries.
  std::size_t largest_step_bytes() const {
    constexpr std::int64_t kPages = std::int64_t{1} << 20;
    const std::int64_t reqs = limits_.max_num_reqs;
    const std::int64_t pages = reqs * page_count(limits_.max_model_len, block_size_);
    const std::int64_t ints = 2 * reqs + 1 + std::min(pages, kPages);
    return to_size(limits_.max_num_batched_tokens) * sizeof(std::int64_t) +
           to_size(ints) * sizeof(std::int32_t);
  }

  void copy_arrays(const CommonAttentionMetadata& batch, std::span<std::byte> bytes) {
    ClattnBatch& step = metadata_.batch;
    const auto reqs = to_size(batch.num_reqs), width = to_size(step.block_table_stride);
    const auto slots = part<std::int64_t>(bytes, step.slot_mapping_bytes, batch.num_actual_tokens);
    if (batch.slot_mapping.empty()) {
      write_slot_mapping(batch, block_size_, slots);
    } else {
      std::copy_n(batch.slot_mapping.begin(), slots.size(), slots.begin());
    }
    const auto starts = part<std::int32_t>(bytes, step.query_start_loc_bytes, reqs + 1);
    std::copy_n(batch.query_start_loc.begin(), starts.size(), starts.begin());
    const auto lens = part<std::int32_t>(bytes, step.seq_lens_bytes, reqs);
    std::copy_n(batch.seq_lens.begin(), lens.size(), lens.begin());
    const auto table = part<std::int32_t>(bytes, step.block_table_bytes, reqs * width);
    std::ranges::fill(table, 0);
    for (std::size_t r = 0; r < reqs; ++r) {
      const auto [first, count] = seen_pages(batch, r);
      std::copy_n(table_row(batch, r) + first, count, table.data() + r * width + first);
    }
    step.slot_mapping = slots.data();
    step.query_start_loc = starts.data();
    step.seq_lens = lens.data();
    step.block_table = table.data();
    metadata_.slots_ = slots;
    metadata_.block_ids = {limits_.num_blocks, table};
  }

  std::shared_ptr<const AttentionBackend> backend_;  ///< keeps the plugin loaded
  std::shared_ptr<Context> context_;
  BatchLimits limits_;
  std::int32_t decode_threshold_, block_size_;
  ClaSight sight_;
  StagedUpload staging_;
  PluginMetadata metadata_;
  std::atomic<bool> busy_ = false;
};

std::unique_ptr<AttentionMetadataBuilder> make_plugin_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options) {
  return std::make_unique<PluginMetadataBuilder>(std::move(backend), std::move(context), config,
                                                 options);
}

}  // namespace clattn::detail
