#pragma once

#include <clattn/clattn.hpp>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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

/// The tasks of a kernel for one layer shape, as the planner counts them.
struct CostTasks {
  std::int64_t each_tile = 1;   ///< tasks per tile of queries, or per split of one
  double key_bytes = 0;         ///< bytes of one key and its value, for all KV heads of a task
  double rows_each_token = 0;   ///< query rows of a task per query token
  double flops_each = 0;        ///< per key and query row
  std::int32_t concurrent = 1;  ///< KernelInfo::concurrent_groups
};

/// Predicted microseconds of a launch: its tasks in waves of the groups that run at once, plus the
/// slowdown of these groups by each other.
double predicted_us(const KernelCosts& costs, const CostTasks& tasks, const CostBatch& batch);

/// Costs of the kernels of a layer shape, and each kernel that could not be measured, with why.
struct MeasuredCosts {
  std::vector<CostRow> rows;
  std::vector<std::string> left_out;
};

/// Which kernels to measure, by KernelInfo::role.
using WantsRole = std::function<bool(std::string_view role)>;

/// Makes the bench of a layer; if empty, a CostBench is used.
using MakeCostBench = std::function<std::unique_ptr<CostBench>(std::shared_ptr<Context> context,
                                                               const AttentionConfig& config)>;

/// Measures the attention kernels of a layer under the context's tuning: each stage of a wanted
/// role, a wide tile under a tuning row of its own, and the merge if such a stage does not merge
/// its own splits. Rows name device, driver and the whole shape; the caller adds version and date.
MeasuredCosts measure_costs(const std::shared_ptr<Context>& context, const AttentionConfig& config,
                            const WantsRole& wants, const MakeCostBench& make_bench = {});

/// The layer with another number of KV heads and as many query heads for each.
AttentionConfig with_kv_heads(AttentionConfig config, std::int32_t num_kv_heads);

/// The tasks of the stage that takes queries of `query_len` tokens.
CostTasks tasks_of(CostBench& bench, const KernelInfo& kernel, std::int32_t query_len);

}  // namespace clattn::cli
