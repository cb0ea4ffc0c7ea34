#include <clattn/mla.hpp>
#include <vector>

#include "cli/check_mla.hpp"
#include "cli/tune_target.hpp"

namespace clattn::cli {

TuneTarget make_mla_target(const std::shared_ptr<Context>& context, const TuneShape& shape) {
  MLAConfig config;
  config.num_heads = shape.config.num_heads;
  config.kv_lora_rank = shape.config.output_head_size();
  config.rope_dim = shape.config.rope_dim;
  config.block_size = shape.config.block_size;
  config.dtype = shape.config.dtype;
  config.kv_cache_dtype = shape.config.kv_cache_dtype;
  config.scale = shape.config.scale;
  TuneTarget target;
  target.key = shape.key(context->capabilities());
  target.name = shape.name();
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
  const bool cpu = context->capabilities().kind == DeviceKind::kCpu;
  for (const std::int32_t requests : cpu ? std::vector{1, 4} : std::vector{1, 32}) {
    target.workloads.push_back(
        timed_batch(context, shape.model(), "decode", requests, {1, cpu ? 256 : 2048}));
  }
  return target;
}

}  // namespace clattn::cli
