#pragma once

#include <cstdint>

#include "cli/fuzz/recipe.hpp"

namespace clattn::cli {

/// So many cases in a row are calls of one layer: compiling its kernels takes longer than they do.
inline constexpr std::uint64_t kCasesPerLayer = 8;

/// What random cases are drawn from.
struct DrawOptions {
  std::uint32_t seed = 1;
  std::int32_t most_tokens = 400;             ///< keys of a batch, of all its requests together
  KernelFamily family = KernelFamily::kAuto;  ///< kAuto: mostly that, now and then one by name
};

/// Case `index`, a function of these arguments alone.
Recipe draw(const DrawOptions& options, std::uint64_t index);

}  // namespace clattn::cli
