#pragma once

#include <clattn/backend_abi.h>

#include <clattn/attention.hpp>
#include <memory>

#include "kernels/step/cache_checks.hpp"
#include "metadata/validate.hpp"
#include "opencl/staging.hpp"

namespace clattn::detail {

/// What a plugin's forward() reads of a step.
class PluginMetadata final : public AttentionMetadata {
 public:
  const ClattnBatch& batch() const noexcept { return batch_; }
  std::int32_t block_size() const noexcept { return block_size_; }
  const BlockBound& block_ids() const noexcept { return block_ids_; }

 private:
  friend class PluginMetadataBuilder;
  ClattnBatch batch_{};
  std::int32_t block_size_ = 0;
  BlockBound block_ids_;
};

/// Checks a batch and gives plugins its arrays on the host and, by one upload, on the device.
class PluginMetadataBuilder final : public AttentionMetadataBuilder {
 public:
  PluginMetadataBuilder(std::shared_ptr<const AttentionBackend> backend,
                        std::shared_ptr<Context> context, const AttentionConfig& config,
                        const BuilderOptions& options);

  const AttentionMetadata& build(cl_command_queue queue, const CommonAttentionMetadata& batch,
                                 Event* upload, const BuildOptions& options) override;
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
  BatchSummary check(const CommonAttentionMetadata& batch) const;
  void copy_arrays(const CommonAttentionMetadata& batch, std::span<std::byte> bytes);
  std::size_t largest_step_bytes() const;
  void copy_table(const CommonAttentionMetadata& batch, std::span<std::int32_t> table) const;
  void copy_slots(const CommonAttentionMetadata& batch, std::span<std::int64_t> slots) const;

  std::shared_ptr<const AttentionBackend> backend_;  ///< keeps the plugin loaded
  std::shared_ptr<Context> context_;
  BatchLimits limits_;
  std::int32_t decode_threshold_;
  StagedUpload staging_;
  PluginMetadata metadata_;
};

}  // namespace clattn::detail
