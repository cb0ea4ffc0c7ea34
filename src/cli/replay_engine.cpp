#include "cli/replay_engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <utility>

#include "cli/attention_call.hpp"
#include "cli/device_memory.hpp"

namespace clattn::cli {
namespace {

using Clock = std::chrono::steady_clock;

double elapsed_us(Clock::time_point from) {
  return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

double event_us(const Event& event) {
  return static_cast<double>(event.duration_ns()) * 1e-3;
}

// A pattern of set bits is a NaN in f32, f16, bf16 and fp8 alike.
constexpr std::uint32_t kNanPattern = 0xFFFFFFFFU;
constexpr std::uint32_t kFarCodes = 0x7F7F7F7FU;  // int8 has no NaN: twice what the pool holds

}  // namespace

Engine::Engine(std::shared_ptr<Context> context, const EngineConfig& config)
    : context_(std::move(context)),
      config_(config),
      backend_(get_attn_backend(config.attention, &context_->capabilities(), config.backend)),
      layout_(choose_layout(backend_, config.layout, config.attention, &context_->capabilities())),
      queue_(context_->create_queue(QueueProfiling::kOn)),
      impl_(backend_.make_impl(context_, config.attention)),
      builder_(backend_.make_builder(context_, config.attention, {.limits = config.limits})) {
  const auto layers = static_cast<std::size_t>(config.num_layers);
  const std::int64_t tokens = config.limits.max_num_batched_tokens;
  make_caches();
  pool_ = std::make_unique<SyntheticPool>(*context_, queue_, config.attention,
                                          pool_row(kStartRows, config.num_layers) + tokens,
                                          config.seed);
  const std::size_t output_bytes = static_cast<std::size_t>(tokens) * output_row_bytes();
  output_ = context_->allocate(output_bytes);
  if (config.capture) captured_ = context_->allocate(output_bytes);
  for (const KernelInfo& kernel : impl_->kernels()) {
    if (kernel.role == "cache") cache_kernel_ = kernel.name;
  }
  write_events_.resize(layers);
  launches_.resize(layers);
  scheduled_tokens_.reserve(static_cast<std::size_t>(config.limits.max_num_reqs));
  order_.reserve(static_cast<std::size_t>(config.limits.max_num_reqs));
}

void Engine::make_caches() {
  const AttentionConfig& attention = config_.attention;
  const KVCacheSpec spec{.block_size = attention.block_size,
                         .num_kv_heads = attention.num_kv_heads,
                         .head_size = attention.head_size,
                         .dtype = attention.cache_dtype()};
  KVCacheConfig caches;
  caches.num_blocks = config_.limits.num_blocks;
  caches.groups.push_back({.layer_names = {}, .spec = spec});
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string name = fmt::format("layer.{}", layer);
    caches.groups[0].layer_names.push_back(name);
    caches.tensors.push_back(
        {static_cast<std::size_t>(caches.num_blocks) * spec.page_size_bytes(), {name}});
  }
  cache_buffers_ = allocate_kv_cache(*context_, queue_, caches);
  for (const std::string& name : caches.groups[0].layer_names) {
    caches_.push_back(reshape_kv_cache(cache_buffers_.at(name), spec, backend_, layout_));
    if (is_quantized(spec.dtype)) {
      set_scales(*context_, queue_, std::array{kPoolCacheScale, kPoolCacheScale}, caches_.back());
    }
  }
}

void Engine::poison(const Buffer& buffer, std::uint32_t bits) const {
  queue_.fill(buffer, bits, 0, buffer.size_bytes() / 4 * 4);
}

void Engine::warm_up_and_poison() {
  const BatchLimits& limits = config_.limits;
  const std::int64_t room = limits.num_blocks * config_.attention.block_size;
  const auto longest =
      static_cast<std::int32_t>(std::min<std::int64_t>({room, limits.max_model_len, 4096}));
  const std::int32_t chunk = std::min({longest, limits.max_num_batched_tokens, 64});
  const TraceRequest trace{.prompt_tokens = longest};
  Request request{.trace = &trace};
  request.blocks.resize(
      static_cast<std::size_t>(blocks_needed(trace, config_.attention.block_size)));
  std::iota(request.blocks.begin(), request.blocks.end(), 0);
  StepBatch batch(1, static_cast<std::int64_t>(request.blocks.size()),
                  config_.attention.block_size);
  // A short decode, a split decode with what joins it, a prefill over history.
  const std::pair<std::int32_t, std::int32_t> shapes[] = {
      {0, 1}, {longest - 1, 1}, {longest - chunk, chunk}};
  for (const auto& [computed, fresh] : shapes) {
    ScheduledStep step;
    step.requests.push_back({&request, computed, fresh, fresh == 1});
    batch.assemble(step, order(step));
    run(batch, 0);
  }
  kernel_use_.clear();
  const bool has_nan = config_.attention.cache_dtype() != DType::kInt8;
  for (const auto& [name, buffer] : cache_buffers_) {
    poison(buffer, has_nan ? kNanPattern : kFarCodes);
  }
  queue_.finish();
}

std::span<const std::int32_t> Engine::order(const ScheduledStep& step) {
  scheduled_tokens_.clear();
  for (const ScheduledRequest& request : step.requests) {
    scheduled_tokens_.push_back(request.num_new);
  }
  order_.resize(scheduled_tokens_.size());
  std::iota(order_.begin(), order_.end(), 0);
  builder_->reorder_batch(scheduled_tokens_, order_);
  return order_;
}

StepTimes Engine::run(const StepBatch& batch, std::int64_t start_row,
                      std::optional<std::int32_t> capture_layer) {
  if (capture_layer) {
    poison(captured_, kNanPattern);
    queue_.finish();
  }
  StepTimes times;
  Event upload;
  const auto start = Clock::now();
  const CommonAttentionMetadata view = batch.view();
  const AttentionMetadata& metadata = builder_->build(queue_, view, &upload);
  times.metadata_us = elapsed_us(start);
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const auto index = static_cast<std::size_t>(layer);
    const std::int64_t row = pool_row(start_row, layer);
    const Buffer& output = capture_layer == layer ? captured_ : output_;
    impl_->write_kv_cache(queue_, pool_->rows_from(PoolTensor::kKey, row),
                          pool_->rows_from(PoolTensor::kValue, row), caches_[index], metadata,
                          &write_events_[index]);
    impl_->forward(queue_, pool_->rows_from(PoolTensor::kQuery, row), caches_[index], metadata,
                   {.buffer = output.handle()}, nullptr, nullptr, &launches_[index]);
  }
  queue_.finish();
  times.total_us = elapsed_us(start);

  times.upload_us = upload ? event_us(upload) : 0;
  for (const Event& event : write_events_) {
    times.cache_write_us += count_launch(cache_kernel_, event);
  }
  for (const auto& layer : launches_) {
    for (const LaunchRecord& launch : layer) {
      times.attention_us += count_launch(launch.kernel, launch.event);
    }
  }
  return times;
}

bool Engine::rounds_weights() const {
  return std::any_of(launches_.begin(), launches_.end(), [](const auto& layer) {
    return std::any_of(layer.begin(), layer.end(),
                       [](const LaunchRecord& launch) { return launch.rounds_weights; });
  });
}

double Engine::count_launch(std::string_view kernel, const Event& event) {
  const double launch_us = event_us(event);
  auto use = kernel_use_.find(kernel);
  if (use == kernel_use_.end()) use = kernel_use_.emplace(kernel, KernelUse{}).first;
  ++use->second.launches;
  use->second.time_us += launch_us;
  return launch_us;
}

std::size_t Engine::output_row_bytes() const {
  return static_cast<std::size_t>(config_.attention.num_heads) *
         static_cast<std::size_t>(config_.attention.head_size) *
         element_size_bytes(config_.attention.dtype);
}

void Engine::read_captured(std::int32_t token, std::span<std::byte> row) const {
  queue_.read(captured_, row, static_cast<std::size_t>(token) * output_row_bytes());
}

}  // namespace clattn::cli
