#pragma once

#include <clattn/attention.hpp>
#include <clattn/kv_cache.hpp>
#include <string_view>

#include "capture/capture.hpp"
#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {

/// Throws kInvalidArgument without a buffer, for an illegal offset or number of tokens, and for
/// slots past the buffer's end.
void check_slots(const SlotSource& slots);

/// The slots of a step up to the last one that stores something; all of them if `queue` is
/// recorded.
SlotSource written_slots(const AttentionMetadata& metadata, cl_command_queue queue);

/// Throws what is wrong with slots and tensors of a write by a kernel of this shape, whose cache
/// was checked (cache_checks.hpp).
void check_cache_write(const KernelShape& shape, const TensorRef& key, const TensorRef& value,
                       const SlotSource& slots);

/// Whether a call stores keys and values before it attends. Throws kInvalidArgument if only one of
/// them is given.
bool brings_keys(const AttentionTensors& tensors);
/// Throws kInvalidArgument if a call that stores nothing is given keys or values; `instead`: what
/// stores them.
void refuse_keys(const AttentionTensors& tensors, std::string_view instead);

/// Binds and enqueues reshape_and_cache_flash into a KVCache, or reshape_and_cache into
/// PackedPages, for what has passed check_cache_write().
template <typename Cache>
void enqueue_cache_write(const BuiltKernel& kernel, const KernelShape& shape,
                         cl_command_queue queue, const TensorRef& key, const TensorRef& value,
                         const Cache& cache, const SlotSource& slots, Event* event);

/// Elements from row to row of a tensor that was checked.
inline std::int64_t token_stride(const TensorRef& tensor, std::int64_t contiguous) {
  return tensor.token_stride == 0 ? contiguous : tensor.token_stride;
}

/// Rows of a tensor, one per token: [count, width] of dtype.
struct TokenRows {
  std::int64_t count = 0;
  std::int64_t width = 0;  ///< elements
  DType dtype = DType::kF16;
};
/// The token stride of a tensor in elements. Throws kInvalidArgument unless it has a buffer that
/// holds these rows, and sane offsets; an empty one needs none.
std::int64_t bounded_token_stride(const TensorRef& tensor, const TokenRows& rows,
                                  std::string_view name);

/// As bounded_token_stride(), for keys and values that are attended to directly. Rows must be
/// aligned for loads of eight elements; keys and values of one width must share a token stride.
void check_keys(const TensorRef& key, const TensorRef& value, const TokenRows& keys,
                std::int64_t value_width);

}  // namespace clattn::detail
