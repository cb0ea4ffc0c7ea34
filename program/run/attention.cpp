#include <array>
#include <clattn/cache_ops.hpp>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "program/common/device_memory.hpp"
#include "program/common/elements.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// What was asked for and what ran: the planner splits each sequence for itself, so the launches
/// tell. Partial results that attention kernels join themselves show in no merge.
json splits(const AttentionCall& call, const AttentionOutcome& outcome) {
  std::int64_t attention_tasks = 0, merge_tasks = 0;
  for (const LaunchReport& launch : outcome.launches) {
    if (launch.role == kCascadeRole) continue;  // joins levels
    (launch.role == "merge" ? merge_tasks : attention_tasks) += launch.tasks;
  }
  return {{"requested", call.num_splits},
          {"attention_tasks", attention_tasks},
          {"merge_tasks", merge_tasks}};
}

json info(const Context& context, const AttentionCall& call, const AttentionOutcome& outcome) {
  json info = attention_info("attention", context, outcome);
  info.update({{"platform", context.capabilities().platform_name},
               {"layout", call.packed ? "packed" : to_string(outcome.layout)},
               {"splits", splits(call, outcome)},
               {"multiplies_fp8", outcome.multiplies_fp8},
               {"times_us",
                {{"metadata", outcome.metadata_us},
                 {"upload", outcome.upload_us},
                 {"cache_write", outcome.cache_write_us},
                 {"attention", outcome.attention_us}}}});
  return info;
}

/// Everything of a merge but its tensors; `seen` is its prefix_output.
MergeAttnStates read_merge(CaseFile& file, const NpyArray& seen) {
  constexpr std::array<std::string_view, 2> kBases = {"e", "2"};
  constexpr std::array<std::string_view, 3> kOutputTypes = {"fp8_e4m3", "fp8_e5m2", "int8"};
  MergeAttnStates config;
  config.dtype = read_dtype(file, seen, "prefix_output");
  config.num_tokens = seen.shape[0];
  require_extent(file, "num_heads", kHeads, seen.shape[1]);
  require_extent(file, "head_size", kHeadSize, seen.shape[2]);
  config.num_heads = static_cast<std::int32_t>(seen.shape[1]);
  config.head_size = static_cast<std::int32_t>(seen.shape[2]);
  config.prefill_tokens_with_context =
      file.integer("prefill_tokens_with_context", {0, config.num_tokens}, config.num_tokens);
  if (file.choice("lse_base", kBases, "e") == "2") config.lse_base = LseBase::k2;
  if (file.has("output_dtype") || file.has_array("output_scale"))
    config.output_dtype =
        parse_dtype(file.choice("output_dtype", kOutputTypes, "fp8_e4m3", dtype_name));
  file.refuse_unknown_keys();
  return config;
}

}  // namespace

void run_attention(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const bool return_lse = file.boolean("return_lse", false);
  AttentionCall call = read_attention_call(file, options);  // before a device is touched
  const auto context = Context::create(options.device);
  AttentionOutcome outcome = execute(context, call);
  const AttentionConfig& config = call.config;
  const std::vector<std::int64_t> out_shape = {call.num_tokens(), config.num_heads,
                                               config.output_head_size()};
  outputs.add_floats("out", decode_elements(config.dtype, outcome.out), out_shape);
  if (return_lse) outputs.add_values("lse", outcome.lse, {call.num_tokens(), config.num_heads});
  if (config.output_fp8) outputs.add("out_fp8", NpyArray{"|u1", out_shape, outcome.out_fp8});
  if (!config.contiguous_kv() && file.has_array("key")) {
    if (outcome.cache.key.empty()) outcome.cache = call.cache;
    add_caches(outputs, config, call.num_blocks, outcome.cache);
  }
  outputs.add("info", info(*context, call, outcome));
  if (options.verify) verify_outcome(call, outcome, outputs);
}

void run_merge_attn_states(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const NpyArray seen = file.array("prefix_output", "", {-1, -1, -1});
  MergeAttnStates config = read_merge(file, seen);
  const Extents lse_shape = {seen.shape[0], seen.shape[1]};
  const NpyArray prefix = file.array("prefix_output", descr_of(config.dtype), seen.shape);
  const NpyArray suffix = file.array("suffix_output", descr_of(config.dtype), seen.shape);
  const NpyArray prefix_lse = file.array("prefix_lse", "<f4", lse_shape);
  const NpyArray suffix_lse = file.array("suffix_lse", "<f4", lse_shape);
  std::optional<NpyArray> scale;
  if (file.has_array("output_scale")) scale = file.array("output_scale", "<f4", {1});
  const OnDevice on{Context::create(options.device)};
  const Buffer p = on.up(prefix.data), p_lse = on.up(prefix_lse.data);
  const Buffer s = on.up(suffix.data), s_lse = on.up(suffix_lse.data);
  const Buffer out = on.context->allocate(prefix.data.size());
  const Buffer lse = on.context->allocate(prefix_lse.data.size());
  Event event;
  const auto merge = [&](const MergeAttnStates& how) {
    merge_attn_states(*on.context, on.queue, how,
                      {{.buffer = out.handle()}, {.buffer = lse.handle()}},
                      {{.buffer = p.handle()}, {.buffer = p_lse.handle()}},
                      {{.buffer = s.handle()}, {.buffer = s_lse.handle()}}, &event);
  };
  if (config.output_dtype) {  // in the same memory, before the output itself
    if (scale) config.output_scale = on.up(scale->data);
    merge(config);
    const std::size_t count = prefix.data.size() / element_size_bytes(config.dtype);
    outputs.add_elements(config.output_dtype == DType::kInt8 ? "out_int8" : "out_fp8",
                         *config.output_dtype, seen.shape, on.down<std::byte>(out, count));
    config.output_dtype = std::nullopt;
    config.output_scale = {};
  }
  merge(config);
  const auto merged = on.down<std::byte>(out, prefix.data.size());
  outputs.add_floats("out", decode_elements(config.dtype, merged), seen.shape);
  outputs.add_elements("lse", DType::kF32, lse_shape,
                       on.down<std::byte>(lse, prefix_lse.data.size()));
  outputs.add("info", device_info("merge_attn_states", *on.context, event));
}

}  // namespace clattn::cli
