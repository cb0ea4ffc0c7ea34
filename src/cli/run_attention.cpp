#include <fmt/format.h>

#include <array>
#include <clattn/clattn.hpp>
#include <cmath>
#include <utility>

#include "cli/elements.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// Options of the format that change results and that the library cannot honour yet: a neutral
/// value is accepted, any other is refused by name.
void refuse_unsupported_options(CaseFile& file) {
  refuse_option(file.integer("sliding_window", {1, INT32_MAX}, 0) > 0, "sliding_window");
  refuse_option(file.integer("attention_chunk_size", {1, INT32_MAX}, 0) > 0,
                "attention_chunk_size");
  refuse_option(file.has("logits_soft_cap") && file.number("logits_soft_cap") != 0,
                "logits_soft_cap");
  constexpr std::array<std::string_view, 4> kTypes = {"decoder", "encoder", "encoder_only",
                                                      "encoder_decoder"};
  const std::string type = file.choice("attn_type", kTypes, "decoder");
  refuse_option(type != "decoder", fmt::format("attn_type {}", type));
  for (const char* array : {"alibi_slopes", "sinks", "custom_mask", "output_scale"}) {
    refuse_option(file.has_array(array), array);
  }
}

AttentionConfig read_config(CaseFile& file) {
  AttentionConfig config;
  config.num_heads = static_cast<std::int32_t>(file.integer("num_heads", kHeads));
  config.num_kv_heads = static_cast<std::int32_t>(file.integer("num_kv_heads", kHeads));
  if (config.num_heads % config.num_kv_heads != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("case.json: num_heads: {} is not a multiple of num_kv_heads = {}",
                            config.num_heads, config.num_kv_heads));
  }
  config.head_size = static_cast<std::int32_t>(file.integer("head_size", kHeadSize));
  config.block_size = static_cast<std::int32_t>(file.integer("block_size", kBlockSize));
  config.dtype = read_dtype(file);
  config.kv_cache_dtype = read_kv_cache_dtype(file);
  if (file.has("scale")) config.scale = static_cast<float>(file.number("scale"));
  return config;
}

/// The tensors of the call; slots past the last token are padding and dropped.
void read_tensors(const CaseFile& file, AttentionCall& call) {
  const AttentionConfig& config = call.config;
  const std::int64_t tokens = call.num_tokens();
  const std::array<std::int64_t, 3> query_shape = {tokens, config.num_heads, config.head_size};
  const std::array<std::int64_t, 3> key_shape = {tokens, config.num_kv_heads, config.head_size};
  call.query = file.array("query", descr_of(config.dtype), query_shape).data;
  if (file.has_array("key") != file.has_array("value")) {
    throw Error(ErrorCode::kInvalidArgument, "key.npy, value.npy: expected both or neither");
  }
  if (file.has_array("slot_mapping") || file.has_array("key")) {
    call.slot_mapping = file.indices64("slot_mapping", std::array<std::int64_t, 1>{-1});
    if (std::cmp_less(call.slot_mapping.size(), tokens)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("slot_mapping.npy: holds {} slots; expected at least {}, one a token",
                              call.slot_mapping.size(), tokens));
    }
    call.slot_mapping.resize(static_cast<std::size_t>(tokens));
  }
  if (file.has_array("key")) {
    call.key = file.array("key", descr_of(config.dtype), key_shape).data;
    call.value = file.array("value", descr_of(config.dtype), key_shape).data;
  }
  const std::string_view cache_type = descr_of(config.cache_dtype());
  NpyArray keys = file.array(
      "key_cache", cache_type,
      std::array<std::int64_t, 4>{-1, config.block_size, config.num_kv_heads, config.head_size});
  call.num_blocks = keys.shape[0];
  call.cache = {std::move(keys.data), file.array("value_cache", cache_type, keys.shape).data};
}

AttentionCall read_call(CaseFile& file, const RunOptions& options) {
  AttentionCall call;
  call.config = read_config(file);
  call.causal = file.boolean("causal", true);
  call.num_splits = static_cast<std::int32_t>(file.integer("num_splits", {0, 65536}, 0));
  call.backend = read_backend(file, options);
  call.layout = read_layout(file);
  static_cast<void>(file.integer("common_prefix_len", kCount, 0));  // never changes results
  read_unit_scales(file, call.config.num_kv_heads);
  refuse_unsupported_options(file);
  BatchArrays batch = read_batch(file);
  if (batch.query_start_loc.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("query_start_loc.npy: missing; expected {} prefix sums",
                            batch.seq_lens.size() + 1));
  }
  call.query_start_loc = std::move(batch.query_start_loc);
  call.seq_lens = std::move(batch.seq_lens);
  call.block_table = std::move(batch.block_table);
  call.max_blocks = batch.max_blocks;
  return call;
}

/// What was asked for and what ran: the planner splits each sequence for itself, so the launches
/// tell. A token whose keys were split has its partial results merged, one work-group a head.
json splits(const AttentionCall& call, const AttentionOutcome& outcome) {
  std::int64_t attention_groups = 0, merge_groups = 0;
  for (const LaunchReport& launch : outcome.launches) {
    (launch.role == "merge" ? merge_groups : attention_groups) += launch.work_groups;
  }
  return {{"requested", call.num_splits},
          {"merged_tokens", merge_groups / call.config.num_heads},
          {"attention_work_groups", attention_groups}};
}

json info(const Context& context, const AttentionCall& call, const AttentionOutcome& outcome) {
  const DeviceCapabilities& device = context.capabilities();
  json kernels = json::array();
  for (const LaunchReport& launch : outcome.launches) {
    kernels.push_back({{"name", launch.kernel},
                       {"role", launch.role},
                       {"work_groups", launch.work_groups},
                       {"work_group_size", launch.work_group_size},
                       {"time_us", launch.time_us}});
  }
  return {{"op", "attention"},
          {"device", device.name},
          {"platform", device.platform_name},
          {"driver", device.driver_version},
          {"backend", outcome.backend},
          {"layout", to_string(outcome.layout)},
          {"kernels", kernels},
          {"splits", splits(call, outcome)},
          {"times_us",
           {{"metadata", outcome.metadata_us},
            {"upload", outcome.upload_us},
            {"cache_write", outcome.cache_write_us},
            {"attention", outcome.attention_us}}}};
}

}  // namespace

void run_attention(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  // Everything is checked before a device is touched: the batch first, because it says how large
  // the tensors must be; then its blocks and slots, once the cache's size is known.
  const bool return_lse = file.boolean("return_lse", false);
  AttentionCall call = read_call(file, options);
  file.refuse_unknown_keys();
  validate_batch(call.batch(), call.config.block_size, -1);
  read_tensors(file, call);
  validate_batch(call.batch(), call.config.block_size, call.num_blocks);

  const auto context = Context::create(options.device);
  AttentionOutcome outcome = execute(context, call);
  const AttentionConfig& config = call.config;
  const std::int64_t tokens = call.num_tokens();
  const std::vector<double> out = decode_elements(config.dtype, outcome.out);
  const std::vector<float> narrow(out.begin(), out.end());
  outputs.add("out", make_array("<f4", {tokens, config.num_heads, config.head_size},
                                std::span<const float>(narrow)));
  if (return_lse) {
    outputs.add("lse",
                make_array("<f4", {tokens, config.num_heads}, std::span<const float>(outcome.lse)));
  }
  if (file.has_array("key")) {
    if (outcome.cache.key.empty()) outcome.cache = call.cache;
    const std::string type(descr_of(config.cache_dtype()));
    const std::vector<std::int64_t> shape = {call.num_blocks, config.block_size,
                                             config.num_kv_heads, config.head_size};
    outputs.add("key_cache_out", NpyArray{type, shape, std::move(outcome.cache.key)});
    outputs.add("value_cache_out", NpyArray{type, shape, std::move(outcome.cache.value)});
  }
  outputs.add("info", info(*context, call, outcome));
}

}  // namespace clattn::cli
