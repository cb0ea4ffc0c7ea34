#include "attention/layer_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "kernels/launch/cache_write.hpp"
#include "opencl/device_info.hpp"

namespace clattn::detail {

namespace {

constexpr float kLargestQueryCode = 448;  // of e4m3

std::shared_ptr<KernelPool> scales_kernel(Runtime& runtime, const AttentionConfig& config,
                                          const char* entry) {
  const StreamGrid grid(runtime.capabilities());
  return runtime.kernel({"cache/kv_scales.cl", entry,
                         fmt::format("-DCLA_WG_SIZE={} -DCLA_Q_DTYPE={}", grid.group_size,
                                     static_cast<int>(config.dtype))});
}

}  // namespace

StreamGrid::StreamGrid(const DeviceCapabilities& capabilities)
    : group_size(takes_single_items(capabilities) ? 1
                                                  : std::bit_floor(std::min<std::size_t>(
                                                        capabilities.max_work_group_size, 256))),
      num_groups(static_cast<std::size_t>(std::max(capabilities.compute_units, 1)) * 4) {}

std::array<KVScaleCalculator::Tensor, 3> KVScaleCalculator::tensors_of(
    const AttentionConfig& config) {
  const std::int64_t query_row = std::int64_t{config.num_heads} * config.head_size;
  const std::int64_t kv_row = std::int64_t{config.num_kv_heads} * config.head_size;
  if (!config.use_mla) return {{{"key", kv_row, 0}, {"value", kv_row, 1}, {"query", query_row, 2}}};
  return {{{"key", config.output_head_size(), 0},
           {"value", config.rope_dim, 0},
           {"query", query_row, 2}}};
}

KVScaleCalculator::KVScaleCalculator(Runtime& runtime, const AttentionConfig& config)
    : runtime_(&runtime),
      dtype_(config.dtype),
      k_v_q_(tensors_of(config)),
      largest_code_(config.cache_dtype() == DType::kInt8 ? 127.0F
                                                         : std::numeric_limits<float>::max()),
      grid_(runtime.capabilities()),
      amax_(scales_kernel(runtime, config, "clattn_kv_scales_amax")),
      finish_(scales_kernel(runtime, config, "clattn_kv_scales_finish")) {
  constexpr std::array<cl_uint, 3> kZeros{};
  largest_ = runtime.allocate_copy(std::as_bytes(std::span(kZeros)));
}

void KVScaleCalculator::calculate_once(cl_command_queue queue, const TensorRef& key,
                                       const TensorRef& value, const TensorRef& query,
                                       const RowCounts& counts, const Buffer& scales) {
  if (state_ == State::kEnded) return;
  const std::scoped_lock lock(mutex_);
  if (state_ == State::kWanted) {
    enqueue(queue, {&key, &value, &query}, counts, scales, &found_);
    state_ = State::kEnqueued;
    Queue::adopt(queue).flush();  // other queues may wait for it
  } else if (has_ended(found_)) {
    found_.reset();
    state_ = State::kEnded;
  } else {
    enqueue_wait(queue, found_);
  }
}

std::array<std::int64_t, 3> KVScaleCalculator::checked_strides(const Rows& rows,
                                                               const RowCounts& counts) const {
  const std::array num_tokens = {counts.keys, counts.keys, counts.queries};
  std::array<std::int64_t, 3> strides{};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    throw_invalid_if(num_tokens.at(i) < 0 || num_tokens.at(i) > INT32_MAX,
                     "num_tokens is {}, legal: 0 … {}", num_tokens.at(i), INT32_MAX);
    const Tensor& tensor = k_v_q_.at(i);
    strides.at(i) =
        bounded_token_stride(*rows.at(i), {num_tokens.at(i), tensor.row, dtype_}, tensor.name);
  }
  return strides;
}

void KVScaleCalculator::enqueue(cl_command_queue queue, const Rows& rows, const RowCounts& counts,
                                const Buffer& scales, Event* event) const {
  const std::array num_tokens = {counts.keys, counts.keys, counts.queries};
  const auto strides = checked_strides(rows, counts);  // of all before any leaves its maxima
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Tensor& tensor = k_v_q_.at(i);
    amax_->acquire()
        .args(rows.at(i)->buffer, cl_long{rows.at(i)->offset}, cl_long{strides.at(i)},
              static_cast<cl_int>(num_tokens.at(i)), static_cast<cl_int>(tensor.row / 8), largest_,
              static_cast<cl_int>(tensor.scale))
        .enqueue(queue, grid_.num_groups, grid_.group_size);
  }
  const Environment& constants = environment();
  finish_->acquire()
      .args(largest_, cl_float{std::min(constants.k_scale_constant, largest_code_)},
            cl_float{std::min(constants.v_scale_constant, largest_code_)},
            cl_float{std::min(constants.q_scale_constant, kLargestQueryCode)}, scales)
      .enqueue(queue, 1, 1, event);
}

void KVScaleCalculator::warm_up(cl_command_queue queue) const {
  const Buffer scales = runtime_->allocate(k_v_q_.size() * sizeof(float));
  const TensorRef nothing{scales.handle()};
  enqueue(queue, {&nothing, &nothing, &nothing}, {}, scales, nullptr);
  Queue::adopt(queue).finish();
}

RowZeroer::RowZeroer(Runtime& runtime, const AttentionConfig& config)
    : runtime_(&runtime),
      row_elems_(std::int64_t{config.num_heads} * config.output_head_size()),
      grid_(runtime.capabilities()),
      output_(make_output(runtime, "output", config.dtype)) {
  throw_unsupported_if(
      row_elems_ % 8 != 0,
      "layer: rows of {} elements (num_heads {} x head_size {}), legal: multiples of 8", row_elems_,
      config.num_heads, config.output_head_size());
  if (config.output_fp8) output_fp8_ = make_output(runtime, "output_fp8", DType::kFp8E4M3);
}

RowZeroer::Output RowZeroer::make_output(Runtime& runtime, std::string_view name,
                                         DType dtype) const {
  const std::size_t bytes = element_size_bytes(dtype);
  return {name, dtype,
          runtime.kernel(
              {"attention/zero_rows.cl", "clattn_zero_rows",
               fmt::format("-DCLA_WG_SIZE={} -DCLA_ELEMENT_BYTES={}", grid_.group_size, bytes)})};
}

void RowZeroer::enqueue(cl_command_queue queue, const TensorRef& output, cl_mem output_fp8,
                        const Rows& rows) const {
  if (rows.end <= rows.first) return;
  // One that is missing is the impl's to refuse.
  const bool with_fp8 = output_fp8_ && output_fp8 != nullptr;
  const std::int64_t stride = checked_stride(output_, output, rows);
  const std::int64_t fp8_stride = with_fp8 ? checked_stride(*output_fp8_, {output_fp8}, rows) : 0;
  enqueue(queue, output_, output, rows, stride);
  if (with_fp8) enqueue(queue, *output_fp8_, {output_fp8}, rows, fp8_stride);
}

void RowZeroer::warm_up(cl_command_queue queue) const {
  const Buffer row = runtime_->allocate(static_cast<std::size_t>(row_elems_) * sizeof(float));
  enqueue(queue, {row.handle()}, row.handle(), {0, 1});
  Queue::adopt(queue).finish();
}

std::int64_t RowZeroer::checked_stride(const Output& output, const TensorRef& memory,
                                       const Rows& rows) const {
  const std::int64_t count = rows.end - rows.first;
  throw_invalid_if(count > std::numeric_limits<cl_int>::max(),
                   "num_rows: {} rows of padding, legal: up to {}", count,
                   std::numeric_limits<cl_int>::max());
  return bounded_token_stride(memory, {rows.end, row_elems_, output.dtype}, output.name);
}

void RowZeroer::enqueue(cl_command_queue queue, const Output& output, const TensorRef& memory,
                        const Rows& rows, std::int64_t stride) const {
  output.kernel->acquire()
      .args(memory.buffer, cl_long{memory.offset + rows.first * stride}, cl_long{stride},
            static_cast<cl_int>(rows.end - rows.first), static_cast<cl_int>(row_elems_ / 8))
      .enqueue(queue, grid_.num_groups, grid_.group_size);
}

}  // namespace clattn::detail
