#pragma once

#include <clattn/prepare_qkv.hpp>

#include "tensors.hpp"

namespace clattn::python {

/// The keywords of prepare_qkv(); `sizes`: those of a session's layer, which has cache and slots,
/// instead of the caller's. Unknown ones are refused.
PrepareQKV prepare_of(CallTensors& tensors, const nb::kwargs& given,
                      const AttentionConfig* sizes = nullptr);

}  // namespace clattn::python
