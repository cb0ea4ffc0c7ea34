#pragma once

#include <clattn/clattn.hpp>
#include <clattn/explain.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "program/bench/shapes.hpp"
#include "program/common/verify.hpp"

namespace clattn::cli {

struct BenchOptions {
  std::string device;   ///< selector, for workloads that make a context of their own
  std::string backend;  ///< forced by name, or empty
  std::optional<KVCacheLayout> layout;  ///< nullopt = the backend's preference
  /// Launches rotate over this much memory, so that a last-level cache does not hold it.
  std::size_t rotate_bytes = 0;
  bool plan = false;  ///< also ask Workload::plan()
};

/// What a launch has to do at least: bytes to and from memory, operations. Both 0 = host time.
struct Work {
  double bytes = 0, flops = 0;
};

/// A kernel of the measured call; of calls outside AttentionImpl name, role and work-group size.
struct BenchKernel {
  std::string name{}, role{};
  int launches = 1;              ///< of this kernel in a call
  std::int64_t work_groups = 0;  ///< of each launch
  std::int32_t work_group_size = 0, block_rows = 0, block_kv = 0;
};

/// A launch of the measured call as its plan has it, and its time by the device's clock.
struct BenchLaunch {
  PlannedLaunch plan;
  double measured_us = 0;  ///< of the kernel alone; events add microseconds to short ones
};

/// One measurement: prepared device memory, the timed work, and the proof that it was done right.
class Workload {
 public:
  virtual ~Workload() = default;
  /// Seconds per launch of `launches` launches in a row: pipelined and waited for once, because
  /// events overstate short kernels. Outputs are poisoned first, outside the measured time.
  virtual double run(int launches) = 0;
  /// Compares what the last run() left with the oracle, on sampled rows.
  virtual Deviation verify() = 0;
  /// The launches of a call, planned and measured one by one; empty where no plan makes them.
  virtual std::vector<BenchLaunch> plan() { return {}; }

  int fewest_launches = 1, most_launches = 20000;  ///< of a round
  Work work;
  std::size_t touched_bytes = 0;  ///< that launches rotate over
  std::string backend;
  std::vector<BenchKernel> kernels;
  double first_seconds = 0;  ///< of attention's first call in its context, what is built included
};

/// What a workload is made for.
struct BenchTask {
  const std::shared_ptr<Context>& context;
  const BenchOptions& options;
  const BenchShape& shape;
};
using MakeWorkload = std::unique_ptr<Workload>(const BenchTask& task);
/// Of any suite. Throws kUnsupported with the numbers when the shape does not fit the device's
/// memory.
MakeWorkload make_workload;
MakeWorkload make_attention_workload;   ///< decode, prefill, mixed, spec
MakeWorkload make_contiguous_workload;  ///< prefill of models with head_size_v
MakeWorkload make_packed_workload;      ///< decode over an x-packed cache, of no suite
MakeWorkload make_cache_workload;       ///< by CacheOp the two below
MakeWorkload make_blocks_workload;      ///< copy_blocks, swap_blocks
MakeWorkload make_gather_workload;
MakeWorkload make_merge_workload;
MakeWorkload make_metadata_workload;
MakeWorkload make_startup_workload;  ///< startup, first_step, warmed_step
MakeWorkload make_step_workload;     ///< step: launched by calls; replay: as a recording
MakeWorkload make_lengths_workload;  ///< planned by bounds of the lengths
MakeWorkload make_mixed_replay_workload;
MakeWorkload make_recurrent_workload;  ///< gdn_decode, gdn_prefill, conv

}  // namespace clattn::cli
