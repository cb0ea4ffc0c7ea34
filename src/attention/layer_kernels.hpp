#pragma once

#include <array>
#include <atomic>
#include <clattn/attention.hpp>
#include <cstdint>
#include <memory>
#include <mutex>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// Work-groups that stride over a tensor: enough to stream at the memory's rate, a power of two
/// work-items each.
struct StreamGrid {
  explicit StreamGrid(const DeviceCapabilities& capabilities);
  std::size_t group_size;
  std::size_t num_groups;
};

/// kernels_cl/kv_scales.cl for one layer: found once, from the first batch. Thread-safe.
class KVScaleCalculator {
 public:
  KVScaleCalculator(Runtime& runtime, const AttentionConfig& config);

  /// One of a layer's first tensors.
  struct Tensor {
    TensorRef rows;
    std::int32_t heads = 0;
    std::string_view name;
  };
  /// The first call enqueues scales[i] = largest magnitude of tensor i / its constant: K, V, Q. As
  /// long as that has not ended, later calls make their queue wait for it; then they do nothing.
  void calculate_once(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q,
                      std::int64_t num_tokens, const Buffer& scales);
  bool has_begun() const noexcept { return state_ != State::kWanted; }

 private:
  enum class State : std::uint8_t { kWanted, kEnqueued, kEnded };
  void enqueue(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q, std::int64_t num_tokens,
               const Buffer& scales);

  std::int32_t head_size_;
  float largest_code_;  ///< of the cache's type, where a constant may exceed it
  StreamGrid grid_;
  std::shared_ptr<KernelPool> amax_;
  std::shared_ptr<KernelPool> finish_;
  Buffer largest_;  ///< u32 [3], the bits of floats
  std::mutex mutex_;
  std::atomic<State> state_ = State::kWanted;
  Event found_;  ///< guarded by mutex_, of kEnqueued
};

/// kernels_cl/zero_rows.cl for outputs of one layer: a kernel, because recorded steps hold no
/// fills.
class RowZeroer {
 public:
  RowZeroer(Runtime& runtime, const AttentionConfig& config);
  /// Zeroes rows [first, end) of an output.
  void enqueue(cl_command_queue queue, const TensorRef& output, std::int64_t first,
               std::int64_t end) const;

 private:
  std::int64_t row_elems_;
  StreamGrid grid_;
  std::shared_ptr<KernelPool> kernel_;
};

}  // namespace clattn::detail
