#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <clattn/clattn.hpp>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"
#include "cli/statistics.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// The host's cost of launching a decode step of 32 layers, by calls (suite step) or by replaying
/// their recording (suite replay). Steps of all kinds take turns, so that what disturbs the
/// machine disturbs all; the row says what the others took. The device's time is waited for
/// outside the measure; metadata is the suite of its own.
class StepWorkload final : public Workload {
 public:
  StepWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
               const BenchShape& shape, bool replay)
      : cache_(make_rotating_cache(context, options, shape)),
        batch_(shape, cache_.pages_of_set(0)),
        queue_(context->create_queue()),
        state_(context, *cache_.backend, shape.model.config(),
               builder_options(shape, cache_.cache.num_blocks)),
        impl_(cache_.backend->make_impl(context, shape.model.config())),
        eager_builder_(cache_.backend->make_builder(
            context, shape.model.config(), builder_options(shape, cache_.cache.num_blocks))),
        replay_(replay) {
    const AttentionConfig config = shape.model.config();
    const auto rows = static_cast<std::size_t>(shape.num_tokens()) *
                      static_cast<std::size_t>(config.num_heads) *
                      static_cast<std::size_t>(config.head_size);
    const std::size_t bytes = rows * element_size_bytes(config.dtype);
    query_ = context->allocate(bytes);
    TiledRandom(config.dtype, 5).fill(queue_, query_, rows);
    TiledRandom(config.cache_dtype(), 6)
        .fill(queue_, cache_.cache.buffer,
              cache_.cache.buffer.size_bytes() / element_size_bytes(config.cache_dtype()));
    eager_out_ = context->allocate(bytes);
    replay_out_ = context->allocate(bytes);
    const auto capturing = state_.graph_capture(shape.num_reqs());
    const auto& recorded = state_.graph_capture_get_metadata_for_batch(queue_, shape.num_reqs());
    graph_ = record(recorded, ReplayMode::kAuto);
    listed_ = record(recorded, ReplayMode::kLaunchList);
    try {
      buffered_ = record(recorded, ReplayMode::kCommandBuffer);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
    }
    state_.prepare_graph_input_buffers(queue_, shape.num_reqs(), batch_.metadata());
    eager_ = &eager_builder_->build(queue_, batch_.metadata());
    std::vector<LaunchRecord> records;
    impl_->forward(queue_, {query_.handle()}, cache_.cache, *eager_, {eager_out_.handle()}, nullptr,
                   nullptr, &records);
    eager_launches_ = kLayers * (records.size() + 1);  // and the cache's
    queue_.finish();
    backend = cache_.backend->name();
    fewest_launches = 70;  // of each kind: three rounds make 200
  }

  double run(int launches) override {
    for (const Buffer* out : {&replay_out_, &eager_out_})
      queue_.fill(*out, kPoison, 0, out->size_bytes() / 4 * 4);
    queue_.finish();
    std::vector<double> by_calls, by_list, by_buffer;
    for (int i = 0; i < launches; ++i) {
      by_calls.push_back(seconds_of([&] { launch(*eager_, eager_out_); }));
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

  /// Both ways must write every word, and give the same bits.
  Deviation verify() override {
    std::vector<std::byte> eager(eager_out_.size_bytes()), replayed(replay_out_.size_bytes());
    queue_.read(eager_out_, eager);
    queue_.read(replay_out_, replayed);
    Deviation deviation;
    deviation.add(eager == replayed ? 0 : 1, 0, 0.5);
    for (std::size_t at = 0; at + sizeof(kPoison) <= eager.size(); at += sizeof(kPoison)) {
      deviation.add(std::memcmp(&eager[at], &kPoison, sizeof(kPoison)) == 0 ? 1 : 0, 0, 0.5);
    }
    return deviation;
  }

 private:
  static constexpr int kLayers = 32;

  template <typename Action>
  double seconds_of(const Action& action) const {
    const auto start = Clock::now();
    action();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    queue_.finish();
    return seconds;
  }

  Graph record(const AttentionMetadata& metadata, ReplayMode mode) const {
    GraphCapture capture(queue_, mode);
    launch(metadata, replay_out_);
    return capture.end();
  }

  void launch(const AttentionMetadata& metadata, const Buffer& out) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      impl_->write_kv_cache(queue_, {query_.handle()}, {query_.handle()}, cache_.cache, metadata);
      impl_->forward(queue_, {query_.handle()}, cache_.cache, metadata, {out.handle()});
    }
  }

  RotatingCache cache_;
  BenchBatch batch_;
  Queue queue_;
  AttentionState state_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::unique_ptr<AttentionMetadataBuilder> eager_builder_;
  Buffer query_, eager_out_, replay_out_;
  const AttentionMetadata* eager_ = nullptr;
  std::size_t eager_launches_ = 0;
  Graph graph_, listed_;
  std::optional<Graph> buffered_;
  bool replay_;
};

}  // namespace

std::unique_ptr<Workload> make_step_workload(const std::shared_ptr<Context>& context,
                                             const BenchOptions& options, const BenchShape& shape) {
  return std::make_unique<StepWorkload>(context, options, shape, false);
}

std::unique_ptr<Workload> make_replay_workload(const std::shared_ptr<Context>& context,
                                               const BenchOptions& options,
                                               const BenchShape& shape) {
  return std::make_unique<StepWorkload>(context, options, shape, true);
}

}  // namespace clattn::cli
