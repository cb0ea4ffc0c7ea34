#include "cli/mla_call.hpp"

#include <algorithm>
#include <cstring>
#include <span>

namespace clattn::cli {
namespace {

BuilderOptions options_for(const MLACall& call) {
  BatchLimits limits;
  limits.max_num_reqs = std::max(call.batch.num_reqs, 1);
  limits.max_num_batched_tokens = std::max(call.batch.num_actual_tokens, 1);
  limits.max_model_len = 1;
  for (const std::int32_t seq_len : call.batch.seq_lens)
    limits.max_model_len = std::max(limits.max_model_len, seq_len);
  limits.num_blocks = call.num_blocks;
  return call.plan.builder_options(call.num_splits, limits);
}

MLACache upload_rows(const Context& context, const Queue& queue, const MLACall& call) {
  const MLAConfig& config = call.config;
  MLACache cache{.buffer = upload(context, queue, std::span<const std::byte>(call.cache)),
                 .dtype = config.cache_dtype(),
                 .num_blocks = call.num_blocks,
                 .block_size = config.block_size,
                 .kv_lora_rank = config.kv_lora_rank,
                 .rope_dim = config.rope_dim,
                 .scale = {}};
  if (is_quantized(cache.dtype))
    cache.scale = upload(context, queue, std::span<const float>(&call.kv_scale, 1));
  return cache;
}

}  // namespace

MLAOutcome execute(const std::shared_ptr<Context>& context, const MLACall& call, int repeat) {
  const MLAConfig& config = call.config;
  const auto impl = make_mla_impl(*context, config);
  const auto builder = make_mla_builder(context, config, options_for(call));
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const AttentionMetadata& metadata =
      builder->build(queue, call.batch, nullptr, {.fast_build = call.plan.fast_build});
  MLAOutcome outcome;
  if (call.batch.num_actual_tokens == 0) return outcome;
  const MLACache cache = upload_rows(*context, queue, call);
  const Buffer query = upload(*context, queue, std::span<const std::byte>(call.query));
  const std::size_t rows = static_cast<std::size_t>(call.batch.num_actual_tokens) *
                           static_cast<std::size_t>(config.num_heads);
  const std::size_t element = element_size_bytes(config.dtype);
  const GuardedOutput out(*context, rows * static_cast<std::size_t>(config.kv_lora_rank) * element);
  const GuardedOutput lse(*context, rows * sizeof(float), 0);
  const TensorRef to{.buffer = out.handle(),
                     .offset = static_cast<std::int64_t>(out.offset_bytes() / element)};
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < repeat; ++i) {
    out.refill(queue);
    lse.refill(queue);
    impl->forward(queue, {.buffer = query.handle()}, cache, metadata, to, lse.handle(), nullptr,
                  &launches);
    queue.finish();
  }
  outcome.out = out.read(queue);
  const std::vector<std::byte> bytes = lse.read(queue);
  outcome.lse.resize(rows);
  std::memcpy(outcome.lse.data(), bytes.data(), bytes.size());
  outcome.launches = report(launches, impl->kernels());
  outcome.rounds_weights = std::any_of(launches.begin(), launches.end(),
                                       [](const LaunchRecord& l) { return l.rounds_weights; });
  return outcome;
}

}  // namespace clattn::cli
