#pragma once

#include <functional>

#include "cli/fuzz/recipe.hpp"

namespace clattn::cli {

/// A simpler recipe that fails, too: one change after the other is kept if `fails` still holds,
/// until none is or `most_trials` were made. Fewer and shorter requests, options off, smaller
/// heads.
Recipe shrink(Recipe recipe, const std::function<bool(const Recipe&)>& fails, int most_trials);

}  // namespace clattn::cli
