#pragma once

#include <clattn/clattn.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/replay_batch.hpp"
#include "cli/replay_pool.hpp"

namespace clattn::cli {

struct EngineConfig {
  AttentionConfig attention;
  std::int32_t num_layers = 1;
  BatchLimits limits;                   ///< num_blocks included
  std::string backend;                  ///< empty = chosen
  std::optional<KVCacheLayout> layout;  ///< nullopt = the one that the backend prefers here
  std::uint64_t seed = 0;
  bool capture = false;  ///< steps may be asked for one layer's output
};

struct StepTimes {
  double metadata_us = 0;     ///< host: build(), which validates, plans and enqueues the upload
  double upload_us = 0;       ///< device
  double cache_write_us = 0;  ///< device, all layers
  double attention_us = 0;    ///< device, all kernels of all layers
  double total_us = 0;        ///< host: from the builder's start to the last kernel's end
};

struct KernelUse {
  std::int64_t launches = 0;
  double time_us = 0;
};

/// Runs steps for real: builder, then cache write and attention of every layer, on one queue.
class Engine {
 public:
  Engine(std::shared_ptr<Context> context, const EngineConfig& config);

  const AttentionBackend& backend() const { return backend_; }
  const AttentionImpl& impl() const { return *impl_; }
  /// Whether a kernel of the last step did (KernelInfo).
  bool rounds_weights() const;
  const EngineConfig& config() const { return config_; }
  KVCacheLayout layout() const { return layout_; }
  const SyntheticPool& pool() const { return *pool_; }
  const std::map<std::string, KernelUse, std::less<>>& kernel_use() const { return kernel_use_; }

  /// Rows that a step may start at: [0, kStartRows).
  static constexpr std::int64_t kStartRows = 4096;
  /// The pool row of a step's first token in `layer`; token t uses the t-th after it.
  static std::int64_t pool_row(std::int64_t start_row, std::int32_t layer) {
    return start_row + std::int64_t{layer} * kLayerShift;
  }

  /// Runs shapes that make the driver finish its lazy work, then fills every cache with NaN, so
  /// that reading a slot that was never written shows.
  void warm_up_and_poison();
  /// Decodes first, as the builder wants them.
  std::span<const std::int32_t> order(const ScheduledStep& step);
  /// Executes a step and waits for it. `capture_layer`'s output, if asked for, can be read until
  /// the next run().
  StepTimes run(const StepBatch& batch, std::int64_t start_row,
                std::optional<std::int32_t> capture_layer = {});
  /// One token's captured output, [num_heads * head_size] in the input's type.
  void read_captured(std::int32_t token, std::span<std::byte> row) const;
  std::size_t output_row_bytes() const;

 private:
  static constexpr std::int64_t kLayerShift = 61;  // layers meet different rows
  void poison(const Buffer& buffer, std::uint32_t bits) const;
  void make_caches();
  /// Books a finished launch under its kernel; returns its time in microseconds.
  double count_launch(std::string_view kernel, const Event& event);

  std::shared_ptr<Context> context_;
  EngineConfig config_;
  const AttentionBackend& backend_;
  KVCacheLayout layout_;
  Queue queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  std::unique_ptr<SyntheticPool> pool_;
  std::map<std::string, Buffer> cache_buffers_;
  std::vector<KVCache> caches_;  // one a layer
  Buffer output_;
  Buffer captured_;
  std::string cache_kernel_ = "cache write";  // the impl tells its name, if it has one
  std::vector<Event> write_events_;
  std::vector<std::vector<LaunchRecord>> launches_;  // one list a layer
  std::vector<std::int32_t> scheduled_tokens_;
  std::vector<std::int32_t> order_;
  std::map<std::string, KernelUse, std::less<>> kernel_use_;
};

}  // namespace clattn::cli
