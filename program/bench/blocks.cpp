#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <clattn/mla.hpp>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Whole blocks of one layer's cache: half of a set's pages to the other half, to a host image or
/// back. Launches take turns with sets of pages, and with their places in the image.
class BlocksWorkload final : public Workload {
 public:
  explicit BlocksWorkload(const BenchTask& task)
      : context_(task.context),
        op_(task.shape.model.op),
        dtype_(task.shape.model.config.cache_dtype()),
        cache_(make_rotating_cache(task)),
        source_(dtype_, 1),
        queue_(context_->create_queue()) {
    const KVCache& kv = cache_.cache;
    const AttentionConfig& config = task.shape.model.config;
    if (config.use_mla) latent_ = make_mla_cache(kv, config.rope_dim);
    const bool narrow = kv.value_size() != kv.head_size;  // one row of a key and its value
    const std::int32_t row = kv.head_size + (narrow ? kv.value_size() : 0);
    block_bytes_ = to_size(kv.block_size) * to_size(kv.num_kv_heads) * to_size(row) *
                   element_size_bytes(dtype_);
    planes_ = {kv.k_offset};
    if (!latent_ && !narrow) planes_.push_back(kv.v_offset);
    source_.fill(queue_, kv.buffer);
    const auto half = to_size(cache_.pages_per_set / 2);
    for (std::size_t set = 0; set < to_size(cache_.num_sets); ++set) {
      pairs_.push_back(pairs_of(cache_.pages_of_set(set), set * half));
    }
    const std::size_t launch_bytes = half * planes_.size() * block_bytes_;
    if (op_ != CacheOp::kCopyBlocks) {
      image_.emplace(*context_, pairs_.size() * launch_bytes);
      if (op_ == CacheOp::kSwapIn) fill_image();
    }
    work.bytes = 2.0 * static_cast<double>(launch_bytes);
    touched_bytes = pairs_.size() * 2 * launch_bytes;
    if (op_ == CacheOp::kCopyBlocks) {
      kernels = {{.name = latent_ ? "copy_blocks_mla" : "copy_blocks",
                  .role = "cache",
                  .work_group_size = cache_op_work_group_size(context_->capabilities())}};
    } else {
      kernels = {{.name = "swap_blocks", .role = "host"}};  // copies of the driver's
    }
  }

  double run(int launches) override {
    const std::size_t last = (set_ + to_size(launches)) % pairs_.size();
    for (const BlockPair& pair : pairs_[last]) poison(pair.destination);
    return seconds_each(queue_, launches, [&] {
      set_ = (set_ + 1) % pairs_.size();
      launch();
    });
  }

  /// Some 16 blocks, bit for bit.
  Deviation verify() override {
    Deviation deviation;
    const std::vector<BlockPair>& pairs = pairs_[set_];
    const std::size_t step = std::max<std::size_t>(pairs.size() / 16, 1);
    for (std::size_t i = 0; i < pairs.size(); i += step) {
      for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
        const std::size_t from = op_ == CacheOp::kSwapIn ? image_byte(plane, pairs[i].source)
                                                         : cache_byte(plane, pairs[i].source);
        const std::size_t element = element_size_bytes(dtype_);
        deviation.merge(
            compare_bytes(destination(plane, pairs[i].destination),
                          source_.stored(dtype_, from / element, block_bytes_ / element)));
      }
    }
    return deviation;
  }

 private:
  /// Of a set: its first pages, its last ones, and its places in the image.
  std::vector<BlockPair> pairs_of(const std::vector<std::int32_t>& pages, std::size_t image) const {
    std::vector<BlockPair> pairs;
    for (std::size_t i = 0; i < pages.size() / 2; ++i) {
      const std::int64_t first = pages[i], last = pages[pages.size() - 1 - i];
      const auto place = static_cast<std::int64_t>(image + i);
      pairs.push_back(op_ == CacheOp::kSwapOut  ? BlockPair{first, place}
                      : op_ == CacheOp::kSwapIn ? BlockPair{place, last}
                                                : BlockPair{first, last});
    }
    return pairs;
  }

  void launch() {
    const KVCache& kv = cache_.cache;
    const std::vector<BlockPair>& pairs = pairs_[set_];
    if (op_ == CacheOp::kCopyBlocks) {
      if (latent_) return copy_blocks_mla(*context_, queue_, std::span(&*latent_, 1), pairs);
      return copy_blocks(*context_, queue_, std::span(&kv, 1), pairs);
    }
    const SwapSpace device = latent_ ? SwapSpace(*latent_) : SwapSpace(kv);
    const SwapSpace host = image_->bytes();
    const bool out = op_ == CacheOp::kSwapOut;
    swap_blocks(*context_, queue_, out ? device : host, out ? host : device, pairs);
  }

  std::size_t cache_byte(std::size_t plane, std::int64_t block) const {
    return to_size(planes_[plane] + block * cache_.cache.block_stride) * element_size_bytes(dtype_);
  }

  /// The image has the cache's order: all K before all V, or K and V of each block.
  std::size_t image_byte(std::size_t plane, std::int64_t block) const {
    const auto at = to_size(block);
    const bool by_block = cache_.cache.v_offset < cache_.cache.block_stride;
    const std::size_t blocks = image_->bytes().size() / (planes_.size() * block_bytes_);
    return (by_block ? at * planes_.size() + plane : plane * blocks + at) * block_bytes_;
  }

  void poison(std::int64_t block) {
    for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
      if (op_ == CacheOp::kSwapOut) {
        std::memset(&image_->bytes()[image_byte(plane, block)], 0x7F, block_bytes_);
      } else {
        queue_.fill(cache_.cache.buffer, kPoison, cache_byte(plane, block) / 4 * 4,
                    block_bytes_ / 4 * 4);
      }
    }
  }

  std::vector<std::byte> destination(std::size_t plane, std::int64_t block) const {
    std::vector<std::byte> got(block_bytes_);
    if (op_ == CacheOp::kSwapOut) {
      std::memcpy(got.data(), &image_->bytes()[image_byte(plane, block)], block_bytes_);
    } else {
      queue_.read(cache_.cache.buffer, got, cache_byte(plane, block));
    }
    return got;
  }

  /// Byte for byte what TiledRandom would put on a device.
  void fill_image() {
    const std::size_t size = image_->bytes().size();
    const Buffer copy = context_->allocate(size);
    source_.fill(queue_, copy);
    queue_.read(copy, image_->bytes());
  }

  std::shared_ptr<Context> context_;
  CacheOp op_;
  DType dtype_;
  RotatingCache cache_;
  TiledRandom source_;
  Queue queue_;
  std::optional<MLACache> latent_{};
  std::size_t block_bytes_ = 0;                // of a plane
  std::vector<std::int64_t> planes_;           // elements before K, before V if it is another
  std::vector<std::vector<BlockPair>> pairs_;  // of the sets
  std::optional<PinnedMemory> image_;
  std::size_t set_ = 0;  // of the last launch
};

/// All tokens of a batch from latent pages to contiguous rows.
class GatherWorkload final : public Workload {
 public:
  explicit GatherWorkload(const BenchTask& task)
      : context_(task.context),
        dtype_(task.shape.model.config.dtype),
        cache_(make_rotating_cache(task)),
        latent_(make_mla_cache(cache_.cache, task.shape.model.config.rope_dim)),
        source_(cache_.cache.dtype, 1),
        width_(to_size(task.shape.model.config.head_size)),
        queue_(context_->create_queue()) {
    const BenchShape& shape = task.shape;
    const Buffer& kv = cache_.cache.buffer;
    source_.fill(queue_, kv);
    for (const RequestShape& request : shape.requests) {
      starts_.push_back(starts_.back() + request.seq_len);
    }
    for (std::size_t set = 0; set < to_size(cache_.num_sets); ++set) {
      batches_.emplace_back(shape, cache_.pages_of_set(set));
    }
    const auto elements = to_size(starts_.back()) * width_;
    const std::size_t bytes = elements * element_size_bytes(dtype_);
    const DeviceCapabilities& device = context_->capabilities();
    num_outputs_ = std::clamp<std::size_t>(room_of(device, 8) / bytes, 1, batches_.size());
    output_ = context_->allocate((num_outputs_ * bytes + 3) / 4 * 4);
    work.bytes = static_cast<double>(elements * element_size_bytes(latent_.dtype) + bytes);
    touched_bytes = kv.size_bytes() + num_outputs_ * bytes;
    kernels = {{.name = "gather_and_maybe_dequant_cache",
                .role = "cache",
                .work_group_size = cache_op_work_group_size(device)}};
  }

  double run(int launches) override {
    queue_.fill(output_, kPoison, 0, output_.size_bytes());
    return seconds_each(queue_, launches, [&] {
      set_ = (set_ + 1) % batches_.size();
      const BenchBatch& batch = batches_[set_];
      gather_and_maybe_dequant_cache(*context_, queue_, latent_,
                                     {.buffer = output_.handle(), .offset = first_element()},
                                     dtype_,
                                     {.cu_seq_lens = starts_,
                                      .block_table = batch.block_table,
                                      .block_table_stride = batch.max_blocks,
                                      .seq_starts = {}});
    });
  }

  /// First, middle and last token of some 16 requests, bit for bit.
  Deviation verify() override {
    Deviation deviation;
    const std::size_t requests = starts_.size() - 1;
    for (std::size_t r = 0; r < requests; r += std::max<std::size_t>(requests / 16, 1)) {
      const std::int32_t tokens = starts_[r + 1] - starts_[r];
      for (const std::int32_t token : {0, tokens / 2, tokens - 1}) compare_row(deviation, r, token);
    }
    return deviation;
  }

 private:
  std::int64_t first_element() const {
    const std::size_t output = set_ % num_outputs_;
    return static_cast<std::int64_t>(output * to_size(starts_.back()) * width_);
  }

  void compare_row(Deviation& deviation, std::size_t request, std::int32_t token) const {
    const BenchBatch& batch = batches_[set_];
    const std::int64_t block =
        batch.block_table[request * to_size(batch.max_blocks) + to_size(token / batch.block_size)];
    const std::int64_t from = cache_.cache.key_at(block, token % batch.block_size, 0, 0);
    std::vector<std::byte> got(width_ * element_size_bytes(dtype_));
    const auto first = to_size(first_element()) * element_size_bytes(dtype_);
    const auto row = to_size(starts_[request]) + to_size(token);
    queue_.read(output_, got, first + row * got.size());
    deviation.merge(compare_bytes(got, source_.stored(dtype_, to_size(from), width_)));
  }

  std::shared_ptr<Context> context_;
  DType dtype_;
  RotatingCache cache_;
  MLACache latent_;
  TiledRandom source_;
  std::size_t width_;  // of a row
  Queue queue_;
  std::vector<std::int32_t> starts_ = {0};
  std::vector<BenchBatch> batches_;  // of the sets
  Buffer output_;
  std::size_t num_outputs_ = 1, set_ = 0;  // of the last launch
};

}  // namespace

std::unique_ptr<Workload> make_blocks_workload(const BenchTask& task) {
  return std::make_unique<BlocksWorkload>(task);
}

std::unique_ptr<Workload> make_gather_workload(const BenchTask& task) {
  return std::make_unique<GatherWorkload>(task);
}

}  // namespace clattn::cli
