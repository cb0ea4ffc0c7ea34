#include <algorithm>
#include <clattn/config_fields.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "program/common/error.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// The keys of the types and of what decides the splits.
json step_keys(std::string_view op, const AttentionCall& call) {
  const PlanOptions& plan = call.plan;
  json keys = {{"op", op},
               {"dtype", to_string(call.config.dtype)},
               {"kv_cache_dtype", to_string(call.config.cache_dtype())},
               {"num_splits", call.num_splits},
               {"fast_build", plan.fast_build},
               {"side_by_side", plan.side_by_side}};
  if (call.padding > 0) keys["num_actual_tokens"] = call.num_tokens() + call.padding;
  if (plan.split_policy == SplitPolicy::kDeterministic) keys["split_policy"] = "deterministic";
  for (const auto& [key, limit] : kLimitKeys)
    if (plan.limits) keys[key] = (*plan.limits).*limit;
  return keys;
}

json attention_keys(const AttentionCall& call) {
  const AttentionConfig& config = call.config;
  json keys = step_keys("attention", call);
  for_each_field([&](const auto& row) {
    if (is_case_key(row) && row.is_set(config))
      keys[std::string(row.name)] = json::parse(json_text(config.*row.member));
  });
  keys.update({{"block_size", config.block_size},
               {"kv_cache_dtype", to_string(config.cache_dtype())},
               {"backend", call.backend.empty() ? "auto" : call.backend},
               {"return_lse", true},
               {"decode_threshold", call.plan.decode_threshold},
               {"common_prefix_len", call.common_prefix_len}});
  if (call.direction.empty()) keys["causal"] = call.causal;
  if (!call.span_start_loc.empty()) keys["use_spans"] = config.use_spans;
  if (call.layout) keys["layout"] = to_string(*call.layout);
  if (call.packed) keys["layout"] = "packed";
  if (call.scales.empty()) return keys;
  if (config.fp8_products) keys["q_scale"] = call.query_scale;
  const auto half = call.scales.begin() + static_cast<std::ptrdiff_t>(call.scales.size() / 2);
  const auto factors = [](auto begin, auto end) {
    return end - begin == 1 ? json(*begin) : json(std::vector<float>{begin, end});
  };
  keys["k_scale"] = factors(call.scales.begin(), half);
  keys["v_scale"] = factors(half, call.scales.end());
  return keys;
}

/// Lengths and pages; a batch without pages has none.
void add_batch(CaseOutputs& files, const BatchArrays& batch, bool paged) {
  files.add_values("query_start_loc", batch.query_start_loc);
  files.add_values("seq_lens", batch.seq_lens);
  if (!paged) return;
  files.add_values("block_table", batch.block_table,
                   {std::ssize(batch.seq_lens), batch.max_blocks});
}

void add_lists(CaseOutputs& files, const AttentionCall& call) {
  if (!call.direction.empty()) files.add_values("direction", call.direction);
  if (!call.first_keys.empty()) files.add_values("first_keys", call.first_keys);
  if (!call.keep_keys.empty()) files.add_values("keep_keys", call.keep_keys);
  if (call.config.use_trees) {
    files.add_values("tree_start_loc", call.tree_start_loc);
    files.add_values("tree_parents", call.tree_parents);
  }
  if (call.span_start_loc.empty()) return;
  files.add_values("span_start_loc", call.span_start_loc);
  files.add_values("spans", call.spans, {std::ssize(call.spans) / 2, 2});
}

void add_tensors(CaseOutputs& files, const AttentionCall& call) {
  const AttentionConfig& config = call.config;
  const std::int64_t tokens = call.num_tokens();
  const Extents rows = {tokens, config.num_kv_heads, config.head_size};
  files.add_elements("query", config.dtype, {tokens, config.num_heads, config.head_size},
                     call.query);
  if (!call.key.empty() || config.contiguous_kv()) {
    files.add_elements("key", config.dtype, rows, call.key);
    files.add_elements("value", config.dtype, {rows[0], rows[1], config.output_head_size()},
                       call.value);
  }
  if (!config.contiguous_kv()) {
    if (!call.key.empty()) files.add_values("slot_mapping", call.slot_mapping);
    Extents pages = {call.num_blocks, config.block_size, config.num_kv_heads, config.head_size};
    files.add_elements("key_cache", config.cache_dtype(), pages, call.cache.key);
    pages[3] = value_width(config);
    files.add_elements("value_cache", config.cache_dtype(), pages, call.cache.value);
  }
  for_each_field([&]<typename Value>(const ConfigField<Value>& row) {
    if constexpr (std::is_same_v<Value, std::vector<float>>)
      if (row.is_set(config)) files.add_values(std::string(row.name), config.*row.member);
  });
  if (config.output_fp8) files.add_values("output_scale", std::vector<float>{call.output_scale});
  if (config.custom_mask)
    files.add("custom_mask", NpyArray{"|u1", {tokens, call.max_seq_len()}, call.custom_mask});
}

void write_with_expected(CaseOutputs& files, const json& keys, const AttentionCall& call,
                         const std::filesystem::path& directory) {
  files.add("case", keys);
  files.write(directory);
  const oracle::AttentionResult truth = oracle_result(call);
  const Extents rows = {call.num_tokens(), call.config.num_heads};
  CaseOutputs expected;
  expected.add_floats("out", truth.out, {rows[0], rows[1], call.config.output_head_size()});
  expected.add_floats("lse", truth.lse, rows);
  expected.write(directory / "expected");
}

}  // namespace

void write_case(const AttentionCall& call, const std::filesystem::path& directory) {
  CaseOutputs files;
  add_batch(files, call, !call.config.contiguous_kv());
  add_lists(files, call);
  add_tensors(files, call);
  write_with_expected(files, attention_keys(call), call, directory);
}

namespace {

/// One past the last key that a query token sees, without a window: `later` tokens of its request
/// follow it.
std::int32_t seen_end(const AttentionCall& call, std::size_t request, std::int32_t later) {
  const std::int32_t seq_len = call.seq_lens[request], position = seq_len - 1 - later;
  const bool causal =
      call.direction.empty() ? call.causal : call.direction[request] == Direction::kCausal;
  std::int32_t end = causal ? position + 1 : seq_len;
  if (!call.config.use_spans || call.span_start_loc.empty()) return end;
  for (std::int32_t i = call.span_start_loc[request]; i < call.span_start_loc[request + 1]; ++i) {
    const std::int32_t first = call.spans[2 * to_size(i)], last = call.spans[2 * to_size(i) + 1];
    if (position >= first && position < last) end = std::max(end, std::min(last, seq_len));
  }
  return end;
}

/// What a query token that becomes a request sees of its keys; a draft's tree ends with itself.
void list_token(const AttentionCall& call, std::size_t request, std::int32_t later,
                AttentionCall& tokens) {
  if (call.config.use_first_keys)
    tokens.first_keys.push_back(std::min(call.first_keys[request], tokens.seq_lens.back()));
  if (!call.config.use_trees) return;
  const std::int32_t end = call.tree_start_loc[request + 1];
  for (std::int32_t node = call.tree_start_loc[request]; node < end - later; ++node)
    tokens.tree_parents.push_back(call.tree_parents[to_size(node)]);
  tokens.tree_start_loc.push_back(static_cast<std::int32_t>(tokens.tree_parents.size()));
}

}  // namespace

void write_latent_case(const AttentionCall& call, const std::filesystem::path& directory) {
  const AttentionConfig& config = call.config;
  AttentionCall tokens;
  tokens.config.use_trees = config.use_trees;
  tokens.query_start_loc = {0};
  if (config.use_trees) tokens.tree_start_loc = {0};
  tokens.max_blocks = call.max_blocks;
  for (std::size_t r = 0; r < call.seq_lens.size(); ++r) {
    const auto row = call.block_table.begin() + static_cast<std::ptrdiff_t>(r) * call.max_blocks;
    for (std::int32_t left = call.query_start_loc[r + 1] - call.query_start_loc[r]; left > 0;) {
      --left;
      tokens.seq_lens.push_back(seen_end(call, r, left));
      list_token(call, r, left, tokens);
      tokens.block_table.insert(tokens.block_table.end(), row, row + call.max_blocks);
      tokens.query_start_loc.push_back(tokens.query_start_loc.back() + 1);
    }
  }
  CaseOutputs files;
  add_batch(files, tokens, true);
  add_lists(files, tokens);
  files.add_elements("query", config.dtype, {call.num_tokens(), config.num_heads, config.head_size},
                     call.query);
  files.add_elements("kv_cache", config.cache_dtype(),
                     {call.num_blocks, config.block_size, config.head_size},
                     expected_cache(call).key);
  json keys = step_keys("mla_decode", call);
  keys["kv_lora_rank"] = config.output_head_size();
  keys["kernel_family"] = to_string(config.kernel_family);
  if (config.scale) keys["scale"] = *config.scale;
  if (!call.scales.empty()) keys["k_scale"] = call.scales[0];
  write_with_expected(files, keys, call, directory);
}

}  // namespace clattn::cli
