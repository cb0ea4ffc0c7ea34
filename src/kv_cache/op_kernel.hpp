#pragma once

#include <clattn/cache_ops.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "capture/capture.hpp"
#include "kernels/choose/variants.hpp"
#include "opencl/runtime.hpp"

namespace clattn::detail {

/// The kernel of a cache operation: one code for all devices, in groups as they like them.
struct OpKernel {
  std::shared_ptr<KernelPool> pool;
  std::size_t group_size = 1;
};

/// `options`: the -D options besides CLA_WG_SIZE and CLA_PTX. Groups have as many work-items as
/// cache_op_work_group_size() says, but at most `most_items`.
OpKernel op_kernel(const Context& context, std::string_view entry, std::string_view file,
                   std::string_view options = {}, std::int32_t most_items = INT32_MAX);

/// "-DCLA_Q_DTYPE=… -DCLA_KV_DTYPE=…": a tensor's type, which must not be quantized, and a cache's.
std::string dtype_options(DType dtype, DType cache_dtype);

/// What writes tokens of `dtype` to a cache. Throws kInvalidArgument for types and sizes that no
/// kernel writes, naming what is legal.
KernelShape cache_write_shape(const KVCache& cache, DType dtype);

/// An event of a call that may enqueue nothing, left empty then.
inline void clear(Event* event) {
  if (event != nullptr) event->reset();
}

/// The kernel of concat_and_cache_mla() for tensors and caches of these types.
OpKernel concat_mla_kernel(const Context& context, DType dtype, DType cache_dtype);

/// Throws kInvalidArgument for an illegal cache, and for slots and rows outside of their buffers.
void check_concat_mla(const LatentWrite& write);

/// Checks, binds and enqueues; `kernel` was made for the types of `write`. Allocates nothing.
void enqueue_concat_mla(const OpKernel& kernel, cl_command_queue queue, const LatentWrite& write,
                        Event* event);

/// With strides. Throws kInvalidArgument for negative ones, and unless the buffer, if there is one,
/// holds the rows of so many tokens.
LseRef checked_lse(LseRef lse, std::int64_t num_tokens, std::int32_t num_heads,
                   std::string_view name);

// merge_attn_states() in two steps, for callers that merge in every step: finding the kernel
// allocates, enqueueing it does not.

/// `config`: dtype, output_dtype and lse_base count.
OpKernel merge_kernel(const Context& context, const MergeAttnStates& config);
void enqueue_merge(const OpKernel& kernel, cl_command_queue queue, const MergeAttnStates& config,
                   const OutputWithLse& merged, const OutputWithLse& prefix,
                   const OutputWithLse& suffix, Event* event);

}  // namespace clattn::detail
