#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "program/bench/shapes.hpp"

namespace clattn::cli {

/// A model that commands know by its name.
struct Model {
  BenchModel layer;                ///< without what rows add to it
  std::vector<BenchShape> rows{};  ///< that bench measures
};
/// Those of the built-in shapes, then public models, of which the shape is known and no row.
const std::vector<Model>& models();

/// Why a command does not take a model, as "has no rows"; empty = it does. Null: it takes all.
using WhyNot = std::string_view(const Model& model);
/// The model of this name. Throws kInvalidArgument with the reason if there is none that the
/// command takes, and lists what is legal: the `others` and the models that it takes.
const Model& model_named(const std::string& name, WhyNot* why_not = nullptr,
                         std::vector<std::string> others = {});

}  // namespace clattn::cli
