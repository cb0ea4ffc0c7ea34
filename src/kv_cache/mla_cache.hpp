#pragma once

#include <clattn/mla.hpp>

#include "capture/capture.hpp"
#include "kv_cache/op_kernel.hpp"

namespace clattn::detail {

/// The kernel of concat_and_cache_mla() for tensors and caches of these types.
OpKernel concat_mla_kernel(const Context& context, DType dtype, DType cache_dtype);

/// Throws kInvalidArgument for an illegal cache, and for slots and rows outside of their buffers.
void check_concat_mla(const LatentWrite& write);

/// Checks, binds and enqueues; `kernel` was made for the types of `write`. Allocates nothing.
void enqueue_concat_mla(const OpKernel& kernel, cl_command_queue queue, const LatentWrite& write,
                        Event* event);

}  // namespace clattn::detail
