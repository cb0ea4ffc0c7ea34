#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Stores the new tokens of a batch in the cache. Counted in bytes read and written, so both sides
/// rotate: launches take turns with page sets and with runs of input rows.
class CacheWorkload final : public Workload {
 public:
  CacheWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                const BenchShape& shape)
      : context_(context),
        config_(options.config),
        num_tokens_(shape.num_tokens()),
        cache_(make_rotating_cache(context, options, shape)),
        keys_(config_.dtype, 3),
        values_(config_.dtype, 4),
        queue_(context->create_queue()) {
    const std::size_t num_elements = static_cast<std::size_t>(num_tokens_) * row_elements();
    const std::size_t bytes = num_elements * element_size_bytes(config_.dtype);
    num_inputs_ = input_sets(context->capabilities(), options.rotate_bytes, bytes);
    key_ = context->allocate(num_inputs_ * bytes);
    value_ = context->allocate(num_inputs_ * bytes);
    keys_.fill(queue_, key_, num_inputs_ * num_elements);
    values_.fill(queue_, value_, num_inputs_ * num_elements);
    for (std::int32_t set = 0; set < cache_.num_sets; ++set) {
      const EqualBatch batch(shape, config_.block_size, cache_.block_table(set));
      std::vector<std::int64_t> slots(static_cast<std::size_t>(num_tokens_));
      compute_slot_mapping(batch.metadata(), config_.block_size, slots);
      slot_buffers_.push_back(upload(*context, queue_, std::span<const std::int64_t>(slots)));
      slots_.push_back(std::move(slots));
    }
    unit = WorkUnit::kBytes;
    work_per_launch = 2.0 * static_cast<double>(num_elements) *
                      static_cast<double>(element_size_bytes(config_.dtype) +
                                          element_size_bytes(config_.cache_dtype()));
    backend = cache_.backend->name();
    kernels = "reshape_and_cache_flash";
  }

  double run(int launches) override {
    queue_.fill(cache_.cache.buffer, kPoison, 0, cache_.cache.buffer.size_bytes() / 4 * 4);
    queue_.finish();
    const auto start = Clock::now();
    for (int i = 0; i < launches; ++i) {
      set_ = (set_ + 1) % slots_.size();
      input_ = (input_ + 1) % num_inputs_;
      const auto from = static_cast<std::int64_t>(input_element(0));
      reshape_and_cache_flash(*context_, queue_, {.buffer = key_.handle(), .offset = from},
                              {.buffer = value_.handle(), .offset = from}, config_.dtype,
                              cache_.cache, slot_buffers_[set_].handle(), 0, num_tokens_);
    }
    queue_.finish();
    return seconds_since(start) / launches;
  }

  Deviation verify() override {
    Deviation deviation;
    const KVCache& kv = cache_.cache;
    const auto step = std::max<std::int64_t>(num_tokens_ / 16, 1);
    for (std::int64_t token = 0; token < num_tokens_; token += step) {
      const std::int64_t slot = slots_[set_][static_cast<std::size_t>(token)];
      const std::int64_t row =
          slot / kv.block_size * kv.block_stride + slot % kv.block_size * kv.token_stride;
      for (std::int32_t head = 0; head < kv.num_kv_heads; ++head) {
        const std::size_t from = input_element(token) + static_cast<std::size_t>(head) *
                                                            static_cast<std::size_t>(kv.head_size);
        compare_row(deviation, keys_, from, kv.k_offset + row + head * kv.head_stride);
        compare_row(deviation, values_, from, kv.v_offset + row + head * kv.head_stride);
      }
    }
    return deviation;
  }

 private:
  /// Runs of keys, and of values, that together fill `rotate_bytes`, as far as the device has room.
  static std::size_t input_sets(const DeviceCapabilities& device, std::size_t rotate_bytes,
                                std::size_t bytes) {
    const auto room =
        static_cast<std::size_t>(std::min(device.max_alloc_bytes, device.global_mem_bytes / 8));
    return std::max<std::size_t>(std::min(rotate_bytes / 2, room) / bytes, 1);
  }

  /// Where the last launch's input has a token's row.
  std::size_t input_element(std::int64_t token) const {
    return (input_ * static_cast<std::size_t>(num_tokens_) + static_cast<std::size_t>(token)) *
           row_elements();
  }

  std::size_t row_elements() const {
    return static_cast<std::size_t>(config_.num_kv_heads) *
           static_cast<std::size_t>(config_.head_size);
  }

  void compare_row(Deviation& deviation, const TiledRandom& source, std::size_t from,
                   std::int64_t at) const {
    const DType type = config_.cache_dtype();
    const std::size_t element = element_size_bytes(type);
    std::vector<double> expected(static_cast<std::size_t>(config_.head_size));
    for (std::size_t d = 0; d < expected.size(); ++d) expected[d] = source.at(from + d);
    std::vector<std::byte> got(expected.size() * element);
    queue_.read(cache_.cache.buffer, got, static_cast<std::size_t>(at) * element);
    deviation.merge(compare_bytes(got, encode_elements(type, expected)));
  }

  std::shared_ptr<Context> context_;
  AttentionConfig config_;
  std::int64_t num_tokens_;
  RotatingCache cache_;
  TiledRandom keys_, values_;
  Queue queue_;
  Buffer key_, value_;
  std::vector<std::vector<std::int64_t>> slots_;
  std::vector<Buffer> slot_buffers_;
  std::size_t num_inputs_ = 1;
  std::size_t set_ = 0, input_ = 0;  // of the last launch
};

/// Builds one step's metadata: host time alone, the upload is waited for outside the measure.
class MetadataWorkload final : public Workload {
 public:
  MetadataWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                   const BenchShape& shape)
      : block_size_(options.config.block_size),
        batch_(shape, block_size_, table(shape, block_size_)),
        queue_(context->create_queue()) {
    const AttentionBackend& chosen =
        get_attn_backend(options.config, &context->capabilities(), options.backend);
    builder_ = chosen.make_builder(
        context, options.config,
        builder_options(shape, static_cast<std::int64_t>(batch_.block_table.size())));
    backend = chosen.name();
    kernels = "host";
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
      for (std::int32_t i = 0; i < batch_.max_query_len; ++i) {
        const std::int32_t position = batch_.seq_lens[r] - batch_.max_query_len + i;
        const std::int32_t block =
            batch_.block_table[r * static_cast<std::size_t>(batch_.max_blocks) +
                               static_cast<std::size_t>(position / block_size_)];
        const std::int64_t expected = std::int64_t{block} * block_size_ + position % block_size_;
        const std::size_t token =
            r * static_cast<std::size_t>(batch_.max_query_len) + static_cast<std::size_t>(i);
        const bool right = token < slots.size() && slots[token] == expected;
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
  static std::vector<std::int32_t> table(const BenchShape& shape, std::int32_t block_size) {
    const std::int64_t pages = (std::int64_t{shape.seq_len} + block_size - 1) / block_size;
    std::vector<std::int32_t> result(static_cast<std::size_t>(pages * shape.batch));
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<std::int32_t>(result.size() - 1 - i);
    }
    return result;
  }

  std::int32_t block_size_;
  EqualBatch batch_;
  Queue queue_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  const AttentionMetadata* metadata_ = nullptr;
};

}  // namespace

std::unique_ptr<Workload> make_cache_workload(const std::shared_ptr<Context>& context,
                                              const BenchOptions& options,
                                              const BenchShape& shape) {
  return std::make_unique<CacheWorkload>(context, options, shape);
}

std::unique_ptr<Workload> make_metadata_workload(const std::shared_ptr<Context>& context,
                                                 const BenchOptions& options,
                                                 const BenchShape& shape) {
  return std::make_unique<MetadataWorkload>(context, options, shape);
}

std::unique_ptr<Workload> make_workload(const std::shared_ptr<Context>& context,
                                        const BenchOptions& options, const BenchShape& shape) {
  if (shape.suite == "cache") return make_cache_workload(context, options, shape);
  if (shape.suite == "metadata") return make_metadata_workload(context, options, shape);
  if (shape.suite == "step" || shape.suite == "replay") {
    return make_step_workload(context, options, shape, shape.suite == "replay");
  }
  return make_attention_workload(context, options, shape);
}

}  // namespace clattn::cli
