#pragma once

#include <array>
#include <clattn/attention.hpp>
#include <numbers>
#include <optional>
#include <vector>

#include "capture/capture.hpp"
#include "kernels/choose/attention_kernels.hpp"
#include "kernels/step/paged_step.hpp"
#include "shared/call.h"
#include "shared/row_scales.h"

namespace clattn::detail {

inline constexpr float kLog2E = std::numbers::log2e_v<float>;

/// A layer's part of its launches: of the arguments strides, offsets of keys and values, options
/// and scale; keys, values; in the order of kernels_cl/core/options.clh the tensors of its options.
struct LayerCall {
  ClaCall args{};
  cl_mem k = nullptr;
  cl_mem v = nullptr;
  std::array<cl_mem, 5> option_tensors{};
  std::size_t num_option_tensors = 0;
  std::optional<ClaRowScales> row_scales = {};  ///< behind them, where the kernels take it

  void add(cl_mem tensor) { option_tensors.at(num_option_tensors++) = tensor; }
};

/// Under CLATTN_DEBUG: throws kInvalidArgument for metadata that is not its builder's last, or was
/// built on another queue than the call's.
void check_current(const AttentionMetadata& metadata, cl_command_queue queue);

/// The step behind `metadata`, if these kernels can run its plan. Throws kInvalidArgument.
const PagedStepView& checked_step(const AttentionMetadata& metadata, cl_command_queue queue,
                                  const AttentionKernels& kernels);

/// The rows that a step's query and output must hold: its tokens, or where this thread records the
/// queue those of the largest batch that replays may bring.
std::int64_t num_rows(const PagedStepView& step, cl_command_queue queue);

/// Throws kUnsupported if this thread records the queue and the step cannot be recorded.
void check_recordable(cl_command_queue queue, const PagedStepView& step);

/// This thread's recorder of `queue`, or null. Replays will then want the step's memory prepared
/// for the size that it has now. Throws what check_recordable() throws.
Recorder* recorder_for(cl_command_queue queue, const PagedStepView& step);

/// Rows of a call's key and value tensors; none are looked at if `count` is 0.
struct KeyRows {
  std::int64_t count = 0, key_width = 0, value_width = 0;
};
/// Throws kInvalidArgument if the call writes memory that another of its tensors has, too. Parts of
/// buffers (clCreateSubBuffer) are compared under CLATTN_DEBUG.
void check_apart(const AttentionTensors& tensors, cl_mem output_fp8, const KernelShape& shape,
                 std::int64_t tokens, const KeyRows& keys);

/// Throws kInvalidArgument unless the query, [tokens, num_heads, head_size + rope_dim], the output,
/// [tokens, num_heads, value_size()], and, if given, lse hold the step's rows, and kUnsupported for
/// a queue that launch_step() cannot use.
void check_step_call(cl_command_queue queue, const AttentionKernels& kernels,
                     const PagedStepView& step, const AttentionTensors& tensors);

/// What check_step_call() has passed: launches the stages that have items and the merge if anything
/// was split. Fills in the rest of the layer's arguments, in place, as copies of them would cost
/// the host. `launches` gets a record a kernel, `event` completes with the last.
void launch_step(cl_command_queue queue, const AttentionKernels& kernels, const PagedStepView& step,
                 const AttentionTensors& tensors, LayerCall& layer, Event* event,
                 std::vector<LaunchRecord>* launches);

/// Memory of nobody's, for launches that have nothing to do.
struct IdleMemory {
  /// Refuses a queue that is being recorded.
  IdleMemory(cl_command_queue queue, const AttentionKernels& kernels);

  CapturePause pause;  ///< its launches are no calls of the application's
  Buffer zeros;  ///< stands for every tensor: a page of the cache and a token's row fit into it
  Buffer slots;  ///< i64 [1]: kPadSlotId
  AttentionWorkspace workspace;  ///< without room for partial results
};

/// Launches every kernel of the layer's steps over padding alone: no tensor is read or written.
void launch_idle_step(cl_command_queue queue, const AttentionKernels& kernels, LayerCall layer,
                      const IdleMemory& memory);

/// The softmax's scale: the one that was chosen, or 1 / sqrt(`width` of a key).
float softmax_scale(std::optional<float> chosen, std::int32_t width);
/// f32 [2][num_heads]: slopes, then sinks, in base 2; empty where the layer has neither.
Buffer make_head_params(const Runtime& runtime, const AttentionConfig& config);

/// The kernels for reports.
std::vector<KernelInfo> describe_kernels(const AttentionKernels& kernels);

}  // namespace clattn::detail
