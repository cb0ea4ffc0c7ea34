#pragma once

#include <algorithm>
#include <clattn/session.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "opencl/staging.hpp"

namespace clattn {

/// The layers whose rows a step has prepared, and the positions that all of them read.
class Session::Prepared {
 public:
  Prepared(const Context& context, std::size_t num_layers)
      : layers_(num_layers), upload_(context.runtime()) {}

  void begin_step() {
    layers_.assign(layers_.size(), false);
    is_uploaded_ = false;
  }
  bool has(std::size_t layer) const { return layers_[layer]; }
  void add(std::size_t layer) { layers_[layer] = true; }

  /// The step's positions on the device; the first call uploads them.
  const Buffer& positions(const Queue& queue, std::span<const std::int32_t> positions) {
    if (is_uploaded_) return upload_.buffer();
    // Memory for one more, so that a step without rows has a buffer, too.
    const std::span host = upload_.host(queue, positions.size_bytes() + sizeof(std::int32_t));
    std::ranges::copy(std::as_bytes(positions), host.begin());
    upload_.upload(queue, positions.size_bytes());
    is_uploaded_ = true;
    return upload_.buffer();
  }

 private:
  std::vector<bool> layers_;
  detail::StagedUpload upload_;
  bool is_uploaded_ = false;
};

}  // namespace clattn
