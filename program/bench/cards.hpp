#pragma once

#include <clattn/device.hpp>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "program/bench/shapes.hpp"

namespace clattn::cli {

/// Public facts of a card; bench/cards/cards.txt explains the fields and their units.
struct Card {
  std::string name{}, title{}, device{}, chip{}, unit{};
  double compute_units = 0, cores = 0, simds = 0, slot = 0, mhz = 0;
  double tflops = 0, gbs = 0, local_kib = 0, latency_ns = 0;

  /// What OpenCL would report, as far as the choice of kernels depends on it.
  DeviceCapabilities capabilities() const;
  double slot_ns() const { return slot * 1e3 / mhz; }
};
/// Parses cards.txt; `name` is what errors call it. Throws kInvalidArgument
/// "NAME:LINE: field: value, legal: ...".
std::vector<Card> parse_cards(std::string_view text, std::string_view name);

/// The card whose name matches the device's; of several, the one whose number of compute units is
/// closest. Null if there is none.
const Card* card_of(const std::vector<Card>& cards, const DeviceCapabilities& capabilities);

/// A row of bench/cards/loops.txt: what a kernel's tile loop needs on a chip.
struct LoopCount {
  std::string chip{}, variant{}, role{};
  std::int32_t head_size = 0;
  DType dtype = DType::kF16, cache_dtype = DType::kF16;
  double local_bytes = 0, waves = 0, slots = 0;
  double group_waves = 0, keys = 0;  ///< of a group: its waves, and its keys per step
  double rows = 0;                   ///< of queries in its work item
};
std::vector<LoopCount> parse_loops(std::string_view text, std::string_view name);

/// A kernel's costs on a card, from its loop. A step of a group alone on the device takes its issue
/// slots or the memory latency, whichever is longer. Many groups together are bounded by issue
/// slots, by loads in flight and, with few query rows per key, by the memory's rate.
/// `concurrent_groups`: tasks that plans assume to run at once.
KernelCosts predicted_costs(const Card& card, const LoopCount& loop, double concurrent_groups);

/// Tuning-file rows for a card: one or more per loop of its chip, and one for the decode kernels
/// without a counted loop. Empty for chips without loops: their costs were measured.
std::vector<CostRow> predicted_rows(const Card& card, const std::vector<LoopCount>& loops);

/// The fewest bytes that a counted decode loop (heads of 64 and more) keeps in flight, as a
/// multiple of memory rate * latency; 0 if the chip has none.
double decode_in_flight(const Card& card, const std::vector<LoopCount>& loops);

/// The cards of bench/cards/cards.txt and the loops of loops.txt, as built into the program.
const std::vector<Card>& built_in_cards();
const std::vector<LoopCount>& built_in_loops();
/// Tuning-file rows for a device that is a card of cards.txt, until its own are measured; empty for
/// others, and for cards whose costs ship with the library.
std::vector<CostRow> predicted_start(const DeviceCapabilities& capabilities);
/// Throws kInvalidArgument listing the cards if none has this name.
const Card& card_named(const std::string& name);

/// Prints the prediction of every shape with an attention launch, then the tuning-file rows that
/// the predictions follow from.
void print_predictions(const Card& card, const std::vector<BenchShape>& shapes);

}  // namespace clattn::cli
