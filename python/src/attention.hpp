#pragma once

#include <clattn/explain.hpp>
#include <functional>
#include <memory>

#include "tensors.hpp"

namespace clattn::python {

/// Elements of a token's tensors; with use_mla key and value are the latent and the rotary part.
struct Widths {
  std::int64_t query = 0;
  std::int64_t key = 0;
  std::int64_t value = 0;
  std::int64_t output = 0;
};
Widths widths_of(const AttentionConfig& config);

/// What a forward() is given in Python; None, or nothing, where there is none.
struct ForwardArguments {
  nb::handle query = {};
  nb::handle key = {};
  nb::handle value = {};
  nb::handle output = {};
  nb::handle lse = {};
  nb::handle custom_mask = {};
  nb::handle output_fp8 = {};
  nb::handle output_scale = {};
  nb::handle launches = {};  ///< a list that gets a LaunchRecord for each kernel
  std::optional<std::int64_t> num_rows = std::nullopt;  ///< nullopt = those of an output array
};

/// Takes them, runs `call` without the interpreter, and waits if some are arrays. Null metadata: a
/// profile run.
Event forward_with(const Context& context, const Queue& queue, const AttentionConfig& config,
                   const AttentionMetadata* metadata, const ForwardArguments& given,
                   const std::function<void(const AttentionTensors&, ForwardOptions)>& call);

/// An impl, and the context in which arrays become buffers.
struct Impl {
  std::shared_ptr<Context> context;
  std::shared_ptr<const AttentionImpl> impl;
};

}  // namespace clattn::python
