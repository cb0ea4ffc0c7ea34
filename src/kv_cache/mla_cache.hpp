#pragma once

#include <clattn/mla.hpp>

#include "kernels/launch/cache_write.hpp"
#include "kv_cache/op_kernel.hpp"

namespace clattn::detail {

/// The kernel of concat_and_cache_mla() for tensors and caches of these types.
OpKernel concat_mla_kernel(const Context& context, DType dtype, DType cache_dtype);

/// What concat_and_cache_mla() stores where.
struct LatentWrite {
  TensorRef kv_c = {};
  TensorRef k_pe = {};
  DType dtype = DType::kF16;
  const MLACache& cache;
  SlotSource slots;
};
/// Checks, binds and enqueues; `kernel` was made for the types of `write`. Allocates nothing.
void enqueue_concat_mla(const OpKernel& kernel, cl_command_queue queue, const LatentWrite& write,
                        Event* event);

}  // namespace clattn::detail
