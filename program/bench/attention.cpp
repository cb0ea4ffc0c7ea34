#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <clattn/compat/paged_attention.hpp>
#include <clattn/graph.hpp>
#include <iterator>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Decode, prefill and what lies between: forward() of one layer.
class AttentionWorkload : public Workload {
 public:
  /// `packed`: the cache's memory is an x-packed pair.
  AttentionWorkload(const BenchTask& task, RotatingCache cache, bool packed = false)
      : shape_(task.shape),
        // Products of 8 bits lose what is small against a sum. Values mostly of one sign show that:
        // their mean is large against what the oracle allows.
        kv_(shape_.model.config.cache_dtype(), 1, spread(shape_.model.config.cache_dtype()),
            mean(shape_.model.config)),
        q_(shape_.model.config.dtype, 2),
        timed_queue_(task.context->create_queue(QueueProfiling::kOn)),
        config_(shape_.model.config),
        cache_(std::move(cache)),
        queue_(task.context->create_queue()) {
    const std::shared_ptr<Context>& context = task.context;
    const std::size_t element = element_size_bytes(config_.dtype);
    const auto tokens = to_size(shape_.num_tokens());
    query_ = context->allocate(tokens * row_elements(config_.head_size) * element);
    out_ = context->allocate((tokens * row_elements(config_.output_head_size()) * element + 3) / 4 *
                             4);
    if (config_.custom_mask) put_mask(*context);
    q_.fill(queue_, query_);
    kv_.fill(queue_, cache_.cache);
    if (packed) {
      packed_ = split_kv_cache(cache_.cache.buffer, spec_of(config_));
      packed_->scales = cache_.cache.scales;
      packed_impl_ = make_paged_attention(*context, config_);
    } else {
      impl_ = cache_.backend->make_impl(context, config_);
      backend = cache_.backend->name();
    }
    const BuilderOptions options = builder_options(shape_, cache_.cache.num_blocks);
    for (std::size_t set = 0; set < to_size(cache_.num_sets); ++set) {
      builders_.push_back(packed ? make_paged_attention_builder(context, config_, options)
                                 : cache_.backend->make_builder(context, config_, options));
      batches_.emplace_back(shape_, cache_.pages_of_set(set));
      metadata_.push_back(&builders_.back()->build(queue_, batches_.back().metadata()));
    }
    touched_bytes = cache_.cache.buffer.size_bytes();
    if (shape_.suite == "warmed_step") impl_->warm_up(queue_);
    record_kernels();
    work = attention_work(config_, shape_.requests);
  }

  double run(int launches) override {
    poison();
    return seconds_each(queue_, launches, [&] {
      set_ = (set_ + 1) % metadata_.size();
      forward(queue_);
    });
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
      forward(timed_queue_, &launches);
      timed_queue_.finish();
      for (std::size_t i = 0; i < std::min(launches.size(), times.size()); ++i) {
        times[i].push_back(microseconds(launches[i].event));
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
  void poison() const { queue_.fill(out_, kPoison, 0, out_.size_bytes()); }
  void forward(const Queue& queue, std::vector<LaunchRecord>* launches = nullptr) const {
    const TensorRef query{query_.handle()}, out{out_.handle()};
    const AttentionMetadata& metadata = *metadata_[set_];
    if (packed_) {
      packed_impl_->forward(queue, {.query = query, .output = out}, *packed_, metadata, nullptr,
                            launches);
    } else {
      impl_->forward(queue, {.query = query, .output = out}, cache_.cache, metadata,
                     {.launches = launches,
                      .custom_mask = mask_.handle(),
                      .custom_mask_stride = mask_ ? shape_.max_seq_len() : 0});
    }
  }

 private:
  /// Query heads of a KV head that are compared: the loops of the oracle take their time.
  static constexpr std::int32_t kSampledHeads = 8;
  static constexpr std::size_t kSampledRequests = 16;

  std::size_t row_elements(std::int32_t head_size) const {
    return to_size(config_.num_heads) * to_size(head_size);
  }

  /// What rows of a tree see, a byte a key.
  void put_mask(const Context& context) {
    const auto stride = to_size(shape_.max_seq_len());
    std::vector<std::byte> mask(to_size(shape_.num_tokens()) * stride);
    auto row = mask.begin();
    for (const RequestShape& request : shape_.requests) {
      for (std::int32_t token = 0; token < request.query_len; ++token) {
        for (const KeyRange& keys : seen_keys(config_, request, token))
          std::fill(row + keys.begin, row + keys.end, std::byte{1});
        row += static_cast<std::ptrdiff_t>(stride);
      }
    }
    mask_ = context.allocate(mask.size());
    queue_.write(mask_, mask);
    queue_.finish();
  }

  /// The kernels of one forward; also builds them before anything is timed.
  void record_kernels() {
    std::vector<LaunchRecord> launches;
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    forward(queue_, &launches);
    queue_.finish();
    first_seconds = seconds_since(start);
    kernels = kernels_of(launches, packed_ ? packed_impl_->kernels() : impl_->kernels());
    rounds_probabilities_ = std::ranges::any_of(launches, &LaunchRecord::rounds_probabilities);
    multiplies_fp8_ = std::ranges::any_of(launches, &LaunchRecord::multiplies_fp8);
  }

  Deviation verify_row(std::size_t request, std::int32_t token, std::int32_t kv_head) const {
    const std::int32_t group = config_.num_queries_per_kv();
    const std::int32_t heads = std::min(group, kSampledHeads);
    const std::int32_t first = kv_head * group + token % (group - heads + 1);
    const std::size_t row =
        row_elements(1) * to_size(batches_[set_].query_start_loc[request] + token) + to_size(first);
    const auto head_size = to_size(config_.head_size);
    oracle::AttentionCase call = oracle_row(request, token, kv_head, {first, heads});
    for (std::size_t i = 0; i < to_size(heads) * head_size; ++i) {
      call.query.push_back(q_.at(row * head_size + i));
    }
    const std::size_t head_bytes =
        to_size(config_.output_head_size()) * element_size_bytes(config_.dtype);
    std::vector<std::byte> got(to_size(heads) * head_bytes);
    queue_.read(out_, got, row * head_bytes);
    const bool in_fp8 =
        multiplies_fp8_ && multiplied_in_fp8(config_, shape_.requests[request].query_len);
    const oracle::Element element = element_of(config_.dtype);
    return compare(config_.dtype, got, {},
                   front_of_rows(in_fp8 ? oracle::attention_in_fp8(call, element, 1)
                                        : oracle::attention(call, element),
                                 config_.head_size, config_.output_head_size()),
                   rounds_probabilities_);
  }

  /// Of elements: codes of 4 bits lie between 0 and 15.
  static double spread(DType dtype) { return dtype == DType::kUInt4x2 ? 4 : 1; }
  static double mean(const AttentionConfig& config) {
    if (config.cache_dtype() == DType::kUInt4x2) return 7.5;
    return config.fp8_products ? 1 : 0;
  }

  /// Lets a row's query see all keys of the case. The oracle then places it at the last of them,
  /// `ahead` positions too far, which takes slope * ahead from each logit: so from the sinks, too.
  static void take_all_keys(oracle::AttentionCase& call, std::int64_t ahead) {
    call.window_left = call.window_right = -1;
    for (std::size_t h = 0; h < std::min(call.sinks.size(), call.alibi_slopes.size()); ++h)
      call.sinks[h] -= call.alibi_slopes[h] * static_cast<double>(ahead);
  }

  /// The scales of a token's key and value in caches that have them, and their zeros.
  using RowParts = std::pair<oracle::ScaleAndZero, oracle::ScaleAndZero>;
  static RowParts row_scales(const KVCache& cache, std::int64_t block, std::int64_t token,
                             std::int64_t kv_head) {
    if (!cache.row_scales) return {{1}, {1}};
    const KVCache::RowScales& at = *cache.row_scales;
    const std::int64_t row =
        block * at.block_stride + token * at.token_stride + kv_head * at.head_stride;
    return {row_scale_at(cache.dtype, at.k_offset + row),
            row_scale_at(cache.dtype, at.v_offset + row)};
  }

  /// The keys and values of one KV head that one token may see, as a batch of their own.
  oracle::AttentionCase oracle_row(std::size_t request, std::int32_t token, std::int32_t kv_head,
                                   HeadRange heads) const {
    const RequestShape& shape = shape_.requests[request];
    const std::int32_t first_new = shape.seq_len - shape.query_len;
    const std::int32_t own = first_new + token;
    const bool listed = config_.use_directions || config_.use_keep_keys || !shape.spans.empty();
    std::vector<KeyRange> seen = {{0, own + 1}};
    if (listed || !shape.parents.empty()) seen = seen_keys(config_, shape, token);
    std::vector<std::int32_t> keys;
    for (const KeyRange& range : seen)
      for (std::int32_t key = range.begin; key < range.end; ++key) keys.push_back(key);
    oracle::AttentionCase call = row_case(config_, static_cast<std::int32_t>(keys.size()), heads);
    if (listed) take_all_keys(call, keys.back() - own);
    const KVCache& kv = cache_.cache;
    for (const std::int32_t position : keys) {
      const std::int64_t slot = batches_[set_].slot(request, position - first_new);
      const std::int64_t block = slot / kv.block_size, in_block = slot % kv.block_size;
      const auto [of_key, of_value] = row_scales(kv, block, in_block, kv_head);
      for (std::int32_t d = 0; d < config_.head_size; ++d) {
        const auto places = [&](const auto& cache) {
          return std::pair(cache.key_at(block, in_block, kv_head, d),
                           cache.value_at(block, in_block, kv_head, d));
        };
        const auto [key, value] = packed_ ? places(*packed_) : places(kv);
        call.key_cache.push_back(of_key.scale * (kv_.at(to_size(key)) - of_key.zero));
        const bool exists = d < value_width(config_);
        call.value_cache.push_back(
            exists ? of_value.scale * (kv_.at(to_size(value)) - of_value.zero) : 0);
      }
    }
    return call;
  }

  BenchShape shape_;
  TiledRandom kv_, q_;
  Buffer mask_;
  Queue timed_queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::optional<PackedKVCache> packed_{};  // instead, with the next
  std::shared_ptr<const PagedAttention> packed_impl_;
  bool rounds_probabilities_ = false;  // a kernel of the forward does
  bool multiplies_fp8_ = false;        // likewise, AttentionConfig::fp8_products
  Buffer query_, out_;
  std::size_t set_ = 0;

 protected:
  AttentionConfig config_;
  RotatingCache cache_;
  Queue queue_;
  // Of the sets; a forward runs by the metadata of one.
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::vector<BenchBatch> batches_;
  std::vector<const AttentionMetadata*> metadata_;
};

/// Builds one step's metadata: host time alone, the upload is waited for outside the measure.
/// Proven by what forward() makes of it. The row also gives the host time of a step: build() and
/// one forward(), begun once the device has finished the step before.
class MetadataWorkload final : public AttentionWorkload {
 public:
  explicit MetadataWorkload(const BenchTask& task)
      : AttentionWorkload(task, make_overlapping_cache(task)) {
    work = {};
    touched_bytes = 0;
  }

  double run(int launches) override {
    double seconds = 0;
    for (int i = 0; i < launches; ++i) {
      const auto start = std::chrono::steady_clock::now();
      build();
      seconds += seconds_since(start);
      queue_.finish();
    }
    run_step();  // not timed: brings the code of forward() into the caches, where engines have it
    step_us_.push_back(run_step() * 1e6);
    kernels = {{.name = fmt::format("build; a step's build and forward() take {:.1f} us",
                                    median(step_us_)),
                .role = "host"}};
    return seconds / launches;
  }

  /// Slots on the device and the split, worked out by the definition; then the step that was built
  /// last attends.
  Deviation verify() override {
    const CommonAttentionMetadata step = batches_[0].metadata();
    std::vector<std::int64_t> wanted(to_size(step.num_actual_tokens));
    BatchSplit split;
    for (std::int32_t r = 0; r < step.num_reqs; ++r) {
      const auto row = to_size(r);
      const std::int32_t begin = step.query_start_loc[row], end = step.query_start_loc[row + 1];
      for (std::int32_t token = begin; token < end; ++token)
        wanted[to_size(token)] = batches_[0].slot(row, token - begin);
      const bool decodes = end - begin <= builders_[0]->decode_threshold();
      (decodes ? split.num_decodes : split.num_prefills) += 1;
      (decodes ? split.num_decode_tokens : split.num_prefill_tokens) += end - begin;
    }
    std::vector<std::int64_t> got(wanted.size());
    const AttentionMetadata& built = *metadata_[0];
    queue_.read(Buffer::adopt(built.slot_mapping_buffer()), std::as_writable_bytes(std::span(got)),
                built.slot_mapping_offset_bytes());
    Deviation deviation =
        compare_bytes(std::as_bytes(std::span(got)), std::as_bytes(std::span(wanted)));
    deviation.add(built.split() == split ? 0 : 1, 0, 0.5);
    AttentionWorkload::run(1);
    deviation.merge(AttentionWorkload::verify());
    return deviation;
  }

 private:
  void build() { metadata_ = {&builders_[0]->build(queue_, batches_[0].metadata())}; }
  double run_step() {
    const auto start = std::chrono::steady_clock::now();
    build();
    forward(queue_);
    const double seconds = seconds_since(start);
    queue_.finish();
    return seconds;
  }

  std::vector<double> step_us_;  // one a round
};

/// A step of one layer, replayed from the recording of its size class, whose launches are as large
/// as any batch of as many tokens needs. Of it, and of the same step launched by calls, the row
/// says the time of steps in a row, and the host's for one that begins on an idle device. What the
/// replay gave is judged.
class MixedReplayWorkload final : public AttentionWorkload {
 public:
  explicit MixedReplayWorkload(const BenchTask& task)
      : AttentionWorkload(task, make_rotating_cache(task)),
        state_(task.context, *cache_.backend, config_,
               recordable(builder_options(task.shape, cache_.cache.num_blocks))),
        launched_kernels_(std::move(kernels)) {
    const std::int32_t tokens = task.shape.num_tokens();
    const AttentionMetadata* const launched = metadata_[0];
    const auto capturing = state_.graph_capture(tokens);
    metadata_ = {&state_.graph_capture_get_metadata_for_batch(queue_, tokens)};
    queue_.finish();
    {
      GraphCapture capture(queue_);
      forward(queue_);
      graph_ = capture.end();
    }
    metadata_ = {launched};
    state_.prepare_graph_input_buffers(queue_, tokens, batches_[0].metadata());
  }

  double run(int launches) override {
    const Seconds by_calls = seconds_of(launches, [&] { forward(queue_); });
    const Seconds replayed = seconds_of(launches, [&] { graph_.replay(queue_); });
    kernels = launched_kernels_;
    kernels.push_back(
        {.name = fmt::format("launched {:.1f} us, of the host {:.1f}; replayed {:.1f} us, of the "
                             "host {:.1f}",
                             by_calls.step * 1e6, by_calls.host * 1e6, replayed.step * 1e6,
                             replayed.host * 1e6),
         .role = "host"});
    return replayed.step;
  }

 private:
  struct Seconds {
    double step, host;
  };

  static BuilderOptions recordable(BuilderOptions options) {
    options.graph_mixed = true;
    return options;
  }

  template <typename Launch>
  Seconds seconds_of(int launches, const Launch& launch) const {
    constexpr int kHostRuns = 9;
    poison();
    std::vector<double> host;
    for (int i = 0; i < kHostRuns; ++i) {
      queue_.finish();
      const auto start = std::chrono::steady_clock::now();
      launch();
      host.push_back(seconds_since(start));
    }
    return {seconds_each(queue_, launches, launch), median(host)};
  }

  AttentionState state_;
  Graph graph_;
  std::vector<BenchKernel> launched_kernels_;
};

}  // namespace

std::unique_ptr<Workload> make_mixed_replay_workload(const BenchTask& task) {
  BenchOptions one_set = task.options;
  one_set.rotate_bytes = 0;  // a recording reads one metadata
  return std::make_unique<MixedReplayWorkload>(BenchTask{task.context, one_set, task.shape});
}

std::unique_ptr<Workload> make_metadata_workload(const BenchTask& task) {
  return std::make_unique<MetadataWorkload>(task);
}

std::unique_ptr<Workload> make_attention_workload(const BenchTask& task) {
  if (task.shape.model.config.contiguous_kv()) return make_contiguous_workload(task);
  return std::make_unique<AttentionWorkload>(task, make_rotating_cache(task));
}

std::unique_ptr<Workload> make_packed_workload(const BenchTask& task) {
  RotatingCache cache;
  cache.pages_per_set = count_pages(task.shape);
  cache.pages = shuffled_pages(cache.pages_per_set, 7);
  const KVCacheSpec spec = spec_of(task.shape.model.config);
  cache.cache.buffer =
      task.context->allocate(to_size(cache.pages_per_set) * spec.page_size_bytes());
  cache.cache.num_blocks = cache.pages_per_set;
  cache.cache.block_size = spec.block_size;
  return std::make_unique<AttentionWorkload>(task, std::move(cache), true);
}

}  // namespace clattn::cli
