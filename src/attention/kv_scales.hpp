#pragma once

#include <clattn/attention.hpp>
#include <memory>

#include "opencl/runtime.hpp"

namespace clattn::detail {

/// The kernels of kernels_cl/kv_scales.cl for one layer, and their memory.
class KVScaleCalculator {
 public:
  KVScaleCalculator(Runtime& runtime, const AttentionConfig& config);

  /// One of a layer's first tensors.
  struct Tensor {
    TensorRef rows;
    std::int32_t heads = 0;
    std::string_view name;
  };
  /// Enqueues scales[i] = largest magnitude of tensor i / its constant: K, V, Q.
  void enqueue(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q, std::int64_t num_tokens,
               const Buffer& scales);

 private:
  std::int32_t head_size_;
  std::size_t group_size_;
  std::size_t num_groups_;
  std::shared_ptr<KernelPool> amax_;
  std::shared_ptr<KernelPool> finish_;
  Buffer largest_;  ///< u32 [3], the bits of floats
};

}  // namespace clattn::detail
