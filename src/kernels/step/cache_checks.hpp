#pragma once

#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>
#include <span>
#include <type_traits>

#include "capture/packed_pages.hpp"
#include "kernels/choose/variants.hpp"
#include "shared/row_scales.h"

namespace clattn::detail {

/// What every call asks of the cache that it takes: legal numbers, every block inside its buffers,
/// scales as large as its heads ask. Packed caches are asked for sizes above 0 by who compiles
/// kernels for them. Throws kInvalidArgument.
void check_cache(const KVCache& cache);
void check_cache(const PackedPages& cache);
void check_cache(const MLACache& cache);
/// Throws kInvalidArgument unless values of fewer elements than keys follow these.
void check_value_place(const KVCache& cache);

/// A buffer of elements.
struct ElementBuffer {
  cl_mem buffer = nullptr;
  DType dtype = DType::kF32;
};
/// Rows in it, in elements.
struct RowRange {
  std::int64_t offset = 0, count = 0, stride = 0, width = 0;
};
/// Throws kInvalidArgument unless the rows of a tensor lie in its buffer: kernels check
/// no end.
void check_rows(const ElementBuffer& memory, const RowRange& rows, std::string_view name);

/// Throws kInvalidArgument unless a buffer holds `count` elements of a size; `name` is what errors
/// call it.
void require_size(const Buffer& buffer, std::int64_t count, std::size_t element_bytes,
                  std::string_view name);

/// What a layer compiled for `shape` asks beyond that: this shape, a block, and of strided caches
/// places that its kernels can load from.
void check_layer_cache(const KVCache& cache, const KernelShape& shape);
void check_layer_cache(const PackedPages& cache, const KernelShape& shape);
void check_layer_cache(const MLACache& cache, const KernelShape& shape);

/// Exclusive upper bound of a step's page ids: from the builder's limits if stated, else from the
/// ids.
struct BlockBound {
  BlockBound() = default;
  /// `limit` < 0: not stated.
  BlockBound(std::int64_t limit, std::span<const std::int32_t> pages);
  std::int64_t below = 0;
  bool stated = false;
};
/// Throws kInvalidArgument unless a cache of `num_blocks` pages holds every page of the step.
void check_block_ids(const BlockBound& ids, std::int64_t num_blocks);

/// What kernels_cl/core/options.clh calls scale_stride: -1 without scales, 0 per tensor, 1 per
/// head.
template <typename Cache>
cl_int scale_stride_of(const Cache& cache) {
  if (!cache.scales) return -1;
  if constexpr (std::is_same_v<Cache, KVCache>)
    if (cache.row_scales) return -1;  // kernels find them by ClaRowScales
  return cache.scales_per_head ? 1 : 0;
}

/// Where the scales of tokens and heads lie, for kernels.
ClaRowScales row_scales_of(const KVCache& cache);
/// The scales of tokens and heads as a cache of one element a head, for what moves them.
KVCache row_scale_cache(const KVCache& cache);
/// Throws kUnsupported for codes of 4 bits, which have scales in their pages.
void require_whole_bytes(DType dtype);
/// Throws kUnsupported for such a cache where a call cannot take it.
void refuse_row_scales(const KVCache& cache, std::string_view call);

}  // namespace clattn::detail
