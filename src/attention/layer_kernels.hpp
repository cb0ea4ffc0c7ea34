#pragma once

#include <array>
#include <atomic>
#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "capture/capture.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

/// A kernel whose work-groups stride over a tensor: enough groups to stream at the memory's rate, a
/// power of two work-items each.
struct StreamKernel {
  StreamKernel(Runtime& runtime, const char* file, const char* entry, std::string_view options);
  std::size_t group_size;
  std::size_t num_groups;
  std::shared_ptr<KernelPool> pool;
};

/// Elements from row to row of K, V and Q. Throws kInvalidArgument unless the buffers hold the
/// rows.
std::array<std::int64_t, 3> checked_strides(const CapturedScales& call);

/// kernels_cl/cache/kv_scales.cl for one layer: found once, from the first batch. Thread-safe.
class KVScaleCalculator {
 public:
  KVScaleCalculator(Runtime& runtime, const AttentionConfig& config);

  /// The first call enqueues scales[i] = largest magnitude of tensor i / its constant: K, V, Q.
  /// Latent rows have one scale, K's: both parts count for it. As long as that has not ended, later
  /// calls make their queue wait for it; then they do nothing.
  void calculate_once(const CapturedScales& call, const Buffer& scales);
  bool has_begun() const noexcept { return state_ != State::kWanted; }
  /// Launches its kernels over no token, for scales of nobody's.
  void warm_up(cl_command_queue queue, const AttentionConfig& config) const;

 private:
  enum class State : std::uint8_t { kWanted, kEnqueued, kEnded };
  void enqueue(const CapturedScales& call, const Buffer& scales, Event* event) const;

  const Runtime* runtime_;
  float largest_code_;  ///< of the cache's type, where a constant may exceed it
  StreamKernel amax_, finish_;
  Buffer largest_;  ///< u32 [3], the bits of floats
  std::mutex mutex_;
  std::atomic<State> state_ = State::kWanted;
  Event found_;  ///< guarded by mutex_, of kEnqueued
};

/// kernels_cl/attention/zero_rows.cl for the outputs of one layer: a kernel, because recorded steps
/// hold no fills.
class RowZeroer {
 public:
  RowZeroer(Runtime& runtime, const AttentionConfig& config);

  /// Of an output: [first, end).
  struct Rows {
    std::int64_t first = 0, end = 0;
  };
  /// Zeroes rows of the output and, if the layer also writes one as fp8, of that. Throws
  /// kInvalidArgument for rows that do not lie in the buffers.
  void enqueue(cl_command_queue queue, const TensorRef& output, cl_mem output_fp8,
               const Rows& rows) const;
  /// Zeroes a row of nobody's.
  void warm_up(cl_command_queue queue) const;

 private:
  struct Output {
    std::string_view name;
    DType dtype;
    StreamKernel kernel;
  };
  const Runtime* runtime_;
  std::int64_t row_elems_;
  std::vector<Output> outputs_;  ///< the one in the layer's type first
};

}  // namespace clattn::detail
