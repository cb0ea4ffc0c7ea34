#include <fmt/format.h>

#include <clattn/mla.hpp>
#include <vector>

#include "cli/check_mla.hpp"
#include "cli/check_report.hpp"
#include "cli/tune_target.hpp"

namespace clattn::cli {
namespace {

BenchModel model_of(const MLAConfig& config) {
  BenchModel model;
  model.name = "tune";
  model.heads = config.num_heads;
  model.kv_heads = 1;
  model.head_size = config.kv_lora_rank + config.rope_dim;
  model.rope_dim = config.rope_dim;
  model.block_size = config.block_size;
  model.scale = config.scale.value_or(0);
  model.dtype = config.dtype;
  model.kv_dtype = config.cache_dtype();
  return model;
}

}  // namespace

TuneTarget make_mla_target(const std::shared_ptr<Context>& context, const MLAConfig& config) {
  const DeviceCapabilities& device = context->capabilities();
  TuneTarget target;
  target.key.device = device.name;
  target.key.driver = device.driver_version;
  target.key.role = "mla_decode";
  target.key.head_size = config.kv_lora_rank;
  target.key.group = config.num_heads;
  target.key.dtype = config.dtype;
  target.key.cache_dtype = config.cache_dtype();
  target.key.pages = page_class(config.block_size);
  target.name =
      fmt::format("mla_decode, {} heads, {} + {}, {}", config.num_heads, config.kv_lora_rank,
                  config.rope_dim, types_of(config.dtype, config.cache_dtype()));
  target.kernel = [context, config]() -> std::optional<KernelInfo> {
    std::optional<KernelInfo> largest;
    for (const KernelInfo& kernel : make_mla_impl(*context, config)->kernels()) {
      if (kernel.role == "mla_decode") largest = kernel;
    }
    return largest;
  };
  target.check = [context, config] {
    Deviation deviation;
    for (const BatchFamily& batch : mla_batches()) {
      deviation.merge(compare_mla(context, config, batch, 7700).deviation);
    }
    return deviation;
  };
  const bool cpu = device.kind == DeviceKind::kCpu;
  for (const std::int32_t requests : cpu ? std::vector{1, 4} : std::vector{1, 32}) {
    target.workloads.push_back(
        timed_batch(context, model_of(config), "decode", requests, {1, cpu ? 256 : 2048}));
  }
  return target;
}

}  // namespace clattn::cli
