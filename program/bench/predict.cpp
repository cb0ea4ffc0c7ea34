#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "program/bench/cards.hpp"
#include "program/bench/data.hpp"
#include "program/common/built_in.hpp"
#include "program/common/error.hpp"
#include "program/common/statistics.hpp"
#include "program/common/text.hpp"

namespace clattn::cli {
namespace {

bool attends(const BenchShape& shape) {
  constexpr std::array<std::string_view, 4> kSuites = {"decode", "prefill", "mixed", "spec"};
  return std::ranges::find(kSuites, shape.suite) != kSuites.end();
}

/// The predicted time of a benchmark row.
struct Prediction {
  double floor_us = 0;  ///< lower bound: the longer of the times at peak memory and product rates
  bool moves = false;   ///< the memory's is the longer
  double expected_us = 0;
  std::vector<std::string> kernels{};
  std::string skipped{};  ///< why there is no prediction; empty = there is one
};
Prediction predict(const Card& card, const std::vector<CostRow>& costs, const BenchShape& shape) {
  Prediction result;
  const AttentionConfig config = shape.model.config;
  if (config.dtype == DType::kF32) {
    result.skipped = "the card's rate of f32 products is not listed";
    return result;
  }
  try {
    const std::vector<std::int32_t> pages(to_size(count_pages(shape)));
    const BenchBatch batch(shape, pages);
    StepTime time;
    for (const PlannedLaunch& launch :
         predicted_launches(config, card.capabilities(), costs, batch.metadata())) {
      time.add(launch.predicted_us, launch.beside_last);
      result.kernels.push_back(launch.kernel);
    }
    result.expected_us = time.us();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    result.skipped = error.what();
    return result;
  }
  const Work work = attention_work(config, shape.requests);
  const double memory_us = work.bytes * 1e-3 / card.gbs;
  const double products_us = work.flops * 1e-6 / card.tflops;
  result.moves = memory_us >= products_us;
  result.floor_us = std::max(memory_us, products_us);
  result.expected_us = std::max(result.expected_us, result.floor_us);
  return result;
}

}  // namespace

const std::vector<Card>& built_in_cards() {
  static const std::vector<Card> cards =
      parse_cards(text_of(card_files(), "cards.txt"), "cards.txt");
  return cards;
}

const std::vector<LoopCount>& built_in_loops() {
  static const std::vector<LoopCount> loops =
      parse_loops(text_of(card_files(), "loops.txt"), "loops.txt");
  return loops;
}

std::vector<CostRow> predicted_start(const DeviceCapabilities& capabilities) {
  const Card* card = card_of(built_in_cards(), capabilities);
  return card == nullptr ? std::vector<CostRow>{} : predicted_rows(*card, built_in_loops());
}

const Card& card_named(const std::string& name) {
  const std::vector<Card>& cards = built_in_cards();
  const auto found = std::ranges::find(cards, name, &Card::name);
  if (found != cards.end()) return *found;
  throw_invalid("--predict: '{}', legal: {}", name, fmt::join(names_of(cards, &Card::name), ", "));
}

void print_predictions(const Card& card, const std::vector<BenchShape>& shapes) {
  const std::vector<CostRow> costs = predicted_rows(card, built_in_loops());
  fmt::print("PREDICTED, not measured: {}, {:.0f} GB/s, {:.0f} TFLOP/s of 16-bit products\n",
             card.title, card.gbs, card.tflops);
  const double in_flight = decode_in_flight(card, built_in_loops());
  if (in_flight > 0)
    fmt::print("decode keeps at least {:.1f} times as many bytes in flight as memory needs\n",
               in_flight);
  fmt::print("\n{:44} {:>12} {:>12} {:>17}  {}\n", "model/suite/batch", "floor us", "predicted us",
             "floor's share, of", "kernels");
  for (const BenchShape& shape : shapes) {
    if (!attends(shape)) continue;
    const Prediction row = predict(card, costs, shape);
    if (!row.skipped.empty()) {
      fmt::print("{:44} not predicted: {}\n", shape.name(), row.skipped);
      continue;
    }
    fmt::print("{:44} {:12.1f} {:12.1f} {:8.0f}% {:>8}  {}\n", shape.name(), row.floor_us,
               row.expected_us, 100 * row.floor_us / row.expected_us,
               row.moves ? "memory" : "products", fmt::join(row.kernels, " + "));
  }
  if (costs.empty()) return;
  fmt::print("\n# Predicted for {}, by its public facts\n", card.title);
  for (const CostRow& row : costs) fmt::print("{}", format_cost_row(row));
}

}  // namespace clattn::cli
