#include "backends/gathered_step.hpp"

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace clattn::detail {

RequestParts::RequestParts(const AttentionConfig& config, std::int64_t query_len,
                           std::int64_t num_keys) {
  constexpr std::string_view kWhat = "workspace";
  const std::int64_t keys =
      checked_mul(num_keys, std::int64_t{config.num_kv_heads} * config.head_size, kWhat);
  const std::int64_t scores_each = checked_mul(num_keys, std::int64_t{config.num_heads}, kWhat);
  tokens = std::clamp<std::int64_t>(kScores / std::max<std::int64_t>(scores_each, 1), 1,
                                    std::max<std::int64_t>(query_len, 1));
  const std::int64_t rows = tokens * config.num_heads * config.head_size;
  v = keys;
  q = checked_add(v, keys, kWhat);
  sums = checked_add(q, rows, kWhat);
  scores = checked_add(sums, rows, kWhat);
  end = checked_add(scores, checked_mul(tokens, scores_each, kWhat), kWhat);
}

namespace {

class GatheredBuilder final : public AttentionMetadataBuilder {
 public:
  GatheredBuilder(std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
                  AttentionConfig config, const BuilderOptions& options)
      : context_(std::move(context)),
        config_(std::move(config)),
        batches_(std::move(backend), context_, config_, checked(options)),
        limits_(options.limits) {
    metadata_.reserve(limits_.max_num_reqs);
  }

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) override {
    const AttentionMetadata& built = batches_.build(queue, batch, upload, options);
    if (const std::size_t wanted = bytes(batch); work_.size_bytes() < wanted) work_ = take(wanted);
    metadata_.refresh(built, config_, work_);
    return metadata_;
  }
  std::size_t workspace_bytes(const CommonAttentionMetadata& batch) const override {
    batches_.workspace_bytes(batch);  // checks the batch
    return bytes(batch);
  }
  bool can_run_in_graph(const CommonAttentionMetadata&) const override { return false; }
  bool reorder_batch(std::span<const std::int32_t> num_scheduled_tokens,
                     std::span<std::int32_t> order) const override {
    return batches_.reorder_batch(num_scheduled_tokens, order);
  }
  std::int32_t decode_threshold() const noexcept override { return batches_.decode_threshold(); }

 private:
  static BuilderOptions checked(BuilderOptions options) {
    const std::pair<bool, std::string_view> refused[] = {
        {options.graph_batch_size != 0, "graph_batch_size is not 0"},
        {options.num_splits < 0 || options.num_splits > 1, "num_splits is not 0 or 1"},
        {options.split_policy != SplitPolicy::kBalanced, "split_policy is not balanced"}};
    for (const auto& [given, what] : refused) {
      if (given) {
        throw_unsupported("{}: {}, which CLBlast's own launches do not follow", kGatheredName,
                          what);
      }
    }
    options.num_splits = 0;  // keys are in one piece in any case
    return options;
  }
  std::size_t bytes(const CommonAttentionMetadata& batch) const {
    std::int64_t most = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(batch.num_reqs); ++r) {
      const std::int32_t query_len = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
      if (query_len > 0)
        most = std::max(most, RequestParts(config_, query_len, batch.seq_lens[r]).end);
    }
    return static_cast<std::size_t>(most) * sizeof(float);
  }
  /// More than the step at hand wants, so that later ones find it, unless the device is too full.
  Buffer take(std::size_t wanted) const {
    const std::size_t most = context_->capabilities().max_alloc_bytes;
    const std::size_t held = work_.size_bytes();
    const std::size_t spare = std::min(held == 0 ? reserved_bytes() : held + held / 2, most);
    if (spare > wanted) {
      try {
        return context_->allocate(spare);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kOpenCL) throw;
      }
    }
    return context_->allocate(wanted);
  }
  /// What no request within the limits exceeds, as far as kMaxWorkspaceBytes reaches: the longest
  /// one's keys and scores, and every token's rows.
  std::size_t reserved_bytes() const {
    const RequestParts longest(config_, 1, limits_.max_model_len);
    const std::int64_t rows = std::int64_t{config_.num_heads} * config_.head_size * 2;
    const std::int64_t most =
        longest.end + rows * limits_.max_num_batched_tokens + RequestParts::kScores;
    return std::min(static_cast<std::size_t>(most) * sizeof(float), kMaxWorkspaceBytes);
  }

  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  PluginMetadataBuilder batches_;
  BatchLimits limits_;
  Buffer work_;
  GatheredMetadata metadata_;
};

}  // namespace

std::unique_ptr<AttentionMetadataBuilder> make_gathered_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options) {
  return std::make_unique<GatheredBuilder>(std::move(backend), std::move(context), config, options);
}

}  // namespace clattn::detail
