// What `clattn tune` makes of batches and candidates that fail, on workloads that run nothing.
#include <gtest/gtest.h>

#include <chrono>
#include <clattn/clattn.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/attention_case.hpp"
#include "opencl/runtime.hpp"
#include "program/tune/race.hpp"
#include "support/error_text.hpp"
#include "tuning/tuning_table.hpp"

namespace test_tune_race {

using clattn::Error;
using clattn::ErrorCode;
using clattn::cli::Deviation;
using clattn::cli::Proof;
using clattn::cli::Trial;
using clattn::cli::TrialState;
using clattn::cli::TuneClock;
using clattn::cli::TuneRace;
using clattn::cli::TuneTarget;
using clattn::cli::Workload;

/// Always takes the same time; `wrong`: the outputs are.
class Idle final : public Workload {
 public:
  explicit Idle(double seconds = 1e-3, bool wrong = false) : seconds_(seconds), wrong_(wrong) {}
  double run(int) override { return seconds_; }
  Deviation verify() override { return wrong_ ? Deviation() : right(); }
  static Deviation right() {
    Deviation deviation;
    deviation.compared = 1;
    return deviation;
  }

 private:
  double seconds_;
  bool wrong_;
};

std::unique_ptr<Workload> idle() {
  return std::make_unique<Idle>();
}

/// A target whose second batch throws `error`.
TuneTarget target_with(const Error& error) {
  TuneTarget target;
  target.name = "target";
  target.key.role = "decode";
  target.key.head_size = 64;
  target.key.group = 4;
  target.kernel = [] { return std::nullopt; };
  target.check = [] { return Idle::right(); };
  target.workloads = {idle, [error]() -> std::unique_ptr<Workload> { throw Error(error); }};
  return target;
}

/// One whose rows no other test reads.
std::shared_ptr<clattn::Context> own_context() {
  const auto& shared = attention_test::all_contexts().at(0);
  return clattn::Context::adopt(shared->handle(), shared->device());
}

TuneClock::time_point later() {
  return TuneClock::now() + std::chrono::minutes(5);
}

/// What the n-th workload that a race makes is like.
struct Made {
  double seconds;
  bool wrong = false;
  std::optional<Error> error{};
};

/// A race of a target of one batch, whose first default takes a second; the rest as `script` says.
class ScriptedRace {
 public:
  explicit ScriptedRace(std::vector<Made> script) : script_(std::move(script)) {
    script_.insert(script_.begin(), {1});
    target_ = target_with({ErrorCode::kUnsupported, ""});
    target_.workloads = {[this]() -> std::unique_ptr<Workload> {
      const Made& made = script_.at(made_++);
      if (made.error) throw Error(*made.error);
      return std::make_unique<Idle>(made.seconds, made.wrong);
    }};
    race_.emplace(own_context(), target_, later());
  }
  /// Of a candidate that was so many times as fast as the default before.
  Proof prove(double speed_up) {
    return race_->prove({.row = target_.key, .state = TrialState::kTimed, .speed_up = speed_up});
  }
  TuneRace& race() { return *race_; }
  bool is_over() const { return made_ == script_.size(); }

 private:
  std::vector<Made> script_;
  std::size_t made_ = 0;
  TuneTarget target_;
  std::optional<TuneRace> race_;
};

/// The costs of a target, such as predicted ones of a card, stand while it is searched.
TEST(TuneRaceDevice, PlansCountWithTheTargetsCosts) {
  const auto context = own_context();
  TuneTarget target = target_with({ErrorCode::kUnsupported, ""});
  target.workloads = {idle};
  target.costs.resize(1);
  target.costs[0].costs.read_gbs = 1;
  std::vector<std::size_t> seen;
  target.check = [&] {
    seen.push_back(context->runtime().tuning().table->user().costs.size());
    return Idle::right();
  };
  TuneRace race(context, target, later());
  static_cast<void>(race.run(target.key, 1));
  EXPECT_EQ(seen, (std::vector<std::size_t>{1, 1}));
}

TEST(TuneRaceDevice, NoiseIsWhatTheDefaultWinsOrLosesAgainstItself) {
  ScriptedRace scripted({{0.8}, {1.25}, {1}, {9}, {1, true}});
  EXPECT_NEAR(scripted.race().noise(3), 1.25, 1e-9);
  EXPECT_NEAR(scripted.race().noise(3), 1.25, 1e-9);
  EXPECT_NEAR(scripted.race().noise(3), 1, 1e-9);
  EXPECT_GE(scripted.race().noise(3), 1.3) << "so slow that it is not timed to the end";
  EXPECT_EQ(test::error_text([&] { scripted.race().noise(3); }, ErrorCode::kUnsupported),
            "the default differs from the oracle on the timed batch");
}

/// A proof's turns: the default anew, the candidate, the default against itself; twice.
TEST(TuneRaceDevice, ALeaderWithinTheNoiseIsRefused) {
  ScriptedRace once({{1}, {1 / 1.2}, {1 / 1.25}});
  Proof proof = once.prove(1.5);
  EXPECT_FALSE(proof.won);
  EXPECT_NEAR(proof.speed_up, 1.2, 1e-9);
  EXPECT_NEAR(proof.noise, 1.25, 1e-9);
  EXPECT_EQ(proof.note, "");
  EXPECT_TRUE(once.is_over());
  ScriptedRace twice({{1}, {1 / 1.3}, {1 / 1.1}, {1}, {1 / 1.08}, {1}});
  proof = twice.prove(1.5);
  EXPECT_FALSE(proof.won) << "the noise of its first turn counts in its second";
  EXPECT_TRUE(twice.is_over());
  ScriptedRace slow({{1}, {1 / 1.01}});
  EXPECT_FALSE(slow.prove(1.5).won) << "too small a gain";
  EXPECT_TRUE(slow.is_over());
}

TEST(TuneRaceDevice, ALeaderIsNotPunishedForTheNoiseOfAnother) {
  ScriptedRace scripted({{1},
                         {1 / 1.2},
                         {1 / 1.3},  // a burst: refused
                         {1},
                         {1 / 1.2},
                         {1 / 1.01},
                         {1},
                         {1 / 1.15},
                         {1 / 1.01}});
  const Proof first = scripted.prove(1.5), second = scripted.prove(1.4);
  EXPECT_FALSE(first.won);
  EXPECT_NEAR(first.noise, 1.3, 1e-9);
  EXPECT_TRUE(second.won);
  EXPECT_NEAR(second.speed_up, 1.15, 1e-9);
  EXPECT_NEAR(second.noise, 1.01, 1e-9);
  EXPECT_NEAR(second.row.time_us, 1e6 / 1.15, 1e-3);
  EXPECT_TRUE(scripted.is_over());
}

TEST(TuneRaceDevice, AProofTellsWhatFailedAndTheNextOneMayWin) {
  const Error full(ErrorCode::kOpenCL, "no room", CL_MEM_OBJECT_ALLOCATION_FAILURE);
  const Made failed{.seconds = 0, .error = full};
  ScriptedRace scripted({failed,  // the default anew
                         {1},
                         failed,  // the candidate
                         {1},
                         {1 / 1.2},
                         failed,  // the default against itself
                         {1},
                         {1 / 1.2},
                         {1, true},  // which is wrong
                         {1},
                         {1 / 1.2, true},  // as the candidate may be
                         {1},
                         {1 / 1.2},
                         {1},
                         {1},
                         {1 / 1.2},
                         {1}});
  for (int i = 0; i < 3; ++i) {
    const Proof proof = scripted.prove(1.5);
    EXPECT_FALSE(proof.won);
    EXPECT_EQ(proof.note, "no room");
  }
  EXPECT_EQ(scripted.prove(1.5).note, "the default differs from the oracle on the timed batch");
  EXPECT_EQ(scripted.prove(1.5).note, "differs from the oracle on the timed batch");
  EXPECT_TRUE(scripted.prove(1.5).won);
  EXPECT_TRUE(scripted.is_over());
}

TEST(TuneRaceDevice, LeavesOutBatchesForWantOfMemoryAndTellsOtherErrors) {
  const auto context = own_context();
  const Error full[] = {{ErrorCode::kUnsupported, "a buffer of 9 bytes"},
                        {ErrorCode::kOpenCL, "no room", CL_MEM_OBJECT_ALLOCATION_FAILURE},
                        {ErrorCode::kOpenCL, "no host memory", CL_OUT_OF_HOST_MEMORY}};
  for (const Error& error : full) {
    const TuneTarget target = target_with(error);
    EXPECT_EQ(TuneRace(context, target, later()).left_out(), error.what());
    TuneTarget nothing = target;
    nothing.workloads.erase(nothing.workloads.begin());
    EXPECT_EQ(test::error_text([&] { TuneRace(context, nothing, later()); }, error.code()),
              error.what());
  }
  const Error broken[] = {{ErrorCode::kOpenCL, "the device is gone", CL_DEVICE_NOT_AVAILABLE},
                          {ErrorCode::kInvalidArgument, "scale is nan"}};
  for (const Error& error : broken) {
    const TuneTarget target = target_with(error);
    EXPECT_EQ(test::error_text([&] { TuneRace(context, target, later()); }, error.code()),
              error.what());
  }
}

TEST(TuneRaceDevice, ACandidateThatCannotBeRunHasFailed) {
  const auto context = own_context();
  int checks = 0;
  TuneTarget target = target_with({ErrorCode::kUnsupported, "too large"});
  target.check = [&checks] {
    if (++checks == 1) return Idle::right();  // the default's
    throw Error(ErrorCode::kOpenCL, "enqueueing failed", CL_OUT_OF_RESOURCES);
  };
  TuneRace race(context, target, later());
  const Trial trial = race.run(target.key, 1);
  EXPECT_EQ(trial.state, TrialState::kFailed);
  EXPECT_EQ(trial.note, "enqueueing failed");
}

}  // namespace test_tune_race
