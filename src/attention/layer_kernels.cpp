#include "attention/layer_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/checked.hpp"
#include "base/environment.hpp"
#include "kernels/launch/cache_write.hpp"
#include "opencl/device/device_info.hpp"

namespace clattn::detail {

namespace {

constexpr float kLargestQueryCode = 448;  // of e4m3

/// A tensor of a call, and the scale that it counts for.
struct ScaledTensor {
  std::string_view name;
  TensorRef memory;
  TokenRows rows;
  cl_int scale;
};

std::array<ScaledTensor, 3> tensors_of(const CapturedScales& call) {
  const AttentionConfig& config = call.config;
  const bool latent = config.use_mla;
  const std::int64_t query_row = std::int64_t{config.num_heads} * config.head_size;
  const std::int64_t kv_row = std::int64_t{config.num_kv_heads} * config.head_size;
  const std::int64_t key_row = latent ? config.output_head_size() : kv_row;
  const std::int64_t value_row =
      latent ? config.rope_dim : std::int64_t{config.num_kv_heads} * config.output_head_size();
  return {{{"key", call.key, {call.num_keys, key_row, config.dtype}, 0},
           {"value", call.value, {call.num_keys, value_row, config.dtype}, latent ? 0 : 1},
           {"query", call.query, {call.num_tokens, query_row, config.dtype}, 2}}};
}

StreamKernel scales_kernel(Runtime& runtime, const AttentionConfig& config, const char* entry) {
  return {runtime, "cache/kv_scales.cl", entry,
          fmt::format("-DCLA_Q_DTYPE={}", static_cast<int>(config.dtype))};
}

}  // namespace

StreamKernel::StreamKernel(Runtime& runtime, const char* file, const char* entry,
                           std::string_view options)
    : group_size(takes_single_items(runtime.capabilities())
                     ? 1
                     : std::bit_floor(
                           std::min<std::size_t>(runtime.capabilities().max_work_group_size, 256))),
      num_groups(static_cast<std::size_t>(std::max(runtime.capabilities().compute_units, 1)) * 4),
      pool(runtime.kernel({file, entry, fmt::format("-DCLA_WG_SIZE={} {}", group_size, options)})) {
}

std::array<std::int64_t, 3> checked_strides(const CapturedScales& call) {
  std::array<std::int64_t, 3> strides{};
  auto stride = strides.begin();
  for (const ScaledTensor& tensor : tensors_of(call)) {
    check_between("num_tokens", tensor.rows.count, 0, INT32_MAX);
    *stride++ = bounded_token_stride(tensor.memory, tensor.rows, tensor.name);
  }
  return strides;
}

KVScaleCalculator::KVScaleCalculator(Runtime& runtime, const AttentionConfig& config)
    : runtime_(&runtime),
      largest_code_(config.cache_dtype() == DType::kInt8 ? 127.0F
                                                         : std::numeric_limits<float>::max()),
      amax_(scales_kernel(runtime, config, "clattn_kv_scales_amax")),
      finish_(scales_kernel(runtime, config, "clattn_kv_scales_finish")) {
  constexpr std::array<cl_uint, 3> kZeros{};
  largest_ = runtime.allocate_copy(std::as_bytes(std::span(kZeros)));
}

void KVScaleCalculator::calculate_once(const CapturedScales& call, const Buffer& scales) {
  if (state_ == State::kEnded) return;
  const std::scoped_lock lock(mutex_);
  if (state_ == State::kWanted) {
    if (capturing()) {
      checked_strides(call);  // no case of what is refused
      capture_calc_kv_scales(call);
    }
    enqueue(call, scales, &found_);
    state_ = State::kEnqueued;
    Queue::adopt(call.queue).flush();  // other queues may wait for it
  } else if (has_ended(found_)) {
    found_.reset();
    state_ = State::kEnded;
  } else {
    enqueue_wait(call.queue, found_);
  }
}

void KVScaleCalculator::enqueue(const CapturedScales& call, const Buffer& scales,
                                Event* event) const {
  const auto strides = checked_strides(call);  // of all before any leaves its maxima
  auto stride = strides.begin();
  for (const ScaledTensor& tensor : tensors_of(call)) {
    amax_.pool->acquire()
        .args(tensor.memory.buffer, cl_long{tensor.memory.offset}, cl_long{*stride++},
              static_cast<cl_int>(tensor.rows.count), static_cast<cl_int>(tensor.rows.width / 8),
              largest_, tensor.scale)
        .enqueue(call.queue, amax_.num_groups, amax_.group_size);
  }
  const Environment& constants = environment();
  finish_.pool->acquire()
      .args(largest_, cl_float{std::min(constants.k_scale_constant, largest_code_)},
            cl_float{std::min(constants.v_scale_constant, largest_code_)},
            cl_float{std::min(constants.q_scale_constant, kLargestQueryCode)}, scales)
      .enqueue(call.queue, 1, 1, event);
}

void KVScaleCalculator::warm_up(cl_command_queue queue, const AttentionConfig& config) const {
  const Buffer scales = runtime_->allocate(3 * sizeof(float));
  const TensorRef nothing{scales.handle()};
  enqueue({.queue = queue, .config = config, .key = nothing, .value = nothing, .query = nothing},
          scales, nullptr);
  Queue::adopt(queue).finish();
}

RowZeroer::RowZeroer(Runtime& runtime, const AttentionConfig& config)
    : runtime_(&runtime), row_elems_(std::int64_t{config.num_heads} * config.output_head_size()) {
  throw_unsupported_if(
      row_elems_ % 8 != 0,
      "layer: rows of {} elements (num_heads {} x head_size {}), legal: multiples of 8", row_elems_,
      config.num_heads, config.output_head_size());
  const auto add = [&](std::string_view name, DType dtype) {
    outputs_.push_back(
        {name, dtype,
         StreamKernel(runtime, "attention/zero_rows.cl", "clattn_zero_rows",
                      fmt::format("-DCLA_ELEMENT_BYTES={}", element_size_bytes(dtype)))});
  };
  add("output", config.dtype);
  if (config.output_fp8) add("output_fp8", DType::kFp8E4M3);
}

void RowZeroer::enqueue(cl_command_queue queue, const TensorRef& output, cl_mem output_fp8,
                        const Rows& rows) const {
  const std::int64_t count = rows.end - rows.first;
  if (count <= 0) return;
  throw_invalid_if(count > INT32_MAX, "num_rows: {} rows of padding, legal: up to {}", count,
                   INT32_MAX);
  const std::array<TensorRef, 2> memory = {output, {output_fp8}};
  // One that is missing is the impl's to refuse.
  const std::size_t num_outputs = output_fp8 != nullptr ? outputs_.size() : 1;
  std::array<std::int64_t, 2> strides{};
  for (std::size_t i = 0; i < num_outputs; ++i) {
    strides.at(i) = bounded_token_stride(memory.at(i), {rows.end, row_elems_, outputs_[i].dtype},
                                         outputs_[i].name);
  }
  for (std::size_t i = 0; i < num_outputs; ++i) {
    const StreamKernel& kernel = outputs_[i].kernel;
    const std::int64_t stride = strides.at(i);
    kernel.pool->acquire()
        .args(memory.at(i).buffer, cl_long{memory.at(i).offset + rows.first * stride},
              cl_long{stride}, static_cast<cl_int>(count), static_cast<cl_int>(row_elems_ / 8))
        .enqueue(queue, kernel.num_groups, kernel.group_size);
  }
}

void RowZeroer::warm_up(cl_command_queue queue) const {
  const Buffer row = runtime_->allocate(static_cast<std::size_t>(row_elems_) * sizeof(float));
  enqueue(queue, {row.handle()}, row.handle(), {0, 1});
  Queue::adopt(queue).finish();
}

}  // namespace clattn::detail
