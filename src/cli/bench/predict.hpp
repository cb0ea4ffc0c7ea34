#pragma once

#include <clattn/attention.hpp>
#include <clattn/tuning.hpp>
#include <string>
#include <vector>

#include "cli/bench/cards.hpp"
#include "cli/bench/shapes.hpp"

namespace clattn::cli {

/// The cards of bench/cards/cards.txt and the loops of loops.txt, as built into the program.
const std::vector<Card>& built_in_cards();
const std::vector<LoopCount>& built_in_loops();
/// Tuning-file rows for a device that is a card of cards.txt, until its own are measured; empty for
/// others, and for cards whose costs ship with the library.
std::vector<CostRow> predicted_start(const DeviceCapabilities& capabilities);
/// Throws kInvalidArgument listing the cards if none has this name.
const Card& card_named(const std::string& name);

/// The predicted time of a benchmark row.
struct Prediction {
  double floor_us = 0;  ///< lower bound: the longer of the times at peak memory and product rates
  bool moves = false;   ///< the memory's is the longer
  double expected_us = 0;
  std::vector<std::string> kernels{};
  std::string skipped{};  ///< why there is no prediction; empty = there is one
};
Prediction predict(const Card& card, const std::vector<CostRow>& costs, const BenchShape& shape);

/// Prints the prediction of every shape with an attention launch, then the tuning-file rows that
/// the predictions follow from.
void print_predictions(const Card& card, const std::vector<BenchShape>& shapes);

}  // namespace clattn::cli
