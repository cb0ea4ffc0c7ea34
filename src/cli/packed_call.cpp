#include "cli/packed_call.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <vector>

namespace clattn::cli {
namespace {

std::size_t size_of(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

/// Of a cache's shape, without memory.
PackedKVCache packed_shape(const AttentionConfig& config, std::int64_t num_blocks) {
  PackedKVCache cache;
  cache.dtype = config.cache_dtype();
  cache.num_blocks = num_blocks;
  cache.block_size = config.block_size;
  cache.num_kv_heads = config.num_kv_heads;
  cache.head_size = config.head_size;
  return cache;
}

/// The packed order, element by element: visit(logical byte, key byte, value byte).
template <typename Visit>
void for_each_packed(const AttentionConfig& config, std::size_t size_bytes, Visit visit) {
  const std::size_t element = element_size_bytes(config.cache_dtype());
  if (size_of(config.head_size) % (16 / element) != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                    config.head_size, to_string(config.cache_dtype()), 16 / element));
  }
  const PackedKVCache order = packed_shape(config, 0);
  const std::int64_t heads = config.num_kv_heads, dims = config.head_size;
  const auto count = static_cast<std::int64_t>(size_bytes / element);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t slot = i / (heads * dims), head = i / dims % heads, dim = i % dims;
    const std::int64_t block = slot / order.block_size, token = slot % order.block_size;
    visit(size_of(i) * element, size_of(order.key_at(block, token, head, dim)) * element,
          size_of(order.value_at(block, token, head, dim)) * element);
  }
}

double microseconds(const Event& event) {
  return event ? static_cast<double>(event.duration_ns()) * 1e-3 : 0;
}

/// Stores the call's keys and values; returns when.
Event store(const Context& context, const Queue& queue, const AttentionCall& call,
            const PackedKVCache& cache) {
  const Buffer key = upload(context, queue, std::span<const std::byte>(call.key));
  const Buffer value = upload(context, queue, std::span<const std::byte>(call.value));
  const Buffer slots = upload(context, queue, std::span<const std::int64_t>(call.slot_mapping));
  Event event;
  reshape_and_cache(context, queue, {.buffer = key.handle()}, {.buffer = value.handle()},
                    call.config.dtype, cache, slots.handle(), 0, call.num_tokens(), &event);
  queue.finish();
  return event;
}

std::vector<float> floats_of(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

}  // namespace

LogicalCache pack(const AttentionConfig& config, const LogicalCache& logical) {
  LogicalCache packed{std::vector<std::byte>(logical.key.size()),
                      std::vector<std::byte>(logical.value.size())};
  const std::size_t size = element_size_bytes(config.cache_dtype());
  for_each_packed(config, logical.key.size(),
                  [&](std::size_t from, std::size_t key, std::size_t value) {
                    std::memcpy(&packed.key[key], &logical.key[from], size);
                    std::memcpy(&packed.value[value], &logical.value[from], size);
                  });
  return packed;
}

LogicalCache unpack(const AttentionConfig& config, const LogicalCache& packed) {
  LogicalCache logical{std::vector<std::byte>(packed.key.size()),
                       std::vector<std::byte>(packed.value.size())};
  const std::size_t size = element_size_bytes(config.cache_dtype());
  for_each_packed(config, packed.key.size(),
                  [&](std::size_t to, std::size_t key, std::size_t value) {
                    std::memcpy(&logical.key[to], &packed.key[key], size);
                    std::memcpy(&logical.value[to], &packed.value[value], size);
                  });
  return logical;
}

PackedMemory::PackedMemory(const Context& context, const Queue& queue,
                           const AttentionConfig& config, std::int64_t num_blocks,
                           const LogicalCache& logical, std::span<const float> scales) {
  const LogicalCache packed = pack(config, logical);
  key = upload(context, queue, std::span<const std::byte>(packed.key));
  value = upload(context, queue, std::span<const std::byte>(packed.value));
  cache = packed_shape(config, num_blocks);
  cache.key = key.handle();
  cache.value = value.handle();
  if (scales.empty()) return;
  cache.scales = upload(context, queue, scales);
  cache.scales_per_head = scales.size() > 2;
}

LogicalCache PackedMemory::download(const Queue& queue, const AttentionConfig& config,
                                    std::size_t size_bytes) const {
  return unpack(config, {cli::download<std::byte>(queue, key, size_bytes),
                         cli::download<std::byte>(queue, value, size_bytes)});
}

AttentionOutcome execute_packed(const std::shared_ptr<Context>& context, const AttentionCall& call,
                                int repeat) {
  const AttentionConfig& config = call.config;
  const auto layer = make_paged_attention(*context, config);
  const auto builder = make_paged_attention_builder(context, config, options_for(call));
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const PackedMemory memory(*context, queue, config, call.num_blocks, call.cache, call.scales);
  const Buffer query = upload(*context, queue, std::span<const std::byte>(call.query));
  const GuardedOutput out(*context, call.query.size());
  const GuardedOutput lse(
      *context, size_of(call.num_tokens()) * size_of(config.num_heads) * sizeof(float), 0);
  const TensorRef to{
      .buffer = out.handle(),
      .offset = static_cast<std::int64_t>(out.offset_bytes() / element_size_bytes(config.dtype))};

  AttentionOutcome outcome;
  outcome.backend = "paged_attention";
  Event uploaded;
  const auto start = std::chrono::steady_clock::now();
  const AttentionMetadata& metadata =
      builder->build(queue, call.batch(), &uploaded, {.fast_build = call.plan.fast_build});
  outcome.metadata_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  if (!call.key.empty()) {
    outcome.cache_write_us = microseconds(store(*context, queue, call, memory.cache));
    outcome.cache = memory.download(queue, config, call.cache.key.size());
  }
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < repeat; ++i) {
    out.refill(queue);
    lse.refill(queue);
    layer->forward(queue, {.buffer = query.handle()}, memory.cache, metadata, to, lse.handle(),
                   nullptr, &launches);
    queue.finish();
  }
  outcome.launches = report(launches, layer->kernels());
  for (const LaunchReport& launch : outcome.launches) outcome.attention_us += launch.time_us;
  outcome.upload_us = microseconds(uploaded);
  outcome.out = out.read(queue);
  outcome.lse = floats_of(lse.read(queue));
  return outcome;
}

}  // namespace clattn::cli
