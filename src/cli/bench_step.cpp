#include <fmt/format.h>

#include <chrono>
#include <clattn/clattn.hpp>
#include <span>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// The host's cost of launching a decode step of 32 layers, by calls (suite step) or by replaying
/// their recording (suite replay). The device's time is waited for outside the measure; metadata is
/// the suite of its own.
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
    GraphCapture capture(queue_);
    launch(recorded, replay_out_);
    graph_ = capture.end();
    state_.prepare_graph_input_buffers(queue_, shape.num_reqs(), batch_.metadata());
    eager_ = &eager_builder_->build(queue_, batch_.metadata());
    queue_.finish();
    backend = cache_.backend->name();
    const std::string_view how = graph_.uses_command_buffer() ? "command buffer" : "launch list";
    kernels = {
        {.name = fmt::format("{} layers, {}", kLayers, replay ? how : "by calls"), .role = "host"}};
  }

  double run(int launches) override {
    queue_.fill(replay_out_, kPoison, 0, replay_out_.size_bytes() / 4 * 4);
    queue_.fill(eager_out_, kPoison, 0, eager_out_.size_bytes() / 4 * 4);
    queue_.finish();
    double seconds = 0;
    for (int i = 0; i < launches; ++i) {
      const auto start = Clock::now();
      if (replay_) {
        graph_.replay(queue_);
      } else {
        launch(*eager_, eager_out_);
      }
      seconds += std::chrono::duration<double>(Clock::now() - start).count();
      queue_.finish();
    }
    return seconds / launches;
  }

  /// Both ways must give the same bits.
  Deviation verify() override {
    if (replay_) {
      launch(*eager_, eager_out_);
    } else {
      graph_.replay(queue_);
    }
    std::vector<std::byte> eager(eager_out_.size_bytes()), replayed(replay_out_.size_bytes());
    queue_.read(eager_out_, eager);
    queue_.read(replay_out_, replayed);
    Deviation deviation;
    deviation.add(eager == replayed ? 0 : 1, 0, 0.5);
    return deviation;
  }

 private:
  static constexpr int kLayers = 32;

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
  Graph graph_;
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
