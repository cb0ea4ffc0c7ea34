#pragma once

#include <clattn/attention.hpp>
#include <memory>

namespace clattn::detail {

/// The impl behind every backend whose cache is K and V blocks addressed by strides: binds a step's
/// metadata to the compiled kernels. `config` was validated by the backend. It holds no context, so
/// that layers of a context with equal configurations share one object.
std::shared_ptr<const AttentionImpl> make_paged_impl(Context& context,
                                                     const AttentionConfig& config);

/// Whether such an impl's kernels run what a builder of `planned` cuts, windows aside; true for
/// other impls. Builds that builder's kernels.
bool runs_plan_of(Context& context, const AttentionImpl& impl, const AttentionConfig& planned);

}  // namespace clattn::detail
