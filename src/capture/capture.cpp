#include "capture/capture.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <clattn/config_fields.hpp>
#include <cmath>
#include <utility>

#include "base/checked.hpp"
#include "capture/case.hpp"
#include "shared/sight.h"

namespace clattn::detail {
namespace {

/// The keys of what decides the splits. Those that captures add to the format (docs/cases.md) are
/// there only where they say something.
void add_plan_keys(CaseKeys& keys, const PlanRecord& plan) {
  keys.add("num_splits", plan.num_splits);
  if (plan.split_policy == SplitPolicy::kDeterministic) keys.text("split_policy", "deterministic");
  if (plan.limits) {
    keys.add("max_num_reqs", plan.limits->max_num_reqs)
        .add("max_num_batched_tokens", plan.limits->max_num_batched_tokens)
        .add("max_model_len", plan.limits->max_model_len);
  }
  if (plan.fast_build) keys.add("fast_build", true);
  if (!plan.side_by_side) keys.add("side_by_side", false);
}

/// The type of a cache is a key of the cache.
void add_attention_keys(CaseKeys& keys, const CapturedAttention& call) {
  for_each_field([&](const auto& row) {
    const bool always = row.name == "dtype" || row.name == "block_size";
    if (is_case_key(row) && row.name != "kv_cache_dtype" && (always || row.is_set(call.config)))
      keys.add(row.name, json_text(call.config.*row.member));
  });
  const PlanRecord& plan = call.batch.plan;
  const bool directed = call.config.use_directions && !call.batch.direction.empty();
  if (!directed) keys.add("causal", call.causal);
  keys.text("backend", call.batch.backend.empty() ? "auto" : call.batch.backend)
      .add("return_lse", call.tensors.lse != nullptr);
  add_plan_keys(keys, plan);
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
void add_lengths(const NewCase& made, const BatchRecord& batch) {
  made.add_values("seq_lens", lengths_of(made.queue, batch));
  if (batch.device_lens.buffer != nullptr) made.add_values("seq_len_bounds", batch.seq_lens);
}

/// The pages of this many tokens of a request.
std::span<const std::int32_t> pages_of(const BatchRecord& batch, std::size_t request,
                                       std::int32_t tokens, std::int32_t block_size) {
  return batch.pages.subspan(to_size(batch.pages_at[request]),
                             to_size(ceil_div(std::int64_t{tokens}, std::int64_t{block_size})));
}

/// Adds the pages of each request as a table; returns all of them.
std::vector<std::int32_t> add_table(const NewCase& made,
                                    const std::vector<std::span<const std::int32_t>>& pages) {
  std::size_t width = 0;
  for (const auto& own : pages) width = std::max(width, own.size());
  std::vector<std::int32_t> table(pages.size() * width), used;
  for (std::size_t r = 0; r < pages.size(); ++r) {
    std::ranges::copy(pages[r], table.begin() + static_cast<std::ptrdiff_t>(r * width));
    used.insert(used.end(), pages[r].begin(), pages[r].end());
  }
  made.add_values("block_table", table, {std::ssize(pages), static_cast<std::int64_t>(width)});
  return used;
}

/// The step's page ids as a table, the pages themselves and the keys of their cache.
void add_pages(NewCase& made, const CapturedAttention& call) {
  const BatchRecord& batch = call.batch;
  std::vector<std::span<const std::int32_t>> pages;
  pages.reserve(batch.seq_lens.size());
  for (std::size_t r = 0; r < batch.seq_lens.size(); ++r)
    pages.push_back(pages_of(batch, r, batch.seq_lens[r], call.config.block_size));
  const std::vector<std::int32_t> used = add_table(made, pages);
  const CaseCache cache = case_cache(call.cache);
  add_cache(made, cache, used);
  add_cache_keys(made, cache);
  if (!call.config.fp8_products || !cache.query_scale_at) return;
  // What queries are divided by before they are rounded to 8 bits.
  const std::size_t at = *cache.query_scale_at * sizeof(float);
  made.keys.number("q_scale", std::abs(read_as<float>(made.queue, cache.scales, at, 1).front()));
}

/// What the batch says of its requests beyond lengths, as far as the layer looks at it.
void add_lists(const NewCase& made, const CapturedAttention& call) {
  const BatchRecord& batch = call.batch;
  if (call.config.use_directions && !batch.direction.empty())
    made.add_values("direction", batch.direction);
  if (call.config.use_first_keys && !batch.first_keys.empty())
    made.add_values("first_keys", batch.first_keys);
  if (call.config.use_keep_keys && !batch.keep_keys.empty())
    made.add_values("keep_keys", batch.keep_keys);
  if (call.config.use_trees && !batch.tree_start_loc.empty()) {
    made.add_values("tree_start_loc", batch.tree_start_loc);
    made.add_values("tree_parents", batch.tree_parents);
  }
  if (!call.config.use_spans || batch.span_start_loc.empty()) return;
  made.add_values("span_start_loc", batch.span_start_loc);
  made.add_values("spans", batch.spans, {std::ssize(batch.spans) / 2, 2});
}

void add_options(const NewCase& made, const CapturedAttention& call) {
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if constexpr (std::is_same_v<Value, std::vector<float>>)
      if (row.is_set(call.config)) made.add_values(row.name, call.config.*row.member);
  });
  if (call.config.output_fp8) {
    made.add_values("output_scale", read_as<float>(made.queue, call.options.output_scale, 0, 1));
  }
  if (!call.config.custom_mask) return;
  const std::span<const std::int32_t> lens = call.batch.seq_lens;
  const std::int64_t width = lens.empty() ? 0 : *std::ranges::max_element(lens);
  const std::int64_t tokens = call.batch.query_start_loc.back();
  made.add("custom_mask", {"|u1",
                           {tokens, width},
                           read_rows(made.queue, call.options.custom_mask, 0, tokens,
                                     to_size(width), to_size(call.options.custom_mask_stride))});
}

/// Keys of a request that follow the last one that its query token sees, which `later` of its
/// tokens follow. Without a window nothing else decides what it sees before.
std::int32_t keys_behind(const CapturedMLADecode& call, std::size_t request, std::int32_t seq_len,
                         std::int32_t later) {
  const BatchRecord& batch = call.batch;
  const bool directed = call.config.use_directions && !batch.direction.empty();
  const bool causal = directed ? batch.direction[request] == Direction::kCausal : call.causal;
  if (!causal) return 0;
  if (!call.config.use_spans || batch.span_start_loc.empty()) return later;
  const std::int32_t position = seq_len - 1 - later;
  for (std::int32_t i = batch.span_start_loc[request]; i < batch.span_start_loc[request + 1]; ++i) {
    const std::int32_t first = batch.spans[2 * to_size(i)], end = batch.spans[2 * to_size(i) + 1];
    if (position >= first && position < end) return std::max(seq_len - end, 0);
  }
  return later;
}

/// First keys and trees of the requests that query tokens become. A draft's tree ends with itself.
class TokenLists {
 public:
  explicit TokenLists(const CapturedMLADecode& call)
      : batch_(call.batch),
        has_first_keys_(call.config.use_first_keys && !call.batch.first_keys.empty()),
        has_trees_(call.config.use_trees && !call.batch.tree_start_loc.empty()) {}

  void add_token(std::size_t request, std::int32_t seq_len, std::int32_t later) {
    if (has_first_keys_) first_keys_.push_back(std::min(batch_.first_keys[request], seq_len));
    if (!has_trees_) return;
    const auto first = to_size(batch_.tree_start_loc[request]);
    const auto end = to_size(batch_.tree_start_loc[request + 1]);
    const std::size_t nodes = end - first;
    const auto kept = batch_.tree_parents.subspan(first, nodes - std::min(nodes, to_size(later)));
    tree_parents_.insert(tree_parents_.end(), kept.begin(), kept.end());
    tree_start_loc_.push_back(static_cast<std::int32_t>(tree_parents_.size()));
  }
  void add_to(const NewCase& made) const {
    if (has_first_keys_) made.add_values("first_keys", first_keys_);
    if (!has_trees_) return;
    made.add_values("tree_start_loc", tree_start_loc_);
    made.add_values("tree_parents", tree_parents_);
  }

 private:
  const BatchRecord& batch_;
  bool has_first_keys_, has_trees_;
  std::vector<std::int32_t> first_keys_, tree_start_loc_ = {0}, tree_parents_;
};

/// Adds every query token of a batch as a request of its own that decodes: lengths, their bounds
/// where the device has the lengths, what it sees of them, and the table. Returns all pages.
std::vector<std::int32_t> add_token_requests(const NewCase& made, const CapturedMLADecode& call) {
  const BatchRecord& batch = call.batch;
  const std::vector<std::int32_t> lens = lengths_of(made.queue, batch);
  std::vector<std::int32_t> seq_lens, bounds;
  std::vector<std::span<const std::int32_t>> pages;
  TokenLists lists(call);
  for (std::size_t r = 0; r < lens.size(); ++r) {
    const std::int32_t query_len = batch.query_start_loc[r + 1] - batch.query_start_loc[r];
    for (std::int32_t later = query_len - 1; later >= 0; --later) {
      const std::int32_t unseen = keys_behind(call, r, lens[r], later);
      seq_lens.push_back(lens[r] == 0 ? 0 : lens[r] - unseen);
      bounds.push_back(batch.seq_lens[r] - unseen);
      pages.push_back(pages_of(batch, r, bounds.back(), call.config.block_size));
      lists.add_token(r, seq_lens.back(), later);
    }
  }
  made.add_values("seq_lens", seq_lens);
  lists.add_to(made);
  if (batch.device_lens.buffer != nullptr && !bounds.empty())
    made.add_values("seq_len_bounds", bounds);
  return add_table(made, pages);
}

/// [tokens, heads]: the first `count` rows of LSEs, zeros after them.
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
  return npy::array_of(lse, {tokens, heads});
}

/// `count` of the `num_tokens` rows of one side of a merge, zeros after them.
void add_state(const NewCase& made, const MergeAttnStates& config, std::string_view name,
               const OutputWithLse& state, std::int64_t count) {
  const std::int64_t heads = config.num_heads, tokens = config.num_tokens;
  made.add(fmt::format("{}_output", name), read_tensor(made.queue, state.output, config.dtype,
                                                       {tokens, heads, config.head_size}, count));
  made.add(fmt::format("{}_lse", name), read_lse(made.queue, state.lse, tokens, heads, count));
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

AddResults commit_rows(NewCase& made, ResultRows rows) {
  return made.commit([rows = std::move(rows)](const CaseResults& results, const Queue& queue) {
    results.add(rows.name, read_tensor(queue, rows.output, rows.dtype, rows.shape));
    if (rows.fp8 != nullptr) {
      results.add("out_fp8", read_tensor(queue, {.buffer = rows.fp8}, DType::kFp8E4M3, rows.shape));
    }
    if (rows.lse.buffer == nullptr) return;
    const std::int64_t tokens = rows.shape[0];
    results.add("lse", read_lse(queue, rows.lse, tokens, rows.shape[1], tokens));
  });
}

/// A case of a write to `cache`, all but the rows: slots, the pages that they touch, keys.
AddResults commit_write(NewCase& made, const SlotSource& written, DType dtype, CaseCache cache) {
  auto slots =
      read_as<std::int64_t>(made.queue, written.buffer, written.offset_bytes, written.num_tokens);
  std::vector<std::int32_t> pages;
  for (std::int64_t& slot : slots) {
    const std::int64_t page = slot / cache.shape[1];
    const bool stores = slot >= 0 && page < cache.shape[0];
    if (stores) pages.push_back(static_cast<std::int32_t>(page));
    if (!stores) slot = kPadSlotId;  // a case may only say so by -1
  }
  made.add_values("slot_mapping", slots);
  add_cache(made, cache, pages);
  made.keys.text("dtype", to_string(dtype));
  add_cache_keys(made, cache);
  return commit_cache(made, std::move(cache), std::move(pages));
}

}  // namespace

RunBatch::RunBatch(cl_command_queue queue, const BatchRecord& batch) : record_(batch) {
  if (batch.device_lists.buffer != nullptr) read_lists(queue, batch.device_lists);
  const LengthSource& device = batch.device_starts;
  if (device.buffer == nullptr) return;
  starts_ = read_as<std::int32_t>(Queue::adopt(queue), device.buffer, device.offset_bytes,
                                  std::ssize(batch.query_start_loc));
  // Of requests that the device left out they may be any numbers.
  std::int32_t least = 0;
  for (std::int32_t& start : starts_)
    least = start = std::clamp(start, least, batch.query_start_loc.back());
  record_.query_start_loc = starts_;
}

void RunBatch::read_lists(cl_command_queue queue, const ListSource& lists) {
  const Queue commands = Queue::adopt(queue);
  const auto requests = read_as<ClaListedRequest>(commands, lists.buffer, lists.requests_at,
                                                  std::ssize(record_.seq_lens));
  if (lists.directions) {
    for (const ClaListedRequest& request : requests)  // wrong ones, too: `clattn run` names them
      direction_.push_back(static_cast<Direction>(std::clamp(request.direction, 0, 255)));
    record_.direction = direction_;
  }
  if (!lists.trees || lists.tree_words == 0) return;
  const std::span<const std::int32_t> starts = record_.query_start_loc;
  const auto bits = read_as<std::uint32_t>(commands, lists.buffer, lists.tree_bits_at,
                                           std::int64_t{starts.back()} * lists.tree_words);
  tree_start_loc_ = {0};
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const std::int32_t nodes = std::clamp(requests[r].tree_nodes, 0, requests[r].widest.tree_nodes);
    const std::size_t first = tree_parents_.size();
    tree_parents_.resize(first + to_size(nodes), -1);
    tree_start_loc_.push_back(static_cast<std::int32_t>(tree_parents_.size()));
    for (std::int32_t row = starts[r]; nodes > 1 && row < starts[r + 1]; ++row) {
      std::int32_t before = -1;  // of the path to the row's node
      for (std::int32_t node = 0; node < nodes; ++node) {
        const std::size_t word = to_size(row * lists.tree_words + node / 32);
        if ((bits[word] >> (node % 32) & 1U) == 0) continue;
        tree_parents_[first + to_size(node)] = before;
        before = node;
      }
    }
  }
  record_.tree_start_loc = tree_start_loc_;
  record_.tree_parents = tree_parents_;
}

AddResults capture_attention(const CapturedAttention& call) {
  const AttentionConfig& config = call.config;
  NewCase made(call.queue, "attention");
  made.add_tensor("query", call.tensors.query, config.dtype,
                  {call.batch.query_start_loc.back(), config.num_heads, config.head_size});
  made.add_values("query_start_loc", call.batch.query_start_loc);
  add_lengths(made, call.batch);
  add_lists(made, call);
  add_options(made, call);
  add_attention_keys(made.keys, call);
  if (config.contiguous_kv()) {
    const std::vector<std::int64_t> shape = {call.batch.pages_at.back(), config.num_kv_heads,
                                             config.head_size};
    made.add_tensor("key", call.tensors.key, config.dtype, shape);
    made.add_tensor("value", call.tensors.value, config.dtype,
                    {shape[0], shape[1], config.output_head_size()});
    made.add_values("key_start_loc", call.batch.pages_at);
  } else {
    add_pages(made, call);
  }
  return commit_rows(made, {.name = "out",
                            .output = call.tensors.output,
                            .dtype = config.dtype,
                            .shape = {call.batch.query_start_loc.back(), config.num_heads,
                                      config.output_head_size()},
                            .lse = {.buffer = call.tensors.lse},
                            .fp8 = config.output_fp8 ? call.options.output_fp8 : nullptr});
}

AddResults capture_cache_write(const CapturedCacheWrite& call) {
  NewCase made(call.queue, "reshape_and_cache");
  CaseCache cache = case_cache(call.cache);
  const auto add = [&](std::string_view name, const TensorRef& rows, const CaseCache::Plane& of) {
    made.add_tensor(name, rows, call.dtype, {call.slots.num_tokens, cache.shape[2], of.width});
  };
  add("key", call.key, cache.planes.front());
  add("value", call.value, cache.planes.back());
  return commit_write(made, call.slots, call.dtype, std::move(cache));
}

AddResults capture_mla_decode(const CapturedMLADecode& call) {
  const MLAConfig& config = call.config;
  const std::int64_t tokens = call.batch.query_start_loc.back();
  NewCase made(call.queue, "mla_decode");
  made.add_tensor("query", call.tensors.query, config.dtype,
                  {tokens, config.num_heads, std::int64_t{config.kv_lora_rank} + config.rope_dim});
  const std::vector<std::int32_t> pages = add_token_requests(made, call);
  const CaseCache cache = case_cache(&call.cache);
  add_cache(made, cache, pages);
  made.keys.text("dtype", to_string(config.dtype))
      .add("kv_lora_rank", config.kv_lora_rank)
      .number("scale", call.scale);
  add_plan_keys(made.keys, call.batch.plan);
  if (config.kernel_family != KernelFamily::kAuto)
    made.keys.text("kernel_family", to_string(config.kernel_family));
  add_cache_keys(made, cache);
  AddResults add = commit_rows(made, {.name = "out",
                                      .output = call.tensors.output,
                                      .dtype = config.dtype,
                                      .shape = {tokens, config.num_heads, config.kv_lora_rank},
                                      .lse = {.buffer = call.tensors.lse}});
  // Requests of several tokens become others, which may be cut otherwise and so give other bits.
  return std::cmp_equal(tokens, call.batch.seq_lens.size()) ? add : AddResults{};
}

AddResults capture_concat_and_cache_mla(cl_command_queue handle, const LatentWrite& call) {
  const MLACache& cache = call.cache;
  NewCase made(handle, "concat_and_cache_mla");
  made.add_tensor("kv_c", call.kv_c, call.dtype, {call.slots.num_tokens, cache.kv_lora_rank});
  made.add_tensor("k_pe", call.k_pe, call.dtype, {call.slots.num_tokens, cache.rope_dim});
  return commit_write(made, call.slots, call.dtype, case_cache(&cache));
}

AddResults capture_merge(cl_command_queue handle, const MergeAttnStates& config,
                         const OutputWithLse& prefix, const OutputWithLse& suffix,
                         const OutputWithLse& merged) {
  NewCase made(handle, "merge_attn_states");
  std::int64_t with_context = config.prefill_tokens_with_context;
  if (with_context < 0 || with_context > config.num_tokens) with_context = config.num_tokens;
  add_state(made, config, "prefix", prefix, with_context);
  add_state(made, config, "suffix", suffix, config.num_tokens);
  made.keys.text("dtype", to_string(config.dtype))
      .text("lse_base", config.lse_base == LseBase::k2 ? "2" : "e")
      .add("prefill_tokens_with_context", with_context);
  if (config.output_dtype && is_quantized(*config.output_dtype)) {
    made.keys.text("output_dtype", to_string(*config.output_dtype));
    if (config.output_scale) {
      made.add_values("output_scale",
                      read_as<float>(made.queue, config.output_scale.handle(), 0, 1));
    }
  }
  const DType dtype = config.output_dtype.value_or(config.dtype);
  const char* const name = dtype == DType::kInt8 ? "out_int8" : "out_fp8";
  return commit_rows(made, {.name = is_quantized(dtype) ? name : "out",
                            .output = merged.output,
                            .dtype = dtype,
                            .shape = {config.num_tokens, config.num_heads, config.head_size},
                            .lse = merged.lse});
}

}  // namespace clattn::detail
