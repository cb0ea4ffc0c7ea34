#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <clattn/clattn.hpp>
#include <clattn/mla.hpp>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "cli/elements.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// One mla_decode call on the host: one query token a request.
struct MLACall {
  MLAConfig config;
  std::int32_t num_splits = 0;
  float kv_scale = 1;
  std::vector<std::byte> query, cache;
  std::int64_t num_blocks = 0;
  BatchArrays batch;
  std::vector<std::size_t> tokens;  ///< requests that have keys, which alone are run

  std::int64_t width() const { return std::int64_t{config.kv_lora_rank} + config.rope_dim; }
};

std::string dtype_name(const NpyArray& array) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (array.descr == descr_of(dtype)) return std::string(to_string(dtype));
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("query.npy: expected element type <f4, <f2 or <u2 (bf16), got {}", array.descr));
}

/// Rows of the query whose requests have keys, and the batch made of them.
void compact(MLACall& call, const std::vector<std::byte>& query) {
  const std::size_t requests = call.batch.seq_lens.size();
  const std::size_t row_bytes = requests == 0 ? 0 : query.size() / requests;
  call.batch.query_start_loc = {0};
  for (std::size_t r = 0; r < requests; ++r) {
    if (call.batch.seq_lens[r] > 0) {
      call.tokens.push_back(r);
      const auto from = query.begin() + static_cast<std::ptrdiff_t>(r * row_bytes);
      call.query.insert(call.query.end(), from, from + static_cast<std::ptrdiff_t>(row_bytes));
    }
    call.batch.query_start_loc.push_back(static_cast<std::int32_t>(call.tokens.size()));
  }
}

MLACall read_mla_call(CaseFile& file) {
  MLACall call;
  MLAConfig& config = call.config;
  const NpyArray any_query = file.array("query", "", std::array<std::int64_t, 3>{-1, -1, -1});
  config.dtype = read_dtype(file, dtype_name(any_query));
  config.kv_cache_dtype = read_kv_cache_dtype(file);
  const std::int64_t width = any_query.shape[2];
  config.kv_lora_rank = static_cast<std::int32_t>(file.integer("kv_lora_rank", {1, width}));
  config.rope_dim = static_cast<std::int32_t>(width - config.kv_lora_rank);
  config.num_heads = static_cast<std::int32_t>(any_query.shape[1]);
  if (file.has("scale")) config.scale = static_cast<float>(file.number("scale"));
  call.num_splits = static_cast<std::int32_t>(file.integer("num_splits", {0, 65536}, 0));
  call.kv_scale = static_cast<float>(file.numbers("k_scale", 1, 1.0).front());
  refuse_option(call.kv_scale != 1.0F && !is_quantized(config.cache_dtype()),
                "k_scale with a cache that is not quantized");
  file.refuse_unknown_keys();

  call.batch = read_batch(file);
  const auto requests = static_cast<std::int64_t>(call.batch.seq_lens.size());
  const NpyArray query = file.array("query", descr_of(config.dtype),
                                    std::array<std::int64_t, 3>{requests, config.num_heads, width});
  NpyArray cache = file.array("kv_cache", descr_of(config.cache_dtype()),
                              std::array<std::int64_t, 3>{-1, -1, width});
  call.num_blocks = cache.shape[0];
  config.block_size = static_cast<std::int32_t>(
      std::min<std::int64_t>(cache.shape[1], std::numeric_limits<std::int32_t>::max()));
  call.cache = std::move(cache.data);
  compact(call, query.data);
  return call;
}

BuilderOptions options_for(const MLACall& call) {
  BuilderOptions options;
  options.num_splits = call.num_splits;
  const auto requests = static_cast<std::int32_t>(call.batch.seq_lens.size());
  options.limits.max_num_reqs = std::max(requests, 1);
  options.limits.max_num_batched_tokens = std::max(requests, 1);
  options.limits.max_model_len = 1;
  for (const std::int32_t seq_len : call.batch.seq_lens)
    options.limits.max_model_len = std::max(options.limits.max_model_len, seq_len);
  options.limits.num_blocks = call.num_blocks;
  return options;
}

/// What came back, for the requests that ran.
struct MLAOutcome {
  std::vector<double> out;  // [tokens, num_heads, kv_lora_rank]
  std::vector<float> lse;   // [tokens, num_heads]
  json kernels = json::array();
};

MLAOutcome execute(const std::shared_ptr<Context>& context, const MLACall& call) {
  const MLAConfig& config = call.config;
  const auto impl = make_mla_impl(*context, config);
  const auto builder = make_mla_builder(context, config, options_for(call));
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  const AttentionMetadata& metadata = builder->build(queue, call.batch.metadata());
  MLAOutcome outcome;
  if (call.tokens.empty()) return outcome;
  MLACache cache{.buffer = upload(*context, queue, std::span<const std::byte>(call.cache)),
                 .dtype = config.cache_dtype(),
                 .num_blocks = call.num_blocks,
                 .block_size = config.block_size,
                 .kv_lora_rank = config.kv_lora_rank,
                 .rope_dim = config.rope_dim,
                 .scale = {}};
  if (is_quantized(cache.dtype))
    cache.scale = upload(*context, queue, std::span<const float>(&call.kv_scale, 1));
  const Buffer query = upload(*context, queue, std::span<const std::byte>(call.query));
  const std::size_t rows = call.tokens.size() * static_cast<std::size_t>(config.num_heads);
  const std::size_t element = element_size_bytes(config.dtype);
  const GuardedOutput out(*context, rows * static_cast<std::size_t>(config.kv_lora_rank) * element);
  out.refill(queue);
  const Buffer lse = context->allocate(rows * sizeof(float));
  std::vector<LaunchRecord> launches;
  impl->forward(
      queue, {.buffer = query.handle()}, cache, metadata,
      {.buffer = out.handle(), .offset = static_cast<std::int64_t>(out.offset_bytes() / element)},
      lse.handle(), nullptr, &launches);
  queue.finish();
  outcome.out = decode_elements(config.dtype, out.read(queue));
  outcome.lse.resize(rows);
  queue.read(lse, std::as_writable_bytes(std::span(outcome.lse)));
  for (const LaunchRecord& launch : launches) {
    outcome.kernels.push_back(
        {{"name", launch.kernel},
         {"work_groups", launch.work_groups},
         {"work_group_size", launch.work_group_size},
         {"time_us", static_cast<double>(launch.event.duration_ns()) * 1e-3}});
  }
  return outcome;
}

}  // namespace

void run_mla_decode(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  refuse_option(!options.backend.empty() && options.backend != kMLABackendName,
                fmt::format("--backend {} for mla_decode", options.backend));
  const MLACall call = read_mla_call(file);
  const auto context = Context::create(options.device);
  const MLAOutcome outcome = execute(context, call);

  const auto heads = static_cast<std::size_t>(call.config.num_heads);
  const std::size_t row = heads * static_cast<std::size_t>(call.config.kv_lora_rank);
  const std::size_t requests = call.batch.seq_lens.size();
  std::vector<float> out(requests * row, 0.0F);
  std::vector<float> lse(requests * heads, -std::numeric_limits<float>::infinity());
  for (std::size_t t = 0; t < call.tokens.size(); ++t) {
    for (std::size_t i = 0; i < row; ++i)
      out[call.tokens[t] * row + i] = static_cast<float>(outcome.out[t * row + i]);
    std::copy_n(outcome.lse.begin() + static_cast<std::ptrdiff_t>(t * heads), heads,
                lse.begin() + static_cast<std::ptrdiff_t>(call.tokens[t] * heads));
  }
  const auto count = static_cast<std::int64_t>(requests);
  outputs.add("out", make_array("<f4", {count, call.config.num_heads, call.config.kv_lora_rank},
                                std::span<const float>(out)));
  outputs.add("lse",
              make_array("<f4", {count, call.config.num_heads}, std::span<const float>(lse)));
  outputs.add("info", json{{"op", "mla_decode"},
                           {"device", context->capabilities().name},
                           {"driver", context->capabilities().driver_version},
                           {"backend", kMLABackendName},
                           {"kernels", outcome.kernels}});
}

}  // namespace clattn::cli
