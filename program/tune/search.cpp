#include "program/tune/search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string_view>
#include <utility>

#include "program/common/progress.hpp"

namespace clattn::cli {
namespace {

constexpr int kRounds = 5;
constexpr std::size_t kRowsShown = 8;
/// Of a target's time; the rest is for the winner to prove itself.
constexpr double kSearchShare = 0.6;

std::string describe(const TuningRow& row) {
  if (row.variant.empty()) return "default";
  return fmt::format("{} {}x{} wg {}", row.variant, row.block_rows, row.block_kv,
                     row.work_group_size);
}

}  // namespace

TuneSearch::TuneSearch(std::shared_ptr<Context> context, const TuneTarget& target,
                       TuneClock::time_point deadline)
    : context_(std::move(context)),
      target_(target),
      deadline_(deadline),
      race_(context_, target, deadline),
      best_(race_.base()) {}

std::optional<TuningRow> TuneSearch::run() {
  const auto now = TuneClock::now();
  race_.set_deadline(
      now + std::chrono::duration_cast<TuneClock::duration>((deadline_ - now) * kSearchShare));
  std::vector<TuningRow> rows = tuning_candidates(*context_, target_.key);
  const auto tiles = std::stable_partition(rows.begin(), rows.end(), [&](const TuningRow& row) {
    return seen_.insert(row.variant).second;  // the first of each variant is its own tile
  });
  // A budget that ends early has then seen some of each kind.
  std::shuffle(tiles, rows.end(), std::mt19937(1));
  num_candidates_ = rows.size();
  for (const TuningRow& row : rows) try_row(row);
  race_.set_deadline(deadline_);
  return confirm();
}

bool TuneSearch::raced() const {
  return count(TrialState::kTimed) + count(TrialState::kSlow) > 0;
}

std::string TuneSearch::why_not_raced() const {
  if (num_candidates_ == 0) return "there is no tile to try";
  const std::pair<std::size_t, std::string_view> fates[] = {
      {count(TrialState::kUnfit), "do not fit"},
      {count(TrialState::kWrong), "are wrong"},
      {count(TrialState::kFailed), "failed"},
      {num_untried_, "were left for want of time"}};
  std::string text = fmt::format("of {} candidates", num_candidates_);
  for (const auto& [number, fate] : fates) {
    if (number > 0) text += fmt::format(", {} {}", number, fate);
  }
  const auto failed = std::ranges::find(trials_, TrialState::kFailed, &Trial::state);
  if (failed != trials_.end()) text += fmt::format("; {}: {}", describe(failed->row), failed->note);
  return text;
}

void TuneSearch::print() const {
  show_progress("");
  const std::vector<const Trial*> timed = by_speed();
  fmt::print("\n{}: {} of {} candidates timed\n", target_.name, timed.size(), num_candidates_);
  fmt::print("  {:48} {:>10} {:>17} {:>9} {:>8}\n", "candidate", "time us", "rate", "error",
             "speed-up");
  print_line(race_.base());
  for (std::size_t i = 0; i < std::min(timed.size(), kRowsShown); ++i) print_line(*timed[i]);
  if (timed.size() > kRowsShown) fmt::print("  and {} slower\n", timed.size() - kRowsShown);
  if (!race_.left_out().empty()) fmt::print("  a batch was left out: {}\n", race_.left_out());
  for (const Trial& trial : trials_) {
    if (trial.state == TrialState::kWrong || trial.state == TrialState::kFailed) {
      fmt::print("  {:48} NOT USED: {}\n", describe(trial.row), trial.note);
    }
  }
  fmt::print("  {} far slower, {} do not fit, {} wrong, {} failed, {} not tried for want of time\n",
             count(TrialState::kSlow), count(TrialState::kUnfit), count(TrialState::kWrong),
             count(TrialState::kFailed), num_untried_);
  fmt::print("  {}\n", verdict_);
  std::fflush(stdout);
}

void TuneSearch::try_row(const TuningRow& row) {
  ++num_tried_;
  try {
    race_.check_time();
    const double left = std::chrono::duration<double>(deadline_ - TuneClock::now()).count();
    show_progress(fmt::format("{}: candidate {} of {}, best so far x{:.3f}, {:.0f} s left: {}",
                              target_.name, num_tried_, num_candidates_, best_.speed_up, left,
                              describe(row)));
    trials_.push_back(race_.run(row, kRounds));
  } catch (const OutOfTime&) {
    ++num_untried_;
    return;
  }
  const Trial& trial = trials_.back();
  if (trial.state == TrialState::kTimed && trial.speed_up > best_.speed_up) best_ = trial;
}

/// The three fastest have to prove themselves, until one does.
std::optional<TuningRow> TuneSearch::confirm() {
  constexpr std::size_t kMostLeaders = 3;
  std::vector<Trial> leaders;
  for (const Trial* trial : by_speed()) {
    if (leaders.size() < kMostLeaders && trial->speed_up > kLeastGain) leaders.push_back(*trial);
  }
  verdict_ = "the default stays";
  double noise = 1;
  try {
    for (const Trial& leader : leaders) {
      show_progress(fmt::format("{}: proving {}", target_.name, describe(leader.row)));
      const Proof proof = race_.prove(leader);
      if (proof.won) {
        verdict_ = fmt::format("winner: {}, x{:.3f} at least", describe(proof.row), proof.speed_up);
        TuningRow row = proof.row;
        stamp(row);
        return row;
      }
      if (!proof.note.empty()) {
        verdict_ += fmt::format("; {}: {}", describe(leader.row), proof.note);
      }
      noise = std::max(noise, proof.noise);
    }
    if (noise > kLeastGain)
      verdict_ +=
          fmt::format("; this machine's noise is up to x{:.3f}, the default against itself", noise);
  } catch (const OutOfTime&) {
    verdict_ = "the default stays: the time ended before a faster one could prove itself";
  }
  return std::nullopt;
}

/// The timed candidates, fastest first.
std::vector<const Trial*> TuneSearch::by_speed() const {
  std::vector<const Trial*> timed;
  for (const Trial& trial : trials_) {
    if (trial.state == TrialState::kTimed) timed.push_back(&trial);
  }
  std::ranges::stable_sort(timed, std::greater{}, &Trial::speed_up);
  return timed;
}

void TuneSearch::print_line(const Trial& trial) const {
  fmt::print("  {:48} {:10.1f} {:9.1f} {:7} {:9.2e} {:7.3f}x\n", describe(trial.row),
             trial.row.time_us, trial.rate, race_.unit_name(), trial.row.error, trial.speed_up);
}

std::size_t TuneSearch::count(TrialState state) const {
  return static_cast<std::size_t>(std::ranges::count(trials_, state, &Trial::state));
}

}  // namespace clattn::cli
