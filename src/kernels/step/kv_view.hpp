#pragma once

#include <algorithm>
#include <clattn/kv_cache.hpp>

#include "kernels/launch/cache_write.hpp"
#include "kernels/step/cache_checks.hpp"
#include "shared/call.h"

namespace clattn::detail {

/// Where kernels find keys and values, in elements: pages of a cache, or a pair of tensors.
struct KVView {
  cl_mem k = nullptr;
  cl_long k_offset = 0;
  cl_mem v = nullptr;
  cl_long v_offset = 0;
  cl_long block_stride = 0;
  cl_long token_stride = 0;
  cl_long head_stride = 0;
  cl_long key_dim_stride = 1;
  cl_mem scales = nullptr;
  cl_int scale_stride = -1;

  explicit KVView(const KVCache& cache)
      : k(cache.buffer.handle()),
        k_offset(cache.k_offset),
        v(cache.buffer.handle()),
        v_offset(cache.v_offset),
        block_stride(std::max<std::int64_t>(cache.block_stride, 8)),  // one block may say 0
        token_stride(cache.token_stride),
        head_stride(cache.head_stride),
        key_dim_stride(cache.key_dim_stride),
        scales(cache.scales.handle()),
        scale_stride(scale_stride_of(cache)) {}
  /// Of rows of `num_kv_heads` x `head_size`. Throws kInvalidArgument for places that kernels do
  /// not load from.
  KVView(const TensorRef& key, const TensorRef& value, std::int32_t num_kv_heads,
         std::int32_t head_size)
      : k(key.buffer),
        k_offset(key.offset),
        v(value.buffer),
        v_offset(value.offset),
        token_stride(checked_key_stride(key, value, std::int64_t{num_kv_heads} * head_size)),
        head_stride(head_size) {}

  /// Of rows: throws kInvalidArgument unless that many lie in the buffers.
  void check_length(std::int64_t count, std::int64_t row, DType dtype) const {
    check_rows({k, dtype}, {k_offset, count, token_stride, row}, "key");
    check_rows({v, dtype}, {v_offset, count, token_stride, row}, "value");
  }

  void describe(ClaCall& args) const {
    args.k_offset = k_offset;
    args.v_offset = v_offset;
    args.block_stride = block_stride;
    args.token_stride = token_stride;
    args.head_stride = head_stride;
    args.key_dim_stride = key_dim_stride;
    args.scale_stride = scale_stride;
  }
};

}  // namespace clattn::detail
