#pragma once

#include <chrono>
#include <clattn/tuning.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "program/tune/target.hpp"

namespace clattn::cli {

using TuneClock = std::chrono::steady_clock;

/// Thrown by a race whose time is over, between two of its steps.
struct OutOfTime {};

/// What became of a candidate.
enum class TrialState : std::uint8_t {
  kTimed,
  kSlow,    ///< given up after the warm-up: far behind the default
  kUnfit,   ///< the device does not take it
  kWrong,   ///< differs from the oracle; never timed
  kFailed,  ///< could not be run; the note has the error
};

struct Trial {
  TuningRow row;  ///< with what was measured
  TrialState state = TrialState::kUnfit;
  double speed_up = 0;  ///< over the default, geometric mean of the batches
  double rate = 0;      ///< of the last batch, in GB/s or GFLOP/s
  std::string note{};   ///< why not
};

/// A new row has to beat the default by more than this, and by more than the default beats itself.
inline constexpr double kLeastGain = 1.02;

/// What became of a candidate that had to win again.
struct Proof {
  TuningRow row;  ///< with what its last win measured
  bool won = false;
  double speed_up = 0;  ///< over the default, the least of all times that it ran
  double noise = 1;     ///< the default over itself, the most of the times that this was timed
  std::string note{};   ///< what ended the proof before it could be lost, if anything did
};

/// Races the candidates of a target against what the library uses without them.
class TuneRace {
 public:
  /// Builds, checks and warms the default. Throws kUnsupported where it cannot run. This and all
  /// that follows throws OutOfTime after the deadline.
  TuneRace(std::shared_ptr<Context> context, const TuneTarget& target,
           TuneClock::time_point deadline);
  void set_deadline(TuneClock::time_point deadline) { deadline_ = deadline; }
  void check_time() const {
    if (TuneClock::now() > deadline_) throw OutOfTime{};
  }

  /// Checks a candidate, then times it if it is right: `rounds` rounds of default and candidate in
  /// turns, so that a change of the machine's speed hits both; medians of the rounds' ratios.
  Trial run(const TuningRow& row, int rounds);
  /// How many times as fast as itself the default seems to be, or its inverse if that is more: at
  /// least 1. Timed as a candidate is. Throws kUnsupported where its outputs are wrong.
  double noise(int rounds);
  /// The best of many noisy candidates look better than they are, so that one has to win twice
  /// more, each time against tensors made anew, and by more than the default then wins or loses
  /// against itself: machines that others share vary by more than most tiles do. What fails
  /// meanwhile is the proof's note.
  Proof prove(const Trial& leader);

  /// Makes the default's tensors anew: where they happen to lie may favour or harm it. Leaves out
  /// batches that the device has no memory for, unless it has none for any; throws
  /// other errors.
  void refresh();
  /// Why a batch was left out; empty if none was.
  const std::string& left_out() const { return left_out_; }

  /// The default, as a trial of itself.
  const Trial& base() const { return base_; }
  const std::string& unit_name() const { return unit_name_; }

 private:
  /// A batch of the default, or of a candidate.
  struct Entrant {
    std::unique_ptr<Workload> workload;
    int launches = 1;    ///< that fill a round
    double seconds = 0;  ///< of one launch, after the warm-up
  };
  Entrant enter(const std::function<std::unique_ptr<Workload>()>& make) const;
  std::string_view misfit_of(const TuningRow& row) const;
  /// Times what the context's tuning chooses now.
  void time(Trial& trial, int rounds);

  std::shared_ptr<Context> context_;
  const TuneTarget& target_;
  TuneClock::time_point deadline_;
  std::vector<Entrant> defaults_;
  std::vector<std::size_t> batches_;  // of the target's workloads: those that fit the device
  Trial base_;
  std::string unit_name_, left_out_;
};

}  // namespace clattn::cli
