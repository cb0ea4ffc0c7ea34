#pragma once

#include <string>
#include <vector>

#include "cli/bench_shapes.hpp"
#include "cli/cards.hpp"

namespace clattn::cli {

/// The cards of bench/cards/ as they were built in, and the loops of their chips.
const std::vector<Card>& built_in_cards();
const std::vector<LoopCount>& built_in_loops();
/// Throws kInvalidArgument that lists them.
const Card& card_named(const std::string& name);

/// What a row is predicted to take.
struct Prediction {
  double floor_us = 0;  ///< the longer of what peak rates of memory and products leave it
  bool moves = false;   ///< the memory's is
  double expected_us = 0;
  std::vector<std::string> kernels{};
  std::string skipped{};  ///< why there is none
};
Prediction predict(const Card& card, const std::vector<CostRow>& costs, const BenchShape& shape);

/// Of all rows that attend; then the rows of a tuning file that they were made from.
void print_predictions(const Card& card, const std::vector<BenchShape>& shapes);

}  // namespace clattn::cli
