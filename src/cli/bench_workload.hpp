#pragma once

#include <clattn/clattn.hpp>
#include <cstddef>
#include <memory>
#include <string>

#include "cli/bench_shapes.hpp"
#include "cli/verify.hpp"

namespace clattn::cli {

struct BenchOptions {
  AttentionConfig config;
  std::string backend;  ///< forced by name, or empty
  std::size_t rotate_bytes =
      0;  ///< launches rotate over this much KV cache, more than a last cache
};

/// What a measurement's work is counted in.
enum class WorkUnit : std::uint8_t { kBytes, kFlop, kNone };

/// One measurement: prepared device memory, the timed work, and the proof that it was done right.
class Workload {
 public:
  virtual ~Workload() = default;
  /// Seconds per launch of `launches` launches in a row: pipelined and waited for once, because
  /// events overstate short kernels. Outputs are poisoned first, outside the measured time.
  virtual double run(int launches) = 0;
  /// Compares what the last run() left with the oracle, on sampled rows.
  virtual Deviation verify() = 0;

  int fewest_launches = 1;  ///< of a round
  double work_per_launch = 0;
  WorkUnit unit = WorkUnit::kNone;
  std::string backend, kernels;
};

/// Throws kUnsupported with the numbers when the shape does not fit the device's memory.
std::unique_ptr<Workload> make_workload(const std::shared_ptr<Context>& context,
                                        const BenchOptions& options, const BenchShape& shape);
std::unique_ptr<Workload> make_attention_workload(const std::shared_ptr<Context>& context,
                                                  const BenchOptions& options,
                                                  const BenchShape& shape);
std::unique_ptr<Workload> make_cache_workload(const std::shared_ptr<Context>& context,
                                              const BenchOptions& options, const BenchShape& shape);
std::unique_ptr<Workload> make_metadata_workload(const std::shared_ptr<Context>& context,
                                                 const BenchOptions& options,
                                                 const BenchShape& shape);
std::unique_ptr<Workload> make_step_workload(const std::shared_ptr<Context>& context,
                                             const BenchOptions& options, const BenchShape& shape,
                                             bool replay);

}  // namespace clattn::cli
