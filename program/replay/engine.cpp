#include "program/replay/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <numeric>
#include <utility>

#include "program/common/attention_call.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/statistics.hpp"
#include "program/replay/trace.hpp"

namespace clattn::cli {
namespace {

// A pattern of set bits is a NaN in f32, f16, bf16 and fp8 alike.
constexpr std::uint32_t kNanPattern = 0xFFFFFFFFU;
constexpr std::uint32_t kFarCodes = 0x7F7F7F7FU;  // int8 has no NaN: far from what the pool holds

// Standard deviations: logits then have one of 2 whatever the head size, so that weights differ
// enough for a lost key to show, and no single key takes all.
constexpr double kQuerySize = 4, kKeySize = 0.5;

}  // namespace

SyntheticPool::SyntheticPool(const Context& context, const Queue& queue,
                             const AttentionConfig& config, const DeltaNet& net,
                             std::int64_t num_rows, std::uint64_t seed) {
  const DType cache = config.cache_dtype();
  for (const PoolTensor name : {PoolTensor::kQuery, PoolTensor::kKey, PoolTensor::kValue}) {
    const bool query = name == PoolTensor::kQuery;
    const bool rotary = config.use_mla && name == PoolTensor::kValue;
    const auto own_seed = mix64(seed ^ mix64(static_cast<std::uint64_t>(name) + 1));
    const TiledRandom given(config.dtype, static_cast<std::uint32_t>(own_seed),
                            query ? kQuerySize : kKeySize);
    const std::int64_t row = std::int64_t{query ? config.num_heads : config.num_kv_heads} *
                             (rotary                       ? config.rope_dim
                              : name == PoolTensor::kValue ? config.output_head_size()
                              : query || !config.use_mla   ? config.head_size
                                                           : config.output_head_size());
    const double scale = is_quantized(cache) ? kPoolCacheScale : 1.0;
    tensors_.push_back(
        {row, query ? given : given.stored_as(cache, scale),
         context.allocate(to_size(num_rows * row) * element_size_bytes(config.dtype))});
    given.fill(queue, tensors_.back().buffer);
  }
  if (!net.exists()) return;
  for (const std::int64_t row : {net.channels(), std::int64_t{2} * net.num_v_heads,
                                 net.values()}) {  // in PoolTensor's order
    const TiledRandom given(config.dtype,
                            static_cast<std::uint32_t>(mix64(seed ^ mix64(tensors_.size() + 1))));
    tensors_.push_back(
        {row, given, context.allocate(to_size(num_rows * row) * element_size_bytes(config.dtype))});
    given.fill(queue, tensors_.back().buffer);
  }
}

TensorRef SyntheticPool::rows_from(PoolTensor tensor, std::int64_t row) const {
  const Tensor& source = tensors_[static_cast<std::size_t>(tensor)];
  return {.buffer = source.buffer.handle(), .offset = row * source.row_elems};
}

double SyntheticPool::stored(PoolTensor tensor, std::int64_t row, std::int64_t element) const {
  const Tensor& source = tensors_[static_cast<std::size_t>(tensor)];
  return source.values.at(to_size(row * source.row_elems + element));
}

StepBatch::StepBatch(std::int32_t max_num_seqs, std::int64_t max_blocks_per_request,
                     std::int32_t block_size)
    : max_blocks_(max_blocks_per_request), block_size_(block_size) {
  const auto rows = to_size(max_num_seqs);
  requests_.reserve(rows);
  query_start_loc_.reserve(rows + 1);
  seq_lens_.reserve(rows);
  num_computed_tokens_.reserve(rows);
  // Entries past a request's blocks hold no legal block, at first, and stale ones later: nobody may
  // use them.
  block_table_.assign(rows * to_size(max_blocks_), std::numeric_limits<std::int32_t>::max());
}

void StepBatch::assemble(const ScheduledStep& step, std::span<const std::int32_t> order) {
  requests_.clear();
  seq_lens_.clear();
  num_computed_tokens_.clear();
  query_start_loc_.assign(1, 0);
  auto row = block_table_.begin();
  for (const std::int32_t index : order) {
    const ScheduledRequest& scheduled = step.requests[to_size(index)];
    requests_.push_back(scheduled);
    query_start_loc_.push_back(query_start_loc_.back() + scheduled.num_new);
    seq_lens_.push_back(scheduled.num_computed + scheduled.num_new);
    num_computed_tokens_.push_back(scheduled.num_computed);
    std::ranges::copy(scheduled.request->blocks, row);
    row += max_blocks_;
  }
}

CommonAttentionMetadata StepBatch::view() const {
  auto batch = CommonAttentionMetadata::of(
      query_start_loc_, seq_lens_,
      std::span(block_table_).first(requests_.size() * to_size(max_blocks_)));
  batch.num_computed_tokens = num_computed_tokens_;
  for (const ScheduledRequest& request : requests_) {
    batch.max_query_len = std::max(batch.max_query_len, request.num_new);
  }
  return batch;
}

std::int64_t StepBatch::slot(std::int32_t place, std::int32_t position) const {
  const auto block = to_size(position / block_size_);
  return std::int64_t{request(place).request->blocks[block]} * block_size_ + position % block_size_;
}

Engine::Engine(std::shared_ptr<Context> context, const EngineConfig& config)
    : context_(std::move(context)),
      config_(config),
      backend_(*get_attn_backend(config.attention, &context_->capabilities(), config.backend)),
      layout_(choose_layout(backend_, config.layout, &context_->capabilities())),
      queue_(context_->create_queue(QueueProfiling::kOn)),
      impl_(backend_.make_impl(context_, config.attention)),
      builder_(backend_.make_builder(context_, config.attention, {.limits = config.limits})) {
  const auto layers = to_size(config.num_layers);
  const std::int64_t tokens = config.limits.max_num_batched_tokens;
  make_caches();
  const std::int32_t most_layers = std::max(config.num_layers, config.num_recurrent_layers);
  pool_ = std::make_unique<SyntheticPool>(*context_, queue_, config.attention, config.delta_net,
                                          pool_row(kStartRows, most_layers) + tokens, config.seed);
  if (config.num_recurrent_layers > 0)
    recurrent_ = std::make_unique<RecurrentEngine>(context_, queue_, config);
  const std::size_t output_bytes = to_size(tokens) * output_row_bytes();
  output_ = context_->allocate(output_bytes);
  if (config.capture) captured_ = context_->allocate(output_bytes);
  if (const auto writer = kernel_of(impl_->kernels(), "cache")) cache_kernel_ = writer->name;
  write_events_.resize(layers);
  launches_.resize(layers);
  scheduled_tokens_.reserve(to_size(config.limits.max_num_reqs));
  order_.reserve(to_size(config.limits.max_num_reqs));
}

void Engine::make_caches() {
  const AttentionConfig& attention = config_.attention;
  const KVCacheSpec spec = spec_of(attention);
  KVCacheConfig caches;
  caches.num_blocks = config_.limits.num_blocks;
  caches.groups.push_back({.layer_names = {}, .spec = spec});
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string name = fmt::format("layer.{}", layer);
    caches.groups[0].layer_names.push_back(name);
    caches.tensors.push_back({to_size(caches.num_blocks) * spec.page_size_bytes(), {name}});
  }
  cache_buffers_ = allocate_kv_cache(*context_, queue_, caches);
  for (const std::string& name : caches.groups[0].layer_names) {
    caches_.push_back(reshape_kv_cache(cache_buffers_.at(name), spec, backend_, layout_));
    if (is_quantized(spec.dtype)) {
      set_scales(*context_, queue_, std::array{kPoolCacheScale, kPoolCacheScale}, caches_.back());
    }
  }
}

void Engine::warm_up_and_poison() {
  const BatchLimits& limits = config_.limits;
  const std::int64_t room = limits.num_blocks * config_.attention.block_size;
  const auto longest =
      static_cast<std::int32_t>(std::min<std::int64_t>({room, limits.max_model_len, 4096}));
  const std::int32_t chunk = std::min({longest, limits.max_num_batched_tokens, 64});
  const TraceRequest trace{.prompt_tokens = longest};
  Request request{.trace = &trace, .state_page = 0};
  request.blocks.resize(to_size(blocks_needed(trace, config_.attention.block_size)));
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
    queue_.fill(buffer, has_nan ? kNanPattern : kFarCodes, 0, buffer.size_bytes() / 4 * 4);
  }
  if (recurrent_) recurrent_->poison();
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
                      std::optional<CapturedLayers> capture) {
  if (capture) {
    queue_.fill(captured_, kNanPattern, 0, captured_.size_bytes() / 4 * 4);
    queue_.finish();
  }
  StepTimes times;
  Event upload;
  const auto start = std::chrono::steady_clock::now();
  const CommonAttentionMetadata view = batch.view();
  const AttentionMetadata& metadata = builder_->build(queue_, view, &upload);
  times.metadata_us = seconds_since(start) * 1e6;
  if (recurrent_) recurrent_->begin(batch, capture.has_value());
  run_layers(metadata, start_row, capture);
  queue_.finish();
  times.total_us = seconds_since(start) * 1e6;

  times.upload_us = microseconds(upload);
  for (const Event& event : write_events_) {
    times.cache_write_us += count_launch(cache_kernel_, event);
  }
  for (const auto& layer : launches_) {
    StepTime time;
    for (const LaunchRecord& launch : layer)
      time.add(count_launch(launch.kernel, launch.event), launch.beside_last);
    times.attention_us += time.us();
  }
  return times;
}

/// Recurrent layers are as many in front of each layer of attention, and what remains behind.
void Engine::run_layers(const AttentionMetadata& metadata, std::int64_t start_row,
                        std::optional<CapturedLayers> capture) {
  std::int32_t next = 0;
  const auto recur = [&](std::int32_t end) {
    for (; next < std::min(end, config_.num_recurrent_layers); ++next) {
      recurrent_->run(next, *pool_, pool_row(start_row, next),
                      capture && capture->recurrent == next);
    }
  };
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const auto index = to_size(layer);
    const std::int64_t row = pool_row(start_row, layer);
    recur((layer + 1) * (config_.delta_net.full_attention_interval - 1));
    const Buffer& output = capture && capture->attention == layer ? captured_ : output_;
    impl_->write_kv_cache(queue_, pool_->rows_from(PoolTensor::kKey, row),
                          pool_->rows_from(PoolTensor::kValue, row), caches_[index], metadata,
                          &write_events_[index]);
    impl_->forward(
        queue_,
        {.query = pool_->rows_from(PoolTensor::kQuery, row), .output = {.buffer = output.handle()}},
        caches_[index], metadata, {.launches = &launches_[index]});
  }
  recur(config_.num_recurrent_layers);
}

bool Engine::rounds_probabilities() const {
  return std::ranges::any_of(launches_, [](const auto& layer) {
    return std::ranges::any_of(layer, &LaunchRecord::rounds_probabilities);
  });
}

double Engine::count_launch(std::string_view kernel, const Event& event) {
  const double launch_us = microseconds(event);
  auto use = kernel_use_.find(kernel);
  if (use == kernel_use_.end()) use = kernel_use_.emplace(kernel, KernelUse{}).first;
  ++use->second.launches;
  use->second.time_us += launch_us;
  return launch_us;
}

std::size_t Engine::output_row_bytes() const {
  return to_size(config_.attention.num_heads) * to_size(config_.attention.output_head_size()) *
         element_size_bytes(config_.attention.dtype);
}

std::vector<double> Engine::read_row(const Buffer& buffer, std::int32_t token,
                                     std::int64_t width) const {
  const DType dtype = config_.attention.dtype;
  std::vector<std::byte> bytes(to_size(width) * element_size_bytes(dtype));
  queue_.read(buffer, bytes, to_size(token) * bytes.size());
  return decode_elements(dtype, bytes);
}

void Engine::read_captured(std::int32_t token, std::span<std::byte> row) const {
  queue_.read(captured_, row, to_size(token) * output_row_bytes());
}

}  // namespace clattn::cli
