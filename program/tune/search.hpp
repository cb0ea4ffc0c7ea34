#pragma once

#include <fmt/chrono.h>
#include <clattn/tuning.hpp>

#include <cstddef>
#include <ctime>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "program/tune/race.hpp"

namespace clattn::cli {

/// Says of a row by which version, and when (YYYY-MM-DD of the world's time), it was measured.
template <typename Row>
void stamp(Row& row) {
  row.version = CLATTN_VERSION;
  row.date = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)));
}

/// One target's search: the rows of variants.inc as they are, then their other tiles. Ends at its
/// deadline, but for a step that has begun.
class TuneSearch {
 public:
  /// Builds and checks the default. Throws OutOfTime, and what TuneRace throws.
  TuneSearch(std::shared_ptr<Context> context, const TuneTarget& target,
             TuneClock::time_point deadline);

  /// Returns the winner; nothing if the default stays.
  std::optional<TuningRow> run();
  /// Whether a candidate ran against the clock; a target without one is not tuned.
  bool raced() const;
  /// What became of the candidates instead.
  std::string why_not_raced() const;
  void print() const;

 private:
  void try_row(const TuningRow& row);
  std::optional<TuningRow> confirm();
  std::vector<const Trial*> by_speed() const;
  void print_line(const Trial& trial) const;
  std::size_t count(TrialState state) const;

  std::shared_ptr<Context> context_;
  const TuneTarget& target_;
  TuneClock::time_point deadline_;
  TuneRace race_;
  Trial best_;
  std::vector<Trial> trials_;
  std::set<std::string> seen_;
  std::size_t num_candidates_ = 0, num_tried_ = 0, num_untried_ = 0;
  std::string verdict_;
};

}  // namespace clattn::cli
