#include "cli/attention_call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "cli/elements.hpp"

namespace clattn::cli {
namespace {

std::size_t size_of(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

/// A call whose requests stand in `order`, and where each of its tokens stood before.
struct Reordered {
  AttentionCall call;
  std::vector<std::int32_t> old_token;  // [tokens]
};

/// Rows of `row_bytes` gathered by index: to[i] = from[index[i]].
std::vector<std::byte> gather(const std::vector<std::byte>& from, std::size_t row_bytes,
                              const std::vector<std::int32_t>& index) {
  if (from.empty()) return {};
  std::vector<std::byte> to(index.size() * row_bytes);
  for (std::size_t i = 0; i < index.size(); ++i) {
    std::memcpy(&to[i * row_bytes], &from[size_of(index[i]) * row_bytes], row_bytes);
  }
  return to;
}

/// The inverse: to[index[i]] = from[i].
template <typename T>
std::vector<T> scatter(const std::vector<T>& from, std::size_t row_elements,
                       const std::vector<std::int32_t>& index) {
  std::vector<T> to(from.size());
  for (std::size_t i = 0; i < index.size(); ++i) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(i * row_elements), row_elements,
                to.begin() + static_cast<std::ptrdiff_t>(size_of(index[i]) * row_elements));
  }
  return to;
}

Reordered reorder(const AttentionCall& call, std::span<const std::int32_t> order) {
  Reordered result{call, {}};
  AttentionCall& moved = result.call;
  moved.query_start_loc = {0};
  for (std::size_t place = 0; place < order.size(); ++place) {
    const std::size_t r = size_of(order[place]);
    moved.seq_lens[place] = call.seq_lens[r];
    std::copy_n(call.block_table.begin() + static_cast<std::int64_t>(r) * call.max_blocks,
                call.max_blocks,
                moved.block_table.begin() + static_cast<std::int64_t>(place) * call.max_blocks);
    for (std::int32_t t = call.query_start_loc[r]; t < call.query_start_loc[r + 1]; ++t) {
      result.old_token.push_back(t);
    }
    moved.query_start_loc.push_back(static_cast<std::int32_t>(result.old_token.size()));
  }
  const std::size_t element = element_size_bytes(call.config.dtype);
  const std::size_t head_bytes = size_of(call.config.head_size) * element;
  moved.query = gather(call.query, size_of(call.config.num_heads) * head_bytes, result.old_token);
  moved.key = gather(call.key, size_of(call.config.num_kv_heads) * head_bytes, result.old_token);
  moved.value =
      gather(call.value, size_of(call.config.num_kv_heads) * head_bytes, result.old_token);
  if (!call.slot_mapping.empty()) {
    moved.slot_mapping.clear();
    for (const std::int32_t t : result.old_token) {
      moved.slot_mapping.push_back(call.slot_mapping[size_of(t)]);
    }
  }
  return result;
}

BuilderOptions options_for(const AttentionCall& call) {
  BuilderOptions options;
  options.num_splits = call.num_splits;
  options.limits.max_num_reqs = std::max(call.num_reqs(), 1);
  options.limits.max_num_batched_tokens = std::max(call.num_tokens(), 1);
  options.limits.max_model_len = 1;
  for (const std::int32_t seq_len : call.seq_lens) {
    options.limits.max_model_len = std::max(options.limits.max_model_len, seq_len);
  }
  options.limits.num_blocks = call.num_blocks;
  return options;
}

std::vector<LaunchReport> report(const std::vector<LaunchRecord>& launches,
                                 const std::vector<KernelInfo>& kernels) {
  std::vector<LaunchReport> reports;
  for (const LaunchRecord& launch : launches) {
    const auto info = std::find_if(kernels.begin(), kernels.end(), [&](const KernelInfo& kernel) {
      return kernel.name == launch.kernel;
    });
    reports.push_back({std::string(launch.kernel), info == kernels.end() ? "" : info->role,
                       launch.work_groups, launch.work_group_size,
                       launch.event ? static_cast<double>(launch.event.duration_ns()) * 1e-3 : 0});
  }
  return reports;
}

double microseconds(const Event& event) {
  return event ? static_cast<double>(event.duration_ns()) * 1e-3 : 0;
}

/// Everything of a call after its requests have been put in order.
AttentionOutcome execute_ordered(const std::shared_ptr<Context>& context, const AttentionCall& call,
                                 const AttentionBackend& backend, AttentionMetadataBuilder& builder,
                                 int repeat) {
  const AttentionConfig& config = call.config;
  AttentionOutcome outcome;
  outcome.backend = backend.name();
  outcome.layout = choose_layout(backend, call.layout, &context->capabilities());
  const auto impl = backend.make_impl(context, config);
  const Queue queue = context->create_queue(QueueProfiling::kOn);
  KVCache cache = make_cache(*context, backend, outcome.layout,
                             {.block_size = config.block_size,
                              .num_kv_heads = config.num_kv_heads,
                              .head_size = config.head_size,
                              .dtype = config.cache_dtype()},
                             call.num_blocks);
  if (call.num_blocks > 0) upload_cache(queue, cache, call.cache);
  const Buffer query = upload(*context, queue, std::span<const std::byte>(call.query));
  const std::size_t element = element_size_bytes(config.dtype);
  const std::size_t num_rows = size_of(call.num_tokens()) * size_of(config.num_heads);
  const GuardedOutput out(*context, num_rows * size_of(config.head_size) * element);
  // forward() takes no offset for the LSE: only the band behind it can be guarded.
  const Buffer lse = context->allocate(num_rows * sizeof(float) + GuardedOutput::kGuardBytes);

  Event upload_event;
  const auto start = std::chrono::steady_clock::now();
  const CommonAttentionMetadata batch = call.batch();
  const AttentionMetadata& metadata = builder.build(queue, batch, &upload_event);
  outcome.metadata_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  Event write_event, forward_event;
  if (!call.key.empty()) {
    const Buffer key = upload(*context, queue, std::span<const std::byte>(call.key));
    const Buffer value = upload(*context, queue, std::span<const std::byte>(call.value));
    impl->write_kv_cache(queue, {.buffer = key.handle()}, {.buffer = value.handle()}, cache,
                         metadata, &write_event);
    queue.finish();
  }
  std::vector<LaunchRecord> launches;
  for (int i = 0; i < repeat; ++i) {
    out.refill(queue);
    queue.fill(lse, kPoison, 0, lse.size_bytes());
    impl->forward(
        queue, {.buffer = query.handle()}, cache, metadata,
        {.buffer = out.handle(), .offset = static_cast<std::int64_t>(out.offset_bytes() / element)},
        lse.handle(), &forward_event, &launches);
    queue.finish();
  }
  outcome.launches = report(launches, impl->kernels());
  for (const LaunchReport& launch : outcome.launches) outcome.attention_us += launch.time_us;
  outcome.upload_us = microseconds(upload_event);
  outcome.cache_write_us = microseconds(write_event);
  outcome.out = out.read(queue);
  std::vector<float> lse_and_guard(lse.size_bytes() / sizeof(float));
  queue.read(lse, std::as_writable_bytes(std::span(lse_and_guard)));
  for (std::size_t i = num_rows; i < lse_and_guard.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &lse_and_guard[i], sizeof(bits));
    if (bits != kPoison) throw Error(ErrorCode::kOpenCL, "a kernel wrote outside the lse output");
  }
  lse_and_guard.resize(num_rows);
  outcome.lse = std::move(lse_and_guard);
  if (!call.key.empty() && call.num_blocks > 0) outcome.cache = download_cache(queue, cache);
  return outcome;
}

}  // namespace

CommonAttentionMetadata AttentionCall::batch() const {
  CommonAttentionMetadata batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.num_reqs = num_reqs();
  batch.num_actual_tokens = num_tokens();
  batch.block_table = block_table;
  batch.block_table_stride = max_blocks;
  batch.slot_mapping = slot_mapping;
  batch.causal = causal;
  return batch;
}

const AttentionBackend& find_backend(const std::string& name) {
  std::vector<std::string_view> names;
  for (const AttentionBackend* backend : list_attn_backends()) {
    if (backend->name() == name) return *backend;
    names.push_back(backend->name());
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("backend: \"{}\" is unknown; expected one of {}", name, fmt::join(names, ", ")));
}

KVCacheLayout choose_layout(const AttentionBackend& backend, std::optional<KVCacheLayout> wanted,
                            const DeviceCapabilities* capabilities) {
  const std::span<const KVCacheLayout> layouts = backend.supported_layouts();
  if (!wanted) wanted = get_kv_cache_layout();
  if (!wanted) {
    return capabilities != nullptr ? backend.preferred_layout(*capabilities) : layouts.front();
  }
  if (std::find(layouts.begin(), layouts.end(), *wanted) == layouts.end()) {
    throw Error(ErrorCode::kUnsupported, fmt::format("layout: backend {} does not support {}",
                                                     backend.name(), to_string(*wanted)));
  }
  return *wanted;
}

KVCache make_cache(const Context& context, const AttentionBackend& backend, KVCacheLayout layout,
                   const KVCacheSpec& spec, std::int64_t num_blocks) {
  const std::size_t page_bytes = spec.page_size_bytes();
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(page_bytes, size_of(std::max<std::int64_t>(num_blocks, 1)), &bytes)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("num_blocks: {} pages of {} bytes overflow", num_blocks, page_bytes));
  }
  return reshape_kv_cache(context.allocate(bytes), spec, backend, layout);
}

AttentionOutcome execute(const std::shared_ptr<Context>& context, const AttentionCall& call,
                         int repeat) {
  validate_batch(call.batch(), call.config.block_size, call.num_blocks);
  const AttentionBackend& backend =
      get_attn_backend(call.config, &context->capabilities(), call.backend);
  const auto builder = backend.make_builder(context, call.config, options_for(call));
  std::vector<std::int32_t> scheduled(call.seq_lens.size()), order(call.seq_lens.size());
  for (std::size_t r = 0; r < scheduled.size(); ++r) {
    scheduled[r] = call.query_start_loc[r + 1] - call.query_start_loc[r];
  }
  if (!builder->reorder_batch(scheduled, order)) {
    return execute_ordered(context, call, backend, *builder, repeat);
  }
  const Reordered moved = reorder(call, order);
  AttentionOutcome outcome = execute_ordered(context, moved.call, backend, *builder, repeat);
  const std::size_t heads = size_of(call.config.num_heads);
  const std::size_t row_bytes =
      heads * size_of(call.config.head_size) * element_size_bytes(call.config.dtype);
  outcome.out = scatter(outcome.out, row_bytes, moved.old_token);
  outcome.lse = scatter(outcome.lse, heads, moved.old_token);
  return outcome;
}

oracle::AttentionCase oracle_case(const AttentionCall& call) {
  const AttentionConfig& config = call.config;
  oracle::AttentionCase result;
  result.num_heads = config.num_heads;
  result.num_kv_heads = config.num_kv_heads;
  result.head_size = config.head_size;
  result.block_size = config.block_size;
  result.scale =
      config.scale ? static_cast<double>(*config.scale) : 1.0 / std::sqrt(config.head_size);
  result.causal = call.causal;
  result.query_start_loc = call.query_start_loc;
  result.seq_lens = call.seq_lens;
  result.block_table = call.block_table;
  result.max_blocks = call.max_blocks;
  result.query = decode_elements(config.dtype, call.query);
  result.key_cache = decode_elements(config.cache_dtype(), call.cache.key);
  result.value_cache = decode_elements(config.cache_dtype(), call.cache.value);
  const std::size_t row = size_of(config.num_kv_heads) * size_of(config.head_size);
  const auto store = [&](const std::vector<std::byte>& rows, std::vector<double>& cache) {
    const std::vector<double> values = decode_elements(
        config.cache_dtype(), convert_elements(config.dtype, config.cache_dtype(), rows));
    for (std::size_t t = 0; t < values.size() / row; ++t) {
      if (call.slot_mapping[t] < 0) continue;
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(t * row), row,
                  cache.begin() + call.slot_mapping[t] * static_cast<std::int64_t>(row));
    }
  };
  store(call.key, result.key_cache);
  store(call.value, result.value_cache);
  return result;
}

}  // namespace clattn::cli
