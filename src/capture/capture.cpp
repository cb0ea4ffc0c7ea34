#include "capture/capture.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/checked.hpp"
#include "capture/case_cache.hpp"
#include "capture/case_writer.hpp"

namespace clattn::detail {
namespace {

using npy::make_array;

void add_indices(const CaseWriter& writer, std::string_view name,
                 std::span<const std::int32_t> values) {
  writer.add(name, make_array("<i4", {std::ssize(values)}, values));
}

void add_floats(const CaseWriter& writer, std::string_view name, const std::vector<float>& values) {
  if (values.empty()) return;
  writer.add(name, make_array("<f4", {std::ssize(values)}, std::span<const float>(values)));
}

/// The keys of what decides the splits. Those that captures add to the format (docs/cases.md) are
/// there only where they say something.
void add_plan_keys(CaseKeys& keys, const PlanRecord& plan, KernelFamily family) {
  keys.add("num_splits", plan.num_splits);
  if (plan.split_policy == SplitPolicy::kDeterministic) keys.text("split_policy", "deterministic");
  if (plan.limits) {
    keys.add("max_num_reqs", plan.limits->max_num_reqs)
        .add("max_num_batched_tokens", plan.limits->max_num_batched_tokens)
        .add("max_model_len", plan.limits->max_model_len);
  }
  if (plan.fast_build) keys.add("fast_build", true);
  if (family != KernelFamily::kAuto) keys.text("kernel_family", to_string(family));
}

CaseKeys attention_keys(const CapturedAttention& call) {
  const AttentionConfig& config = call.config;
  const auto size = [](std::int32_t value) {
    return value > 0 ? std::to_string(value) : std::string("null");
  };
  CaseKeys keys("attention");
  keys.add("num_heads", config.num_heads)
      .add("num_kv_heads", config.num_kv_heads)
      .add("head_size", config.head_size)
      .add("block_size", std::max(config.block_size, 1))
      .text("dtype", to_string(config.dtype))
      .add("scale", config.scale ? CaseKeys::number(*config.scale) : "null")
      .add("causal", call.causal)
      .add("sliding_window", size(config.sliding_window))
      .add("attention_chunk_size", size(config.attention_chunk_size))
      .number("logits_soft_cap", config.logits_soft_cap)
      .text("attn_type", to_string(config.attn_type))
      .text("backend", call.batch.backend.empty() ? "auto" : call.batch.backend)
      .add("return_lse", call.lse != nullptr);
  return keys;
}

/// The keys behind those of the cache.
void add_step_keys(CaseKeys& keys, const CapturedAttention& call) {
  const PlanRecord& plan = call.batch.plan;
  add_plan_keys(keys, plan, call.config.kernel_family);
  if (plan.decode_threshold != 1) keys.add("decode_threshold", plan.decode_threshold);
  if (call.common_prefix_len != 0) keys.add("common_prefix_len", call.common_prefix_len);
}

/// The lengths that a step runs with: those that only the device knows are read from there.
std::vector<std::int32_t> lengths_of(const Queue& queue, const BatchRecord& batch) {
  const LengthSource& device = batch.device_lens;
  if (device.buffer == nullptr) return {batch.seq_lens.begin(), batch.seq_lens.end()};
  return read_as<std::int32_t>(queue, device.buffer, device.offset_bytes,
                               std::ssize(batch.seq_lens));
}

/// The lengths and, if only the device knows them, their bounds.
void add_lengths(const CaseWriter& writer, const Queue& queue, const BatchRecord& batch) {
  add_indices(writer, "seq_lens", lengths_of(queue, batch));
  if (batch.device_lens.buffer != nullptr) add_indices(writer, "seq_len_bounds", batch.seq_lens);
}

/// The step's page ids as a table, and the pages themselves.
void add_pages(const CaseWriter& writer, const Queue& queue, const CapturedAttention& call) {
  const BatchRecord& batch = call.batch;
  const std::int32_t block_size = call.config.block_size;
  const auto longest = std::ranges::max_element(batch.seq_lens);
  const auto pages_of = [&](std::int32_t tokens) {
    return ceil_div(std::int64_t{tokens}, std::int64_t{block_size});
  };
  const std::int64_t width = longest == batch.seq_lens.end() ? 0 : pages_of(*longest);
  std::vector<std::int32_t> table(batch.seq_lens.size() * to_size(width)), used;
  for (std::size_t r = 0; r < batch.seq_lens.size(); ++r) {
    const auto pages =
        batch.pages.subspan(to_size(batch.pages_at[r]), to_size(pages_of(batch.seq_lens[r])));
    std::ranges::copy(pages, table.begin() + static_cast<std::int64_t>(r) * width);
    used.insert(used.end(), pages.begin(), pages.end());
  }
  writer.add("block_table", make_array("<i4", {std::ssize(batch.seq_lens), width},
                                       std::span<const std::int32_t>(table)));
  std::visit([&](const auto* cache) { add_cache(writer, queue, *cache, used); }, call.cache);
}

void add_options(const CaseWriter& writer, const Queue& queue, const CapturedAttention& call) {
  add_floats(writer, "alibi_slopes", call.config.alibi_slopes);
  add_floats(writer, "sinks", call.config.sinks);
  if (call.config.output_fp8) {
    add_floats(writer, "output_scale", read_as<float>(queue, call.options.output_scale, 0, 1));
  }
  if (!call.config.custom_mask) return;
  const std::span<const std::int32_t> lens = call.batch.seq_lens;
  const std::int64_t width = lens.empty() ? 0 : *std::ranges::max_element(lens);
  const std::int64_t tokens = call.batch.query_start_loc.back();
  writer.add("custom_mask", {"|u1",
                             {tokens, width},
                             read_rows(queue, call.options.custom_mask, 0, tokens, to_size(width),
                                       to_size(call.options.custom_mask_stride))});
}

/// A write's slots. Those outside the cache store nothing, and a case may only say so by -1.
struct WrittenSlots {
  std::vector<std::int64_t> slots;
  std::vector<std::int32_t> pages;  // of the slots that are in the cache

  template <typename Cache>
  WrittenSlots(const Queue& queue, const SlotSource& written, const Cache& cache)
      : slots(read_as<std::int64_t>(queue, written.buffer, written.offset_bytes,
                                    written.num_tokens)) {
    for (std::int64_t& slot : slots) {
      const std::int64_t page = slot / cache.block_size;
      if (slot < 0 || page >= cache.num_blocks) {
        slot = kPadSlotId;
        continue;
      }
      pages.push_back(static_cast<std::int32_t>(page));
    }
  }
  /// Adds the slots; returns the pages that they touch.
  const std::vector<std::int32_t>& add_to(const CaseWriter& writer) const {
    writer.add("slot_mapping",
               make_array("<i8", {std::ssize(slots)}, std::span<const std::int64_t>(slots)));
    return pages;
  }
};

/// Every query token of a batch as a request of its own that decodes.
struct TokenRequests {
  std::vector<std::int32_t> seq_lens, bounds;  ///< of the lengths, where the device has them
  std::vector<std::vector<std::int32_t>> pages;

  TokenRequests(const Queue& queue, const BatchRecord& batch, bool causal,
                std::int32_t block_size) {
    const std::vector<std::int32_t> lens = lengths_of(queue, batch);
    for (std::size_t r = 0; r < lens.size(); ++r) {
      const std::int32_t query_len = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
      for (std::int32_t later = query_len - 1; later >= 0; --later) {
        const std::int32_t unseen = causal ? later : 0;
        const std::int32_t most = batch.seq_lens[r] - unseen;
        seq_lens.push_back(lens[r] == 0 ? 0 : lens[r] - unseen);
        if (batch.device_lens.buffer != nullptr) bounds.push_back(most);
        const auto count = ceil_div(std::int64_t{most}, std::int64_t{block_size});
        const auto own = batch.pages.subspan(to_size(batch.pages_at[r]), to_size(count));
        pages.emplace_back(own.begin(), own.end());
      }
    }
  }
  /// Adds lengths and table; returns all pages.
  std::vector<std::int32_t> add_to(const CaseWriter& writer) const {
    std::size_t width = 0;
    for (const auto& own : pages) width = std::max(width, own.size());
    std::vector<std::int32_t> table(pages.size() * width), used;
    for (std::size_t r = 0; r < pages.size(); ++r) {
      std::copy(pages[r].begin(), pages[r].end(),
                table.begin() + static_cast<std::ptrdiff_t>(r * width));
      used.insert(used.end(), pages[r].begin(), pages[r].end());
    }
    add_indices(writer, "seq_lens", seq_lens);
    if (!bounds.empty()) add_indices(writer, "seq_len_bounds", bounds);
    writer.add("block_table",
               make_array("<i4", {std::ssize(pages), static_cast<std::int64_t>(width)},
                          std::span<const std::int32_t>(table)));
    return used;
  }
};

/// [tokens, heads]: the first `count` rows of LSEs, zeros behind them.
npy::NpyArray read_lse(const Queue& queue, const LseRef& from, std::int64_t tokens,
                       std::int64_t heads, std::int64_t count) {
  const bool packed = from.token_stride == 0 && from.head_stride == 0;
  const std::int64_t token_stride = packed ? heads : from.token_stride;
  const std::int64_t head_stride = packed ? 1 : from.head_stride;
  const std::int64_t span =
      count == 0 ? 0 : (count - 1) * token_stride + (heads - 1) * head_stride + 1;
  const auto stored =
      read_as<float>(queue, from.buffer, to_size(from.offset) * sizeof(float), span);
  std::vector<float> lse(to_size(tokens * heads));
  for (std::int64_t i = 0; i < count * heads; ++i)
    lse[to_size(i)] = stored[to_size(i / heads * token_stride + i % heads * head_stride)];
  return make_array("<f4", {tokens, heads}, std::span<const float>(lse));
}

/// `count` of the `num_tokens` rows of one side of a merge, zeros behind them.
void add_state(const CaseWriter& writer, const CapturedMerge& call, std::string_view name,
               const OutputWithLse& state, std::int64_t count) {
  const Queue queue = Queue::adopt(call.queue);
  const std::int64_t heads = call.config.num_heads, tokens = call.config.num_tokens;
  writer.add(fmt::format("{}_output", name),
             read_tensor(queue, state.output, call.config.dtype,
                         {tokens, heads, call.config.head_size}, count));
  writer.add(fmt::format("{}_lse", name), read_lse(queue, state.lse, tokens, heads, count));
}

/// A queue whose work is done.
Queue finished(cl_command_queue handle) {
  Queue queue = Queue::adopt(handle);
  queue.finish();
  return queue;
}

/// What an attention or a merge gave: rows [tokens, heads, width], as the array `name`.
struct ResultRows {
  const char* name;
  TensorRef output;
  DType dtype;
  std::vector<std::int64_t> shape;
  LseRef lse;            ///< no buffer: none
  cl_mem fp8 = nullptr;  ///< the rows once more, as e4m3; null: not wanted
};

AddResults row_results(std::filesystem::path place, cl_command_queue handle, ResultRows rows) {
  return [place = std::move(place), handle, rows = std::move(rows)] {
    const Queue queue = finished(handle);
    const CaseResults results(place);
    results.add(rows.name, read_tensor(queue, rows.output, rows.dtype, rows.shape));
    if (rows.fp8 != nullptr) {
      results.add("out_fp8", read_tensor(queue, {.buffer = rows.fp8}, DType::kFp8E4M3, rows.shape));
    }
    if (rows.lse.buffer == nullptr) return;
    const std::int64_t tokens = rows.shape[0];
    results.add("lse", read_lse(queue, rows.lse, tokens, rows.shape[1], tokens));
  };
}

AddResults attention_results(std::filesystem::path place, const CapturedAttention& call) {
  const AttentionConfig& config = call.config;
  return row_results(
      std::move(place), call.queue,
      {.name = "out",
       .output = call.output,
       .dtype = config.dtype,
       .shape = {call.batch.query_start_loc.back(), config.num_heads, config.output_head_size()},
       .lse = {.buffer = call.lse},
       .fp8 = config.output_fp8 ? call.options.output_fp8 : nullptr});
}

template <typename Cache>
AddResults cache_results(std::filesystem::path place, cl_command_queue handle, const Cache& cache,
                         std::vector<std::int32_t> pages) {
  return [place = std::move(place), handle, &cache, pages = std::move(pages)] {
    add_cache(CaseResults(place), finished(handle), cache, pages);
  };
}

template <typename Cache>
AddResults capture_write_to(const Cache& cache, const CapturedCacheWrite& call) {
  const Queue queue = Queue::adopt(call.queue);
  CaseWriter writer(environment().capture_dir, "reshape_and_cache");
  const std::vector<std::int64_t> shape = {call.slots.num_tokens, cache.num_kv_heads,
                                           cache.head_size};
  const WrittenSlots slots(queue, call.slots, cache);
  writer.add("key", read_tensor(queue, call.key, call.dtype, shape));
  writer.add("value", read_tensor(queue, call.value, call.dtype, shape));
  add_cache(writer, queue, cache, slots.add_to(writer));
  CaseKeys keys("reshape_and_cache");
  add_cache_keys(keys.text("dtype", to_string(call.dtype)), queue, cache);
  return cache_results(writer.commit(keys.json()), call.queue, cache, slots.pages);
}

}  // namespace

AddResults capture_attention(const CapturedAttention& call) {
  const AttentionConfig& config = call.config;
  const Queue queue = Queue::adopt(call.queue);
  CaseWriter writer(environment().capture_dir, "attention");
  writer.add("query",
             read_tensor(queue, call.query, config.dtype,
                         {call.batch.query_start_loc.back(), config.num_heads, config.head_size}));
  add_indices(writer, "query_start_loc", call.batch.query_start_loc);
  add_lengths(writer, queue, call.batch);
  add_options(writer, queue, call);
  CaseKeys keys = attention_keys(call);
  if (!config.contiguous_kv()) {
    add_pages(writer, queue, call);
    std::visit([&](const auto* cache) { add_cache_keys(keys, queue, *cache); }, call.cache);
    add_step_keys(keys, call);
    return attention_results(writer.commit(keys.json()), call);
  }
  const std::vector<std::int64_t> shape = {call.batch.pages_at.back(), config.num_kv_heads,
                                           config.head_size};
  writer.add("key", read_tensor(queue, call.key, config.dtype, shape));
  writer.add("value", read_tensor(queue, call.value, config.dtype, shape));
  add_indices(writer, "key_start_loc", call.batch.pages_at);
  add_step_keys(keys, call);
  return attention_results(writer.commit(keys.json()), call);
}

AddResults capture_cache_write(const CapturedCacheWrite& call) {
  return std::visit([&](const auto* cache) { return capture_write_to(*cache, call); }, call.cache);
}

AddResults capture_mla_decode(const CapturedMLADecode& call) {
  const MLAConfig& config = call.config;
  const Queue queue = Queue::adopt(call.queue);
  CaseWriter writer(environment().capture_dir, "mla_decode");
  writer.add("query", read_tensor(queue, call.query, config.dtype,
                                  {call.batch.query_start_loc.back(), config.num_heads,
                                   std::int64_t{config.kv_lora_rank} + config.rope_dim}));
  const TokenRequests requests(queue, call.batch, call.causal, config.block_size);
  add_cache(writer, queue, call.cache, requests.add_to(writer));
  CaseKeys keys("mla_decode");
  keys.text("dtype", to_string(config.dtype))
      .add("kv_lora_rank", config.kv_lora_rank)
      .number("scale", call.scale);
  add_plan_keys(keys, call.batch.plan, config.kernel_family);
  add_cache_keys(keys, queue, call.cache);
  std::filesystem::path place = writer.commit(keys.json());
  // Requests of several tokens become others, which may be cut otherwise and so give other bits.
  if (requests.seq_lens.size() != call.batch.seq_lens.size()) return {};
  return row_results(
      std::move(place), call.queue,
      {.name = "out",
       .output = call.output,
       .dtype = config.dtype,
       .shape = {call.batch.query_start_loc.back(), config.num_heads, config.kv_lora_rank},
       .lse = {.buffer = call.lse}});
}

AddResults capture_concat_and_cache_mla(cl_command_queue handle, const LatentWrite& call) {
  const MLACache& cache = call.cache;
  const Queue queue = Queue::adopt(handle);
  CaseWriter writer(environment().capture_dir, "concat_and_cache_mla");
  const WrittenSlots slots(queue, call.slots, cache);
  writer.add("kv_c", read_tensor(queue, call.kv_c, call.dtype,
                                 {call.slots.num_tokens, cache.kv_lora_rank}));
  writer.add("k_pe",
             read_tensor(queue, call.k_pe, call.dtype, {call.slots.num_tokens, cache.rope_dim}));
  add_cache(writer, queue, cache, slots.add_to(writer));
  CaseKeys keys("concat_and_cache_mla");
  add_cache_keys(keys.text("dtype", to_string(call.dtype)), queue, cache);
  return cache_results(writer.commit(keys.json()), handle, cache, slots.pages);
}

AddResults capture_merge(const CapturedMerge& call) {
  const MergeAttnStates& config = call.config;
  CaseWriter writer(environment().capture_dir, "merge_attn_states");
  std::int64_t with_context = config.prefill_tokens_with_context;
  if (with_context < 0 || with_context > config.num_tokens) with_context = config.num_tokens;
  add_state(writer, call, "prefix", call.prefix, with_context);
  add_state(writer, call, "suffix", call.suffix, config.num_tokens);
  CaseKeys keys("merge_attn_states");
  keys.text("dtype", to_string(config.dtype))
      .text("lse_base", config.lse_base == LseBase::k2 ? "2" : "e")
      .add("prefill_tokens_with_context", with_context);
  if (config.output_dtype && is_quantized(*config.output_dtype)) {
    keys.text("output_dtype", to_string(*config.output_dtype));
    if (config.output_scale) {
      add_floats(writer, "output_scale",
                 read_as<float>(Queue::adopt(call.queue), config.output_scale.handle(), 0, 1));
    }
  }
  const DType dtype = config.output_dtype.value_or(config.dtype);
  const char* const name = dtype == DType::kInt8 ? "out_int8" : "out_fp8";
  return row_results(writer.commit(keys.json()), call.queue,
                     {.name = is_quantized(dtype) ? name : "out",
                      .output = call.merged.output,
                      .dtype = dtype,
                      .shape = {config.num_tokens, config.num_heads, config.head_size},
                      .lse = call.merged.lse});
}

}  // namespace clattn::detail
