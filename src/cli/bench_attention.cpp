#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <span>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

class AttentionWorkload final : public Workload {
 public:
  AttentionWorkload(const std::shared_ptr<Context>& context, const BenchOptions& options,
                    const BenchShape& shape)
      : config_(options.config),
        shape_(shape),
        cache_(make_rotating_cache(context, options, shape)),
        kv_(config_.cache_dtype(), 1),
        q_(config_.dtype, 2),
        queue_(context->create_queue()),
        impl_(cache_.backend->make_impl(context, config_)) {
    const std::size_t element = element_size_bytes(config_.dtype);
    const std::size_t num_elements = static_cast<std::size_t>(shape.num_tokens()) * row_elements();
    query_ = context->allocate(num_elements * element);
    out_ = context->allocate((num_elements * element + 3) / 4 * 4);
    q_.fill(queue_, query_, num_elements);
    kv_.fill(queue_, cache_.cache.buffer,
             cache_.cache.buffer.size_bytes() / element_size_bytes(config_.cache_dtype()));
    const std::int64_t num_blocks = cache_.pages_per_set * cache_.num_sets;
    for (std::int32_t set = 0; set < cache_.num_sets; ++set) {
      builders_.push_back(
          cache_.backend->make_builder(context, config_, builder_options(shape, num_blocks)));
      const EqualBatch batch(shape, config_.block_size, cache_.block_table(set));
      metadata_.push_back(&builders_.back()->build(queue_, batch.metadata()));
    }
    backend = cache_.backend->name();
    kernels = launched_kernels();
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
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
           launches;
  }

  /// The first, middle and last token of the first and last request, each in another KV head.
  Deviation verify() override {
    Deviation deviation;
    std::int32_t kv_head = 0;
    for (const std::int32_t request : std::set<std::int32_t>{0, shape_.batch - 1}) {
      for (const std::int32_t token :
           std::set<std::int32_t>{0, shape_.query_len / 2, shape_.query_len - 1}) {
        deviation.merge(verify_row(request, token, kv_head));
        kv_head = (kv_head + 1) % config_.num_kv_heads;
      }
    }
    return deviation;
  }

 private:
  std::size_t row_elements() const {
    return static_cast<std::size_t>(config_.num_heads) *
           static_cast<std::size_t>(config_.head_size);
  }

  /// The kernels of one forward; also builds them before anything is timed.
  std::string launched_kernels() {
    std::vector<LaunchRecord> launches;
    impl_->forward(queue_, {.buffer = query_.handle()}, cache_.cache, *metadata_[0],
                   {.buffer = out_.handle()}, nullptr, nullptr, &launches);
    queue_.finish();
    std::vector<std::string_view> names;
    names.reserve(launches.size());
    for (const LaunchRecord& launch : launches) {
      names.push_back(launch.kernel);
      rounds_weights_ |= launch.rounds_weights;
    }
    return fmt::format("{}", fmt::join(names, " + "));
  }

  /// Decode is judged by the bytes of the KV cache that it must read once, prefill by the exact
  /// causal multiply-adds.
  void count_work() {
    const double q = shape_.query_len, s = shape_.seq_len, d = config_.head_size;
    if (shape_.suite == "decode") {
      unit = WorkUnit::kBytes;
      work_per_launch = 2.0 * shape_.batch * s * config_.num_kv_heads * d *
                        static_cast<double>(element_size_bytes(config_.cache_dtype()));
    } else {
      unit = WorkUnit::kFlop;
      const double pairs = q * s - q * (q - 1) / 2;
      work_per_launch = 4.0 * shape_.batch * config_.num_heads * d * pairs;
    }
  }

  Deviation verify_row(std::int32_t request, std::int32_t token, std::int32_t kv_head) const {
    const std::int32_t group = config_.num_heads / config_.num_kv_heads;
    const std::size_t group_elements =
        static_cast<std::size_t>(group) * static_cast<std::size_t>(config_.head_size);
    const std::size_t row =
        static_cast<std::size_t>(request * shape_.query_len + token) * row_elements() +
        static_cast<std::size_t>(kv_head) * group_elements;
    oracle::AttentionCase call = oracle_row(request, token, kv_head);
    call.num_heads = group;
    for (std::size_t i = 0; i < group_elements; ++i) call.query.push_back(q_.at(row + i));
    const std::size_t element = element_size_bytes(config_.dtype);
    std::vector<std::byte> got(group_elements * element);
    queue_.read(out_, got, row * element);
    return compare(config_.dtype, got, {}, oracle::attention(call, element_of(config_.dtype)),
                   rounds_weights_);
  }

  /// The keys and values of one KV head that one token sees, as a batch of their own.
  oracle::AttentionCase oracle_row(std::int32_t request, std::int32_t token,
                                   std::int32_t kv_head) const {
    oracle::AttentionCase call;
    call.num_kv_heads = 1;
    call.head_size = config_.head_size;
    call.block_size = config_.block_size;
    call.scale = 1.0 / std::sqrt(config_.head_size);
    call.query_start_loc = {0, 1};
    call.seq_lens = {shape_.seq_len - shape_.query_len + token + 1};
    const KVCache& kv = cache_.cache;
    const std::vector<std::int32_t> table = cache_.block_table(static_cast<std::int32_t>(set_));
    const std::int64_t pages_per_request = cache_.pages_per_set / shape_.batch;
    call.max_blocks = pages_per_request;
    for (std::int32_t page = 0; page < pages_per_request; ++page) {
      call.block_table.push_back(page);
      const std::int64_t block =
          table[static_cast<std::size_t>(request * pages_per_request + page)];
      for (std::int32_t slot = 0; slot < config_.block_size; ++slot) {
        const std::int64_t at =
            block * kv.block_stride + slot * kv.token_stride + kv_head * kv.head_stride;
        for (std::int32_t d = 0; d < config_.head_size; ++d) {
          call.key_cache.push_back(kv_.at(static_cast<std::size_t>(kv.k_offset + at + d)));
          call.value_cache.push_back(kv_.at(static_cast<std::size_t>(kv.v_offset + at + d)));
        }
      }
    }
    return call;
  }

  AttentionConfig config_;
  BenchShape shape_;
  RotatingCache cache_;
  TiledRandom kv_, q_;
  Queue queue_;
  std::shared_ptr<const AttentionImpl> impl_;
  bool rounds_weights_ = false;  // a kernel of the forward does
  Buffer query_, out_;
  std::vector<std::unique_ptr<AttentionMetadataBuilder>> builders_;
  std::vector<const AttentionMetadata*> metadata_;
  std::size_t set_ = 0;
};

}  // namespace

std::unique_ptr<Workload> make_attention_workload(const std::shared_ptr<Context>& context,
                                                  const BenchOptions& options,
                                                  const BenchShape& shape) {
  return std::make_unique<AttentionWorkload>(context, options, shape);
}

}  // namespace clattn::cli
