#include <algorithm>
#include <chrono>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Builds one step's metadata: host time alone, the upload is waited for outside the measure.
class MetadataWorkload final : public Workload {
 public:
  MetadataWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                   const BenchShape& shape)
      : batch_(shape, pages(shape)), queue_(context->create_queue()) {
    const AttentionConfig config = shape.model.config();
    const AttentionBackend& chosen =
        get_attn_backend(config, &context->capabilities(), options.backend);
    builder_ = chosen.make_builder(context, config, builder_options(shape, count_pages(shape)));
    backend = chosen.name();
    kernels = {{.name = "build", .role = "host"}};
  }

  double run(int launches) override {
    double seconds = 0;
    for (int i = 0; i < launches; ++i) {
      const auto start = Clock::now();
      metadata_ = &builder_->build(queue_, batch_.metadata());
      seconds += seconds_since(start);
      queue_.finish();
    }
    return seconds / launches;
  }

  /// Slots and split, worked out by the definition.
  Deviation verify() override {
    Deviation deviation;
    const std::span<const std::int64_t> slots = metadata_->slot_mapping();
    for (std::size_t r = 0; r < batch_.seq_lens.size(); ++r) {
      for (std::int32_t token = batch_.query_start_loc[r]; token < batch_.query_start_loc[r + 1];
           ++token) {
        const auto at = static_cast<std::size_t>(token);
        const bool right =
            at < slots.size() && slots[at] == batch_.slot(r, token - batch_.query_start_loc[r]);
        deviation.add(right ? 0 : 1, 0, 0.5);
      }
    }
    const auto num_reqs = static_cast<std::int32_t>(batch_.seq_lens.size());
    const BatchSplit& split = metadata_->split();
    deviation.add(split.num_decodes + split.num_prefills, num_reqs, 0.5);
    deviation.add(split.num_decode_tokens + split.num_prefill_tokens, batch_.query_start_loc.back(),
                  0.5);
    return deviation;
  }

 private:
  /// Pages in the order of a long-lived allocator: none next to its neighbour.
  static std::vector<std::int32_t> pages(const BenchShape& shape) {
    std::vector<std::int32_t> result(static_cast<std::size_t>(count_pages(shape)));
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<std::int32_t>(result.size() - 1 - i);
    }
    return result;
  }

  BenchBatch batch_;
  Queue queue_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  const AttentionMetadata* metadata_ = nullptr;
};

/// From nothing to the first output: context, capabilities, programs (from the caches that the
/// machine has by now), cache, metadata, one forward.
class StartupWorkload final : public Workload {
 public:
  StartupWorkload(BenchOptions options, BenchShape shape)
      : options_(std::move(options)), shape_(std::move(shape)) {
    options_.rotate_bytes = 0;
  }

  double run(int launches) override {
    const auto start = Clock::now();
    for (int i = 0; i < launches; ++i) {
      step_ = make_attention_workload(Context::create(options_.device), options_, shape_);
      step_->run(1);
    }
    const double seconds = seconds_since(start) / launches;
    backend = step_->backend;
    kernels = step_->kernels;
    return seconds;
  }

  Deviation verify() override { return step_->verify(); }

 private:
  BenchOptions options_;
  BenchShape shape_;
  std::unique_ptr<Workload> step_;
};

}  // namespace

std::unique_ptr<Workload> make_metadata_workload(const std::shared_ptr<Context>& context,
                                                 const BenchOptions& options,
                                                 const BenchShape& shape) {
  return std::make_unique<MetadataWorkload>(context, options, shape);
}

std::unique_ptr<Workload> make_startup_workload(const std::shared_ptr<Context>& /*context*/,
                                                const BenchOptions& options,
                                                const BenchShape& shape) {
  return std::make_unique<StartupWorkload>(options, shape);
}

std::unique_ptr<Workload> make_workload(const std::shared_ptr<Context>& context,
                                        const BenchOptions& options, const BenchShape& shape) {
  static const std::map<std::string, MakeWorkload*> makers = {
      {"decode", make_attention_workload},  {"prefill", make_attention_workload},
      {"mixed", make_attention_workload},   {"spec", make_attention_workload},
      {"cache", make_cache_workload},       {"merge", make_merge_workload},
      {"metadata", make_metadata_workload}, {"startup", make_startup_workload},
      {"step", make_step_workload},         {"replay", make_replay_workload}};
  return makers.at(shape.suite)(context, options, shape);
}

}  // namespace clattn::cli
