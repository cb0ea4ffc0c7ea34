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

#include "program/bench/data.hpp"
#include "program/common/error.hpp"
#include "program/replay/recurrent.hpp"
#include "program/replay/scheduler.hpp"

namespace clattn::cli {

/// A scheduled step as the arrays that a metadata builder reads. Memory is taken once for the
/// largest step.
class StepBatch {
 public:
  StepBatch(std::int32_t max_num_seqs, std::int64_t max_blocks_per_request,
            std::int32_t block_size);

  /// Lays the step's requests out in `order`: order[i] is at place i.
  void assemble(const ScheduledStep& step, std::span<const std::int32_t> order);
  CommonAttentionMetadata view() const;

  std::int32_t num_reqs() const { return static_cast<std::int32_t>(requests_.size()); }
  const ScheduledRequest& request(std::int32_t place) const { return requests_[to_size(place)]; }
  std::int32_t first_token(std::int32_t place) const { return query_start_loc_[to_size(place)]; }
  std::int32_t seq_len(std::int32_t place) const { return seq_lens_[to_size(place)]; }
  /// Where the token at `position` of the request at `place` lies in the cache.
  std::int64_t slot(std::int32_t place, std::int32_t position) const;

 private:
  std::int64_t max_blocks_;
  std::int32_t block_size_;
  std::vector<ScheduledRequest> requests_;
  std::vector<std::int32_t> query_start_loc_;
  std::vector<std::int32_t> seq_lens_;
  std::vector<std::int32_t> num_computed_tokens_;
  std::vector<std::int32_t> block_table_;
};

/// k_scale and v_scale of quantized caches: a power of two, so that it rounds nothing itself, with
/// room in every such type for the pool's keys and values.
inline constexpr float kPoolCacheScale = 1.0F / 32;

enum class PoolTensor : std::uint8_t {
  kQuery,
  kKey,
  kValue,
  // Of recurrent layers: what their convolutions are given, gates of the rule, gates of outputs.
  kChannels,
  kGates,
  kOutputGate
};

/// Random rows of what layers are given (of latent attention query, latent and rotary ones) on the
/// device, made once. A step of n tokens uses n consecutive rows from a random start, so nothing is
/// generated per step, and the host knows every element.
class SyntheticPool {
 public:
  SyntheticPool(const Context& context, const Queue& queue, const AttentionConfig& config,
                const DeltaNet& net, std::int64_t num_rows, std::uint64_t seed);

  TensorRef rows_from(PoolTensor tensor, std::int64_t row) const;
  /// An element as kernels meet it: rounded to the input's type, keys and values then to the
  /// cache's. `element` counts within the row.
  double stored(PoolTensor tensor, std::int64_t row, std::int64_t element) const;

 private:
  struct Tensor {
    std::int64_t row_elems;
    TiledRandom values;  // as kernels meet them
    Buffer buffer;
  };
  std::vector<Tensor> tensors_;  // by PoolTensor
};

struct EngineConfig {
  AttentionConfig attention;
  std::int32_t num_layers = 1;  ///< of attention
  /// The layers between them, if the model has some, and pages of their states.
  DeltaNet delta_net{};
  std::int32_t num_recurrent_layers = 0, state_pages = 0;
  BatchLimits limits;                   ///< num_blocks included
  std::string backend;                  ///< empty = chosen
  std::optional<KVCacheLayout> layout;  ///< nullopt = the one that the backend prefers here
  std::uint64_t seed = 0;
  bool capture = false;  ///< steps may be asked for outputs of layers
};

/// Whose outputs a step keeps: one layer of each kind that the model has.
struct CapturedLayers {
  std::int32_t attention = 0, recurrent = -1;
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
  bool rounds_probabilities() const;
  const EngineConfig& config() const { return config_; }
  KVCacheLayout layout() const { return layout_; }
  const SyntheticPool& pool() const { return *pool_; }
  /// Of hybrid models.
  const RecurrentEngine& recurrent() const { return *recurrent_; }
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
  /// Executes a step and waits for it. Outputs that are asked for can be read until the next run().
  StepTimes run(const StepBatch& batch, std::int64_t start_row,
                std::optional<CapturedLayers> capture = {});
  /// One token's captured output, [num_heads * output_head_size()] in the input's type.
  void read_captured(std::int32_t token, std::span<std::byte> row) const;
  std::size_t output_row_bytes() const;
  /// A token's row of an output of recurrent layers.
  std::vector<double> read_row(const Buffer& buffer, std::int32_t token, std::int64_t width) const;

 private:
  static constexpr std::int64_t kLayerShift = 61;  // layers meet different rows
  void make_caches();
  void run_layers(const AttentionMetadata& metadata, std::int64_t start_row,
                  std::optional<CapturedLayers> capture);
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
  std::unique_ptr<RecurrentEngine> recurrent_;  // null if the model has none
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
