#include <algorithm>
#include <array>
#include <clattn/cache_ops.hpp>
#include <cmath>
#include <span>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// merge_attn_states over a batch's tokens: two outputs and LSEs read, one written. Launches take
/// turns with runs of rows.
class MergeWorkload final : public Workload {
 public:
  explicit MergeWorkload(const BenchTask& task)
      : context_(task.context),
        queue_(context_->create_queue()),
        config_{.num_tokens = task.shape.num_tokens(),
                .num_heads = task.shape.model.config.num_heads,
                .head_size = task.shape.model.config.output_head_size(),
                .dtype = task.shape.model.config.dtype},
        rows_(to_size(config_.num_tokens) * to_size(config_.num_heads)),
        width_(to_size(config_.head_size)) {
    const std::size_t row_bytes = width_ * element_size_bytes(config_.dtype) + sizeof(float);
    const DeviceCapabilities& device = context_->capabilities();
    const std::size_t room = std::min(task.options.rotate_bytes / 3, room_of(device, 8));
    num_sets_ = std::max<std::size_t>(room / (rows_ * row_bytes), 1);
    for (std::size_t i = 0; i < states_.size(); ++i) {
      State& state = states_[i];
      state.out =
          context_->allocate(num_sets_ * rows_ * width_ * element_size_bytes(config_.dtype));
      state.lse = context_->allocate(num_sets_ * rows_ * sizeof(float));
      if (i == 0) continue;  // the merged one
      source(i).fill(queue_, state.out);
      lses(i).fill(queue_, state.lse);
    }
    work.bytes = 3.0 * static_cast<double>(rows_ * row_bytes);
    touched_bytes = 3 * num_sets_ * rows_ * row_bytes;
    kernels = {{.name = "merge_attn_states",
                .role = "merge",
                .work_group_size = cache_op_work_group_size(device)}};
  }

  double run(int launches) override {
    queue_.fill(states_[0].out, kPoison, 0, states_[0].out.size_bytes() / 4 * 4);
    queue_.fill(states_[0].lse, kPoison, 0, states_[0].lse.size_bytes());
    return seconds_each(queue_, launches, [&] {
      set_ = (set_ + 1) % num_sets_;
      merge_attn_states(*context_, queue_, config_, ref(0), ref(1), ref(2));
    });
  }

  /// Some 64 rows by the definition: out = (e^p P + e^s S) / (e^p + e^s), lse = ln(e^p + e^s).
  Deviation verify() override {
    Deviation deviation;
    const std::size_t step = std::max<std::size_t>(rows_ / 64, 1);
    for (std::size_t row = 0; row < rows_; row += step) {
      const std::size_t at = set_ * rows_ + row;
      const double p = lses(1).at(at), s = lses(2).at(at), top = std::max(p, s);
      const double a = std::exp(p - top), b = std::exp(s - top);
      oracle::AttentionResult truth;
      truth.lse = {top + std::log(a + b)};
      for (std::size_t d = at * width_; d < (at + 1) * width_; ++d) {
        const double out = (a * source(1).at(d) + b * source(2).at(d)) / (a + b);
        truth.out.push_back(out);
        // One rounding of the result, and sums and exponentials in f32 on the way.
        truth.bound.push_back(std::abs(oracle::round_to(element_of(config_.dtype), out) - out) +
                              kF32Error * (std::abs(source(1).at(d)) + std::abs(source(2).at(d))));
      }
      truth.weight_rounding.resize(width_);
      std::vector<std::byte> out(width_ * element_size_bytes(config_.dtype));
      std::vector<float> lse(1);
      queue_.read(states_[0].out, out, at * out.size());
      queue_.read(states_[0].lse, std::as_writable_bytes(std::span(lse)), at * sizeof(float));
      deviation.merge(compare(config_.dtype, out, lse, truth));
    }
    return deviation;
  }

 private:
  static constexpr double kF32Error = 0x1p-20;
  struct State {
    Buffer out, lse;
  };

  TiledRandom source(std::size_t state) const {
    return {config_.dtype, 10 + static_cast<std::uint32_t>(state)};
  }
  static TiledRandom lses(std::size_t state) {
    return {DType::kF32, 20 + static_cast<std::uint32_t>(state)};
  }
  OutputWithLse ref(std::size_t state) const {
    const auto at = static_cast<std::int64_t>(set_ * rows_);
    return {.output = {.buffer = states_[state].out.handle(),
                       .offset = at * static_cast<std::int64_t>(width_)},
            .lse = {.buffer = states_[state].lse.handle(), .offset = at}};
  }

  std::shared_ptr<Context> context_;
  Queue queue_;
  MergeAttnStates config_;
  std::size_t rows_, width_;  // of a launch; a row is a head of a token
  std::size_t num_sets_ = 1, set_ = 0;
  std::array<State, 3> states_;  // merged, prefix, suffix
};

}  // namespace

std::unique_ptr<Workload> make_merge_workload(const BenchTask& task) {
  return std::make_unique<MergeWorkload>(task);
}

}  // namespace clattn::cli
