#include <clattn/mla.hpp>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "capture/capture.hpp"
#include "kernels/choose/config_reasons.hpp"
#include "kernels/launch/cache_write.hpp"
#include "kernels/launch/step_launch.hpp"
#include "kernels/step/cache_checks.hpp"
#include "kernels/step/paged_builder.hpp"
#include "opencl/copy.hpp"
#include "opencl/recorder.hpp"

namespace clattn::detail {

namespace {

ListRules latent_lists(const MLAConfig& config) {
  return {.spans = config.use_spans,
          .directions = config.use_directions,
          .first_keys = config.use_first_keys,
          .trees = config.use_trees};
}

KernelShape shape_of(const MLAConfig& config) {
  const ListRules lists = latent_lists(config);
  return {.num_heads = config.num_heads,
          .num_kv_heads = 1,
          .head_size = config.kv_lora_rank,
          .block_size = config.block_size,
          .dtype = config.dtype,
          .cache_dtype = config.cache_dtype(),
          .options = {.window = lists.any(), .listed_rows = lists.any(), .gaps = lists.gaps()},
          .form = CacheForm::kLatent,
          .rope_dim = config.rope_dim};
}

LayerCall layer_call(const MLACache& cache, float scale) {
  const cl_mem rows = cache.buffer.handle();
  LayerCall layer{.k = rows, .v = rows};
  layer.args.scale_log2e = scale * kLog2E;
  layer.args.scale_stride = cache.scale ? 0 : -1;
  layer.args.window_left = layer.args.window_right = -1;
  if (is_quantized(cache.dtype)) layer.add(cache.scale.handle());
  return layer;
}

class PagedMLAImpl final : public MLAImpl {
 public:
  PagedMLAImpl(const MLAConfig& config, std::shared_ptr<const AttentionKernels> kernels)
      : config_(config),
        scale_(softmax_scale(config.scale, config.kv_lora_rank + config.rope_dim)),
        kernels_(std::move(kernels)) {}

  const MLAConfig& config() const noexcept override { return config_; }

  void forward(cl_command_queue queue, const AttentionTensors& tensors, const MLACache& cache,
               const AttentionMetadata& metadata, Event* event,
               std::vector<LaunchRecord>* launches) const override {
    check_forward(queue, tensors, cache, metadata);
    const PagedStepView& step = *metadata.step();
    AddResults add;
    if (capturing()) {
      const RunBatch batch(queue, step.batch);
      add = capture_mla_decode(
          {queue, config_, batch.record(), step.causal != 0, tensors, cache, scale_});
    }
    LayerCall layer = layer_call(cache, scale_);
    launch_step(queue, *kernels_, step, tensors, layer, event, launches);
    add_results(add, queue);
  }

  void check_forward(cl_command_queue queue, const AttentionTensors& tensors, const MLACache& cache,
                     const AttentionMetadata& metadata) const override {
    check_layer_cache(cache, kernels_->shape);
    refuse_keys(tensors, "concat_and_cache_mla()");
    const PagedStepView& step = checked_step(metadata, queue, *kernels_);
    throw_invalid_if(step.lists != latent_lists(config_),
                     "attn_metadata: planned for other use_spans, use_directions, use_first_keys "
                     "or use_trees than this layer's; legal: a builder with the layer's own");
    check_block_ids(step.block_ids, cache.num_blocks);
    check_step_call(queue, *kernels_, step, tensors);
    check_apart(tensors, nullptr, kernels_->shape, num_rows(step, queue), {});
    require_context(
        {{"kv_cache", cache.buffer.handle()}, {"kv_cache: scale", cache.scale.handle()}},
        kernels_->runtime->context());
  }

  void warm_up(cl_command_queue queue) const override {
    const IdleMemory memory(queue, *kernels_);
    MLACache cache;
    cache.buffer = memory.zeros;
    if (is_quantized(kernels_->shape.cache_dtype)) cache.scale = memory.zeros;
    cache.dtype = kernels_->shape.cache_dtype;
    launch_idle_step(queue, *kernels_, layer_call(cache, scale_), memory);
    Queue::adopt(queue).finish();
  }

  std::vector<KernelInfo> kernels() const override { return describe_kernels(*kernels_); }
  std::vector<Candidate> candidates() const override { return kernels_->candidates; }

 private:
  MLAConfig config_;
  float scale_;
  std::shared_ptr<const AttentionKernels> kernels_;
};

std::shared_ptr<const AttentionKernels> checked_kernels(Context& context, const MLAConfig& config) {
  require_valid(kMLABackendName, validate_mla_configuration(config, &context.capabilities()));
  return attention_kernels(context.runtime(), shape_of(config), config.kernel_family);
}

}  // namespace
}  // namespace clattn::detail

namespace clattn {

std::vector<std::string> validate_mla_configuration(const MLAConfig& config,
                                                    const DeviceCapabilities* capabilities) {
  struct Field {
    std::string_view name;
    std::int32_t value, low, high, step;
  };
  const Field fields[] = {
      {"num_heads", config.num_heads, 1, detail::kMaxHeads, 1},
      {"kv_lora_rank", config.kv_lora_rank, kKVLoraRankStep, kMaxKVLoraRank, kKVLoraRankStep},
      {"rope_dim", config.rope_dim, 8, 64, 8},
      {"block_size", config.block_size, 1, 1 << 24, 1}};
  std::vector<std::string> reasons;
  for (const auto& [name, value, low, high, step] : fields) {
    detail::append_if(reasons, value < low || value > high || value % step != 0,
                      "{} is {}, supported: {} … {} in steps of {}", name, value, low, high, step);
  }
  detail::append_type_reasons(config.dtype, reasons);
  const DType stored = config.kv_cache_dtype.value_or(config.dtype);
  detail::append_if(reasons, codes_per_element(stored) > 1,
                    "kv_cache_dtype {} not supported by MLA: types of whole bytes are",
                    to_string(stored));
  const float scale = config.scale.value_or(0);
  detail::append_if(reasons, !std::isfinite(scale), "scale is {}, supported: finite numbers",
                    scale);
  if (capabilities == nullptr) return reasons;
  detail::append_missing_kernels({detail::Role::kMLADecode, detail::Role::kMerge},
                                 config.kernel_family, *capabilities, reasons);
  return reasons;
}

std::shared_ptr<const MLAImpl> make_mla_impl(Context& context, const MLAConfig& config) {
  return std::make_shared<detail::PagedMLAImpl>(config, detail::checked_kernels(context, config));
}

std::unique_ptr<AttentionMetadataBuilder> make_mla_builder(std::shared_ptr<Context> context,
                                                           const MLAConfig& config,
                                                           const BuilderOptions& options) {
  auto kernels = detail::checked_kernels(*context, config);
  return std::make_unique<detail::PagedMetadataBuilder<AttentionMetadata>>(
      std::move(context), std::move(kernels),
      detail::StepRules{
          .lists = detail::latent_lists(config), .backend = kMLABackendName, .only_decodes = true},
      options);
}

}  // namespace clattn
