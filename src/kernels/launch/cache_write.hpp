#pragma once

#include <clattn/kv_cache.hpp>

#include "capture/capture.hpp"
#include "kernels/choose/attention_kernels.hpp"

namespace clattn::detail {

/// Throws kInvalidArgument without a buffer, for an illegal offset or number of tokens, and for
/// slots past the buffer's end.
void check_slots(const SlotSource& slots);

/// The slots of a step up to the last one that stores something; all of them if `queue` is
/// recorded.
SlotSource written_slots(const AttentionMetadata& metadata, cl_command_queue queue);

/// Throws what is wrong with slots, tensors or the order of keys in the cache, whose other fields
/// were checked (cache_checks.hpp) and match the kernel's shape.
void check_cache_write(const BuiltKernel& kernel, const KernelShape& shape, const TensorRef& key,
                       const TensorRef& value, CapturedCache cache, const SlotSource& slots);

/// Binds and enqueues reshape_and_cache_flash, or reshape_and_cache into an x-packed cache, for
/// what has passed check_cache_write().
void enqueue_cache_write(const BuiltKernel& kernel, const KernelShape& shape,
                         cl_command_queue queue, const TensorRef& key, const TensorRef& value,
                         CapturedCache cache, const SlotSource& slots, Event* event);

/// Throws kInvalidArgument unless the tensor has a buffer and sane offsets; returns its token
/// stride in elements.
std::int64_t checked_token_stride(const TensorRef& tensor, std::int64_t contiguous,
                                  std::string_view name);

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
/// As checked_token_stride(); also throws kInvalidArgument unless the buffer holds these rows.
std::int64_t bounded_token_stride(const TensorRef& tensor, const TokenRows& rows,
                                  std::string_view name);

/// As bounded_token_stride(), for keys and values that are attended to directly. Rows must be
/// aligned for loads of eight elements; keys and values of one width must share a token stride.
void check_keys(const TensorRef& key, const TensorRef& value, const TokenRows& keys,
                std::int64_t value_width);

}  // namespace clattn::detail
