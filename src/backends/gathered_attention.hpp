#pragma once

#include <clattn/attention.hpp>
#include <memory>

namespace clattn::detail {

/// Attention over pages that are gathered first, a request at a time, by matrix products of another
/// library (clblast_gemm.hpp): kernels_cl/gathered_attention.cl. `config` was validated. Products
/// are f32, whatever the tensors' types. Enqueues by itself, which cannot be recorded.
std::shared_ptr<const AttentionImpl> make_gathered_impl(std::shared_ptr<Context> context,
                                                        const AttentionConfig& config);
/// The workspace, of the step's longest request, is the metadata's: builders share none. The first
/// step takes what the limits allow, up to kMaxWorkspaceBytes, beyond which it grows. Throws
/// kUnsupported for options that cut the work.
std::unique_ptr<AttentionMetadataBuilder> make_gathered_builder(
    std::shared_ptr<const AttentionBackend> backend, std::shared_ptr<Context> context,
    const AttentionConfig& config, const BuilderOptions& options);

}  // namespace clattn::detail
