#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backends/plugin_step.hpp"
#include "base/checked.hpp"

namespace clattn::detail {

inline constexpr std::string_view kGatheredName = "backend CLBLAST";

/// Where the parts of one request's arithmetic lie in the workspace, in f32 elements.
struct RequestParts {
  static constexpr std::int64_t kScores = std::int64_t{4} << 20;  ///< at a time, of several tokens
  std::int64_t tokens = 0;  ///< queries at a time, so that their scores stay small
  std::int64_t k = 0, v = 0, q = 0, sums = 0, scores = 0, end = 0;

  RequestParts(const AttentionConfig& config, std::int64_t query_len, std::int64_t num_keys);
};

/// A step's batch on host and device, and the memory that its layers compute in.
class GatheredMetadata final : public AttentionMetadata {
 public:
  void reserve(std::int32_t max_num_reqs) {
    keys_at_.reserve(static_cast<std::size_t>(max_num_reqs) + 1);
  }
  void refresh(const AttentionMetadata& built, const AttentionConfig& config, const Buffer& work) {
    static_cast<AttentionMetadata&>(*this) = built;
    plan_ = &dynamic_cast<const PluginMetadata&>(built);
    config_ = &config;
    work_ = work;
    const ClattnBatch& batch = plan_->batch();
    keys_at_.assign(1, 0);
    for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
      const std::int64_t more =
          config.contiguous_kv() ? batch.seq_lens[r] : batch.block_table_stride;
      keys_at_.push_back(checked_add(keys_at_.back(), static_cast<std::int32_t>(more), "batch"));
    }
  }
  const PluginMetadata& plan() const noexcept { return *plan_; }
  bool is_for(const AttentionConfig& layer) const noexcept {
    return plan_ != nullptr && plan_->batch().struct_size != 0 &&
           config_->contiguous_kv() == layer.contiguous_kv() &&
           (layer.contiguous_kv() || config_->block_size == layer.block_size) &&
           config_->num_heads == layer.num_heads && config_->num_kv_heads == layer.num_kv_heads &&
           config_->head_size == layer.head_size;
  }
  cl_mem work() const noexcept { return work_.handle(); }
  /// [num_reqs + 1]: where a request's row of the block table begins; its first key without pages.
  std::span<const std::int32_t> keys_at() const noexcept { return keys_at_; }

 private:
  const PluginMetadata* plan_ = nullptr;
  const AttentionConfig* config_ = nullptr;
  Buffer work_;
  std::vector<std::int32_t> keys_at_;
};

/// The workspace, of the step's longest request, is the metadata's: builders share none. The first
/// step takes what the limits allow, up to kMaxWorkspaceBytes, beyond which it grows. Throws
/// kUnsupported for options that cut the work.
std::unique_ptr<AttentionMetadataBuilder> make_gathered_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options);

}  // namespace clattn::detail
