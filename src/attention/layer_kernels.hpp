#pragma once

#include <array>
#include <atomic>
#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// Work-groups that stride over a tensor: enough to stream at the memory's rate, a power of two
/// work-items each.
struct StreamGrid {
  explicit StreamGrid(const DeviceCapabilities& capabilities);
  std::size_t group_size;
  std::size_t num_groups;
};

/// kernels_cl/cache/kv_scales.cl for one layer: found once, from the first batch. Thread-safe.
class KVScaleCalculator {
 public:
  KVScaleCalculator(Runtime& runtime, const AttentionConfig& config);

  /// Number of rows of keys (and of values), and of queries.
  struct RowCounts {
    std::int64_t keys = 0, queries = 0;
  };
  /// The first call enqueues scales[i] = largest magnitude of tensor i / its constant: K, V, Q.
  /// Latent rows have one scale, K's: both parts count for it. As long as that has not ended, later
  /// calls make their queue wait for it; then they do nothing.
  void calculate_once(cl_command_queue queue, const TensorRef& key, const TensorRef& value,
                      const TensorRef& query, const RowCounts& counts, const Buffer& scales);
  using Rows = std::array<const TensorRef*, 3>;  ///< K, V, Q
  /// Elements from row to row. Throws kInvalidArgument unless the buffers hold the rows.
  std::array<std::int64_t, 3> checked_strides(const Rows& rows, const RowCounts& counts) const;
  bool has_begun() const noexcept { return state_ != State::kWanted; }
  /// Launches its kernels over no token, for scales of nobody's.
  void warm_up(cl_command_queue queue) const;

 private:
  /// What is known about a tensor beforehand.
  struct Tensor {
    std::string_view name;
    std::int64_t row = 0;   ///< elements of a token
    std::size_t scale = 0;  ///< the one that it counts for
  };
  static std::array<Tensor, 3> tensors_of(const AttentionConfig& config);
  enum class State : std::uint8_t { kWanted, kEnqueued, kEnded };
  void enqueue(cl_command_queue queue, const Rows& rows, const RowCounts& counts,
               const Buffer& scales, Event* event) const;

  const Runtime* runtime_;
  DType dtype_;  ///< of the tensors
  std::array<Tensor, 3> k_v_q_;
  float largest_code_;  ///< of the cache's type, where a constant may exceed it
  StreamGrid grid_;
  std::shared_ptr<KernelPool> amax_;
  std::shared_ptr<KernelPool> finish_;
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
    DType dtype = DType::kF32;
    std::shared_ptr<KernelPool> kernel = nullptr;
  };
  Output make_output(Runtime& runtime, std::string_view name, DType dtype) const;
  std::int64_t checked_stride(const Output& output, const TensorRef& memory,
                              const Rows& rows) const;
  void enqueue(cl_command_queue queue, const Output& output, const TensorRef& memory,
               const Rows& rows, std::int64_t stride) const;
  const Runtime* runtime_;
  std::int64_t row_elems_;
  StreamGrid grid_;
  Output output_;
  std::optional<Output> output_fp8_;
};

}  // namespace clattn::detail
