#pragma once

#include <clattn/device.hpp>
#include <clattn/tuning.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace clattn::cli {

/// Public facts of a card, as bench/cards/cards.txt has and explains them.
struct Card {
  std::string name{}, title{}, device{}, chip{}, unit{};
  double compute_units = 0, cores = 0, simds = 0, slot = 0, mhz = 0;
  double tflops = 0, gbs = 0, local_kib = 0, latency_ns = 0;

  /// What OpenCL would say of it, as far as kernels are chosen by that.
  DeviceCapabilities capabilities() const;
  double slot_ns() const { return slot * 1e3 / mhz; }
};
/// Throws kInvalidArgument "NAME:LINE: field: value, legal: ...".
std::vector<Card> parse_cards(std::string_view text, std::string_view name);

/// The card that a device is by its name, of those of one name the one whose number of compute
/// units is closest; null: none.
const Card* card_of(const std::vector<Card>& cards, const DeviceCapabilities& capabilities);

/// A row of bench/cards/loops.txt: what a kernel's tile loop needs on a chip.
struct LoopCount {
  std::string chip{}, variant{};
  std::int32_t head_size = 0;
  DType dtype = DType::kF16, cache_dtype = DType::kF16;
  double local_bytes = 0, waves = 0, slots = 0;
  double group_waves = 0, keys = 0;  ///< waves of a group, keys that it goes through at once
};
std::vector<LoopCount> parse_loops(std::string_view text, std::string_view name);

/// What a loop makes of a card. A step of a group that has the device to itself takes the longer of
/// its slots and of the way to memory; many groups at once get what slots, loads in flight and,
/// with few rows a key, the memory's rate allow. `concurrent_groups`: tasks that plans take to run
/// at once.
KernelCosts predicted_costs(const Card& card, const LoopCount& loop, double concurrent_groups);

/// The rows of a tuning file that stand for a card: of its chip's loops, and of decode kernels that
/// have none. Empty for chips without loops, whose costs are measured.
std::vector<CostRow> predicted_rows(const Card& card, const std::vector<LoopCount>& loops);

/// Bytes of f16 keys and values of 128 dims that decode keeps in flight, over what the rate and
/// latency of the card's memory ask for; 0: its chip has no such loop.
double decode_in_flight(const Card& card, const std::vector<LoopCount>& loops);

}  // namespace clattn::cli
