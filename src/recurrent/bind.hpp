#pragma once

#include <clattn/recurrent.hpp>
#include <span>
#include <string>
#include <string_view>

#include "opencl/runtime.hpp"
#include "shared/recurrent.h"

// What the calls of recurrent layers check and bind alike.

namespace clattn::detail {

/// A call: where it runs, and what errors call it.
struct RecurrentCall {
  const Context& context;
  cl_command_queue queue;
  std::string_view name;
  const RecurrentMetadata& metadata;
};

/// Empties the event. Throws kInvalidArgument unless the queue is in-order and the lists are as
/// long as they say.
void begin_call(const RecurrentCall& call, Event* event);
/// Throws kInvalidArgument unless pages of this shape lie in the view's buffer and hold what the
/// metadata names. A size of -1 may be any from 1 on.
void check_states(const RecurrentCall& call, const StateView& states,
                  std::span<const std::int64_t> shape, std::string_view field);
/// Throws kInvalidArgument unless a type is f32, f16 or bf16.
void check_plain_type(const RecurrentCall& call, DType dtype, std::string_view field);
/// Throws kInvalidArgument unless a buffer holds `count` elements.
void check_values(const RecurrentCall& call, const Buffer& buffer, std::int64_t count, DType dtype,
                  std::string_view field);
/// The place of a tensor of the step's tokens, which must lie in its buffer.
ClaRows check_tensor(const RecurrentCall& call, const TensorRef& tensor, std::int64_t width,
                     DType dtype, std::string_view field);
/// The same; returns the tensor's buffer.
cl_mem bind_tensor(const RecurrentCall& call, const TensorRef& tensor, std::int64_t width,
                   DType dtype, std::string_view field, ClaRows& place);

ClaRecurrentLists bound_lists(const RecurrentMetadata& metadata, std::int64_t num_blocks);
/// Binds the lists' buffers, in the order of CLA_LISTS.
void bind_lists(KernelLease& lease, const RecurrentMetadata& metadata);

/// Floats of a vector that kernels compute with on this device.
int recurrent_vector(const DeviceCapabilities& device);
/// CLA_VEC, and CLA_ALIGNED where these offsets and strides, in elements, allow it. On GPUs the
/// buffers themselves are aligned to any vector.
std::string vector_options(const DeviceCapabilities& device, int vector,
                           std::span<const std::int64_t> elements);

}  // namespace clattn::detail
