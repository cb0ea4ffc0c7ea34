// The role of x-packed caches. No suite of `clattn bench` reads one, so that what is timed is here.
#include <algorithm>
#include <chrono>
#include <clattn/clattn.hpp>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cli/bench_data.hpp"
#include "cli/check_packed.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"
#include "cli/statistics.hpp"
#include "cli/tune_target.hpp"

namespace clattn::cli {
namespace {

/// Decode of equal requests over one x-packed cache, whose pages are shuffled.
class PackedWorkload final : public Workload {
 public:
  PackedWorkload(const std::shared_ptr<Context>& context, const BenchShape& shape)
      : shape_(shape),
        config_(shape.model.config()),
        kv_(config_.cache_dtype(), 1),
        q_(config_.dtype, 2),
        queue_(context->create_queue()),
        attention_(make_paged_attention(*context, config_)),
        builder_(make_paged_attention_builder(context, config_,
                                              builder_options(shape, count_pages(shape)))),
        batch_(shape, shuffled_pages(count_pages(shape))) {
    const auto slots = static_cast<std::size_t>(count_pages(shape) * config_.block_size);
    const std::size_t cached = slots * static_cast<std::size_t>(config_.num_kv_heads) * width();
    const std::size_t queries = shape.requests.size() * heads() * width();
    const std::size_t cache_bytes = cached * element_size_bytes(config_.cache_dtype());
    keys_ = context->allocate(cache_bytes);
    values_ = context->allocate(cache_bytes);
    query_ = context->allocate(queries * element_size_bytes(config_.dtype));
    out_ = context->allocate((queries * element_size_bytes(config_.dtype) + 3) / 4 * 4);
    kv_.fill(queue_, keys_, cached);
    kv_.fill(queue_, values_, cached);
    q_.fill(queue_, query_, queries);
    cache_ = {.key = keys_.handle(),
              .value = values_.handle(),
              .dtype = config_.cache_dtype(),
              .num_blocks = count_pages(shape),
              .block_size = config_.block_size,
              .num_kv_heads = config_.num_kv_heads,
              .head_size = config_.head_size};
    metadata_ = &builder_->build(queue_, batch_.metadata());
    queue_.finish();
    work.bytes = 2 * static_cast<double>(cache_bytes);
    work.flops = 4 * static_cast<double>(heads() * width() * slots);
    touched_bytes = 2 * cache_bytes;
  }

  double run(int launches) override {
    queue_.fill(out_, kPoison, 0, out_.size_bytes());
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < launches; ++i) {
      attention_->forward(queue_, {.buffer = query_.handle()}, cache_, *metadata_,
                          {.buffer = out_.handle()});
    }
    queue_.finish();
    return seconds_since(start) / launches;
  }

  /// The first and the last request, each in another head.
  Deviation verify() override {
    Deviation deviation;
    for (const std::size_t request : std::set<std::size_t>{0, shape_.requests.size() - 1}) {
      deviation.merge(verify_head(request, request % heads()));
    }
    return deviation;
  }

 private:
  static std::vector<std::int32_t> shuffled_pages(std::int64_t count) {
    std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    return pages;
  }

  std::size_t heads() const { return static_cast<std::size_t>(config_.num_heads); }
  std::size_t width() const { return static_cast<std::size_t>(config_.head_size); }

  Deviation verify_head(std::size_t request, std::size_t head) const {
    const std::int32_t keys = shape_.requests[request].seq_len;
    oracle::AttentionCase call;
    call.num_heads = call.num_kv_heads = call.block_size = 1;
    call.head_size = config_.head_size;
    call.scale = 1 / std::sqrt(config_.head_size);
    call.query_start_loc = {0, 1};
    call.seq_lens = {keys};
    call.max_blocks = keys;
    const std::size_t row = (request * heads() + head) * width();
    for (std::size_t d = 0; d < width(); ++d) call.query.push_back(q_.at(row + d));
    const auto kv_head =
        static_cast<std::int64_t>(head * static_cast<std::size_t>(config_.num_kv_heads) / heads());
    const auto at = [](std::int64_t element) { return static_cast<std::size_t>(element); };
    for (std::int32_t position = 0; position < keys; ++position) {
      call.block_table.push_back(position);
      const std::int64_t slot = batch_.slot(request, position - keys + 1);
      const std::int64_t block = slot / config_.block_size, token = slot % config_.block_size;
      for (std::int64_t dim = 0; dim < config_.head_size; ++dim) {
        call.key_cache.push_back(kv_.at(at(cache_.key_at(block, token, kv_head, dim))));
        call.value_cache.push_back(kv_.at(at(cache_.value_at(block, token, kv_head, dim))));
      }
    }
    std::vector<std::byte> got(width() * element_size_bytes(config_.dtype));
    queue_.read(out_, got, row * element_size_bytes(config_.dtype));
    return compare(config_.dtype, got, {}, oracle::attention(call, element_of(config_.dtype)));
  }

  BenchShape shape_;
  AttentionConfig config_;
  TiledRandom kv_, q_;
  Queue queue_;
  std::shared_ptr<const PagedAttention> attention_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  BenchBatch batch_;
  Buffer keys_, values_, query_, out_;
  PackedKVCache cache_;
  const AttentionMetadata* metadata_ = nullptr;
};

}  // namespace

TuneTarget make_packed_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  const AttentionConfig config = shape.config;
  TuneTarget target;
  target.key = shape.key(context->capabilities());
  target.name = shape.name();
  target.kernel = [context, config]() -> std::optional<KernelInfo> {
    std::optional<KernelInfo> largest;
    for (const KernelInfo& kernel : make_paged_attention(*context, config)->kernels()) {
      if (kernel.role == "packed_decode") largest = kernel;
    }
    return largest;
  };
  AttentionConfig small = config;  // as of the other roles
  small.num_kv_heads = std::min(config.num_kv_heads, 2);
  small.num_heads = small.num_kv_heads * config.num_queries_per_kv();
  target.check = [context, small] {
    Deviation deviation;
    for (const BatchFamily& batch : packed_batches()) {
      deviation.merge(compare_packed_attention(context, small, batch, 8800).deviation);
    }
    return deviation;
  };
  const bool cpu = context->capabilities().kind == DeviceKind::kCpu;
  for (const std::int32_t requests : {1, cpu ? 8 : 32}) {
    BenchShape timed;
    timed.model = shape.model();
    timed.suite = "decode";
    timed.requests.assign(static_cast<std::size_t>(requests), {1, cpu ? 1024 : 2048});
    target.workloads.emplace_back(
        [context, timed] { return std::make_unique<PackedWorkload>(context, timed); });
  }
  return target;
}

}  // namespace clattn::cli
