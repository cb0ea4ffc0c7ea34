#include "program/tune/race.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "program/common/error.hpp"
#include "program/common/statistics.hpp"

namespace clattn::cli {
namespace {

constexpr int kFinalRounds = 15;
constexpr double kRoundSeconds = 0.02;
constexpr double kHopeless = 1.3;  // times the default after the warm-up: not worth timing

/// Whether memory is what holds it: few operations a byte.
bool reads_memory(const Work& work) {
  constexpr double kFlopsPerByte = 32;
  return work.flops < kFlopsPerByte * work.bytes;
}

/// Whether the device is too small or too full for what was asked of it.
bool lacks_memory(const Error& error) {
  if (error.code() == ErrorCode::kUnsupported) return true;
  constexpr cl_int kStatuses[] = {CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_RESOURCES,
                                  CL_OUT_OF_HOST_MEMORY, CL_INVALID_BUFFER_SIZE};
  return error.code() == ErrorCode::kOpenCL &&
         std::ranges::find(kStatuses, error.cl_code()) != std::end(kStatuses);
}

double amount(const Work& work) {
  return reads_memory(work) ? work.bytes : work.flops;
}

}  // namespace

TuneRace::Entrant TuneRace::enter(const std::function<std::unique_ptr<Workload>()>& make) const {
  constexpr double kMost = 2000;
  check_time();
  Entrant entrant{make()};
  check_time();
  entrant.workload->run(1);
  entrant.seconds = std::max(entrant.workload->run(2), 1e-7);
  entrant.launches = static_cast<int>(std::clamp(kRoundSeconds / entrant.seconds, 1.0, kMost));
  return entrant;
}

TuneRace::TuneRace(std::shared_ptr<Context> context, const TuneTarget& target,
                   TuneClock::time_point deadline)
    : context_(std::move(context)), target_(target), deadline_(deadline) {
  check_time();
  set_tuning(*context_, {}, target_.costs);
  base_.row = target.key;
  const Deviation deviation = target.check();
  if (!deviation.passed()) {
    throw_unsupported(
        "the default differs from the oracle by {:.2e}, {:.0f}% of what is allowed; see clattn "
        "check --all",
        deviation.max_error, deviation.worst_share * 100);
  }
  base_.row.error = deviation.max_error;
  refresh();
  const Entrant& last = defaults_.back();
  base_.state = TrialState::kTimed;
  base_.speed_up = 1;
  base_.row.time_us = last.seconds * 1e6;
  base_.rate = amount(last.workload->work) / last.seconds * 1e-9;
  unit_name_ = reads_memory(last.workload->work) ? "GB/s" : "GFLOP/s";
}

void TuneRace::refresh() {
  set_tuning(*context_, {}, target_.costs);
  defaults_.clear();
  batches_.clear();
  left_out_.clear();
  std::optional<Error> refusal;
  for (std::size_t i = 0; i < target_.workloads.size(); ++i) {
    try {
      defaults_.push_back(enter(target_.workloads[i]));
      batches_.push_back(i);
    } catch (const Error& error) {
      if (!lacks_memory(error)) throw;
      refusal = error;
    }
  }
  if (defaults_.empty() && refusal) throw Error(*refusal);
  if (refusal) left_out_ = refusal->what();
}

/// A layer falls back silently on a kernel that fits; a trial of that would prove nothing.
std::string_view TuneRace::misfit_of(const TuningRow& row) const {
  if (row.variant.empty()) return {};
  const std::optional<KernelInfo> kernel = target_.kernel();
  if (kernel && kernel->name == row.variant && kernel->block_rows == row.block_rows &&
      kernel->block_kv == row.block_kv && kernel->work_group_size == row.work_group_size) {
    return {};
  }
  return "does not build or does not fit";
}

Trial TuneRace::run(const TuningRow& row, int rounds) {
  Trial trial{.row = row};
  try {
    set_tuning(*context_, std::span(&row, 1), target_.costs);
    trial.note = misfit_of(row);
    if (!trial.note.empty()) return trial;
    check_time();
    const Deviation deviation = target_.check();
    trial.row.error = deviation.max_error;
    if (!deviation.passed()) {
      trial.state = TrialState::kWrong;
      trial.note = fmt::format("differs from the oracle, {:.0f}% of what is allowed",
                               deviation.worst_share * 100);
      return trial;
    }
    time(trial, rounds);
  } catch (const Error& error) {
    trial.state = TrialState::kFailed;
    trial.note = error.what();
  }
  return trial;
}

double TuneRace::noise(int rounds) {
  set_tuning(*context_, {}, target_.costs);
  Trial trial{.row = base_.row};
  time(trial, rounds);
  if (trial.state == TrialState::kWrong) throw_unsupported("the default {}", trial.note);
  if (trial.state != TrialState::kTimed) return kHopeless;
  return std::max(trial.speed_up, 1 / trial.speed_up);
}

Proof TuneRace::prove(const Trial& leader) {
  Proof proof{.row = leader.row, .speed_up = leader.speed_up};
  try {
    for (int again = 0; again < 2; ++again) {
      refresh();
      const Trial trial = run(leader.row, kFinalRounds);
      proof.note = trial.note;
      if (trial.state != TrialState::kTimed) return proof;
      proof.speed_up = std::min(proof.speed_up, trial.speed_up);
      if (proof.speed_up <= kLeastGain) return proof;
      proof.noise = std::max(proof.noise, noise(kFinalRounds));
      if (proof.speed_up <= proof.noise) return proof;
      proof.row = trial.row;
    }
    proof.won = true;
  } catch (const Error& error) {
    proof.note = error.what();
  }
  return proof;
}

void TuneRace::time(Trial& trial, int rounds) {
  double log_ratio = 0;
  for (std::size_t i = 0; i < defaults_.size(); ++i) {
    Entrant& base = defaults_[i];
    Entrant mine = enter(target_.workloads[batches_[i]]);
    if (mine.seconds > kHopeless * base.seconds &&
        mine.workload->run(mine.launches) > kHopeless * base.workload->run(base.launches)) {
      trial.state = TrialState::kSlow;
      trial.note = "far slower";
      return;
    }
    std::vector<double> ratios, seconds, base_seconds;
    for (int round = 0; round < rounds; ++round) {
      check_time();
      base_seconds.push_back(base.workload->run(base.launches));
      seconds.push_back(mine.workload->run(mine.launches));
      ratios.push_back(seconds.back() / base_seconds.back());
    }
    const Deviation large = mine.workload->verify();
    if (!large.passed()) {
      trial.state = TrialState::kWrong;
      trial.note = "differs from the oracle on the timed batch";
      return;
    }
    log_ratio += std::log(median(ratios));
    const double time = median(seconds);
    trial.row.time_us = time * 1e6;
    trial.rate = amount(mine.workload->work) / time * 1e-9;
    if (i + 1 == defaults_.size()) {
      const double base_time = median(base_seconds);
      base_.row.time_us = base_time * 1e6;
      base_.rate = amount(base.workload->work) / base_time * 1e-9;
    }
  }
  trial.state = TrialState::kTimed;
  trial.speed_up = std::exp(-log_ratio / static_cast<double>(defaults_.size()));
}

}  // namespace clattn::cli
