#include <fmt/format.h>

#include <algorithm>
#include <clattn/cache_ops.hpp>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"

namespace clattn::cli {
namespace {

/// A decode step of one layer whose lengths the device knows, against the same step planned by the
/// host from them: update_seq_lens() or build(), then attention. Cuts are deterministic, so that
/// both have the same bits although the bounds are higher than the lengths. Both take turns; the
/// row is the first and says what the second took.
class LengthsWorkload final : public TwoWays {
 public:
  explicit LengthsWorkload(const BenchTask& task) : TwoWays(task), errors_(*task.context, queue_) {
    options_.split_policy = SplitPolicy::kDeterministic;
    host_ = cache_.backend->make_builder(task.context, config_, options_);
    options_.device_seq_lens = true;
    by_bounds_ = cache_.backend->make_builder(task.context, config_, options_);
    metadata_ = &by_bounds_->build(queue_, batch_.metadata());
    for (std::size_t r = 0; r < batch_.seq_lens.size(); ++r) {
      const RequestShape& request = task.shape.requests[r];
      batch_.seq_lens[r] = std::max(request.query_len, request.seq_len - kBelowBounds);
    }
    lens_ = upload(*task.context, queue_, batch_.seq_lens);
  }

  double run(int launches) override {
    poison_outputs();
    const double update = seconds_each(queue_, launches, [&] { take_lengths(); });
    const double on_device = seconds_each(queue_, launches, [&] {
      take_lengths();
      attend(*metadata_, other_out_);
    });
    const double on_host = seconds_each(
        queue_, launches, [&] { attend(host_->build(queue_, batch_.metadata()), one_out_); });
    kernels = {{.name = fmt::format("lengths on the device {:.1f} us, of it update_seq_lens alone "
                                    "{:.1f} us; planned by the host {:.1f} us",
                                    on_device * 1e6, update * 1e6, on_host * 1e6),
                .role = "host"}};
    return on_device;
  }

  /// No length may be refused.
  Deviation verify() override {
    errors_.check(queue_);
    return TwoWays::verify();
  }

 private:
  static constexpr std::int32_t kBelowBounds = 8;

  void take_lengths() { update_seq_lens(queue_, *metadata_, {lens_}, errors_); }

  DeviceErrors errors_;
  std::unique_ptr<AttentionMetadataBuilder> host_, by_bounds_;
  const AttentionMetadata* metadata_ = nullptr;
  Buffer lens_;
};

}  // namespace

std::unique_ptr<Workload> make_lengths_workload(const BenchTask& task) {
  return std::make_unique<LengthsWorkload>(task);
}

}  // namespace clattn::cli
