#pragma once

#include <functional>
#include <memory>

#include "tensors.hpp"

namespace clattn::python {

/// The tensors of a forward() as Python gives them, None where there is none.
struct PythonTensors {
  nb::handle query;
  nb::handle key;
  nb::handle value;
  nb::handle output;
  nb::handle lse;
  nb::handle custom_mask;
};

/// Takes them, runs `call` without the interpreter, and waits if some are arrays.
Event forward_with(const Context& context, const Queue& queue, const AttentionConfig& config,
                   const PythonTensors& given,
                   const std::function<void(const AttentionTensors&, ForwardOptions)>& call);

/// An impl, and the context in which arrays become buffers.
struct Impl {
  std::shared_ptr<Context> context;
  std::shared_ptr<const AttentionImpl> impl;
};

}  // namespace clattn::python
