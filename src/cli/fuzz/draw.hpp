#pragma once

#include <cstdint>

#include "cli/fuzz/recipe.hpp"

namespace clattn::cli {

/// What random cases are drawn from.
struct DrawOptions {
  std::uint32_t seed = 1;
  std::int32_t most_tokens = 400;             ///< keys of a batch, of all its requests together
  KernelFamily family = KernelFamily::kAuto;  ///< kAuto: mostly that, now and then one by name
  /// So many cases in a row are calls of one layer: compiling its kernels takes longer than they
  /// do.
  std::uint64_t layer_calls = 8;
};

/// Case `index`, a function of these arguments alone.
Recipe draw(const DrawOptions& options, std::uint64_t index);

}  // namespace clattn::cli
