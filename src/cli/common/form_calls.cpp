#include <clattn/compat/paged_attention.hpp>

#include "cli/common/form_calls.hpp"

#include <chrono>
#include <cstring>

#include "cli/common/error.hpp"

namespace clattn::cli {
namespace {

/// A cache of one order in the other.
LogicalCache reordered(const AttentionConfig& config, const LogicalCache& from, bool packs) {
  const std::size_t element = element_size_bytes(config.cache_dtype());
  throw_invalid_if(to_size(config.head_size) % (16 / element) != 0,
                   "cache: head_size is {}, legal in an x-packed cache of {}: multiples of {}",
                   config.head_size, to_string(config.cache_dtype()), 16 / element);
  LogicalCache to = from;
  const auto move = [&](std::size_t logical, std::int64_t packed,
                        std::vector<std::byte> LogicalCache::*kv) {
    const std::size_t place = to_size(packed) * element;
    std::memcpy(&(to.*kv)[packs ? place : logical], &(from.*kv)[packs ? logical : place], element);
  };
  const PackedKVCache order = packed_shape(config, 0);
  const std::int64_t heads = config.num_kv_heads, dims = config.head_size;
  for (std::size_t i = 0; i < from.key.size() / element; ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t slot = at / (heads * dims), head = at / dims % heads, dim = at % dims;
    const std::int64_t block = slot / order.block_size, token = slot % order.block_size;
    move(i * element, order.key_at(block, token, head, dim), &LogicalCache::key);
    move(i * element, order.value_at(block, token, head, dim), &LogicalCache::value);
  }
  return to;
}

/// Stores the call's keys and values; returns when.
Event store(const Context& context, const Queue& queue, const AttentionCall& call,
            const PackedKVCache& cache) {
  const Buffer key = upload(context, queue, call.key);
  const Buffer value = upload(context, queue, call.value);
  const Buffer slots = upload(context, queue, call.slot_mapping);
  Event event;
  reshape_and_cache(context, queue, {.buffer = key.handle()}, {.buffer = value.handle()},
                    call.config.dtype, cache, slots.handle(), 0, call.num_tokens(), &event);
  queue.finish();
  return event;
}

}  // namespace

PackedKVCache packed_shape(const AttentionConfig& config, std::int64_t num_blocks) {
  return {.dtype = config.cache_dtype(),
          .num_blocks = num_blocks,
          .block_size = config.block_size,
          .num_kv_heads = config.num_kv_heads,
          .head_size = config.head_size};
}

LogicalCache pack(const AttentionConfig& config, const LogicalCache& logical) {
  return reordered(config, logical, true);
}

LogicalCache unpack(const AttentionConfig& config, const LogicalCache& packed) {
  return reordered(config, packed, false);
}

PackedMemory::PackedMemory(const Context& context, const Queue& queue,
                           const AttentionConfig& config, std::int64_t num_blocks,
                           const LogicalCache& logical, std::span<const float> scales) {
  const LogicalCache packed = pack(config, logical);
  key = upload(context, queue, packed.key);
  value = upload(context, queue, packed.value);
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
  const Buffer query = upload(*context, queue, call.query);
  const CallOutputs outputs(*context, to_size(call.num_tokens()) * to_size(config.num_heads),
                            config.head_size, config.dtype);

  CommonAttentionMetadata batch = call.batch();
  batch.causal = std::nullopt;  // a request's one query token sees all keys
  AttentionOutcome outcome;
  outcome.backend = "paged_attention";
  Event uploaded;
  const auto start = std::chrono::steady_clock::now();
  const AttentionMetadata& metadata =
      builder->build(queue, batch, &uploaded, {.fast_build = call.plan.fast_build});
  outcome.metadata_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  if (!call.key.empty()) {
    outcome.cache_write_us = microseconds(store(*context, queue, call, memory.cache));
    outcome.cache = memory.download(queue, config, call.cache.key.size());
  }
  outcome.upload_us = microseconds(uploaded);
  outputs.run(
      queue, repeat, layer->kernels(),
      [&](auto& launches) {
        layer->forward(
            queue,
            {.query = {.buffer = query.handle()}, .output = outputs.out(), .lse = outputs.lse()},
            memory.cache, metadata, nullptr, &launches);
      },
      outcome);
  return outcome;
}

}  // namespace clattn::cli
