#include "attention/kv_scales.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <clattn/layer.hpp>
#include <cmath>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "kernels/cache_write.hpp"

namespace clattn {

namespace {

/// The one value of a checkpoint's scale, -1 when it holds none.
float single(std::span<const float> values, std::string_view name) {
  if (values.size() > 1) {
    detail::throw_invalid(
        "Only support per-tensor scaling factor for fp8 KV cache: {} has {} values", name,
        values.size());
  }
  if (values.empty()) return -1;
  const float value = values.front();
  if (!std::isfinite(value) || value == 0) {
    detail::throw_invalid("{} is {}, legal: finite numbers > 0, or < 0 for not loaded", name,
                          value);
  }
  return value;
}

}  // namespace

KVScales load_kv_scales(const LoadedKVScales& loaded, std::optional<DType> kv_cache_dtype) {
  const float k = single(loaded.k_scale, "k_scale");
  const float v = single(loaded.v_scale, "v_scale");
  const float q = single(loaded.q_scale, "q_scale");
  const float prob = single(loaded.prob_scale, "prob_scale");
  KVScales scales;
  if (q > 0) scales.q_scale = q;
  if (prob > 0) scales.prob_scale = prob;
  if (!kv_cache_dtype || !is_quantized(*kv_cache_dtype)) return scales;
  if (k > 0 && v > 0) {
    scales.k_scale = k;
    scales.v_scale = v;
  } else if (k > 0 || v > 0) {
    scales.k_scale = scales.v_scale = std::max(k, v);
  }
  if (scales.k_scale == 1 && scales.v_scale == 1 && kv_cache_dtype == DType::kFp8E4M3) {
    scales.warnings.emplace_back(
        "Using KV cache scaling factor 1.0 for fp8_e4m3. This may cause accuracy issues. Please "
        "make sure k/v_scale is available in the fp8 checkpoint.");
  }
  return scales;
}

namespace detail {

KVScaleCalculator::KVScaleCalculator(Runtime& runtime, const AttentionConfig& config)
    : head_size_(config.head_size) {
  const DeviceCapabilities& device = runtime.capabilities();
  const bool cpu = device.kind == DeviceKind::kCpu;
  // Enough groups to stream at the memory's rate; a power of two for the reduction.
  group_size_ = cpu ? 1 : std::bit_floor(std::min<std::size_t>(device.max_work_group_size, 256));
  num_groups_ = static_cast<std::size_t>(std::max(device.compute_units, 1)) * 4;
  const auto kernel = [&](const char* entry) {
    return runtime.kernel({"kv_scales.cl", entry,
                           fmt::format("-DCLA_WG_SIZE={} -DCLA_Q_DTYPE={}", group_size_,
                                       static_cast<int>(config.dtype))});
  };
  amax_ = kernel("clattn_kv_scales_amax");
  finish_ = kernel("clattn_kv_scales_finish");
  constexpr std::array<cl_uint, 3> kZeros{};
  largest_ = runtime.allocate_copy(std::as_bytes(std::span(kZeros)));
}

void KVScaleCalculator::enqueue(cl_command_queue queue, const std::array<Tensor, 3>& k_v_q,
                                std::int64_t num_tokens, const Buffer& scales) {
  if (num_tokens < 0 || num_tokens > INT32_MAX) {
    throw_invalid("num_tokens is {}, legal: 0 … {}", num_tokens, INT32_MAX);
  }
  enqueue_zero(queue, largest_.handle(), sizeof(cl_uint), 0, largest_.size_bytes());
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
        .enqueue(queue, num_groups_, group_size_);
  }
  const Environment& constants = environment();
  finish_->acquire()
      .arg(largest_.handle())
      .arg<cl_float>(constants.k_scale_constant)
      .arg<cl_float>(constants.v_scale_constant)
      .arg<cl_float>(constants.q_scale_constant)
      .arg(scales.handle())
      .enqueue(queue, 1, 1);
}

}  // namespace detail

}  // namespace clattn
