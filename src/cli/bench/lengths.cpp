#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <vector>

#include "cli/bench/data.hpp"
#include "cli/common/device_memory.hpp"
#include "cli/common/error.hpp"

namespace clattn::cli {
namespace {

/// A decode step of one layer whose lengths the device knows, beside the same step planned by the
/// host from them: update_seq_lens() or build(), then attention. Cuts are deterministic, so that
/// both have the same bits although the bounds are higher than the lengths. Both take turns; the
/// row is the first and says what the second took.
class LengthsWorkload final : public Workload {
 public:
  explicit LengthsWorkload(const BenchTask& task)
      : config_(task.shape.model.config),
        cache_(make_rotating_cache(task)),
        batch_(task.shape, cache_.pages_of_set(0)),
        queue_(task.context->create_queue()),
        impl_(cache_.backend->make_impl(task.context, config_)),
        errors_(*task.context, queue_) {
    const auto& [context, options, shape] = task;
    BuilderOptions planned = builder_options(shape, cache_.cache.num_blocks);
    planned.split_policy = SplitPolicy::kDeterministic;
    host_ = cache_.backend->make_builder(context, config_, planned);
    planned.device_seq_lens = true;
    by_bounds_ = cache_.backend->make_builder(context, config_, planned);
    metadata_ = &by_bounds_->build(queue_, batch_.metadata());
    for (std::size_t r = 0; r < batch_.seq_lens.size(); ++r) {
      const BenchRequest& request = shape.requests[r];
      batch_.seq_lens[r] = std::max(request.query_len, request.seq_len - kBelowBounds);
    }
    lens_ = upload(*context, queue_, batch_.seq_lens);
    const std::size_t bytes = to_size(shape.num_tokens()) * to_size(config_.num_heads) *
                              to_size(config_.head_size) * element_size_bytes(config_.dtype);
    query_ = context->allocate(bytes);
    TiledRandom(config_.dtype, 5).fill(queue_, query_);
    TiledRandom(config_.cache_dtype(), 6).fill(queue_, cache_.cache.buffer);
    host_out_ = context->allocate(bytes);
    device_out_ = context->allocate(bytes);
    backend = cache_.backend->name();
  }

  double run(int launches) override {
    for (const Buffer* out : {&host_out_, &device_out_})
      queue_.fill(*out, kPoison, 0, out->size_bytes() / 4 * 4);
    const double update = seconds_each(queue_, launches, [&] { take_lengths(); });
    const double on_device = seconds_each(queue_, launches, [&] {
      take_lengths();
      attend(*metadata_, device_out_);
    });
    const double on_host = seconds_each(
        queue_, launches, [&] { attend(host_->build(queue_, batch_.metadata()), host_out_); });
    kernels = {{.name = fmt::format("lengths on the device {:.1f} us, of it update_seq_lens alone "
                                    "{:.1f} us; planned by the host {:.1f} us",
                                    on_device * 1e6, update * 1e6, on_host * 1e6),
                .role = "host"}};
    return on_device;
  }

  /// No length may be refused.
  Deviation verify() override {
    errors_.check(queue_);
    return compare_ways(queue_, host_out_, device_out_);
  }

 private:
  static constexpr std::int32_t kBelowBounds = 8;

  void take_lengths() { update_seq_lens(queue_, *metadata_, {lens_}, errors_); }
  void attend(const AttentionMetadata& metadata, const Buffer& out) const {
    impl_->forward(queue_, {.query = {query_.handle()}, .output = {out.handle()}}, cache_.cache,
                   metadata);
  }

  AttentionConfig config_;
  RotatingCache cache_;
  BenchBatch batch_;
  Queue queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  DeviceErrors errors_;
  std::unique_ptr<AttentionMetadataBuilder> host_, by_bounds_;
  const AttentionMetadata* metadata_ = nullptr;
  Buffer lens_, query_, host_out_, device_out_;
};

}  // namespace

std::unique_ptr<Workload> make_lengths_workload(const BenchTask& task) {
  return std::make_unique<LengthsWorkload>(task);
}

}  // namespace clattn::cli
