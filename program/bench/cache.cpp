#include <algorithm>
#include <clattn/cache_ops.hpp>
#include <cstring>
#include <optional>
#include <vector>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

/// Stores the new tokens of a batch in the cache: as the layer does, into an x-packed pair, or by
/// page lists. Counted in bytes read and written, so both sides rotate: launches take turns with
/// page sets and with runs of input rows.
class CacheWorkload final : public Workload {
 public:
  explicit CacheWorkload(const BenchTask& task)
      : config_(task.shape.model.config),
        num_tokens_(to_size(task.shape.num_tokens())),
        context_(task.context),
        op_(task.shape.model.op),
        cache_(make_rotating_cache(task)),
        queue_(context_->create_queue()),
        impl_(cache_.backend->make_impl(context_, config_)) {
    const auto& [context, options, shape] = task;
    const auto elements = num_tokens_ * (row_elements(rows_[0]) + row_elements(rows_[1]));
    const std::size_t bytes = elements * element_size_bytes(config_.dtype);
    const std::size_t room = std::min(options.rotate_bytes, room_of(context->capabilities(), 8));
    num_inputs_ = std::max<std::size_t>(room / bytes, 1);
    for (Rows& rows : rows_) {
      const std::size_t all = num_inputs_ * num_tokens_ * row_elements(rows);
      rows.buffer = context->allocate(all * element_size_bytes(config_.dtype));
      rows.source.fill(queue_, rows.buffer);
    }
    for (std::size_t set = 0; set < to_size(cache_.num_sets); ++set) {
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
      if (op_ == CacheOp::kAppend) lists_.push_back(upload_lists(cache_.pages_of_set(set), shape));
    }
    if (op_ == CacheOp::kAppend) upload_places(shape);
    if (op_ == CacheOp::kReshapeAndCache) {
      packed_ = split_kv_cache(cache_.cache.buffer, spec_of(config_));
      packed_->scales = cache_.cache.scales;
    }
    const std::size_t stored = elements * element_size_bytes(config_.cache_dtype());
    work.bytes = static_cast<double>(bytes + stored + num_tokens_ * sizeof(std::int64_t));  // slots
    touched_bytes = num_inputs_ * bytes + to_size(cache_.num_sets) * stored;
    if (op_ == CacheOp::kWrite) backend = cache_.backend->name();
    const auto own = kernel_of(impl_->kernels(), "cache");  // unless it is no part of the layer
    kernels = {{.name = operation(),
                .role = "cache",
                .work_group_size = own ? own->work_group_size
                                       : cache_op_work_group_size(context->capabilities())}};
  }

  double run(int launches) override {
    queue_.fill(cache_.cache.buffer, kPoison, 0, cache_.cache.buffer.size_bytes() / 4 * 4);
    return seconds_each(queue_, launches, [&] {
      set_ = (set_ + 1) % slots_.size();
      input_ = (input_ + 1) % num_inputs_;
      store(input(rows_[0]), input(rows_[1]));
    });
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
        compare_row(deviation, rows_[0], token, head, [&](std::int32_t dim) {
          return packed_ ? packed_->key_at(block, in_block, head, dim)
                         : kv.key_at(block, in_block, head, dim);
        });
        compare_row(deviation, rows_[1], token, head, [&](std::int32_t dim) {
          if (config_.use_mla) return kv.key_at(block, in_block, head, rows_[0].width + dim);
          return packed_ ? packed_->value_at(block, in_block, head, dim)
                         : kv.value_at(block, in_block, head, dim);
        });
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

  const char* operation() const {
    if (op_ == CacheOp::kReshapeAndCache) return "reshape_and_cache";
    if (op_ == CacheOp::kAppend) return "append_paged_kv_cache";
    return config_.use_mla ? "concat_and_cache_mla" : "reshape_and_cache_flash";
  }

  void store(TensorRef key, TensorRef value) const {
    const auto tokens = static_cast<std::int64_t>(num_tokens_);
    const AttentionMetadata& metadata = *metadata_[set_];
    if (op_ == CacheOp::kAppend) {
      append_paged_kv_cache(*context_, queue_, key, value, config_.dtype, cache_.cache,
                            batch_indices_, positions_, tokens, lists_[set_]);
    } else if (packed_) {
      reshape_and_cache(*context_, queue_, key, value, config_.dtype, *packed_,
                        metadata.slot_mapping_buffer(), metadata.slot_mapping_offset_bytes(),
                        tokens);
    } else {
      impl_->write_kv_cache(queue_, key, value, cache_.cache, metadata);
    }
  }

  PagedKVLists upload_lists(const std::vector<std::int32_t>& pages, const BenchShape& shape) const {
    std::vector<std::int32_t> starts = {0};
    for (const RequestShape& request : shape.requests) {
      starts.push_back(starts.back() + (request.seq_len - 1) / config_.block_size + 1);
    }
    return {upload(*context_, queue_, pages), upload(*context_, queue_, starts), shape.num_reqs()};
  }

  /// Request and position of every token.
  void upload_places(const BenchShape& shape) {
    std::vector<std::int32_t> requests, positions;
    for (std::int32_t r = 0; r < shape.num_reqs(); ++r) {
      const std::int32_t query_len = shape.requests[to_size(r)].query_len;
      const std::int32_t seq_len = shape.requests[to_size(r)].seq_len;
      for (std::int32_t position = seq_len - query_len; position < seq_len; ++position) {
        requests.push_back(r);
        positions.push_back(position);
      }
    }
    batch_indices_ = upload(*context_, queue_, requests);
    positions_ = upload(*context_, queue_, positions);
  }

  std::size_t row_elements(const Rows& rows) const {
    return to_size(config_.num_kv_heads) * to_size(rows.width);
  }

  /// Where the last launch's input has a token's row.
  std::size_t element(const Rows& rows, std::size_t token) const {
    return (input_ * num_tokens_ + token) * row_elements(rows);
  }

  TensorRef input(const Rows& rows) const {
    return {.buffer = rows.buffer.handle(), .offset = static_cast<std::int64_t>(element(rows, 0))};
  }

  /// `at`: the buffer's element that holds a dim; ascending.
  template <typename At>
  void compare_row(Deviation& deviation, const Rows& rows, std::size_t token, std::int32_t head,
                   At at) const {
    const DType type = config_.cache_dtype();
    const std::size_t size = element_size_bytes(type);
    const auto width = to_size(rows.width);
    const std::size_t from = element(rows, token) + to_size(head) * width;
    const auto byte = [&](std::size_t d) {
      return to_size(at(static_cast<std::int32_t>(d))) * size;
    };
    const std::size_t first = byte(0);
    std::vector<std::byte> around(byte(width - 1) - first + size), got(width * size);
    queue_.read(cache_.cache.buffer, around, first);
    for (std::size_t d = 0; d < width; ++d) {
      std::memcpy(&got[d * size], &around[byte(d) - first], size);
    }
    deviation.merge(compare_bytes(got, rows.source.stored(type, from, width)));
  }

  AttentionConfig config_;
  std::size_t num_tokens_;
  std::shared_ptr<Context> context_;
  CacheOp op_;
  RotatingCache cache_;
  std::optional<PackedKVCache> packed_{};  // a view of the cache's memory
  Rows rows_[2]{{TiledRandom(config_.dtype, 3),
                 config_.use_mla ? config_.output_head_size() : config_.head_size},
                {TiledRandom(config_.dtype, 4),
                 config_.use_mla ? config_.rope_dim : config_.output_head_size()}};
  Queue queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::vector<const AttentionMetadata*> metadata_;
  std::vector<std::vector<std::int64_t>> slots_;
  std::vector<PagedKVLists> lists_;  // of the sets
  Buffer batch_indices_, positions_;
  std::size_t num_inputs_ = 1;
  std::size_t set_ = 0, input_ = 0;  // of the last launch
};

}  // namespace

std::unique_ptr<Workload> make_cache_workload(const BenchTask& task) {
  switch (task.shape.model.op) {
    case CacheOp::kCopyBlocks:
    case CacheOp::kSwapOut:
    case CacheOp::kSwapIn:
      return make_blocks_workload(task);
    case CacheOp::kGather:
      return make_gather_workload(task);
    default:
      return std::make_unique<CacheWorkload>(task);
  }
}

}  // namespace clattn::cli
