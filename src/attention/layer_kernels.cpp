#include "attention/layer_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"
#include "kernels/cache_write.hpp"

namespace clattn::detail {

namespace {

std::shared_ptr<KernelPool> stream_kernel(Runtime& runtime, const AttentionConfig& config,
                                          const char* file, const char* entry) {
  const StreamGrid grid(runtime.capabilities());
  return runtime.kernel({file, entry,
                         fmt::format("-DCLA_WG_SIZE={} -DCLA_Q_DTYPE={}", grid.group_size,
                                     static_cast<int>(config.dtype))});
}

}  // namespace

StreamGrid::StreamGrid(const DeviceCapabilities& capabilities)
    : group_size(
          capabilities.kind == DeviceKind::kCpu
              ? 1
              : std::bit_floor(std::min<std::size_t>(capabilities.max_work_group_size, 256))),
      num_groups(static_cast<std::size_t>(std::max(capabilities.compute_units, 1)) * 4) {}

KVScaleCalculator::KVScaleCalculator(Runtime& runtime, const AttentionConfig& config)
    : head_size_(config.head_size),
      largest_code_(config.cache_dtype() == DType::kInt8 ? 127.0F
                                                         : std::numeric_limits<float>::max()),
      grid_(runtime.capabilities()),
      amax_(stream_kernel(runtime, config, "kv_scales.cl", "clattn_kv_scales_amax")),
      finish_(stream_kernel(runtime, config, "kv_scales.cl", "clattn_kv_scales_finish")) {
  constexpr std::array<cl_uint, 3> kZeros{};
  largest_ = runtime.allocate_copy(std::as_bytes(std::span(kZeros)));
}

void KVScaleCalculator::calculate_once(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q,
                                       std::int64_t num_tokens, const Buffer& scales) {
  if (state_ == State::kEnded) return;
  const std::lock_guard lock(mutex_);
  if (state_ == State::kWanted) {
    enqueue(queue, k_v_q, num_tokens, scales);
    state_ = State::kEnqueued;
    Queue::adopt(queue).flush();  // other queues may wait for it
  } else if (has_ended(found_)) {
    found_.reset();
    state_ = State::kEnded;
  } else {
    enqueue_wait(queue, found_);
  }
}

void KVScaleCalculator::enqueue(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q,
                                std::int64_t num_tokens, const Buffer& scales) {
  if (num_tokens < 0 || num_tokens > INT32_MAX) {
    throw_invalid("num_tokens is {}, legal: 0 … {}", num_tokens, INT32_MAX);
  }
  for (std::size_t i = 0; i < k_v_q.size(); ++i) {
    const Tensor& tensor = k_v_q.at(i);
    const std::int64_t row = std::int64_t{tensor.heads} * head_size_;
    const cl_long stride = checked_token_stride(tensor.rows, row, tensor.name);
    amax_->acquire()
        .arg(tensor.rows.buffer)
        .arg<cl_long>(tensor.rows.offset)
        .arg(stride)
        .arg<cl_int>(static_cast<cl_int>(num_tokens))
        .arg<cl_int>(static_cast<cl_int>(row / 8))
        .arg(largest_.handle())
        .arg<cl_int>(static_cast<cl_int>(i))
        .enqueue(queue, grid_.num_groups, grid_.group_size);
  }
  const Environment& constants = environment();
  finish_->acquire()
      .arg(largest_.handle())
      .arg<cl_float>(std::min(constants.k_scale_constant, largest_code_))
      .arg<cl_float>(std::min(constants.v_scale_constant, largest_code_))
      .arg<cl_float>(constants.q_scale_constant)
      .arg(scales.handle())
      .enqueue(queue, 1, 1, &found_);
}

RowZeroer::RowZeroer(Runtime& runtime, const AttentionConfig& config)
    : row_elems_(std::int64_t{config.num_heads} * config.head_size),
      grid_(runtime.capabilities()),
      kernel_(stream_kernel(runtime, config, "zero_rows.cl", "clattn_zero_rows")) {
  if (row_elems_ % 8 != 0) {
    throw_unsupported(
        "layer: rows of {} elements (num_heads {} x head_size {}), legal: multiples of 8",
        row_elems_, config.num_heads, config.head_size);
  }
}

void RowZeroer::enqueue(cl_command_queue queue, const TensorRef& output, std::int64_t first,
                        std::int64_t end) const {
  if (end <= first) return;
  if (end - first > std::numeric_limits<cl_int>::max()) {
    throw_invalid("num_rows: {} rows of padding, legal: up to {}", end - first,
                  std::numeric_limits<cl_int>::max());
  }
  const cl_long stride = checked_token_stride(output, row_elems_, "output");
  const cl_long at = checked_add(output.offset, checked_mul(first, stride, "output"), "output");
  static_cast<void>(checked_add(at, checked_mul(end - first, stride, "output"), "output"));
  kernel_->acquire()
      .arg(output.buffer)
      .arg(at)
      .arg(stride)
      .arg<cl_int>(static_cast<cl_int>(end - first))
      .arg<cl_int>(static_cast<cl_int>(row_elems_ / 8))
      .enqueue(queue, grid_.num_groups, grid_.group_size);
}

}  // namespace clattn::detail
