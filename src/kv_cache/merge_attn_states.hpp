#pragma once

#include <clattn/cache_ops.hpp>

#include "kv_cache/op_kernel.hpp"

namespace clattn::detail {

// merge_attn_states() in two steps, for callers that merge in every step: finding the kernel
// allocates, enqueueing it does not.

/// `config`: dtype, output_dtype and lse_base count.
OpKernel merge_kernel(const Context& context, const MergeAttnStates& config);
void enqueue_merge(const OpKernel& kernel, cl_command_queue queue, const MergeAttnStates& config,
                   const OutputWithLse& merged, const OutputWithLse& prefix,
                   const OutputWithLse& suffix, Event* event);

}  // namespace clattn::detail
