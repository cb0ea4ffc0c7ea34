#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

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
    refuse_if(
        options.device_directions || options.device_trees,
        "device_directions or device_trees: true, legal: false: plugins take the host's lists");
    refuse_if(options.split_policy != SplitPolicy::kBalanced || options.num_splits != 0,
              "split_policy and num_splits, legal: balanced and 0: plugins cut their work "
              "themselves");
    throw_invalid_if(options.decode_threshold < 1, "decode_threshold is {}, legal: >= 1",
                     options.decode_threshold);
    metadata_.backend_ = backend_->name();
    planner_.block_size = metadata_.block_size = block_size_;
    planner_.window = metadata_.window = window_of(config);
    planner_.lists = metadata_.lists = lists_of(config);
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
    if (planner_.lists.any()) {
      const auto tokens = to_size(batch.num_actual_tokens);
      step.tree_words = tree_words(batch);
      step.seen_keys_bytes = take(tokens * kSeenKeysInts);
      step.tree_bits_bytes = take(tokens * to_size(step.tree_words));
    }
    if (staging_.buffer().size_bytes() == 0) staging_.host(queue, largest_step_bytes());
    const std::span<std::byte> bytes = staging_.host(queue, total);
    copy_arrays(batch, bytes);
    if (planner_.lists.any()) list_seen_keys(batch, bytes);
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
  static constexpr std::size_t kSeenKeysInts = sizeof(ClattnSeenKeys) / sizeof(std::int32_t);

  /// The pages of a request that its queries see: first one and one past the last, twice.
  using SeenPages = std::array<std::pair<std::size_t, std::size_t>, 2>;
  SeenPages seen_pages(const CommonAttentionMetadata& batch, std::size_t request) const {
    const auto count = to_size(page_count(batch.seq_lens[request], block_size_));
    UnseenPages unseen = unseen_pages(planner_, batch, static_cast<std::int32_t>(request));
    if (unseen.gap_begin >= unseen.gap_end) unseen.gap_begin = unseen.gap_end = count;
    return {{{unseen.first, unseen.gap_begin}, {unseen.gap_end, count}}};
  }

  BatchSummary check(const CommonAttentionMetadata& batch) const {
    const BatchSummary summary = validate_lengths(batch, block_size_);
    validate_limits(batch, summary, limits_);
    check_lists(batch, planner_.lists);
    throw_invalid_if(batch.causal.has_value() && !batch.direction.empty(),
                     "causal is {}, legal with a direction for each request: none",
                     batch.causal.value_or(true));
    const std::int32_t last_id = last_block_id(limits_.num_blocks);
    for (std::size_t r = 0; r < to_size(batch.num_reqs); ++r) {
      for (const auto& [first, end] : seen_pages(batch, r))
        if (!pages_in_range(table_row(batch, r) + first, end - first, last_id))
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
    const std::size_t of_token =
        sizeof(std::int64_t) + (planner_.lists.any() ? sizeof(ClattnSeenKeys) : 0);
    return to_size(limits_.max_num_batched_tokens) * of_token +
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
      for (const auto& [first, end] : seen_pages(batch, r))
        std::copy_n(table_row(batch, r) + first, end - first, table.data() + r * width + first);
    }
    step.slot_mapping = slots.data();
    step.query_start_loc = starts.data();
    step.seq_lens = lens.data();
    step.block_table = table.data();
    metadata_.slots_ = slots;
    metadata_.block_ids = {limits_.num_blocks, table};
    for_each_list([](auto& kept, const auto& list) { kept.assign(list.begin(), list.end()); },
                  metadata_.kept, batch);
  }

  /// Of the largest tree.
  std::int64_t tree_words(const CommonAttentionMetadata& batch) const {
    std::int32_t most = 0;
    for (std::int32_t r = 0; r < batch.num_reqs; ++r)
      most = std::max(most, rows_of(planner_.lists, batch, r).tree.size());
    return gap_row_ints(most) - kGapRowInts;
  }

  void list_seen_keys(const CommonAttentionMetadata& batch, std::span<std::byte> bytes) {
    ClattnBatch& step = metadata_.batch;
    const auto words = to_size(step.tree_words), ints = to_size(kGapRowInts) + words;
    const auto tokens = to_size(batch.num_actual_tokens);
    const auto seen_keys = part<ClattnSeenKeys>(bytes, step.seen_keys_bytes, tokens);
    const auto bits = part<std::uint32_t>(bytes, step.tree_bits_bytes, tokens * words);
    std::ranges::fill(bits, 0U);
    step.seen_keys = seen_keys.data();
    if (words > 0) step.tree_bits = bits.data();
    std::size_t token = 0;
    for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
      const RequestRows rows = rows_of(planner_.lists, batch, r);
      if (rows.query_len == 0) continue;
      listed_.resize(to_size(rows.query_len) + 1);
      gap_rows_.resize(to_size(rows.query_len) * ints);
      list_rows(planner_, rows, rows.first_new(),
                {listed_, gap_rows_, 0, static_cast<std::int32_t>(ints)});
      for (std::size_t i = 0; i + 1 < listed_.size(); ++i, ++token) {
        const ClaListedRow& row = listed_[i + 1];
        ClattnSeenKeys& seen = seen_keys[token];
        seen = {row.position, rows.first_key, rows.first_key, row.begin, row.end, rows.seq_len};
        if (!rows.has_gaps()) continue;
        const std::int32_t* const gap_row = gap_rows_.data() + i * ints;
        ClaGapRow gaps{};
        std::memcpy(&gaps, gap_row, sizeof(gaps));
        seen.kept_end = std::max(gaps.kept_end, rows.first_key);
        seen.begin = gaps.context_begin;
        seen.tree_begin = gaps.tree_begin;
        std::copy_n(gap_row + kGapRowInts, words, bits.data() + token * words);
      }
    }
  }

  std::shared_ptr<const AttentionBackend> backend_;  ///< keeps the plugin loaded
  std::shared_ptr<Context> context_;
  BatchLimits limits_;
  std::int32_t decode_threshold_, block_size_;
  PlannerConfig planner_;  ///< what queries see
  std::vector<ClaListedRow> listed_;
  std::vector<std::int32_t> gap_rows_;
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
