#include <fmt/format.h>

#include <chrono>
#include <clattn/graph.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/error.hpp"
#include "program/common/statistics.hpp"

namespace clattn::cli {
namespace {

/// The host's cost of launching a decode step of 32 layers, by calls (suite step) or by replaying
/// their recording (suite replay). Steps of all kinds take turns, so that what disturbs the
/// machine disturbs all; the row says what the others took. The device's time is waited for
/// outside the measure; metadata is the suite of its own.
class StepWorkload final : public TwoWays {
 public:
  explicit StepWorkload(const BenchTask& task)
      : TwoWays(task),
        state_(task.context, *cache_.backend, config_, options_),
        eager_builder_(cache_.backend->make_builder(task.context, config_, options_)),
        replay_(task.shape.suite == "replay") {
    const std::int32_t num_reqs = task.shape.num_reqs();
    const auto capturing = state_.graph_capture(num_reqs);
    const auto& recorded = state_.graph_capture_get_metadata_for_batch(queue_, num_reqs);
    graph_ = record(recorded, ReplayMode::kAuto);
    listed_ = record(recorded, ReplayMode::kLaunchList);
    try {
      buffered_ = record(recorded, ReplayMode::kCommandBuffer);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
    }
    state_.prepare_graph_input_buffers(queue_, num_reqs, batch_.metadata());
    eager_ = &eager_builder_->build(queue_, batch_.metadata());
    std::vector<LaunchRecord> records;
    attend(*eager_, one_out_, &records);
    eager_launches_ = kLayers * (records.size() + 1);  // and the cache's
    queue_.finish();
    fewest_launches = 70;  // of each kind: three rounds make 200
  }

  double run(int launches) override {
    poison_outputs();
    queue_.finish();
    std::vector<double> by_calls, by_list, by_buffer;
    for (int i = 0; i < launches; ++i) {
      by_calls.push_back(seconds_of([&] { launch(*eager_, one_out_); }));
      by_list.push_back(seconds_of([&] { listed_.replay(queue_); }));
      if (buffered_) by_buffer.push_back(seconds_of([&] { buffered_->replay(queue_); }));
    }
    const double calls = median(by_calls), list = median(by_list);
    const bool chosen = graph_.uses_command_buffer();
    std::string how = fmt::format(
        "{} layers: {} launches by calls {:.1f} us, replayed as a launch list of {} {:.1f} us{}",
        kLayers, eager_launches_, calls * 1e6, listed_.num_launches(), list * 1e6,
        chosen ? "" : " (chosen)");
    double buffer = 0;
    if (buffered_) {
      buffer = median(by_buffer);
      how +=
          fmt::format(", as a command buffer {:.1f} us{}", buffer * 1e6, chosen ? " (chosen)" : "");
    }
    const double replay = chosen ? buffer : list;
    kernels = {{.name = std::move(how), .role = "host"}};
    return replay_ ? replay : calls;
  }

 private:
  static constexpr int kLayers = 32;

  template <typename Action>
  double seconds_of(const Action& action) const {
    const auto start = std::chrono::steady_clock::now();
    action();
    const double seconds = seconds_since(start);
    queue_.finish();
    return seconds;
  }

  Graph record(const AttentionMetadata& metadata, ReplayMode mode) const {
    GraphCapture capture(queue_, mode);
    launch(metadata, other_out_);
    return capture.end();
  }

  void launch(const AttentionMetadata& metadata, const Buffer& out) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      impl_->write_kv_cache(queue_, {query_.handle()}, {query_.handle()}, cache_.cache, metadata);
      attend(metadata, out);
    }
  }

  AttentionState state_;
  std::unique_ptr<AttentionMetadataBuilder> eager_builder_;
  const AttentionMetadata* eager_ = nullptr;
  std::size_t eager_launches_ = 0;
  Graph graph_, listed_;
  std::optional<Graph> buffered_;
  bool replay_;
};

}  // namespace

std::unique_ptr<Workload> make_step_workload(const BenchTask& task) {
  return std::make_unique<StepWorkload>(task);
}

}  // namespace clattn::cli
