#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"
#include "cli/statistics.hpp"

namespace clattn::cli {
namespace {

/// Decode, prefill and what lies between: forward() of one layer.
class AttentionWorkload : public Workload {
 public:
  AttentionWorkload(const std::shared_ptr<Context>& context, RotatingCache cache,
                    const BenchShape& shape)
      : config_(shape.model.config()),
        shape_(shape),
        cache_(std::move(cache)),
        kv_(config_.cache_dtype(), 1),
        q_(config_.dtype, 2),
        queue_(context->create_queue()),
        timed_queue_(context->create_queue(QueueProfiling::kOn)),
        impl_(cache_.backend->make_impl(context, config_)) {
    const std::size_t element = element_size_bytes(config_.dtype);
    const auto tokens = static_cast<std::size_t>(shape.num_tokens());
    query_ = context->allocate(tokens * row_elements(config_.head_size) * element);
    out_ = context->allocate((tokens * row_elements(config_.output_head_size()) * element + 3) / 4 *
                             4);
    q_.fill(queue_, query_, tokens * row_elements(config_.head_size));
    const Buffer& kv = cache_.cache.buffer;
    kv_.fill(queue_, kv, kv.size_bytes() / element_size_bytes(config_.cache_dtype()));
    for (std::size_t set = 0; set < static_cast<std::size_t>(cache_.num_sets); ++set) {
      builders_.push_back(cache_.backend->make_builder(
          context, config_, builder_options(shape, cache_.cache.num_blocks)));
      batches_.emplace_back(shape, cache_.pages_of_set(set));
      metadata_.push_back(&builders_.back()->build(queue_, batches_.back().metadata()));
    }
    backend = cache_.backend->name();
    touched_bytes = kv.size_bytes();
    if (shape.suite == "warmed_step") impl_->warm_up(queue_);
    record_kernels();
    count_work();
  }

  double run(int launches) override {
    queue_.fill(out_, kPoison, 0, out_.size_bytes());
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < launches; ++i) {
      set_ = (set_ + 1) % metadata_.size();
      impl_->forward(queue_, {.buffer = query_.handle()}, cache_.cache, *metadata_[set_],
                     {.buffer = out_.handle()});
    }
    queue_.finish();
    return seconds_since(start) / launches;
  }

  std::vector<BenchLaunch> plan() override {
    constexpr int kRuns = 9;
    std::vector<BenchLaunch> result;
    for (PlannedLaunch& launch : planned_launches(*metadata_[0])) {
      result.push_back({std::move(launch)});
    }
    std::vector<std::vector<double>> times(result.size());
    queue_.finish();
    for (int run = 0; run < kRuns; ++run) {
      std::vector<LaunchRecord> launches;
      set_ = (set_ + 1) % metadata_.size();
      impl_->forward(timed_queue_, {.buffer = query_.handle()}, cache_.cache, *metadata_[set_],
                     {.buffer = out_.handle()}, nullptr, nullptr, &launches);
      timed_queue_.finish();
      for (std::size_t i = 0; i < std::min(launches.size(), times.size()); ++i) {
        times[i].push_back(static_cast<double>(launches[i].event.duration_ns()) * 1e-3);
      }
    }
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i].measured_us = percentile(times[i], 0.5);
    return result;
  }

  /// A spread of requests, each in another KV head: the first, middle and last token of the first
  /// and the last one, one of the three of those between.
  Deviation verify() override {
    const std::size_t num_reqs = shape_.requests.size();
    const std::size_t samples = std::min(num_reqs, kSampledRequests);
    Deviation deviation;
    std::int32_t kv_head = 0;
    for (std::size_t i = 0; i < samples; ++i) {
      const std::size_t request = samples < 2 ? 0 : i * (num_reqs - 1) / (samples - 1);
      const std::int32_t last = shape_.requests[request].query_len - 1;
      std::set<std::int32_t> tokens = {0, (last + 1) / 2, last};
      if (i > 0 && i + 1 < samples) {
        tokens = {*std::next(tokens.begin(), static_cast<std::ptrdiff_t>(i % tokens.size()))};
      }
      for (const std::int32_t token : tokens) {
        deviation.merge(verify_row(request, token, kv_head));
        kv_head = (kv_head + 1) % config_.num_kv_heads;
      }
    }
    return deviation;
  }

 protected:
  CommonAttentionMetadata batch() const { return batches_.front().metadata(); }
  AttentionMetadataBuilder& builder() { return *builders_.front(); }
  std::int64_t slot(std::size_t request, std::int32_t token) const {
    return batches_.front().slot(request, token);
  }
  /// The step that forward() runs by, of a workload with one set.
  void set_metadata(const AttentionMetadata& metadata) { metadata_ = {&metadata}; }
  const Queue& queue() const { return queue_; }

 private:
  /// Query heads of a KV head that are compared: the loops of the oracle take their time.
  static constexpr std::int32_t kSampledHeads = 8;
  static constexpr std::size_t kSampledRequests = 16;

  std::size_t row_elements(std::int32_t head_size) const {
    return static_cast<std::size_t>(config_.num_heads) * static_cast<std::size_t>(head_size);
  }

  /// The kernels of one forward; also builds them before anything is timed.
  void record_kernels() {
    std::vector<LaunchRecord> launches;
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    impl_->forward(queue_, {.buffer = query_.handle()}, cache_.cache, *metadata_[0],
                   {.buffer = out_.handle()}, nullptr, nullptr, &launches);
    queue_.finish();
    first_seconds = seconds_since(start);
    const std::vector<KernelInfo> known = impl_->kernels();
    for (const LaunchRecord& launch : launches) {
      rounds_weights_ |= launch.rounds_weights;
      const auto same =
          std::find_if(kernels.begin(), kernels.end(), [&](const BenchKernel& kernel) {
            return kernel.name == launch.kernel && kernel.work_groups == launch.work_groups &&
                   kernel.work_group_size == launch.work_group_size;
          });
      if (same != kernels.end()) {
        ++same->launches;
        continue;
      }
      BenchKernel kernel{.name = std::string(launch.kernel),
                         .work_groups = launch.work_groups,
                         .work_group_size = launch.work_group_size};
      const auto info = std::find_if(known.begin(), known.end(), [&](const KernelInfo& candidate) {
        return candidate.name == kernel.name;
      });
      if (info != known.end()) {
        kernel.role = info->role;
        kernel.block_rows = info->block_rows;
        kernel.block_kv = info->block_kv;
      }
      kernels.push_back(kernel);
    }
  }

  /// Each visible key and value once, and the multiply-adds of each query with each key that it
  /// sees. Latent rows are keys and values at once.
  void count_work() {
    const double key_width = config_.head_size, value_width = config_.output_head_size();
    const double row_bytes = config_.num_kv_heads *
                             (config_.use_mla ? key_width : key_width + value_width) *
                             static_cast<double>(element_size_bytes(config_.cache_dtype()));
    for (const auto& [query_len, seq_len] : shape_.requests) {
      const double window = config_.sliding_window > 0 ? config_.sliding_window : seq_len;
      work.bytes += row_bytes * std::min<double>(seq_len, window + query_len - 1);
      double pairs = 0;
      for (std::int32_t i = 0; i < query_len; ++i) {
        pairs += std::min<double>(seq_len - query_len + i + 1, window);
      }
      work.flops += 2 * (key_width + value_width) * config_.num_heads * pairs;
    }
  }

  Deviation verify_row(std::size_t request, std::int32_t token, std::int32_t kv_head) const {
    const std::int32_t group = config_.num_queries_per_kv();
    const std::int32_t heads = std::min(group, kSampledHeads);
    const std::int32_t first = kv_head * group + token % (group - heads + 1);
    const std::size_t row = row_elements(1) * static_cast<std::size_t>(
                                                  batches_[set_].query_start_loc[request] + token) +
                            static_cast<std::size_t>(first);
    const auto head_size = static_cast<std::size_t>(config_.head_size);
    oracle::AttentionCase call = oracle_row(request, token, kv_head);
    call.num_heads = heads;
    for (std::size_t i = 0; i < static_cast<std::size_t>(heads) * head_size; ++i) {
      call.query.push_back(q_.at(row * head_size + i));
    }
    for (std::int32_t h = first; !config_.sinks.empty() && h < first + heads; ++h) {
      call.sinks.push_back(static_cast<double>(config_.sinks[static_cast<std::size_t>(h)]));
    }
    const std::size_t head_bytes =
        static_cast<std::size_t>(config_.output_head_size()) * element_size_bytes(config_.dtype);
    std::vector<std::byte> got(static_cast<std::size_t>(heads) * head_bytes);
    queue_.read(out_, got, row * head_bytes);
    return compare(config_.dtype, got, {},
                   front_of_rows(oracle::attention(call, element_of(config_.dtype)),
                                 config_.head_size, config_.output_head_size()),
                   rounds_weights_);
  }

  /// The keys and values of one KV head that one token may see, as a batch of their own.
  oracle::AttentionCase oracle_row(std::size_t request, std::int32_t token,
                                   std::int32_t kv_head) const {
    const auto [query_len, seq_len] = shape_.requests[request];
    oracle::AttentionCase call;
    call.num_kv_heads = 1;
    call.head_size = config_.head_size;
    call.block_size = 1;
    call.scale =
        config_.scale ? static_cast<double>(*config_.scale) : 1 / std::sqrt(config_.head_size);
    call.soft_cap = static_cast<double>(config_.logits_soft_cap);
    if (config_.sliding_window > 0) call.window_left = config_.sliding_window - 1;
    call.query_start_loc = {0, 1};
    call.seq_lens = {seq_len - query_len + token + 1};
    call.max_blocks = call.seq_lens[0];
    const KVCache& kv = cache_.cache;
    for (std::int32_t position = 0; position < call.seq_lens[0]; ++position) {
      call.block_table.push_back(position);
      const std::int64_t slot = batches_[set_].slot(request, position - (seq_len - query_len));
      const std::int64_t block = slot / kv.block_size, in_block = slot % kv.block_size;
      for (std::int32_t d = 0; d < config_.head_size; ++d) {
        const auto key = static_cast<std::size_t>(kv.key_at(block, in_block, kv_head, d));
        const auto value = static_cast<std::size_t>(kv.value_at(block, in_block, kv_head, d));
        call.key_cache.push_back(kv_.at(key));
        call.value_cache.push_back(kv_.at(value));
      }
    }
    return call;
  }

  AttentionConfig config_;
  BenchShape shape_;
  RotatingCache cache_;
  TiledRandom kv_, q_;
  Queue queue_, timed_queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  bool rounds_weights_ = false;  // a kernel of the forward does
  Buffer query_, out_;
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::vector<BenchBatch> batches_;  // of the sets
  std::vector<const AttentionMetadata*> metadata_;
  std::size_t set_ = 0;
};

/// Builds one step's metadata: host time alone, the upload is waited for outside the measure.
/// Proven by what forward() makes of it.
class MetadataWorkload final : public AttentionWorkload {
 public:
  MetadataWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                   const BenchShape& shape)
      : AttentionWorkload(context, make_overlapping_cache(context, options, shape), shape) {
    kernels = {{.name = "build", .role = "host"}};
    work = {};
    touched_bytes = 0;
  }

  double run(int launches) override {
    double seconds = 0;
    for (int i = 0; i < launches; ++i) {
      const auto start = std::chrono::steady_clock::now();
      const AttentionMetadata& built = builder().build(queue(), batch());
      seconds += seconds_since(start);
      queue().finish();
      set_metadata(built);
      built_ = &built;
    }
    return seconds / launches;
  }

  /// Slots on the device and the split, worked out by the definition; then the step that was built
  /// last attends.
  Deviation verify() override {
    const CommonAttentionMetadata step = batch();
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(step.num_actual_tokens));
    BatchSplit split;
    for (std::int32_t r = 0; r < step.num_reqs; ++r) {
      const auto row = static_cast<std::size_t>(r);
      const std::int32_t begin = step.query_start_loc[row], end = step.query_start_loc[row + 1];
      for (std::int32_t token = begin; token < end; ++token)
        wanted[static_cast<std::size_t>(token)] = slot(row, token - begin);
      const bool decodes = end - begin <= builder().decode_threshold();
      (decodes ? split.num_decodes : split.num_prefills) += 1;
      (decodes ? split.num_decode_tokens : split.num_prefill_tokens) += end - begin;
    }
    std::vector<std::int64_t> got(wanted.size());
    queue().read(Buffer::adopt(built_->slot_mapping_buffer()),
                 std::as_writable_bytes(std::span(got)), built_->slot_mapping_offset_bytes());
    Deviation deviation =
        compare_bytes(std::as_bytes(std::span(got)), std::as_bytes(std::span(wanted)));
    deviation.add(built_->split() == split ? 0 : 1, 0, 0.5);
    AttentionWorkload::run(1);
    deviation.merge(AttentionWorkload::verify());
    return deviation;
  }

 private:
  const AttentionMetadata* built_ = nullptr;
};

}  // namespace

std::unique_ptr<Workload> make_metadata_workload(const std::shared_ptr<Context>& context,
                                                 const BenchOptions& options,
                                                 const BenchShape& shape) {
  return std::make_unique<MetadataWorkload>(context, options, shape);
}

std::unique_ptr<Workload> make_attention_workload(const std::shared_ptr<Context>& context,
                                                  const BenchOptions& options,
                                                  const BenchShape& shape) {
  return std::make_unique<AttentionWorkload>(context, make_rotating_cache(context, options, shape),
                                             shape);
}

}  // namespace clattn::cli
