#pragma once

#include <clattn/attention.hpp>
#include <memory>

namespace clattn::detail {

/// Attention over pages that are gathered first, a request at a time, by matrix products of another
/// library (clblast_gemm.hpp): kernels_cl/gathered_attention.cl. `config` was validated. Products
/// are f32, whatever the tensors' types. Enqueues by itself, which cannot be recorded.
std::shared_ptr<const AttentionImpl> make_gathered_impl(std::shared_ptr<Context> context,
                                                        const AttentionConfig& config);

}  // namespace clattn::detail
