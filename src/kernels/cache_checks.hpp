#pragma once

#include <clattn/kv_cache.hpp>
#include <clattn/mla.hpp>

#include "kernels/variants.hpp"

namespace clattn::detail {

/// What every call asks of the cache that it takes: legal numbers, every block inside its buffers,
/// scales as large as its heads ask. Packed caches are asked for sizes above 0 by who compiles
/// kernels for them. Throws kInvalidArgument.
void check_cache(const KVCache& cache);
void check_cache(const PackedKVCache& cache);
void check_cache(const MLACache& cache);

/// What a layer compiled for `shape` asks beyond that: this shape, a block, and of strided caches
/// places that its kernels can load from.
void check_layer_cache(const KVCache& cache, const KernelShape& shape);
void check_layer_cache(const PackedKVCache& cache, const KernelShape& shape);
void check_layer_cache(const MLACache& cache, const KernelShape& shape);

/// What kernels_cl/lib/options.clh calls scale_stride: -1 without scales, 0 per tensor, 1 per head.
cl_int scale_stride_of(const KVCache& cache);
cl_int scale_stride_of(const PackedKVCache& cache);

}  // namespace clattn::detail
