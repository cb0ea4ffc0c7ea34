#include <clattn/clattn.hpp>
#include <utility>

#include "cli/elements.hpp"
#include "cli/packed_call.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

/// What was asked for and what ran: the planner splits each sequence for itself, so the launches
/// tell. Partial results that attention kernels join themselves show in no merge.
json splits(const AttentionCall& call, const AttentionOutcome& outcome) {
  std::int64_t attention_tasks = 0, merge_tasks = 0;
  for (const LaunchReport& launch : outcome.launches) {
    if (launch.role == "cascade") continue;  // joins levels
    (launch.role == "merge" ? merge_tasks : attention_tasks) += launch.tasks;
  }
  return {{"requested", call.num_splits},
          {"attention_tasks", attention_tasks},
          {"merge_tasks", merge_tasks}};
}

json info(const Context& context, const AttentionCall& call, const AttentionOutcome& outcome) {
  const DeviceCapabilities& device = context.capabilities();
  return {{"op", "attention"},
          {"device", device.name},
          {"platform", device.platform_name},
          {"driver", device.driver_version},
          {"backend", outcome.backend},
          {"layout", call.packed ? "packed" : to_string(outcome.layout)},
          {"kernels", launches_info(outcome.launches)},
          {"build_failures", context.build_failures()},
          {"splits", splits(call, outcome)},
          {"times_us",
           {{"metadata", outcome.metadata_us},
            {"upload", outcome.upload_us},
            {"cache_write", outcome.cache_write_us},
            {"attention", outcome.attention_us}}}};
}

}  // namespace

void run_attention(CaseFile& file, const RunOptions& options, CaseOutputs& outputs) {
  const bool return_lse = file.boolean("return_lse", false);
  AttentionCall call = read_attention_call(file, options);  // before a device is touched
  const auto context = Context::create(options.device);
  call.layout = layout_on(*context, call.layout, call.config.kernel_family);
  AttentionOutcome outcome =
      call.packed ? execute_packed(context, call, 1) : execute(context, call);
  const AttentionConfig& config = call.config;
  const std::vector<std::int64_t> out_shape = {call.num_tokens(), config.num_heads,
                                               config.head_size};
  const std::vector<double> out = decode_elements(config.dtype, outcome.out);
  const std::vector<float> narrow(out.begin(), out.end());
  outputs.add("out", make_array("<f4", out_shape, std::span<const float>(narrow)));
  if (return_lse) {
    outputs.add("lse", make_array("<f4", {call.num_tokens(), config.num_heads},
                                  std::span<const float>(outcome.lse)));
  }
  if (config.output_fp8) {
    outputs.add("out_fp8", NpyArray{"|u1", out_shape, std::move(outcome.out_fp8)});
  }
  if (!config.contiguous_kv() && file.has_array("key")) {
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
