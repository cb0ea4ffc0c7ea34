// What `clattn tune` makes of batches and candidates that fail, on workloads that run nothing.
#include <gtest/gtest.h>

#include <chrono>
#include <clattn/clattn.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/tune_race.hpp"
#include "device/attention_case.hpp"
#include "support/error_text.hpp"

namespace {

using clattn::Error;
using clattn::ErrorCode;
using clattn::cli::Deviation;
using clattn::cli::Trial;
using clattn::cli::TrialState;
using clattn::cli::TuneClock;
using clattn::cli::TuneRace;
using clattn::cli::TuneTarget;
using clattn::cli::Workload;

class Idle final : public Workload {
 public:
  double run(int) override { return 1e-3; }
  Deviation verify() override { return right(); }
  static Deviation right() {
    Deviation deviation;
    deviation.compared = 1;
    return deviation;
  }
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

}  // namespace
