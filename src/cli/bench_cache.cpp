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

/// Stores the new tokens of a batch in the cache. Counted in bytes read and written, so both sides
/// rotate: launches take turns with page sets and with runs of input rows.
class CacheWorkload final : public Workload {
 public:
  CacheWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                const BenchShape& shape)
      : config_(shape.model.config()),
        num_tokens_(static_cast<std::size_t>(shape.num_tokens())),
        cache_(make_rotating_cache(context, options, shape)),
        rows_{{TiledRandom(config_.dtype, 3),
               config_.use_mla ? config_.output_head_size() : config_.head_size},
              {TiledRandom(config_.dtype, 4),
               config_.use_mla ? config_.rope_dim : config_.head_size}},
        queue_(context->create_queue()),
        impl_(cache_.backend->make_impl(context, config_)) {
    const auto elements = num_tokens_ * (row_elements(rows_[0]) + row_elements(rows_[1]));
    const std::size_t bytes = elements * element_size_bytes(config_.dtype);
    num_inputs_ = input_sets(context->capabilities(), options.rotate_bytes, bytes);
    for (Rows& rows : rows_) {
      const std::size_t all = num_inputs_ * num_tokens_ * row_elements(rows);
      rows.buffer = context->allocate(all * element_size_bytes(config_.dtype));
      rows.source.fill(queue_, rows.buffer, all);
    }
    for (std::size_t set = 0; set < static_cast<std::size_t>(cache_.num_sets); ++set) {
      builders_.push_back(cache_.backend->make_builder(
          context, config_, builder_options(shape, cache_.cache.num_blocks)));
      const BenchBatch batch(shape, cache_.pages_of_set(set));
      metadata_.push_back(&builders_.back()->build(queue_, batch.metadata()));
      slots_.emplace_back();
      for (std::size_t r = 0; r < shape.requests.size(); ++r) {
        for (std::int32_t i = 0; i < shape.requests[r].query_len; ++i) {
          slots_.back().push_back(batch.slot(r, i));
        }
      }
    }
    const std::size_t stored = elements * element_size_bytes(config_.cache_dtype());
    work.bytes = static_cast<double>(bytes + stored);
    touched_bytes = num_inputs_ * bytes + static_cast<std::size_t>(cache_.num_sets) * stored;
    backend = cache_.backend->name();
    kernels = {{.name = config_.use_mla ? "concat_and_cache_mla" : "reshape_and_cache_flash",
                .role = "cache",
                .work_group_size = group_size(context->capabilities())}};
  }

  double run(int launches) override {
    queue_.fill(cache_.cache.buffer, kPoison, 0, cache_.cache.buffer.size_bytes() / 4 * 4);
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < launches; ++i) {
      set_ = (set_ + 1) % slots_.size();
      input_ = (input_ + 1) % num_inputs_;
      impl_->write_kv_cache(queue_, input(rows_[0]), input(rows_[1]), cache_.cache,
                            *metadata_[set_]);
    }
    queue_.finish();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
           launches;
  }

  /// Some 16 tokens, all their heads, bit for bit.
  Deviation verify() override {
    Deviation deviation;
    const KVCache& kv = cache_.cache;
    const std::size_t step = std::max<std::size_t>(num_tokens_ / 16, 1);
    for (std::size_t token = 0; token < num_tokens_; token += step) {
      const std::int64_t slot = slots_[set_][token];
      const std::int64_t block = slot / kv.block_size, in_block = slot % kv.block_size;
      for (std::int32_t head = 0; head < kv.num_kv_heads; ++head) {
        const std::int64_t key = kv.key_at(block, in_block, head, 0);
        compare_row(deviation, rows_[0], token, head, {key, kv.key_dim_stride});
        const std::int64_t value =
            config_.use_mla ? key + rows_[0].width : kv.value_at(block, in_block, head, 0);
        compare_row(deviation, rows_[1], token, head, {value, 1});
      }
    }
    return deviation;
  }

 private:
  /// Keys or values; of latent attention the latent part or the rotary one.
  struct Rows {
    TiledRandom source;
    std::int32_t width;  // of a head
    Buffer buffer{};
  };

  /// Runs of rows that together fill `rotate_bytes`, as far as the device has room.
  static std::size_t input_sets(const DeviceCapabilities& device, std::size_t rotate_bytes,
                                std::size_t bytes) {
    const auto room =
        static_cast<std::size_t>(std::min(device.max_alloc_bytes, device.global_mem_bytes / 8));
    return std::max<std::size_t>(std::min(rotate_bytes, room) / bytes, 1);
  }

  std::int32_t group_size(const DeviceCapabilities& device) const {
    for (const KernelInfo& kernel : impl_->kernels()) {
      if (kernel.role == "cache") return kernel.work_group_size;
    }
    return cache_op_work_group_size(device);  // of an operation that is no part of the layer
  }

  std::size_t row_elements(const Rows& rows) const {
    return static_cast<std::size_t>(config_.num_kv_heads) * static_cast<std::size_t>(rows.width);
  }

  /// Where the last launch's input has a token's row.
  std::size_t element(const Rows& rows, std::size_t token) const {
    return (input_ * num_tokens_ + token) * row_elements(rows);
  }

  TensorRef input(const Rows& rows) const {
    return {.buffer = rows.buffer.handle(), .offset = static_cast<std::int64_t>(element(rows, 0))};
  }

  /// Where a row's elements are stored.
  struct Stored {
    std::int64_t first, stride;
  };

  void compare_row(Deviation& deviation, const Rows& rows, std::size_t token, std::int32_t head,
                   Stored stored) const {
    const DType type = config_.cache_dtype();
    const std::size_t size = element_size_bytes(type);
    const auto width = static_cast<std::size_t>(rows.width);
    const std::size_t from = element(rows, token) + static_cast<std::size_t>(head) * width;
    std::vector<double> expected(width);
    for (std::size_t d = 0; d < width; ++d) expected[d] = rows.source.at(from + d);
    const std::size_t step = static_cast<std::size_t>(stored.stride) * size;
    std::vector<std::byte> around((width - 1) * step + size), got(width * size);
    queue_.read(cache_.cache.buffer, around, static_cast<std::size_t>(stored.first) * size);
    for (std::size_t d = 0; d < width; ++d) std::memcpy(&got[d * size], &around[d * step], size);
    deviation.merge(compare_bytes(got, encode_elements(type, expected)));
  }

  AttentionConfig config_;
  std::size_t num_tokens_;
  RotatingCache cache_;
  Rows rows_[2];
  Queue queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::vector<const AttentionMetadata*> metadata_;
  std::vector<std::vector<std::int64_t>> slots_;
  std::size_t num_inputs_ = 1;
  std::size_t set_ = 0, input_ = 0;  // of the last launch
};

}  // namespace

std::unique_ptr<Workload> make_cache_workload(const std::shared_ptr<Context>& context,
                                              const BenchOptions& options,
                                              const BenchShape& shape) {
  return std::make_unique<CacheWorkload>(context, options, shape);
}

}  // namespace clattn::cli
