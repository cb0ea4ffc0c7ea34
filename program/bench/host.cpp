#include <chrono>
#include <map>
#include <string>

#include "program/bench/workload.hpp"
#include "program/common/statistics.hpp"

namespace clattn::cli {
namespace {

/// From nothing to the first output: context, capabilities, programs (from the caches that the
/// machine has by now), cache, metadata, one forward. Of it the forward alone, what it builds
/// included: first_step; the same after warm_up(): warmed_step.
class StartupWorkload final : public Workload {
 public:
  explicit StartupWorkload(const BenchTask& task) : options_(task.options), shape_(task.shape) {
    options_.rotate_bytes = 0;
    if (shape_.suite != "startup") most_launches = 1;  // what is not measured takes far longer
  }

  double run(int launches) override {
    double seconds = 0;
    for (int i = 0; i < launches; ++i) {
      const auto start = std::chrono::steady_clock::now();
      step_ = make_attention_workload({Context::create(options_.device), options_, shape_});
      step_->run(1);
      seconds += shape_.suite == "startup" ? seconds_since(start) : step_->first_seconds;
    }
    backend = step_->backend;
    kernels = step_->kernels;
    return seconds / launches;
  }

  Deviation verify() override { return step_->verify(); }

 private:
  BenchOptions options_;
  BenchShape shape_;
  std::unique_ptr<Workload> step_;
};

}  // namespace

std::unique_ptr<Workload> make_startup_workload(const BenchTask& task) {
  return std::make_unique<StartupWorkload>(task);
}

std::unique_ptr<Workload> make_workload(const BenchTask& task) {
  static const std::map<std::string, MakeWorkload*> makers = {
      {"decode", make_attention_workload},
      {"prefill", make_attention_workload},
      {"mixed", make_attention_workload},
      {"spec", make_attention_workload},
      {"cache", make_cache_workload},
      {"merge", make_merge_workload},
      {"metadata", make_metadata_workload},
      {"startup", make_startup_workload},
      {"first_step", make_startup_workload},
      {"warmed_step", make_startup_workload},
      {"step", make_step_workload},
      {"replay", make_step_workload},
      {"lengths", make_lengths_workload},
      {"mixed_replay", make_mixed_replay_workload},
      {"gdn_decode", make_recurrent_workload},
      {"gdn_prefill", make_recurrent_workload},
      {"conv", make_recurrent_workload}};
  return makers.at(task.shape.suite)(task);
}

}  // namespace clattn::cli
