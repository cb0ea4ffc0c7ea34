#include <algorithm>
#include <cmath>
#include <utility>

#include "program/bench/data.hpp"
#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/common/error.hpp"
#include "program/common/statistics.hpp"
#include "program/tune/costs.hpp"

namespace clattn::cli {
namespace {

/// More than the last cache of most devices.
constexpr std::size_t kPoolBytesCpu = std::size_t{640} << 20;
constexpr std::size_t kPoolBytesGpu = std::size_t{2} << 30;
constexpr std::int64_t kMostSets = 16;  // each has a builder and its memory
constexpr int kRounds = 8;              // before the first look at how they agree
constexpr int kMostRounds = 24;
constexpr double kRoundCpuUs = 4000, kRoundGpuUs = 5000;
/// A GPU settles at the clock that it can sustain after this much of one kind of work.
constexpr double kWarmUpGpuUs = 40000;

std::int64_t pool_pages(const DeviceCapabilities& device, const AttentionConfig& config) {
  const std::size_t wanted = device.kind == DeviceKind::kCpu ? kPoolBytesCpu : kPoolBytesGpu;
  const std::size_t room = room_of(device, 4);
  const std::size_t page = spec_of(config).page_size_bytes();
  return static_cast<std::int64_t>(std::max<std::size_t>(std::min(wanted, room) / page, 1));
}

/// Robust against other programs that slow down some of the rounds: the lower quartile.
double undisturbed(const std::vector<double>& rounds) {
  return percentile(rounds, 0.25);
}

}  // namespace

CostBench::CostBench(std::shared_ptr<Context> context, const AttentionConfig& config)
    : context_(std::move(context)),
      config_(config),
      backend_(get_attn_backend(config, &context_->capabilities()).get()),
      impl_(backend_->make_impl(context_, config)),
      queue_(context_->create_queue()),
      events_queue_(context_->create_queue(QueueProfiling::kOn)),
      cache_(make_kv_cache(*context_, queue_, *backend_, config,
                           pool_pages(context_->capabilities(), config))) {
  set_unit_scales(*context_, queue_, cache_);
  TiledRandom(config.cache_dtype(), 1).fill(queue_, cache_.buffer);
  pages_ = shuffled_pages(cache_.num_blocks, 7);
}

void CostBench::make_tensors(std::int64_t tokens) {
  if (tokens <= most_tokens_) return;
  queue_.finish();
  const std::size_t element = element_size_bytes(config_.dtype);
  const auto rows = to_size(tokens * config_.num_heads);
  const std::size_t queries = rows * to_size(config_.head_size);
  query_ = context_->allocate(queries * element);
  out_ = context_->allocate(rows * to_size(config_.output_head_size()) * element);
  TiledRandom(config_.dtype, 2).fill(queue_, query_);
  most_tokens_ = tokens;
}

CostBench::Steps CostBench::make_steps(const CostBatch& batch) {
  BenchShape shape;
  shape.model.config = config_;
  shape.requests.assign(to_size(batch.requests), {batch.query_len, batch.keys});
  make_tensors(shape.num_tokens());
  BuilderOptions options = builder_options(shape, cache_.num_blocks);
  options.num_splits = batch.splits;
  options.workspace = std::make_shared<AttentionWorkspace>();
  std::vector<std::int32_t> pages(to_size(count_pages(shape)));
  const std::size_t blocks = pages.size() / shape.requests.size();
  Steps steps;
  const std::int64_t keys = std::int64_t{batch.requests} * batch.keys;
  const std::int64_t sets =
      std::clamp<std::int64_t>(pool_tokens() / std::max<std::int64_t>(keys, 1), 1, kMostSets);
  for (std::int64_t set = 0; set < sets; ++set) {
    for (std::int32_t& page : pages) page = pages_[next_page_++ % pages_.size()];
    if (batch.pages == CostBatch::Pages::kShared) {
      for (std::size_t i = blocks; i < pages.size(); ++i) pages[i] = pages[i % blocks];
    }
    steps.builders.push_back(backend_->make_builder(context_, config_, options));
    steps.metadata.push_back(
        &steps.builders.back()->build(queue_, BenchBatch(shape, pages).metadata()));
  }
  queue_.finish();
  return steps;
}

void CostBench::forward(Steps& steps, const Queue& queue,
                        std::vector<LaunchRecord>* records) const {
  const AttentionMetadata& metadata = *steps.metadata[steps.next++ % steps.metadata.size()];
  impl_->forward(queue, {.query = {.buffer = query_.handle()}, .output = {.buffer = out_.handle()}},
                 cache_, metadata, {.launches = records});
}

std::vector<CostLaunch> CostBench::launches(const CostBatch& batch) {
  constexpr int kRepeats = 9;
  Steps steps = make_steps(batch);
  std::vector<CostLaunch> launches;
  std::vector<std::vector<double>> times;
  for (int i = 0; i <= kRepeats; ++i) {  // the first is not counted: drivers do deferred work in it
    std::vector<LaunchRecord> records;
    forward(steps, events_queue_, &records);
    events_queue_.finish();
    launches.resize(records.size());
    times.resize(records.size());
    for (std::size_t k = 0; k < records.size(); ++k) {
      launches[k].kernel = records[k].kernel;
      launches[k].tasks = records[k].tasks;
      if (i > 0) times[k].push_back(microseconds(records[k].event));
    }
  }
  for (std::size_t k = 0; k < launches.size(); ++k) launches[k].event_us = undisturbed(times[k]);
  return launches;
}

double CostBench::run_us(Steps& steps, int launches) const {
  return seconds_each(queue_, launches, [&] { forward(steps, queue_, nullptr); }) * 1e6;
}

bool CostBench::agrees(const Steps& steps) {
  constexpr double kMostApart = 0.1;
  const auto half =
      steps.rounds_us.begin() + static_cast<std::ptrdiff_t>(steps.rounds_us.size() / 2);
  const double first = undisturbed({steps.rounds_us.begin(), half});
  const double second = undisturbed({half, steps.rounds_us.end()});
  return std::abs(first - second) <= kMostApart * std::min(first, second);
}

CostBench::Steps CostBench::prepare(const CostBatch& batch) {
  constexpr double kMostLaunches = 1000;
  const bool cpu = context_->capabilities().kind == DeviceKind::kCpu;
  Steps steps = make_steps(batch);
  run_us(steps, 1);
  const double once = std::max(run_us(steps, 2), 0.1);
  steps.launches =
      static_cast<int>(std::clamp((cpu ? kRoundCpuUs : kRoundGpuUs) / once, 1.0, kMostLaunches));
  return steps;
}

/// The batches take turns, so that a disturbance of the machine affects all of them.
void CostBench::time_in_turns(std::span<Steps> all) const {
  for (int round = 0; round < kMostRounds; ++round) {
    if (round >= kRounds && round % 2 == 0 && std::ranges::all_of(all, agrees)) break;
    for (Steps& steps : all) steps.rounds_us.push_back(run_us(steps, steps.launches));
  }
}

/// One batch after the other, each at the clock that its own work allows.
void CostBench::time_one_by_one(std::span<Steps> all) const {
  for (Steps& steps : all) {
    double warm_us = 0;
    while (warm_us < kWarmUpGpuUs) warm_us += run_us(steps, steps.launches) * steps.launches;
    time_in_turns(std::span(&steps, 1));
  }
}

std::vector<double> CostBench::time_us(std::span<const CostBatch> batches) {
  std::int64_t tokens = 0;  // at once: steps keep their tensors
  for (const CostBatch& batch : batches) {
    tokens = std::max(tokens, std::int64_t{batch.requests} * batch.query_len);
  }
  make_tensors(tokens);
  std::vector<Steps> all;
  for (const CostBatch& batch : batches) all.push_back(prepare(batch));
  if (context_->capabilities().kind == DeviceKind::kCpu) {
    time_in_turns(all);
  } else {
    time_one_by_one(all);
  }
  std::vector<double> times;
  times.reserve(all.size());
  for (const Steps& steps : all) times.push_back(undisturbed(steps.rounds_us));
  return times;
}

}  // namespace clattn::cli
