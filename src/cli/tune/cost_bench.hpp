#pragma once

#include <clattn/clattn.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace clattn::cli {

/// A step of equal requests, each of whose tiles is cut into `splits` splits.
struct CostBatch {
  std::int32_t requests = 1, query_len = 1, keys = 1, splits = 1;
  /// Whether all requests use the same pages. Tiles of one prompt do, and so find their keys in a
  /// cache of the device.
  enum class Pages : std::uint8_t { kOwn, kShared } pages = Pages::kOwn;
};

/// One kernel of a step.
struct CostLaunch {
  std::string kernel;
  std::int64_t tasks = 0;
  double event_us = 0;  ///< from its start to its end on the device
};

/// Times forward() of one layer. All batches use pages of one cache, so large that consecutive
/// launches do not find their keys in a cache of the device, just as in the layers of a model.
class CostBench {
 public:
  /// Throws kUnsupported where the device has no room for the cache.
  CostBench(std::shared_ptr<Context> context, const AttentionConfig& config);
  virtual ~CostBench() = default;
  CostBench(const CostBench&) = delete;
  CostBench& operator=(const CostBench&) = delete;

  const AttentionConfig& config() const { return config_; }
  std::vector<KernelInfo> kernels() const { return impl_->kernels(); }
  std::int64_t pool_tokens() const { return cache_.num_blocks * config_.block_size; }
  /// What a batch launches, with the time of each on an otherwise idle device.
  virtual std::vector<CostLaunch> launches(const CostBatch& batch);
  /// Microseconds per launch of each batch, from many launches in a row. Rounds are added while the
  /// first and the second half of them disagree.
  virtual std::vector<double> time_us(std::span<const CostBatch> batches);

 private:
  /// A batch over several sets of pages.
  struct Steps {
    std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders;
    std::vector<const AttentionMetadata*> metadata;
    std::size_t next = 0;
    int launches = 1;  ///< that fill a round
    std::vector<double> rounds_us;
  };
  Steps make_steps(const CostBatch& batch);
  Steps prepare(const CostBatch& batch);
  void time_in_turns(std::span<Steps> all) const;
  void time_one_by_one(std::span<Steps> all) const;
  void make_tensors(std::int64_t tokens);
  void forward(Steps& steps, const Queue& queue, std::vector<LaunchRecord>* records) const;
  double run_us(Steps& steps, int launches) const;
  static bool agrees(const Steps& steps);

  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  const AttentionBackend* backend_;
  std::shared_ptr<const AttentionImpl> impl_;
  Queue queue_, events_queue_;
  KVCache cache_;
  std::vector<std::int32_t> pages_;  // of the whole cache, shuffled
  std::size_t next_page_ = 0;        // of these, for the next request
  std::int64_t most_tokens_ = 0;     // that the tensors hold
  Buffer query_, out_;
};

}  // namespace clattn::cli
