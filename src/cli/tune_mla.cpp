#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <clattn/mla.hpp>
#include <cmath>
#include <utility>

#include "cli/bench_data.hpp"
#include "cli/check_mla.hpp"
#include "cli/check_report.hpp"
#include "cli/device_memory.hpp"
#include "cli/elements.hpp"
#include "cli/tune_target.hpp"
#include "cli/verify.hpp"

namespace clattn::cli {
namespace {

/// Decodes of one token over latent rows, pages in the order of a long-lived allocator.
class MLAWorkload final : public Workload {
 public:
  MLAWorkload(const std::shared_ptr<Context>& context, const MLAConfig& config,
              const BenchShape& shape)
      : config_(config),
        shape_(shape),
        rows_(config.cache_dtype(), 1),
        q_(config.dtype, 2),
        queue_(context->create_queue()),
        impl_(make_mla_impl(*context, config)) {
    const std::int64_t pages = (shape.seq_len + config.block_size - 1) / config.block_size;
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages * shape.batch));
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<std::int32_t>(table.size() - 1 - i);
    }
    const std::size_t cache_elements = table.size() * size_of(config.block_size) * width();
    cache_ = {
        .buffer = context->allocate(cache_elements * element_size_bytes(config.cache_dtype())),
        .dtype = config.cache_dtype(),
        .num_blocks = static_cast<std::int64_t>(table.size()),
        .block_size = config.block_size,
        .kv_lora_rank = config.kv_lora_rank,
        .rope_dim = config.rope_dim,
        .scale = {}};
    rows_.fill(queue_, cache_.buffer, cache_elements);
    const std::size_t element = element_size_bytes(config.dtype);
    const std::size_t num_rows = size_of(shape.batch) * size_of(config.num_heads);
    query_ = context->allocate(num_rows * width() * element);
    q_.fill(queue_, query_, num_rows * width());
    out_ = context->allocate(num_rows * size_of(config.kv_lora_rank) * element);
    const EqualBatch batch(shape, config.block_size, std::move(table));
    builder_ = make_mla_builder(context, config, builder_options(shape, cache_.num_blocks));
    metadata_ = &builder_->build(queue_, batch.metadata());
    unit = WorkUnit::kFlop;
    work_per_launch = 2.0 * shape.batch * shape.seq_len * config.num_heads *
                      (2.0 * config.kv_lora_rank + config.rope_dim);
  }

  double run(int launches) override {
    queue_.fill(out_, kPoison, 0, out_.size_bytes() / 4 * 4);
    queue_.finish();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < launches; ++i) {
      impl_->forward(queue_, {.buffer = query_.handle()}, cache_, *metadata_,
                     {.buffer = out_.handle()});
    }
    queue_.finish();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
           launches;
  }

  /// The last request's first eight heads.
  Deviation verify() override {
    const std::int32_t heads = std::min(config_.num_heads, 8);
    const std::size_t request = size_of(shape_.batch - 1);
    const std::size_t row = request * size_of(config_.num_heads);
    oracle::AttentionCase call;
    call.num_heads = heads;
    call.num_kv_heads = 1;
    call.head_size = config_.kv_lora_rank + config_.rope_dim;
    call.block_size = config_.block_size;
    call.scale = config_.scale ? static_cast<double>(*config_.scale)
                               : 1.0 / std::sqrt(static_cast<double>(width()));
    call.query_start_loc = {0, 1};
    call.seq_lens = {shape_.seq_len};
    call.max_blocks = (shape_.seq_len + config_.block_size - 1) / config_.block_size;
    for (std::size_t i = 0; i < size_of(heads) * width(); ++i) {
      call.query.push_back(q_.at(row * width() + i));
    }
    const std::size_t page_elements = size_of(config_.block_size) * width();
    for (std::int64_t page = 0; page < call.max_blocks; ++page) {
      call.block_table.push_back(static_cast<std::int32_t>(page));
      const std::size_t block =
          size_of(cache_.num_blocks) - 1 - (request * size_of(call.max_blocks) + size_of(page));
      for (std::size_t i = 0; i < page_elements; ++i) {
        call.key_cache.push_back(rows_.at(block * page_elements + i));
      }
    }
    call.value_cache = call.key_cache;
    const std::size_t element = element_size_bytes(config_.dtype);
    const std::size_t rank = size_of(config_.kv_lora_rank);
    std::vector<std::byte> got(size_of(heads) * rank * element);
    queue_.read(out_, got, row * rank * element);
    return compare(config_.dtype, got, {},
                   latent_part(oracle::attention(call, element_of(config_.dtype)), config_));
  }

 private:
  static std::size_t size_of(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::size_t width() const { return size_of(config_.kv_lora_rank + config_.rope_dim); }

  MLAConfig config_;
  BenchShape shape_;
  TiledRandom rows_, q_;
  Queue queue_;
  std::shared_ptr<const MLAImpl> impl_;
  MLACache cache_;
  Buffer query_, out_;
  std::unique_ptr<AttentionMetadataBuilder> builder_;
  const AttentionMetadata* metadata_ = nullptr;
};

}  // namespace

TuneTarget make_mla_target(const std::shared_ptr<Context>& context, const MLAConfig& config) {
  const DeviceCapabilities& device = context->capabilities();
  TuneTarget target;
  target.key = {.device = device.name,
                .driver = device.driver_version,
                .role = "mla_decode",
                .head_size = config.kv_lora_rank,
                .group = config.num_heads,
                .dtype = config.dtype,
                .cache_dtype = config.cache_dtype(),
                .pages = std::string(page_class(config.block_size))};
  target.name =
      fmt::format("mla_decode, {} heads, {} + {}, {}", config.num_heads, config.kv_lora_rank,
                  config.rope_dim, types_of(config.dtype, config.cache_dtype()));
  target.kernel = [context, config]() -> std::optional<KernelInfo> {
    std::optional<KernelInfo> largest;
    for (const KernelInfo& kernel : make_mla_impl(*context, config)->kernels()) {
      if (kernel.role == "mla_decode") largest = kernel;
    }
    return largest;
  };
  target.check = [context, config] {
    Deviation deviation;
    for (const BatchFamily& batch : mla_batches()) {
      deviation.merge(compare_mla(context, config, batch, 7700).deviation);
    }
    return deviation;
  };
  const bool cpu = device.kind == DeviceKind::kCpu;
  for (const std::int32_t requests : cpu ? std::vector{1, 4} : std::vector{1, 32}) {
    const BenchShape timed{.suite = "mla_decode",
                           .set = {},
                           .batch = requests,
                           .query_len = 1,
                           .seq_len = cpu ? 256 : 2048};
    target.workloads.emplace_back([=]() -> std::unique_ptr<Workload> {
      return std::make_unique<MLAWorkload>(context, config, timed);
    });
  }
  return target;
}

}  // namespace clattn::cli
